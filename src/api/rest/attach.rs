//! `GET processes/{id}/attach`: a terminal over a WebSocket.
//!
//! There are two forms. With the subprotocol `sbx.pty.v1`, binary frames carry output and input, and text
//! frames events and requests in JSON. Without it there is only output, and whatever the client sends is
//! input: what terminal emulators in browsers do by themselves. The connection's thread polls the
//! client and the process together; see `workspace::operations` for who may type, and `http::channel`
//! for frames, pings and the end.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::call::{Answer, Call};
use crate::api::credentials::is_bearer;
use crate::api::json::command::{ExitEvent, TerminalRequest, terminal_request};
use crate::client::Disconnected;
use crate::codec::queries::QueryFilter;
use crate::codec::query::Query;
use crate::error::{Error, Kind, Result};
use crate::fault;
use crate::http::channel::{Channel, Message};
use crate::http::handshake::{Handshake, subprotocols};
use crate::http::parse::{Framing, Head};
use crate::http::request::BodyReader;
use crate::http::response::Takeover;
use crate::http::stream::StreamWriter;
use crate::http::websocket::code;
use crate::http::{Body, Refusal, Response};
use crate::limits::ledger::Ledger;
use crate::process::{Exit, Start};
use crate::spec::command::TerminalSize;
use crate::sys::{Ending, Events};
use crate::workspace::{AttachSpec, Attachment, ViewerEvent, Workspace};

/// How long input of a client that has closed is typed.
const LAST_INPUT_LIMIT: Duration = Duration::from_secs(2);

/// Events and requests in text frames.
const EVENTS: &str = "sbx.pty.v1";

/// The other form, for browsers: they fail if they offer subprotocols and none is selected.
const RAW: &str = "sbx.raw.v1";

/// `GET processes/{id}/attach`.
pub(super) fn attach(call: &mut Call<'_, '_>, workspace: &Workspace, id: &str) -> Answer {
    let spec = attach_spec(&call.query)?;
    let mut handshake = Handshake::of(&call.request.head)?;
    call.context.origins.admit(call.request)?;
    handshake.selected = select(&call.request.head)?;
    let attachment = workspace.attach(id, spec)?;
    let terminal = AttachedTerminal {
        handshake,
        attachment,
        ping_interval: call.ping_interval(),
        ledger: Arc::clone(&call.request.ledger),
    };
    Ok(Response::new(101, Body::Takeover(Box::new(terminal))))
}

fn attach_spec(query: &Query) -> Result<AttachSpec> {
    let start = match query.value("offset")? {
        Some(b"-1") => Start::End,
        _ => query.number("offset")?.map_or(Start::Oldest, Start::At),
    };
    let modes = [("rw", true), ("ro", false)];
    let may_type = query.choice("mode", &modes)?.unwrap_or(true);
    let takes_over = query.flag("take")?;
    let size = match (query.number("rows")?, query.number("cols")?) {
        (Some(rows), Some(columns)) => Some(TerminalSize::new(rows, columns)?),
        (None, None) => None,
        _ => return Err(Error::invalid("rows and cols are given together")),
    };
    if !may_type && (takes_over || size.is_some()) {
        let text = "mode=ro only watches: it goes with neither take nor rows and cols";
        return Err(Error::invalid(text));
    }
    Ok(AttachSpec {
        start,
        may_type,
        takes_over,
        size,
    })
}

/// Selects the subprotocol that the client prefers; `None` if it offers none.
///
/// # Errors
/// It offers only others: it would take what it gets for something else.
fn select(head: &Head) -> std::result::Result<Option<&'static str>, Refusal> {
    let mut offered = subprotocols(head)
        .filter(|name| !is_bearer(name))
        .peekable();
    let offers_none = offered.peek().is_none();
    let known = |name: &[u8]| {
        [EVENTS, RAW]
            .into_iter()
            .find(|known| known.as_bytes() == name)
    };
    match offered.find_map(known) {
        None if !offers_none => {
            let text = format!(
                "none of the offered subprotocols is known; offer {EVENTS}, or {RAW}, or none"
            );
            Err(Refusal::new(400, "bad_request", text))
        }
        selected => Ok(selected),
    }
}

/// A client that is about to be attached.
struct AttachedTerminal {
    handshake: Handshake,
    attachment: Attachment,
    ping_interval: Duration,
    ledger: Arc<Ledger>,
}

impl Takeover for AttachedTerminal {
    fn append_head(&self, out: &mut Vec<u8>) {
        self.handshake.append_head(out);
    }

    fn framing(&self) -> Framing {
        Framing::None
    }

    fn run(
        self: Box<Self>,
        client: &mut StreamWriter,
        request: &mut BodyReader<'_>,
    ) -> io::Result<()> {
        let reader = request.connection();
        let mut session = Session {
            channel: Channel::new(reader, client, self.ledger, self.ping_interval),
            attachment: self.attachment,
            // Only its form without events has a filter.
            replay_filter: (self.handshake.selected != Some(EVENTS)).then(QueryFilter::new),
            with_events: self.handshake.selected == Some(EVENTS),
            closed_by_client: None,
            has_refused_input: false,
        };
        session
            .run()
            .map_err(|Disconnected| io::ErrorKind::ConnectionAborted.into())
    }
}

/// An attached client.
struct Session<'c> {
    channel: Channel<'c>,
    attachment: Attachment,
    /// For the form without events; `None` after the replay.
    replay_filter: Option<QueryFilter>,
    with_events: bool,
    /// The code that the client has closed with, and until when its input is typed.
    closed_by_client: Option<(Option<u16>, Instant)>,
    /// Whether input was refused since the last wait because this viewer only watches. One event tells of
    /// all such input.
    has_refused_input: bool,
}

impl Session<'_> {
    fn run(&mut self) -> std::result::Result<(), Disconnected> {
        self.announce();
        loop {
            while self.takes_input()
                && let Some(message) = self.channel.next()?
            {
                self.handle(message);
            }
            if self.attachment.has_input() {
                fault::point("typing");
            }
            if let Err(error) = self.attachment.advance_input()
                // The exit tells of that.
                && error.kind() != Kind::StdinClosed
            {
                self.refuse(error);
            }
            self.answer_close();
            let has_nothing = self.channel.is_flushed() && !self.send_next();
            self.channel.flush()?;
            if self.channel.is_over() {
                return Ok(());
            }
            let may_send_more = !has_nothing && self.channel.is_open() && self.channel.is_flushed();
            self.wait(may_send_more.then_some(Duration::ZERO))?;
        }
    }

    fn takes_input(&self) -> bool {
        self.attachment.takes_input() || !self.channel.is_open()
    }

    /// Waits until there is something to do, at most `limit`.
    fn wait(&mut self, limit: Option<Duration>) -> std::result::Result<(), Disconnected> {
        let [wakeup, typing] = self.attachment.descriptors();
        // What wakes it up is of no use while the client is slow, unless input waits for its turn.
        let is_interested = self.channel.is_open() && self.channel.is_flushed();
        let awaits_turn = self.attachment.has_input() && typing.is_none();
        let wakeup = wakeup.filter(|_| is_interested || awaits_turn);
        let closing_in = self
            .closed_by_client
            .filter(|_| self.attachment.has_input())
            .map(|(_, until)| until.saturating_duration_since(Instant::now()));
        let limit = [limit, self.attachment.interval(), closing_in];
        let limit = limit.into_iter().flatten().min();
        let others = [(wakeup, Events::READABLE), (typing, Events::WRITABLE)];
        let result = self.channel.wait(self.takes_input(), others, limit);
        self.attachment.clear_wakeup();
        self.has_refused_input = false;
        result
    }

    fn event(&mut self, event: &[u8]) {
        if self.with_events && self.channel.is_open() {
            self.channel.send_text(event);
        }
    }

    /// Tells of the mode of this viewer.
    fn tell_mode(&mut self) {
        let mode = self.mode();
        self.event(format!("{{\"event\":\"mode\",\"mode\":\"{mode}\"}}").as_bytes());
    }

    fn mode(&self) -> &'static str {
        if self.attachment.is_typist() {
            "rw"
        } else {
            "ro"
        }
    }

    fn announce(&mut self) {
        let (offset, size) = (self.attachment.offset(), self.attachment.size());
        // An id has no characters that JSON escapes.
        let event = format!(
            "{{\"event\":\"attached\",\"id\":\"{}\",\"offset\":{offset},\"rows\":{},\"cols\":{},\"mode\":\"{}\"}}",
            self.attachment.process().id,
            size.rows(),
            size.columns(),
            self.mode()
        );
        self.event(event.as_bytes());
    }

    /// Sends what happens next; false if nothing has happened.
    fn send_next(&mut self) -> bool {
        if !self.channel.is_open() {
            return false;
        }
        let Some(event) = self.attachment.next_event() else {
            return false;
        };
        match event {
            ViewerEvent::Output { bytes, .. } => match &mut self.replay_filter {
                None => self.channel.send_binary(bytes),
                Some(filter) => {
                    let mut passed = Vec::with_capacity(bytes.len());
                    filter.filter(bytes, &mut passed);
                    if !passed.is_empty() {
                        self.channel.send_binary(&passed);
                    }
                }
            },
            ViewerEvent::ReadOnly => self.tell_mode(),
            ViewerEvent::Resized(size) => {
                let (rows, columns) = (size.rows(), size.columns());
                let event = format!("{{\"event\":\"resize\",\"rows\":{rows},\"cols\":{columns}}}");
                self.event(event.as_bytes());
            }
            ViewerEvent::Dropped { offset, bytes } => {
                // A sequence that the gap has cut is none.
                self.replay_filter = self.replay_filter.take().map(|_| QueryFilter::new());
                let event = format!(
                    "{{\"event\":\"dropped\",\"stream\":\"stdout\",\"offset\":{offset},\"bytes\":{bytes}}}"
                );
                self.event(event.as_bytes());
            }
            ViewerEvent::Live { offset } => {
                let mut held = Vec::new();
                if let Some(mut filter) = self.replay_filter.take() {
                    filter.finish(&mut held);
                }
                if !held.is_empty() {
                    self.channel.send_binary(&held);
                }
                self.event(format!("{{\"event\":\"live\",\"offset\":{offset}}}").as_bytes());
            }
            ViewerEvent::Ended(exit) => self.end(&exit),
        }
        true
    }

    fn end(&mut self, exit: &Exit) {
        let mut event = Vec::new();
        // Writing to memory does not fail.
        let _ = serde_json::to_writer(&mut event, &ExitEvent::of(exit));
        self.event(&event);
        let reason = match exit.ending {
            Ending::Exited(status) => format!("exit {status}"),
            Ending::Signaled(signal) => format!("signal {signal}"),
            Ending::Unknown => "ended".to_owned(),
        };
        let is_ending = self.attachment.is_workspace_ending();
        let code = if is_ending {
            code::GOING_AWAY
        } else {
            code::NORMAL
        };
        self.channel.close(Some(code), &reason);
    }

    fn handle(&mut self, message: Message) {
        let result = match message {
            Message::Close(code) => {
                let until = Instant::now() + LAST_INPUT_LIMIT;
                self.closed_by_client = Some((code, until));
                Ok(())
            }
            Message::Binary(bytes) => match self.attachment.type_bytes(bytes) {
                Err(error)
                    if error.kind() == Kind::ReadOnly
                        && std::mem::replace(&mut self.has_refused_input, true) =>
                {
                    Ok(())
                }
                result => result,
            },
            Message::Text(text) if !self.with_events => {
                self.attachment.type_bytes(text.into_bytes())
            }
            Message::Text(text) => match terminal_request(text.as_bytes()) {
                None => {
                    self.channel
                        .close(Some(code::INVALID), "text that is not a JSON object");
                    Ok(())
                }
                Some(request) => request.and_then(|request| self.carry_out(&request)),
            },
        };
        if let Err(error) = result {
            self.refuse(error);
        }
    }

    fn carry_out(&mut self, request: &TerminalRequest) -> Result<()> {
        if request.take {
            let is_new = !self.attachment.is_typist();
            self.attachment.take_over()?;
            if is_new {
                self.tell_mode();
            }
        }
        if let Some(size) = request.resize {
            self.attachment.resize(size)?;
        }
        if let Some(signal) = request.signal {
            self.attachment.signal_foreground(signal)?;
        }
        if request.eof {
            self.attachment.type_end_of_file()?;
        }
        Ok(())
    }

    fn refuse(&mut self, error: Error) {
        if error.kind() == Kind::OverLimit {
            return self.channel.close(Some(code::FAILED), &error.to_string());
        }
        let refusal = Refusal::from(error);
        let mut event = b"{\"event\":\"error\",".to_vec();
        let document = serde_json::to_vec(&refusal).unwrap_or_default();
        event.extend_from_slice(document.get(1..).unwrap_or_default());
        self.event(&event);
    }

    /// Answers a client that has closed, once its input is typed.
    fn answer_close(&mut self) {
        if let Some((code, until)) = self.closed_by_client
            && (!self.attachment.has_input() || Instant::now() >= until)
        {
            self.channel.close(code, "");
        }
    }
}
