//! The API: who asks, what for, and the one translation between HTTP and the mechanisms.
//!
//! A request is authenticated before anything else is looked at, routed by its URL, and then handled
//! with a lease on the workspace it is about. Handlers parse into types and call mechanisms; they
//! know no system call, and the mechanisms no status code.

mod base64;
mod commands;
mod contract;
mod escape;
mod events;
mod fields;
mod files;
#[cfg(test)]
mod fuzz;
mod metrics;
mod ports;
mod query;
mod route;
mod sandboxes;
mod wire;

use crate::auth::{Access, Authenticator, Refused};
use crate::error::Error;
use crate::http::request::ReceiveError;
use crate::http::server::Connections;
use crate::http::{Body, Handler, Refusal, Request, Response};
use crate::logging;
use crate::machine::{Machine, Scope};
use crate::workspace::Workspace;
use metrics::RequestCounts;
use query::Query;
use route::{Resource, WorkspaceResource as In};

/// Most bytes of a JSON body.
const MAX_JSON_BYTES: u64 = 16 << 20;

/// Everything that requests are about.
pub struct Api {
    machine: Machine,
    authenticator: Authenticator,
    connections: Connections,
    requests: RequestCounts,
}

/// What a handler comes to.
type Answer = Result<Response, Refusal>;

impl Api {
    /// Serves `machine` to whoever `authenticator` lets in, over `connections`.
    pub fn new(machine: Machine, authenticator: Authenticator, connections: Connections) -> Self {
        Self {
            machine,
            authenticator,
            connections,
            requests: RequestCounts::new(),
        }
    }

    /// What is served.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    fn answer(
        &self,
        request: &mut Request<'_>,
        path: &[u8],
        resource: Option<Resource<'_>>,
    ) -> Answer {
        if !resource.is_some_and(Resource::is_public) {
            let access = resource.map_or(Access::Machine, |resource| {
                resource.access(&request.head.method)
            });
            self.authenticate(request, access)?;
        }
        if request.head.method == "OPTIONS" && path == b"*" {
            return Ok(Response::new(204, Body::Empty)
                .with_header("Allow", "GET, HEAD, POST, PUT, DELETE, OPTIONS"));
        }
        let resource = resource.ok_or_else(|| no_route(path))?;
        self.check_mode(resource)?;
        if let Resource::In(scope, In::Proxy { port, path }) = resource {
            // Whatever the method and the query are, they are for somebody else.
            if !request.may_last {
                return Err(Refusal::new(
                    503,
                    "no_threads",
                    "the machine has no thread left for this; delete a sandbox, or try again later",
                ));
            }
            let lease = self.machine.lease(scope)?;
            return Ok(ports::forward(request, &lease, port, path)?.holding(lease));
        }
        let method = match request.head.method.as_str() {
            "OPTIONS" => {
                return Ok(Response::new(204, Body::Empty).with_header("Allow", resource.allow()));
            }
            "HEAD" => "GET",
            method => method,
        };
        if !resource.methods().contains(&method) {
            let text = format!(
                "{} has no method {}; it has {}",
                show(path),
                request.head.method,
                resource.allow()
            );
            return Err(Refusal::new(405, "method_not_allowed", text)
                .with_header("Allow", resource.allow()));
        }
        match resource {
            Resource::Health => Ok(self.health()),
            Resource::Contract => Ok(contract::answer()),
            Resource::Metrics => {
                let query = Query::parse(request.head.query.as_deref())?;
                metrics::answer(self, request, &query)
            }
            Resource::Sandboxes | Resource::Sandbox(_) | Resource::SandboxToken(_) => {
                let method = method.to_owned();
                sandboxes::answer(
                    request,
                    resource,
                    &method,
                    self.machine.host()?,
                    &self.authenticator,
                )
            }
            Resource::In(scope, resource) => {
                let is_get = method == "GET";
                let is_delete = method == "DELETE";
                self.in_workspace(request, scope, resource, is_get, is_delete)
            }
        }
    }

    /// Whether the machine has such things at all.
    fn check_mode(&self, resource: Resource<'_>) -> Result<(), Refusal> {
        match resource {
            Resource::Health | Resource::Contract | Resource::Metrics => Ok(()),
            Resource::In(Scope::Machine, _) => Ok(self.machine.check_dedicated()?),
            _ => Ok(self.machine.host().map(drop)?),
        }
    }

    fn authenticate(&self, request: &Request<'_>, access: Access<'_>) -> Result<(), Refusal> {
        let mut tokens = request.head.values("x-sandbox-token");
        let presented = tokens.next();
        let text = if tokens.any(|other| Some(other) != presented) {
            "there are different X-Sandbox-Token headers"
        } else {
            match self.authenticator.check(presented, access) {
                Ok(()) => return Ok(()),
                Err(Refused::Missing) => "the X-Sandbox-Token header is missing",
                Err(Refused::Wrong) => {
                    "the X-Sandbox-Token header holds a token that does not open this"
                }
                Err(Refused::HostTokenInside) => {
                    "the X-Sandbox-Token header holds the host token, which does not open what is inside a sandbox \
                     (SBX_STRICT_SCOPES=1); use the sandbox's own"
                }
            }
        };
        logging::info(format_args!(
            "refused {} {}: {text}",
            logging::quoted(request.head.method.as_bytes()),
            logging::quoted(&request.head.path)
        ));
        Err(Refusal::new(403, "forbidden", text))
    }

    fn health(&self) -> Response {
        Response::json(&wire::Health {
            status: "ok",
            version: env!("CARGO_PKG_VERSION"),
            protocol: wire::PROTOCOL,
            uptime_ms: self.machine.uptime().as_millis(),
            mode: self.machine.mode(),
            sandboxes: self.machine.sandboxes(),
            isolation: wire::Isolation {
                landlock_abi: self.machine.landlock_abi(),
                layers: self.machine.layers(),
            },
        })
    }

    fn in_workspace(
        &self,
        request: &mut Request<'_>,
        scope: Scope<'_>,
        resource: In<'_>,
        is_get: bool,
        is_delete: bool,
    ) -> Answer {
        if !request.may_last {
            return Err(Refusal::new(
                503,
                "no_threads",
                "the machine has no thread left for this; delete a sandbox, or try again later",
            ));
        }
        let lease = self.machine.lease(scope)?;
        let workspace: &Workspace = &lease;
        let query = Query::parse(request.head.query.as_deref())?;
        let ping = self.machine.ping_interval();
        let response = match resource {
            In::Exec => commands::exec(request, workspace, ping, false)?,
            In::Processes if is_get => commands::list(workspace),
            In::Processes => commands::exec(request, workspace, ping, true)?,
            In::Process(id) if is_delete => commands::delete(workspace, id)?,
            In::Process(id) => commands::one(workspace, id)?,
            In::Logs(id) => commands::logs(workspace, id, &query, ping)?,
            In::Wait(id) => commands::wait(workspace, id, &query, ping)?,
            In::Kill(id) => commands::kill(request, workspace, id)?,
            In::Stdin(id) => commands::stdin(request, workspace, id, &query)?,
            In::FileRead => files::read(request, workspace, &query)?,
            In::FileWrite => files::write(request, workspace, &query)?,
            In::FileList => files::list(workspace, &query)?,
            In::FileStat => files::stat(workspace, &query)?,
            In::FileDelete => files::delete(workspace, &query)?,
            In::FileMakeDirectory => files::make_directory(workspace, &query)?,
            In::FileMove => files::rename(workspace, &query)?,
            In::Ports => ports::list(workspace)?,
            In::PortWait(port) => ports::wait(workspace, port, &query, ping)?,
            In::Proxy { .. } => return Err(no_route(&request.head.path)),
        };
        if matches!(
            resource,
            In::FileWrite | In::FileMakeDirectory | In::FileMove
        ) {
            workspace.check_open()?;
        }
        // Work goes on until the last byte is sent.
        Ok(response.holding(lease))
    }
}

impl Handler for Api {
    fn handle(&self, request: &mut Request<'_>) -> Response {
        let path = request.head.path.clone();
        let resource = Resource::find(&path);
        let answer = self.answer(request, &path, resource);
        if let Err(refusal) = &answer
            && matches!(refusal.status, 500 | 507)
        {
            // The caller is told, but it is the machine's keeper who can do something about it.
            logging::info(format_args!(
                "failed {} {}: {} {}",
                logging::quoted(request.head.method.as_bytes()),
                logging::quoted(&path),
                refusal.status,
                logging::quoted(refusal.text.as_bytes())
            ));
        }
        let response = answer.unwrap_or_else(Response::from);
        self.requests.count(resource, response.status);
        response
    }
}

fn show(path: &[u8]) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(path)
}

fn no_route(path: &[u8]) -> Refusal {
    Refusal::new(
        404,
        "not_found",
        format!("there is nothing at {}", show(path)),
    )
}

/// For requests that are nothing without a body: an absent one is an oversight.
fn require_body(request: &Request<'_>) -> Result<(), Refusal> {
    if request.head.framing == crate::http::parse::Framing::None {
        return Err(Refusal::new(
            411,
            "length_required",
            "the body is missing; send Content-Length, or a chunked body",
        ));
    }
    Ok(())
}

fn received(error: ReceiveError) -> Refusal {
    error.into()
}

fn invalid(text: &str) -> Refusal {
    Error::invalid(text).into()
}
