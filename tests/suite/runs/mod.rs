//! Code in place of a command: a script in a process of its own, with all that a command has.
//!
//! Every test runs on a dedicated machine and in a sandbox by the same code: see [`everywhere`].

mod scripts;
mod surroundings;
mod venv;

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::fixture::{Connection, EventStream, Outcome, Reply, Sandbox, Server, TempDir, is_root};

/// A workspace of either mode, with a directory for relative paths.
struct Place<'a> {
    server: &'a Server,
    sandbox: Option<&'a Sandbox<'a>>,
    directory: PathBuf,
}

/// The languages, the programs that run them, and code that shows a text.
const LANGUAGES: [(&str, &str, &str); 3] = [
    ("python", "python3", "print('hello')"),
    ("javascript", "node", "console.log('hello')"),
    ("bash", "bash", "echo hello"),
];

/// Where programs are on every machine; the test's own PATH may lead into root's home.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Runs a test on a dedicated machine and in a sandbox.
fn everywhere(test: impl Fn(&Place<'_>)) {
    let directory = TempDir::new();
    let builder = Server::builder().env("PATH", PATH);
    let mut command = builder.command();
    command.current_dir(directory.path());
    let server = builder.start_as(command);
    test(&Place {
        server: &server,
        sandbox: None,
        directory: directory.path().to_owned(),
    });
    if is_root() {
        let server = Server::host().env("PATH", PATH).start();
        let sandbox = server.sandbox();
        test(&Place {
            server: &server,
            sandbox: Some(&sandbox),
            directory: sandbox.home.clone(),
        });
    }
}

impl Place<'_> {
    fn connect(&self) -> Connection {
        match self.sandbox {
            None => self.server.connect(),
            Some(sandbox) => sandbox.connect(),
        }
    }

    fn target(&self, route: &str) -> String {
        match self.sandbox {
            None => format!("/v1/{route}"),
            Some(sandbox) => sandbox.target(route),
        }
    }

    #[track_caller]
    fn request(&self, method: &str, route: &str, body: &Value) -> Reply {
        let body = body.to_string();
        let body = if method == "GET" { "" } else { &body };
        self.connect()
            .request(method, &self.target(route), &[], body.as_bytes())
    }

    #[track_caller]
    fn get(&self, route: &str) -> Reply {
        self.request("GET", route, &Value::Null)
    }

    #[track_caller]
    fn post(&self, route: &str, body: &Value) -> Reply {
        self.request("POST", route, body)
    }

    #[track_caller]
    fn stream(&self, body: &Value) -> EventStream {
        self.connect()
            .stream("POST", &self.target("exec"), body.to_string().as_bytes())
    }

    /// Runs code or a command to its end.
    #[track_caller]
    fn exec(&self, body: &Value) -> Outcome {
        Outcome::of(self.stream(body).collect())
    }

    /// What it shows; it must succeed.
    #[track_caller]
    fn output(&self, body: &Value) -> String {
        let outcome = self.exec(body);
        assert_eq!(outcome.code(), Some(0), "{body:.200}: {outcome:?}");
        outcome.stdout
    }

    /// What code of a language shows; it must succeed.
    #[track_caller]
    fn run(&self, language: &str, code: &str) -> String {
        self.output(&json!({ "code": code, "language": language }))
    }

    /// Whether a program is installed.
    fn has(&self, program: &str) -> bool {
        let probe = json!({ "cmd": format!("command -v {program}") });
        self.exec(&probe).code() == Some(0)
    }

    /// The languages that are installed.
    fn languages(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        let mut languages: Vec<_> = LANGUAGES.into();
        languages.retain(|(_, program, _)| self.has(program));
        languages.into_iter().map(|(name, _, code)| (name, code))
    }
}
