//! The state that the dispatcher shares with the doors: the machine, the tokens, and the figures for metrics.

use std::sync::Arc;

use super::counts::RequestCounts;
use super::credentials::{self, presented_token};
use super::origins::Origins;
#[cfg(feature = "console")]
use super::tickets::{Target, Tickets};
use crate::auth::{Access, Authenticator, Holder, Refused};
use crate::client::{Stopped, check_peer};
use crate::config::Doors;
use crate::error::{Error, Kind, Result};
#[cfg(feature = "console")]
use crate::host::{Host, Sandbox};
use crate::http::slots::ConnectionSlots;
use crate::http::{Refusal, Request};
#[cfg(feature = "console")]
use crate::limits::ledger::Ledger;
use crate::logging;
use crate::machine::{Machine, Scope};
#[cfg(feature = "console")]
use crate::ports::Port;
use crate::threads::priority::BackgroundTurn;
#[cfg(feature = "console")]
use crate::workspace::Workspace;
use crate::workspace::{Lease, Needs};

/// The state behind all doors.
pub(super) struct Context {
    pub(super) machine: Machine,
    pub(super) authenticator: Authenticator,
    pub(super) connections: ConnectionSlots,
    pub(super) requests: RequestCounts,
    pub(super) origins: Origins,
    #[cfg(feature = "console")]
    pub(super) tickets: Tickets<Ledger>,
    pub(super) doors: Doors,
    #[cfg(feature = "e2b")]
    pub(super) e2b_templates: Vec<String>,
}

impl Context {
    /// Checks that the token of a request opens what it is about, and gives the connection to the holder of the token.
    ///
    /// # Errors
    /// 403; `OverLimit` if the holder has too many connections.
    pub(super) fn authenticate(
        &self,
        request: &mut Request<'_>,
        access: Access<'_>,
        is_proxied: bool,
    ) -> std::result::Result<(), Refusal> {
        let holder = self.holder(request, access, is_proxied)?;
        Ok(self.assign_slot(request, holder)?)
    }

    fn holder<'a>(
        &self,
        request: &Request<'_>,
        access: Access<'a>,
        is_proxied: bool,
    ) -> std::result::Result<Holder<'a>, Refusal> {
        let refused = |text: &str| {
            note_refusal(request, text);
            Err(Refusal::new(403, "forbidden", text))
        };
        let (place, presented) = match presented_token(request, is_proxied) {
            Ok(presented) => presented,
            Err(text) => return refused(text),
        };
        match self.authenticator.check(presented.as_deref(), access) {
            Ok(holder) => Ok(holder),
            Err(Refused::Missing) => refused(
                "the X-Sandbox-Token header is missing; without it, Authorization: Bearer <token> is accepted",
            ),
            Err(Refused::Wrong) => refused(&format!(
                "the {place} holds a token that does not open this"
            )),
            Err(Refused::HostTokenInside) => refused(&format!(
                "the {place} holds the host token, which does not open what is inside a sandbox \
                 (SBX_STRICT_SCOPES=1); use the sandbox's own"
            )),
        }
    }

    /// Whether a request has the host's token, or needs none.
    pub(super) fn is_operator(&self, request: &Request<'_>) -> bool {
        let presented = presented_token(request, false);
        presented.is_ok_and(|(_, token)| {
            let checked = self.authenticator.check(token.as_deref(), Access::Machine);
            checked.is_ok()
        })
    }

    /// Gives the connection to the holder of the token. If the holder has too many, it ends. A sandbox gets nothing on the
    /// spare thread, which it could keep from the operator, and waits while its earlier requests have taken too much.
    ///
    /// # Errors
    /// `NoThreads`, `OverLimit`; `NotFound` if the sandbox ended meanwhile.
    pub(super) fn assign_slot(&self, request: &mut Request<'_>, holder: Holder<'_>) -> Result<()> {
        if matches!(holder, Holder::Sandbox(_)) {
            check_may_block(request)?;
        }
        let machine = &self.machine;
        let slot = &mut *request.slot;
        let given = match holder {
            Holder::Operator => slot.give_to_operator(&machine.operator),
            Holder::Sandbox(id) => {
                let ledger = machine.ledger_of(id);
                match ledger.map(|ledger| slot.give_to_tenant(&ledger)) {
                    // A token is valid longer than its sandbox.
                    None => return Ok(()),
                    Some(Err(error)) if error.kind() == Kind::NotFound => return Ok(()),
                    Some(given) => given,
                }
            }
        };
        request.closes = given.is_err();
        request.ledger = Arc::clone(request.slot.ledger());
        given?;
        request.admit();
        pay(request)
    }

    /// What a ticket for a port of a workspace leads to.
    ///
    /// # Errors
    /// `NotFound` if the workspace is no sandbox's any more.
    #[cfg(feature = "console")]
    pub(super) fn ticket_target(&self, workspace: &Workspace, port: Port) -> Result<Target> {
        let is_its = |sandbox: &Sandbox| std::ptr::eq(sandbox.workspace(), workspace);
        let found = |host: &Host| {
            let sandbox = host.find_by(is_its);
            sandbox.map(|sandbox| sandbox.id.clone()).ok_or_else(|| {
                Error::new(
                    Kind::NotFound,
                    "the sandbox was stopped or deleted meanwhile",
                )
            })
        };
        let sandbox = self.machine.host().ok().map(found).transpose()?;
        Ok(Target { sandbox, port })
    }

    /// The sandbox of a host whose token is the one that `owns` knows. Each token is asked about.
    pub(super) fn sandbox_whose_token(&self, owns: impl Fn(&str) -> bool) -> Option<String> {
        let derive = |id: &str| self.authenticator.sandbox_token(id);
        let found = self.machine.host().ok()?;
        let found = found.find_by(|sandbox| owns(sandbox.token(derive)))?;
        Some(found.id.clone())
    }

    /// What the token of a request opens.
    ///
    /// # Errors
    /// 403 if it opens nothing here.
    pub(super) fn opened_by(&self, request: &Request<'_>) -> std::result::Result<Opened, Refusal> {
        let refused = |text: &str| {
            note_refusal(request, text);
            Refusal::new(403, "forbidden", text)
        };
        let (place, token) = presented_token(request, false).map_err(refused)?;
        if self
            .authenticator
            .check(token.as_deref(), Access::Machine)
            .is_ok()
        {
            return Ok(Opened::Server);
        }
        let Some(token) = token else {
            return Ok(Opened::Nothing);
        };
        let owns = |own: &str| credentials::is_same(own, &token);
        let sandbox = self.sandbox_whose_token(owns).map(Opened::Sandbox);
        sandbox.ok_or_else(|| {
            refused(&format!(
                "the {place} holds a token that does not open this"
            ))
        })
    }

    /// Begins work in a workspace, which lasts as long as the lease. What the request holds is charged to
    /// the workspace, whoever asks.
    ///
    /// # Errors
    /// `NoThreads`; those of [`Machine::lease`].
    pub(super) fn enter(
        &self,
        request: &mut Request<'_>,
        scope: Scope<'_>,
        needs: Needs,
    ) -> Result<Lease> {
        check_may_block(request)?;
        let lease = self.machine.lease(scope, needs)?;
        request.ledger = Arc::clone(&lease.ledger);
        request.admit();
        Ok(lease)
    }
}

/// What a token opens.
pub(super) enum Opened {
    /// There is no token, and the server needs one.
    Nothing,
    /// The server and all that is in it.
    Server,
    /// The sandbox with this id.
    Sandbox(String),
}

/// Begins work in a sandbox for a request that has a ticket in place of a token. Its connection is the sandbox's from here
/// on, also while it waits. `None` if the sandbox is gone, and its tickets with it.
///
/// # Errors
/// `NoThreads`, `OverLimit`; `Paused`, `ShuttingDown` and what a resume can fail with.
#[cfg(feature = "console")]
pub(super) fn enter_by_ticket(
    context: &Context,
    request: &mut Request<'_>,
    owner: &Arc<Ledger>,
    sandbox: Option<&str>,
) -> Result<Option<Lease>> {
    check_may_block(request)?;
    // Somebody may hold the ledger of a sandbox that is gone.
    let known = |id: &str| {
        let known = context.machine.ledger_of(id);
        known.is_some_and(|known| Arc::ptr_eq(&known, owner))
    };
    if !sandbox.is_none_or(known) {
        return Ok(None);
    }
    let given = request.slot.give_to_tenant(owner);
    if given
        .as_ref()
        .is_err_and(|error| error.kind() == Kind::NotFound)
    {
        return Ok(None);
    }
    request.closes = given.is_err();
    request.ledger = Arc::clone(request.slot.ledger());
    given?;
    request.admit();
    pay(request)?;
    let scope = sandbox.map_or(Scope::Machine, Scope::Sandbox);
    match context.machine.lease(scope, Needs::Processes) {
        Err(error) if error.kind() == Kind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

/// Pauses for what earlier requests of the tenant took of the server's time.
///
/// # Errors
/// `NotFound` if the tenant has ended; `OverLimit`, which nobody reads, if the client has disconnected.
fn pay(request: &Request<'_>) -> Result<()> {
    let ledger = &request.ledger;
    if ledger.is_whole() || !request.may_block {
        return Ok(());
    }
    let Some(mut turn) = BackgroundTurn::that_pays(&ledger.work) else {
        return Ok(());
    };
    let mut client = request.body.watch_client();
    turn.pass(&mut || Ok(check_peer(&mut client)?))
        .map_err(|stopped| match stopped {
            Stopped::Failed(error) => error,
            Stopped::Disconnected | Stopped::Due => {
                Error::new(Kind::OverLimit, "the client has disconnected")
            }
        })
}

fn check_may_block(request: &Request<'_>) -> Result<()> {
    if request.may_block {
        return Ok(());
    }
    let text = "the machine has no thread or memory left for this; close idle connections or delete a sandbox, or try again later";
    Err(Error::new(Kind::NoThreads, text))
}

/// Tells the log that a request was refused for its credentials.
pub(super) fn note_refusal(request: &Request<'_>, text: &str) {
    let client = request.client_address().map(|address| address.to_string());
    let client = format!("client {}", client.as_deref().unwrap_or("unknown"));
    let line = format_args!(
        "refused {} {}: {text}",
        logging::quoted(request.head.method.as_bytes()),
        logging::quoted_path(&request.head.path)
    );
    logging::about(&client, line);
}

/// Tells the log that a request of a tenant has failed. The client gets the error, but only the operator can
/// repair it.
pub(super) fn note_failure(tenant: &str, request: &Request<'_>, status: u16, text: &str) {
    let line = format_args!(
        "failed {} {}: {status} {}",
        logging::quoted(request.head.method.as_bytes()),
        logging::quoted_path(&request.head.path),
        logging::quoted(text.as_bytes())
    );
    logging::about(tenant, line);
}
