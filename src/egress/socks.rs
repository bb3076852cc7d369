//! SOCKS 5 (RFC 1928) without authentication towards commands, and with a user and a password (RFC 1929) towards a
//! proxy of the client's own. Only `CONNECT`.

use std::io::{self, Read, Write};
use std::net::IpAddr;

use crate::spec::network::{Host, Upstream};

/// The version, the first byte that a client sends.
pub(super) const VERSION: u8 = 5;

/// Methods of authentication.
const NONE: u8 = 0;
const PASSWORD: u8 = 2;
const NOT_ACCEPTED: u8 = 0xff;

/// The command to connect.
const CONNECT: u8 = 1;

/// Types of addresses.
const IPV4: u8 = 1;
const NAME: u8 = 3;
const IPV6: u8 = 4;

/// What an answer says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Reply {
    Succeeded = 0,
    Failed = 1,
    NotAllowed = 2,
    HostUnreachable = 4,
    Refused = 5,
    CommandUnknown = 7,
    AddressTypeUnknown = 8,
}

/// Answers a request.
///
/// # Errors
/// The client has gone.
pub(super) fn reply(mut client: impl Write, reply: Reply) -> io::Result<()> {
    // The address and the port of the connection matter to nobody.
    client.write_all(&[VERSION, reply as u8, 0, IPV4, 0, 0, 0, 0, 0, 0])
}

/// Reads what a client asks for; `None` if that was refused.
///
/// # Errors
/// The client has gone, is too slow, or does not speak SOCKS.
pub(super) fn read_request(client: &mut (impl Read + Write)) -> io::Result<Option<(Host, u16)>> {
    let [version, count] = read(client)?;
    let mut methods = vec![0; count.into()];
    client.read_exact(&mut methods)?;
    check_version(version)?;
    let accepts_none = methods.contains(&NONE);
    let method = if accepts_none { NONE } else { NOT_ACCEPTED };
    client.write_all(&[VERSION, method])?;
    if !accepts_none {
        return Ok(None);
    }
    let [version, command, _, kind] = read(client)?;
    check_version(version)?;
    let host = match kind {
        IPV4 => Some(Host::Address(read::<4>(client)?.into())),
        IPV6 => Some(Host::Address(read::<16>(client)?.into())),
        NAME => {
            let [length] = read(client)?;
            let mut name = vec![0; length.into()];
            client.read_exact(&mut name)?;
            // An address in letters is one all the same.
            let name = std::str::from_utf8(&name).ok();
            name.and_then(Host::parse)
        }
        _ => {
            reply(client, Reply::AddressTypeUnknown)?;
            return Ok(None);
        }
    };
    let port = u16::from_be_bytes(read(client)?);
    match host {
        _ if command != CONNECT => reply(client, Reply::CommandUnknown)?,
        Some(host) if port != 0 => return Ok(Some((host, port))),
        _ => reply(client, Reply::Failed)?,
    }
    Ok(None)
}

/// Asks a proxy for a connection.
///
/// # Errors
/// It has gone, is too slow, does not speak SOCKS, or refuses.
pub(super) fn ask(
    proxy: &mut (impl Read + Write),
    upstream: &Upstream,
    host: &Host,
    port: u16,
) -> io::Result<()> {
    let refused = |why: &str| io::Error::other(format!("{upstream} {why}"));
    let method = upstream.credentials.as_ref().map_or(NONE, |_| PASSWORD);
    proxy.write_all(&[VERSION, 1, method])?;
    let [version, chosen] = read(proxy)?;
    check_version(version)?;
    if chosen != method {
        return Err(refused("does not take these credentials"));
    }
    if let Some((user, password)) = &upstream.credentials {
        let mut message = vec![1];
        for text in [user, password] {
            message.push(u8::try_from(text.len()).map_err(io::Error::other)?);
            message.extend_from_slice(text.as_bytes());
        }
        proxy.write_all(&message)?;
        let [_, status] = read(proxy)?;
        if status != 0 {
            return Err(refused("refuses these credentials"));
        }
    }
    let mut message = vec![VERSION, CONNECT, 0];
    match host {
        Host::Address(address) => match address.ip() {
            IpAddr::V4(address) => {
                message.push(IPV4);
                message.extend_from_slice(&address.octets());
            }
            IpAddr::V6(address) => {
                message.push(IPV6);
                message.extend_from_slice(&address.octets());
            }
        },
        Host::Name(name) => {
            message.push(NAME);
            message.push(u8::try_from(name.len()).map_err(io::Error::other)?);
            message.extend_from_slice(name.as_bytes());
        }
    }
    message.extend_from_slice(&port.to_be_bytes());
    proxy.write_all(&message)?;
    let [version, status, _, kind] = read(proxy)?;
    check_version(version)?;
    let length = match kind {
        IPV4 => 4,
        IPV6 => 16,
        NAME => usize::from(read::<1>(proxy)?[0]),
        _ => return Err(refused("does not speak SOCKS 5")),
    };
    proxy.read_exact(&mut vec![0; length + 2])?;
    if status == Reply::Succeeded as u8 {
        Ok(())
    } else {
        Err(refused(&format!("answered with code {status}")))
    }
}

fn read<const COUNT: usize>(from: &mut impl Read) -> io::Result<[u8; COUNT]> {
    let mut bytes = [0; COUNT];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn check_version(version: u8) -> io::Result<()> {
    if version == VERSION {
        Ok(())
    } else {
        Err(io::ErrorKind::InvalidData.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::network::Protocol;

    /// A peer that says something, whatever it hears.
    struct Peer {
        says: io::Cursor<Vec<u8>>,
        hears: Vec<u8>,
    }

    impl Peer {
        fn new(says: &[u8]) -> Self {
            Self {
                says: io::Cursor::new(says.to_vec()),
                hears: Vec::new(),
            }
        }
    }

    impl Read for Peer {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.says.read(into)
        }
    }

    impl Write for Peer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.hears.extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn requests_of_clients() {
        let ask = |request: &[u8]| {
            let mut client = Peer::new(&[b"\x05\x01\x00", request].concat());
            let asked = read_request(&mut client)
                .map(|asked| asked.map(|(host, port)| format!("{host} {port}")));
            (asked.ok(), client.hears)
        };
        let asked = |request: &[u8]| ask(request).0.flatten();
        let expected = Some("a.example 443".to_owned());
        assert_eq!(asked(b"\x05\x01\x00\x03\x09A.example\x01\xbb"), expected);
        let expected = Some("1.2.3.4 80".to_owned());
        assert_eq!(asked(b"\x05\x01\x00\x01\x01\x02\x03\x04\x00\x50"), expected);
        assert_eq!(asked(b"\x05\x01\x00\x03\x071.2.3.4\x00\x50"), expected);
        let mut wide = b"\x05\x01\x00\x04".to_vec();
        wide.extend([[0; 15].as_slice(), &[1, 0, 80]].concat());
        assert_eq!(asked(&wide).as_deref(), Some("[::1] 80"));
        for (request, code) in [
            // BIND, UDP ASSOCIATE, an unknown type, a name that is none, port 0.
            (
                &b"\x05\x02\x00\x01\x01\x02\x03\x04\x00\x50"[..],
                Reply::CommandUnknown,
            ),
            (
                b"\x05\x03\x00\x01\x01\x02\x03\x04\x00\x50",
                Reply::CommandUnknown,
            ),
            (b"\x05\x01\x00\x05", Reply::AddressTypeUnknown),
            (b"\x05\x01\x00\x03\x03a b\x00\x50", Reply::Failed),
            (b"\x05\x01\x00\x03\x00\x00\x50", Reply::Failed),
            (b"\x05\x01\x00\x01\x01\x02\x03\x04\x00\x00", Reply::Failed),
        ] {
            let (asked, hears) = ask(request);
            assert_eq!(asked, Some(None), "{request:?}");
            assert_eq!(hears[2..4], [VERSION, code as u8], "{request:?}");
        }
        // Cut anywhere: an error, never a request.
        let whole = b"\x05\x01\x00\x03\x09a.example\x01\xbb";
        for length in 0..whole.len() {
            assert_eq!(ask(&whole[..length]).0, None);
        }
        assert_eq!(ask(b"\x04\x01\x00\x01\x01\x02\x03\x04\x00\x50").0, None);
    }

    #[test]
    fn a_client_that_wants_to_authenticate_is_refused() {
        let mut client = Peer::new(b"\x05\x01\x02");
        assert!(read_request(&mut client).unwrap().is_none());
        assert_eq!(client.hears, [VERSION, NOT_ACCEPTED]);
    }

    #[test]
    fn asking_a_proxy() {
        let upstream = |url: &str| Upstream::parse(Protocol::Socks, url).unwrap();
        let host = Host::parse("a.example").unwrap();
        let mut proxy = Peer::new(b"\x05\x02\x01\x00\x05\x00\x00\x01\x00\x00\x00\x00\x00\x00rest");
        let with_password = upstream("socks5h://me:secret@proxy");
        ask(&mut proxy, &with_password, &host, 443).unwrap();
        assert_eq!(
            proxy.hears,
            b"\x05\x01\x02\x01\x02me\x06secret\x05\x01\x00\x03\x09a.example\x01\xbb"
        );
        let mut rest = String::new();
        proxy.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "rest");
        for answer in [
            &b"\x05\x00\x05\x02\x00\x01\x00\x00\x00\x00\x00\x00"[..],
            b"\x05\xff",
            b"\x04\x00",
            b"\x05\x00\x05\x00",
            b"",
        ] {
            let mut proxy = Peer::new(answer);
            assert!(ask(&mut proxy, &upstream("socks5h://proxy"), &host, 443).is_err());
        }
    }
}
