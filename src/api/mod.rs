//! The hall: it authenticates a request, picks the door that answers it, and counts the answer. It
//! knows no operation. [`context`] has the state that it shares with the doors, [`credentials`] finds tokens, and
//! [`forward`] is the way to servers inside of a workspace, also for those who have one of the [`tickets`].
//!
//! [`rest`] is the door for HTTP and JSON, [`e2b`] that for E2B's SDKs, [`mcp`] that for MCP, [`console`] that for browsers. A
//! door parses its own wire into typed operations of `workspace` and writes its own answers; no door uses another.

mod console;
mod content;
mod context;
mod counts;
mod credentials;
mod e2b;
mod forward;
mod json;
mod mcp;
mod origins;
mod rest;
mod tickets;

use std::sync::OnceLock;

use crate::auth::{Access, Authenticator, Holder, Refused};
use crate::config::Doors;
use crate::http::seats::Seats;
use crate::http::{Body, Handler, Refusal, Request, Response};
use crate::machine::{Machine, Scope};
use context::{Context, note_failure, note_refusal};
use counts::RequestCounts;
use credentials::presented_token;
use origins::Origins;
use rest::Answer;
use tickets::Tickets;

/// Who is served, and how.
pub struct ApiSettings {
    /// The origins whose web pages may use the server.
    pub allowed_origins: Vec<String>,
    /// Whether only programs of this machine are served, because there is no token.
    pub is_local: bool,
    /// The doors that there are besides the others.
    pub doors: Doors,
}

/// The handler of all requests.
pub struct Api {
    context: Context,
    is_local: bool,
}

impl Api {
    /// Serves `machine` to clients with the right tokens.
    pub fn new(
        machine: Machine,
        authenticator: Authenticator,
        connections: Seats,
        settings: ApiSettings,
    ) -> Self {
        let mut doors = settings.doors;
        doors.console &= console::is_built();
        Self {
            context: Context {
                machine,
                authenticator,
                connections,
                requests: RequestCounts::default(),
                origins: Origins(settings.allowed_origins),
                tickets: Tickets::default(),
                doors,
                isolation: OnceLock::new(),
            },
            is_local: settings.is_local,
        }
    }

    /// The machine that is served.
    pub fn machine(&self) -> &Machine {
        &self.context.machine
    }

    /// Answers a request that the door for HTTP and JSON takes.
    fn answer_rest(
        &self,
        request: &mut Request<'_>,
        path: &[u8],
        origin: Option<String>,
    ) -> Response {
        let target = rest::Target::find(path);
        let answer = self.try_rest(request, path, &target);
        if let Err(refusal) = &answer
            && matches!(refusal.status, 500 | 507)
        {
            let tenant = match target.access(&request.head.method) {
                Some(Access::Inside(id) | Access::Sandbox(id)) => format!("sandbox {id}"),
                _ => "the machine".to_owned(),
            };
            note_failure(&tenant, request, refusal.status, &refusal.text);
        }
        // A server behind a port decides which origins it allows.
        let is_relayed = target.is_proxied() && answer.is_ok();
        let mut response = answer.unwrap_or_else(Response::from);
        if !is_relayed {
            response = self.context.origins.label(response, origin);
        }
        self.context.requests.count(target.name(), response.status);
        response
    }

    fn try_rest(
        &self,
        request: &mut Request<'_>,
        path: &[u8],
        target: &rest::Target<'_>,
    ) -> Answer {
        if !target.is_proxied() {
            self.check_origin(request)?;
        }
        // MCP clients and browsers read these paths before they have a token.
        let is_public = path.starts_with(b"/.well-known/") || path == b"/favicon.ico";
        if let Some(access) = target.access(&request.head.method).filter(|_| !is_public) {
            let holder = self.authenticate(request, access, target.is_proxied())?;
            self.context.seat(request, holder)?;
        }
        if request.head.method == "OPTIONS" && path == b"*" {
            return Ok(Response::new(204, Body::Empty)
                .with_header("Allow", "GET, HEAD, POST, PUT, DELETE, OPTIONS"));
        }
        rest::answer(&self.context, request, path, target)
    }

    /// Answers a request that the door for E2B's clients takes.
    fn answer_e2b(
        &self,
        request: &mut Request<'_>,
        target: &e2b::Target<'_>,
        origin: Option<String>,
    ) -> Response {
        let checked = if target.is_proxied() {
            Ok(())
        } else {
            self.check_origin(request)
        };
        let mut response = match checked {
            Ok(()) => e2b::answer(&self.context, request, target),
            Err(refusal) => refusal.into(),
        };
        if !target.is_proxied() {
            response = self.context.origins.label(response, origin);
        }
        self.context.requests.count(target.name(), response.status);
        response
    }

    /// Answers a request that the door for MCP takes.
    fn answer_mcp(
        &self,
        request: &mut Request<'_>,
        target: &mcp::Target<'_>,
        origin: Option<String>,
    ) -> Response {
        let answer = self.try_mcp(request, target);
        let response = answer.unwrap_or_else(Response::from);
        let response = self.context.origins.label(response, origin);
        self.context
            .requests
            .count(mcp::Target::NAME, response.status);
        response
    }

    fn try_mcp(&self, request: &mut Request<'_>, target: &mcp::Target<'_>) -> Answer {
        let own;
        let scope = match (target, self.context.machine.host()) {
            (mcp::Target::Sandbox(id), _) => Scope::Sandbox(id),
            (mcp::Target::Own, Err(_)) => Scope::Machine,
            (mcp::Target::Own, Ok(_)) => {
                let token = presented_token(request, false);
                let token = token.ok().and_then(|(_, token)| token);
                let owner = |token: &[u8]| {
                    let owns = |own: &str| credentials::is_same(own, token);
                    self.context.sandbox_whose_token(owns)
                };
                own = token.as_deref().and_then(owner);
                own.as_deref().map_or(Scope::Machine, Scope::Sandbox)
            }
        };
        let access = match scope {
            Scope::Machine => Access::Machine,
            Scope::Sandbox(id) => Access::Inside(id),
        };
        let holder = self.authenticate(request, access, false)?;
        self.context.seat(request, holder)?;
        if scope == Scope::Machine && self.context.machine.host().is_ok() {
            let text = "the token of the host is for no sandbox; use that of one here, or \
                        /v1/sandboxes/{id}/mcp";
            return Err(Refusal::new(404, "not_found", text));
        }
        mcp::answer(&self.context, request, scope)
    }

    /// Refuses pages of other origins where no token does: browsers let any page send a request, and only hide its answer.
    /// A server behind a port decides for itself.
    fn check_origin(&self, request: &Request<'_>) -> Result<(), Refusal> {
        if !self.is_local {
            return Ok(());
        }
        let admitted = self.context.origins.admit(request);
        admitted.inspect_err(|refusal| note_refusal(request, &refusal.text))
    }

    fn authenticate<'a>(
        &self,
        request: &Request<'_>,
        access: Access<'a>,
        is_proxied: bool,
    ) -> Result<Holder<'a>, Refusal> {
        let refused = |text: &str| {
            note_refusal(request, text);
            Err(Refusal::new(403, "forbidden", text))
        };
        let (place, presented) = match presented_token(request, is_proxied) {
            Ok(presented) => presented,
            Err(text) => return refused(text),
        };
        match self
            .context
            .authenticator
            .check(presented.as_deref(), access)
        {
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
}

impl Handler for Api {
    fn handle(&self, request: &mut Request<'_>) -> Response {
        if self.is_local
            && let Err(refusal) = origins::check_host(request)
        {
            note_refusal(request, &refusal.text);
            self.context.requests.count("none", refusal.status);
            return refusal.into();
        }
        let path = request.head.path.clone();
        let e2b = e2b::Target::find(&self.context, request, &path);
        // Where the host names a port, all paths belong to the server behind it.
        let console = console::Target::find(&self.context, &path).filter(|_| e2b.is_none());
        if let Some(target) = console {
            let response = console::answer(&self.context, request, &target);
            self.context.requests.count(target.name(), response.status);
            return response;
        }
        let mcp = mcp::Target::find(&path).filter(|_| self.context.doors.mcp && e2b.is_none());
        let origin = self.context.origins.of(request);
        if let Some(origin) = &origin
            && origins::is_preflight(request)
        {
            let (name, allow) = match (&e2b, &mcp) {
                (Some(target), _) => (target.name(), target.allow()),
                (None, Some(_)) => (mcp::Target::NAME, mcp::Target::ALLOW.to_owned()),
                (None, None) => {
                    let target = rest::Target::find(&path);
                    (target.name(), target.allow())
                }
            };
            self.context.requests.count(name, 204);
            return origins::preflight(request, origin, allow);
        }
        match (e2b, mcp) {
            (Some(target), _) => self.answer_e2b(request, &target, origin),
            (None, Some(target)) => self.answer_mcp(request, &target, origin),
            (None, None) => self.answer_rest(request, &path, origin),
        }
    }

    fn refused(&self, status: u16) {
        self.context.requests.count("none", status);
    }
}
