//! Attaching to the terminal of a process.
//!
//! The policy that all doors share lives here: who may type, how much input waits until it is typed, and the
//! order in which a viewer learns what happens. How a viewer reads the log and takes its turn to type is in
//! `process::viewer`, because it needs the log and the terminal and no policy. Frames, JSON and sockets belong
//! to the door. Nothing here blocks: a door polls its client and the terminal together, on one thread.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::limits::ledger::{Charge, Item, Ledger};
use crate::process::registry::Registry;
use crate::process::ring::Stream;
use crate::process::{Exit, Process, Start, View, Viewer};
use crate::spec::command::TerminalSize;
use crate::workspace::lease::Workspace;

/// Bytes of input that wait for the terminal before no more is taken.
const MAX_WAITING_BYTES: usize = 64 * 1024;

/// Pieces of input that wait before no more is taken.
const MAX_WAITING: usize = 256;

/// Input that waits up to this size is not charged.
const FREE_WAITING_BYTES: usize = 8 * 1024;

/// How a client attaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttachSpec {
    /// Where its output begins.
    pub start: Start,
    /// Whether it may type.
    pub may_type: bool,
    /// Whether nobody else who is attached may type from then on.
    pub takes_over: bool,
    /// The size that the terminal gets.
    pub size: Option<TerminalSize>,
}

/// The next event for a viewer.
#[derive(Debug, PartialEq, Eq)]
pub enum ViewerEvent<'a> {
    /// Another viewer has taken the input over: this one may type no more.
    ReadOnly,
    /// Another client has changed the size.
    Resized(TerminalSize),
    /// Output. A replay is what was there before the viewer.
    Output { bytes: &'a [u8], is_replay: bool },
    /// A gap in the output.
    Dropped { offset: u64, bytes: u64 },
    /// The replay is over. What follows begins at this offset.
    Live { offset: u64 },
    /// The process has ended; nothing follows.
    Ended(Exit),
}

/// A client that is attached to a terminal.
pub struct Attachment {
    viewer: Viewer,
    registry: Arc<Registry>,
    ledger: Arc<Ledger>,
    /// The end of the replay; `None` after it.
    replay_end: Option<u64>,
    /// Where the output ends, once the process has ended. A descendant may write without end.
    end: Option<(Exit, u64)>,
    is_typist: bool,
    waiting: VecDeque<QueuedInput>,
    waiting_bytes: usize,
    charge: Option<Charge>,
}

/// Input that is not typed yet.
enum QueuedInput {
    Bytes { bytes: Vec<u8>, typed: usize },
    EndOfFile,
}

impl Workspace {
    /// Attaches to the terminal of a process, even of one that has ended.
    ///
    /// # Errors
    /// `NotFound`; `NotPty`; `Invalid` if there is no such offset yet; or the terminal cannot get the size.
    pub fn attach(&self, process: &str, spec: AttachSpec) -> Result<Attachment> {
        let process = self.process(process)?;
        let mut viewer = Viewer::new(&process, spec.start)?;
        if let Some(size) = spec.size {
            match viewer.resize(size) {
                Err(error) if error.kind() == Kind::NotRunning => {}
                result => result?,
            }
        }
        if spec.takes_over {
            viewer.take_over()?;
        } else if spec.may_type {
            viewer.join_typists()?;
        }
        Ok(Attachment {
            viewer,
            registry: Arc::clone(&self.processes),
            ledger: Arc::clone(&self.ledger),
            replay_end: Some(process.written(Stream::Stdout)),
            end: None,
            is_typist: spec.may_type,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            charge: None,
        })
    }
}

impl Attachment {
    pub fn process(&self) -> &Arc<Process> {
        self.viewer.process()
    }

    /// The offset of the next byte of output.
    pub fn offset(&self) -> u64 {
        self.viewer.offset()
    }

    /// The size of the terminal, as far as the viewer was told.
    pub fn size(&self) -> TerminalSize {
        self.viewer.size()
    }

    /// Whether it may type, as far as the viewer was told.
    pub fn is_typist(&self) -> bool {
        self.is_typist
    }

    /// Whether the process ends because its workspace does.
    pub fn is_workspace_ending(&self) -> bool {
        self.registry.is_closed()
    }

    /// The next event for the viewer; `None` if nothing has happened.
    pub fn next_event(&mut self) -> Option<ViewerEvent<'_>> {
        if self.is_typist && !self.viewer.may_type() {
            self.is_typist = false;
            self.forget_input();
            return Some(ViewerEvent::ReadOnly);
        }
        if let Some(size) = self.viewer.new_size() {
            return Some(ViewerEvent::Resized(size));
        }
        // Read in this order: once the exit is known, all output of the process is in the log.
        if self.end.is_none() {
            let exit = self.viewer.exit();
            let written = self.process().written(Stream::Stdout);
            self.end = exit.map(|exit| (exit, written));
        }
        let offset = self.viewer.offset();
        if self.replay_end.take_if(|end| *end <= offset).is_some() {
            return Some(ViewerEvent::Live { offset });
        }
        if let Some((exit, end)) = self.end
            && end <= offset
        {
            return Some(ViewerEvent::Ended(exit));
        }
        let end = self.end.map_or(u64::MAX, |(_, end)| end);
        let is_replay = self.replay_end.is_some();
        let view = self.viewer.read(self.replay_end.unwrap_or(end))?;
        Some(match view {
            View::Data(bytes) => ViewerEvent::Output { bytes, is_replay },
            View::Dropped { offset, bytes } => ViewerEvent::Dropped { offset, bytes },
        })
    }

    /// # Errors
    /// `ReadOnly` if the viewer may not type.
    fn check_typist(&mut self) -> Result<()> {
        if self.viewer.may_type() {
            return Ok(());
        }
        let text = "this connection only watches; take the input over to type";
        Err(Error::new(Kind::ReadOnly, text))
    }

    /// Types the bytes in one piece when it is their turn.
    ///
    /// # Errors
    /// `ReadOnly`; `OverLimit` if there is no room for what waits.
    pub fn type_bytes(&mut self, bytes: Vec<u8>) -> Result<()> {
        self.check_typist()?;
        let waiting = self.waiting_bytes + bytes.capacity();
        if waiting > FREE_WAITING_BYTES {
            match &mut self.charge {
                Some(charge) => charge.set(waiting)?,
                None => self.charge = Some(self.ledger.charge(Item::Stdin, waiting)?),
            }
        }
        self.waiting_bytes = waiting;
        self.waiting
            .push_back(QueuedInput::Bytes { bytes, typed: 0 });
        Ok(())
    }

    /// Types the character that ends a program's input, after what waits.
    ///
    /// # Errors
    /// `ReadOnly`.
    pub fn type_end_of_file(&mut self) -> Result<()> {
        self.check_typist()?;
        self.waiting.push_back(QueuedInput::EndOfFile);
        Ok(())
    }

    /// Whether more input is taken. If not, it is to be left with the client.
    pub fn takes_input(&self) -> bool {
        self.waiting_bytes < MAX_WAITING_BYTES && self.waiting.len() < MAX_WAITING
    }

    /// Whether there is input that was not typed yet.
    pub fn has_input(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Types what the terminal takes of the waiting input.
    ///
    /// # Errors
    /// `StdinClosed`, `StdinBusy`: nothing takes the input, and it is dropped.
    pub fn advance_input(&mut self) -> Result<()> {
        let result = self.type_waiting();
        if result.is_err() {
            self.forget_input();
        }
        result
    }

    fn type_waiting(&mut self) -> Result<()> {
        while let Some(input) = self.waiting.front_mut() {
            if !self.viewer.may_type() {
                return Ok(());
            }
            let is_typed = match input {
                QueuedInput::EndOfFile => {
                    let character = self.viewer.end_of_file_character()?;
                    self.viewer.type_some(&[character])? > 0
                }
                QueuedInput::Bytes { bytes, typed } => {
                    if *typed < bytes.len() {
                        *typed += self.viewer.type_some(&bytes[*typed..])?;
                    }
                    *typed == bytes.len()
                }
            };
            if !is_typed {
                return Ok(());
            }
            self.viewer.end_turn();
            if let Some(QueuedInput::Bytes { bytes, .. }) = self.waiting.pop_front() {
                self.waiting_bytes -= bytes.capacity();
            }
            if self.waiting_bytes == 0 {
                self.charge = None;
            }
        }
        Ok(())
    }

    fn forget_input(&mut self) {
        self.viewer.end_turn();
        self.waiting.clear();
        self.waiting_bytes = 0;
        self.charge = None;
    }

    /// Lets this viewer type and nobody else.
    ///
    /// # Errors
    /// `NotPty`, which cannot be here.
    pub fn take_over(&mut self) -> Result<()> {
        self.is_typist = true;
        self.viewer.take_over()
    }

    /// Sets the size of the terminal.
    ///
    /// # Errors
    /// `ReadOnly`, `NotRunning`, or the kernel refuses.
    pub fn resize(&mut self, size: TerminalSize) -> Result<()> {
        self.check_typist()?;
        self.viewer.resize(size)
    }

    /// Sends a signal to the foreground group of the terminal.
    ///
    /// # Errors
    /// `ReadOnly`; `NotRunning` if no process is in the foreground; or the kernel refuses the signal.
    pub fn signal_foreground(&mut self, signal: i32) -> Result<()> {
        self.check_typist()?;
        if self.process().signal_foreground(signal)? {
            return Ok(());
        }
        let text = format!("no process is in the foreground of {}", self.process().id);
        Err(Error::new(Kind::NotRunning, text))
    }

    /// What to poll: for readable, and for writable. See [`Viewer::wakeup`] and [`Viewer::typing`].
    pub fn descriptors(&self) -> [Option<BorrowedFd<'_>>; 2] {
        [self.viewer.wakeup(), self.viewer.typing()]
    }

    /// How long to sleep at most.
    pub fn interval(&self) -> Option<Duration> {
        self.viewer.interval()
    }

    /// Is called after a poll, before anything else.
    pub fn clear_wakeup(&self) {
        self.viewer.clear_wakeup();
    }
}
