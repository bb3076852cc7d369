//! Ranges of addresses: those that an allow-list never opens by accident, and those that rules name.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A range of addresses of one family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    first: IpAddr,
    prefix: u8,
}

impl Network {
    /// The addresses that share the first `prefix` bits of one; `None` if there are not so many.
    pub fn new(address: IpAddr, prefix: u8) -> Option<Self> {
        let first = match address {
            IpAddr::V4(address) => {
                let bits = 32_u32.checked_sub(prefix.into())?;
                let mask = u32::MAX.checked_shl(bits).unwrap_or(0);
                Ipv4Addr::from_bits(address.to_bits() & mask).into()
            }
            IpAddr::V6(address) => {
                let bits = 128_u32.checked_sub(prefix.into())?;
                let mask = u128::MAX.checked_shl(bits).unwrap_or(0);
                Ipv6Addr::from_bits(address.to_bits() & mask).into()
            }
        };
        Some(Self { first, prefix })
    }

    /// A single address.
    pub fn only(address: IpAddr) -> Self {
        let prefix = if address.is_ipv4() { 32 } else { 128 };
        Self {
            first: address,
            prefix,
        }
    }

    /// Whether it has an address.
    pub fn contains(self, address: IpAddr) -> bool {
        address.is_ipv4() == self.first.is_ipv4() && Self::new(address, self.prefix) == Some(self)
    }

    /// Whether all its addresses are in another range.
    pub fn is_within(self, other: Self) -> bool {
        self.prefix >= other.prefix && other.contains(self.first)
    }
}

/// What an address is for. Addresses for the public have no kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// This machine: loopback, and what stands for "this host".
    Machine,
    /// Services that tell a cloud machine its credentials.
    CloudMetadata,
    /// Networks that the public does not reach, and what is no address of a host.
    Private,
}

const fn v4(a: u8, b: u8, c: u8, d: u8, prefix: u8) -> Network {
    let first = IpAddr::V4(Ipv4Addr::new(a, b, c, d));
    Network { first, prefix }
}

const fn v6(first: u128, prefix: u8) -> Network {
    let first = IpAddr::V6(Ipv6Addr::from_bits(first));
    Network { first, prefix }
}

/// The first range with an address decides. From IANA's registries of special-purpose addresses, and what cloud
/// providers document for their metadata services.
const KINDS: &[(Kind, &[Network])] = &[
    (
        Kind::Machine,
        &[
            v4(127, 0, 0, 0, 8),
            v4(0, 0, 0, 0, 8),
            v6(0, 128),
            v6(1, 128),
        ],
    ),
    (
        Kind::CloudMetadata,
        &[
            // Most clouds; link-local, so nothing else is there.
            v4(169, 254, 0, 0, 16),
            // Alibaba, Azure, Oracle.
            v4(100, 100, 100, 200, 32),
            v4(168, 63, 129, 16, 32),
            v4(192, 0, 0, 192, 32),
            // Amazon and Google over IPv6.
            v6(0xfd00_0ec2 << 96, 32),
            v6(0xfd20_00ce << 96, 32),
        ],
    ),
    (
        Kind::Private,
        &[
            v4(10, 0, 0, 0, 8),
            v4(172, 16, 0, 0, 12),
            v4(192, 168, 0, 0, 16),
            v4(100, 64, 0, 0, 10),
            v4(192, 0, 0, 0, 24),
            v4(198, 18, 0, 0, 15),
            // Multicast, reserved, broadcast.
            v4(224, 0, 0, 0, 3),
            // IPv4 in the old form; the rest of ::/96 is reserved.
            v6(0, 96),
            // Site-local, unique local, link-local, multicast.
            v6(0xfc00 << 112, 7),
            v6(0xfe80 << 112, 10),
            v6(0xfec0 << 112, 10),
            v6(0xff00 << 112, 8),
            // Translation within one's own network.
            v6(0x0064_ff9b_0001 << 80, 48),
        ],
    ),
];

impl Kind {
    /// What an address is for; `None` if the public reaches it.
    pub fn of(address: IpAddr) -> Option<Self> {
        let mut kinds = KINDS.iter();
        let found =
            kinds.find(|(_, networks)| networks.iter().any(|network| network.contains(address)));
        found.map(|(kind, _)| *kind)
    }

    /// Whether all addresses of a range are of this kind.
    pub fn covers(self, network: Network) -> bool {
        let mut own = KINDS.iter().filter(|(kind, _)| *kind == self);
        own.any(|(_, networks)| networks.iter().any(|other| network.is_within(*other)))
    }

    /// The rule that keeps it closed.
    pub fn rule(self) -> &'static str {
        match self {
            Self::Machine => "localhost",
            Self::CloudMetadata => "@cloud-metadata",
            Self::Private => "@private",
        }
    }
}

/// An address as rules see it: IPv4 that is written as IPv6 is IPv4. Translators and tunnels reach an IPv4 address
/// that is part of an IPv6 one (RFC 6052, RFC 3056, RFC 4380); the second one is that.
pub fn unwrapped(address: IpAddr) -> (IpAddr, Option<IpAddr>) {
    let address = address.to_canonical();
    let IpAddr::V6(wide) = address else {
        return (address, None);
    };
    let bits = wide.to_bits();
    #[expect(clippy::cast_possible_truncation, reason = "the parts of an address")]
    let inner = match wide.segments() {
        [0x64, 0xff9b, 0, 0, 0, 0, ..] => Some(bits as u32),
        [0x2002, ..] => Some((bits >> 80) as u32),
        [0x2001, 0, ..] => Some(!(bits as u32)),
        _ => None,
    };
    let inner = inner.map(|bits| Ipv4Addr::from_bits(bits).into());
    (address, inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    #[test]
    fn ranges_contain_what_shares_their_bits() {
        let network = |text: &str, prefix| Network::new(address(text), prefix);
        let ten = network("10.1.2.3", 8).unwrap();
        assert!(ten.contains(address("10.255.0.1")));
        assert!(!ten.contains(address("11.0.0.1")));
        assert!(!ten.contains(address("::ffff:10.0.0.1")));
        assert!(network("10.9.0.0", 16).unwrap().is_within(ten));
        assert!(!ten.is_within(network("10.9.0.0", 16).unwrap()));
        let all = network("1.2.3.4", 0).unwrap();
        assert!(ten.is_within(all) && all.contains(address("255.255.255.255")));
        assert!(network("::", 0).unwrap().contains(address("ffff::1")));
        assert_eq!(network("10.0.0.0", 33), None);
        assert_eq!(network("::", 129), None);
    }

    #[test]
    fn kinds_of_addresses() {
        for (text, kind) in [
            ("127.9.9.9", Some(Kind::Machine)),
            ("0.0.0.0", Some(Kind::Machine)),
            ("::", Some(Kind::Machine)),
            ("::1", Some(Kind::Machine)),
            ("169.254.169.254", Some(Kind::CloudMetadata)),
            ("fd00:ec2::254", Some(Kind::CloudMetadata)),
            ("100.100.100.200", Some(Kind::CloudMetadata)),
            ("100.100.100.201", Some(Kind::Private)),
            ("10.0.0.1", Some(Kind::Private)),
            ("172.31.0.1", Some(Kind::Private)),
            ("172.32.0.1", None),
            ("192.168.0.1", Some(Kind::Private)),
            ("255.255.255.255", Some(Kind::Private)),
            ("239.1.1.1", Some(Kind::Private)),
            ("fd12::1", Some(Kind::Private)),
            ("fe80::1", Some(Kind::Private)),
            ("ff02::1", Some(Kind::Private)),
            ("::7f00:1", Some(Kind::Private)),
            ("64:ff9b:1::7f00:1", Some(Kind::Private)),
            ("1.1.1.1", None),
            ("2606:4700::1111", None),
        ] {
            assert_eq!(Kind::of(address(text)), kind, "{text}");
        }
        assert!(Kind::Private.covers(Network::new(address("10.1.0.0"), 16).unwrap()));
        assert!(!Kind::Private.covers(Network::new(address("0.0.0.0"), 0).unwrap()));
    }

    #[test]
    fn ipv4_inside_ipv6_is_found() {
        for (text, inner) in [
            ("64:ff9b::a9fe:a9fe", "169.254.169.254"),
            ("2002:7f00:1::", "127.0.0.1"),
            ("2001:0:1:2:3:4:80ff:fffe", "127.0.0.1"),
        ] {
            assert_eq!(unwrapped(address(text)).1, Some(address(inner)), "{text}");
        }
        let mapped = unwrapped(address("::ffff:10.0.0.1"));
        assert_eq!(mapped, (address("10.0.0.1"), None));
        assert_eq!(unwrapped(address("2001:db8::1")).1, None);
    }
}
