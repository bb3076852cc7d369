//! The thread that drives every process no client waits for.
//!
//! It sleeps in epoll over their pipes and pidfds until the next deadline, so neither a process nor a
//! timeout costs a thread. Besides background processes it drives foreground commands whose client
//! disconnected, and the pipes that a descendant keeps open after its command has ended.
//!
//! It takes only short locks and never blocks elsewhere: a second thread kills what has run out of
//! time, because that searches /proc.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::process::{Process, Reason, kill_trees};
use super::pump::{Buffer, Pump};
use super::ring::Stream;
use crate::error::{Error, Result};
use crate::logging;
use crate::sync::lock;
use crate::sys::{Events, PollEntry, poll};

/// Takes over pumps from other threads.
pub(super) struct Supervisor {
    epoll: Epoll,
    wakeup: EventFd,
    /// Pumps that the thread has not taken up yet.
    inbox: Mutex<Vec<Pump>>,
}

// The data of an epoll event is the key of its pump times four, plus what its descriptor is for.
const STDOUT: u64 = 0;
const STDERR: u64 = 1;
const INPUT: u64 = 2;
const PIDFD: u64 = 3;

/// The data of the inbox's event; no pump has this key.
const WAKEUP: u64 = u64::MAX;

impl Supervisor {
    /// Starts the threads.
    ///
    /// # Errors
    /// No thread or descriptor is left.
    pub(super) fn start() -> Result<Arc<Self>> {
        let failed = |errno| Error::system("cannot start the supervisor", errno);
        let wakeup = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK);
        let supervisor = Arc::new(Self {
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(failed)?,
            wakeup: wakeup.map_err(failed)?,
            inbox: Mutex::default(),
        });
        let event = EpollEvent::new(EpollFlags::EPOLLIN, WAKEUP);
        let added = supervisor.epoll.add(&supervisor.wakeup, event);
        added.map_err(failed)?;
        let (killer, due) = mpsc::channel();
        spawn_thread("timeouts", move || kill_due(&due))?;
        let own = Arc::clone(&supervisor);
        spawn_thread("supervisor", move || own.run(&killer))?;
        Ok(supervisor)
    }

    /// Takes over a pump.
    pub(super) fn adopt(&self, pump: Pump) {
        lock(&self.inbox).push(pump);
        let _ = self.wakeup.write(1);
    }

    fn run(&self, killer: &Sender<Vec<Arc<Process>>>) {
        let mut driven = Driven::default();
        let mut buffer = Buffer::new();
        let mut events = vec![EpollEvent::empty(); 256];
        loop {
            let count = match self.epoll.wait(&mut events, driven.timeout()) {
                Ok(count) => count,
                Err(Errno::EINTR) => 0,
                Err(errno) => {
                    logging::info(format_args!("supervisor: epoll_wait: {errno:?}"));
                    return;
                }
            };
            for event in &events[..count] {
                if event.data() == WAKEUP {
                    let _ = self.wakeup.read();
                    let arrived = std::mem::take(&mut *lock(&self.inbox));
                    for pump in arrived {
                        self.take_up(&mut driven, pump, &mut buffer);
                    }
                } else {
                    self.handle(&mut driven, event.data(), &mut buffer);
                }
            }
            driven.enforce_deadlines(killer);
        }
    }

    fn take_up(&self, driven: &mut Driven, mut pump: Pump, buffer: &mut Buffer) {
        // The process may have ended before its client disconnected, and no event would follow.
        pump.finish(buffer);
        if pump.is_over() {
            // Most such pipes were open in other children that had not called execve yet, and are at their
            // end.
            for stream in Stream::ALL {
                pump.read_or_close(stream, buffer);
            }
            if pump.is_done() {
                return;
            }
        }
        let key = driven.next_key;
        driven.next_key += 1;
        if let Err(errno) = self.watch(&pump, key) {
            // The kernel has no memory for the watch. A process without a driver would never end for
            // its clients, so it is killed; what its descendants write is lost.
            logging::info(format_args!(
                "process {}: cannot be watched ({errno:?}), killed",
                pump.process().id
            ));
            for (descriptor, ..) in watched(&pump) {
                self.unwatch(descriptor);
            }
            pump.process().kill_tree(Reason::Killed);
            if let Some(pidfd) = pump.pidfd() {
                let mut entries = [PollEntry::new(pidfd.as_fd(), Events::READABLE)];
                poll(&mut entries, Some(Duration::from_secs(1)));
            }
            pump.finish(buffer);
            // Descendants that write to them get SIGPIPE.
            pump.outputs = [None, None];
            return;
        }
        if let Some(deadline) = pump.deadline {
            driven.deadlines.insert((deadline, key));
        }
        driven.pumps.insert(key, pump);
    }

    fn watch(&self, pump: &Pump, key: u64) -> nix::Result<()> {
        for (descriptor, purpose, flags) in watched(pump) {
            if let Some(descriptor) = descriptor {
                let event = EpollEvent::new(flags, key << 2 | purpose);
                self.epoll.add(descriptor, event)?;
            }
        }
        Ok(())
    }

    /// Removes a descriptor that is about to be closed. Closing alone does not remove it (epoll(7))
    /// while a child that has not called execve has a copy, and the kernel would go on reporting it.
    fn unwatch(&self, descriptor: Option<BorrowedFd<'_>>) {
        if let Some(descriptor) = descriptor {
            let _ = self.epoll.delete(descriptor);
        }
    }

    /// Handles one event.
    fn handle(&self, driven: &mut Driven, data: u64, buffer: &mut Buffer) {
        let key = data >> 2;
        let Some(pump) = driven.pumps.get_mut(&key) else {
            return;
        };
        let purpose = data & 3;
        match purpose {
            STDOUT | STDERR => {
                let stream = Stream::ALL[usize::from(purpose == STDERR)];
                if pump.read(stream, buffer, &mut |_, _, _| {}) {
                    self.unwatch(pump.output(stream));
                    pump.outputs[stream.index()] = None;
                }
            }
            INPUT => {
                if pump.feed() {
                    self.unwatch(pump.input());
                    pump.input = None;
                }
            }
            _ => {
                // The process reads no more input, reaped or not.
                self.unwatch(pump.input());
                let (deadline, pidfd) = (pump.deadline, pump.pidfd().cloned());
                if pump.finish(buffer) {
                    self.unwatch(pidfd.as_ref().map(|pidfd| pidfd.as_fd()));
                    if let Some(deadline) = deadline {
                        driven.deadlines.remove(&(deadline, key));
                    }
                }
            }
        }
        if pump.is_done() {
            driven.pumps.remove(&key);
        }
    }
}

fn spawn_thread(name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    std::thread::Builder::new()
        .name(name.to_owned())
        .stack_size(256 * 1024)
        .spawn(body)
        .map_err(|error| Error::io("cannot start the supervisor", &error))?;
    Ok(())
}

/// The descriptors of a pump, each with its purpose and the events to watch for.
fn watched(pump: &Pump) -> [(Option<BorrowedFd<'_>>, u64, EpollFlags); 4] {
    let pidfd = pump.pidfd().map(|pidfd| pidfd.as_fd());
    [
        (pump.output(Stream::Stdout), STDOUT, EpollFlags::EPOLLIN),
        (pump.output(Stream::Stderr), STDERR, EpollFlags::EPOLLIN),
        (pump.input(), INPUT, EpollFlags::EPOLLOUT),
        (pidfd, PIDFD, EpollFlags::EPOLLIN),
    ]
}

/// Kills processes whose time is up, all that are due in one search of /proc. The thread exists from
/// the start, because the processes it kills may leave no room for another one.
fn kill_due(due: &Receiver<Vec<Arc<Process>>>) {
    while let Ok(mut processes) = due.recv() {
        processes.extend(due.try_iter().flatten());
        kill_trees(&processes, Reason::Timeout);
    }
}

/// The pumps that the thread drives.
#[derive(Default)]
struct Driven {
    pumps: HashMap<u64, Pump>,
    deadlines: BTreeSet<(Instant, u64)>,
    next_key: u64,
}

impl Driven {
    /// The time until the next deadline, rounded up, so that it has passed afterwards.
    fn timeout(&self) -> EpollTimeout {
        self.deadlines
            .first()
            .map_or(EpollTimeout::NONE, |(at, _)| {
                let left = at.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
                EpollTimeout::try_from(left).unwrap_or(EpollTimeout::MAX)
            })
    }

    /// Hands the processes whose deadline has passed to the thread that kills them.
    fn enforce_deadlines(&mut self, killer: &Sender<Vec<Arc<Process>>>) {
        let now = Instant::now();
        let mut due = Vec::new();
        while let Some((at, key)) = self.deadlines.first().copied()
            && at <= now
        {
            self.deadlines.pop_first();
            if let Some(pump) = self.pumps.get_mut(&key)
                && pump.take_due(now)
            {
                due.push(Arc::clone(pump.process()));
            }
        }
        if !due.is_empty() {
            // Fails only when the server ends.
            let _ = killer.send(due);
        }
    }
}
