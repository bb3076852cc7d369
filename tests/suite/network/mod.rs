//! Network postures: what commands reach, and what they do not.
//!
//! [`Place`] is a workspace in either mode with a copy of the hostile program of `walls`.

mod blocked;
mod choices;
mod clients;
mod filtered;

use serde_json::{Value, json};

use crate::fixture::{Builder, Outcome, Reply, Sandbox, Server, TempDir, copy_program, is_root};
use crate::walls::probe::{Plan, Probe, command, outcomes};

/// A workspace.
struct Place<'a> {
    server: &'a Server,
    /// `None` on a dedicated machine.
    sandbox: Option<Sandbox<'a>>,
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
    fn sandbox(server: &'a Server, body: &Value) -> Self {
        let sandbox = server.sandbox_with(body);
        Self {
            server,
            program: Probe::put(&sandbox),
            sandbox: Some(sandbox),
            directory: TempDir::new(),
        }
    }

    /// A path that its commands can write.
    fn path(&self, name: &str) -> String {
        match &self.sandbox {
            Some(sandbox) => sandbox.home.join(name).to_str().unwrap().to_owned(),
            None => self.directory.join(name),
        }
    }

    fn target(&self, route: &str) -> String {
        match &self.sandbox {
            Some(sandbox) => sandbox.target(route),
            None => format!("/v1/{route}"),
        }
    }

    #[track_caller]
    fn post(&self, route: &str, body: &Value) -> Reply {
        self.server.post(&self.target(route), body)
    }

    /// Runs a command to its end; fields of `more` are added to the request.
    #[track_caller]
    fn exec(&self, cmd: &Value, more: &Value) -> Outcome {
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
    fn check(&self, plan: &Plan, more: &Value) {
        let outcome = self.run(&self.acts(&plan.acts(), more));
        plan.compare(&outcomes(&outcome.stdout));
    }
}

/// A request with more fields.
fn with(mut body: Value, more: &Value) -> Value {
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
