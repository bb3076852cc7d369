//! From a method and a path to what is asked for, by the URL alone.
//!
//! This table is the list of everything the server can be asked.

use crate::auth::Access;
use crate::machine::Scope;

/// What a path names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Resource<'a> {
    /// The server itself.
    Health,
    /// What it can be asked, for programs to read.
    Contract,
    /// What the server does and takes.
    Metrics,
    /// All sandboxes.
    Sandboxes,
    /// One of them.
    Sandbox(&'a str),
    /// What opens it.
    SandboxToken(&'a str),
    /// Something in a workspace.
    In(Scope<'a>, WorkspaceResource<'a>),
}

/// What a path names in a workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WorkspaceResource<'a> {
    Exec,
    Processes,
    Process(&'a str),
    Logs(&'a str),
    Wait(&'a str),
    Kill(&'a str),
    Stdin(&'a str),
    FileRead,
    FileWrite,
    FileList,
    FileStat,
    FileDelete,
    FileMakeDirectory,
    FileMove,
    Ports,
    PortWait(&'a str),
    /// A server behind a port, with its own path (empty, or beginning with a slash).
    Proxy {
        port: &'a [u8],
        path: &'a [u8],
    },
}

use WorkspaceResource as In;

impl<'a> Resource<'a> {
    /// Finds what an undecoded path names.
    pub(super) fn find(path: &'a [u8]) -> Option<Self> {
        if let Some((scope, proxied)) = proxied(path) {
            return Some(Self::In(scope, proxied));
        }
        let segments: Vec<&str> = std::str::from_utf8(path)
            .ok()?
            .strip_prefix('/')?
            .split('/')
            .collect();
        match segments.as_slice() {
            ["health"] => Some(Self::Health),
            ["openapi.json"] => Some(Self::Contract),
            ["v1", "metrics"] => Some(Self::Metrics),
            ["v1", "sandboxes"] => Some(Self::Sandboxes),
            ["v1", "sandboxes", ""] => None,
            ["v1", "sandboxes", id] => Some(Self::Sandbox(id)),
            ["v1", "sandboxes", id, "token"] => Some(Self::SandboxToken(id)),
            ["v1", "sandboxes", id, rest @ ..] => {
                Some(Self::In(Scope::Sandbox(id), WorkspaceResource::find(rest)?))
            }
            ["v1", rest @ ..] => Some(Self::In(Scope::Machine, WorkspaceResource::find(rest)?)),
            _ => None,
        }
    }

    /// The methods it has (none: that is for somebody else to say), HEAD and OPTIONS aside.
    pub(super) fn methods(self) -> &'static [&'static str] {
        match self {
            Self::Health | Self::Contract | Self::Metrics | Self::SandboxToken(_) => &["GET"],
            Self::Sandboxes => &["GET", "POST", "DELETE"],
            Self::Sandbox(_) => &["GET", "DELETE"],
            Self::In(_, resource) => resource.methods(),
        }
    }

    /// The names of all there are, for counting.
    pub(super) const NAMES: [&'static str; 22] = [
        "health",
        "openapi",
        "metrics",
        "sandboxes",
        "sandbox",
        "token",
        "exec",
        "processes",
        "process",
        "logs",
        "wait",
        "kill",
        "stdin",
        "read",
        "write",
        "list",
        "stat",
        "delete",
        "mkdir",
        "move",
        "proxy",
        "ports",
    ];

    /// Its name, which is one of [`Resource::NAMES`].
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Health => "health",
            Self::Contract => "openapi",
            Self::Metrics => "metrics",
            Self::Sandboxes => "sandboxes",
            Self::Sandbox(_) => "sandbox",
            Self::SandboxToken(_) => "token",
            Self::In(_, resource) => match resource {
                In::Exec => "exec",
                In::Processes => "processes",
                In::Process(_) => "process",
                In::Logs(_) => "logs",
                In::Wait(_) => "wait",
                In::Kill(_) => "kill",
                In::Stdin(_) => "stdin",
                In::FileRead => "read",
                In::FileWrite => "write",
                In::FileList => "list",
                In::FileStat => "stat",
                In::FileDelete => "delete",
                In::FileMakeDirectory => "mkdir",
                In::FileMove => "move",
                In::Proxy { .. } => "proxy",
                In::Ports | In::PortWait(_) => "ports",
            },
        }
    }

    /// Whether everybody may have it, token or not: a sign of life, and what every copy of this version
    /// says alike.
    pub(super) fn is_public(self) -> bool {
        matches!(self, Self::Health | Self::Contract)
    }

    /// What a token must open for a request with this method.
    pub(super) fn access(self, method: &str) -> Access<'a> {
        match self {
            Self::In(Scope::Sandbox(id), _) => Access::Inside(id),
            Self::Sandbox(id) if method == "DELETE" => Access::End(id),
            _ => Access::Machine,
        }
    }

    /// The value of `Allow`.
    pub(super) fn allow(self) -> String {
        let methods = self.methods();
        let head = methods.contains(&"GET").then_some("HEAD");
        methods
            .iter()
            .copied()
            .chain(head)
            .chain(["OPTIONS"])
            .collect::<Vec<_>>()
            .join(", ")
    }
}

impl<'a> WorkspaceResource<'a> {
    fn find(segments: &[&'a str]) -> Option<Self> {
        Some(match *segments {
            ["exec"] => In::Exec,
            ["processes" | "procs"] => In::Processes,
            ["processes" | "procs", id] if !id.is_empty() => In::Process(id),
            ["processes" | "procs", id, "logs"] => In::Logs(id),
            ["processes" | "procs", id, "wait"] => In::Wait(id),
            ["processes" | "procs", id, "kill"] => In::Kill(id),
            ["processes" | "procs", id, "stdin"] => In::Stdin(id),
            ["files", "read"] => In::FileRead,
            ["files", "write"] => In::FileWrite,
            ["files", "list"] => In::FileList,
            ["files", "stat"] => In::FileStat,
            ["files", "delete"] => In::FileDelete,
            ["files", "mkdir"] => In::FileMakeDirectory,
            ["files", "move"] => In::FileMove,
            ["ports"] => In::Ports,
            ["ports", port, "wait"] => In::PortWait(port),
            _ => return None,
        })
    }

    fn methods(self) -> &'static [&'static str] {
        match self {
            In::Exec | In::Kill(_) | In::FileMakeDirectory | In::FileMove => &["POST"],
            In::Processes | In::Wait(_) => &["GET", "POST"],
            In::Process(_) => &["GET", "DELETE"],
            In::Logs(_)
            | In::FileRead
            | In::FileList
            | In::FileStat
            | In::Ports
            | In::PortWait(_) => &["GET"],
            In::Stdin(_) | In::FileWrite => &["PUT", "POST"],
            In::FileDelete => &["DELETE", "POST"],
            In::Proxy { .. } => &[],
        }
    }
}

/// Finds what a path below a port's names. Only the beginning of such a path is this server's; the
/// rest may be any bytes.
fn proxied(path: &[u8]) -> Option<(Scope<'_>, WorkspaceResource<'_>)> {
    let cut = |path| {
        let end = <[u8]>::iter(path).position(|byte| *byte == b'/');
        path.split_at(end.unwrap_or(path.len()))
    };
    let (scope, rest) = match path.strip_prefix(b"/v1/sandboxes/") {
        Some(rest) => {
            let (id, rest) = cut(rest);
            (Scope::Sandbox(std::str::from_utf8(id).ok()?), rest)
        }
        None => (Scope::Machine, path.strip_prefix(b"/v1")?),
    };
    let (port, path) = cut(rest.strip_prefix(b"/proxy/")?);
    Some((scope, In::Proxy { port, path }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_a_path_names() {
        for (path, resource) in [
            ("/health", Resource::Health),
            ("/v1/exec", Resource::In(Scope::Machine, In::Exec)),
            ("/v1/processes", Resource::In(Scope::Machine, In::Processes)),
            (
                "/v1/procs/p-1/logs",
                Resource::In(Scope::Machine, In::Logs("p-1")),
            ),
            (
                "/v1/processes/7",
                Resource::In(Scope::Machine, In::Process("7")),
            ),
            ("/v1/files/read", Resource::In(Scope::Machine, In::FileRead)),
            ("/v1/sandboxes", Resource::Sandboxes),
            ("/v1/sandboxes/a", Resource::Sandbox("a")),
            ("/v1/sandboxes/a/token", Resource::SandboxToken("a")),
            (
                "/v1/sandboxes/a/exec",
                Resource::In(Scope::Sandbox("a"), In::Exec),
            ),
            (
                "/v1/sandboxes/exec/procs/p-1",
                Resource::In(Scope::Sandbox("exec"), In::Process("p-1")),
            ),
        ] {
            assert_eq!(Resource::find(path.as_bytes()), Some(resource));
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
            let proxied = In::Proxy { port, path: rest };
            let found = Resource::find(path);
            assert_eq!(found, Some(Resource::In(Scope::Machine, proxied)));
            let inside = [b"/v1/sandboxes/s-1", &path[3..]].concat();
            let found = Resource::find(&inside);
            assert_eq!(found, Some(Resource::In(Scope::Sandbox("s-1"), proxied)));
        }
        for path in [
            "/v1/proxy",
            "/v1/sandboxes/s-1/proxy",
            "/v1/sandboxes/a/b/proxy/80/",
        ] {
            assert_eq!(Resource::find(path.as_bytes()), None, "{path}");
        }
    }

    #[test]
    fn nothing_else_is_a_path() {
        for path in [
            "/",
            "",
            "*",
            "/health/",
            "//health",
            "/Health",
            "/v1",
            "/v1/",
            "/v1/exec/",
            "/v1/processes/",
            "/v1/processes/p-1/",
            "/v1/processes/p-1/logs/x",
            "/v1/files",
            "/v1/sandboxes/",
            "/v1/sandboxes/a/",
            "/v1/sandboxes/a/health",
            "/v1/sandboxes/a/sandboxes",
            "/v1/sandboxes/a/sandboxes/b/exec",
            "/v1/sandboxes/a/token/",
            "/v2/exec",
            "/v1/../health",
            "/v1/%65xec",
        ] {
            assert_eq!(Resource::find(path.as_bytes()), None, "{path}");
        }
    }

    #[test]
    fn a_sandbox_token_is_asked_for_inside_and_at_the_end() {
        let access = |path: &'static str, method| {
            Resource::find(path.as_bytes())
                .map_or(Access::Machine, |resource| resource.access(method))
        };
        for (path, method, expected) in [
            ("/v1/sandboxes/a/exec", "POST", Access::Inside("a")),
            ("/v1/sandboxes/a", "DELETE", Access::End("a")),
            ("/v1/sandboxes/a", "GET", Access::Machine),
            ("/v1/sandboxes/a/token", "GET", Access::Machine),
            ("/v1/sandboxes", "DELETE", Access::Machine),
            ("/v1/exec", "POST", Access::Machine),
            ("/v1/sandboxes/a/unknown", "GET", Access::Machine),
        ] {
            assert_eq!(access(path, method), expected, "{method} {path}");
        }
    }

    #[test]
    fn head_goes_with_get() {
        assert_eq!(Resource::Health.allow(), "GET, HEAD, OPTIONS");
        assert_eq!(
            Resource::In(Scope::Machine, In::Exec).allow(),
            "POST, OPTIONS"
        );
    }
}
