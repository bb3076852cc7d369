//! From a method and a path to what is asked for, by the URL alone.
//!
//! This table is the list of everything the server can be asked.

/// What a path names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Resource<'a> {
    /// The server itself.
    Health,
    /// Something in a workspace.
    In(WorkspaceResource<'a>),
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
}

use WorkspaceResource as In;

impl<'a> Resource<'a> {
    /// Finds what an undecoded path names.
    pub(super) fn find(path: &'a [u8]) -> Option<Self> {
        let segments: Vec<&str> = std::str::from_utf8(path)
            .ok()?
            .strip_prefix('/')?
            .split('/')
            .collect();
        match segments.as_slice() {
            ["health"] => Some(Self::Health),
            ["v1", rest @ ..] => WorkspaceResource::find(rest).map(Self::In),
            _ => None,
        }
    }

    /// The methods it has, HEAD and OPTIONS aside.
    pub(super) fn methods(self) -> &'static [&'static str] {
        match self {
            Self::Health => &["GET"],
            Self::In(resource) => resource.methods(),
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
            _ => return None,
        })
    }

    fn methods(self) -> &'static [&'static str] {
        match self {
            In::Exec | In::Kill(_) | In::FileMakeDirectory | In::FileMove => &["POST"],
            In::Processes | In::Wait(_) => &["GET", "POST"],
            In::Process(_) => &["GET", "DELETE"],
            In::Logs(_) | In::FileRead | In::FileList | In::FileStat => &["GET"],
            In::Stdin(_) | In::FileWrite => &["PUT", "POST"],
            In::FileDelete => &["DELETE", "POST"],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_a_path_names() {
        for (path, resource) in [
            ("/health", Resource::Health),
            ("/v1/exec", Resource::In(In::Exec)),
            ("/v1/processes", Resource::In(In::Processes)),
            ("/v1/procs/p-1/logs", Resource::In(In::Logs("p-1"))),
            ("/v1/processes/7", Resource::In(In::Process("7"))),
            ("/v1/files/read", Resource::In(In::FileRead)),
        ] {
            assert_eq!(Resource::find(path.as_bytes()), Some(resource));
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
            "/v1/sandboxes",
            "/v2/exec",
            "/v1/../health",
            "/v1/%65xec",
        ] {
            assert_eq!(Resource::find(path.as_bytes()), None, "{path}");
        }
    }

    #[test]
    fn head_goes_with_get() {
        assert_eq!(Resource::Health.allow(), "GET, HEAD, OPTIONS");
        assert_eq!(Resource::In(In::Exec).allow(), "POST, OPTIONS");
    }
}
