//! Answers look-ups of programs without proxy support.
//!
//! They get an address that leads nowhere, made for the name out of 198.18.0.0/15, which is for tests of network devices
//! and which no host of the internet has (RFC 2544). When they connect to it the server knows which name is meant, and
//! lets the rules decide about that. The addresses that the name really has are looked up for the connection.

use std::collections::VecDeque;
use std::net::Ipv4Addr;

use super::Exits;
use super::connect::look_up;
use super::dns::{Answer, Kind, Question};
use super::gate::Gate;
use crate::sync::{Mutex, lock};

/// The port of name servers. A look-up that is refused is listed with it.
pub(super) const DNS_PORT: u16 = 53;

/// The first address; those of the next 16 bits and one more are for names.
const FIRST: u32 = u32::from_be_bytes([198, 18, 0, 1]);

/// How many addresses there are before they are given again.
const ADDRESSES: u32 = (1 << 17) - 2;

/// Names that are known at once. Programs forget an address sooner than that many others were looked up.
const MAX_NAMES: usize = 1024;

/// The names of one gate, and their addresses.
#[derive(Default)]
pub(super) struct Names {
    /// Guards the names, the newest last, with the number of their address.
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    next: u32,
    names: VecDeque<(u32, Box<str>)>,
}

impl Names {
    /// The name that an address was made for.
    pub(super) fn of(&self, address: Ipv4Addr) -> Option<String> {
        let number = address.to_bits().checked_sub(FIRST)?;
        let known = lock(&self.known);
        let found = known.names.iter().find(|(own, _)| *own == number);
        found.map(|(_, name)| name.to_string())
    }

    fn address_of(&self, name: &str) -> Option<Ipv4Addr> {
        lock(&self.known).address_of(name)
    }

    /// The address of a name that may have none yet.
    fn add(&self, name: &str) -> Ipv4Addr {
        let mut known = lock(&self.known);
        if let Some(address) = known.address_of(name) {
            return address;
        }
        let number = known.next;
        known.next = (number + 1) % ADDRESSES;
        if known.names.len() == MAX_NAMES {
            known.names.pop_front();
        }
        known.names.push_back((number, name.into()));
        address(number)
    }
}

impl Known {
    fn address_of(&self, name: &str) -> Option<Ipv4Addr> {
        let found = self.names.iter().find(|(_, known)| **known == *name);
        found.map(|(number, _)| address(*number))
    }
}

fn address(number: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(FIRST + number)
}

/// Whether an address is one of those that are made for names.
pub(super) fn stands_for_a_name(address: Ipv4Addr) -> bool {
    let number = address.to_bits().checked_sub(FIRST);
    number.is_some_and(|number| number < ADDRESSES)
}

/// Answers a question without asking anybody; `None` if the name has to be looked up for that.
pub(super) fn answer_at_once(exits: &Exits, gate: &Gate, question: &Question) -> Option<Answer> {
    if !question.is_understood {
        return Some(Answer::NotImplemented);
    }
    let Some(host) = &question.host else {
        return Some(Answer::NoHost);
    };
    let verdict = gate.filter().judge_look_up(host);
    if !verdict.is_allowed {
        // Programs ask for addresses of both families.
        if question.kind == Kind::Ipv4 {
            exits.note(host, DNS_PORT, &verdict);
        }
        return Some(Answer::NoHost);
    }
    match question.kind {
        Kind::Ipv4 => {}
        Kind::Ipv6 => return Some(Answer::Nothing),
        Kind::Other => return Some(Answer::NotImplemented),
    }
    let names = gate.names();
    let address = names.address_of(host);
    // The names are the look-up of the client's own proxy.
    let address = address.or_else(|| gate.filter().upstream.as_ref().map(|_| names.add(host)));
    address.map(Answer::Address)
}

/// Answers a question, and looks the name up if need be.
pub(super) fn answer(exits: &Exits, gate: &Gate, question: &Question) -> Answer {
    answer_at_once(exits, gate, question).unwrap_or_else(|| {
        let host = question.host.as_deref().unwrap_or_default();
        // Only whether there is such a host: programs go through the domains of their search list by that.
        match look_up(host) {
            Ok(_) => Answer::Address(gate.names().add(host)),
            Err(error) if is_unknown(&error) => Answer::NoHost,
            Err(_) => Answer::Failed,
        }
    })
}

/// Whether a look-up failed because there is no such host. The standard library has no kind for that: it has the texts of
/// the C library, which is part of the program.
fn is_unknown(error: &std::io::Error) -> bool {
    let text = error.to_string();
    let texts = ["Name does not resolve", "Name has no usable address"];
    texts.iter().any(|known| text.ends_with(known))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_keeps_its_address_and_the_oldest_are_forgotten() {
        let names = Names::default();
        let first = names.add("first.example");
        assert_eq!(first, Ipv4Addr::new(198, 18, 0, 1));
        assert_eq!(names.add("first.example"), first);
        assert_eq!(names.of(first).as_deref(), Some("first.example"));
        assert_eq!(names.of(Ipv4Addr::new(198, 18, 0, 2)), None);
        assert_eq!(names.of(Ipv4Addr::new(10, 0, 0, 1)), None);
        for number in 0..MAX_NAMES {
            names.add(&format!("{number}.example"));
        }
        assert_eq!(names.of(first), None);
        assert_eq!(names.address_of("first.example"), None);
        // Its address is not given to another name soon.
        assert_ne!(names.add("first.example"), first);
    }

    #[test]
    fn addresses_begin_again_within_their_network() {
        let names = Names::default();
        lock(&names.known).next = ADDRESSES - 1;
        assert_eq!(names.add("last"), Ipv4Addr::new(198, 19, 255, 254));
        assert_eq!(names.add("next"), Ipv4Addr::new(198, 18, 0, 1));
    }
}
