//! The state that the hall shares with the doors: the machine, the tokens, and the figures for metrics.

use std::sync::Arc;

use super::counts::RequestCounts;
use super::origins::Origins;
use crate::auth::Authenticator;
use crate::error::{Error, Kind, Result};
use crate::http::Request;
use crate::http::seats::Seats;
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
