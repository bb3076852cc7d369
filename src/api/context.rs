//! The state that the hall shares with the doors: the machine, the tokens, and the figures for metrics.

use super::counts::RequestCounts;
use crate::auth::Authenticator;
use crate::error::{Error, Kind, Result};
use crate::http::Request;
use crate::http::server::Connections;
use crate::machine::{Machine, Scope};
use crate::workspace::Lease;

/// The state behind all doors.
pub(super) struct Context {
    pub(super) machine: Machine,
    pub(super) authenticator: Authenticator,
    pub(super) connections: Connections,
    pub(super) requests: RequestCounts,
}

impl Context {
    /// Begins work in a workspace, which lasts as long as the lease.
    ///
    /// # Errors
    /// `NoThreads`, `NotFound`, `ShuttingDown`.
    pub(super) fn enter(&self, request: &Request<'_>, scope: Scope<'_>) -> Result<Lease> {
        if !request.may_block {
            let text =
                "the machine has no thread left for this; delete a sandbox, or try again later";
            return Err(Error::new(Kind::NoThreads, text));
        }
        self.machine.lease(scope)
    }
}
