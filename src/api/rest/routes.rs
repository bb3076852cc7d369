//! The table of all routes. A route is defined here and nowhere else.
//!
//! Routing, `Allow`, the required token, the accepted query parameters, the names in the metrics and
//! the check against `openapi.json` all use [`ROUTES`]. The path of a request selects the rows of one
//! pattern, and its method then selects a row.

use std::sync::LazyLock;

#[cfg(feature = "attach")]
use super::attach;
use super::call::{Answer, Call};
#[cfg(feature = "interpreter")]
use super::contexts;
#[cfg(feature = "file-tools")]
use super::{archives, edit, search, snapshots, watches};
use super::{
    commands, contract, files, metrics, network, ports, sandboxes, selection, server, venv,
};
use crate::auth::Access;
use crate::codec::query::Query;
use crate::error::Result;
use crate::host::Host;
use crate::machine::Scope;
use crate::ports::Port;
use crate::workspace::Workspace;

/// One operation.
pub(super) struct Route {
    /// Its methods, besides HEAD (where GET is) and OPTIONS. None means any.
    pub(super) methods: &'static [&'static str],
    /// Its path. One without a leading slash is below the prefix of a workspace: `/v1` on a dedicated
    /// machine, `/v1/sandboxes/{id}` on a host.
    pub(super) pattern: &'static str,
    /// Its name in the metrics.
    name: &'static str,
    pub(super) parameters: &'static [&'static str],
    pub(super) operation: Operation,
}

/// The handler, by the token that it requires and the parts of the path that it takes.
#[derive(Clone, Copy)]
pub(super) enum Operation {
    /// About the server. No token is needed, and the query is ignored.
    Public(fn(&Call<'_, '_>) -> Answer),
    /// About the token of the request, with any or none: it looks at the token itself.
    Anyone(fn(&Call<'_, '_>) -> Answer),
    /// About the server, with the host token.
    Server(fn(&Call<'_, '_>) -> Answer),
    /// About all sandboxes, with the host token.
    Sandboxes(fn(&mut Call<'_, '_>, &Host) -> Answer),
    /// About one snapshot, with the host token.
    #[cfg(feature = "file-tools")]
    Snapshot(fn(&mut Call<'_, '_>, &Host, &str) -> Answer),
    /// About one sandbox, with the host token.
    Sandbox(fn(&Call<'_, '_>, &Host, &str) -> Answer),
    /// About one sandbox, with its own or the host token.
    OwnSandbox(fn(&mut Call<'_, '_>, &Host, &str) -> Answer),
    /// In a workspace, with the token that opens it.
    Inside(InWorkspace),
    /// The same, for what needs processes.
    Running(InWorkspace),
}

#[derive(Clone, Copy)]
pub(super) enum InWorkspace {
    /// About the workspace itself, or what the query and the body name.
    Plain(fn(&mut Call<'_, '_>, &Workspace) -> Answer),
    /// About one process, by its id or pid.
    Process(fn(&mut Call<'_, '_>, &Workspace, &str) -> Answer),
    /// About one context, by its id.
    Context(fn(&mut Call<'_, '_>, &Workspace, &str) -> Answer),
    /// About one execution of a context, by both ids.
    Execution(fn(&Call<'_, '_>, &Workspace, &str, &str) -> Answer),
    /// About one watch, by its id.
    Watch(fn(&mut Call<'_, '_>, &Workspace, &str) -> Answer),
    /// About one port.
    Port(fn(&Call<'_, '_>, &Workspace, Port) -> Answer),
    /// Forwarded to the server behind a port, with any method, path and query.
    Proxy,
}

#[cfg(feature = "interpreter")]
use InWorkspace::{Context as OfContext, Execution as OfExecution};
use InWorkspace::{Plain, Port as OfPort, Process, Proxy, Watch};
use Operation::{
    Anyone, Inside as In, OwnSandbox, Public, Running as Run, Sandbox, Sandboxes, Server,
};

const GET: &[&str] = &["GET"];
const POST: &[&str] = &["POST"];
const PATCH: &[&str] = &["PATCH"];
const DELETE: &[&str] = &["DELETE"];
const GET_POST: &[&str] = &["GET", "POST"];
const PUT: &[&str] = &["PUT"];
const PUT_POST: &[&str] = &["PUT", "POST"];
const DELETE_POST: &[&str] = &["DELETE", "POST"];
const ANY: &[&str] = &[];

/// All routes, in families that a build has or has not. Rows of one pattern are adjacent.
pub(super) const ROUTES: &[&[Route]] = &[
    CORE,
    #[cfg(feature = "attach")]
    ATTACH,
    #[cfg(feature = "file-tools")]
    FILE_TOOLS,
    #[cfg(feature = "file-tools")]
    SNAPSHOTS,
    #[cfg(feature = "console")]
    TICKETS,
    #[cfg(feature = "interpreter")]
    CONTEXTS,
];

#[rustfmt::skip]
const CORE: &[Route] = &[
    row(GET, "/", "root", &[], Public(server::welcome)),
    row(GET, "/health", "health", &[], Public(server::health)),
    row(GET, "/openapi.json", "openapi", &[], Public(contract::answer)),
    row(GET, "/v1/access", "access", &[], Anyone(server::access)),
    row(GET, "/v1/metrics", "metrics", &["disk"], Server(metrics::answer)),

    row(GET, "/v1/sandboxes", "sandboxes", selection::PARAMETERS, Sandboxes(sandboxes::list)),
    row(POST, "/v1/sandboxes", "sandboxes", &[], Sandboxes(sandboxes::create)),
    row(DELETE, "/v1/sandboxes", "sandboxes", &[], Sandboxes(sandboxes::delete_all)),
    row(GET, "/v1/sandboxes/{sandbox}", "sandbox", &[], OwnSandbox(sandboxes::describe)),
    row(DELETE, "/v1/sandboxes/{sandbox}", "sandbox", &[], OwnSandbox(sandboxes::delete)),
    row(PATCH, "/v1/sandboxes/{sandbox}", "sandbox", &[], OwnSandbox(sandboxes::change)),
    row(POST, "/v1/sandboxes/{sandbox}/pause", "pause", &[], OwnSandbox(sandboxes::pause)),
    row(POST, "/v1/sandboxes/{sandbox}/resume", "resume", &[], OwnSandbox(sandboxes::resume)),
    row(GET, "/v1/sandboxes/{sandbox}/metrics", "metrics", &["disk"], OwnSandbox(metrics::of_sandbox)),
    row(GET, "/v1/sandboxes/{sandbox}/token", "token", &[], Sandbox(sandboxes::token)),

    row(POST, "exec", "exec", &[], Run(Plain(commands::exec))),
    row(GET, "processes", "processes", &[], In(Plain(commands::list))),
    row(POST, "processes", "processes", &[], Run(Plain(commands::start))),
    row(GET, "processes/{process}", "process", &[], In(Process(commands::describe))),
    row(DELETE, "processes/{process}", "process", &[], In(Process(commands::delete))),
    row(GET, "processes/{process}/logs", "logs", &["follow", "stdout_offset", "stderr_offset", "encoding", "plain"], In(Process(commands::logs))),
    row(GET_POST, "processes/{process}/wait", "wait", &["timeout"], In(Process(commands::wait))),
    row(POST, "processes/{process}/kill", "kill", &[], In(Process(commands::kill))),
    row(POST, "processes/{process}/resize", "resize", &[], Run(Process(commands::resize))),
    row(PUT_POST, "processes/{process}/stdin", "stdin", &["eof"], Run(Process(commands::stdin))),

    row(GET, "venv", "venv", &[], In(Plain(venv::describe))),
    row(POST, "venv", "venv", &[], Run(Plain(venv::make))),

    row(GET, "files/read", "read", &["path", "offset", "length", "lines", "user"], In(Plain(files::read))),
    row(PUT_POST, "files/write", "write", &["path", "offset", "truncate_to", "mode", "mkdir", "if_sha256", "if_absent", "hash", "user"], In(Plain(files::write))),
    row(GET, "files/list", "list", &["path", "after", "limit", "detail", "user"], In(Plain(files::list))),
    row(GET, "files/stat", "stat", &["path", "detail", "hash", "user"], In(Plain(files::stat))),
    row(DELETE_POST, "files/delete", "delete", &["path", "recursive", "user"], In(Plain(files::delete))),
    row(POST, "files/mkdir", "mkdir", &["path", "mode", "user"], In(Plain(files::make_directory))),
    row(POST, "files/move", "move", &["from", "to", "user"], In(Plain(files::rename))),
    row(POST, "files/chmod", "chmod", &["path", "mode", "recursive", "user"], In(Plain(files::change_mode))),

    row(GET, "network", "network", &[], In(Plain(network::describe))),
    row(GET, "ports", "ports", &[], In(Plain(ports::list))),
    row(GET, "ports/{port}/wait", "ports", &["timeout"], Run(OfPort(ports::wait))),
    row(ANY, "proxy/{port}/{path}", "proxy", &[], Run(Proxy)),
];

#[cfg(feature = "attach")]
#[rustfmt::skip]
const ATTACH: &[Route] = &[
    row(GET, "processes/{process}/attach", "attach", &["offset", "mode", "take", "rows", "cols"], Run(Process(attach::attach))),
];

#[cfg(feature = "file-tools")]
#[rustfmt::skip]
const FILE_TOOLS: &[Route] = &[
    row(GET, "files/glob", "glob", &["path", "pattern", "type", "all", "limit", "after", "sort", "user"], In(Plain(search::glob))),
    row(POST, "files/grep", "grep", &["user"], In(Plain(search::grep))),
    row(POST, "files/edit", "edit", &["user"], In(Plain(edit::edit))),
    row(POST, "files/patch", "patch", &["path", "strip", "dry_run", "user"], In(Plain(edit::patch))),
    row(POST, "files/copy", "copy", &["from", "to", "recursive", "overwrite", "user"], In(Plain(files::copy))),
    row(POST, "files/hash", "hash", &["user"], In(Plain(files::hash))),
    row(POST, "files/compare", "compare", &["user"], In(Plain(files::compare))),
    row(GET, "files/watch", "watch", &["path", "recursive", "exclude", "user"], In(Plain(watches::watch))),
    row(POST, "files/watches", "watches", &["user"], In(Plain(watches::register))),
    row(DELETE, "files/watches/{watch}", "watches", &[], In(Watch(watches::remove))),
    row(GET, "files/watches/{watch}/events", "watches", &["after", "timeout"], In(Watch(watches::events))),
    row(GET, "files/archive", "archive", &["path", "format", "include", "exclude", "gitignore", "errors", "newer_than_ms", "user"], In(Plain(archives::pack))),
    row(PUT, "files/archive", "archive", &["path", "mkdir", "strip", "overwrite", "atomic", "dry_run", "owners", "max_bytes", "max_files", "user"], In(Plain(archives::unpack))),
];

#[cfg(feature = "file-tools")]
#[rustfmt::skip]
const SNAPSHOTS: &[Route] = &[
    row(GET, "/v1/snapshots", "snapshots", &["name", "after", "limit"], Sandboxes(snapshots::list)),
    row(PUT, "/v1/snapshots", "snapshots", &["name"], Sandboxes(snapshots::import)),
    row(GET, "/v1/snapshots/{snapshot}", "snapshot", &[], Operation::Snapshot(snapshots::describe)),
    row(DELETE, "/v1/snapshots/{snapshot}", "snapshot", &[], Operation::Snapshot(snapshots::delete)),
    row(GET, "/v1/snapshots/{snapshot}/archive", "snapshot_archive", &["format"], Operation::Snapshot(snapshots::archive)),
];

#[cfg(feature = "console")]
const TICKETS: &[Route] = &[row(
    POST,
    "tickets",
    "tickets",
    &[],
    In(Plain(ports::ticket)),
)];

#[cfg(feature = "interpreter")]
#[rustfmt::skip]
const CONTEXTS: &[Route] = &[
    row(GET, "languages", "languages", &[], In(Plain(contexts::languages))),
    row(GET, "contexts", "contexts", &[], In(Plain(contexts::list))),
    row(POST, "contexts", "contexts", &[], Run(Plain(contexts::create))),
    row(GET, "contexts/{context}", "context", &[], In(OfContext(contexts::describe))),
    row(DELETE, "contexts/{context}", "context", &[], In(OfContext(contexts::delete))),
    row(POST, "contexts/{context}/execute", "execute", &[], Run(OfContext(contexts::execute_in))),
    row(POST, "contexts/{context}/interrupt", "interrupt", &[], Run(OfContext(contexts::interrupt))),
    row(POST, "contexts/{context}/restart", "restart", &[], Run(OfContext(contexts::restart))),
    row(POST, "contexts/{context}/input", "input", &[], Run(OfContext(contexts::input))),
    row(GET, "contexts/{context}/logs", "context_logs", &["follow", "stdout_offset", "stderr_offset", "encoding", "plain"], In(OfContext(contexts::logs))),
    row(GET, "contexts/{context}/executions", "executions", &[], In(OfContext(contexts::executions))),
    row(GET, "contexts/{context}/executions/{execution}", "executions", &[], In(OfExecution(contexts::describe_execution))),
    row(GET, "contexts/{context}/executions/{execution}/events", "executions", &["after", "follow", "encoding"], In(OfExecution(contexts::events))),
    row(POST, "execute", "execute", &[], Run(Plain(contexts::execute))),
    row(POST, "/execute", "execute", &[], Run(Plain(contexts::execute_simply))),
    row(POST, "/sandboxes/{sandbox}/execute", "execute", &[], Run(Plain(contexts::execute_simply))),
];

/// The rows of one pattern.
struct Pattern {
    /// Without a leading slash.
    text: &'static str,
    /// Its first word, which tells most paths apart from it.
    first: &'static str,
    /// Whether it is below the prefix of a workspace.
    is_inside: bool,
    routes: &'static [Route],
}

static PATTERNS: LazyLock<Vec<Pattern>> = LazyLock::new(|| {
    let families = ROUTES.iter();
    families
        .flat_map(|routes| routes.chunk_by(|one, other| one.pattern == other.pattern))
        .map(|routes| {
            let pattern = routes[0].pattern;
            let text = pattern.strip_prefix('/').unwrap_or(pattern);
            Pattern {
                text,
                first: text.split('/').next().unwrap_or_default(),
                is_inside: text == pattern,
                routes,
            }
        })
        .collect()
});

/// Aliases of words in the paths of a workspace.
pub(super) const ALIASES: &[(&str, &str)] = &[("procs", "processes")];

const fn row(
    methods: &'static [&'static str],
    pattern: &'static str,
    name: &'static str,
    parameters: &'static [&'static str],
    operation: Operation,
) -> Route {
    Route {
        methods,
        pattern,
        name,
        parameters,
        operation,
    }
}

impl Route {
    /// Reads the query of a request; that of public and proxied routes is ignored here.
    ///
    /// # Errors
    /// `Invalid` if it is not form-encoded, or has a parameter that this route does not take.
    pub(super) fn query(&self, raw: Option<&[u8]>) -> Result<Query> {
        if matches!(self.operation, Public(_) | Run(Proxy)) {
            return Query::parse(None);
        }
        let query = Query::parse(raw)?;
        query.check_names(self.parameters, self.pattern)?;
        Ok(query)
    }
}

/// The target of a path: the rows of one pattern, and the values of the pattern's parameters.
#[derive(Clone, Copy)]
pub(in crate::api) struct Target<'a> {
    /// As in the request.
    pub(super) path: &'a [u8],
    /// Empty if there is no such route.
    pub(super) routes: &'static [Route],
    /// The workspace that the path is below.
    pub(super) scope: Scope<'a>,
    pub(super) captures: Captures<'a>,
}

/// The values of `{sandbox}`, `{snapshot}`, `{process}`, `{context}`, `{execution}`, `{watch}`, `{port}` and `{path}` in a path.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Captures<'a> {
    pub(super) sandbox: &'a str,
    pub(super) snapshot: &'a str,
    pub(super) process: &'a str,
    pub(super) context: &'a str,
    pub(super) execution: &'a str,
    pub(super) watch: &'a str,
    pub(super) port: &'a [u8],
    /// Empty, or it begins with a slash.
    pub(super) path: &'a [u8],
}

impl<'a> Target<'a> {
    /// Finds the target of an undecoded path.
    pub(in crate::api) fn find(path: &'a [u8]) -> Self {
        let (scope, inside) = workspace(path);
        let whole = path.strip_prefix(b"/");
        let [first, first_inside] = [whole, inside].map(|path| path.map(|path| word(cut(path).0)));
        PATTERNS
            .iter()
            .find_map(|pattern| {
                let routes = pattern.routes;
                let (matched, first) = if pattern.is_inside {
                    (inside?, first_inside?)
                } else {
                    (whole?, first?)
                };
                if pattern.first.as_bytes() != first {
                    return None;
                }
                capture(pattern.text, matched).map(|captures| {
                    // A route of a workspace may be outside of `/v1`.
                    let is_inside = matches!(routes[0].operation, In(_) | Run(_));
                    let scope = match captures.sandbox {
                        id if is_inside && !id.is_empty() => Scope::Sandbox(id),
                        _ => scope,
                    };
                    Self {
                        path,
                        routes,
                        scope,
                        captures,
                    }
                })
            })
            .unwrap_or(Self {
                path,
                routes: &[],
                scope,
                captures: Captures::default(),
            })
    }

    /// The name in the metrics.
    pub(super) fn name(&self) -> &'static str {
        self.routes.first().map_or("none", |route| route.name)
    }

    /// The access that a request with this method needs; `None` if it needs no token.
    pub(super) fn access(&self, method: &str) -> Option<Access<'a>> {
        let route = self.route(method).or(self.routes.first());
        match (route.map(|route| route.operation), self.scope) {
            (Some(Public(_) | Anyone(_)), _) => None,
            (Some(OwnSandbox(_)), _) => Some(Access::Sandbox(self.captures.sandbox)),
            (Some(In(_) | Run(_)), Scope::Sandbox(id)) => Some(Access::Inside(id)),
            // No such route: both tokens of the sandbox get 404.
            (None, Scope::Sandbox(id)) => Some(Access::Sandbox(id)),
            _ => Some(Access::Machine),
        }
    }

    /// Whether the route is the port proxy.
    pub(super) fn is_proxied(&self) -> bool {
        matches!(self.routes, [route] if matches!(route.operation, Run(Proxy)))
    }

    /// The row for a method.
    pub(super) fn route(&self, method: &str) -> Option<&'static Route> {
        let method = if method == "HEAD" { "GET" } else { method };
        self.routes
            .iter()
            .find(|route| route.methods.is_empty() || route.methods.contains(&method))
    }

    /// Its methods, as in `Allow`. A target that takes any method lists the usual ones.
    pub(super) fn allow(&self) -> String {
        let mut methods: Vec<&str> = self
            .routes
            .iter()
            .flat_map(|route| route.methods)
            .copied()
            .collect();
        if methods.is_empty() {
            methods = vec!["GET", "POST", "PUT", "PATCH", "DELETE"];
        }
        if methods.contains(&"GET") {
            methods.push("HEAD");
        }
        methods.push("OPTIONS");
        methods.join(", ")
    }
}

/// The workspace that a path is below, and the rest of the path.
fn workspace(path: &[u8]) -> (Scope<'_>, Option<&[u8]>) {
    let sandbox = || {
        let (id, rest) = cut(path.strip_prefix(b"/v1/sandboxes/")?);
        let id = std::str::from_utf8(id).ok().filter(|id| !id.is_empty())?;
        Some((Scope::Sandbox(id), Some(rest.strip_prefix(b"/")?)))
    };
    sandbox().unwrap_or_else(|| (Scope::Machine, path.strip_prefix(b"/v1/")))
}

/// Compares a path with a pattern, segment by segment. Only the values of `{port}` and `{path}` may be
/// any bytes, because the rest of a proxied path belongs to another server.
fn capture<'a>(pattern: &'static str, path: &'a [u8]) -> Option<Captures<'a>> {
    let mut captures = Captures::default();
    let mut rest = Some(path);
    for expected in pattern.split('/') {
        if expected == "{path}" {
            // With the slash before it, so that an empty path differs from none.
            captures.path = rest.map_or(&[], |rest| &path[path.len() - rest.len() - 1..]);
            return Some(captures);
        }
        let (segment, after) = cut(rest?);
        rest = after.strip_prefix(b"/");
        let text = || std::str::from_utf8(segment).ok();
        match expected {
            "{port}" => captures.port = segment,
            "{sandbox}" => captures.sandbox = text().filter(|id| !id.is_empty())?,
            "{snapshot}" => captures.snapshot = text().filter(|id| !id.is_empty())?,
            "{watch}" => captures.watch = text().filter(|id| !id.is_empty())?,
            "{context}" => captures.context = text().filter(|id| !id.is_empty())?,
            "{execution}" => captures.execution = text().filter(|id| !id.is_empty())?,
            "{process}" => captures.process = text().filter(|id| !id.is_empty())?,
            expected if expected.as_bytes() == word(segment) => {}
            _ => return None,
        }
    }
    rest.is_none().then_some(captures)
}

/// The word that a segment of a path stands for.
fn word(segment: &[u8]) -> &[u8] {
    let alias = ALIASES
        .iter()
        .find(|(alias, _)| alias.as_bytes() == segment);
    alias.map_or(segment, |(_, stands_for)| stands_for.as_bytes())
}

/// Splits before the first slash.
fn cut(path: &[u8]) -> (&[u8], &[u8]) {
    let end = path.iter().position(|byte| *byte == b'/');
    path.split_at(end.unwrap_or(path.len()))
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(feature = "file-tools")]
    use crate::api::parts::OF_FILE_TOOLS;

    #[cfg(feature = "file-tools")]
    #[test]
    fn the_tools_for_files_are_where_a_build_without_them_says_that_it_has_none() {
        let mut first_words = std::collections::BTreeSet::new();
        for Route { pattern, .. } in FILE_TOOLS {
            let words: Vec<&str> = pattern.splitn(3, '/').take(2).collect();
            first_words.insert(words.join("/"));
        }
        let told = OF_FILE_TOOLS.map(str::to_owned);
        assert_eq!(first_words, told.into());
    }

    fn found(path: &(impl AsRef<[u8]> + ?Sized)) -> Target<'_> {
        Target::find(path.as_ref())
    }

    #[test]
    fn finds_what_a_path_names() {
        let none = Captures::default();
        let machine = Scope::Machine;
        for (path, pattern, scope, captures) in [
            ("/", "/", machine, none),
            ("/health", "/health", machine, none),
            ("/v1/exec", "exec", machine, none),
            ("/v1/procs", "processes", machine, none),
            (
                "/v1/procs/p-1/logs",
                "processes/{process}/logs",
                machine,
                Captures {
                    process: "p-1",
                    ..none
                },
            ),
            ("/v1/files/read", "files/read", machine, none),
            ("/v1/sandboxes", "/v1/sandboxes", machine, none),
            (
                "/v1/sandboxes/a/token",
                "/v1/sandboxes/{sandbox}/token",
                Scope::Sandbox("a"),
                Captures {
                    sandbox: "a",
                    ..none
                },
            ),
            ("/v1/sandboxes/a/exec", "exec", Scope::Sandbox("a"), none),
            (
                "/v1/sandboxes/exec/procs/7",
                "processes/{process}",
                Scope::Sandbox("exec"),
                Captures {
                    process: "7",
                    ..none
                },
            ),
        ] {
            let target = found(path);
            assert_eq!(
                target.routes.first().map(|route| route.pattern),
                Some(pattern),
                "{path}"
            );
            assert_eq!((target.scope, target.captures), (scope, captures), "{path}");
        }
    }

    #[test]
    fn what_follows_a_port_is_left_as_it_is() {
        for (path, port, rest) in [
            (&b"/v1/proxy/8000"[..], &b"8000"[..], &b""[..]),
            (b"/v1/proxy/8000/", b"8000", b"/"),
            (
                b"/v1/proxy/8000//a%2Fb/../\xff",
                b"8000",
                b"//a%2Fb/../\xff",
            ),
            (b"/v1/proxy/\xff/a", b"\xff", b"/a"),
            (b"/v1/proxy//a", b"", b"/a"),
        ] {
            for (path, scope) in [
                (path.to_vec(), Scope::Machine),
                (
                    [b"/v1/sandboxes/s-1", &path[3..]].concat(),
                    Scope::Sandbox("s-1"),
                ),
            ] {
                let target = found(&path);
                assert!(target.is_proxied());
                assert_eq!((target.captures.port, target.captures.path), (port, rest));
                assert_eq!(target.scope, scope);
            }
        }
        for path in [
            "/v1/proxy",
            "/v1/sandboxes/s-1/proxy",
            "/v1/sandboxes/a/b/proxy/80/",
        ] {
            assert!(found(path).routes.is_empty(), "{path}");
        }
    }

    #[test]
    fn nothing_else_is_a_path() {
        for path in [
            "",
            "*",
            "//",
            "/health/",
            "//health",
            "/Health",
            "/v1",
            "/v1/",
            "/v1/exec/",
            "/v1/processes/",
            "/v1/processes/p-1/",
            "/v1/processes//logs",
            "/v1/processes/p-1/logs/x",
            "/v1/files",
            "/v1/sandboxes/",
            "/v1/sandboxes/a/",
            "/v1/sandboxes//exec",
            "/v1/sandboxes/a/health",
            "/v1/sandboxes/a/sandboxes",
            "/v1/sandboxes/a/sandboxes/b/exec",
            "/v1/sandboxes/a/token/",
            "/v2/exec",
            "/v1/../health",
            "/v1/%65xec",
        ] {
            assert!(found(path).routes.is_empty(), "{path}");
        }
    }

    #[test]
    fn a_sandbox_token_is_asked_for_inside_and_at_the_end() {
        for (path, method, expected) in [
            ("/", "GET", None),
            ("/health", "POST", None),
            ("/v1/sandboxes/a/exec", "POST", Some(Access::Inside("a"))),
            ("/v1/sandboxes/a/exec", "GET", Some(Access::Inside("a"))),
            ("/v1/sandboxes/a", "DELETE", Some(Access::Sandbox("a"))),
            ("/v1/sandboxes/a", "GET", Some(Access::Sandbox("a"))),
            ("/v1/sandboxes/a", "HEAD", Some(Access::Sandbox("a"))),
            ("/v1/sandboxes/a", "PUT", Some(Access::Sandbox("a"))),
            ("/v1/sandboxes/a/token", "HEAD", Some(Access::Machine)),
            ("/v1/sandboxes", "GET", Some(Access::Machine)),
            ("/v1/sandboxes/a/token", "GET", Some(Access::Machine)),
            ("/v1/sandboxes", "DELETE", Some(Access::Machine)),
            ("/v1/exec", "POST", Some(Access::Machine)),
            ("/v1/nope", "GET", Some(Access::Machine)),
            ("/v1/sandboxes/a/nope", "GET", Some(Access::Sandbox("a"))),
        ] {
            assert_eq!(found(path).access(method), expected, "{method} {path}");
        }
    }

    #[test]
    fn head_goes_with_get() {
        assert_eq!(found("/health").allow(), "GET, HEAD, OPTIONS");
        assert_eq!(found("/v1/exec").allow(), "POST, OPTIONS");
        assert_eq!(
            found("/v1/sandboxes").allow(),
            "GET, POST, DELETE, HEAD, OPTIONS"
        );
        assert!(found("/v1/files/read").route("HEAD").is_some());
        assert!(found("/v1/exec").route("HEAD").is_none());
    }

    #[test]
    fn the_table_is_in_order() {
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
        assert_eq!(
            patterns.len(),
            count,
            "the rows of a pattern stand together"
        );
        for Route {
            pattern, operation, ..
        } in ROUTES.iter().copied().flatten()
        {
            let parameter = match operation {
                Sandbox(_) | OwnSandbox(_) => "{sandbox}",
                #[cfg(feature = "file-tools")]
                Operation::Snapshot(_) => "{snapshot}",
                In(Process(_)) | Run(Process(_)) => "{process}",
                In(InWorkspace::Context(_)) | Run(InWorkspace::Context(_)) => "{context}",
                In(InWorkspace::Execution(_)) | Run(InWorkspace::Execution(_)) => "{execution}",
                In(Watch(_)) | Run(Watch(_)) => "{watch}",
                In(OfPort(_) | Proxy) | Run(OfPort(_) | Proxy) => "{port}",
                Public(_) | Anyone(_) | Server(_) | Sandboxes(_) | In(Plain(_)) | Run(Plain(_)) => {
                    ""
                }
            };
            assert!(pattern.contains(parameter), "{pattern}");
            // The simple shape of `execute` is the only operation of a workspace outside of `/v1`.
            let is_outside = pattern.ends_with("/execute") && pattern.starts_with('/');
            assert!(
                is_outside || !parameter.is_empty() || !pattern.contains('{'),
                "{pattern}"
            );
            assert_eq!(
                matches!(operation, In(_) | Run(_)) && !is_outside,
                !pattern.starts_with('/'),
                "{pattern}"
            );
        }
    }
}
