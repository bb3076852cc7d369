//! Output of commands, at full speed.

use std::fs::File;
use std::io::{BufRead, Read, Write};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};

use super::bytes::Expected;
use super::client::{BLOCK, Client, find};
use super::program::{Program, Scratch, free_port};
use super::report::{Limit, Samples, Table};
use super::{MIB, Plan};

pub fn measure(plan: &Plan, _: &Scratch, table: &mut Table) {
    let server = Program::server(free_port());
    let mut client = server.connect();
    let mut ours = Samples::default();
    let mut floor = Samples::default();
    for _ in 0..plan.output_rounds {
        ours.time(|| client.run_lines(plan.output_bytes));
        floor.time(|| read_lines(plan.output_bytes));
    }
    let row = format!("output of {} MiB of lines, MB/s", plan.output_bytes / MIB);
    table.row(
        &row,
        ours.speeds(plan.output_bytes),
        Some(floor.speeds(plan.output_bytes)),
        Limit::AtLeast(0.6),
        "the same program's pipe, read directly",
    );
}

/// The floor of output: the same program, its pipe read and checked by nobody in between.
fn read_lines(count: usize) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["lines", &count.to_string()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = child.stdout.take().unwrap();
    let mut expected = Expected::new(LINE);
    let mut block = vec![0; BLOCK];
    loop {
        match output.read(&mut block).unwrap() {
            0 => break,
            length => expected.check(&block[..length]),
        }
    }
    assert!(child.wait().unwrap().success());
    assert_eq!(expected.seen, count);
}

impl Client {
    /// Runs the program of lines and checks that all of them came, as they were printed.
    fn run_lines(&mut self, count: usize) {
        let program = std::env::current_exe().unwrap();
        let body = format!(r#"{{"cmd":["{}","lines","{count}"]}}"#, program.display());
        self.send("POST", "/v1/exec", body.len(), body.as_bytes());
        let mut expected = Expected::new(LINE_IN_JSON);
        let mut exit = None;
        let mut event = |line: &[u8]| {
            if let Some(start) = find(line, br#""data":""#) {
                let data = line[start + 8..].strip_suffix(b"\"}\n");
                expected.check(data.expect("data comes last in an event"));
            } else {
                exit = Some(String::from_utf8_lossy(line).into_owned());
            }
        };
        let mut line = Vec::new();
        self.body(|mut piece| {
            while !piece.is_empty() {
                piece.read_until(b'\n', &mut line).unwrap();
                if line.ends_with(b"\n") {
                    event(&line);
                    line.clear();
                }
            }
        });
        let exit = exit.unwrap();
        assert!(exit.contains(r#""exit_code":0"#), "{exit}");
        assert_eq!(expected.seen, count / LINE.len() * LINE_IN_JSON.len());
    }
}

/// What the lines of the output row look like; as JSON each is one byte longer.
pub const LINE: &[u8] = b"the quick brown fox jumps over the lazy dog, again and again, 0\n";
pub const LINE_IN_JSON: &[u8] =
    br"the quick brown fox jumps over the lazy dog, again and again, 0\n";

/// Prints that many bytes of lines in large writes.
pub fn lines(count: usize) {
    let block = LINE.repeat((64 << 10) / LINE.len());
    let mut output = File::from(std::io::stdout().as_fd().try_clone_to_owned().unwrap());
    let mut left = count;
    while left > 0 {
        let length = left.min(block.len());
        output.write_all(&block[..length]).unwrap();
        left -= length;
    }
}
