//! The dispatcher: it finds the door that answers a request, checks the page that sent it, and counts the answer. It knows no
//! operation. [`context`] has the state that it shares with the doors, and authenticates for them; [`credentials`]
//! finds tokens; [`origins`] and [`browsers`] know what pages may do; [`forward`] is the way to servers inside of a
//! workspace, even for those who have one of the [`tickets`]; [`parts`] knows what a build can leave out.
//!
//! [`rest`] is the door for HTTP and JSON, [`e2b`] that for E2B's SDKs, [`mcp`] that for MCP, [`console`] that for browsers. A
//! door parses its own wire into typed operations of `workspace` and writes its own answers; no door uses another.

mod browsers;
#[cfg(feature = "console")]
mod console;
mod content;
mod context;
mod counts;
mod credentials;
#[cfg(feature = "e2b")]
mod e2b;
mod forward;
mod json;
#[cfg(feature = "mcp")]
mod mcp;
mod origins;
mod parts;
mod rest;
#[cfg(feature = "console")]
mod tickets;

use std::ops::RangeInclusive;
use std::sync::Arc;

use crate::auth::Authenticator;
use crate::config::Doors;
use crate::http::parse::Head;
use crate::http::slots::ConnectionSlots;
use crate::http::{Body, Handler, Refusal, Request, Response, Sender};
use crate::limits::ledger::{Ledger, OverLimit};
use crate::machine::Machine;
use crate::threads::panics::contain;
use context::{Context, note_refusal};
use counts::RequestCounts;
use origins::Origins;
use parts::LeftOut;

/// Who is served, and how.
pub struct ApiSettings {
    /// The origins whose web pages may use the server.
    pub allowed_origins: Vec<String>,
    /// Whether only programs of this machine are served, because there is no token.
    pub is_local: bool,
    /// Which of the optional doors are open.
    pub doors: Doors,
    /// Further templates that clients of E2B may name; `*` is any.
    #[cfg(feature = "e2b")]
    pub e2b_templates: Vec<String>,
    /// The users of sandboxes, if no token keeps them out.
    pub kept_out: Option<RangeInclusive<u32>>,
}

/// The handler of all requests.
pub struct Api {
    context: Context,
    is_local: bool,
    kept_out: Option<RangeInclusive<u32>>,
}

impl Api {
    /// Serves `machine` to clients with the right tokens.
    pub fn new(
        machine: Machine,
        authenticator: Authenticator,
        connections: ConnectionSlots,
        settings: ApiSettings,
    ) -> Self {
        Self {
            context: Context {
                machine,
                authenticator,
                connections,
                requests: RequestCounts::default(),
                origins: Origins(settings.allowed_origins),
                #[cfg(feature = "console")]
                tickets: tickets::Tickets::default(),
                doors: settings.doors,
                #[cfg(feature = "e2b")]
                e2b_templates: settings.e2b_templates,
            },
            is_local: settings.is_local,
            kept_out: settings.kept_out,
        }
    }

    /// Refuses commands of sandboxes where no token does: they would manage the host and all its sandboxes.
    fn check_sender(&self, request: &Request<'_>, door: &Door<'_>) -> Result<(), Refusal> {
        let is_health = || matches!(door, Door::Rest(target) if target.name() == "health");
        let Some(users) = self.kept_out.as_ref().filter(|_| !is_health()) else {
            return Ok(());
        };
        let text = match request.sender() {
            Sender::Elsewhere => return Ok(()),
            Sender::User(uid) if !users.contains(&uid) => return Ok(()),
            Sender::User(_) => {
                "this server has no token, so it serves no user of SBX_UID_RANGE; set SBX_TOKEN"
            }
            Sender::Unknown => {
                "this server has no token, and the kernel does not tell which user of this machine asks; set SBX_TOKEN"
            }
        };
        note_refusal(request, text);
        Err(Refusal::new(403, "forbidden", text))
    }

    /// The machine that is served.
    pub fn machine(&self) -> &Machine {
        &self.context.machine
    }

    /// Refuses pages of other sites: browsers let any page send a request, and only hide its answer. A token changes
    /// nothing, because a proxy before this server may have added it: a page adds one only after a preflight, which is
    /// answered to allowed origins alone.
    fn check_page(&self, request: &Request<'_>, target: &dyn Target) -> Result<(), Refusal> {
        let head = &request.head;
        let needs_token = self.context.authenticator.needs_token();
        if target.has_secret()
            || target.is_beside(head)
            || self.context.origins.of(request).is_some()
            || (browsers::follows_link(head) && (needs_token || target.is_page()))
        {
            return Ok(());
        }
        if browsers::is_foreign(head) {
            let text = "pages of other sites may not ask for this; SBX_ALLOWED_ORIGINS names those that may";
            return Err(Refusal::new(403, "forbidden", text));
        }
        if target.admits_origins() || browsers::is_own(head) {
            return Ok(());
        }
        self.context.origins.admit(request)
    }
}

/// What a request is about, in the door that answers it.
enum Door<'a> {
    Rest(rest::Target<'a>),
    #[cfg(feature = "e2b")]
    E2b(e2b::Target<'a>),
    #[cfg(feature = "mcp")]
    Mcp(mcp::Target<'a>),
    #[cfg(feature = "console")]
    Console(console::Target<'a>),
    /// No door: this build does not have what the request is for.
    LeftOut(LeftOut),
}

/// Finds the target of a path in one door; `None` if the request is another door's.
type Find = for<'a> fn(&Context, &Request<'_>, &'a [u8]) -> Option<Door<'a>>;

/// The doors that a build can leave out, in the order in which they are asked. E2B's is the first, because where the
/// host names a port, all paths belong to the server behind it.
const OPTIONAL_DOORS: &[Find] = &[
    #[cfg(feature = "e2b")]
    |context, request, path| e2b::Target::find(context, request, path).map(Door::E2b),
    #[cfg(feature = "console")]
    |context, _, path| console::Target::find(context, path).map(Door::Console),
    #[cfg(feature = "mcp")]
    |context, _, path| mcp::Target::find(context, path).map(Door::Mcp),
];

impl<'a> Door<'a> {
    /// Finds the door of a request. REST has what no other door takes, and no part that this build leaves out.
    fn find(context: &Context, request: &Request<'_>, path: &'a [u8]) -> Self {
        let mut doors = OPTIONAL_DOORS.iter();
        if let Some(door) = doors.find_map(|find| find(context, request, path)) {
            return door;
        }
        match LeftOut::find(&request.head, path) {
            Some(target) => Self::LeftOut(target),
            None => Self::Rest(rest::Target::find(path)),
        }
    }

    fn target(&self) -> &dyn Target {
        match self {
            Self::Rest(target) => target,
            #[cfg(feature = "e2b")]
            Self::E2b(target) => target,
            #[cfg(feature = "mcp")]
            Self::Mcp(target) => target,
            #[cfg(feature = "console")]
            Self::Console(target) => target,
            Self::LeftOut(target) => target,
        }
    }
}

/// Adds those fields of which a response has none of the same name.
fn with_fields(mut response: Response, fields: &[(&'static str, &'static str)]) -> Response {
    for (name, value) in fields {
        if !response.headers.iter().any(|(other, _)| other == name) {
            response = response.with_header(name, *value);
        }
    }
    response
}

/// What the dispatcher must know of a target, whichever door has it.
trait Target {
    /// The name in the metrics.
    fn name(&self) -> &'static str;

    /// The methods, as in `Allow`.
    fn allow(&self) -> String;

    /// Whether a server in a workspace answers.
    fn is_proxied(&self) -> bool {
        false
    }

    /// Whether the target itself decides which origins it admits.
    fn admits_origins(&self) -> bool {
        false
    }

    /// Whether pages of the origins that the operator allows can use it.
    fn has_cors(&self) -> bool {
        true
    }

    /// Whether people open it in a browser. A link of any page may lead there.
    fn is_page(&self) -> bool {
        false
    }

    /// Whether its address is a secret that stands for a token.
    fn has_secret(&self) -> bool {
        false
    }

    /// Whether a request is of a page of the same sandbox.
    fn is_beside(&self, _: &Head) -> bool {
        false
    }

    /// Fields of all its answers, unless they have others of the same name. Those that are not relayed also have
    /// [`browsers::OWN`].
    fn fields(&self) -> &'static [(&'static str, &'static str)] {
        browsers::OWN
    }

    /// Refuses a request whose answer there is no room for.
    fn no_room(&self, _: &Head, limit: OverLimit) -> Response {
        Refusal::from(limit).into()
    }

    /// Authenticates a request and answers it.
    fn answer(&self, context: &Context, request: &mut Request<'_>) -> Result<Response, Refusal>;
}

impl Handler for Api {
    fn handle(&self, request: &mut Request<'_>) -> Response {
        if self.is_local
            && let Err(refusal) = origins::check_host(request)
        {
            note_refusal(request, &refusal.text);
            self.context.requests.count("none", refusal.status);
            return with_fields(refusal.into(), browsers::OWN);
        }
        let path = request.head.path.clone();
        let door = Door::find(&self.context, request, &path);
        let target = door.target();
        if !target.is_proxied() {
            request.kept.clear();
        }
        let admitted = self.check_sender(request, &door);
        let origin = self.context.origins.of(request);
        if let Some(origin) = &origin
            && admitted.is_ok()
            && target.has_cors()
            && origins::is_preflight(request)
        {
            self.context.requests.count(target.name(), 204);
            return origins::preflight(request, origin, target.allow());
        }
        let admitted = admitted.and_then(|()| {
            let admitted = self.check_page(request, target);
            admitted.inspect_err(|refusal| note_refusal(request, &refusal.text))
        });
        // Here, so that the answer has what all answers of the door have.
        let answer = contain(|| admitted.and_then(|()| target.answer(&self.context, request)));
        let answer = answer.unwrap_or_else(|_| {
            request.closes = true;
            Err(Refusal::panicked())
        });
        let mut response = answer.unwrap_or_else(Response::from);
        if let Err(limit) = response.charge_to(&request.ledger) {
            response = target.no_room(&request.head, limit);
        }
        let is_relayed = target.is_proxied() && matches!(response.body, Body::Takeover(_));
        response = with_fields(response, target.fields());
        if !is_relayed {
            // What this server says of a server inside is not for its address, so no cache may keep it.
            response = with_fields(response, browsers::OWN);
        }
        if target.has_cors() && !is_relayed {
            response = self.context.origins.label(response, origin);
        }
        self.context.requests.count(target.name(), response.status);
        response
    }

    fn refused(&self, status: u16) {
        self.context.requests.count("none", status);
    }

    fn ledger_of_user(&self, uid: u32) -> Option<Arc<Ledger>> {
        self.context.machine.ledger_of_user(uid)
    }
}
