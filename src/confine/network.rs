//! How network postures are enforced: a filter for sockets, and rules of Landlock as a second lock.
//!
//! A command whose network is `blocked` can make no internet socket. One that a looser command of the same
//! sandbox passes to it cannot be connected or bound, because Landlock asks the process that does so. A UDP socket, or
//! a connected one, works when it is passed: so the posture of a sandbox is the wall, and that of a command keeps it
//! from the network and not from an accomplice.
//!
//! A posture is offered only where all of it is enforced; what cannot be enforced is refused with the reason.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::filter::{self, Sockets, Subject};
use super::ruleset;
use crate::error::{Error, Kind, Result};
use crate::posture::Posture;
use crate::sys;

/// The Landlock ABI without which sandboxes reach abstract Unix sockets of others, who could pass sockets.
const LEAST_ABI: u32 = 6;

/// What commands get for their posture, made once for all commands of the machine.
pub(super) struct Networks {
    open: Walls,
    /// Or why there is none.
    blocked: std::result::Result<Walls, String>,
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
        Self {
            open: Walls {
                filter: open,
                ruleset: None,
            },
            blocked: blocked(subject, has_filters, landlock_abi),
        }
    }

    /// The names of the postures that are enforced here.
    pub(super) fn offered(&self) -> Vec<&'static str> {
        let names = Posture::NAMES.into_iter();
        let offered = names.filter(|(_, posture)| self.walls(*posture).is_ok());
        offered.map(|(name, _)| name).collect()
    }

    /// What enforces a posture.
    ///
    /// # Errors
    /// `Unavailable` if the machine cannot enforce it.
    pub(super) fn walls(&self, posture: Posture) -> Result<&Walls> {
        match posture {
            Posture::Open => Ok(&self.open),
            Posture::Blocked => self.blocked.as_ref().map_err(|why| {
                let name = posture.name();
                let text = format!("network {name} cannot be enforced on this machine: {why}");
                Error::new(Kind::Unavailable, text)
            }),
        }
    }
}

fn blocked(
    subject: Subject,
    has_filters: bool,
    landlock_abi: u32,
) -> std::result::Result<Walls, String> {
    if !has_filters {
        return Err("the kernel has no seccomp filters, or hides them".to_owned());
    }
    // On a dedicated machine commands can pass sockets to each other in any case.
    if subject == Subject::Sandbox && landlock_abi < LEAST_ABI {
        return Err(format!(
            "the kernel has Landlock ABI {landlock_abi}, and {LEAST_ABI} is needed"
        ));
    }
    Ok(Walls {
        filter: filter::program(subject, Sockets::None),
        ruleset: ruleset::without_tcp(landlock_abi).map_err(|error| error.to_string())?,
    })
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
        assert!(blocked(Subject::Machine, false, LEAST_ABI).is_err());
    }
}
