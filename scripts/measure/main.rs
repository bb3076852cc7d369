//! Measures the server against floors: what the kernel alone, or a program that does nothing but
//! the work itself, needs for the same thing on the same machine in the same run.
//!
//! Run it by `scripts/bench`. It starts the real program, takes turns between it and the floor so
//! that a noisy moment hits both, checks every byte it is given, and prints a Markdown table.
//! The floors' servers are this program again, started with a mode as its first argument.

// Sizes and counts become figures for people here.
#![allow(clippy::cast_precision_loss)]

mod bytes;
mod client;
mod floors;
mod output;
mod program;
mod report;
mod sandboxes;

use std::fs::{self, File};
use std::io::Read;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use bytes::{Expected, send_pattern};
use client::{BLOCK, Client};
use floors::{move_files, respond, serve_bytes, spawn_true};
use program::{Program, SERVER, Scratch, free_port};
use report::{Figure, Limit, Samples, Table};

const MIB: usize = 1 << 20;
const USAGE: &str = "\
usage: scripts/bench                  measure everything; a few minutes
       scripts/bench --quick          the same with fewer and smaller rounds; half a minute
       scripts/bench --only NAME[,NAME...]  only these groups of rows, also with --quick
       scripts/bench --soak [CYCLES]  make and delete so many sandboxes (10,000) in one life of a server,
                                      every 100th with commands, and fail if anything is left of them";

fn main() {
    // cargo bench says --bench to whatever it runs.
    let words: Vec<String> = std::env::args()
        .skip(1)
        .filter(|word| word != "--bench")
        .collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["respond", port, reply] => respond(port.parse().unwrap(), &fs::read(reply).unwrap()),
        ["move", port] => move_files(port.parse().unwrap()),
        ["serve", port] => serve_bytes(port.parse().unwrap()),
        ["lines", count] => output::lines(count.parse().unwrap()),
        ["--soak"] => sandboxes::soak(10_000),
        ["--soak", cycles] if cycles.parse().is_ok_and(|cycles: usize| cycles > 0) => {
            sandboxes::soak(cycles.parse().unwrap());
        }
        [] => measure(&Plan::FULL, &[]),
        ["--quick"] => measure(&Plan::QUICK, &[]),
        ["--only", only] => measure(&Plan::FULL, &groups(only)),
        ["--quick", "--only", only] | ["--only", only, "--quick"] => {
            measure(&Plan::QUICK, &groups(only));
        }
        ["--help"] => println!("{}", usage()),
        _ => give_up(),
    }
}

fn usage() -> String {
    format!(
        "{USAGE}\ngroups: {}",
        GROUPS.map(|(name, _)| name).join(" ")
    )
}

fn give_up() -> ! {
    eprintln!("{}", usage());
    std::process::exit(2);
}

/// The groups that a list with commas names.
fn groups(list: &str) -> Vec<&str> {
    let names: Vec<_> = list.split(',').collect();
    let known = |name: &&str| GROUPS.iter().any(|(group, _)| group == name);
    if !names.iter().all(known) {
        give_up();
    }
    names
}

/// How much is measured.
struct Plan {
    starts: usize,
    commands: usize,
    output_rounds: usize,
    output_bytes: usize,
    file_rounds: usize,
    file_bytes: usize,
    health_rounds: usize,
    health_time: Duration,
}

impl Plan {
    const FULL: Self = Self {
        starts: 200,
        commands: 2000,
        output_rounds: 7,
        output_bytes: 512 * MIB,
        file_rounds: 7,
        file_bytes: 1024 * MIB,
        health_rounds: 7,
        health_time: Duration::from_secs(2),
    };
    const QUICK: Self = Self {
        starts: 20,
        commands: 200,
        output_rounds: 3,
        output_bytes: 64 * MIB,
        file_rounds: 3,
        file_bytes: 128 * MIB,
        health_rounds: 3,
        health_time: Duration::from_millis(500),
    };
}

type Group = fn(&Plan, &Scratch, &mut Table);

/// What can be measured by itself, in the order of the table.
const GROUPS: [(&str, Group); 9] = [
    ("start", measure_start),
    ("commands", measure_commands),
    ("output", output::measure),
    ("files", measure_files),
    ("proxy", measure_proxy),
    ("health", measure_health),
    ("memory", measure_memory),
    ("sandboxes", sandboxes::measure),
    ("size", measure_size),
];

fn measure(plan: &Plan, only: &[&str]) {
    let scratch = Scratch::new();
    let mut table = Table::new();
    for (name, group) in GROUPS {
        if !only.is_empty() && !only.contains(&name) {
            continue;
        }
        // A byte that is wrong or missing panics: the group's figures are then worth nothing.
        let measured = catch_unwind(AssertUnwindSafe(|| group(plan, &scratch, &mut table)));
        if measured.is_err() {
            table.void(name);
        }
    }
    if !table.print() {
        std::process::exit(1);
    }
}

// ---------------------------------------------------------------- the measurements

fn measure_start(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    let reply = scratch.reply_file();
    let mut ours = Samples::default();
    let mut floor = Samples::default();
    for _ in 0..plan.starts {
        ours.push(time_start(Program::server));
        floor.push(time_start(|port| Program::responder(port, &reply)));
    }
    table.times(
        "start to first /health",
        &ours,
        &floor,
        Limit::AtMost(1.5, 0.0),
        "a server that answers anything with one string",
    );
}

/// From before the program is started until it has answered.
fn time_start(program: impl FnOnce(u16) -> Program) -> Duration {
    let port = free_port();
    let start = Instant::now();
    let program = program(port);
    let mut client = program.connect();
    client.health();
    start.elapsed()
}

fn measure_commands(plan: &Plan, _: &Scratch, table: &mut Table) {
    let server = Program::server(free_port());
    let mut client = server.connect();
    // The first few find cold caches.
    for _ in 0..20 {
        client.run_true();
        spawn_true();
    }
    let mut kept = Samples::default();
    let mut fresh = Samples::default();
    let mut floor = Samples::default();
    for _ in 0..plan.commands {
        kept.time(|| client.run_true());
        fresh.time(|| server.connect().run_true());
        floor.time(spawn_true);
    }
    let what = "posix_spawn and wait of the same program";
    let limit = Limit::AtMost(1.2, 100.0);
    table.times("/bin/true, kept connection", &kept, &floor, limit, what);
    table.times(
        "/bin/true, a connection each",
        &fresh,
        &floor,
        Limit::None,
        what,
    );

    // The same with 256 MiB of logs in memory; of processes that go on, since others are forgotten.
    let program = std::env::current_exe().unwrap();
    let size = 4 * MIB;
    let script = r#"\"$0\" lines \"$1\"; exec sleep 3600"#;
    let body = format!(
        r#"{{"cmd":["/bin/sh","-c","{script}","{}","{size}"]}}"#,
        program.display()
    );
    for _ in 0..64 {
        client.send("POST", "/v1/processes", body.len(), body.as_bytes());
        let started = client.reply();
        let id = started.split_once(r#""id":""#).unwrap().1;
        let target = format!("/v1/processes/{}", id.split_once('"').unwrap().0);
        let whole = format!(r#""stdout_bytes":{size},"#);
        loop {
            client.send("GET", &target, 0, b"");
            let process = client.reply();
            if process.contains(&whole) {
                break;
            }
            assert!(process.contains(r#""running":true"#), "{process}");
            thread::sleep(Duration::from_millis(1));
        }
    }
    let mut grown = Samples::default();
    for _ in 0..plan.commands {
        grown.time(|| client.run_true());
    }
    let memory = server.memory() / 1024;
    let row = format!("/bin/true, the server holding {memory} MiB");
    table.times(
        &row,
        &grown,
        &kept,
        Limit::AtMost(1.1, 0.0),
        "itself when empty",
    );
}

fn measure_files(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    let size = plan.file_bytes;
    let path = scratch.path("data");
    let mut file = File::create(&path).unwrap();
    send_pattern(&mut file, size);
    drop(file);

    let server = Program::server(free_port());
    let nginx = Program::nginx(free_port(), scratch);
    let mover = Program::mover(free_port());
    let mut client = server.connect();

    let [mut ours, mut floor] = [(); 2].map(|()| Samples::default());
    let mut theirs = None::<Samples>;
    for _ in 0..plan.file_rounds {
        ours.time(|| client.download(&format!("/v1/files/read?path={}", path.display()), size));
        if let Some(nginx) = &nginx {
            theirs
                .get_or_insert_default()
                .time(|| nginx.connect().download("/data", size));
        }
        floor.time(|| mover.connect().pull(&path, size));
    }
    let row = format!("read a file of {} MiB", size / MIB);
    speeds(table, &row, size, &ours, theirs.as_ref(), "nginx, sendfile");
    speeds(
        table,
        &row,
        size,
        &ours,
        Some(&floor),
        "a loop of read and write",
    );

    let copy = scratch.path("copy");
    let [mut ours, mut floor] = [(); 2].map(|()| Samples::default());
    let mut theirs = None::<Samples>;
    for _ in 0..plan.file_rounds {
        ours.time(|| client.upload(&format!("/v1/files/write?path={}", copy.display()), size));
        check_and_remove(&copy, size);
        if let Some(nginx) = &nginx {
            theirs
                .get_or_insert_default()
                .time(|| nginx.connect().upload("/copy", size));
            check_and_remove(&copy, size);
        }
        floor.time(|| mover.connect().push(&copy, size));
        check_and_remove(&copy, size);
    }
    let row = format!("write a file of {} MiB", size / MIB);
    speeds(table, &row, size, &ours, theirs.as_ref(), "nginx, PUT");
    speeds(
        table,
        &row,
        size,
        &ours,
        Some(&floor),
        "a loop of read and write",
    );
}

/// A server inside, through the port proxy and directly. What is between the two is one more process
/// through which every byte goes: half the speed is what copying alone would leave on two processors.
fn measure_proxy(plan: &Plan, _: &Scratch, table: &mut Table) {
    let size = plan.file_bytes;
    let server = Program::server(free_port());
    let inside = Program::bytes(free_port());
    let target = format!("/{size}");
    let proxied = format!("/v1/proxy/{}{target}", inside.port);
    drop(inside.connect());
    let mut client = server.connect();
    let [mut down, mut up, mut direct_down, mut direct_up] = [(); 4].map(|()| Samples::default());
    for _ in 0..plan.file_rounds {
        down.time(|| client.download(&proxied, size));
        direct_down.time(|| inside.connect().download(&target, size));
        up.time(|| client.upload(&proxied, size));
        direct_up.time(|| inside.connect().upload(&target, size));
    }
    let row = format!("through the port proxy, download of {} MiB", size / MIB);
    speeds(table, &row, size, &down, Some(&direct_down), "without it");
    let row = format!("through the port proxy, upload of {} MiB", size / MIB);
    speeds(table, &row, size, &up, Some(&direct_up), "without it");
}

fn speeds(
    table: &mut Table,
    what: &str,
    size: usize,
    ours: &Samples,
    floor: Option<&Samples>,
    note: &str,
) {
    let [ours, floor] = [Some(ours), floor].map(|samples| Some(samples?.speeds(size)));
    table.row(
        &format!("{what}, MB/s"),
        ours.unwrap(),
        floor,
        Limit::None,
        note,
    );
}

fn check_and_remove(path: &Path, size: usize) {
    let mut file = File::open(path).unwrap();
    let mut expected = Expected::pattern();
    let mut block = vec![0; BLOCK];
    loop {
        match file.read(&mut block).unwrap() {
            0 => break,
            length => expected.check(&block[..length]),
        }
    }
    assert_eq!(expected.seen, size);
    fs::remove_file(path).unwrap();
}

const LOAD_CONNECTIONS: usize = 32;

fn measure_health(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    let server = Program::server(free_port());
    let responder = Program::responder(free_port(), &scratch.reply_file());
    let [mut rate, mut floor_rate] = [(); 2].map(|()| Vec::new());
    let [mut times, mut floor_times] = [(); 2].map(|()| Samples::default());
    for _ in 0..plan.health_rounds {
        rate.push(load(&server, plan.health_time, &mut times));
        floor_rate.push(load(&responder, plan.health_time, &mut floor_times));
    }
    let note = "a thread a connection that does not parse";
    let row = format!("/health a second, {LOAD_CONNECTIONS} connections");
    let limit = Limit::AtLeast(0.75);
    table.row(
        &row,
        Figure::lowest(&rate),
        Some(Figure::lowest(&floor_rate)),
        limit,
        note,
    );
    let row = format!("one of these, {LOAD_CONNECTIONS} at a time");
    table.times(&row, &times, &floor_times, Limit::None, note);
}

/// Keeps one request under way on each of many connections. Returns the requests a second.
fn load(program: &Program, time: Duration, samples: &mut Samples) -> f64 {
    let epoll = Epoll::new(EpollCreateFlags::empty()).unwrap();
    let mut clients: Vec<_> = (0..LOAD_CONNECTIONS)
        .map(|number| {
            let client = program.connect();
            let event = EpollEvent::new(EpollFlags::EPOLLIN, number as u64);
            epoll.add(client.stream.as_fd(), event).unwrap();
            (client, Instant::now())
        })
        .collect();
    for (client, sent) in &mut clients {
        client.send("GET", "/health", 0, b"");
        *sent = Instant::now();
    }
    let start = Instant::now();
    let mut count = 0_u32;
    let mut events = [EpollEvent::empty(); LOAD_CONNECTIONS];
    while start.elapsed() < time {
        let ready = epoll.wait(&mut events, EpollTimeout::NONE).unwrap();
        for event in &events[..ready] {
            let (client, sent) = &mut clients[usize::try_from(event.data()).unwrap()];
            let reply = client.reply();
            assert!(reply.contains(r#""status":"ok""#), "{reply}");
            samples.push(sent.elapsed());
            *sent = Instant::now();
            client.send("GET", "/health", 0, b"");
            count += 1;
        }
    }
    f64::from(count) / start.elapsed().as_secs_f64()
}

const IDLE_CONNECTIONS: u64 = 200;

fn measure_memory(_: &Plan, scratch: &Scratch, table: &mut Table) {
    let note = "the same with a thread a connection that does not parse";
    let reply = scratch.reply_file();
    let programs = [
        Program::server(free_port()),
        Program::responder(free_port(), &reply),
    ];
    let idle = programs.each_ref().map(|program| {
        program.connect().health();
        program.memory()
    });
    let crowded = programs.each_ref().map(|program| {
        let mut clients: Vec<_> = (0..IDLE_CONNECTIONS).map(|_| program.connect()).collect();
        clients.iter_mut().for_each(Client::health);
        program.memory()
    });
    let kib = |memory: u64| Figure::one(memory as f64);
    let [ours, floor] = idle.map(kib);
    table.row(
        "memory when idle, KiB",
        ours,
        Some(floor),
        Limit::Below(1024.0),
        note,
    );
    let each = |side: usize| {
        let more = crowded[side].saturating_sub(idle[side]);
        Figure::one(more as f64 / IDLE_CONNECTIONS as f64)
    };
    let what = "memory of one idle connection, KiB";
    table.row(what, each(0), Some(each(1)), Limit::Below(16.0), note);
}

fn measure_size(_: &Plan, _: &Scratch, table: &mut Table) {
    let size = fs::metadata(SERVER).unwrap().len();
    table.row(
        "size of the program, KiB",
        Figure::one(size as f64 / 1024.0),
        None,
        Limit::Below(800.0),
        "",
    );
}
