//! Memory and threads, of the server and of what it holds.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use super::Plan;
use super::client::Client;
use super::host::{Host, create, spawn_sleep};
use super::program::{Program, Scratch, free_port, memory_of};
use super::report::{Figure, Limit, Table};

const CONNECTIONS: u64 = 200;
const PROCESSES: u64 = 100;
const SANDBOXES: usize = 500;
const STUCK: u64 = 4;

pub fn measure(_: &Plan, scratch: &Scratch, table: &mut Table) {
    let reply = scratch.reply_file();
    let programs = [
        Program::server(free_port()),
        Program::responder(free_port(), &reply),
    ];
    let idle = programs.each_ref().map(|program| {
        program.connect().health();
        settled(program.child.id())
    });
    let crowded = programs.each_ref().map(|program| {
        let mut clients: Vec<_> = (0..CONNECTIONS).map(|_| program.connect()).collect();
        clients.iter_mut().for_each(Client::health);
        settled(program.child.id())
    });
    let note = "the same with a thread a connection that does not parse";
    let [ours, floor] = idle.map(|memory| Figure::one(memory as f64));
    let what = "memory when idle, KiB";
    table.row(what, ours, Some(floor), Limit::Below(2560.0), note);
    let [ours, floor] = [0, 1].map(|side| each(idle[side], crowded[side], CONNECTIONS));
    let what = "memory of an idle connection, KiB";
    table.row(what, ours, Some(floor), Limit::Below(16.0), note);
    drop(programs);

    let server = Program::server(free_port());
    let process = server.child.id();
    let mut client = server.connect();
    // The first one makes what is there for all of them.
    spawn_sleep(&mut client, "/v1");
    let (before, threads) = (settled(process), count_threads(process));
    for _ in 0..PROCESSES {
        spawn_sleep(&mut client, "/v1");
    }
    let what = "memory of a background process without output, KiB";
    let ours = each(before, settled(process), PROCESSES);
    table.row(what, ours, None, Limit::Below(40.0), "");
    let ours = each(threads, count_threads(process), PROCESSES);
    let what = "threads of a background process";
    table.row(what, ours, None, Limit::Below(1.0), "");
    drop(server);

    stuck_clients(table);
    if super::is_root() {
        let host = Host::start(scratch, "memory", "20000-29999");
        let mut client = host.program.connect();
        let before = settled(host.server());
        create(&mut client, SANDBOXES);
        let ours = each(before, settled(host.server()), SANDBOXES as u64);
        let what = "memory of an idle sandbox, KiB";
        table.row(what, ours, None, Limit::Below(4.0), "");
    }
}

/// Clients that start a command without end and do not read.
fn stuck_clients(table: &mut Table) {
    let server = Program::server(free_port());
    let process = server.child.id();
    let mut clients: Vec<_> = (0..STUCK).map(|_| server.connect()).collect();
    clients.iter_mut().for_each(Client::run_true);
    let before = settled(process);
    for client in &mut clients {
        let body = br#"{"cmd":["/bin/cat","/dev/zero"]}"#;
        client.send("POST", "/v1/exec", body.len(), body);
    }
    let after = settled(process);
    let logs = log_memory(&server);
    let what = "memory of a client that stops reading a fast command, KiB";
    let ours = each(before, after - logs, STUCK);
    table.row(what, ours, None, Limit::Below(1024.0), "");
    let what = "its log, which has what its connection holds, KiB";
    table.row(what, each(0, logs, STUCK), None, Limit::None, "");
}

/// What the logs of all processes take, in KiB.
fn log_memory(server: &Program) -> u64 {
    let mut client = server.connect();
    client.send("GET", "/v1/metrics", 0, b"");
    let metrics = client.reply();
    let line = metrics
        .lines()
        .find_map(|line| line.strip_prefix("sbx_log_bytes "));
    line.unwrap().parse::<u64>().unwrap() / 1024
}

fn each(before: u64, after: u64, count: u64) -> Figure {
    Figure::one(after.saturating_sub(before) as f64 / count as f64)
}

/// Resident memory, in KiB, once it has stayed as it is for a while.
fn settled(process: u32) -> u64 {
    let limit = Instant::now() + Duration::from_secs(3);
    let mut memory = memory_of(process);
    let mut since = Instant::now();
    while since.elapsed() < Duration::from_millis(200) && Instant::now() < limit {
        thread::sleep(Duration::from_millis(10));
        let now = memory_of(process);
        if now != memory {
            (memory, since) = (now, Instant::now());
        }
    }
    memory
}

fn count_threads(process: u32) -> u64 {
    let threads = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    threads.count() as u64
}
