//! Addresses in the form in which they are judged, and ranges of them: those that an allow-list never opens by
//! accident, and those that rules name.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// An address as it is judged, shown and connected to. Every way to write a destination becomes the same value: IPv4
/// within IPv6 (RFC 4291 section 2.5.5.2) is IPv4, and an unspecified address is the loopback address that the kernel
/// connects to in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address(IpAddr);

impl<T: Into<IpAddr>> From<T> for Address {
    fn from(address: T) -> Self {
        Self(match address.into().to_canonical() {
            IpAddr::V4(Ipv4Addr::UNSPECIFIED) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(Ipv6Addr::UNSPECIFIED) => Ipv6Addr::LOCALHOST.into(),
            address => address,
        })
    }
}

impl Address {
    /// The address to connect to.
    pub fn ip(self) -> IpAddr {
        self.0
    }

    /// The unspecified address, if that is another way to write this one.
    fn unspecified(self) -> Option<IpAddr> {
        match self.0 {
            IpAddr::V4(Ipv4Addr::LOCALHOST) => Some(Ipv4Addr::UNSPECIFIED.into()),
            IpAddr::V6(Ipv6Addr::LOCALHOST) => Some(Ipv6Addr::UNSPECIFIED.into()),
            _ => None,
        }
    }

    /// The address, and the IPv4 address that translators and tunnels find in it: at the end (RFC 6052, RFC 8215,
    /// and the older forms of RFC 4291 and RFC 2765), or as RFC 3056 and RFC 4380 say.
    pub fn with_embedded(self) -> impl Iterator<Item = Self> + Clone {
        let inner = match self.0 {
            IpAddr::V4(_) | IpAddr::V6(Ipv6Addr::LOCALHOST) => None,
            IpAddr::V6(wide) => embedded(wide),
        };
        [Some(self), inner.map(Self::from)].into_iter().flatten()
    }
}

fn embedded(wide: Ipv6Addr) -> Option<Ipv4Addr> {
    let bits = wide.to_bits();
    #[expect(clippy::cast_possible_truncation, reason = "the parts of an address")]
    let inner = match wide.segments() {
        [0x64, 0xff9b, 0, 0, 0, 0, ..]
        | [0x64, 0xff9b, 1, ..]
        | [0, 0, 0, 0, 0xffff | 0, 0, ..] => bits as u32,
        [0x2002, ..] => (bits >> 80) as u32,
        [0x2001, 0, ..] => !(bits as u32),
        _ => return None,
    };
    Some(Ipv4Addr::from_bits(inner))
}

/// A range of addresses of one family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    first: IpAddr,
    prefix: u8,
}

impl Network {
    /// The addresses that share the first `prefix` bits of one; `None` if there are not so many. IPv4 within IPv6 is
    /// IPv4 here too.
    pub fn new(address: IpAddr, prefix: u8) -> Option<Self> {
        let address_bits = if address.is_ipv4() { 32 } else { 128 };
        if prefix == address_bits {
            return Some(Self::only(address.into()));
        }
        let within_ipv6 = address_bits - 32;
        if prefix >= within_ipv6
            && let inner @ IpAddr::V4(_) = address.to_canonical()
        {
            return Self::masked(inner, prefix - within_ipv6);
        }
        Self::masked(address, prefix)
    }

    fn masked(address: IpAddr, prefix: u8) -> Option<Self> {
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

    pub fn only(address: Address) -> Self {
        let first = address.0;
        let prefix = if first.is_ipv4() { 32 } else { 128 };
        Self { first, prefix }
    }

    /// Whether it has an address, in one of the ways to write it.
    pub fn contains(self, address: Address) -> bool {
        let unspecified = address.unspecified();
        self.has(address.0) || unspecified.is_some_and(|other| self.has(other))
    }

    /// Whether it has an address as it is written.
    fn has(self, address: IpAddr) -> bool {
        address.is_ipv4() == self.first.is_ipv4()
            && Self::masked(address, self.prefix) == Some(self)
    }

    /// Whether all its addresses are in another range.
    pub fn is_within(self, other: Self) -> bool {
        let only = Address(self.first);
        let is_in = other.has(self.first) || self == Self::only(only) && other.contains(only);
        self.prefix >= other.prefix && is_in
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
        &[v4(127, 0, 0, 0, 8), v4(0, 0, 0, 0, 8), v6(1, 128)],
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
    pub fn of(address: Address) -> Option<Self> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn address(text: &str) -> Address {
        ip(text).into()
    }

    #[test]
    fn every_way_to_write_a_destination_becomes_the_same_address() {
        for (written, meant) in [
            ("127.0.0.1", "127.0.0.1"),
            ("0.0.0.0", "127.0.0.1"),
            ("::ffff:127.0.0.1", "127.0.0.1"),
            ("::ffff:7f00:1", "127.0.0.1"),
            ("::ffff:0.0.0.0", "127.0.0.1"),
            ("::ffff:0:0", "127.0.0.1"),
            ("::ffff:10.0.0.1", "10.0.0.1"),
            ("::", "::1"),
            ("::1", "::1"),
            // The kernel connects to these as they are, if at all.
            ("0.0.0.1", "0.0.0.1"),
            ("127.0.0.2", "127.0.0.2"),
            ("::7f00:1", "::7f00:1"),
            ("64:ff9b::7f00:1", "64:ff9b::7f00:1"),
            ("2606:4700::1111", "2606:4700::1111"),
        ] {
            assert_eq!(address(written).ip(), ip(meant), "{written}");
        }
    }

    #[test]
    fn ranges_and_addresses_have_the_same_form() {
        let contains = |network: &str, written: &str| {
            let (first, prefix) = network.split_once('/').unwrap();
            let network = Network::new(ip(first), prefix.parse().unwrap()).unwrap();
            network.contains(address(written))
        };
        for network in [
            "127.0.0.0/8",
            "127.0.0.1/32",
            "0.0.0.0/32",
            "0.0.0.0/8",
            "0.0.0.0/0",
            "::ffff:0:0/96",
            "::ffff:127.0.0.0/104",
            "::ffff:0.0.0.0/104",
            "::ffff:0.0.0.0/128",
        ] {
            for written in ["127.0.0.1", "0.0.0.0", "::ffff:127.0.0.1", "::ffff:0:0"] {
                assert!(contains(network, written), "{network} {written}");
            }
            assert!(!contains(network, "::1") && !contains(network, "::"));
        }
        for network in ["::/0", "::/64", "::/96", "::/128", "::1/128"] {
            assert!(contains(network, "::1") && contains(network, "::"));
            // An address of IPv4, however it is written.
            for written in ["0.0.0.0", "::ffff:0:0", "::ffff:127.0.0.1"] {
                assert!(!contains(network, written), "{network} {written}");
            }
        }
        assert!(!contains("0.0.0.0/8", "127.0.0.2"));
        assert!(contains("127.0.0.0/8", "127.0.0.2") && contains("0.0.0.0/8", "0.0.0.1"));
        assert_eq!(Network::new(ip("::ffff:0:0"), 129), None);
    }

    #[test]
    fn ranges_contain_what_shares_their_bits() {
        let network = |text: &str, prefix| Network::new(ip(text), prefix);
        let ten = network("10.1.2.3", 8).unwrap();
        assert!(ten.contains(address("10.255.0.1")));
        assert!(!ten.contains(address("11.0.0.1")));
        assert!(ten.contains(address("::ffff:10.0.0.1")));
        assert!(network("10.9.0.0", 16).unwrap().is_within(ten));
        assert!(!ten.is_within(network("10.9.0.0", 16).unwrap()));
        let all = network("1.2.3.4", 0).unwrap();
        assert!(ten.is_within(all) && all.contains(address("255.255.255.255")));
        assert!(network("::", 0).unwrap().contains(address("ffff::1")));
        assert_eq!(network("10.0.0.0", 33), None);
        assert_eq!(network("::", 129), None);
        // One address has two ways to write it.
        let zero = network("0.0.0.0", 8).unwrap();
        assert!(network("127.0.0.1", 32).unwrap().is_within(zero));
        assert!(network("0.0.0.0", 32).unwrap().is_within(zero));
        assert!(!zero.is_within(network("127.0.0.0", 8).unwrap()));
        assert!(!network("127.0.0.0", 31).unwrap().is_within(zero));
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
        assert!(Kind::Private.covers(Network::new(ip("10.1.0.0"), 16).unwrap()));
        assert!(!Kind::Private.covers(Network::new(ip("0.0.0.0"), 0).unwrap()));
    }

    #[test]
    fn ipv4_inside_ipv6_is_found() {
        let all = |text: &str| -> Vec<Address> { address(text).with_embedded().collect() };
        for (text, inner) in [
            ("64:ff9b::a9fe:a9fe", "169.254.169.254"),
            ("64:ff9b::", "127.0.0.1"),
            ("64:ff9b:1::a9fe:a9fe", "169.254.169.254"),
            ("64:ff9b:1:2:3:4:a00:1", "10.0.0.1"),
            ("2002:7f00:1::", "127.0.0.1"),
            ("2001:0:1:2:3:4:80ff:fffe", "127.0.0.1"),
            ("::7f00:1", "127.0.0.1"),
            ("::ffff:0:7f00:1", "127.0.0.1"),
        ] {
            assert_eq!(all(text), [address(text), address(inner)], "{text}");
        }
        for text in ["2001:db8::1", "::1", "::", "::ffff:10.0.0.1", "10.0.0.1"] {
            assert_eq!(all(text), [address(text)], "{text}");
        }
    }
}
