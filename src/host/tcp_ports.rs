//! The TCP ports that sandboxes are given to listen on.
//!
//! A port belongs to one sandbox at a time. It is given again only when nothing on the machine listens on it, which
//! the kernel is asked by binding to it.

use std::collections::HashSet;
use std::ops::RangeInclusive;
use std::sync::Arc;

use crate::codec::sort::sort;
use crate::error::{Error, Kind, Result};
use crate::sys::listen::HeldPort;
use crate::threads::lock::{Mutex, lock};

/// The ports of a host.
pub(super) struct TcpPorts {
    /// `None` if there are none.
    range: Option<RangeInclusive<u16>>,
    /// Guards which ports are given and where to look for the next one; held while the kernel is asked about one.
    given: Mutex<Given>,
}

struct Given {
    ports: HashSet<u16>,
    next: u16,
}

/// The ports of a sandbox. They are free again when it is dropped.
pub(super) struct PortLease {
    pool: Arc<TcpPorts>,
    ports: Vec<u16>,
    /// Whether they are ports of a network that is the sandbox's own.
    is_own: bool,
}

/// The first port that a sandbox with a network of its own gets.
const FIRST_OF_OWN: u16 = 8000;

impl PortLease {
    /// The ports, in order.
    pub(super) fn ports(&self) -> &[u16] {
        &self.ports
    }

    /// Those that are ports of the machine.
    pub(super) fn machine_ports(&self) -> Vec<u16> {
        if self.is_own {
            return Vec::new();
        }
        self.ports.clone()
    }
}

impl Drop for PortLease {
    fn drop(&mut self) {
        if self.is_own {
            return;
        }
        let mut given = lock(&self.pool.given);
        for port in &self.ports {
            given.ports.remove(port);
        }
    }
}

impl TcpPorts {
    pub(super) fn new(range: Option<RangeInclusive<u16>>) -> Arc<Self> {
        let next = range.as_ref().map_or(0, |range| *range.start());
        Arc::new(Self {
            range,
            given: Mutex::new(Given {
                ports: HashSet::new(),
                next,
            }),
        })
    }

    /// Gives a sandbox so many ports of its own network: nobody else's, so they need not be free here.
    pub(super) fn of_own_network(self: &Arc<Self>, count: usize) -> PortLease {
        PortLease {
            pool: Arc::clone(self),
            ports: (FIRST_OF_OWN..).take(count).collect(),
            is_own: true,
        }
    }

    /// Gives a sandbox these ports again, which it had before the server started.
    pub(super) fn take_again(self: &Arc<Self>, ports: &[u16]) -> PortLease {
        lock(&self.given).ports.extend(ports);
        PortLease {
            pool: Arc::clone(self),
            ports: ports.to_vec(),
            is_own: false,
        }
    }

    /// Gives a sandbox so many ports. The one that was free for longest comes first.
    ///
    /// # Errors
    /// `Unavailable` if the host has none, `OverLimit` if too few are free.
    pub(super) fn take(self: &Arc<Self>, count: usize) -> Result<PortLease> {
        let mut lease = PortLease {
            pool: Arc::clone(self),
            ports: Vec::new(),
            is_own: false,
        };
        if count == 0 {
            return Ok(lease);
        }
        let Some(range) = &self.range else {
            let text = "tcp_ports is unavailable on this machine: SBX_TCP_PORT_RANGE is not set";
            return Err(Error::new(Kind::Unavailable, text));
        };
        for _ in range.clone() {
            let mut given = lock(&self.given);
            let port = given.next;
            given.next = if port == *range.end() {
                *range.start()
            } else {
                port + 1
            };
            if !given.ports.contains(&port) && is_free(port) {
                given.ports.insert(port);
                drop(given);
                lease.ports.push(port);
                if lease.ports.len() == count {
                    sort(&mut lease.ports);
                    return Ok(lease);
                }
            }
        }
        let text = format!(
            "tcp_ports is {count}, but only {} ports of SBX_TCP_PORT_RANGE are free; delete a sandbox that has some",
            lease.ports.len()
        );
        Err(Error::new(Kind::OverLimit, text))
    }
}

/// Whether nothing listens on a port, at any address of both families. Connections that are still ending do not
/// count.
fn is_free(port: u16) -> bool {
    HeldPort::take(port).is_ok()
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// A range in which this test has the first port.
    fn range() -> (TcpListener, RangeInclusive<u16>) {
        loop {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let port = listener.local_addr().unwrap().port();
            if port < u16::MAX - 3 && (1..=3).all(|next| is_free(port + next)) {
                return (listener, port..=port + 3);
            }
        }
    }

    #[test]
    fn a_port_belongs_to_one_at_a_time_and_to_nobody_who_listens() {
        let (listener, range) = range();
        let first = *range.start();
        let ports = TcpPorts::new(Some(range));
        let one = ports.take(2).unwrap();
        assert_eq!(one.ports(), [first + 1, first + 2]);
        let error = ports.take(2).err().unwrap();
        assert_eq!(error.kind(), Kind::OverLimit);
        // What could not be given whole is free again.
        assert_eq!(ports.take(1).unwrap().ports(), [first + 3]);
        // What was free for longest comes first.
        drop(one);
        drop(listener);
        let next = ports.take(1).unwrap();
        assert_eq!(next.ports(), [first]);
        assert_eq!(ports.take(1).unwrap().ports(), [first + 1]);
    }

    #[test]
    fn a_host_without_a_range_has_none_to_give() {
        let ports = TcpPorts::new(None);
        assert!(ports.take(0).unwrap().ports().is_empty());
        assert_eq!(ports.take(1).err().unwrap().kind(), Kind::Unavailable);
    }
}
