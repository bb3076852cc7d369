//! Interpreter contexts: code whose state stays, on a dedicated machine and in a sandbox.
//!
//! The bridges have tests of their own in `tests/bridges`. Here is what needs the server: contexts from their making to
//! their end, executions and their events, the promises of docs/interpreter.md one by one, and code that attacks. Every
//! stream is checked as [`Ran::of`] does: numbers without a gap, one `end`, which is last.

mod executions;
mod hostile;
mod inputs;
mod jupyter;
mod lifecycle;
mod lifetimes;
mod promises;
mod spares;
mod work;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use serde_json::{Value, json};

use crate::client::environment;
use crate::fixture::{
    Connection, EventStream, PATIENCE, Reply, Sandbox, Server, TempDir, is_root, names_in,
    output_of, wait_until,
};

/// Where programs are on every machine; the test's own PATH may lead into root's home.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What people import, what runs kernels, and uv: all that tests of contexts install.
pub const PACKAGES: [&str; 9] = [
    "ipython",
    "jupyter_client",
    "ipykernel",
    "pandas",
    "matplotlib",
    "pillow",
    "altair",
    "tqdm",
    "uv",
];

/// A virtual environment with [`PACKAGES`], which the machine's python3 can use.
fn packages() -> Result<PathBuf, String> {
    let python = environment("contexts", &PACKAGES)?;
    let root = python.ancestors().nth(2).unwrap().to_owned();
    let mut check = Command::new("python3");
    check.args([
        "-c",
        "import IPython, pandas, matplotlib, PIL, ipykernel.kernelapp, jupyter_client",
    ]);
    check.env_clear().env("PATH", PATH);
    match check.env("PYTHONPATH", modules_of(&root)).output() {
        Ok(check) if check.status.success() => Ok(root),
        _ => Err(format!("the python3 in {PATH} cannot use them")),
    }
}

/// Where a virtual environment has its modules.
pub fn modules_of(root: &Path) -> PathBuf {
    let libraries = root.join("lib");
    let version = names_in(&libraries).remove(0);
    libraries.join(version).join("site-packages")
}

/// Copies packages to where a sandbox may read them. Links are made faster; they cannot lead to another file system.
#[track_caller]
pub fn lend(packages: &Path, copy: &Path) {
    let copied = ["-al", "-a"].into_iter().any(|how| {
        let mut command = Command::new("cp");
        command.arg(how).args([packages, copy]);
        command.status().is_ok_and(|status| status.success())
    });
    assert!(copied);
}

/// The languages, and their code that shows `hello`.
const LANGUAGES: [(&str, &str); 3] = [
    ("python", "print('hello')"),
    ("javascript", "console.log('hello')"),
    ("bash", "echo hello"),
];

/// A workspace of either mode.
#[derive(Clone, Copy)]
struct Place<'a> {
    server: &'a Server,
    sandbox: Option<&'a Sandbox<'a>>,
    /// Where relative paths begin.
    directory: &'a Path,
}

/// Runs a test on a dedicated machine and in a sandbox.
fn everywhere(test: impl Fn(Place<'_>)) {
    everywhere_with(&[], test);
}

/// The same with variables of the server.
fn everywhere_with(variables: &[(&str, &str)], test: impl Fn(Place<'_>)) {
    on_a_machine_with(variables, &test);
    if is_root() {
        let mut builder = Server::host().env("PATH", PATH);
        for (name, value) in variables {
            builder = builder.env(name, value);
        }
        let server = builder.start();
        test(Place::of(&server.sandbox()));
    }
}

/// Runs a test on a dedicated machine only: what it tests does not depend on the walls.
fn on_a_machine(test: impl Fn(Place<'_>)) {
    on_a_machine_with(&[], test);
}

fn on_a_machine_with(variables: &[(&str, &str)], test: impl Fn(Place<'_>)) {
    let mut builder = Server::builder().env("PATH", PATH);
    for (name, value) in variables {
        builder = builder.env(name, value);
    }
    let directory = TempDir::new();
    let mut command = builder.command();
    command.current_dir(directory.path());
    let server = builder.start_as(command);
    test(Place {
        server: &server,
        sandbox: None,
        directory: directory.path(),
    });
}

impl<'a> Place<'a> {
    fn of(sandbox: &'a Sandbox<'a>) -> Self {
        Self {
            server: sandbox.server,
            sandbox: Some(sandbox),
            directory: &sandbox.home,
        }
    }

    fn connect(self) -> Connection {
        match self.sandbox {
            None => self.server.connect(),
            Some(sandbox) => sandbox.connect(),
        }
    }

    fn target(self, route: &str) -> String {
        match self.sandbox {
            None => format!("/v1/{route}"),
            Some(sandbox) => sandbox.target(route),
        }
    }

    #[track_caller]
    fn request(self, method: &str, route: &str, body: &str) -> Reply {
        self.connect()
            .request(method, &self.target(route), &[], body.as_bytes())
    }

    #[track_caller]
    fn get(self, route: &str) -> Reply {
        self.request("GET", route, "")
    }

    #[track_caller]
    fn post(self, route: &str, body: &Value) -> Reply {
        self.request("POST", route, &body.to_string())
    }

    /// The document at a route.
    #[track_caller]
    fn document(self, route: &str) -> Value {
        let reply = self.get(route);
        assert_eq!(reply.status, 200, "{route}: {}", reply.text());
        reply.json()
    }

    /// Makes a context and returns its document.
    #[track_caller]
    fn make(self, body: &Value) -> Value {
        let reply = self.post("contexts", body);
        assert_eq!(reply.status, 200, "{body}: {}", reply.text());
        reply.json()
    }

    /// Makes a context of the standard library's Python.
    #[track_caller]
    fn python(self, id: &str) -> Value {
        self.make(&json!({ "id": id, "backend": "plain" }))
    }

    #[track_caller]
    fn remove(self, id: &str) {
        let reply = self.request("DELETE", &format!("contexts/{id}"), "");
        assert_eq!(reply.status, 200, "{id}: {}", reply.text());
        assert_eq!(reply.json(), json!({ "id": id, "deleted": true }));
    }

    /// The document of a context.
    #[track_caller]
    fn context(self, id: &str) -> Value {
        self.document(&format!("contexts/{id}"))
    }

    /// The ids of all contexts.
    #[track_caller]
    fn ids(self) -> Vec<String> {
        let contexts = self.document("contexts");
        let contexts = contexts.as_array().unwrap().iter();
        contexts
            .map(|context| context["id"].as_str().unwrap().to_owned())
            .collect()
    }

    /// Starts an execution, and returns its stream.
    #[track_caller]
    fn begin(self, context: &str, body: &Value) -> EventStream {
        let target = self.target(&format!("contexts/{context}/execute"));
        self.connect()
            .stream("POST", &target, body.to_string().as_bytes())
    }

    /// The same, once the code runs: its `start` is here.
    #[track_caller]
    fn begin_running(self, context: &str, body: &Value) -> (EventStream, Value) {
        let mut stream = self.begin(context, body);
        let start = stream
            .find(|event| event["event"] == "start")
            .expect("no start");
        (stream, start)
    }

    /// Executes to the end.
    #[track_caller]
    fn execute(self, context: &str, body: &Value) -> Ran {
        Ran::of(self.begin(context, body).collect())
    }

    /// Executes code to the end.
    #[track_caller]
    fn run(self, context: &str, code: &str) -> Ran {
        self.execute(context, &json!({ "code": code }))
    }

    /// The text of the result of code that succeeds.
    #[track_caller]
    fn value(self, context: &str, code: &str) -> String {
        let ran = self.run(context, code);
        ran.expect("completed", "kept");
        ran.result().to_owned()
    }

    /// Executes by `POST execute` to the end.
    #[track_caller]
    fn execute_anywhere(self, body: &Value) -> Ran {
        let target = self.target("execute");
        let stream = self
            .connect()
            .stream("POST", &target, body.to_string().as_bytes());
        Ran::of(stream.collect())
    }

    /// The events of an execution again.
    #[track_caller]
    fn replay(self, context: &str, execution: &str, query: &str) -> Vec<Value> {
        let route = format!("contexts/{context}/executions/{execution}/events{query}");
        let stream = self.connect().stream("GET", &self.target(&route), b"");
        without_pings(stream.collect())
    }

    /// Whether an interpreter of the language is installed.
    #[track_caller]
    fn has(self, language: &str) -> bool {
        let languages = self.document("languages");
        let mut languages = languages.as_array().unwrap().iter();
        languages.any(|known| known["language"] == language && known["available"] == true)
    }

    /// The installed languages, and their code that shows `hello`.
    fn languages(self) -> impl Iterator<Item = (&'static str, &'static str)> {
        LANGUAGES
            .into_iter()
            .filter(move |(language, _)| self.has(language))
    }

    /// Waits until a context is idle.
    #[track_caller]
    fn wait_idle(self, id: &str) {
        wait_until("it is idle", PATIENCE, || {
            self.context(id)["state"] == "idle"
        });
    }

    /// All output of the generation, as `logs` has it.
    #[track_caller]
    fn logged(self, context: &str, stream: &str) -> String {
        let target = self.target(&format!("contexts/{context}/logs"));
        let events: Vec<_> = self.connect().stream("GET", &target, b"").collect();
        String::from_utf8(output_of(&events, stream, 0).data).unwrap()
    }
}

fn without_pings(mut events: Vec<Value>) -> Vec<Value> {
    events.retain(|event| event["event"] != "ping");
    events
}

/// An execution that came to its end.
#[derive(Debug)]
struct Ran {
    events: Vec<Value>,
}

impl Ran {
    /// Checks what holds for every execution: numbers from 0 without a gap, one `end`, which is last, at most one
    /// `start`, `error` and `result`, and what comes before the start is `queued`.
    #[track_caller]
    fn of(events: Vec<Value>) -> Self {
        let events = without_pings(events);
        for (number, event) in events.iter().enumerate() {
            assert_eq!(event["seq"], number, "{:?}", &events[..=number]);
        }
        let ran = Self { events };
        let count = |name: &str| ran.all(name).count();
        assert_eq!(count("end"), 1, "{:?}", ran.events);
        assert_eq!(ran.events.last().unwrap()["event"], "end");
        for name in ["start", "error", "result"] {
            assert!(count(name) <= 1, "{name}: {:?}", ran.events);
        }
        if let Some(at) = ran
            .events
            .iter()
            .position(|event| event["event"] == "start")
        {
            let earlier = &ran.events[..at];
            assert!(earlier.iter().all(|event| event["event"] == "queued"));
            for stream in ["stdout", "stderr"] {
                let offset = ran.events[at][format!("{stream}_offset")].as_u64();
                let offset = offset.unwrap();
                let mut output = ran.all(stream);
                let first = output.next().and_then(|event| event["offset"].as_u64());
                assert!(first.is_none_or(|first| first == offset), "{stream}");
            }
        } else {
            assert!(
                ran.events
                    .iter()
                    .all(|event| { event["event"] == "queued" || event["event"] == "end" })
            );
        }
        ran
    }

    /// The last events of an execution, of which a test has read the first.
    #[track_caller]
    fn of_rest(events: Vec<Value>) -> Self {
        let ran = Self {
            events: without_pings(events),
        };
        assert_eq!(ran.all("end").count(), 1, "{:?}", ran.events);
        assert_eq!(ran.end()["event"], "end");
        ran
    }

    fn all(&self, name: &str) -> impl Iterator<Item = &Value> {
        self.events
            .iter()
            .filter(move |event| event["event"] == name)
    }

    #[track_caller]
    fn one(&self, name: &str) -> &Value {
        let found = self.all(name).next();
        found.unwrap_or_else(|| panic!("no {name}: {:?}", self.events))
    }

    fn end(&self) -> &Value {
        self.events.last().unwrap()
    }

    /// The names of the events.
    fn names(&self) -> Vec<&str> {
        let names = self.events.iter();
        names
            .map(|event| event["event"].as_str().unwrap())
            .collect()
    }

    #[track_caller]
    fn expect(&self, reason: &str, state: &str) {
        let end = self.end();
        assert_eq!(end["reason"], reason, "{:?}", self.events);
        assert_eq!(end["state"], state, "{:?}", self.events);
    }

    /// What it wrote to a stream.
    fn text(&self, stream: &str) -> String {
        let pieces = self.all(stream);
        pieces
            .map(|event| event["data"].as_str().unwrap())
            .collect()
    }

    /// The text of its result.
    #[track_caller]
    fn result(&self) -> &str {
        let result = self.one("result");
        result["data"]["text/plain"].as_str().unwrap()
    }

    /// What was written and shown in its order: pieces of one stream that follow each other are one.
    fn story(&self) -> Vec<(String, String)> {
        let told = self.events.iter().filter_map(|event| {
            let name = event["event"].as_str().unwrap();
            let text = match name {
                "stdout" | "stderr" => &event["data"],
                "display" | "result" => &event["data"]["text/plain"],
                "error" => &event["name"],
                _ => return None,
            };
            Some((name.to_owned(), text.as_str().unwrap().to_owned()))
        });
        joined(told)
    }
}

/// Joins pieces of one stream that follow each other.
fn joined(pieces: impl IntoIterator<Item = (String, String)>) -> Vec<(String, String)> {
    let mut story: Vec<(String, String)> = Vec::new();
    for (name, text) in pieces {
        match story.last_mut() {
            Some((last, so_far)) if *last == name && name.starts_with("std") => {
                so_far.push_str(&text);
            }
            _ => story.push((name, text)),
        }
    }
    story
}

/// Runs `work` on so many threads at once, each told its number.
fn in_parallel<T: Send>(count: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = (0..count)
            .map(|number| scope.spawn(move || work(number)))
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    })
}

/// Ends the test where there is no interpreter of a language.
macro_rules! needs {
    ($place:expr, $language:expr) => {
        if !$place.has($language) {
            crate::skip!("there is no {}", $language);
        }
    };
}
use needs;
