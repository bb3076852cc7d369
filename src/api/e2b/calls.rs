//! An admitted request as the handlers of this door see it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;

use super::errors::E2bError;
use crate::api::context::Context;
use crate::client::{Interrupt, Lookout, Stopped};
use crate::codec::query::Query;
use crate::error::Error;
use crate::http::request::{ReceiveError, WaitingClient, WholeBody};
use crate::http::response::ChargedDocument;
use crate::http::{Request, Response};
use crate::limits::ledger::Ledger;

/// Most bytes of a body that is not a file.
const MAX_BODY_BYTES: u64 = 16 << 20;

/// Most digits of a timeout (the Connect protocol).
const MAX_TIMEOUT_DIGITS: usize = 10;

/// The result of a handler that makes its own answer.
pub(super) type Answer = Result<Response, E2bError>;

/// The result of a handler whose answer is one document.
pub(super) type Document = Result<Value, E2bError>;

/// The result of a handler whose answer may be long.
pub(super) type ListAnswer = Result<ListBody, E2bError>;

/// A list as JSON, item by item.
pub(super) struct ListBody {
    document: ChargedDocument,
    is_empty: bool,
    /// What stands behind the list.
    end: &'static str,
}

impl ListBody {
    /// The beginning of a list; it is the only member of an object if it has a name.
    pub(super) fn new(name: Option<&str>, ledger: &Arc<Ledger>) -> Result<Self, E2bError> {
        let (begin, end) = match name {
            Some(name) => (format!("{{\"{name}\":["), "]}"),
            None => ("[".to_owned(), "]"),
        };
        let mut document = ChargedDocument::new(ledger).map_err(Error::from)?;
        document
            .push(begin.len(), |out| out.extend_from_slice(begin.as_bytes()))
            .map_err(Error::from)?;
        Ok(Self {
            document,
            is_empty: true,
            end,
        })
    }

    /// Adds a small item.
    pub(super) fn push(&mut self, item: &Value) -> Result<(), E2bError> {
        self.push_at_most(0, item)
    }

    /// Adds an item of at most this many bytes, which are charged before it is written unless they are few.
    pub(super) fn push_at_most(
        &mut self,
        most: usize,
        item: &impl Serialize,
    ) -> Result<(), E2bError> {
        let is_first = std::mem::replace(&mut self.is_empty, false);
        let pushed = self.document.push(most, |out| {
            if !is_first {
                out.push(b',');
            }
            // Writing to memory does not fail.
            let _ = serde_json::to_writer(out, item);
        });
        Ok(pushed.map_err(Error::from)?)
    }

    pub(super) fn respond(mut self) -> Result<Response, E2bError> {
        let end = self.end.as_bytes();
        let ended = self
            .document
            .push(end.len(), |out| out.extend_from_slice(end));
        ended.map_err(Error::from)?;
        Ok(self.document.respond())
    }
}

/// An admitted request.
pub(super) struct Call<'a, 'c> {
    pub(super) context: &'a Context,
    pub(super) request: &'a mut Request<'c>,
    pub(super) query: Query,
}

impl Call<'_, '_> {
    pub(super) fn body(&mut self) -> Result<WholeBody, E2bError> {
        let ledger = &self.request.ledger;
        Ok(self.request.body.read_json(MAX_BODY_BYTES, ledger)?)
    }

    /// How long the client lets the call take; `None` for as long as it takes.
    pub(super) fn timeout(&self) -> Result<Option<Duration>, E2bError> {
        self.milliseconds("connect-timeout-ms")
    }

    /// When the client ends the call.
    pub(super) fn deadline(&self) -> Result<Option<Instant>, E2bError> {
        let timeout = self.timeout()?;
        Ok(timeout.and_then(|timeout| Instant::now().checked_add(timeout)))
    }

    fn milliseconds(&self, header: &str) -> Result<Option<Duration>, E2bError> {
        let Some(value) = self.request.head.header(header) else {
            return Ok(None);
        };
        let is_number =
            (1..=MAX_TIMEOUT_DIGITS).contains(&value.len()) && value.iter().all(u8::is_ascii_digit);
        let number = std::str::from_utf8(value).ok().filter(|_| is_number);
        let number = number.and_then(|number| number.parse().ok());
        let accepted = || E2bError::invalid(format_args!("{header} takes at most 10 digits"));
        number
            .map(|number| Some(Duration::from_millis(number)))
            .ok_or_else(accepted)
    }

    /// The time without data after which the client expects a sign of life.
    pub(super) fn keep_alive(&self) -> Duration {
        const USUAL: u64 = 90;
        let asked = self.request.head.header("keepalive-ping-interval");
        let asked = asked.and_then(|value| std::str::from_utf8(value).ok());
        let seconds = asked.and_then(|value| value.parse().ok());
        Duration::from_secs(seconds.unwrap_or(USUAL).clamp(1, 3600))
    }

    /// Stops long work that the answer waits for when the client disconnects.
    pub(super) fn interrupt(&self) -> impl Interrupt + use<> {
        WhileConnected {
            client: self.request.body.watch_client(),
            lookout: Lookout::new(),
        }
    }
}

struct WhileConnected {
    client: WaitingClient,
    lookout: Lookout,
}

impl Interrupt for WhileConnected {
    fn check(&mut self) -> Result<(), Stopped> {
        self.lookout.look(&mut self.client)?;
        Ok(())
    }
}

impl From<Stopped> for E2bError {
    fn from(stopped: Stopped) -> Self {
        match stopped {
            Stopped::Failed(error) => error.into(),
            Stopped::Disconnected | Stopped::Due => ReceiveError::Closed.into(),
        }
    }
}
