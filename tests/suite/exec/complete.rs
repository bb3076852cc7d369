//! Completeness: every byte that the main process wrote comes before `exit`, and in the logs of a
//! background process after it has ended.
//!
//! What is lost is lost between the last read and the end, so two things decide: how much is in the
//! pipe when the process is seen to end, and how the server's reads fall. The first test makes the
//! worst case happen every time: the server is stopped while the commands write and end, so that it
//! finds a full pipe and the end at the same moment. The second one takes the timing as it comes,
//! with sizes around every edge: the first read (4 KiB), later reads and the pipe (64 KiB).

use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use libc::{SIGCONT, SIGSTOP};
use serde_json::{Value, json};

use super::{text_of, write_file};
use crate::fixture::{
    Connection, Gate, Mark, PATIENCE, Reply, Server, TempDir, expect_same, numbered_text, pid_of,
    stat_of, wait_until,
};

/// What a pipe holds, and what a read takes at most.
const PIPE: usize = 64 << 10;

/// Sizes that fit into a pipe, so that the command can end although nobody reads.
const WITHIN_A_PIPE: [usize; 14] = [
    1,
    2,
    1000,
    4095,
    4096,
    4097,
    5000,
    8191,
    8192,
    12_289,
    32_768,
    60_000,
    PIPE - 1,
    PIPE,
];

/// Sizes that take several reads.
const BEYOND_A_PIPE: [usize; 9] = [
    PIPE + 1,
    PIPE + 4096,
    PIPE + 4097,
    100_000,
    2 * PIPE - 1,
    2 * PIPE,
    2 * PIPE + 1,
    5 * PIPE + 4095,
    1 << 20,
];

/// The streams that a command writes to.
#[derive(Debug, Clone, Copy)]
enum Streams {
    Stdout,
    Stderr,
    Both,
}

impl Streams {
    const ALL: [Self; 3] = [Self::Stdout, Self::Stderr, Self::Both];

    /// A script that writes by `command` and ends with it.
    fn script(self, command: &str) -> String {
        match self {
            Self::Stdout => format!("exec {command}"),
            Self::Stderr => format!("exec {command} >&2"),
            Self::Both => format!("{command} >&2; exec {command}"),
        }
    }

    /// Checks the events of a stream or of logs.
    #[track_caller]
    fn check(self, what: &str, body: &[u8], expected: &str) {
        let (stdout, stderr, exit) = text_of(body);
        let (on_stdout, on_stderr) = match self {
            Self::Stdout => (expected, ""),
            Self::Stderr => ("", expected),
            Self::Both => (expected, expected),
        };
        for (name, actual, expected) in [
            ("stdout", &stdout, on_stdout),
            ("stderr", &stderr, on_stderr),
        ] {
            let what = format!("{what}, {self:?}: {name}");
            expect_same(&what, actual.as_bytes(), expected.as_bytes());
        }
        assert_eq!(exit["exit_code"], 0, "{what}: {exit}");
    }
}

/// Text in which every position can be told from every other, without anything that JSON escapes.
fn text() -> String {
    numbered_text(1 << 20).replace('\n', " ")
}

/// What a process wrote, after its end.
#[track_caller]
fn logs_after_the_end(server: &Server, process: &Value) -> Vec<u8> {
    let path = format!("/v1/processes/{}", process["id"].as_str().unwrap());
    let ended = server.get(&format!("{path}/wait")).json();
    assert_eq!(ended["running"], false, "{ended}");
    server.get(&format!("{path}/logs")).body
}

/// A command in the foreground that has started.
struct Begun {
    connection: Connection,
    head: Reply,
    received: Vec<u8>,
    pid: i32,
}

/// Starts a command and reads the first event of its stream.
#[track_caller]
fn begin(server: &Server, body: &Value) -> Begun {
    let mut connection = server.connect();
    connection.send_request("POST", "/v1/exec", &[], body.to_string().as_bytes());
    let head = connection.read_head();
    let mut received = Vec::new();
    while !received.contains(&b'\n') {
        received.extend(connection.read_chunk().expect("the stream begins"));
    }
    let start: Value = serde_json::from_slice(&received).unwrap();
    Begun {
        connection,
        head,
        received,
        pid: pid_of(&start),
    }
}

impl Begun {
    /// The whole stream, once it has ended.
    fn finish(mut self) -> Vec<u8> {
        let rest = self.connection.read_body(self.head).body;
        [self.received, rest].concat()
    }
}

fn has_python() -> bool {
    Command::new("python3")
        .arg("-V")
        .output()
        .is_ok_and(|output| output.status.success())
}

/// Stops the server, so that it sees nothing of what happens until it is continued.
#[track_caller]
fn stop(server: &Server) {
    server.signal(SIGSTOP);
    wait_until("every thread of the server is stopped", PATIENCE, || {
        let threads = std::fs::read_dir(format!("/proc/{}/task", server.pid())).unwrap();
        threads
            .map(|thread| thread.unwrap().file_name().into_string().unwrap())
            .all(|thread| stat_of(thread.parse().unwrap()).is_none_or(|stat| stat.state == 'T'))
    });
}

/// Writes as much as is asked for to descriptors whose pipes it has made large enough.
const WIDE_WRITER: &str = "\
import fcntl, os, sys
gate, file, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
data = open(file, 'rb').read(size)
open(gate).close()
for descriptor in map(int, sys.argv[4:]):
    fcntl.fcntl(descriptor, 1031, 1 << 20)  # F_SETPIPE_SZ
    os.write(descriptor, data)
";

#[test]
fn output_that_is_found_together_with_the_end_comes_before_exit() {
    let directory = TempDir::new();
    let text = text();
    let file = write_file(&directory, "text", &text);
    let mut gate = Gate::new();
    let mut cases = Vec::new();
    for size in WITHIN_A_PIPE {
        for streams in Streams::ALL {
            let write = streams.script(&format!("dd if={file} bs={size} count=1 status=none"));
            let body = json!({"cmd": format!(": < {}; {write}", gate.path())});
            cases.push((format!("{size} bytes"), size, streams, body));
        }
    }
    // More than one read takes.
    if has_python() {
        for size in [PIPE + 1, 200_000, 1 << 20] {
            for (streams, descriptors) in Streams::ALL.into_iter().zip(["1", "2", "1 2"]) {
                let mut cmd = vec!["python3", "-c", WIDE_WRITER];
                let (gate, size_text) = (gate.path(), size.to_string());
                cmd.extend([gate.as_str(), &file, &size_text]);
                cmd.extend(descriptors.split(' '));
                let what = format!("{size} bytes in a larger pipe");
                cases.push((what, size, streams, json!({ "cmd": cmd })));
            }
        }
    }
    let server = Server::start();
    let started: Vec<_> = cases
        .iter()
        .map(|(.., body)| {
            let foreground = begin(&server, body);
            let background = server.spawn(body);
            let mut follower = server.connect();
            let logs = format!(
                "/v1/processes/{}/logs?follow=1",
                background["id"].as_str().unwrap()
            );
            follower.send_request("GET", &logs, &[], b"");
            let follower = (follower.read_head(), follower);
            (foreground, background, follower)
        })
        .collect();
    stop(&server);
    gate.open();
    let pids: Vec<i32> = started
        .iter()
        .flat_map(|(foreground, background, _)| [foreground.pid, pid_of(background)])
        .collect();
    wait_until("every command has ended", PATIENCE, || {
        pids.iter()
            .all(|pid| stat_of(*pid).is_some_and(|stat| stat.state == 'Z'))
    });
    server.signal(SIGCONT);
    for ((what, size, streams, _), (foreground, background, follower)) in cases.iter().zip(started)
    {
        let check = |how: &str, body: &[u8]| {
            streams.check(&format!("{what} {how}"), body, &text[..*size]);
        };
        check("in the foreground", &foreground.finish());
        let (head, mut connection) = follower;
        check("followed", &connection.read_body(head).body);
        check(
            "in the background",
            &logs_after_the_end(&server, &background),
        );
    }
}

#[test]
fn output_that_is_found_together_with_the_deadline_comes_before_exit() {
    const SIZE: usize = 60_000;
    let directory = TempDir::new();
    let text = text();
    let file = write_file(&directory, "text", &text);
    let server = Server::start();
    let mut gate = Gate::new();
    let mark = Mark::new();
    let script = format!(
        ": < {}; dd if={file} bs={SIZE} count=1 status=none; exec sleep {mark}",
        gate.path()
    );
    let deadline = Duration::from_secs(1);
    let body = json!({"cmd": ["sh", "-c", script], "timeout": deadline.as_secs_f64()});
    let foreground = begin(&server, &body);
    let background = server.spawn(&body);
    let begun = Instant::now();
    stop(&server);
    gate.open();
    // The scripts name the mark too, so what counts is that both shells have become `sleep`.
    let pids = [foreground.pid, pid_of(&background)];
    wait_until("both commands have written", PATIENCE, || {
        pids.iter().all(|pid| {
            std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "sleep\n")
        })
    });
    wait_until("the deadline has passed", PATIENCE, || {
        begun.elapsed() > deadline
    });
    server.signal(SIGCONT);
    let background = logs_after_the_end(&server, &background);
    for (what, body) in [
        ("in the foreground", foreground.finish()),
        ("in the background", background),
    ] {
        let (stdout, _, exit) = text_of(&body);
        expect_same(what, stdout.as_bytes(), &text.as_bytes()[..SIZE]);
        assert_eq!(exit["reason"], "timeout", "{what}: {exit}");
    }
}

#[test]
fn every_size_comes_whole_by_one_write_and_by_many_on_each_stream() {
    let directory = TempDir::new();
    let text = text();
    let file = write_file(&directory, "text", &text);
    let server = Server::start();
    let mut cases = Vec::new();
    for size in WITHIN_A_PIPE.into_iter().chain(BEYOND_A_PIPE) {
        for streams in Streams::ALL {
            // One write of everything, and about thirty that fit no edge.
            for block in [size, (size / 30) | 1] {
                cases.push((size, streams, block));
            }
        }
    }
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut connection = server.connect();
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some((size, streams, block)) = cases.get(index) else {
                        break;
                    };
                    // The input ends where the block that is cut off ends.
                    let dd = format!(
                        "dd if={file} bs={block} count={size} iflag=count_bytes status=none"
                    );
                    let body = json!({"cmd": streams.script(&dd)});
                    let what = format!("{size} bytes in writes of {block}");
                    let exec = body.to_string();
                    let reply = connection.request("POST", "/v1/exec", &[], exec.as_bytes());
                    assert_eq!(reply.status, 200, "{what}: {}", reply.text());
                    streams.check(&what, &reply.body, &text[..*size]);
                    let process = server.spawn(&body);
                    let logs = if index.is_multiple_of(2) {
                        let id = process["id"].as_str().unwrap();
                        server
                            .get(&format!("/v1/processes/{id}/logs?follow=1"))
                            .body
                    } else {
                        logs_after_the_end(&server, &process)
                    };
                    streams.check(&format!("{what} in the background"), &logs, &text[..*size]);
                }
            });
        }
    });
}
