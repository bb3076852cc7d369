//! Network policies: what commands reach, and what they do not.
//!
//! [`Place`] is a workspace in either mode with a copy of the hostile program of `walls`.

mod addresses;
mod blocked;
mod choices;
mod clients;
mod filtered;
mod transparent;

use std::net::TcpListener;

use serde_json::{Value, json};

use crate::fixture::{
    Builder, INSIDE, Outcome, Reply, Sandbox, Server, TempDir, copy_program, is_root,
};
use crate::walls::probe::{Plan, Probe, command, outcomes};

/// A workspace.
pub struct Place<'a> {
    server: &'a Server,
    /// `None` on a dedicated machine.
    pub sandbox: Option<Sandbox<'a>>,
    directory: TempDir,
    /// The hostile program.
    program: String,
}

impl<'a> Place<'a> {
    fn dedicated(server: &'a Server) -> Self {
        let directory = TempDir::new();
        let program = directory.join("probe");
        copy_program(std::env::current_exe().unwrap(), &program);
        Self {
            server,
            sandbox: None,
            directory,
            program,
        }
    }

    /// A new sandbox that is asked for with these fields.
    #[track_caller]
    pub fn sandbox(server: &'a Server, body: &Value) -> Self {
        let sandbox = server.sandbox_with(body);
        Self {
            server,
            program: Probe::put(&sandbox),
            sandbox: Some(sandbox),
            directory: TempDir::new(),
        }
    }

    /// A path that its commands can write.
    pub fn path(&self, name: &str) -> String {
        match &self.sandbox {
            Some(sandbox) => sandbox.home.join(name).to_str().unwrap().to_owned(),
            None => self.directory.join(name),
        }
    }

    pub fn target(&self, route: &str) -> String {
        match &self.sandbox {
            Some(sandbox) => sandbox.target(route),
            None => format!("/v1/{route}"),
        }
    }

    #[track_caller]
    pub fn post(&self, route: &str, body: &Value) -> Reply {
        self.server.post(&self.target(route), body)
    }

    /// Runs a command to its end; fields of `more` are added to the request.
    #[track_caller]
    pub fn exec(&self, cmd: &Value, more: &Value) -> Outcome {
        self.run(&with(json!({ "cmd": cmd }), more))
    }

    #[track_caller]
    fn run(&self, body: &Value) -> Outcome {
        let (target, body) = (self.target("exec"), body.to_string());
        let stream = self.server.stream("POST", &target, body.as_bytes());
        Outcome::of(stream.collect())
    }

    /// The request that has the hostile program perform acts.
    fn acts(&self, acts: &[Vec<String>], more: &Value) -> Value {
        with(command(&self.program, &json!(acts)), more)
    }

    /// Has the hostile program perform a plan in a command with the fields of `more`.
    #[track_caller]
    pub fn check(&self, plan: &Plan, more: &Value) {
        let outcome = self.run(&self.acts(&plan.acts(), more));
        plan.compare(&outcomes(&outcome.stdout));
    }
}

/// A request with more fields.
pub fn with(mut body: Value, more: &Value) -> Value {
    let fields = body.as_object_mut().unwrap();
    fields.extend(more.as_object().unwrap().clone());
    body
}

/// Runs a test on a dedicated machine, and as root in a sandbox.
fn in_both_modes(test: impl Fn(&Place<'_>)) {
    in_both_modes_with(|builder| builder, test);
}

fn in_both_modes_with(with: impl Fn(Builder) -> Builder, test: impl Fn(&Place<'_>)) {
    test(&Place::dedicated(&with(Server::builder()).start()));
    if is_root() {
        test(&Place::sandbox(&with(Server::host()).start(), &json!({})));
    }
}

/// The variables in which commands find the proxy.
pub const PROXY_VARIABLES: [&str; 6] = [
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "ALL_PROXY",
    "http_proxy",
    "https_proxy",
    "all_proxy",
];

/// The field of a network that lets through what the rules name.
pub fn allow(rules: &[&str]) -> Value {
    json!({ "network": { "mode": "allowlist", "allow": rules } })
}

/// The same for programs without proxy support.
pub fn transparent(rules: &[&str]) -> Value {
    let mut fields = allow(rules);
    fields["network"]["transparent"] = json!(true);
    fields
}

/// The hosts, or a reason why not.
macro_rules! lan {
    () => {
        match crate::fixture::Lan::new() {
            Some(lan) => lan,
            None => crate::skip!("needs root, and ip of iproute2, to make hosts"),
        }
    };
}
pub(crate) use lan;

/// What a shell prints.
#[track_caller]
pub fn sh(place: &Place<'_>, more: &Value, script: &str) -> String {
    let outcome = place.exec(&json!(script), more);
    assert_eq!(outcome.stderr, "", "{script}");
    outcome.stdout
}

/// How many have come to a server that does not accept.
pub fn visitors(server: &TcpListener) -> usize {
    server.set_nonblocking(true).unwrap();
    std::iter::from_fn(|| server.accept().ok()).count()
}

/// What a hostile program does to a socket before it connects it.
pub fn ways_to_leave() -> Vec<Vec<String>> {
    let ways: [&[&str]; 20] = [
        &[],
        &["unspecified"],
        &["gate", "unspecified"],
        &["gate", "shutdown", "unspecified"],
        &["listen", "unspecified"],
        &["listen", "shutdown", "unspecified"],
        &["bind:0.0.0.0:0"],
        &["unspecified", &format!("bind:{INSIDE}:0")],
        &["device:far"],
        &["device:lo"],
        &["interface:2"],
        &["do-not-route"],
        &["free-bind", "bind:0.0.0.0:0"],
        &["transparent", "bind:0.0.0.0:0"],
        &["source-route"],
        &["repair", "unspecified"],
        &["mark"],
        &["ulp:tls"],
        &["fast-open-connect"],
        &["device:far", "fast-open-connect", "unspecified"],
    ];
    let owned = ways.map(|steps| steps.iter().map(|step| (*step).to_owned()).collect());
    owned.into()
}

/// Moves and links files from one directory to another.
pub const MOVE_FILES: &str = "import os
for name in ('a', 'b'): os.makedirs(name, exist_ok=True)
open('a/file', 'w').close()
os.link('a/file', 'b/link')
os.rename('a/file', 'b/file')
os.rename('b', 'a/b')
print(sorted(os.listdir('a/b')))
os.unlink('a/b/link'); os.unlink('a/b/file'); os.rmdir('a/b')";

/// What it prints.
pub const MOVED: &str = "['file', 'link']\n";
