//! The door for E2B's SDKs beside the routes of REST, which do the same work: commands, output and files. The floor of
//! each row is REST on the same server.

use std::fs;
use std::io::Write;
use std::path::Path;

use super::bytes::PATTERN;
use super::client::{Client, request};
use super::program::{Program, Scratch, free_port};
use super::report::{Limit, Samples, Table, in_turns};
use super::{MIB, Plan};

/// What every request of these clients has.
const HEADERS: &str = "X-Access-Token: bench\r\nContent-Type: application/connect+json\r\n";

const BOUNDARY: &str = "boundary";

pub fn measure(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    let server = Program::server(free_port());
    let [mut own, mut rest] = [(); 2].map(|()| server.connect());
    commands(plan, [&mut own, &mut rest], table);
    output(plan, [&mut own, &mut rest], table);
    let path = scratch.path("data");
    files(plan, [&mut own, &mut rest], &path, table);
    let _ = fs::remove_file(path);
}

fn commands(plan: &Plan, [own, rest]: [&mut Client; 2], table: &mut Table) {
    let [ours, floor] = in_turns(
        plan.samples,
        |samples| {
            samples.time(|| own.start(&["/bin/true"]));
        },
        |samples| samples.time(|| rest.run_true()),
    );
    let note = "POST exec, in turn with it";
    table.times(
        "E2B: /bin/true",
        &ours,
        &floor,
        Limit::AtMost(1.1, 0.0),
        note,
    );
}

fn output(plan: &Plan, [own, rest]: [&mut Client; 2], table: &mut Table) {
    let size = plan.output_bytes;
    let program = std::env::current_exe().unwrap();
    let words = [
        program.to_str().unwrap(),
        "print",
        "binary",
        &size.to_string(),
    ];
    let body = format!(r#"{{"cmd":{words:?},"encoding":"base64"}}"#);
    let at_least = size / 3 * 4;
    let [ours, floor] = in_turns(
        plan.rounds,
        |samples| samples.time(|| assert!(own.start(&words) > at_least, "bytes are missing")),
        |samples| {
            samples.time(|| {
                rest.send("POST", "/v1/exec", body.len(), body.as_bytes());
                let mut received = 0;
                rest.body(|piece| received += piece.len());
                assert!(received > at_least, "bytes are missing");
            });
        },
    );
    let what = format!("E2B: {} MiB of output, MB/s", size / MIB);
    let (ours, floor) = (ours.speeds(size), floor.speeds(size));
    let note = "POST exec with base64";
    table.row(&what, ours, Some(floor), Limit::AtLeast(0.8), note);
}

fn files(plan: &Plan, [own, rest]: [&mut Client; 2], path: &Path, table: &mut Table) {
    let size = plan.file_bytes;
    let path = path.display().to_string();
    let mut row = |what: &str, [ours, floor]: [Samples; 2], limit, note: &str| {
        let what = format!("E2B: {} MiB {what}, MB/s", size / MIB);
        let (ours, floor) = (ours.speeds(size), floor.speeds(size));
        table.row(&what, ours, Some(floor), limit, note);
    };
    let target = format!("/files?path={path}");
    let write = format!("/v1/files/write?path={path}");
    let part = format!(
        "--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"file\"; filename=\"x\"\r\n\r\n"
    );
    let end = format!("\r\n--{BOUNDARY}--\r\n");
    let form = format!("Content-Type: multipart/form-data; boundary={BOUNDARY}\r\n");
    let raw = "Content-Type: application/octet-stream\r\n";
    for (what, headers, [before, after], limit) in [
        ("up", raw, ["", ""], Limit::AtLeast(0.95)),
        ("up as a part", &form, [&part, &end], Limit::None),
    ] {
        let samples = in_turns(
            plan.rounds,
            |samples| samples.time(|| own.put(&target, headers, [before, after], size)),
            |samples| samples.time(|| rest.put(&write, "", ["", ""], size)),
        );
        row(what, samples, limit, "PUT files/write");
    }
    let read = format!("/v1/files/read?path={path}");
    let samples = in_turns(
        plan.rounds,
        |samples| samples.time(|| own.get(&target, size)),
        |samples| samples.time(|| rest.get(&read, size)),
    );
    row("down", samples, Limit::AtLeast(0.95), "GET files/read");
}

impl Client {
    /// Starts a command and follows it to its end; returns the bytes of the answer.
    fn start(&mut self, words: &[&str]) -> usize {
        let (program, arguments) = words.split_first().unwrap();
        let message =
            format!(r#"{{"process":{{"cmd":"{program}","args":{arguments:?}}},"stdin":false}}"#);
        let length = u32::try_from(message.len()).unwrap().to_be_bytes();
        let body = [&[0], &length[..], message.as_bytes()].concat();
        let target = "/process.Process/Start";
        let request = request("POST", target, HEADERS, body.len(), &body);
        self.stream.write_all(&request).unwrap();
        let (mut received, mut last) = (0, Vec::new());
        self.body(|piece| {
            received += piece.len();
            last.extend_from_slice(piece);
            let older = last.len().saturating_sub(200);
            last.drain(..older);
        });
        let end = String::from_utf8_lossy(&last).into_owned();
        assert!(end.contains(r#""exitCode":0"#), "{end}");
        received
    }

    fn put(&mut self, target: &str, headers: &str, [before, after]: [&str; 2], size: usize) {
        let method = if target.starts_with("/v1") {
            "PUT"
        } else {
            "POST"
        };
        let headers = format!("X-Access-Token: bench\r\n{headers}");
        let length = before.len() + size + after.len();
        let head = request(method, target, &headers, length, before.as_bytes());
        self.stream.write_all(&head).unwrap();
        PATTERN.send(&mut self.stream, 0, size);
        self.stream.write_all(after.as_bytes()).unwrap();
        self.reply();
    }

    fn get(&mut self, target: &str, size: usize) {
        let request = request("GET", target, "X-Access-Token: bench\r\n", 0, b"");
        self.stream.write_all(&request).unwrap();
        let mut received = 0;
        self.body(|piece| received += piece.len());
        assert_eq!(received, size, "bytes are missing");
    }
}
