//! Addresses that stand for names.
//!
//! They are made out of 198.18.0.0/15, which is for tests of network devices and which no host of the internet has (RFC
//! 2544). When a program connects to one the server knows which name is meant, and lets the rules decide about that.

use std::collections::VecDeque;
use std::net::Ipv4Addr;

use crate::threads::lock::{Mutex, lock};

/// The first address; those of the next 16 bits and one more are for names.
const FIRST: u32 = u32::from_be_bytes([198, 18, 0, 1]);

/// How many addresses there are before they are given again.
const ADDRESSES: u32 = (1 << 17) - 2;

/// Names that are known at once. Programs forget an address sooner than that many others were looked up.
const MAX_NAMES: usize = 1024;

/// The names of one egress listener, and their addresses.
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

    /// The address that was made for a name.
    pub(super) fn address_of(&self, name: &str) -> Option<Ipv4Addr> {
        lock(&self.known).address_of(name)
    }

    /// The address of a name that may have none yet.
    pub(super) fn add(&self, name: &str) -> Ipv4Addr {
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
