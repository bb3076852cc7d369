//! Interpreter contexts: how soon one is ready, how soon code has run in it, and how much output comes a second. The
//! floor is the same interpreter without a server: started bare, or in a loop that reads lines from a pipe and
//! evaluates them.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::Plan;
use super::client::{Client, Framing, find};
use super::output::now;
use super::program::{Program, Scratch, free_port, memory_of};
use super::report::{Figure, Limit, Samples, Table, in_turns};

/// Where the system has its interpreters. Others may be scripts that look for one.
const PATH: &str = "/usr/local/bin:/usr/bin:/bin";

/// Lines of 100 bytes: 10 MB.
const LINES: usize = 100_000;

/// A spare needs this to be ready, and interpreters to become quiet.
const SETTLE: Duration = Duration::from_millis(700);

/// What is executed again and again, and its loop without a server: lines in, and `done` after each.
struct Kind {
    name: &'static str,
    language: &'static str,
    backend: &'static str,
    program: &'static str,
    /// Gives the program a source.
    option: &'static str,
    /// Loads what the back end needs, and nothing else.
    bare: &'static str,
    code: &'static str,
    evaluate: &'static str,
    /// Shows all lines.
    lines: &'static str,
    /// What comes before them without a server, so that each line is a write.
    unbuffered: &'static str,
    /// Of `1+1` again.
    limit: Limit,
}

const KINDS: [Kind; 4] = [
    Kind {
        name: "python",
        language: "python",
        backend: "plain",
        program: "python3",
        option: "-c",
        bare: "pass",
        code: "1+1",
        evaluate: "import sys\nfor line in sys.stdin: print(eval(line)); print('done', flush=True)",
        lines: "line = 'x' * 99\nfor _ in range(100_000): print(line)",
        unbuffered: "import sys; sys.stdout.reconfigure(line_buffering=True)\n",
        limit: Limit::Below(1000.0),
    },
    Kind {
        name: "ipython",
        language: "python",
        backend: "ipython",
        program: "python3",
        option: "-c",
        bare: "import IPython",
        code: "1+1",
        evaluate: "import sys\nfrom IPython.core.interactiveshell import InteractiveShell\n\
                   shell = InteractiveShell.instance()\n\
                   for line in sys.stdin: shell.run_cell(line); print('done', flush=True)",
        lines: "line = 'x' * 99\nfor _ in range(100_000): print(line)",
        unbuffered: "import sys; sys.stdout.reconfigure(line_buffering=True)\n",
        limit: Limit::None,
    },
    Kind {
        name: "node",
        language: "javascript",
        backend: "node",
        program: "node",
        option: "-e",
        bare: "0",
        code: "1+1",
        evaluate: "require('readline').createInterface({ input: process.stdin })\
                   .on('line', (line) => { console.log(eval(line)); console.log('done') })",
        lines: "for (let i = 0; i < 100_000; i++) console.log('x'.repeat(99))",
        unbuffered: "",
        limit: Limit::None,
    },
    Kind {
        name: "bash",
        language: "bash",
        backend: "bash",
        program: "bash",
        option: "-c",
        bare: ":",
        code: "echo $((1+1))",
        evaluate: "while read -r line; do eval \"$line\"; echo done; done",
        lines: "printf -v line '%099d' 0; for ((i = 0; i < 100000; i++)); do echo \"$line\"; done",
        unbuffered: "",
        limit: Limit::None,
    },
];

pub fn measure(plan: &Plan, _: &Scratch, table: &mut Table) {
    let server = server(64);
    let mut client = server.connect();
    for kind in &KINDS {
        if !kind.runs() {
            eprintln!(
                "note: {} does not run here: its rows are left out",
                kind.name
            );
            continue;
        }
        ready(plan, kind, &mut client, table);
        again(plan, kind, &mut client, table);
        lines(plan, kind, &mut client, table);
        if kind.name == "python" {
            first_byte(plan, kind, &mut client, table);
            interrupt(plan, kind, &server, table);
            memory(kind, &mut client, table);
        }
    }
}

impl Kind {
    fn runs(&self) -> bool {
        self.command(self.bare)
            .status()
            .is_ok_and(|status| status.success())
    }

    /// The interpreter without a server.
    fn command(&self, source: &str) -> Command {
        let mut command = Command::new(self.program);
        command.env_clear().env("PATH", PATH);
        command
            .args([self.option, source])
            .stdin(Stdio::null())
            .stderr(Stdio::null());
        command
    }

    /// Makes a context; its document. `more` are members of the request.
    fn create(&self, client: &mut Client, more: &str) -> String {
        let (language, backend) = (self.language, self.backend);
        let body = format!(r#"{{"language":"{language}","backend":"{backend}"{more}}}"#);
        client.post("/v1/contexts", &body)
    }
}

/// A server that holds so many contexts.
pub fn server(contexts: usize) -> Program {
    let port = free_port();
    let mut command = Program::server_command(port);
    command
        .env("PATH", PATH)
        .env("SBX_CONTEXTS", contexts.to_string());
    Program::start(port, &mut command)
}

/// Makes a context of bash; the request for an execution in it.
pub fn make_bash(client: &mut Client) -> (String, String) {
    let bash = KINDS.iter().find(|kind| kind.name == "bash").unwrap();
    execution(&bash.create(client, ""), bash.code)
}

/// Executes, and checks that it succeeded.
pub fn execute(client: &mut Client, (target, body): &(String, String)) {
    let events = client.post(target, body);
    assert!(events.contains(r#""reason":"completed""#), "{events}");
}

/// A string or number of a document.
fn member<'a>(document: &'a str, name: &str) -> &'a str {
    let (_, rest) = document.split_once(&format!("\"{name}\":")).expect(name);
    let end = rest.find([',', '}']).unwrap();
    rest[..end].trim_matches('"')
}

fn delete(client: &mut Client, context: &str) {
    let target = format!("/v1/contexts/{}", member(context, "id"));
    client.send("DELETE", &target, 0, b"");
    client.reply();
}

/// The target and the body of an execution.
fn execution(context: &str, code: &str) -> (String, String) {
    let target = format!("/v1/contexts/{}/execute", member(context, "id"));
    let code = code
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n");
    (target, format!(r#"{{"code":"{code}"}}"#))
}

fn ready(plan: &Plan, kind: &Kind, client: &mut Client, table: &mut Table) {
    let rounds = plan.samples.div_ceil(100);
    // A spare is not used with such a variable.
    let fresh = r#","env":{"LD_X":"1"}"#;
    let first = kind.create(client, "");
    thread::sleep(SETTLE);
    let [ours, floor] = in_turns(
        rounds,
        |samples| {
            let context = samples.time(|| kind.create(client, fresh));
            assert_eq!(member(&context, "warm"), "false");
            delete(client, &context);
        },
        |samples| {
            samples.time(|| assert!(kind.command(kind.bare).status().unwrap().success()));
        },
    );
    let what = format!("context of {}, ready", kind.name);
    let note = format!("{} {} '{}'", kind.program, kind.option, kind.bare);
    table.times(&what, &ours, &floor, Limit::AtMost(1.3, 15_000.0), &note);
    if kind.name != "bash" {
        let mut ours = Samples::default();
        for _ in 0..rounds {
            thread::sleep(SETTLE);
            let start = Instant::now();
            let context = kind.create(client, "");
            if member(&context, "warm") == "true" {
                ours.push(start.elapsed());
            }
            delete(client, &context);
        }
        let what = format!("context of {}, from a spare, µs", kind.name);
        table.row(
            &what,
            ours.times(),
            Some(floor.times()),
            Limit::Below(20_000.0),
            &note,
        );
    }
    delete(client, &first);
}

fn again(plan: &Plan, kind: &Kind, client: &mut Client, table: &mut Table) {
    let context = kind.create(client, "");
    let request = execution(&context, kind.code);
    let mut bare = Bare::start(kind, kind.evaluate);
    let mut ours = || execute(client, &request);
    ours();
    bare.evaluate(kind.code);
    thread::sleep(SETTLE);
    let [ours, floor] = in_turns(
        plan.samples / 4,
        |samples| samples.time(&mut ours),
        |samples| samples.time(|| bare.evaluate(kind.code)),
    );
    let what = format!("`{}` again, {}", kind.code, kind.name);
    let note = "the interpreter, which evaluates lines from a pipe";
    table.times(&what, &ours, &floor, kind.limit, note);
    delete(client, &context);
}

fn lines(plan: &Plan, kind: &Kind, client: &mut Client, table: &mut Table) {
    let context = kind.create(client, "");
    let (target, body) = execution(&context, kind.lines);
    thread::sleep(SETTLE);
    let (mut ours, mut floor) = (Vec::new(), Vec::new());
    for _ in 0..plan.rounds {
        let start = Instant::now();
        client.send("POST", &target, body.len(), body.as_bytes());
        let mut received = 0;
        client.events(|event| {
            let head = String::from_utf8_lossy(&event[..event.len().min(120)]);
            if head.starts_with(r#"{"event":"stdout""#) {
                received += member(&head, "bytes").parse::<usize>().unwrap();
            }
        });
        ours.push(start.elapsed().as_secs_f64() * 1e3);
        assert_eq!(received, LINES * 100);
        let source = format!("{}{}", kind.unbuffered, kind.lines);
        let mut bare = Bare::start(kind, &source);
        let mut buffer = vec![0; 64 << 10];
        let mut received = bare.output.read(&mut buffer).unwrap();
        let start = Instant::now();
        while let Ok(length @ 1..) = bare.output.read(&mut buffer) {
            received += length;
        }
        floor.push(start.elapsed().as_secs_f64() * 1e3);
        assert_eq!(received, LINES * 100);
    }
    let what = format!("10 MB in lines of 100 bytes, {}, ms", kind.name);
    let [ours, floor] = [ours, floor].map(|times| Figure::highest(&times));
    let note = "the interpreter, a write for each line";
    table.row(&what, ours, Some(floor), Limit::AtMost(1.5, 0.0), note);
    delete(client, &context);
}

/// From before code writes until a client has it.
fn first_byte(plan: &Plan, kind: &Kind, client: &mut Client, table: &mut Table) {
    let code = format!(
        "import time\nfor _ in range({}):\n    time.sleep(0.01)\n    print(time.time_ns(), flush=True)",
        plan.samples.div_ceil(10)
    );
    let context = kind.create(client, "");
    let since = |stamp: &str| Duration::from_nanos(now().saturating_sub(stamp.parse().unwrap()));
    let [mut ours, mut floor] = [(); 2].map(|()| Samples::default());
    let (target, body) = execution(&context, &code);
    client.send("POST", &target, body.len(), body.as_bytes());
    client.events(|event| {
        let event = String::from_utf8_lossy(event);
        if event.starts_with(r#"{"event":"stdout""#) {
            ours.push(since(member(&event, "data").trim_end_matches("\\n")));
        }
    });
    for line in Bare::start(kind, &code).output.by_ref().lines() {
        floor.push(since(&line.unwrap()));
    }
    let limit = Limit::AtMost(1.0, 1000.0);
    let note = "the interpreter through a pipe";
    table.times(
        "context: output after the code wrote it",
        &ours,
        &floor,
        limit,
        note,
    );
    delete(client, &context);
}

/// From the request until the execution's client has its end.
fn interrupt(plan: &Plan, kind: &Kind, server: &Program, table: &mut Table) {
    let mut client = server.connect();
    let context = kind.create(&mut client, "");
    let (target, body) = execution(&context, "print('begun')\nwhile True: pass");
    let interrupt = format!("/v1/contexts/{}/interrupt", member(&context, "id"));
    // A shell's background jobs ignore SIGINT, and Python then does too.
    let endless = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n\
                   while True:\n  try:\n    print('begun', flush=True)\n    while True: pass\n  \
                   except KeyboardInterrupt: print('done', flush=True)";
    let mut bare = Bare::start(kind, endless);
    let [ours, floor] = in_turns(
        plan.samples.div_ceil(20),
        |samples| {
            let mut runner = server.connect();
            runner.send("POST", &target, body.len(), body.as_bytes());
            assert!(matches!(runner.head(), Framing::Chunked));
            let mut wait_for = |text: &[u8]| {
                while find(runner.rest(), text).is_none() {
                    runner.fill();
                }
            };
            wait_for(b"begun");
            samples.time(|| {
                client.send("POST", &interrupt, 0, b"");
                wait_for(br#""event":"end""#);
            });
            assert!(client.reply().contains(r#""ended":true"#));
        },
        |samples| {
            bare.wait_for("begun");
            samples.time(|| {
                let pid = Pid::from_raw(bare.child.id().cast_signed());
                kill(pid, Signal::SIGINT).unwrap();
                bare.wait_for("done");
            });
        },
    );
    let limit = Limit::Below(50_000.0);
    let note = "SIGINT to the interpreter, which says so through a pipe";
    table.times(
        "interrupt of `while True: pass` to its end",
        &ours,
        &floor,
        limit,
        note,
    );
    delete(&mut client, &context);
}

/// What the interpreter has resident.
fn memory(kind: &Kind, client: &mut Client, table: &mut Table) {
    let context = kind.create(client, "");
    let bare = Bare::start(kind, "input()");
    thread::sleep(SETTLE);
    let ours = memory_of(member(&context, "pid").parse().unwrap());
    let floor = memory_of(bare.child.id());
    let [ours, floor] = [ours, floor].map(|memory| Figure::one(memory as f64));
    let what = "memory of an idle context of python, KiB";
    let limit = Limit::Below(14e6 / 1024.0);
    table.row(
        what,
        ours,
        Some(floor),
        limit,
        "the interpreter, which waits for input",
    );
    delete(client, &context);
}

/// An interpreter without a server, killed with the value.
struct Bare {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Bare {
    fn start(kind: &Kind, source: &str) -> Self {
        let mut command = kind.command(source);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::with_capacity(64 << 10, child.stdout.take().unwrap());
        Self {
            child,
            input,
            output,
        }
    }

    fn evaluate(&mut self, code: &str) {
        writeln!(self.input, "{code}").unwrap();
        self.wait_for("done");
    }

    fn wait_for(&mut self, line: &str) {
        let mut read = String::new();
        while read.trim_end() != line {
            read.clear();
            assert!(self.output.read_line(&mut read).unwrap() > 0, "it ended");
        }
    }
}

impl Drop for Bare {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
