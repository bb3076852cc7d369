//! Running commands, and what can be done to a process.

use std::sync::Arc;
use std::time::Instant;

use crate::client::{Disconnected, Peer};
use crate::error::{Detail, Error, Kind, Result};
use crate::fault;
use crate::limits::ledger::Item;
use crate::process::registry::StartOutcome;
use crate::process::ring::Cursor;
use crate::process::{Extent, OnDisconnect, Process, Pump, StdinWriter, Subscriber};
use crate::spec::command::{CommandSpec, StdinSource, TerminalSize};
use crate::threads::panics::contain;
use crate::workspace::lease::Workspace;
use crate::workspace::upload::UploadSource;

/// Bytes of input that one step passes to a process.
const STDIN_BYTES: usize = 64 * 1024;

/// The same in a workspace that holds its share of the server's memory.
const LEAST_STDIN_BYTES: usize = 4 * 1024;

/// A process that one client follows to its end: one it started, or one it joined by its id.
///
/// The client counts as one of the process's until it has followed it, or this value is dropped before: then it is as
/// if it had disconnected.
pub struct Foreground {
    process: Arc<Process>,
    /// `None` if the process was already there.
    pump: Option<Pump>,
    is_attached: bool,
    /// What becomes of the process if the client disconnects first.
    on_disconnect: OnDisconnect,
    is_followed: bool,
}

impl Foreground {
    pub fn process(&self) -> &Arc<Process> {
        &self.process
    }

    /// Whether the process was already there.
    pub fn is_attached(&self) -> bool {
        self.is_attached
    }

    /// Sends the output from its beginning, and the exit. If the process still runs at `until`, it goes on in the
    /// background.
    pub fn follow(mut self, subscriber: &mut dyn Subscriber, until: Option<Instant>) {
        let process = &self.process;
        if let Some(pump) = self.pump.take() {
            pump.run_foreground(subscriber, self.on_disconnect, until);
        } else {
            let extent = until.map_or(Extent::Exit, Extent::Until);
            match process.follow(Cursor::default(), extent, subscriber) {
                Ok(()) if process.exit().is_some() => {}
                Ok(()) => process.leave(OnDisconnect::Keep),
                Err(Disconnected) => process.leave(self.on_disconnect),
            }
        }
        self.is_followed = true;
    }
}

impl Drop for Foreground {
    fn drop(&mut self) {
        if !self.is_followed {
            // To kill a tree is no small thing, and a panic may be what drops this.
            let _ = contain(|| self.process.leave(self.on_disconnect));
        }
    }
}

/// The process group that a signal is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SignalGroup {
    /// The process's own.
    Own,
    /// The one in the foreground of its terminal.
    Foreground,
}

/// One request to write to a process's input.
struct StdinRequest {
    process: Arc<Process>,
    /// Held for the whole request if the input is a pipe. At a terminal others may type between two parts.
    pipe: Option<StdinWriter>,
    written: u64,
}

impl StdinRequest {
    fn begin(process: Arc<Process>, client: &mut dyn Peer) -> Result<Self> {
        let pipe = if process.terminal().is_ok() {
            process.stdin_in_turn(client).map(|_| None)
        } else {
            process.stdin().map(Some)
        };
        Ok(Self {
            process,
            pipe: pipe.map_err(|error| with_written(error, 0))?,
            written: 0,
        })
    }

    fn write(&mut self, data: &[u8], client: &mut dyn Peer) -> Result<()> {
        self.try_write(data, client)
            .map_err(|error| with_written(error, self.written))
    }

    fn try_write(&mut self, data: &[u8], client: &mut dyn Peer) -> Result<()> {
        let mut turn;
        let writer = if let Some(pipe) = &mut self.pipe {
            pipe
        } else {
            turn = self.process.stdin_in_turn(client)?;
            &mut turn
        };
        let before = writer.written();
        let result = writer.write(data, client);
        self.written += writer.written() - before;
        result
    }

    /// Ends a pipe; at a terminal, types the character that says so to a program that reads lines.
    fn end(mut self, client: &mut dyn Peer) -> Result<()> {
        if let Some(pipe) = self.pipe.take() {
            pipe.close();
            return Ok(());
        }
        let character = self.process.terminal()?.end_of_file_character();
        self.write(&[character], client)
    }
}

/// Every failure to write tells how many bytes of the request were written before.
fn with_written(error: Error, written: u64) -> Error {
    error.with("written", Detail::Number(written))
}

impl Workspace {
    /// Starts a command that runs without a client, or finds the process that already has its id. Its input stays open
    /// unless it is given.
    ///
    /// # Errors
    /// The command cannot start, its id belongs to a different command, or it asks for more than the workspace
    /// allows.
    pub fn start_background(&self, mut spec: CommandSpec) -> Result<Arc<Process>> {
        spec.background = true;
        if spec.input == StdinSource::Empty {
            spec.input = StdinSource::Open;
        }
        // A pump that is dropped leaves the process to the supervisor.
        let (process, _pump) = self.start(spec)?;
        Ok(process)
    }

    /// Starts a command that a client follows, or finds the process that already has its id. `on_disconnect` decides
    /// about it if the client disconnects.
    ///
    /// # Errors
    /// As for [`Workspace::start_background`].
    pub fn run_foreground(
        &self,
        mut spec: CommandSpec,
        on_disconnect: OnDisconnect,
    ) -> Result<Foreground> {
        spec.background = false;
        let (process, pump) = self.start(spec)?;
        let is_attached = pump.is_none();
        if is_attached {
            process.join();
        }
        Ok(Foreground {
            process,
            pump,
            is_attached,
            on_disconnect,
            is_followed: false,
        })
    }

    /// A process, and its pump if it was started.
    fn start(&self, spec: CommandSpec) -> Result<(Arc<Process>, Option<Pump>)> {
        Ok(match self.processes.start(spec, &self.confinement)? {
            StartOutcome::Started(pump) => (Arc::clone(pump.process()), Some(pump)),
            StartOutcome::AlreadyExists(process) => (process, None),
        })
    }

    /// A process by its id, or by its pid.
    ///
    /// # Errors
    /// `NotFound` if no known process has that name.
    pub fn process(&self, name: &str) -> Result<Arc<Process>> {
        self.processes.find(name).ok_or_else(|| no_process(name))
    }

    /// Sends a signal to a process's group, or to the foreground group of its terminal. False if the
    /// process, or the group, has ended.
    ///
    /// # Errors
    /// `NotFound`, `NotPty`, or the kernel refuses the signal; `Paused` for SIGCONT while nothing may go on.
    pub fn signal(
        &self,
        process: &str,
        signal: i32,
        group: SignalGroup,
    ) -> Result<(Arc<Process>, bool)> {
        let process = self.process(process)?;
        if signal == libc::SIGCONT && self.clock().is_stopped() {
            let text = format!(
                "cannot let process {} go on: the sandbox is paused; resume it first",
                process.id
            );
            return Err(Error::new(Kind::Paused, text));
        }
        let signaled = match group {
            SignalGroup::Own => process.signal(signal)?,
            SignalGroup::Foreground => process.signal_foreground(signal)?,
        };
        Ok((process, signaled))
    }

    /// Sets the size of a process's terminal.
    ///
    /// # Errors
    /// `NotFound`, `NotPty`, `NotRunning`.
    pub fn resize(&self, process: &str, size: TerminalSize) -> Result<Arc<Process>> {
        let process = self.process(process)?;
        process.resize(size)?;
        Ok(process)
    }

    /// Writes all of `source` to a process's input, and closes the input if `eof` is set. At a terminal it
    /// is typed, part by part between what others type, and `eof` types the end-of-file character. Returns
    /// the bytes of `source`.
    ///
    /// # Errors
    /// `NotFound`; the input is closed, another client is writing to it, or nothing reads a terminal: with
    /// the bytes that were written; the source breaks off.
    pub fn write_stdin<S: UploadSource>(
        &self,
        process: &str,
        source: &mut S,
        eof: bool,
    ) -> std::result::Result<u64, S::Error> {
        let process = self.process(process)?;
        let mut client = source.client();
        let mut input = StdinRequest::begin(process, &mut *client)?;
        let charge = self
            .ledger
            .charge_up_to(Item::Bodies, STDIN_BYTES, LEAST_STDIN_BYTES);
        let mut buffer = vec![0; charge.bytes()];
        loop {
            let count = source.read(&mut buffer)?;
            if count == 0 {
                break;
            }
            input.write(&buffer[..count], &mut *client)?;
            fault::point("stdin");
        }
        let written = input.written;
        if eof {
            input.end(&mut *client)?;
        }
        Ok(written)
    }

    /// Kills a process with its descendants and forgets it. True if this call stopped it; false if
    /// it had ended or was deleted before.
    ///
    /// # Errors
    /// `NotFound` if there never was a process of that name; or the kernel has not let it die yet.
    pub fn delete_process(&self, name: &str) -> Result<bool> {
        let killed = self.processes.delete(name)?;
        killed.ok_or_else(|| no_process(name))
    }
}

fn no_process(name: &str) -> Error {
    let text =
        format_args!("there is no process {name}; the list of processes has those that are known");
    Error::new(Kind::NotFound, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::Reason;
    use crate::process::stdin_tests::{Present, deaf_terminal};

    /// The kind of a failure and the bytes that it says were written.
    fn told<T>(result: Result<T>) -> (Kind, Option<Detail>) {
        let mut error = result.err().unwrap();
        let mut details = error.take_details().into_iter();
        let written = details.find_map(|(name, detail)| (name == "written").then_some(detail));
        (error.kind(), written)
    }

    #[test]
    fn every_failure_to_write_tells_what_was_written() {
        let pump = deaf_terminal();
        let process = pump.process();
        let begin = |client: &mut Present| StdinRequest::begin(Arc::clone(process), client);
        let mut client = Present::new();
        let mut request = begin(&mut client).unwrap();
        request.write(b"some", &mut client).unwrap();

        // Another client has the turn, for longer than anybody waits.
        let turn = process.stdin().unwrap();
        let busy = |written| (Kind::StdinBusy, Some(Detail::Number(written)));
        assert_eq!(told(begin(&mut client)), busy(0));
        assert_eq!(told(request.write(b"more", &mut client)), busy(4));
        drop(turn);

        // Nothing is read.
        let (kind, written) = told(request.write(&b"line\n".repeat(200_000), &mut client));
        assert_eq!(kind, Kind::StdinBusy);
        assert_eq!(written, Some(Detail::Number(request.written)));
        assert!((5..1_000_000).contains(&request.written));

        process.kill_tree(Reason::Killed);
    }
}
