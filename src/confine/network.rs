//! How network policies are enforced: by a seccomp filter for sockets, and by Landlock rules as a second barrier.
//!
//! A command whose network is `blocked` cannot make internet sockets. A command whose network is filtered gets its
//! sockets from the server, and Landlock lets them connect only to the egress listener of its filter (see `egress`).
//! Another command of the same sandbox, with a wider policy, may pass its sockets to either. They cannot connect or
//! bind such a socket, because Landlock checks the process that makes the call. But a UDP socket, or a connected
//! socket, works after it was passed. So the policy of a sandbox is a wall; the policy of a command keeps it from the
//! network, but not if another command of the sandbox helps it.
//!
//! A sandbox with namespaces and a policy other than open has a network of its own, which needs neither filter nor
//! rules. Its commands with a narrower policy get Landlock rules, which allow another egress listener in that network.
//!
//! A policy is offered only where all of it is enforced. Otherwise it is refused, with the reason.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock};

use super::filter::{self, Sockets, Subject};
use super::namespaces::Namespaces;
use super::ruleset;
use crate::error::{Error, Kind, Result};
use crate::spec::network::NetworkPolicy;
use crate::threads::lock::{Mutex, lock};
use crate::{egress, sys};

/// The least Landlock ABI for sandboxes: with an older one they reach abstract Unix sockets of others, who could pass
/// them sockets.
pub(super) const ABI_OF_SANDBOXES: u32 = 6;

/// The least Landlock ABI for filtered networks: with an older one a command could connect to every port of the
/// machine.
const ABI_OF_FILTERS: u32 = 4;

/// The filters and rules that enforce policies, made once for all commands of the machine.
pub(super) struct Networks {
    subject: Subject,
    landlock_abi: u32,
    has_filters: bool,
    open: Arc<[libc::sock_filter]>,
    /// Made for the first command that needs it, like the next two.
    filtered: OnceLock<Arc<[libc::sock_filter]>>,
    /// For commands whose connections are redirected to the egress listener.
    transparent: OnceLock<Arc<[libc::sock_filter]>>,
    blocked: OnceLock<Arc<[libc::sock_filter]>>,
    /// The rules of blocked commands that have the machine's root.
    shared_rules: TcpRules,
    /// Whether the kernel keeps packets from 127.0.0.1 on the machine. Checked once for the list of policies, and again
    /// for each egress listener.
    keeps_loopback: OnceLock<bool>,
}

/// A Landlock ruleset; `None` on a kernel without Landlock.
type OptionalRules = Option<Arc<OwnedFd>>;

/// The Landlock rules for TCP of commands that share one root directory.
pub(super) struct TcpRules {
    /// `None` for the machine's root.
    namespaces: Option<Arc<Namespaces>>,
    /// The rules that were used last, with the port that they open. The next command probably needs the same, and
    /// making them takes a fiftieth of a command's time.
    last: Mutex<Option<(Option<u16>, OptionalRules)>>,
}

impl TcpRules {
    pub(super) fn new(namespaces: Option<Arc<Namespaces>>) -> Self {
        Self {
            namespaces,
            last: Mutex::default(),
        }
    }

    fn own_network(&self) -> bool {
        let namespaces = self.namespaces.as_deref();
        namespaces.is_some_and(Namespaces::has_network)
    }

    fn get(&self, landlock_abi: u32, open_port: Option<u16>) -> Result<OptionalRules> {
        if let Some((port, ruleset)) = &*lock(&self.last)
            && *port == open_port
        {
            return Ok(ruleset.clone());
        }
        let namespaces = self.namespaces.as_deref();
        let made = ruleset::of_network(landlock_abi, open_port, namespaces)?.map(Arc::new);
        *lock(&self.last) = Some((open_port, made.clone()));
        Ok(made)
    }
}

/// What one policy adds to the confinement of a command.
pub(super) struct Walls {
    filter: Arc<[libc::sock_filter]>,
    ruleset: OptionalRules,
    /// Whether the filter has a seccomp listener, which may make the sockets of the command.
    pub(super) has_listener: bool,
}

impl Walls {
    /// The seccomp filter; empty if there is none.
    pub(super) fn filter(&self) -> &[libc::sock_filter] {
        &self.filter
    }

    /// The Landlock ruleset for TCP.
    pub(super) fn ruleset(&self) -> Option<BorrowedFd<'_>> {
        self.ruleset.as_ref().map(|ruleset| ruleset.as_fd())
    }
}

impl Networks {
    /// Prepares what the kernel, with this Landlock ABI, can enforce for the commands of a subject.
    pub(super) fn new(subject: Subject, landlock_abi: u32) -> Self {
        let has_filters = sys::has_filters();
        let open = match subject {
            Subject::Sandbox | Subject::Namespaces | Subject::PrivateRoot if has_filters => {
                filter::program(subject, Sockets::Usual)
            }
            _ => Vec::new(),
        };
        Self {
            subject,
            landlock_abi,
            has_filters,
            open: open.into(),
            filtered: OnceLock::new(),
            transparent: OnceLock::new(),
            blocked: OnceLock::new(),
            shared_rules: TcpRules::new(None),
            keeps_loopback: OnceLock::new(),
        }
    }

    /// The filter that leaves sockets to the server in the way that `sockets` names.
    fn leaving(&self, sockets: Sockets) -> &Arc<[libc::sock_filter]> {
        let made = match sockets {
            Sockets::Redirected => &self.transparent,
            Sockets::Usual | Sockets::HandedOut | Sockets::None => &self.filtered,
        };
        made.get_or_init(|| filter::program(self.subject, sockets).into())
    }

    /// The names of the network policies that this machine can enforce, the widest first.
    pub(super) fn offered(&self) -> Vec<&'static str> {
        let keeps_loopback = || *self.keeps_loopback.get_or_init(|| egress::check().is_ok());
        let is_filtered = self.lacking(ABI_OF_FILTERS).is_none() && keeps_loopback();
        let offered = [
            ("open", true),
            ("allowlist", is_filtered),
            ("blocked", self.lacking(0).is_none()),
        ];
        let offered = offered.into_iter().filter(|(_, is_offered)| *is_offered);
        offered.map(|(name, _)| name).collect()
    }

    /// Checks that the machine can enforce a policy. If the sandbox has a network of its own (`is_owned`), that
    /// enforces the policy already; only a transparent filter needs more.
    ///
    /// # Errors
    /// `Unavailable`, with the reason, if it cannot.
    pub(super) fn check(&self, policy: &NetworkPolicy, is_owned: bool) -> Result<()> {
        if let NetworkPolicy::Filtered(filter) = policy
            && filter.is_transparent
        {
            egress::check_redirection()?;
        }
        let least = match policy {
            NetworkPolicy::Filtered(filter) if is_owned && filter.is_transparent => {
                if self.has_filters && sys::has_listeners() {
                    return Ok(());
                }
                let text = "network cannot be transparent on this machine: the kernel cannot leave system calls to the \
                            server, which needs Linux 5.19";
                return Err(Error::new(Kind::Unavailable, text));
            }
            _ if is_owned => return Ok(()),
            NetworkPolicy::Open => return Ok(()),
            NetworkPolicy::Filtered(_) => ABI_OF_FILTERS,
            NetworkPolicy::Blocked => 0,
        };
        if let Some(why) = self.lacking(least) {
            let (name, abi) = (policy.name(), self.landlock_abi);
            let text = format!(
                "network {name} cannot be enforced on this machine: {why} (Landlock ABI {abi})"
            );
            return Err(Error::new(Kind::Unavailable, text));
        }
        match policy {
            NetworkPolicy::Filtered(_) => egress::check(),
            _ => Ok(()),
        }
    }

    /// The filter and the rules that enforce a policy, which was [checked](Self::check) before. If the sandbox has a
    /// network of its own (`is_owned`), they only let commands reach it. `listener` is the port of the egress listener
    /// of a filtered network, and `rules` are those of the workspace.
    ///
    /// # Errors
    /// `System` if the Landlock ruleset cannot be made.
    pub(super) fn walls(
        &self,
        policy: &NetworkPolicy,
        is_owned: bool,
        listener: Option<u16>,
        rules: &TcpRules,
    ) -> Result<Walls> {
        match policy {
            NetworkPolicy::Filtered(filter) if is_owned && filter.is_transparent => Ok(Walls {
                filter: Arc::clone(self.leaving(Sockets::Redirected)),
                ruleset: None,
                has_listener: true,
            }),
            _ if is_owned => self.walls(&NetworkPolicy::Open, false, listener, rules),
            NetworkPolicy::Open => Ok(Walls {
                filter: Arc::clone(&self.open),
                ruleset: None,
                has_listener: false,
            }),
            NetworkPolicy::Filtered(filter) => {
                // A sandbox with a network of its own must not get a socket of the machine's network, which could be
                // passed to a command without rules. There the seccomp listener makes sockets of the own network, or
                // only tells when the egress listener is not needed any more.
                let filter = match (filter.is_transparent, rules.own_network()) {
                    (true, _) => self.leaving(Sockets::Redirected),
                    (false, true) => &self.open,
                    (false, false) => self.leaving(Sockets::HandedOut),
                };
                Ok(Walls {
                    filter: Arc::clone(filter),
                    ruleset: rules.get(self.landlock_abi, listener)?,
                    has_listener: true,
                })
            }
            NetworkPolicy::Blocked => {
                let program = || filter::program(self.subject, Sockets::None).into();
                let rules = if rules.namespaces.is_some() {
                    rules
                } else {
                    &self.shared_rules
                };
                Ok(Walls {
                    filter: Arc::clone(self.blocked.get_or_init(program)),
                    ruleset: rules.get(self.landlock_abi, None)?,
                    has_listener: false,
                })
            }
        }
    }

    /// Why the kernel cannot confine the network of commands by rules of this Landlock ABI; `None` if it can.
    fn lacking(&self, least_abi: u32) -> Option<&'static str> {
        if !self.has_filters {
            return Some("the kernel has no seccomp filters, or hides them");
        }
        if self.landlock_abi < least_abi {
            return Some("without Landlock ABI 4 a command could reach every port of the machine");
        }
        // On a dedicated machine, commands can pass each other sockets in any case.
        (self.subject != Subject::Machine && self.landlock_abi < ABI_OF_SANDBOXES)
            .then_some("without Landlock ABI 6 other processes could pass it sockets")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::network::{Filter, Rules};

    #[test]
    fn what_the_kernel_cannot_enforce_is_refused_with_the_reason() {
        let filtered = NetworkPolicy::Filtered(Arc::new(Filter::new(Rules::default(), None)));
        let old = Networks::new(Subject::Sandbox, ABI_OF_SANDBOXES - 1);
        assert_eq!(old.offered(), ["open"]);
        for policy in [&NetworkPolicy::Blocked, &filtered] {
            let error = old.check(policy, false).err().unwrap();
            assert_eq!(error.kind(), Kind::Unavailable);
            assert!(error.to_string().contains("Landlock ABI 5"), "{error}");
        }
        let machine = Networks::new(Subject::Machine, 0);
        assert_eq!(machine.offered(), ["open", "blocked"]);
        assert!(machine.check(&NetworkPolicy::Blocked, false).is_ok());
        let error = machine.check(&filtered, false).err().unwrap();
        assert!(error.to_string().contains("every port"), "{error}");
        let mut hidden = Networks::new(Subject::Machine, ABI_OF_SANDBOXES);
        hidden.has_filters = false;
        assert_eq!(hidden.offered(), ["open"]);
    }
}
