//! Writing to the stdin of a running process.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use nix::errno::Errno;

use super::process::{Process, StdinSlot};
use crate::client::Peer;
use crate::error::{Error, Kind, Result};
use crate::sync::lock;
use crate::sys::{Events, PollEntry, poll};

/// The exclusive right to write to a process, returned when dropped.
pub struct StdinWriter {
    process: Arc<Process>,
    pipe: Option<OwnedFd>,
}

impl Process {
    /// Takes the writing end of its stdin.
    ///
    /// # Errors
    /// `StdinClosed`; `StdinBusy` if another client is writing.
    pub fn stdin(self: &Arc<Self>) -> Result<StdinWriter> {
        let mut slot = lock(&self.stdin);
        match std::mem::replace(&mut *slot, StdinSlot::Busy) {
            StdinSlot::Open(pipe) => Ok(StdinWriter {
                process: Arc::clone(self),
                pipe: Some(pipe),
            }),
            StdinSlot::Closed => {
                *slot = StdinSlot::Closed;
                Err(closed(self))
            }
            StdinSlot::Busy => {
                let why = "another request is writing to it; wait for that one";
                let text = format!("cannot write to process {}: {why}", self.id);
                Err(Error::new(Kind::StdinBusy, text))
            }
        }
    }
}

fn closed(process: &Process) -> Error {
    let why = "its stdin is closed, or was given when it started";
    let text = format!("cannot write to process {}: {why}", process.id);
    Error::new(Kind::StdinClosed, text)
}

impl StdinWriter {
    /// Writes all of `data` at the pace of the process. Polls `client` meanwhile, so that a client that
    /// disconnects does not leave a thread waiting for a process that never reads.
    ///
    /// # Errors
    /// `StdinClosed` if the process does not read any more; `StdinBusy` if the client disconnected.
    pub fn write(&mut self, mut data: &[u8], client: &mut dyn Peer) -> Result<()> {
        while !data.is_empty() {
            let Some(pipe) = &self.pipe else {
                return Err(closed(&self.process));
            };
            match nix::unistd::write(pipe, data) {
                Ok(count) => {
                    data = &data[count..];
                    continue;
                }
                Err(Errno::EAGAIN | Errno::EINTR) => {}
                Err(_) => {
                    self.pipe = None;
                    continue;
                }
            }
            let pidfd = self.process.pidfd();
            let mut entries = [
                PollEntry::new(pipe.as_fd(), Events::WRITABLE),
                PollEntry::new(pidfd.as_ref().map(|pidfd| pidfd.as_fd()), Events::READABLE),
                PollEntry::new(client.descriptor(), client.interest()),
            ];
            poll(&mut entries, None);
            let [writable, ended, client_events] = entries.map(|entry| entry.events());
            if client.ready(client_events).is_err() {
                let text = "the client went away while the process was not reading";
                return Err(Error::new(Kind::StdinBusy, text));
            }
            if (ended.any() || pidfd.is_none()) && !writable.any() {
                self.pipe = None;
            }
        }
        Ok(())
    }

    /// Ends the process's input.
    pub fn close(mut self) {
        self.pipe = None;
    }
}

impl Drop for StdinWriter {
    fn drop(&mut self) {
        let mut slot = lock(&self.process.stdin);
        // `publish` sets the exit before it takes this lock, so the pipe cannot outlive the process.
        let ended = self.process.exit().is_some();
        *slot = match self.pipe.take() {
            Some(pipe) if !ended => StdinSlot::Open(pipe),
            _ => StdinSlot::Closed,
        };
    }
}
