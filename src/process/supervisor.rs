//! The one thread that drives every process no client waits for.
//!
//! It sleeps in epoll over their pipes and pidfds, and until the nearest deadline: no thread per
//! process, none per timeout. Besides background processes it gets foreground commands whose client
//! went away, and the pipes that a grandchild keeps open after its command has ended.
//!
//! It must never wait for anything else: it takes only short locks and reads only what is ready.

use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::pump::{Buffer, Pump};
use super::ring::Stream;
use super::{Process, Reason, kill_trees, lock, oom};
use crate::error::{Error, Result};
use crate::logging;
use crate::sys::{Events, PollEntry, poll};

/// Where pumps are left to be driven.
pub struct Supervisor {
    epoll: Epoll,
    wake: EventFd,
    /// Guards the pumps that were handed over and not yet taken up.
    inbox: Mutex<Vec<Pump>>,
}

/// What a descriptor in the epoll set belongs to; the two low bits of its data.
#[derive(Clone, Copy)]
enum Role {
    Stdout = 0,
    Stderr = 1,
    Input = 2,
    Ending = 3,
}

/// The data of the eventfd; no pump has this key.
const WAKE: u64 = u64::MAX;

impl Supervisor {
    /// Starts the thread.
    ///
    /// # Errors
    /// No thread, no descriptor.
    pub fn start() -> Result<Arc<Self>> {
        let failed = |errno| Error::system("cannot start the supervisor", errno);
        let supervisor = Arc::new(Self {
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(failed)?,
            wake: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
                .map_err(failed)?,
            inbox: Mutex::default(),
        });
        supervisor
            .epoll
            .add(&supervisor.wake, EpollEvent::new(EpollFlags::EPOLLIN, WAKE))
            .map_err(failed)?;
        oom::begin();
        let (killer, due) = mpsc::channel();
        std::thread::Builder::new()
            .name("timeouts".to_owned())
            .stack_size(256 * 1024)
            .spawn(move || kill_all(&due))
            .map_err(|error| Error::io("cannot start the supervisor", &error))?;
        let own = Arc::clone(&supervisor);
        std::thread::Builder::new()
            .name("supervisor".to_owned())
            .stack_size(256 * 1024)
            .spawn(move || own.run(&killer))
            .map_err(|error| Error::io("cannot start the supervisor", &error))?;
        Ok(supervisor)
    }

    /// Takes over a pump.
    pub(super) fn adopt(&self, pump: Pump) {
        lock(&self.inbox).push(pump);
        let _ = self.wake.write(1);
    }

    fn run(&self, killer: &Sender<Vec<Arc<Process>>>) {
        let mut driven = Driven::default();
        let mut buffer = Buffer::new();
        let mut events = vec![EpollEvent::empty(); 256];
        loop {
            let timeout = driven
                .deadlines
                .first()
                .map_or(EpollTimeout::NONE, |(at, _)| {
                    // Rounded up, so that a deadline has passed when it is looked at.
                    let left =
                        at.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
                    EpollTimeout::try_from(left).unwrap_or(EpollTimeout::MAX)
                });
            let count = match self.epoll.wait(&mut events, timeout) {
                Ok(count) => count,
                Err(Errno::EINTR) => 0,
                Err(errno) => {
                    logging::info(format_args!("supervisor: epoll_wait: {errno:?}"));
                    return;
                }
            };
            for event in &events[..count] {
                if event.data() == WAKE {
                    let _ = self.wake.read();
                    let arrived = std::mem::take(&mut *lock(&self.inbox));
                    for pump in arrived {
                        self.take_up(&mut driven, pump, &mut buffer);
                    }
                } else {
                    self.step(&mut driven, event.data(), &mut buffer);
                }
            }
            driven.enforce_deadlines(killer);
        }
    }

    fn take_up(&self, driven: &mut Driven, mut pump: Pump, buffer: &mut Buffer) {
        // Its client may have gone away between the end and the last byte.
        pump.finish(buffer);
        if pump.is_over() {
            // Its pipes were mostly held by other commands on their way to execve, and no longer are.
            for stream in Stream::ALL {
                if pump.read(stream, buffer, &mut |_, _, _| {}) {
                    pump.close_output(stream);
                }
            }
            if pump.is_done() {
                return;
            }
        }
        let key = driven.next_key;
        driven.next_key += 1;
        if let Err(errno) = self.watch(&pump, key) {
            // The kernel has no memory for a watch. A process nobody drives would never end for its
            // clients, so it is ended now; nobody listens to what it leaves behind.
            logging::info(format_args!(
                "process {}: cannot be watched ({errno:?}), killed",
                pump.process().id()
            ));
            self.forget(&pump);
            pump.process().kill_tree(Reason::Killed);
            if let Some(ending) = pump.ending() {
                let mut entries = [PollEntry::new(ending, Events::READABLE)];
                poll(&mut entries, Some(Duration::from_secs(1)));
            }
            pump.finish(buffer);
            pump.abandon_outputs();
            return;
        }
        if let Some(deadline) = pump.deadline() {
            driven.deadlines.insert((deadline, key));
        }
        driven.pumps.insert(key, pump);
    }

    /// Takes a pump's descriptors out of the set, as far as they are in it.
    fn forget(&self, pump: &Pump) {
        let outputs = Stream::ALL.map(|stream| pump.output(stream));
        for descriptor in outputs
            .into_iter()
            .chain([pump.input(), pump.ending()])
            .flatten()
        {
            self.stop_watching(Some(descriptor));
        }
    }

    fn stop_watching(&self, descriptor: Option<BorrowedFd<'_>>) {
        if let Some(descriptor) = descriptor {
            let _ = self.epoll.delete(descriptor);
        }
    }

    fn watch(&self, pump: &Pump, key: u64) -> std::result::Result<(), Errno> {
        let watched = [
            (
                pump.output(Stream::Stdout),
                Role::Stdout,
                EpollFlags::EPOLLIN,
            ),
            (
                pump.output(Stream::Stderr),
                Role::Stderr,
                EpollFlags::EPOLLIN,
            ),
            (pump.input(), Role::Input, EpollFlags::EPOLLOUT),
            (pump.ending(), Role::Ending, EpollFlags::EPOLLIN),
        ];
        for (descriptor, role, flags) in watched {
            if let Some(descriptor) = descriptor {
                self.epoll
                    .add(descriptor, EpollEvent::new(flags, key << 2 | role as u64))?;
            }
        }
        Ok(())
    }

    /// Does what one ready descriptor asks for. What is about to be closed is taken out of the epoll set
    /// first: closing alone does not (epoll(7)) while somebody else has a share of it, as a child on
    /// its way to execve may have, and then it would be ready again and again.
    fn step(&self, driven: &mut Driven, data: u64, buffer: &mut Buffer) {
        let key = data >> 2;
        let Some(pump) = driven.pumps.get_mut(&key) else {
            return;
        };
        let discard = &mut |_, _, _: &[u8]| {};
        match data & 3 {
            role if role == Role::Stdout as u64 || role == Role::Stderr as u64 => {
                let stream = Stream::ALL[usize::from(role == Role::Stderr as u64)];
                if pump.read(stream, buffer, discard) {
                    self.stop_watching(pump.output(stream));
                    pump.close_output(stream);
                }
            }
            role if role == Role::Input as u64 => {
                if pump.feed() {
                    self.stop_watching(pump.input());
                    pump.close_input();
                }
            }
            _ => {
                // It has ended, reaped or not, and reads no more.
                self.stop_watching(pump.input());
                let (deadline, pidfd) = (pump.deadline(), pump.pidfd());
                if pump.finish(buffer).is_some() {
                    self.stop_watching(pidfd.as_ref().map(|pidfd| pidfd.as_fd()));
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

/// Kills what is due, all that has become so meanwhile in one go: looking for what descends from it
/// costs walks through /proc, as many as they make of it, and others' output must be moved on
/// meanwhile. The thread is there from the start, for what it kills may have taken all others.
fn kill_all(due: &Receiver<Vec<Arc<Process>>>) {
    while let Ok(mut processes) = due.recv() {
        processes.extend(due.try_iter().flatten());
        kill_trees(&processes, Reason::Timeout);
    }
}

/// What the thread has in hand.
#[derive(Default)]
struct Driven {
    pumps: HashMap<u64, Pump>,
    deadlines: BTreeSet<(Instant, u64)>,
    next_key: u64,
}

impl Driven {
    /// Hands over what is due.
    fn enforce_deadlines(&mut self, killer: &Sender<Vec<Arc<Process>>>) {
        let now = Instant::now();
        let mut due = Vec::new();
        while let Some((at, key)) = self.deadlines.first().copied()
            && at <= now
        {
            self.deadlines.pop_first();
            if let Some(pump) = self.pumps.get_mut(&key)
                && pump.is_due(now)
            {
                due.push(Arc::clone(pump.process()));
            }
        }
        if due.is_empty() {
            return;
        }
        // Nobody to hand them to: the thread ends with the server.
        let _ = killer.send(due);
    }
}
