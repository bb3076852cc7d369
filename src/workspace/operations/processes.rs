//! Running commands, and what can be done to a process.

use std::sync::Arc;

use crate::command::{CommandSpec, StdinSource};
use crate::error::{Error, Kind, Result};
use crate::ledger::Item;
use crate::process::registry::StartOutcome;
use crate::process::ring::Cursor;
use crate::process::{OnDisconnect, Process, Subscriber};
use crate::workspace::lease::Workspace;
use crate::workspace::upload::UploadSource;

/// Bytes of input that one step passes to a process.
const STDIN_BYTES: usize = 64 * 1024;

/// The same in a workspace that holds its share of the server's memory.
const LEAST_STDIN_BYTES: usize = 4 * 1024;

/// The result of a request to run a command.
pub enum Run {
    /// The process runs without a client.
    Background(Arc<Process>),
    /// One client follows the process.
    Foreground(Foreground),
}

/// A process that one client follows to its end: one it started, or one it joined by its id.
pub struct Foreground(StartOutcome);

impl Foreground {
    /// The process.
    pub fn process(&self) -> &Arc<Process> {
        match &self.0 {
            StartOutcome::Started(pump) => pump.process(),
            StartOutcome::AlreadyExists(process) => process,
        }
    }

    /// Whether the process was already there.
    pub fn is_attached(&self) -> bool {
        matches!(self.0, StartOutcome::AlreadyExists(_))
    }

    /// Sends the output from its beginning, and the exit. `on_disconnect` decides about the process
    /// if the client goes away first.
    pub fn follow(self, subscriber: &mut dyn Subscriber, on_disconnect: OnDisconnect) {
        match self.0 {
            StartOutcome::Started(pump) => pump.run_foreground(subscriber, on_disconnect),
            StartOutcome::AlreadyExists(process) => {
                if process.follow(Cursor::default(), true, subscriber).is_err() {
                    process.leave(on_disconnect);
                }
            }
        }
    }
}

impl Workspace {
    /// Runs a command, or finds the process that already has its id. The input of a background
    /// command stays open unless it is given.
    ///
    /// # Errors
    /// The command cannot start, or its id belongs to a different command.
    pub fn run(&self, mut spec: CommandSpec) -> Result<Run> {
        let is_background = spec.background;
        if is_background && spec.input == StdinSource::Empty {
            spec.input = StdinSource::Open;
        }
        let run = Foreground(self.processes.start(spec, &self.confinement)?);
        if is_background {
            // Dropping the pump leaves the process to the supervisor.
            return Ok(Run::Background(Arc::clone(run.process())));
        }
        if run.is_attached() {
            run.process().join();
        }
        Ok(Run::Foreground(run))
    }

    /// A process by its id, or by its pid.
    ///
    /// # Errors
    /// `NotFound` if no known process has that name.
    pub fn process(&self, name: &str) -> Result<Arc<Process>> {
        self.processes.find(name).ok_or_else(|| no_process(name))
    }

    /// Sends a signal to a process's group. False if the process has ended.
    ///
    /// # Errors
    /// `NotFound`, or the kernel refuses the signal.
    pub fn signal(&self, process: &str, signal: i32) -> Result<(Arc<Process>, bool)> {
        let process = self.process(process)?;
        let signaled = process.signal(signal)?;
        Ok((process, signaled))
    }

    /// Writes all of `source` to a process's input, and closes the input if `eof` is set. Returns
    /// the bytes written.
    ///
    /// # Errors
    /// `NotFound`; the input is closed or another client is writing to it; the source breaks off.
    pub fn write_stdin<S: UploadSource>(
        &self,
        process: &str,
        source: &mut S,
        eof: bool,
    ) -> std::result::Result<u64, S::Error> {
        let mut writer = self.process(process)?.stdin()?;
        let mut client = source.client();
        let charge = self
            .ledger
            .charge_up_to(Item::Bodies, STDIN_BYTES, LEAST_STDIN_BYTES);
        let mut buffer = vec![0; charge.bytes()];
        let mut written = 0;
        loop {
            let count = source.read(&mut buffer)?;
            if count == 0 {
                break;
            }
            writer.write(&buffer[..count], &mut *client)?;
            written += count as u64;
        }
        if eof {
            writer.close();
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
    let text = format!("there is no process {name}; GET processes lists those that are known");
    Error::new(Kind::NotFound, text)
}
