//! Output of commands: how much a second, and how soon.
//!
//! Two floors bound how much: the command's pipe read directly, and the bench's own client given the
//! same events from a socket by a server that has them ready. The lower one is the floor.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufRead, Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use super::bytes::{Expected, PATTERN, Unit};
use super::client::{BLOCK, Client, find};
use super::program::{Program, Scratch, free_port};
use super::report::{Figure, Limit, Samples, Table};
use super::{MIB, Plan};

/// What is printed.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Plain,
    Escapes,
    Text,
    Binary,
}

impl Kind {
    const ALL: [(Self, &'static str, &'static str, f64); 4] = [
        (Self::Plain, "plain", "plain lines", 0.6),
        (Self::Escapes, "escapes", "lines full of escapes", 0.6),
        (Self::Text, "text", "multi-byte text", 0.6),
        (Self::Binary, "binary", "bytes, as base64", 0.5),
    ];

    fn named(name: &str) -> Self {
        let known = Self::ALL.iter().find(|(_, word, ..)| *word == name);
        known.unwrap().0
    }

    /// What is printed over and over.
    fn unit(self) -> Vec<u8> {
        let line = match self {
            Self::Plain => "the quick brown fox jumps over the lazy dog, again and again, 0\n",
            Self::Escapes => {
                "\x1b[32mINFO\x1b[0m\tread \"C:\\logs\\today.txt\": {\"lines\": 12, \"sep\": \"\\n\"}\r\n"
            }
            Self::Text => "Größe über Maß: 世界和平，こんにちは。Съешь же ещё этих булок — ☃ 🦀\n",
            Self::Binary => return PATTERN.at(0, PATTERN.len()).to_vec(),
        };
        line.as_bytes().to_vec()
    }

    /// The same as it stands in an event.
    fn unit_in_event(self) -> Vec<u8> {
        let unit = self.unit();
        let Ok(text) = std::str::from_utf8(&unit) else {
            return unit;
        };
        let mut escaped = String::new();
        for character in text.chars() {
            match character {
                '"' | '\\' => escaped.extend(['\\', character]),
                '\n' => escaped.push_str("\\n"),
                '\r' => escaped.push_str("\\r"),
                '\t' => escaped.push_str("\\t"),
                '\0'..' ' => write!(escaped, "\\u{:04x}", u32::from(character)).unwrap(),
                _ => escaped.push(character),
            }
        }
        escaped.into_bytes()
    }

    /// Whole units, about so many bytes of them.
    fn whole(self, bytes: usize) -> usize {
        bytes - bytes % self.unit().len()
    }
}

pub fn measure(plan: &Plan, _: &Scratch, table: &mut Table) {
    let server = Program::server(free_port());
    let mut client = server.connect();
    for (kind, name, what, least) in Kind::ALL {
        let size = kind.whole(plan.output_bytes);
        let port = free_port();
        let feeder = Program::own(&["feed", &port.to_string(), name, &size.to_string()], port);
        drop(feeder.connect());
        let [mut ours, mut pipe, mut ceiling] = [(); 3].map(|()| Samples::default());
        for _ in 0..plan.rounds {
            ours.time(|| client.run_printer(kind, name, size));
            pipe.time(|| read_pipe(kind, name, size));
            ceiling.time(|| feeder.connect().run_printer(kind, name, size));
        }
        let [ours, pipe, ceiling] = [ours, pipe, ceiling].map(|samples| samples.speeds(size));
        let row = format!("output: {} MiB of {what}, MB/s", size.div_ceil(MIB));
        let floors = [
            (pipe, "the pipe read directly"),
            (ceiling, "the bench's own decoding"),
        ];
        let lower = usize::from(ceiling.median < pipe.median);
        let (other, note) = floors[1 - lower];
        let note = format!("{} ({note}: {:.0})", floors[lower].1, other.median);
        let limit = Limit::AtLeast(least);
        table.row(&row, ours, Some(floors[lower].0), limit, &note);
    }
    delay(plan, &mut client, table);
}

/// The floor of output: the same program, its pipe read and checked by nobody in between.
fn read_pipe(kind: Kind, name: &str, size: usize) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["print", name, &size.to_string()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = child.stdout.take().unwrap();
    let unit = Unit::new(&kind.unit());
    let mut expected = Expected::new(&unit, 0);
    let mut block = vec![0; BLOCK];
    loop {
        match output.read(&mut block).unwrap() {
            0 => break,
            length => expected.check(&block[..length]),
        }
    }
    assert!(child.wait().unwrap().success());
    assert_eq!(expected.offset, size, "bytes are missing");
}

impl Client {
    /// Runs the printing program and checks that all of it came, as it was printed.
    fn run_printer(&mut self, kind: Kind, name: &str, size: usize) {
        let program = std::env::current_exe().unwrap();
        let encoding = match kind {
            Kind::Binary => r#","encoding":"base64""#,
            _ => "",
        };
        let body = format!(
            r#"{{"cmd":["{}","print","{name}","{size}"]{encoding}}}"#,
            program.display()
        );
        self.send("POST", "/v1/exec", body.len(), body.as_bytes());
        let unit = Unit::new(&kind.unit_in_event());
        let mut expected = Expected::new(&unit, 0);
        let mut decoded = Vec::new();
        let mut exit = None;
        self.events(|event| {
            if let Some(start) = find(head_of(event), br#""data":""#) {
                let data = event[start + 8..].strip_suffix(b"\"}\n");
                expected.check(data.expect("data comes last in an event"));
            } else if let Some(start) = find(head_of(event), br#""data_b64":""#) {
                let data = event[start + 12..].strip_suffix(b"\"}\n");
                decode(data.expect("data comes last in an event"), &mut decoded);
                expected.check(&decoded);
            } else if find(event, br#""event":"exit""#).is_some() {
                exit = Some(String::from_utf8_lossy(event).into_owned());
            } else {
                assert!(find(event, b"dropped").is_none(), "output is lost");
            }
        });
        let exit = exit.expect("a command ends with an event");
        assert!(exit.contains(r#""exit_code":0"#), "{exit}");
        let size = size / kind.unit().len() * unit.len();
        assert_eq!(expected.offset, size, "bytes are missing");
    }

    /// The lines of an answer.
    pub fn events(&mut self, mut event: impl FnMut(&[u8])) {
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
    }
}

/// Where an event's keys are.
fn head_of(event: &[u8]) -> &[u8] {
    &event[..event.len().min(120)]
}

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// What a digit of base64 stands for at each of its four places; one bit more for what is no digit.
const DIGITS: [[u32; 256]; 4] = {
    let mut digits = [[NO_DIGIT; 256]; 4];
    let mut place = 0;
    while place < 4 {
        let mut value = 0_u32;
        while value < 64 {
            digits[place][ALPHABET[value as usize] as usize] = value << (18 - 6 * place);
            value += 1;
        }
        place += 1;
    }
    digits
};
const NO_DIGIT: u32 = 1 << 24;

/// Decodes base64 with its padding.
fn decode(text: &[u8], into: &mut Vec<u8>) {
    let padding = text.iter().rev().take_while(|byte| **byte == b'=').count();
    let (fours, []) = text.as_chunks::<4>() else {
        panic!("base64 comes in fours");
    };
    into.clear();
    into.resize(fours.len() * 3, 0);
    let mut all = 0;
    let value = |[a, b, c, d]: [u8; 4]| {
        DIGITS[0][a as usize]
            | DIGITS[1][b as usize]
            | DIGITS[2][c as usize]
            | DIGITS[3][d as usize]
    };
    let whole = fours.len() - usize::from(padding > 0);
    let (threes, _) = into.as_chunks_mut::<3>();
    for (four, three) in fours[..whole].iter().zip(threes) {
        let bits = value(*four);
        all |= bits;
        let [_, a, b, c] = bits.to_be_bytes();
        *three = [a, b, c];
    }
    assert_eq!(all & NO_DIGIT, 0, "not base64");
    if padding > 0 {
        let mut four = fours[whole];
        four[4 - padding..].fill(ALPHABET[0]);
        let bits = value(four);
        assert_eq!(bits & NO_DIGIT, 0, "not base64");
        into[whole * 3..].copy_from_slice(&bits.to_be_bytes()[1..]);
        into.truncate(into.len() - padding);
    }
}

/// Prints that many bytes in large writes.
pub fn print(name: &str, size: usize) {
    let unit = Unit::new(&Kind::named(name).unit());
    let mut output = stdout();
    let mut sent = 0;
    while sent < size {
        let piece = unit.at(sent, (size - sent).min(64 << 10));
        output.write_all(piece).unwrap();
        sent += piece.len();
    }
}

/// Standard output without a buffer of its own.
fn stdout() -> File {
    File::from(std::io::stdout().as_fd().try_clone_to_owned().unwrap())
}

/// Answers whatever is asked with the events of a command that has printed so many bytes.
pub fn feed(port: u16, name: &str, size: usize) {
    let kind = Kind::named(name);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    let unit = kind.unit();
    let units = (64 << 10) / unit.len();
    let event = |units: usize| {
        let (key, data) = match kind {
            Kind::Binary => ("data_b64", encode(&unit.repeat(units))),
            _ => ("data", kind.unit_in_event().repeat(units)),
        };
        let bytes = units * unit.len();
        let start = format!(r#"{{"event":"stdout","offset":1000000000,"bytes":{bytes},"{key}":""#);
        chunk(&[start.as_bytes(), &data, b"\"}\n"].concat())
    };
    let whole = event(units);
    let rest = event(size / unit.len() % units);
    let exit = chunk(b"{\"event\":\"exit\",\"exit_code\":0}\n");
    for stream in listener.incoming() {
        let mut stream = stream.unwrap();
        let mut request = [0; 4096];
        if stream.read(&mut request).unwrap() == 0 {
            continue;
        }
        let mut answer = || {
            stream.write_all(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")?;
            for _ in 0..size / unit.len() / units {
                stream.write_all(&whole)?;
            }
            stream.write_all(&rest)?;
            stream.write_all(&exit)?;
            stream.write_all(b"0\r\n\r\n")
        };
        let _: std::io::Result<()> = answer();
    }
}

fn chunk(data: &[u8]) -> Vec<u8> {
    let size = format!("{:x}\r\n", data.len());
    [size.as_bytes(), data, b"\r\n"].concat()
}

fn encode(data: &[u8]) -> Vec<u8> {
    let mut text = Vec::new();
    for three in data.chunks(3) {
        let byte = |at: usize| u32::from(three.get(at).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        let digits = [18, 12, 6, 0].map(|shift| ALPHABET[(bits >> shift & 63) as usize]);
        text.extend_from_slice(&digits[..=three.len()]);
        text.resize(text.len() + 3 - three.len(), b'=');
    }
    text
}

// ---------------------------------------------------------------- how soon

/// How many times a command says what time it is, and how long it waits before each.
const STAMPS: usize = 20;
const PAUSE: Duration = Duration::from_millis(2);

/// Prints the time, again and again.
pub fn stamp() {
    let mut output = stdout();
    for _ in 0..STAMPS {
        std::thread::sleep(PAUSE);
        output.write_all(format!("{}\n", now()).as_bytes()).unwrap();
    }
}

/// Nanoseconds of the machine's clock, which every process reads alike.
#[allow(clippy::disallowed_methods)]
pub fn now() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    u64::try_from(since.unwrap().as_nanos()).unwrap()
}

/// From before a command writes until a client has it, through a shell: the command's first words,
/// and what it says later.
fn delay(plan: &Plan, client: &mut Client, table: &mut Table) {
    let program = std::env::current_exe().unwrap();
    let command = format!("'{}' stamp", program.display());
    let body = format!(r#"{{"cmd":"{command}"}}"#);
    let [mut ours, mut floor] = [(); 2].map(|()| Delays::default());
    for _ in 0..plan.samples / 20 {
        client.send("POST", "/v1/exec", body.len(), body.as_bytes());
        let mut stamps = 0;
        client.events(|event| {
            if let Some(start) = find(head_of(event), br#""data":""#) {
                let data = String::from_utf8_lossy(&event[start + 8..]);
                for stamp in data.split("\\n").filter(|part| !part.starts_with('"')) {
                    ours.push(stamps, stamp);
                    stamps += 1;
                }
            }
        });
        assert_eq!(stamps, STAMPS);

        let mut child = Command::new("/bin/sh")
            .args(["-c", &command])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut output = child.stdout.take().unwrap();
        let mut block = [0; 4096];
        let mut stamps = 0;
        loop {
            let length = output.read(&mut block).unwrap();
            if length == 0 {
                break;
            }
            let data = std::str::from_utf8(&block[..length]).unwrap();
            for stamp in data.lines() {
                floor.push(stamps, stamp);
                stamps += 1;
            }
        }
        assert!(child.wait().unwrap().success());
        assert_eq!(stamps, STAMPS);
    }
    let note = "sh through a pipe";
    let limit = Limit::AtMost(1.0, 300.0);
    let what = "output: first event after the command wrote it";
    table.times(what, &ours.first, &floor.first, limit, note);
    let what = "output: later events after the command wrote them";
    table.times(what, &ours.later, &floor.later, limit, note);
    let longest = |delays: &Delays| {
        let longest = delays
            .first
            .percentile(100)
            .max(delays.later.percentile(100));
        Figure::one(longest.as_secs_f64() * 1e6)
    };
    let what = "output: the latest of all these events, µs";
    table.row(
        what,
        longest(&ours),
        Some(longest(&floor)),
        Limit::None,
        note,
    );
}

#[derive(Default)]
struct Delays {
    first: Samples,
    later: Samples,
}

impl Delays {
    fn push(&mut self, number: usize, stamp: &str) {
        let stamp: u64 = stamp.parse().unwrap();
        let delay = Duration::from_nanos(now().saturating_sub(stamp));
        if number == 0 {
            self.first.push(delay);
        } else {
            self.later.push(delay);
        }
    }
}
