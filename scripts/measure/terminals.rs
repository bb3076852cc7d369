//! Terminals through a WebSocket: how soon a key is echoed, and how much output a second. The floor of
//! both is a terminal that this program opens itself.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use nix::pty::openpty;

use super::bytes::{Expected, Unit};
use super::client::{BLOCK, Client, request};
use super::program::{Program, Scratch, free_port};
use super::report::{Figure, Limit, Table, in_turns};
use super::{MIB, Plan};

/// A line of the terminal's own: it echoes no more than 4095 keys.
const MAX_KEYS: usize = 4000;

/// What is shown over and over. The terminal puts a carriage return before the end of a line.
const LINE: &[u8] = b"the quick brown fox jumps over the lazy dog, again and again, 0\n";
const SHOWN_LINE: &[u8] = b"the quick brown fox jumps over the lazy dog, again and again, 0\r\n";

pub fn measure(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    let server = Program::server(free_port());
    echo(plan, &server, table);
    output(plan, &server, scratch, table);
}

/// The terminal itself echoes, whatever runs in it.
fn echo(plan: &Plan, server: &Program, table: &mut Table) {
    let keys = plan.samples.min(MAX_KEYS);
    let mut attached = Attached::open(server, "exec sleep 3600");
    let terminal = openpty(None, None).unwrap();
    let mut master = File::from(terminal.master);
    let mut echoed = [0];
    let [ours, floor] = in_turns(
        keys,
        |samples| samples.time(|| attached.echo(b'k')),
        |samples| {
            samples.time(|| {
                master.write_all(b"k").unwrap();
                master.read_exact(&mut echoed).unwrap();
            });
            assert_eq!(echoed, *b"k");
        },
    );
    let note = "openpty, write and read";
    let limit = Limit::AtMost(1.0, 150.0);
    table.times("terminal: echo of a key", &ours, &floor, limit, note);
}

fn output(plan: &Plan, server: &Program, scratch: &Scratch, table: &mut Table) {
    let lines = plan.terminal_bytes / SHOWN_LINE.len();
    let size = lines * SHOWN_LINE.len();
    let path = scratch.path("shown");
    Unit::new(LINE).send(&mut File::create(&path).unwrap(), 0, lines * LINE.len());
    let (mut ours, mut floor, mut dropped) = (Vec::new(), Vec::new(), 0);
    // Terminals are slow: a round of both sides may take ten seconds.
    let rounds = plan.rounds.div_ceil(2);
    for _ in 0..rounds {
        let mut attached = Attached::open(server, &cat(&path));
        let start = Instant::now();
        let lost = attached.receive_file(size);
        ours.push((size - lost) as f64 / 1e6 / start.elapsed().as_secs_f64());
        dropped += lost;
        floor.push(size as f64 / 1e6 / read_directly(&path, size));
    }
    fs::remove_file(&path).unwrap();
    let share = dropped as f64 * 100.0 / (size * rounds) as f64;
    let note = match dropped {
        0 => "the terminal read directly".to_owned(),
        _ => format!("the terminal read directly ({share:.0} % of ours was dropped)"),
    };
    let row = format!("terminal: cat of {} MiB, MB/s", size.div_ceil(MIB));
    let [ours, floor] = [ours, floor].map(|rates| Figure::lowest(&rates));
    table.row(&row, ours, Some(floor), Limit::AtLeast(0.7), &note);
}

/// A command that shows a file once a line was typed.
fn cat(path: &Path) -> String {
    format!("read _; exec cat {}", path.display())
}

/// What a terminal shows of [`cat`] after the typed line: its echo, and the file.
fn shown(unit: &Unit) -> Expected<'_> {
    Expected::new(unit, SHOWN_LINE.len() - 2)
}

/// Seconds until all of a file was read from a terminal.
fn read_directly(path: &Path, size: usize) -> f64 {
    let terminal = openpty(None, None).unwrap();
    let slave = || Stdio::from(terminal.slave.try_clone().unwrap());
    let mut child = Command::new("/bin/sh")
        .args(["-c", &cat(path)])
        .stdin(slave())
        .stdout(slave())
        .stderr(slave())
        .spawn()
        .unwrap();
    let mut master = File::from(terminal.master);
    let mut block = vec![0; BLOCK];
    let unit = Unit::new(SHOWN_LINE);
    let mut expected = shown(&unit);
    let start = Instant::now();
    master.write_all(b"\n").unwrap();
    while expected.offset < SHOWN_LINE.len() + size {
        let length = master.read(&mut block).unwrap();
        expected.check(&block[..length]);
    }
    let took = start.elapsed().as_secs_f64();
    assert!(child.wait().unwrap().success());
    took
}

const BINARY: u8 = 0x82;
const PING: u8 = 0x89;
const PONG: u8 = 0x8a;

/// A client that is attached to the terminal of a new process.
struct Attached(Client);

impl Attached {
    /// Returns once the terminal is live.
    fn open(server: &Program, command: &str) -> Self {
        let mut client = server.connect();
        let body = format!(r#"{{"cmd":["/bin/sh","-c","{command}"],"pty":true}}"#);
        let started = client.post("/v1/processes", &body);
        let id = started.split_once(r#""id":""#).unwrap().1;
        let id = id.split_once('"').unwrap().0;
        let target = format!("/v1/processes/{id}/attach");
        let headers = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n\
                       Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\
                       Sec-WebSocket-Protocol: sbx.pty.v1\r\n";
        let request = request("GET", &target, headers, 0, b"");
        client.stream.write_all(&request).unwrap();
        client.raw_head(b"101");
        let mut attached = Self(client);
        while !attached.frame(|_| ()).contains(r#""event":"live""#) {}
        attached
    }

    fn send(&mut self, first: u8, payload: &[u8]) {
        // The mask may be zero.
        let length = u8::try_from(payload.len()).unwrap();
        let head = [first, 0x80 | length, 0, 0, 0, 0];
        let frame = [&head, payload].concat();
        self.0.stream.write_all(&frame).unwrap();
    }

    /// Hands the next frame to `output`, in pieces, if it is that. Returns the text of an event.
    fn frame(&mut self, output: impl FnMut(&[u8])) -> String {
        let [first, length] = self.bytes();
        let length = match length {
            126 => usize::from(u16::from_be_bytes(self.bytes())),
            127 => usize::try_from(u64::from_be_bytes(self.bytes())).unwrap(),
            short => usize::from(short),
        };
        let mut event = Vec::new();
        match first {
            BINARY => self.0.take(length, output),
            _ => self.0.take(length, |piece| event.extend_from_slice(piece)),
        }
        if first == PING {
            self.send(PONG, b"");
        }
        String::from_utf8(event).unwrap()
    }

    fn bytes<const COUNT: usize>(&mut self) -> [u8; COUNT] {
        let (mut bytes, mut filled) = ([0; COUNT], 0);
        self.0.take(COUNT, |piece| {
            bytes[filled..filled + piece.len()].copy_from_slice(piece);
            filled += piece.len();
        });
        bytes
    }

    /// Types a key and waits for its echo.
    fn echo(&mut self, key: u8) {
        self.send(BINARY, &[key]);
        let mut echoed = Vec::new();
        while echoed.is_empty() {
            self.frame(|piece| echoed.extend_from_slice(piece));
        }
        assert_eq!(echoed, [key]);
    }

    /// Types the line that [`cat`] waits for and checks what comes, up to the exit of the process. Returns
    /// how much of that was dropped because it was not read in time.
    fn receive_file(&mut self, size: usize) -> usize {
        let unit = Unit::new(SHOWN_LINE);
        let mut expected = shown(&unit);
        let mut dropped = 0;
        self.send(BINARY, b"\n");
        loop {
            let event = self.frame(|piece| expected.check(piece));
            if event.contains(r#""event":"dropped""#) {
                let bytes = event.split_once(r#""bytes":"#).unwrap().1;
                let bytes: usize = bytes.trim_end_matches('}').parse().unwrap();
                expected.offset += bytes;
                dropped += bytes;
            } else if event.contains(r#""event":"exit""#) {
                assert!(event.contains(r#""exit_code":0"#), "{event}");
                assert_eq!(
                    expected.offset,
                    SHOWN_LINE.len() + size,
                    "bytes are missing"
                );
                return dropped;
            }
        }
    }
}
