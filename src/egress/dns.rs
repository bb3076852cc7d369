//! Messages of DNS (RFC 1035): questions are read, and answers with one address or none are written.
//!
//! A pure codec.

use std::net::Ipv4Addr;

use crate::spec::network::Host;

/// Bytes of a message's header.
const HEADER_BYTES: usize = 12;

/// Most bytes of a name in a message, with the lengths of its labels (RFC 1035 section 2.3.4).
const MAX_NAME_BYTES: usize = 255;

/// Most bytes of a label. The two bits above are those of a pointer, which no question needs.
const MAX_LABEL_BYTES: usize = 63;

/// The class of the internet.
const INTERNET: u16 = 1;

// Types of records (RFC 1035, RFC 3596).
const IPV4: u16 = 1;
const IPV6: u16 = 28;

// Bits of the header's second word.
const IS_ANSWER: u16 = 0x8000;
const OPERATION: u16 = 0x7800;
const RECURSION_WANTED: u16 = 0x0100;
const RECURSION_OFFERED: u16 = 0x0080;

/// How long programs may keep an address, in seconds.
const KEPT_SECONDS: u32 = 60;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Question {
    /// Chosen by who asks.
    id: u16,
    flags: u16,
    /// As it came, for the answer.
    section: Vec<u8>,
    /// The host that it is about; `None` if the name cannot be one's.
    pub(super) host: Option<String>,
    /// What it asks for.
    pub(super) kind: Kind,
    /// Whether its class and operation are the usual ones.
    pub(super) is_understood: bool,
}

/// What a question asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Ipv4,
    Ipv6,
    /// Records of another type.
    Other,
}

/// What is said about a question.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// The host has this address.
    Address(Ipv4Addr),
    /// The host exists, and has nothing of what was asked for.
    Nothing,
    /// There is no such host.
    NoHost,
    /// Nobody can tell now.
    Failed,
    /// Such questions are not answered here.
    NotImplemented,
}

impl Question {
    /// Reads a message; `None` if it is no question that could be answered.
    pub(super) fn parse(message: &[u8]) -> Option<Self> {
        let word = |at: usize| {
            let bytes = message.get(at..at + 2)?;
            Some(u16::from_be_bytes([bytes[0], bytes[1]]))
        };
        let (id, flags, count) = (word(0)?, word(2)?, word(4)?);
        if flags & IS_ANSWER != 0 || count != 1 || message.len() < HEADER_BYTES {
            return None;
        }
        let mut at = HEADER_BYTES;
        let mut labels = Vec::new();
        loop {
            let length = usize::from(*message.get(at)?);
            at += 1;
            if length == 0 {
                break;
            }
            let label = message.get(at..at + length)?;
            at += length;
            if length > MAX_LABEL_BYTES || at - HEADER_BYTES >= MAX_NAME_BYTES {
                return None;
            }
            labels.push(label);
        }
        let (kind, class) = (word(at)?, word(at + 2)?);
        let is_plain = |label: &&[u8]| !label.contains(&b'.');
        let name = labels.iter().all(is_plain).then(|| labels.join(&b'.'));
        let host = name.and_then(
            |name| match Host::parse(std::str::from_utf8(&name).ok()?)? {
                Host::Name(name) => Some(name),
                Host::Address(_) => None,
            },
        );
        Some(Self {
            id,
            flags,
            section: message[HEADER_BYTES..at + 4].to_vec(),
            host,
            kind: match kind {
                IPV4 => Kind::Ipv4,
                IPV6 => Kind::Ipv6,
                _ => Kind::Other,
            },
            is_understood: class == INTERNET && flags & OPERATION == 0,
        })
    }

    /// The message that answers it.
    pub(super) fn answered(&self, answer: Answer) -> Vec<u8> {
        let code = match answer {
            Answer::Address(_) | Answer::Nothing => 0,
            Answer::Failed => 2,
            Answer::NoHost => 3,
            Answer::NotImplemented => 4,
        };
        let asked = self.flags & (OPERATION | RECURSION_WANTED);
        let flags = IS_ANSWER | asked | RECURSION_OFFERED | code;
        let answers = u16::from(matches!(answer, Answer::Address(_)));
        let header = [self.id, flags, 1, answers, 0, 0].map(u16::to_be_bytes);
        let mut message = header.concat();
        message.extend_from_slice(&self.section);
        if let Answer::Address(address) = answer {
            // A pointer to the name of the question.
            message.extend_from_slice(&[0xc0, 12]);
            message.extend([IPV4, INTERNET].map(u16::to_be_bytes).concat());
            message.extend_from_slice(&KEPT_SECONDS.to_be_bytes());
            message.extend_from_slice(&4_u16.to_be_bytes());
            message.extend_from_slice(&address.octets());
        }
        message
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzz;

    /// A question for addresses of a host, as RFC 1035 draws it.
    fn message(id: u16, labels: &[&[u8]], kind: u16, class: u16) -> Vec<u8> {
        let mut message = [id, RECURSION_WANTED, 1, 0, 0, 0]
            .map(u16::to_be_bytes)
            .concat();
        for label in labels {
            message.push(u8::try_from(label.len()).unwrap());
            message.extend_from_slice(label);
        }
        message.push(0);
        message.extend([kind, class].map(u16::to_be_bytes).concat());
        message
    }

    #[test]
    fn a_question_is_read_and_answered() {
        let asked = message(7, &[b"Pypi", b"org"], IPV4, INTERNET);
        let question = Question::parse(&asked).unwrap();
        assert_eq!(question.host.as_deref(), Some("pypi.org"));
        assert!(question.kind == Kind::Ipv4 && question.is_understood);
        let answer = question.answered(Answer::Address([198, 18, 0, 1].into()));
        // The question comes back as it was written.
        assert_eq!(
            answer,
            b"\0\x07\x81\x80\0\x01\0\x01\0\0\0\0\x04Pypi\x03org\0\0\x01\0\x01\
              \xc0\x0c\0\x01\0\x01\0\0\0\x3c\0\x04\xc6\x12\0\x01"
        );
        let refused = question.answered(Answer::NoHost);
        assert_eq!(refused[..8], *b"\0\x07\x81\x83\0\x01\0\0");
        assert_eq!(refused[12..], asked[12..]);
    }

    #[test]
    fn questions_of_other_kinds_are_known() {
        let parsed = |labels: &[&[u8]], kind, class| {
            Question::parse(&message(1, labels, kind, class)).unwrap()
        };
        assert_eq!(parsed(&[b"a"], 28, INTERNET).kind, Kind::Ipv6);
        assert_eq!(parsed(&[b"a"], 33, INTERNET).kind, Kind::Other);
        assert!(!parsed(&[b"a"], IPV4, 3).is_understood);
        for labels in [
            &[b"a b" as &[u8]] as &[&[u8]],
            &[],
            &[b"a.b"],
            &[b"\xff"],
            // A name that would be taken for an address.
            &[b"10", b"0", b"0", b"1"],
        ] {
            assert_eq!(parsed(labels, IPV4, INTERNET).host, None, "{labels:?}");
        }
    }

    #[test]
    fn what_is_no_question_has_no_answer() {
        let question = message(1, &[b"a"], IPV4, INTERNET);
        for length in 0..question.len() {
            assert_eq!(Question::parse(&question[..length]), None, "{length}");
        }
        for (at, byte) in [(2, 0x80), (5, 0), (5, 2), (12, 64), (12, 0xc0)] {
            let mut changed = question.clone();
            changed[at] = byte;
            assert_eq!(Question::parse(&changed), None, "{at}");
        }
        let long = [&[b'a'; 63] as &[u8]; 4];
        assert_eq!(Question::parse(&message(1, &long, IPV4, INTERNET)), None);
    }

    #[test]
    fn fuzz_questions() {
        let tokens: [&[u8]; 4] = [b"\x03www", b"\x07example", b"\0\0\x01\0\x01", b"\xc0\x0c"];
        fuzz::check("dns", &tokens, |bytes| {
            let Some(question) = Question::parse(bytes) else {
                return;
            };
            let address = Answer::Address([198, 18, 0, 1].into());
            for (answer, more) in [(Answer::NoHost, 0), (address, 16)] {
                let message = question.answered(answer);
                assert_eq!(message[..2], bytes[..2]);
                let asked = message.len() - more;
                assert_eq!(message[12..asked], bytes[12..asked]);
                assert!(asked <= HEADER_BYTES + MAX_NAME_BYTES + 4);
            }
            if let Some(host) = question.host {
                assert_eq!(Host::parse(&host), Some(Host::Name(host)));
            }
        });
    }
}
