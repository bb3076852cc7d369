//! How network postures are enforced: a filter for sockets, and rules of Landlock as a second lock.
//!
//! A command whose network is `blocked` can make no internet socket. One that a looser command of the same
//! sandbox passes to it cannot be connected or bound, because Landlock asks the process that does so. A UDP socket, or
//! a connected one, works when it is passed: so the posture of a sandbox is the wall, and that of a command keeps it
//! from the network and not from an accomplice.
//!
//! A posture is offered only where all of it is enforced; what cannot be enforced is refused with the reason.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use super::filter::{self, Sockets, Subject};
use super::ruleset;
use crate::error::{Error, Kind, Result};
use crate::posture::Posture;
use crate::sys;

/// The Landlock ABI without which sandboxes reach abstract Unix sockets of others, who could pass sockets.
const LEAST_ABI: u32 = 6;

/// What commands get for their posture, made once for all commands of the machine.
pub(super) struct Networks {
    subject: Subject,
    landlock_abi: u32,
    open: Walls,
    /// Made with the first command that needs it; or why there is none.
    blocked: std::result::Result<OnceLock<Walls>, &'static str>,
}

/// What one posture adds to the confinement of a command.
#[derive(Default)]
pub(super) struct Walls {
    filter: Vec<libc::sock_filter>,
    ruleset: Option<OwnedFd>,
}

impl Walls {
    /// The seccomp filter; empty if there is none.
    pub(super) fn filter(&self) -> &[libc::sock_filter] {
        &self.filter
    }

    /// The Landlock ruleset for TCP.
    pub(super) fn ruleset(&self) -> Option<BorrowedFd<'_>> {
        self.ruleset.as_ref().map(AsFd::as_fd)
    }
}

impl Networks {
    /// Prepares what the kernel, with this Landlock ABI, can enforce for the commands of a subject.
    pub(super) fn new(subject: Subject, landlock_abi: u32) -> Self {
        let has_filters = sys::has_filters();
        let open = match subject {
            Subject::Sandbox if has_filters => filter::program(subject, Sockets::Usual),
            _ => Vec::new(),
        };
        let blocked = match lacking(subject, has_filters, landlock_abi) {
            Some(why) => Err(why),
            None => Ok(OnceLock::new()),
        };
        Self {
            subject,
            landlock_abi,
            open: Walls {
                filter: open,
                ruleset: None,
            },
            blocked,
        }
    }

    /// The names of the postures that are enforced here.
    pub(super) fn offered(&self) -> Vec<&'static str> {
        let names = Posture::NAMES.into_iter();
        let offered = names.filter(|(_, posture)| self.check(*posture).is_ok());
        offered.map(|(name, _)| name).collect()
    }

    /// Checks that the machine can enforce a posture.
    ///
    /// # Errors
    /// `Unavailable`, with the reason.
    pub(super) fn check(&self, posture: Posture) -> Result<()> {
        match posture {
            Posture::Open => Ok(()),
            Posture::Blocked => self.place_of_blocked().map(drop),
        }
    }

    /// What enforces a posture.
    ///
    /// # Errors
    /// `Unavailable` if the machine cannot enforce it; `System` if the ruleset cannot be made now.
    pub(super) fn walls(&self, posture: Posture) -> Result<&Walls> {
        let place = match posture {
            Posture::Open => return Ok(&self.open),
            Posture::Blocked => self.place_of_blocked()?,
        };
        if let Some(made) = place.get() {
            return Ok(made);
        }
        let made = Walls {
            filter: filter::program(self.subject, Sockets::None),
            ruleset: ruleset::without_tcp(self.landlock_abi)?,
        };
        Ok(place.get_or_init(|| made))
    }

    fn place_of_blocked(&self) -> Result<&OnceLock<Walls>> {
        self.blocked.as_ref().map_err(|why| {
            let (name, abi) = (Posture::Blocked.name(), self.landlock_abi);
            let text = format!(
                "network {name} cannot be enforced on this machine: {why} (Landlock ABI {abi})"
            );
            Error::new(Kind::Unavailable, text)
        })
    }
}

/// What the kernel lacks to enforce `blocked`; `None` if it lacks nothing.
fn lacking(subject: Subject, has_filters: bool, landlock_abi: u32) -> Option<&'static str> {
    if !has_filters {
        return Some("the kernel has no seccomp filters, or hides them");
    }
    // On a dedicated machine commands can pass sockets to each other in any case.
    (subject == Subject::Sandbox && landlock_abi < LEAST_ABI)
        .then_some("without ABI 6 of Landlock others could pass sockets in")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_cannot_enforce_is_refused_with_the_reason() {
        let old = Networks::new(Subject::Sandbox, LEAST_ABI - 1);
        assert_eq!(old.offered(), ["open"]);
        let error = old.walls(Posture::Blocked).err().unwrap();
        assert_eq!(error.kind(), Kind::Unavailable);
        assert!(error.to_string().contains("Landlock ABI 5"), "{error}");
        assert!(lacking(Subject::Machine, false, LEAST_ABI).is_some());
        assert!(lacking(Subject::Machine, true, 0).is_none());
    }
}
