//! The socket of the bridge: what it says, and what is sent to it.

use std::cell::Cell;
use std::io::{ErrorKind, Read, Write};
use std::sync::Arc;

use super::received::TURN_BYTES;
use super::{Driver, Fate, MAX_ANSWERS, SPARE_LIMIT, Stage};
use crate::error::{Error, Kind};
use crate::interpreter::context::Phase;
use crate::interpreter::event::Event;
use crate::interpreter::frame::{self, Incoming, Wire};

/// Why an interpreter is broken off whose tenant has no memory for what its bridge sends.
const TOO_LARGE: &str = "its message is larger than this workspace may hold";

impl Driver {
    /// Sends what the bridge takes.
    pub(super) fn flush(&mut self) {
        while self.sent < self.outgoing.len() && self.closed.is_none() {
            match self.socket.write(&self.outgoing[self.sent..]) {
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    // Code that never takes all of it makes it no longer.
                    if self.sent > self.outgoing.len() / 2 {
                        self.outgoing.drain(..self.sent);
                        self.sent = 0;
                    }
                    return;
                }
                Err(_) => self.closed = Some(self.clock().now()),
            }
        }
        self.sent_charges.clear();
        if self.outgoing.is_empty() {
            return;
        }
        if let Stage::Running(running) = &self.stage {
            running.execution.release_code();
        }
        self.sent = 0;
        self.outgoing.clear();
        self.outgoing.shrink_to(MAX_ANSWERS);
        self.allowed = MAX_ANSWERS;
    }

    /// Reads the socket and handles what has arrived whole. Small messages cost the code that writes them next to nothing,
    /// so this is work that comes after the tenant's other work. The thread reads output, takes orders and kills
    /// meanwhile: it does not sleep.
    pub(super) fn receive(&mut self) {
        self.steps.begin();
        self.receive_some();
        self.unread_until = self.steps.end();
    }

    fn receive_some(&mut self) {
        let mut turn = 0;
        while turn < TURN_BYTES && self.closed.is_none() && self.fate != Some(Fate::Broken) {
            let announced = frame::announced(self.wire, self.received.bytes());
            let Ok(room) = self.received.room(announced) else {
                return self.break_off(TOO_LARGE);
            };
            match self.socket.read(room) {
                Ok(0) => self.closed = Some(self.clock().now()),
                Ok(count) => {
                    turn += count;
                    self.received.add(count);
                    self.handle_messages();
                    self.flush();
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => self.closed = Some(self.clock().now()),
            }
        }
        self.received.rest();
    }

    fn handle_messages(&mut self) {
        let mut handled = 0;
        loop {
            let message = match frame::whole(self.wire, &self.received.bytes()[handled..]) {
                Ok(None) => break,
                Ok(Some(length)) => {
                    let message = &self.received.bytes()[handled..][..length];
                    let decoded = frame::decoded_length(message);
                    let Ok(decoded) = self.received.charge_decoded(decoded) else {
                        return self.break_off(TOO_LARGE);
                    };
                    let decoded = Cell::new(decoded);
                    handled += length;
                    let stage = &self.stage;
                    frame::parse(self.wire, message, &|bytes| {
                        decoded.take();
                        match stage {
                            Stage::Running(running) => running.execution.admit(bytes),
                            _ => None,
                        }
                    })
                }
                Err(error) => Err(error),
            };
            match message {
                Ok(message) => self.handle(message),
                Err(error) => return self.break_off(&error.to_string()),
            }
        }
        self.received.remove(handled);
    }

    /// Gives up on an interpreter that does not keep to the protocol.
    fn break_off(&mut self, why: &str) {
        self.received.clear();
        crate::logging::debug(format_args!("context {}: {why}", self.context.id()));
        self.kill(Fate::Broken);
    }

    fn handle(&mut self, message: Incoming) {
        match message {
            Incoming::Ready { backend, version } => self.become_ready(backend, version),
            Incoming::Failed { error } => {
                let kind = match &*self.context.backend {
                    "auto" | "plain" => Kind::KernelFailed,
                    _ => Kind::NoBackend,
                };
                self.failure.get_or_insert_with(|| Error::new(kind, error));
            }
            Incoming::Adopted { error } => self.become_adopted(error),
            Incoming::Begun => {
                if let Stage::Running(running) = &mut self.stage
                    && !std::mem::replace(&mut running.has_begun, true)
                    && running.cause.is_some()
                {
                    self.signal();
                }
            }
            Incoming::Bundle { bundle, n } => {
                if let (Stage::Running(running), Some(mut bundle)) = (&mut self.stage, bundle) {
                    // One result is all there is.
                    bundle.is_main &= !std::mem::replace(&mut running.has_result, bundle.is_main);
                    running.has_result |= bundle.is_main;
                    running.execution.append(Event::Bundle(Arc::new(bundle)));
                }
                frame::synced(n, &mut self.outgoing);
            }
            Incoming::Clear { wait, n } => {
                if let Stage::Running(running) = &self.stage {
                    running.execution.append(Event::Clear { wait });
                }
                frame::synced(n, &mut self.outgoing);
            }
            Incoming::Sync { n } => {
                self.read_available();
                frame::synced(n, &mut self.outgoing);
            }
            Incoming::Input {
                k,
                prompt,
                password,
            } => {
                let is_shown = match &self.stage {
                    Stage::Running(running) if running.asks => {
                        // Before a client may answer.
                        self.context.state_guard().asked = Some(k);
                        running.execution.append(Event::Input { prompt, password })
                    }
                    _ => false,
                };
                if !is_shown {
                    self.context.state_guard().asked = None;
                    frame::input_reply(k, None, &mut self.outgoing);
                }
            }
            Incoming::Done {
                error,
                exit_code,
                is_interrupted,
            } => {
                if self.wire == Wire::Lines {
                    self.read_available();
                }
                self.end_by_code(error, exit_code, is_interrupted);
            }
        }
    }

    fn become_ready(&mut self, backend: String, version: String) {
        if !matches!(self.stage, Stage::Starting { .. }) {
            return;
        }
        let is_spare = self.is_spare;
        self.context.change(|state| {
            state.told = Some((backend, version));
            if !is_spare && matches!(state.phase, Phase::Starting) {
                state.phase = Phase::Ready;
            }
        });
        self.stage = if is_spare {
            Stage::Spare {
                until: self.clock().now() + SPARE_LIMIT,
            }
        } else {
            Stage::Idle
        };
    }

    fn become_adopted(&mut self, error: Option<String>) {
        if !matches!(self.stage, Stage::Adopting { .. }) {
            return;
        }
        if let Some(error) = error {
            self.failure = Some(Error::new(Kind::BadDirectory, error));
            return self.kill(Fate::NotReady);
        }
        self.stage = Stage::Idle;
        self.context.change(|state| {
            if matches!(state.phase, Phase::Starting) {
                state.phase = Phase::Ready;
            }
        });
    }
}
