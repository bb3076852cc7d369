//! What this door serves, and which requests are its own.
//!
//! Some of its paths are also paths of other doors: there the headers decide. A request to a name such as
//! `3000-ID.example.com` is for a port of the sandbox with this id, whatever its path is.

#[cfg(feature = "file-tools")]
use super::builds;
use super::calls::{Answer, Call, Document, ListAnswer};
#[cfg(feature = "interpreter")]
use super::code;
use super::errors::{E2bError, Style};
use super::{entries, files, logs, processes, sandboxes, templates, watches};
use crate::api::context::Context;
use crate::api::parts::{is_below, is_for_e2b};
use crate::codec::fields::Fields;
use crate::http::Request;
use crate::http::parse::Head;
use crate::machine::MACHINE_ID;
use crate::workspace::Workspace;

/// One operation.
pub(super) struct Route {
    /// None means any.
    methods: &'static [&'static str],
    pattern: &'static str,
    /// Its name in the metrics.
    name: &'static str,
    pub(super) operation: Operation,
}

/// A handler, by what it takes and how its answers look.
#[derive(Clone, Copy)]
pub(super) enum Operation {
    /// About sandboxes, with the API key.
    Api(fn(&mut Call<'_, '_>, &str) -> Answer),
    /// About the sandbox that the path names, with its own token or the API key.
    OwnApi(fn(&mut Call<'_, '_>, &str) -> Answer),
    /// The same for what happens inside it, which the host's token may be kept from.
    ApiInside(fn(&mut Call<'_, '_>, &str) -> Answer),
    /// Files for a template, with the API key or a signature of the request.
    #[cfg(feature = "file-tools")]
    Upload(fn(&mut Call<'_, '_>, &str) -> Answer),
    /// What this server does not have, with a sentence that says so.
    Unavailable(&'static str),
    /// Whether a sandbox runs. It needs no credentials.
    Health,
    /// In a sandbox, with its token.
    Sandbox(fn(&mut Call<'_, '_>, &Workspace) -> Answer),
    /// The same, with its token or a signature of the request.
    Files(fn(&mut Call<'_, '_>, &Workspace) -> Answer),
    /// A call with one message in both directions.
    Unary(fn(&mut Call<'_, '_>, &Workspace, Fields<'_>) -> Document),
    /// The same, where the answer may be long.
    List(fn(&mut Call<'_, '_>, &Workspace, Fields<'_>) -> ListAnswer),
    /// A call with one message that many answer.
    ServerStream(fn(&mut Call<'_, '_>, &Workspace, Fields<'_>) -> Answer),
    /// A call with many messages that one answers.
    ClientStream(fn(&mut Call<'_, '_>, &Workspace) -> Document),
    /// The code interpreter; about one context, by its id, where the path has one.
    Code(fn(&mut Call<'_, '_>, &Workspace, &str) -> Answer),
}

use Operation::{
    Api, ApiInside, ClientStream, Code, Files, Health, List, OwnApi, Sandbox, ServerStream, Unary,
    Unavailable,
};

const GET: &[&str] = &["GET"];
const POST: &[&str] = &["POST"];
const PUT: &[&str] = &["PUT"];
const DELETE: &[&str] = &["DELETE"];
const ANY: &[&str] = &[];

const NO_SNAPSHOTS: &str = "there are no snapshots here, and so no forks";
const NO_TEMPLATES: &str = "that is unavailable here: templates are listed, built and deleted";
const NO_TAGS: &str = "a template has one tag here, that of its name: build NAME:TAG";
const NO_VOLUMES: &str = "there are no volumes here";
const NO_SECRETS: &str = "there are no secrets here; pass values by envs";
const NO_NETWORK: &str =
    "the network of a sandbox that runs cannot be changed; choose it when the sandbox is made";

/// All routes. Rows of one pattern are adjacent.
const ROUTES: &[&[Route]] = &[
    #[cfg(feature = "file-tools")]
    BUILDS,
    SANDBOXES,
    #[cfg(feature = "interpreter")]
    CODE,
];

/// Those that build templates. The path has the id of a template where others have that of a sandbox.
#[cfg(feature = "file-tools")]
#[rustfmt::skip]
const BUILDS: &[Route] = &[
    row(ANY, "/templates/tags", "e2b_other", Unavailable(NO_TAGS)),
    row(POST, "/v3/templates", "e2b_templates", Api(builds::begin)),
    row(GET, "/templates/{sandbox}/files/{context}", "e2b_build", Api(builds::upload_link)),
    row(PUT, "/templates/{sandbox}/files/{context}", "e2b_build", Operation::Upload(builds::upload)),
    row(POST, "/v2/templates/{sandbox}/builds/{context}", "e2b_build", Api(builds::start)),
    row(GET, "/templates/{sandbox}/builds/{context}/status", "e2b_build", Api(builds::status)),
    row(DELETE, "/templates/{sandbox}", "e2b_templates", Api(builds::delete)),
];

/// Those of sandboxes, and of what is in them.
#[rustfmt::skip]
const SANDBOXES: &[Route] = &[
    // Next to the row of this pattern before.
    row(GET, "/templates/{sandbox}", "e2b_templates", Api(templates::describe)),
    row(POST, "/sandboxes", "e2b_sandboxes", Api(sandboxes::create)),
    row(GET, "/sandboxes", "e2b_sandboxes", Api(sandboxes::list)),
    row(POST, "/v2/sandboxes", "e2b_sandboxes", Api(sandboxes::create)),
    row(GET, "/v2/sandboxes", "e2b_sandboxes", Api(sandboxes::list)),
    row(GET, "/sandboxes/{sandbox}", "e2b_sandbox", OwnApi(sandboxes::describe)),
    row(DELETE, "/sandboxes/{sandbox}", "e2b_sandbox", OwnApi(sandboxes::kill)),
    row(POST, "/sandboxes/{sandbox}/connect", "e2b_connect", Api(sandboxes::connect)),
    row(POST, "/sandboxes/{sandbox}/resume", "e2b_connect", Api(sandboxes::connect)),
    row(POST, "/v2/sandboxes/{sandbox}/connect", "e2b_connect", Api(sandboxes::connect)),
    row(POST, "/sandboxes/{sandbox}/timeout", "e2b_timeout", Api(sandboxes::set_timeout)),
    row(POST, "/sandboxes/{sandbox}/refreshes", "e2b_timeout", Api(sandboxes::refresh)),
    row(GET, "/sandboxes/{sandbox}/metrics", "e2b_metrics", Api(sandboxes::metrics)),
    row(GET, "/sandboxes/{sandbox}/logs", "e2b_logs", ApiInside(logs::logs)),
    row(POST, "/sandboxes/{sandbox}/pause", "e2b_pause", Api(sandboxes::pause)),
    row(POST, "/sandboxes/{sandbox}/snapshots", "e2b_other", Unavailable(NO_SNAPSHOTS)),
    row(POST, "/sandboxes/{sandbox}/fork", "e2b_other", Unavailable(NO_SNAPSHOTS)),
    row(PUT, "/sandboxes/{sandbox}/network", "e2b_other", Unavailable(NO_NETWORK)),
    row(GET, "/snapshots", "e2b_other", Api(sandboxes::list_snapshots)),
    row(ANY, "/snapshots/{rest}", "e2b_other", Unavailable(NO_SNAPSHOTS)),
    row(GET, "/templates", "e2b_templates", Api(templates::list)),
    row(GET, "/templates/aliases/{rest}", "e2b_templates", Api(templates::find)),
    row(GET, "/templates/{sandbox}/tags", "e2b_templates", Api(templates::tags)),
    row(ANY, "/templates/{sandbox}/tags/{rest}", "e2b_other", Unavailable(NO_TAGS)),
    row(ANY, "/templates/{rest}", "e2b_other", Unavailable(NO_TEMPLATES)),
    row(GET, "/v2/templates", "e2b_templates", Api(templates::list)),
    row(ANY, "/v2/templates/{rest}", "e2b_other", Unavailable(NO_TEMPLATES)),
    row(ANY, "/v3/templates/{rest}", "e2b_other", Unavailable(NO_TEMPLATES)),
    row(ANY, "/default-templates/{rest}", "e2b_other", Unavailable(NO_TEMPLATES)),
    row(ANY, "/volumes/{rest}", "e2b_other", Unavailable(NO_VOLUMES)),
    row(ANY, "/secrets/{rest}", "e2b_other", Unavailable(NO_SECRETS)),

    row(GET, "/health", "e2b_health", Health),
    row(GET, "/metrics", "e2b_metrics", Sandbox(sandboxes::metrics_inside)),
    row(GET, "/envs", "e2b_envs", Sandbox(processes::variables)),
    row(GET, "/files", "e2b_files", Files(files::read)),
    row(POST, "/files", "e2b_files", Files(files::write)),

    row(POST, "/process.Process/Start", "e2b_process", ServerStream(processes::start)),
    row(POST, "/process.Process/Connect", "e2b_process", ServerStream(processes::connect)),
    row(POST, "/process.Process/List", "e2b_process", List(processes::list)),
    row(POST, "/process.Process/SendInput", "e2b_process", Unary(processes::send_input)),
    row(POST, "/process.Process/StreamInput", "e2b_process", ClientStream(processes::stream_input)),
    row(POST, "/process.Process/CloseStdin", "e2b_process", Unary(processes::close_stdin)),
    row(POST, "/process.Process/SendSignal", "e2b_process", Unary(processes::send_signal)),
    row(POST, "/process.Process/Update", "e2b_process", Unary(processes::update)),

    row(POST, "/filesystem.Filesystem/Stat", "e2b_filesystem", Unary(entries::stat)),
    row(POST, "/filesystem.Filesystem/ListDir", "e2b_filesystem", List(entries::list)),
    row(POST, "/filesystem.Filesystem/MakeDir", "e2b_filesystem", Unary(entries::make_directory)),
    row(POST, "/filesystem.Filesystem/Move", "e2b_filesystem", Unary(entries::rename)),
    row(POST, "/filesystem.Filesystem/Remove", "e2b_filesystem", Unary(entries::remove)),
    row(POST, "/filesystem.Filesystem/CreateWatcher", "e2b_watch", Unary(watches::create)),
    row(POST, "/filesystem.Filesystem/GetWatcherEvents", "e2b_watch", List(watches::events)),
    row(POST, "/filesystem.Filesystem/RemoveWatcher", "e2b_watch", Unary(watches::remove)),
    row(POST, "/filesystem.Filesystem/WatchDir", "e2b_watch", ServerStream(watches::watch)),
];

/// Those of the code interpreter.
#[cfg(feature = "interpreter")]
#[rustfmt::skip]
const CODE: &[Route] = &[
    row(POST, "/execute", "e2b_execute", Code(code::execute)),
    row(GET, "/contexts", "e2b_contexts", Code(code::list)),
    row(POST, "/contexts", "e2b_contexts", Code(code::create)),
    row(DELETE, "/contexts/{context}", "e2b_contexts", Code(code::delete)),
    row(POST, "/contexts/{context}/restart", "e2b_contexts", Code(code::restart)),
];

const fn row(
    methods: &'static [&'static str],
    pattern: &'static str,
    name: &'static str,
    operation: Operation,
) -> Route {
    Route {
        methods,
        pattern,
        name,
        operation,
    }
}

/// Paths that are never this door's.
const FOREIGN: &[&str] = &[
    "/v1",
    "/mcp",
    "/console",
    "/t",
    "/openapi.json",
    #[cfg(not(feature = "interpreter"))]
    "/execute",
    #[cfg(not(feature = "interpreter"))]
    "/contexts",
];

/// The ports that E2B's clients name for the sandbox itself and for its code interpreter.
const OWN_PORTS: [u16; 2] = [49983, 49999];

/// What a request is about.
pub(in crate::api) struct Target<'a> {
    /// The rows of the path's pattern; empty if there is none.
    routes: Vec<&'static Route>,
    path: &'a [u8],
    /// The sandbox that the host's name names.
    labelled: Option<String>,
    /// Whether there is no such sandbox.
    is_gone: bool,
    /// The port of a server in it that the host's name names.
    port: Option<u16>,
    /// Those in the path.
    sandbox: Option<&'a str>,
    context: Option<&'a str>,
    /// Whether a signature stands for a token.
    is_signed: bool,
}

impl<'a> Target<'a> {
    /// What a request with this path is about; `None` if it is another door's.
    pub(in crate::api) fn find(
        context: &Context,
        request: &Request<'_>,
        path: &'a [u8],
    ) -> Option<Self> {
        let mut target = Self {
            routes: Vec::new(),
            path,
            labelled: None,
            is_gone: false,
            port: None,
            sandbox: None,
            context: None,
            is_signed: false,
        };
        if let Some((port, id)) = host_label(request.head.host()) {
            let is_there = context.machine.has_sandbox(&id);
            target.is_gone = !is_there && is_id(&id);
            if is_there || target.is_gone {
                target.labelled = Some(id);
            }
            target.port = (is_there && !OWN_PORTS.contains(&port)).then_some(port);
        }
        // To other doors, a page of a sandbox that is gone would be a page of their own origin.
        if target.port.is_some() || target.is_gone {
            return Some(target);
        }
        if is_below(path, FOREIGN) {
            return None;
        }
        let is_own = target.labelled.is_some() || is_for_e2b(&request.head, path);
        is_own.then(|| {
            for route in ROUTES.iter().copied().flatten() {
                if let Some(captured) = capture(route.pattern, path) {
                    target.routes.push(route);
                    // The first pattern says the most.
                    target.sandbox = target.sandbox.or(captured.0);
                    target.context = target.context.or(captured.1);
                }
            }
            let takes_signature = target.routes.iter().any(|route| match route.operation {
                Files(_) => true,
                #[cfg(feature = "file-tools")]
                Operation::Upload(_) => true,
                _ => false,
            });
            target.is_signed = takes_signature
                && context.authenticator.needs_token()
                && request.head.query.as_deref().is_some_and(|query| {
                    let mut pairs = query.split(|byte| *byte == b'&');
                    pairs.any(|pair| pair.starts_with(b"signature="))
                });
            target
        })
    }

    /// The name in the metrics.
    pub(super) fn name(&self) -> &'static str {
        match (self.routes.first(), self.port) {
            (Some(route), _) => route.name,
            (None, Some(_)) => "e2b_port",
            (None, None) => "e2b_other",
        }
    }

    /// Its methods, as in `Allow`.
    pub(super) fn allow(&self) -> String {
        let methods = self.routes.iter().flat_map(|route| route.methods);
        let mut methods: Vec<&str> = methods.copied().collect();
        if methods.is_empty() {
            methods = vec!["GET", "POST", "PUT", "PATCH", "DELETE"];
        }
        methods.push("OPTIONS");
        methods.join(", ")
    }

    /// The row for a method.
    ///
    /// # Errors
    /// 404 or 405.
    pub(super) fn route(&self, method: &str) -> Result<&'static Route, E2bError> {
        let method = if method == "HEAD" { "GET" } else { method };
        let mut routes = self.routes.iter();
        // OPTIONS is answered by the first row: `Allow` has the methods of all.
        let found = routes.find(|route| {
            method == "OPTIONS" || route.methods.is_empty() || route.methods.contains(&method)
        });
        if let Some(route) = found {
            return Ok(route);
        }
        let path = String::from_utf8_lossy(self.path);
        if self.routes.is_empty() {
            return Err(E2bError::not_found(format_args!(
                "there is nothing at {path}"
            )));
        }
        let allow = self.allow();
        let text = format!("{path} has no method {method}; it has {allow}");
        Err(E2bError::new(super::errors::Code::Unimplemented, text)
            .with_status(405)
            .with_header("Allow", allow))
    }

    /// How failures look.
    pub(super) fn style(&self, method: &str) -> Style {
        match self.route(method).map(|route| route.operation) {
            Ok(Unary(_) | List(_) | ServerStream(_) | ClientStream(_)) => Style::Rpc,
            Ok(Code(_)) => Style::Text,
            _ => Style::Api,
        }
    }

    /// The port of a server that the request is for.
    pub(super) fn port(&self) -> Option<u16> {
        self.port
    }

    /// Whether the host's name names a sandbox that does not exist.
    pub(super) fn is_gone(&self) -> bool {
        self.is_gone
    }

    /// Whether a signature stands for a token.
    pub(super) fn is_signed(&self) -> bool {
        self.is_signed
    }

    /// The sandbox that the path names: of the API.
    pub(super) fn listed(&self) -> Option<&'a str> {
        self.sandbox
    }

    /// The sandbox that the host's name names.
    pub(super) fn labelled(&self) -> Option<&str> {
        self.labelled.as_deref()
    }

    /// The context that the path names; empty if it names none.
    pub(super) fn context(&self) -> &'a str {
        self.context.unwrap_or_default()
    }
}

/// Whether the page that sends a request is of another port of the same sandbox.
pub(super) fn is_beside(head: &Head) -> bool {
    let mut origins = head.values("origin");
    let (Some(origin), None) = (origins.next(), origins.next()) else {
        return false;
    };
    let page = [&b"https://"[..], b"http://"]
        .into_iter()
        .find_map(|scheme| origin.strip_prefix(scheme));
    let rest = |host: Option<&[u8]>| {
        let (_, id) = host_label(host)?;
        let dot = host?.iter().position(|byte| *byte == b'.')?;
        Some((id, host?[dot..].to_ascii_lowercase()))
    };
    let own = rest(head.host());
    own.is_some() && own == rest(page)
}

/// The port and the sandbox in a name such as `3000-ID.example.com`.
fn host_label(host: Option<&[u8]>) -> Option<(u16, String)> {
    let (label, _) = std::str::from_utf8(host?).ok()?.split_once('.')?;
    let (port, id) = label.split_once('-')?;
    let is_number = !port.is_empty() && port.bytes().all(|byte| byte.is_ascii_digit());
    let port = port.parse().ok().filter(|port| is_number && *port > 0)?;
    // Names of hosts have no case.
    Some((port, id.to_ascii_lowercase()))
}

/// Whether a name can only be that of a sandbox, now or at another time, or a token.
fn is_id(name: &str) -> bool {
    let is_hex = name.bytes().all(|byte| byte.is_ascii_hexdigit());
    name == MACHINE_ID || (is_hex && matches!(name.len(), 24 | 64))
}

/// The sandbox and the context in a path that has the form of a pattern.
fn capture<'a>(pattern: &str, path: &'a [u8]) -> Option<(Option<&'a str>, Option<&'a str>)> {
    let path = std::str::from_utf8(path).ok()?;
    let (mut sandbox, mut context) = (None, None);
    let mut segments = path.split('/');
    for expected in pattern.split('/') {
        match (expected, segments.next()) {
            ("{rest}", _) => return Some((sandbox, context)),
            ("{sandbox}", Some(id)) => sandbox = Some(id).filter(|id| !id.is_empty()),
            ("{context}", Some(id)) => context = Some(id).filter(|id| !id.is_empty()),
            (expected, Some(found)) if expected == found => {}
            _ => return None,
        }
    }
    let is_complete = pattern.contains("{sandbox}") <= sandbox.is_some()
        && pattern.contains("{context}") <= context.is_some();
    (segments.next().is_none() && is_complete).then_some((sandbox, context))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::parts::{OF_E2B, SHARED_WITH_E2B};
    use crate::http::parse::{self, Progress};

    #[test]
    fn the_rows_of_a_pattern_stand_together() {
        let mut patterns: Vec<_> = ROUTES
            .iter()
            .copied()
            .flatten()
            .map(|route| route.pattern)
            .collect();
        patterns.dedup();
        let count = patterns.len();
        patterns.sort_unstable();
        patterns.dedup();
        assert_eq!(patterns.len(), count);
        for pattern in patterns {
            let path = pattern.as_bytes();
            assert!(
                is_below(path, &OF_E2B) != is_below(path, &SHARED_WITH_E2B),
                "{pattern}"
            );
        }
    }

    #[test]
    fn a_host_names_a_port_and_a_sandbox() {
        for (host, expected) in [
            ("3000-abc.example.com", Some((3000, "abc"))),
            ("3000-ABC.localhost:49983", Some((3000, "abc"))),
            ("49983-a-b.x", Some((49983, "a-b"))),
            ("3000-abc", None),
            ("3000-abc:80", None),
            ("+300-abc.x", None),
            ("-abc.x", None),
            ("0-abc.x", None),
            ("65536-abc.x", None),
            ("a3000-abc.x", None),
        ] {
            let found = host_label(Some(host.as_bytes()));
            let expected = expected.map(|(port, id)| (port, id.to_owned()));
            assert_eq!(found, expected, "{host}");
        }
    }

    #[test]
    fn pages_of_one_sandbox_are_beside_each_other() {
        for (host, origin, expected) in [
            ("8000-abc.x:1", "http://3000-abc.x:1", true),
            ("8000-abc.x", "https://3000-ABC.X", true),
            ("8000-abc.x", "https://3000-abd.x", false),
            ("8000-abc.x", "https://3000-abc.y", false),
            ("8000-abc.x:1", "http://3000-abc.x:2", false),
            ("8000-abc.x", "https://abc.x", false),
            ("8000-abc.x", "null", false),
            (
                "8000-abc.x",
                "https://3000-abc.x\r\nOrigin: https://3000-abc.x",
                false,
            ),
            ("localhost", "http://localhost", false),
        ] {
            let sent = format!("GET / HTTP/1.1\r\nHost: {host}\r\nOrigin: {origin}\r\n\r\n");
            let Ok(Progress::Complete(head, _)) = parse::head(sent.as_bytes()) else {
                panic!("{sent}");
            };
            assert_eq!(is_beside(&head), expected, "{host} {origin}");
        }
    }

    #[test]
    fn paths_have_the_form_of_their_patterns() {
        for (pattern, path, expected) in [
            ("/sandboxes", "/sandboxes", Some((None, None))),
            ("/sandboxes", "/sandboxes/", None),
            (
                "/sandboxes/{sandbox}",
                "/sandboxes/a",
                Some((Some("a"), None)),
            ),
            ("/sandboxes/{sandbox}", "/sandboxes/", None),
            ("/sandboxes/{sandbox}", "/sandboxes/a/b", None),
            (
                "/sandboxes/{sandbox}/connect",
                "/sandboxes/a/connect",
                Some((Some("a"), None)),
            ),
            (
                "/contexts/{context}/restart",
                "/contexts/c-1/restart",
                Some((None, Some("c-1"))),
            ),
            ("/templates/{rest}", "/templates", Some((None, None))),
            ("/templates/{rest}", "/templates/a/b", Some((None, None))),
            ("/templates/{rest}", "/template", None),
        ] {
            assert_eq!(capture(pattern, path.as_bytes()), expected, "{path}");
        }
    }
}
