//! Files: large ones, in one stream and in ranges, and small ones one after another.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Mutex;

use super::bytes::{Expected, PATTERN};
use super::client::{BLOCK, Client, request};
use super::load::{rate, together};
use super::mover::Way;
use super::program::{Program, Scratch, free_port};
use super::report::{Figure, Limit, Samples, Table};
use super::{MIB, Plan};

/// Into how many ranges a large file is cut.
const RANGES: usize = 8;
/// The size of new files of a usual size.
const NEW_BYTES: usize = 16 * MIB;
/// What small files hold.
const SMALL_BYTES: usize = 1024;

/// Who moves a file.
enum Side {
    Server(Program),
    Nginx(Program),
    Mover(Program, Way),
}

impl Side {
    /// The server first, then the floors.
    fn all(scratch: &Scratch) -> Vec<Self> {
        let mover = || {
            let port = free_port();
            Program::own(&["move", &port.to_string()], port)
        };
        let mut all = vec![Self::Server(Program::server(free_port()))];
        all.extend(Program::nginx(free_port(), scratch).map(Self::Nginx));
        all.push(Self::Mover(mover(), Way::Kernel));
        all.push(Self::Mover(mover(), Way::Copy));
        all
    }

    fn connect(&self) -> Client {
        let (Self::Server(program) | Self::Nginx(program) | Self::Mover(program, _)) = self;
        program.connect()
    }

    fn name(&self, reads: bool) -> &'static str {
        match self {
            Self::Server(_) => "the server",
            Self::Nginx(_) => "nginx",
            Self::Mover(_, Way::Copy) => "read and write",
            Self::Mover(_, Way::Kernel) if reads => "sendfile",
            Self::Mover(_, Way::Kernel) => "splice",
        }
    }

    fn get(&self, client: &mut Client, path: &Path, whole: bool, offset: usize, length: usize) {
        let last = offset + length - 1;
        match self {
            Self::Server(_) => {
                let range = if whole {
                    String::new()
                } else {
                    format!("&offset={offset}&length={length}")
                };
                let target = format!("/v1/files/read?path={}{range}", path.display());
                client.download(&target, "", offset, length);
            }
            Self::Nginx(_) => {
                let range = if whole {
                    String::new()
                } else {
                    format!("Range: bytes={offset}-{last}\r\n")
                };
                client.download(&uri(path), &range, offset, length);
            }
            Self::Mover(_, way) => client.pull(*way, path, offset, length),
        }
    }

    fn put(&self, client: &mut Client, path: &Path, whole: bool, offset: usize, length: usize) {
        match self {
            Self::Server(_) => {
                let range = if whole {
                    String::new()
                } else {
                    format!("&offset={offset}")
                };
                let target = format!("/v1/files/write?path={}{range}", path.display());
                client.upload(&target, offset, length);
            }
            Self::Nginx(_) => client.upload(&uri(path), offset, length),
            Self::Mover(_, way) => client.push(*way, path, offset, length),
        }
    }
}

/// What nginx calls a file of the scratch directory.
fn uri(path: &Path) -> String {
    format!("/{}", path.file_name().unwrap().to_str().unwrap())
}

pub fn measure(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    let sides = Side::all(scratch);
    read(plan, &sides, scratch, table);
    write(plan, &sides, scratch, table);
    small(plan, &sides, scratch, table);
}

fn read(plan: &Plan, sides: &[Side], scratch: &Scratch, table: &mut Table) {
    let size = plan.file_bytes;
    let path = scratch.path("data");
    PATTERN.send(&mut File::create(&path).unwrap(), 0, size);
    let mut contest = Contest {
        rounds: plan.rounds,
        sides: sides.iter().collect(),
        reads: true,
        limit: Limit::AtLeast(1.0),
        table,
    };
    let row = format!("file read: {} MiB in one stream", size / MIB);
    contest.row(&row, size, |side, samples| {
        let mut client = side.connect();
        samples.time(|| side.get(&mut client, &path, true, 0, size));
    });
    let row = format!("file read: {} MiB in {RANGES} ranges", size / MIB);
    contest.row(&row, size, |side, samples| {
        in_ranges(side, size, samples, |client, offset, length| {
            side.get(client, &path, false, offset, length);
        });
    });
    fs::remove_file(&path).unwrap();
}

fn write(plan: &Plan, sides: &[Side], scratch: &Scratch, table: &mut Table) {
    let size = plan.file_bytes;
    let path = scratch.path("copy");
    let mut contest = Contest {
        rounds: plan.rounds,
        sides: sides.iter().collect(),
        reads: false,
        limit: Limit::AtLeast(0.95),
        table,
    };
    let row = format!("file write: {} MiB in one stream", size / MIB);
    contest.row(&row, size, |side, samples| {
        let mut client = side.connect();
        samples.time(|| side.put(&mut client, &path, true, 0, size));
        check_and_remove(&path, size);
    });
    let row = format!("file write: new files of {} MiB", NEW_BYTES / MIB);
    contest.row(&row, NEW_BYTES, |side, samples| {
        let mut client = side.connect();
        for _ in 0..(size / NEW_BYTES / 4).max(4) {
            samples.time(|| side.put(&mut client, &path, true, 0, NEW_BYTES));
            check_and_remove(&path, NEW_BYTES);
        }
    });
    // nginx writes no ranges.
    contest.sides.retain(|side| !matches!(side, Side::Nginx(_)));
    let row = format!("file write: {} MiB in {RANGES} ranges", size / MIB);
    contest.row(&row, size, |side, samples| {
        in_ranges(side, size, samples, |client, offset, length| {
            side.put(client, &path, false, offset, length);
        });
        check_and_remove(&path, size);
    });
}

/// The server and the floors, doing the same in turns.
struct Contest<'a> {
    rounds: usize,
    /// The server is the first.
    sides: Vec<&'a Side>,
    reads: bool,
    limit: Limit,
    table: &'a mut Table,
}

impl Contest<'_> {
    /// Puts the server beside the best of the others.
    fn row(&mut self, row: &str, size: usize, work: impl Fn(&Side, &mut Samples)) {
        let mut samples = vec![Samples::default(); self.sides.len()];
        for _ in 0..self.rounds {
            for (side, samples) in self.sides.iter().zip(&mut samples) {
                work(side, samples);
            }
        }
        let figures = samples.iter().map(|one| one.speeds(size));
        let names = self.sides.iter().map(|side| side.name(self.reads));
        let mut figures: Vec<_> = names.zip(figures).collect();
        let (_, ours) = figures.remove(0);
        figures.sort_by(|a, b| b.1.median.total_cmp(&a.1.median));
        let (best, floor) = figures.remove(0);
        let others = figures
            .iter()
            .map(|(name, figure)| format!("{name}: {:.0}", figure.median));
        let note = format!("{best} ({})", others.collect::<Vec<_>>().join(", "));
        let row = format!("{row}, MB/s");
        self.table.row(&row, ours, Some(floor), self.limit, &note);
    }
}

/// Moves all ranges of a file at once, each over a connection of its own.
fn in_ranges(
    side: &Side,
    total: usize,
    samples: &mut Samples,
    work: impl Fn(&mut Client, usize, usize) + Sync,
) {
    let clients: Vec<_> = (0..RANGES).map(|_| Mutex::new(side.connect())).collect();
    samples.time(|| {
        together(RANGES, |number| {
            let offset = number * (total / RANGES);
            let last = number + 1 == RANGES;
            let length = if last { total - offset } else { total / RANGES };
            work(&mut clients[number].lock().unwrap(), offset, length);
        });
    });
}

pub fn check_and_remove(path: &Path, size: usize) {
    let mut file = File::open(path).unwrap();
    let mut expected = Expected::new(&PATTERN, 0);
    let mut block = vec![0; BLOCK];
    loop {
        match file.read(&mut block).unwrap() {
            0 => break,
            length => expected.check(&block[..length]),
        }
    }
    assert_eq!(expected.offset, size, "bytes are missing");
    fs::remove_file(path).unwrap();
}

/// Small files over kept connections; nginx replaces them atomically too.
fn small(plan: &Plan, sides: &[Side], scratch: &Scratch, table: &mut Table) {
    let [server, nginx] = [&sides[0], &sides[1]];
    let Side::Nginx(_) = nginx else {
        return;
    };
    let content = PATTERN.at(0, SMALL_BYTES);
    for (writes, least) in [(false, 1.0), (true, 0.8)] {
        for count in [1, 8] {
            let paths: Vec<_> = (0..count)
                .map(|number| scratch.path(&format!("small-{number}")))
                .collect();
            for path in &paths {
                fs::write(path, content).unwrap();
            }
            let workers = |side: &Side| -> Vec<_> {
                paths
                    .iter()
                    .map(|path| worker(side, path, writes))
                    .collect()
            };
            let [mut ours, mut theirs] = [server, nginx].map(workers);
            let [mut rates, mut floor] = [(); 2].map(|()| Vec::new());
            for _ in 0..plan.rounds {
                rates.push(rate(&mut ours, plan.window));
                floor.push(rate(&mut theirs, plan.window));
            }
            for path in &paths {
                assert_eq!(fs::read(path).unwrap(), content);
                fs::remove_file(path).unwrap();
            }
            let what = if writes { "writes" } else { "reads" };
            let clients = if count == 1 { "client" } else { "clients" };
            let row = format!("{what} of 1 KiB a second, {count} {clients}");
            let [ours, floor] = [rates, floor].map(|rates| Figure::lowest(&rates));
            table.row(&row, ours, Some(floor), Limit::AtLeast(least), "nginx");
        }
    }
}

fn worker(side: &Side, path: &Path, writes: bool) -> impl FnMut() + Send + use<> {
    let mut client = side.connect();
    let content = PATTERN.at(0, SMALL_BYTES);
    let (method, length, body) = if writes {
        ("PUT", SMALL_BYTES, content)
    } else {
        ("GET", 0, &b""[..])
    };
    let target = match (side, writes) {
        (Side::Server(_), true) => format!("/v1/files/write?path={}", path.display()),
        (Side::Server(_), false) => format!("/v1/files/read?path={}", path.display()),
        _ => uri(path),
    };
    let request = request(method, &target, "", length, body);
    move || {
        client.stream.write_all(&request).unwrap();
        let reply = client.short_reply();
        assert!(writes || reply == content, "wrong bytes");
    }
}
