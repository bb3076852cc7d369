//! Sandboxes with namespaces of their own: what works there that does not elsewhere, what stays closed, and how they
//! end.
//!
//! Most tests run in both [`Way`]s to make namespaces.

mod choices;
mod devices;
mod lifetimes;
mod limits;
mod network;
mod programs;
mod walls;

use serde_json::{Value, json};

use crate::fixture::{Builder, Sandbox, Server, all_processes, command_line_of, find};

/// How a server makes namespaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// With the capabilities that it has.
    Capabilities,
    /// With a namespace of users, because it lacks them.
    Users,
}

impl Way {
    pub(crate) const BOTH: [Self; 2] = [Self::Capabilities, Self::Users];

    pub(crate) fn builder(self) -> Builder {
        match self {
            Self::Capabilities => Server::host(),
            Self::Users => {
                Server::host().wrapped_in(&["setpriv", "--bounding-set=-sys_admin,-net_admin"])
            }
        }
    }
}

/// Skips a test that cannot run here.
macro_rules! needs_namespaces {
    () => {
        if !crate::fixture::is_root() {
            crate::skip!("needs root");
        }
        if !super::can_be_had() {
            crate::skip!("needs the rights to make namespaces");
        }
    };
}
use needs_namespaces;

/// Whether the tests' own process may make namespaces, as root and in a namespace of users.
pub(crate) fn can_be_had() -> bool {
    let makes = |words: &[&str]| {
        let output = std::process::Command::new(words[0])
            .args(&words[1..])
            .output();
        output.is_ok_and(|output| output.status.success())
    };
    makes(&[
        "unshare",
        "--net",
        "--mount",
        "--pid",
        "--fork",
        "--mount-proc",
        "true",
    ]) && makes(&[
        "unshare",
        "--user",
        "--map-root-user",
        "--net",
        "--mount",
        "true",
    ]) && makes(&["setpriv", "--bounding-set=-sys_admin", "true"])
}

/// A sandbox with namespaces; its network is its own.
#[track_caller]
fn sandbox(server: &Server) -> Sandbox<'_> {
    sandbox_with(server, json!({}))
}

/// The same with further fields.
#[track_caller]
fn sandbox_with(server: &Server, mut fields: Value) -> Sandbox<'_> {
    let all = fields.as_object_mut().unwrap();
    all.insert("isolation".to_owned(), json!("namespaces"));
    all.entry("network").or_insert_with(|| json!("blocked"));
    server.sandbox_with(&fields)
}

/// The first processes of the namespaces that a server has made.
fn holders_of(server: &Server) -> Vec<i32> {
    let parent = server.inner_pid();
    let children = all_processes().into_iter();
    let pids = children
        .filter(|process| process.parent == parent)
        .map(|process| process.pid);
    let is_holder = |pid: &i32| find(&command_line_of(*pid), b"hold-namespaces").is_some();
    pids.filter(is_holder).collect()
}

/// What the server shows of a sandbox.
#[track_caller]
fn described(sandbox: &Sandbox<'_>) -> Value {
    let reply = sandbox.server.get(&format!("/v1/sandboxes/{}", sandbox.id));
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()
}
