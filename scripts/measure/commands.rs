//! Short commands: how long one takes, how many there are a second, and whether that depends on what
//! the server holds.

use super::MIB;
use super::Plan;
use super::client::Client;
use super::confined::{self, Floor};
use super::floors::spawn_true;
use super::host::{Host, LOG_BYTES, create, prefix, spawn_sleep, spawn_with_log};
use super::load::{rate, times};
use super::program::{Program, Scratch, free_port};
use super::report::{Figure, Limit, Samples, Table, in_turns};

/// What a full server holds.
const SANDBOXES: usize = 500;
const PROCESSES: usize = 300;
const LOGS: usize = 256 * MIB / LOG_BYTES;

pub fn measure(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    let server = Program::server(free_port());
    let mut client = server.connect();
    let [mut kept, mut fresh, mut floor] = [(); 3].map(|()| Samples::default());
    for round in 0..plan.samples + 20 {
        // The first few find cold caches.
        if round == 20 {
            [kept, fresh, floor] = [(); 3].map(|()| Samples::default());
        }
        kept.time(|| client.run_true());
        fresh.time(|| server.connect().run_true());
        floor.time(spawn_true);
    }
    let note = "posix_spawn and wait";
    let limit = Limit::AtMost(1.2, 100.0);
    table.times("/bin/true", &kept, &floor, limit, note);
    tail("/bin/true", &kept, &floor, table);
    let what = "/bin/true, a connection each";
    table.times(what, &fresh, &floor, Limit::None, note);

    at_once(plan, &server, table);
    crowd(plan, table);
    let full = Program::server(free_port());
    fill(&mut full.connect(), |_| "/v1".to_owned());
    let row = "/bin/true, 256 MiB of logs and 300 processes";
    against_empty(plan, row, [(&full, "/v1"), (&server, "/v1")], table);
    drop((full, server));
    if super::is_root() {
        in_sandboxes(plan, scratch, table);
    }
}

fn in_sandboxes(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    let empty = Host::start(scratch, "empty", "20000-29999");
    let mut client = empty.program.connect();
    let id = create(&mut client, 1).remove(0);
    let prefix_empty = prefix(&id);
    let ruleset = Floor::new(scratch).ruleset();
    let [mut ours, mut floor] = [(); 2].map(|()| Samples::default());
    for round in 0..plan.samples + 20 {
        if round == 20 {
            [ours, floor] = [(); 2].map(|()| Samples::default());
        }
        ours.time(|| client.run_true_in(&prefix_empty));
        floor.time(|| Floor::wait(Floor::start(&ruleset, &[c"/bin/true"])));
    }
    let note = "vfork, setuid, Landlock, exec and wait";
    let limit = Limit::AtMost(1.3, 100.0);
    table.times("/bin/true in a sandbox", &ours, &floor, limit, note);
    tail("/bin/true in a sandbox", &ours, &floor, table);

    let full = Host::start(scratch, "full", "30000-59999");
    let mut client = full.program.connect();
    let ids = create(&mut client, SANDBOXES);
    fill(&mut client, |number| prefix(&ids[number % SANDBOXES]));
    let row = "/bin/true in a sandbox, 256 MiB of logs, 500 sandboxes and 300 processes";
    let full_prefix = prefix(&ids[SANDBOXES / 2]);
    let sides = [
        (&full.program, full_prefix.as_str()),
        (&empty.program, prefix_empty.as_str()),
    ];
    against_empty(plan, row, sides, table);
}

/// Logs and processes, wherever `place` says.
fn fill(client: &mut Client, place: impl Fn(usize) -> String) {
    for number in 0..PROCESSES {
        if number < LOGS {
            spawn_with_log(client, &place(number));
        } else {
            spawn_sleep(client, &place(number));
        }
    }
}

/// A row for the 99th percentile, beside what it is where there is no server: the machine's part in it.
fn tail(what: &str, ours: &Samples, floor: &Samples, table: &mut Table) {
    let [ours, floor] = [ours, floor].map(|samples| {
        let [median, high] = [50, 99].map(|percent| samples.percentile(percent).as_secs_f64());
        (median * 1e6, high * 1e6)
    });
    let row = format!("{what}: its 99th percentile, µs");
    let note = format!(
        "its own median (without a server {:.2}x)",
        floor.1 / floor.0
    );
    let [median, high] = [ours.0, ours.1].map(Figure::one);
    let limit = Limit::AtMost(2.0, 0.0);
    table.row(&row, high, Some(median), limit, &note);
}

/// A full server and an empty one, in turns.
fn against_empty(plan: &Plan, row: &str, sides: [(&Program, &str); 2], table: &mut Table) {
    let mut clients = sides.map(|(program, _)| program.connect());
    let mut samples = [(); 2].map(|()| Samples::default());
    for round in 0..plan.samples + 20 {
        if round == 20 {
            samples = [(); 2].map(|()| Samples::default());
        }
        for ((client, samples), (_, prefix)) in clients.iter_mut().zip(&mut samples).zip(sides) {
            samples.time(|| client.run_true_in(prefix));
        }
    }
    let [full, empty] = &samples;
    let note = "an empty server, in turn with it";
    table.times(row, full, empty, Limit::AtMost(1.1, 0.0), note);
}

/// From several connections, each in a thread of its own.
fn at_once(plan: &Plan, server: &Program, table: &mut Table) {
    for count in [2, 8, 32] {
        let mut clients: Vec<_> = (0..count).map(|_| server.connect()).collect();
        let mut workers: Vec<_> = clients.iter_mut().map(|one| || one.run_true()).collect();
        let mut threads = vec![confined::run_true; count];
        let [mut ours, mut floor] = [(); 2].map(|()| Vec::new());
        for _ in 0..plan.rounds {
            ours.push(rate(&mut workers, plan.window));
            floor.push(rate(&mut threads, plan.window));
        }
        let [ours, floor] = [ours, floor].map(|rates| Figure::lowest(&rates));
        let row = format!("/bin/true a second, {count} connections");
        let note = "vfork, exec and wait in as many threads";
        table.row(&row, ours, Some(floor), Limit::AtLeast(0.8), note);
    }
}

/// How many commands each client runs where the slowest of all counts.
const EACH: usize = 300;

/// How long commands take that wait for each other: both sides have more of them than processors. The server leads
/// a session, as in a container: what the kernel gives a program beside its commands depends on it (sched(7), autogroup).
fn crowd(plan: &Plan, table: &mut Table) {
    const CLIENTS: usize = 8;
    let port = free_port();
    let server = Program::start(port, &mut Program::leader_command(port));
    let mut clients: Vec<_> = (0..CLIENTS).map(|_| server.connect()).collect();
    let mut workers: Vec<_> = clients.iter_mut().map(|one| || one.run_true()).collect();
    let mut threads = [confined::run_true; CLIENTS];
    let [ours, floor] = in_turns(
        plan.rounds,
        |samples| times(&mut workers, EACH, samples),
        |samples| times(&mut threads, EACH, samples),
    );
    let what = format!("/bin/true, {CLIENTS} connections at once");
    let note = "vfork, exec and wait in as many threads";
    table.times(&what, &ours, &floor, Limit::None, note);
    let rows = [(99, "99th percentile", 1.3), (100, "slowest", 2.0)];
    for (percent, name, times) in rows {
        let [ours, floor] = [&ours, &floor]
            .map(|samples| Figure::one(samples.percentile(percent).as_secs_f64() * 1e6));
        let row = format!("{what}: the {name}, µs");
        table.row(&row, ours, Some(floor), Limit::AtMost(times, 0.0), note);
    }
}
