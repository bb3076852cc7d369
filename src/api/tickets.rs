//! Tickets: secrets that each lead to one port of one sandbox, for clients that can send no token.
//!
//! A ticket is kept as its digest, so neither memory that leaks nor the time of a search tells one. It lasts no longer than
//! its sandbox, through stops and starts of that. Nothing here knows HTTP.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use crate::error::{Error, Kind, Result};
use crate::ports::Port;
use crate::sys;
use crate::threads::lock::{Mutex, lock};

/// A new ticket is used within this time, or not at all.
const FIRST_USE: Duration = Duration::from_secs(60);

/// A ticket that was not used for this long has ended.
const UNUSED: Duration = Duration::from_secs(3600);

/// Most tickets of a sandbox.
const MAX_OF_SANDBOX: usize = 64;

/// A ticket ends after this time, however often it is used.
const LIFETIME: Duration = Duration::from_secs(24 * 3600);

/// Most tickets in all.
const MAX_TICKETS: usize = 65_536;

/// All tickets, for sandboxes of which a `W` is there as long as they are. The lock guards the table and is held for a look
/// into it, or, when a ticket is made, for one pass through it.
pub(super) struct Tickets<W>(Mutex<HashMap<[u8; 32], Ticket<W>>>);

/// What a ticket leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    /// The id of the sandbox; `None` for a machine that is the only one.
    pub(super) sandbox: Option<String>,
    pub(super) port: Port,
}

struct Ticket<W> {
    owner: Weak<W>,
    target: Target,
    made_at: Instant,
    ends_at: Instant,
}

impl<W> Default for Tickets<W> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<W> Tickets<W> {
    /// Makes a ticket for a port: 64 hexadecimal digits.
    ///
    /// # Errors
    /// `OverLimit` if there are too many; a system error if the kernel gives no random bytes.
    pub(super) fn make(&self, owner: &Arc<W>, target: Target) -> Result<String> {
        self.make_at(Instant::now(), owner, target)
    }

    fn make_at(&self, now: Instant, owner: &Arc<W>, target: Target) -> Result<String> {
        let owner = Arc::downgrade(owner);
        let secret = sys::random_bytes::<32>()
            .map_err(|errno| Error::system("cannot make a ticket", errno))?;
        let text = format!("{:x}", Sha256::digest(secret));
        let mut tickets = lock(&self.0);
        let mut own = 0;
        tickets.retain(|_, ticket| {
            let is_valid = now < ticket.ends_at && ticket.owner.strong_count() > 0;
            own += usize::from(is_valid && ticket.owner.ptr_eq(&owner));
            is_valid
        });
        if own >= MAX_OF_SANDBOX || tickets.len() >= MAX_TICKETS {
            let text = format!(
                "there are {own} open links to ports of this sandbox, and {} in all; they end when they are not used",
                tickets.len()
            );
            return Err(Error::new(Kind::OverLimit, text));
        }
        let ticket = Ticket {
            owner,
            target,
            made_at: now,
            ends_at: now + FIRST_USE,
        };
        tickets.insert(digest(text.as_bytes()), ticket);
        Ok(text)
    }

    /// What a ticket leads to, and whose it is; the sandbox may be ending. `None` if it is no ticket, or has ended. This is a
    /// use of the ticket.
    pub(super) fn open(&self, ticket: &[u8]) -> Option<(Arc<W>, Target)> {
        self.open_at(Instant::now(), ticket)
    }

    fn open_at(&self, now: Instant, ticket: &[u8]) -> Option<(Arc<W>, Target)> {
        let mut tickets = lock(&self.0);
        let ticket = tickets.get_mut(&digest(ticket))?;
        let owner = ticket.owner.upgrade()?;
        if now >= ticket.ends_at {
            return None;
        }
        ticket.ends_at = (now + UNUSED).min(ticket.made_at + LIFETIME);
        Some((owner, ticket.target.clone()))
    }
}

fn digest(ticket: &[u8]) -> [u8; 32] {
    Sha256::digest(ticket).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOMENT: Duration = Duration::from_millis(1);

    fn target() -> Target {
        Target {
            sandbox: None,
            port: Port::Number(3000),
        }
    }

    #[test]
    fn a_ticket_leads_to_its_port_and_nothing_else_does() {
        let (tickets, owner) = (Tickets::default(), Arc::new(1));
        let ticket = tickets.make(&owner, target()).unwrap();
        assert_eq!(ticket.len(), 64);
        assert_eq!(
            tickets.open(ticket.as_bytes()),
            Some((Arc::clone(&owner), target()))
        );
        let other = tickets.make(&owner, target()).unwrap();
        assert_ne!(ticket, other);
        for wrong in [
            "",
            &ticket[..63],
            &ticket.to_uppercase(),
            &format!("{ticket}0"),
        ] {
            assert_eq!(tickets.open(wrong.as_bytes()), None, "{wrong}");
        }
    }

    #[test]
    fn a_ticket_ends_a_minute_after_it_was_made_or_an_hour_after_its_last_use() {
        let (tickets, owner) = (Tickets::default(), Arc::new(()));
        let begun = Instant::now();
        let make = || {
            let made = tickets.make_at(begun, &owner, target());
            made.unwrap().into_bytes()
        };
        let (used, unused) = (make(), make());
        let first = begun + FIRST_USE.abs_diff(MOMENT);
        assert!(tickets.open_at(first, &used).is_some());
        assert!(tickets.open_at(begun + FIRST_USE, &unused).is_none());
        let second = first + UNUSED.abs_diff(MOMENT);
        assert!(tickets.open_at(second, &used).is_some());
        assert!(tickets.open_at(second + UNUSED, &used).is_none());
    }

    #[test]
    fn a_ticket_ends_with_its_sandbox() {
        let (tickets, owner) = (Tickets::default(), Arc::new(()));
        let ticket = tickets.make(&owner, target()).unwrap();
        drop(owner);
        assert!(tickets.open(ticket.as_bytes()).is_none());
    }

    #[test]
    fn a_sandbox_has_so_many_tickets_and_leaves_others_theirs() {
        let (tickets, owner, other) = (Tickets::default(), Arc::new(1), Arc::new(2));
        let begun = Instant::now();
        let make = |at, owner| tickets.make_at(at, owner, target());
        for _ in 0..MAX_OF_SANDBOX {
            make(begun, &owner).unwrap();
        }
        assert_eq!(make(begun, &owner).unwrap_err().kind(), Kind::OverLimit);
        make(begun, &other).unwrap();
        // Those that have ended leave room.
        make(begun + FIRST_USE, &owner).unwrap();
        assert_eq!(lock(&tickets.0).len(), 1);
    }
}
