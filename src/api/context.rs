//! The state that the hall shares with the doors: the machine, the tokens, and the figures for metrics.

use std::sync::Arc;

use super::counts::RequestCounts;
use super::origins::Origins;
use crate::auth::{Authenticator, Holder};
use crate::error::{Error, Kind, Result};
use crate::http::Request;
use crate::http::seats::Seats;
use crate::logging;
use crate::machine::{Machine, Scope};
use crate::workspace::Lease;

/// The state behind all doors.
pub(super) struct Context {
    pub(super) machine: Machine,
    pub(super) authenticator: Authenticator,
    pub(super) connections: Seats,
    pub(super) requests: RequestCounts,
    pub(super) origins: Origins,
}

/// The beginning of a subprotocol of WebSocket that carries a token. Browsers can set no header there.
pub(super) const BEARER_SUBPROTOCOL: &[u8] = b"sbx.bearer.";

impl Context {
    /// Gives the connection to the holder of the token. If the holder has too many, it ends.
    ///
    /// # Errors
    /// `OverLimit`.
    pub(super) fn seat(&self, request: &mut Request<'_>, holder: Holder<'_>) -> Result<()> {
        let machine = &self.machine;
        let seat = &mut *request.seat;
        let given = match holder {
            Holder::Operator => seat.give_to_operator(&machine.operator),
            // A token is valid longer than its sandbox.
            Holder::Sandbox(id) => machine
                .ledger_of(id)
                .map_or(Ok(()), |ledger| seat.give_to_tenant(&ledger)),
        };
        request.closes = given.is_err();
        request.ledger = Arc::clone(request.seat.ledger());
        given
    }

    /// The sandbox of a host whose token is the one that `owns` knows. Each token is asked about.
    pub(super) fn sandbox_whose_token(&self, owns: impl Fn(&str) -> bool) -> Option<String> {
        let derive = |id: &str| self.authenticator.sandbox_token(id);
        let found = self.machine.host().ok()?;
        let found = found.find_by(|sandbox| owns(sandbox.token(derive)))?;
        Some(found.id.clone())
    }

    /// Begins work in a workspace, which lasts as long as the lease. What the request holds is charged to
    /// the workspace, whoever asks.
    ///
    /// # Errors
    /// `NoThreads`, `NotFound`, `ShuttingDown`.
    pub(super) fn enter(&self, request: &mut Request<'_>, scope: Scope<'_>) -> Result<Lease> {
        if !request.may_block {
            let text =
                "the machine has no thread left for this; delete a sandbox, or try again later";
            return Err(Error::new(Kind::NoThreads, text));
        }
        let lease = self.machine.lease(scope)?;
        request.ledger = Arc::clone(&lease.ledger);
        Ok(lease)
    }
}

/// Tells the log that a request was refused for its credentials.
pub(super) fn note_refusal(request: &Request<'_>, text: &str) {
    let client = request.client_address().map(|address| address.to_string());
    let client = format!("client {}", client.as_deref().unwrap_or("unknown"));
    let line = format_args!(
        "refused {} {}: {text}",
        logging::quoted(request.head.method.as_bytes()),
        logging::quoted(&request.head.path)
    );
    logging::about(&client, line);
}

/// Tells the log that a request of a tenant has failed. The client gets the error, but only the operator can
/// repair it.
pub(super) fn note_failure(tenant: &str, request: &Request<'_>, status: u16, text: &str) {
    let line = format_args!(
        "failed {} {}: {status} {}",
        logging::quoted(request.head.method.as_bytes()),
        logging::quoted(&request.head.path),
        logging::quoted(text.as_bytes())
    );
    logging::about(tenant, line);
}
