//! The parts of the program that a build can leave out: what each is, and which requests are for it.
//!
//! A request for a part that this build does not have gets a sentence that says so ([`LeftOut`]). It needs no token
//! and does nothing: every program of the same build answers the same. A part that the operator has turned off is
//! not left out; its paths are then those of an unknown route.

use super::Target;
use super::context::Context;
use crate::http::parse::Head;
use crate::http::{Refusal, Request, Response};

/// A part of the program.
struct Part {
    /// The feature of cargo that builds it.
    feature: &'static str,
    /// Completes "has no ...".
    what: &'static str,
    is_built: bool,
    /// Whether a request is for it, by its head and its path.
    is_for: fn(&Head, &[u8]) -> bool,
}

/// All parts, in the order of their doors, because two may have the same path.
const PARTS: [Part; 6] = [
    Part {
        feature: "e2b",
        what: "API for E2B's SDKs",
        is_built: cfg!(feature = "e2b"),
        is_for: is_for_e2b,
    },
    Part {
        feature: "console",
        what: "console and no tickets",
        is_built: cfg!(feature = "console"),
        is_for: |_, path| {
            is_below(path, &["/console"]) || path.starts_with(b"/t/") || is_inside(path, "tickets")
        },
    },
    Part {
        feature: "mcp",
        what: "MCP endpoint",
        is_built: cfg!(feature = "mcp"),
        is_for: |_, path| path == b"/mcp" || is_inside(path, "mcp"),
    },
    Part {
        feature: "file-tools",
        what: "tools for files",
        is_built: cfg!(feature = "file-tools"),
        is_for: |_, path| {
            let is_file_tool = OF_FILE_TOOLS.iter().any(|route| is_inside(path, route));
            is_file_tool || is_below(path, &["/v1/snapshots"])
        },
    },
    Part {
        feature: "attach",
        what: "terminals over WebSockets",
        is_built: cfg!(feature = "attach"),
        is_for: |_, path| {
            let of_processes = ["processes", "procs"];
            path.ends_with(b"/attach") && of_processes.iter().any(|word| is_inside(path, word))
        },
    },
    Part {
        feature: "interpreter",
        what: "interpreter contexts",
        is_built: cfg!(feature = "interpreter"),
        is_for: |_, path| {
            let is_simple = path.starts_with(b"/sandboxes/") && path.ends_with(b"/execute");
            let of_workspace = ["languages", "contexts", "execute"];
            is_below(path, &["/contexts", "/execute"])
                || is_simple
                || of_workspace.iter().any(|word| is_inside(path, word))
        },
    },
];

/// Where the tools for files are in a workspace.
pub(super) const OF_FILE_TOOLS: [&str; 10] = [
    "files/archive",
    "files/compare",
    "files/copy",
    "files/edit",
    "files/glob",
    "files/grep",
    "files/hash",
    "files/patch",
    "files/watch",
    "files/watches",
];

/// Paths that only E2B's clients ask for, each with all that is below it.
pub(super) const OF_E2B: [&str; 13] = [
    "/files",
    "/contexts",
    "/v2",
    "/v3",
    "/templates",
    "/default-templates",
    "/snapshots",
    "/volumes",
    "/secrets",
    "/envs",
    "/init",
    "/process.Process",
    "/filesystem.Filesystem",
];

/// Paths that E2B's clients share with others: the headers decide.
pub(super) const SHARED_WITH_E2B: [&str; 4] = ["/health", "/metrics", "/execute", "/sandboxes"];

/// Headers that only E2B's clients send; the last one is the beginning of several.
const E2B_HEADERS: [&str; 3] = ["x-api-key", "x-access-token", "connect-protocol-version"];
const E2B_HEADER_PREFIX: &str = "e2b-";

/// Whether a request is one of E2B's clients.
pub(super) fn is_for_e2b(head: &Head, path: &[u8]) -> bool {
    is_below(path, &OF_E2B) || (is_below(path, &SHARED_WITH_E2B) && has_e2b_header(head))
}

fn has_e2b_header(head: &Head) -> bool {
    head.fields.iter().any(|(name, _)| {
        let beginning = name.get(..E2B_HEADER_PREFIX.len());
        E2B_HEADERS.iter().any(|own| own.eq_ignore_ascii_case(name))
            || beginning.is_some_and(|start| start.eq_ignore_ascii_case(E2B_HEADER_PREFIX))
    })
}

/// Whether a path is one of `families`, or below one.
pub(super) fn is_below(path: &[u8], families: &[&str]) -> bool {
    families.iter().any(|family| {
        let rest = path.strip_prefix(family.as_bytes());
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
    })
}

/// Whether a path is `word`, or below it, in a workspace: after `/v1/` or `/v1/sandboxes/{id}/`.
fn is_inside(path: &[u8], word: &str) -> bool {
    let in_sandbox = path.strip_prefix(b"/v1/sandboxes/").and_then(|rest| {
        let slash = rest.iter().position(|byte| *byte == b'/')?;
        Some(&rest[slash + 1..])
    });
    let inside = in_sandbox.or_else(|| path.strip_prefix(b"/v1/"));
    inside.is_some_and(|inside| is_below(inside, &[word]))
}

/// A request for a part that this build does not have.
pub(super) struct LeftOut(&'static Part);

impl LeftOut {
    /// The part that a request is for, if this build does not have it.
    pub(super) fn find(head: &Head, path: &[u8]) -> Option<Self> {
        let mut left_out = PARTS.iter().filter(|part| !part.is_built);
        left_out.find(|part| (part.is_for)(head, path)).map(Self)
    }
}

impl Target for LeftOut {
    fn name(&self) -> &'static str {
        "none"
    }

    fn allow(&self) -> String {
        "GET, POST, PUT, PATCH, DELETE, OPTIONS".to_owned()
    }

    fn answer(&self, _: &Context, _: &mut Request<'_>) -> Result<Response, Refusal> {
        let Part { feature, what, .. } = self.0;
        let text = format!(
            "this build of sbx-server has no {what}: it was built without the feature {feature}"
        );
        Err(Refusal::new(501, "not_built", text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::parse::{self, Progress};

    fn left_out(path: &str, fields: &str) -> Option<&'static str> {
        let sent = format!("GET {path} HTTP/1.1\r\nHost: x\r\n{fields}\r\n");
        let Ok(Progress::Complete(head, _)) = parse::head(sent.as_bytes()) else {
            panic!("{sent}");
        };
        LeftOut::find(&head, path.as_bytes()).map(|LeftOut(part)| part.feature)
    }

    #[test]
    fn a_request_is_for_the_first_part_that_is_left_out() {
        for (path, fields, parts) in [
            ("/process.Process/Start", "", &["e2b"][..]),
            ("/v2/sandboxes", "", &["e2b"]),
            ("/files?path=a", "", &["e2b"]),
            ("/sandboxes", "X-API-Key: a\r\n", &["e2b"]),
            ("/metrics", "E2b-Sandbox-Id: a\r\n", &["e2b"]),
            ("/contexts", "", &["e2b", "interpreter"]),
            ("/execute", "X-Access-Token: a\r\n", &["e2b", "interpreter"]),
            ("/console", "", &["console"]),
            ("/console/app.js", "", &["console"]),
            ("/t/abc/", "", &["console"]),
            ("/v1/tickets", "", &["console"]),
            ("/v1/sandboxes/a/tickets", "", &["console"]),
            ("/mcp", "", &["mcp"]),
            ("/v1/sandboxes/a/mcp", "", &["mcp"]),
            ("/v1/files/grep", "", &["file-tools"]),
            ("/v1/files/watches/w/events", "", &["file-tools"]),
            ("/v1/sandboxes/a/files/archive", "", &["file-tools"]),
            ("/v1/snapshots", "", &["file-tools"]),
            ("/v1/snapshots/s-1/archive", "", &["file-tools"]),
            ("/execute", "", &["interpreter"]),
            ("/sandboxes/a/execute", "", &["interpreter"]),
            ("/v1/languages", "", &["interpreter"]),
            ("/v1/contexts/c/executions/e/events", "", &["interpreter"]),
            ("/v1/sandboxes/a/execute", "", &["interpreter"]),
        ] {
            let path = path.split('?').next().unwrap();
            let mut left_out_parts = PARTS.iter().filter(|part| !part.is_built);
            let expected = left_out_parts.find(|part| parts.contains(&part.feature));
            let expected = expected.map(|part| part.feature);
            assert_eq!(left_out(path, fields), expected, "{path} {fields}");
        }
    }

    #[test]
    fn what_every_build_has_is_not_left_out() {
        for path in [
            "/",
            "/health",
            "/metrics",
            "/sandboxes",
            "/v1/exec",
            "/v1/metrics",
            "/v1/sandboxes/contexts",
            "/v1/files",
            "/v1/files/copying",
            "/v1/sandboxes/a/files/read",
            "/v1/sandboxes/grep",
            "/v1/proxy/80/mcp",
            "/v1/sandboxes/a/snapshots",
            "/v1/mcps",
            "/consoles",
        ] {
            assert_eq!(left_out(path, ""), None, "{path}");
        }
    }
}
