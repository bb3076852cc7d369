//! Writing to the stdin of a running process: into its pipe, or as if it was typed at its terminal.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use super::pace::{self, PipePace};
use super::process::{Process, StdinSlot};
use crate::client::Peer;
use crate::error::{Error, Kind, Result};
use crate::sys::{Events, PollEntry, poll};
use crate::threads::lock::lock;
use crate::threads::priority::PacedRequest;

/// How long a terminal may take nothing of what is typed. Shorter in unit tests, which wait for it.
const TYPING_LIMIT: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 60 });

/// How often a terminal that took nothing is tried again, besides when the kernel says so: it does not
/// for every change of settings by which a terminal takes more.
const TYPING_INTERVAL: Duration = Duration::from_millis(100);

/// The exclusive right to write to a process, returned when dropped.
pub struct StdinWriter {
    process: Arc<Process>,
    end: Option<Arc<OwnedFd>>,
    written: u64,
    /// When the process took the last bytes.
    taken_at: Instant,
    pace: PipePace,
}

impl Process {
    /// Takes the writing end of its stdin.
    ///
    /// # Errors
    /// `StdinClosed`; `StdinBusy` if another client is writing. All followers are woken up when that one has
    /// finished.
    pub fn stdin(self: &Arc<Self>) -> Result<StdinWriter> {
        let mut slot = lock(&self.stdin);
        let busy = |is_awaited| StdinSlot::Busy { is_awaited };
        match std::mem::replace(&mut *slot, busy(false)) {
            StdinSlot::Open(end) => Ok(StdinWriter {
                process: Arc::clone(self),
                end: Some(end),
                written: 0,
                taken_at: Instant::now(),
                pace: PipePace::of(self.ledger()),
            }),
            StdinSlot::Closed => {
                *slot = StdinSlot::Closed;
                Err(closed(self))
            }
            StdinSlot::Busy { .. } => {
                *slot = busy(true);
                let why = "another request is writing to it; wait for that one";
                let text = format!("cannot write to process {}: {why}", self.id);
                Err(Error::new(Kind::StdinBusy, text))
            }
        }
    }

    /// As [`Process::stdin`], and waits for other writers as long as they may take.
    ///
    /// # Errors
    /// `StdinClosed`; `StdinBusy` if another client is still writing, or `client` disconnected.
    pub fn stdin_in_turn(self: &Arc<Self>, client: &mut dyn Peer) -> Result<StdinWriter> {
        let listener = self.notifier.listen();
        let deadline = Instant::now() + TYPING_LIMIT;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.stdin() {
                Err(error) if error.kind() == Kind::StdinBusy && !left.is_zero() => {}
                result => return result,
            }
            PacedRequest::step();
            let mut entries = [
                PollEntry::new(listener.descriptor(), Events::READABLE),
                PollEntry::new(client.descriptor(), client.interest()),
            ];
            poll(
                &mut entries,
                Some(listener.interval().unwrap_or(left).min(left)),
            );
            let client_events = entries[1].events();
            listener.clear();
            client.ready(client_events).map_err(|_| disconnected())?;
        }
    }
}

fn closed(process: &Process) -> Error {
    let why = if process.terminal.is_some() {
        "it has ended"
    } else {
        "its stdin is closed, or was given when it started"
    };
    let text = format!("cannot write to process {}: {why}", process.id);
    Error::new(Kind::StdinClosed, text)
}

fn disconnected() -> Error {
    let text = "the client disconnected while the process was not reading";
    Error::new(Kind::StdinBusy, text)
}

impl StdinWriter {
    /// How often to try again what a terminal has not taken.
    pub const RETRY_INTERVAL: Duration = TYPING_INTERVAL;

    /// Where to poll for room; `None` while it takes nothing whatever room there is.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        let end = self.end.as_ref().map(|end| end.as_fd());
        end.filter(|_| self.pace.rests_until().is_none())
    }

    /// Whether another client was refused meanwhile.
    pub fn is_awaited(&self) -> bool {
        matches!(
            *lock(&self.process.stdin),
            StdinSlot::Busy { is_awaited: true }
        )
    }

    /// Bytes that were written so far.
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Writes what the process takes without waiting; returns the bytes, 0 if it takes none now.
    ///
    /// # Errors
    /// `StdinClosed` if the process does not read any more; `StdinBusy` if a terminal has taken nothing
    /// for [`TYPING_LIMIT`].
    pub fn write_some(&mut self, data: &[u8]) -> Result<usize> {
        let Some(end) = &self.end else {
            return Err(closed(&self.process));
        };
        if self.pace.rests_until().is_some() {
            // That nothing is taken is no fault of the process.
            self.taken_at = Instant::now();
            return Ok(0);
        }
        self.pace.begin();
        let result = nix::unistd::write(end, data);
        self.pace.charge(pace::CALL);
        match result {
            Ok(count) => {
                self.written += count as u64;
                self.taken_at = Instant::now();
                Ok(count)
            }
            Err(Errno::EAGAIN | Errno::EINTR) => {
                if self.process.terminal.is_some() && self.taken_at.elapsed() >= TYPING_LIMIT {
                    let text = format!(
                        "nothing reads the terminal of process {}: it has taken no input for {} seconds",
                        self.process.id,
                        TYPING_LIMIT.as_secs()
                    );
                    return Err(Error::new(Kind::StdinBusy, text));
                }
                Ok(0)
            }
            Err(_) => {
                self.end = None;
                Err(closed(&self.process))
            }
        }
    }

    /// Writes all of `data` at the pace of the process. Polls `client` meanwhile, so that a client that
    /// disconnects does not leave a thread waiting for a process that never reads.
    ///
    /// # Errors
    /// As [`StdinWriter::write_some`]; `StdinBusy` if the client disconnected.
    pub fn write(&mut self, mut data: &[u8], client: &mut dyn Peer) -> Result<()> {
        while !data.is_empty() {
            let count = self.write_some(data)?;
            data = &data[count..];
            if count == 0 {
                self.wait(client)?;
            }
        }
        Ok(())
    }

    /// Waits until the process may take more.
    fn wait(&mut self, client: &mut dyn Peer) -> Result<()> {
        let is_terminal = self.process.terminal.is_some();
        let rests_until = self.pace.rests_until();
        let rest = rests_until.map(|until| until.saturating_duration_since(Instant::now()));
        let limit = is_terminal.then_some(TYPING_INTERVAL).or(rest);
        // While the pipe rests it is not known whether there is room in it.
        let pidfd = self.process.pidfd().filter(|_| rest.is_none());
        let mut entries = [
            PollEntry::new(self.descriptor(), Events::WRITABLE),
            PollEntry::new(pidfd.as_ref().map(|pidfd| pidfd.as_fd()), Events::READABLE),
            PollEntry::new(client.descriptor(), client.interest()),
        ];
        poll(&mut entries, limit);
        let [writable, ended, client_events] = entries.map(|entry| entry.events());
        client.ready(client_events).map_err(|_| disconnected())?;
        // What the process has left behind may read its pipe, but a terminal goes with its session.
        let has_ended = ended.any() || (pidfd.is_none() && rest.is_none());
        if has_ended && (is_terminal || !writable.any()) {
            self.end = None;
        }
        Ok(())
    }

    /// Ends the process's input.
    pub fn close(mut self) {
        self.end = None;
    }
}

impl Drop for StdinWriter {
    fn drop(&mut self) {
        let mut slot = lock(&self.process.stdin);
        // `publish` sets the exit before it takes this lock, so the pipe cannot outlive the process.
        let ended = self.process.exit().is_some();
        let (next, closed) = match self.end.take() {
            Some(end) if !ended => (StdinSlot::Open(end), None),
            end => (StdinSlot::Closed, end),
        };
        let before = std::mem::replace(&mut *slot, next);
        drop(slot);
        // Others may need the slot, and closing a pipe can take long.
        drop(closed);
        if matches!(before, StdinSlot::Busy { is_awaited: true }) {
            self.process.notifier.notify();
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::fd::BorrowedFd;

    use super::*;
    use crate::client::Disconnected;
    use crate::confine::Confinement;
    use crate::limits::activity::Activity;
    use crate::limits::ledger::Budget;
    use crate::process::Reason;
    use crate::process::pump::Pump;
    use crate::process::registry::{OpenCounts, Registry, Shared, StartOutcome};
    use crate::spec::command::{CommandLine, CommandSpec, TerminalSpec};

    /// A client that stays.
    pub(crate) struct Present(OwnedFd);

    impl Present {
        pub(crate) fn new() -> Self {
            Self(std::fs::File::open("/dev/null").unwrap().into())
        }
    }

    impl Peer for Present {
        fn descriptor(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }

        fn interest(&self) -> Events {
            Events::NONE
        }

        fn ready(&mut self, _: Events) -> std::result::Result<(), Disconnected> {
            Ok(())
        }
    }

    /// A program at a terminal that never reads.
    pub(crate) fn deaf_terminal() -> Pump {
        let shared = Shared::new(4096, 4096).unwrap();
        let ledger = Budget::new(1 << 20).whole();
        let registry = Registry::new(
            shared,
            Arc::new(Activity::new()),
            ledger,
            OpenCounts::new(),
            1,
        );
        let line = CommandLine::Program(vec!["sleep".to_owned(), "1000".to_owned()]);
        let mut spec = CommandSpec::new(line, Vec::new(), None).unwrap();
        spec.terminal = Some(TerminalSpec::default());
        let confinement = Confinement::for_test();
        let Ok(StartOutcome::Started(pump)) = registry.start(spec, &confinement) else {
            panic!("it has not started");
        };
        pump
    }

    #[test]
    fn a_terminal_that_nobody_reads_lets_its_writer_go() {
        let pump = deaf_terminal();
        let process = Arc::clone(pump.process());
        let mut client = Present::new();

        let mut writer = process.stdin().unwrap();
        let started = Instant::now();
        let error = writer.write(&b"line\n".repeat(200_000), &mut client);
        assert_eq!(error.unwrap_err().kind(), Kind::StdinBusy);
        assert!(started.elapsed() >= TYPING_LIMIT);
        assert!((1..1_000_000).contains(&writer.written()));
        let refused = process.stdin_in_turn(&mut client).map(|_| ());
        assert_eq!(refused.unwrap_err().kind(), Kind::StdinBusy);
        drop(writer);
        assert!(
            process.stdin_in_turn(&mut client).is_ok(),
            "it is free again"
        );

        process.kill_tree(Reason::Killed);
        let mut writer = process.stdin().unwrap();
        let error = writer.write(&b"line\n".repeat(200_000), &mut client);
        assert_eq!(error.unwrap_err().kind(), Kind::StdinClosed);
    }
}
