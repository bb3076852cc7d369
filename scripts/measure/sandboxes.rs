//! What sandboxes cost, in an empty host and in a full one.

use std::fs::File;
use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::Plan;
use super::client::Client;
use super::confined::{Floor, make_namespaces};
use super::host::{Host, create, create_with, delete, prefix, spawn_sleep};
use super::program::Scratch;
use super::report::{Figure, Limit, Samples, Table};

/// How many are alive when the machine is said to be full, and how many processes run in them.
const MANY: usize = 500;
const PROCESSES: usize = 1_000;

/// How many clients make, use and delete sandboxes at once.
const CLIENTS: usize = 32;

/// Measures everything about sandboxes; without root there are none.
pub fn measure(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    if !super::is_root() {
        return;
    }
    let floor = Floor::new(scratch);
    let empty = Host::start(scratch, "empty", "20000-29999");
    let mut client = empty.program.connect();
    let [ours, floors] = lives(plan, [&mut client], &floor);
    each(&ours, &floors, "", table);
    bulk(plan, &empty, table);
    namespaces(plan, &mut client, table);

    let full = Host::start(scratch, "full", "30000-59999");
    let mut full_client = full.program.connect();
    let others = create(&mut full_client, MANY);
    for number in 0..PROCESSES {
        spawn_sleep(&mut full_client, &prefix(&others[number % MANY]));
    }
    let [ours, alone, floors] = lives(plan, [&mut full_client, &mut client], &floor);
    let when = format!(", {MANY} others and {PROCESSES} processes");
    each(&ours, &floors, &when, table);
    for (what, full, empty) in [
        ("create", &ours.create, &alone.create),
        ("delete", &ours.delete, &alone.delete),
    ] {
        let what = format!("sandbox: {what}, full host against empty");
        let limit = Limit::AtMost(1.1, 0.0);
        table.times(&what, full, empty, limit, "an empty host, in turn with it");
    }
    drop((empty, full));
    watchdog(plan, scratch, table);
}

/// How many sandboxes have a limit on their memory while it is watched, and how many processes run in all of them.
const WATCHED: usize = 50;

/// The limit of those whose figure is taken exactly, in MiB, and what the machine holds of shared memory then.
const SMALL: usize = 64;

/// What the watchdog of memory takes of one processor, where no cgroup keeps the limits: while no sandbox can be above
/// its limit, and while each could, because the machine holds more shared memory than that.
fn watchdog(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    for (megabytes, when, limit) in [(1 << 20, "", 3.0), (SMALL, ", exactly", 6.0)] {
        let host = Host::start(scratch, "watched", "20000-29999");
        let mut client = host.program.connect();
        let body = format!(r#"{{"count":{WATCHED},"max_total_mem_mb":{megabytes}}}"#);
        let sandboxes = create_with(&mut client, WATCHED, &body);
        for number in 0..PROCESSES {
            let at = number % WATCHED;
            spawn_sleep(&mut client, &prefix(&sandboxes[at]));
        }
        let time = || watchdog_time(host.server());
        let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
        let mut shared = File::from(nix::sys::memfd::memfd_create(c"", flags).unwrap());
        shared.write_all(&vec![1; SMALL << 20]).unwrap();
        // It begins to run within a second; with cgroups there is none.
        std::thread::sleep(Duration::from_secs(2));
        let Some(before) = time() else {
            return;
        };
        let window = plan.window.max(Duration::from_secs(1)) * 5;
        std::thread::sleep(window);
        let taken = time().unwrap().saturating_sub(before);
        let part = Figure::one(taken.as_secs_f64() / window.as_secs_f64() * 100.0);
        let row = format!(
            "sandbox: watching the memory of {WATCHED} with {PROCESSES} processes{when}, % of a processor"
        );
        table.row(&row, part, None, Limit::Below(limit), "");
    }
}

/// The processor time of the thread that watches memory.
fn watchdog_time(server: u32) -> Option<Duration> {
    let threads = std::fs::read_dir(format!("/proc/{server}/task")).ok()?;
    let mut threads = threads.filter_map(|thread| Some(thread.ok()?.path()));
    let thread = threads.find(|thread| {
        let name = std::fs::read_to_string(thread.join("comm")).unwrap_or_default();
        name.trim() == "watchdog"
    });
    let times = std::fs::read_to_string(thread?.join("schedstat")).ok()?;
    let nanoseconds = times.split_ascii_whitespace().next()?.parse().ok()?;
    Some(Duration::from_nanos(nanoseconds))
}

/// What a sandbox goes through.
#[derive(Default)]
struct Life {
    create: Samples,
    delete: Samples,
}

/// Makes, uses and deletes sandboxes, one after another over kept connections: at each server in turn,
/// and last without one.
fn lives<const SERVERS: usize, const SIDES: usize>(
    plan: &Plan,
    mut clients: [&mut Client; SERVERS],
    floor: &Floor,
) -> [Life; SIDES] {
    let mut sides = [(); SIDES].map(|()| Life::default());
    let warm_up = 10;
    for round in 0..plan.samples / 4 + warm_up {
        if round == warm_up {
            sides = [(); SIDES].map(|()| Life::default());
        }
        for (client, life) in clients.iter_mut().zip(&mut sides) {
            let id = life.create.time(|| create(client, 1).remove(0));
            spawn_sleep(client, &prefix(&id));
            let deleted = life.delete.time(|| delete(client, &id));
            assert!(deleted);
        }
        let life = &mut sides[SERVERS];
        let ruleset = life.create.time(|| {
            floor.make_home();
            floor.ruleset()
        });
        let sleeper = Floor::start(&ruleset, &[c"/bin/sleep", c"3600"]);
        life.delete.time(|| floor.end(sleeper));
    }
    sides
}

fn each(ours: &Life, floor: &Life, when: &str, table: &mut Table) {
    let note = "mkdir, chown and a ruleset";
    let row = format!("sandbox: create{when}");
    let limit = Limit::AtMost(2.5, 0.0);
    table.times(&row, &ours.create, &floor.create, limit, note);
    let note = "kill by user, wait, and rmdir";
    let row = format!("sandbox: delete with a process{when}");
    let limit = Limit::AtMost(2.0, 0.0);
    table.times(&row, &ours.delete, &floor.delete, limit, note);
}

/// Sandboxes with namespaces, in turn with others.
fn namespaces(plan: &Plan, client: &mut Client, table: &mut Table) {
    client.send("GET", "/health", 0, b"");
    if !client.reply().contains(r#""namespaces""#) {
        table.void("sandboxes with namespaces");
        return;
    }
    let [
        mut made,
        mut floor,
        mut commands,
        mut usual,
        mut deleted,
        mut usually_deleted,
    ] = [(); 6].map(|()| Samples::default());
    for _ in 0..plan.samples / 8 {
        let body = r#"{"isolation":"namespaces","network":"blocked"}"#;
        let own = made.time(|| create_with(client, 1, body).remove(0));
        floor.time(make_namespaces);
        let other = create_with(client, 1, r#"{"count":1,"network":"blocked"}"#).remove(0);
        for _ in 0..8 {
            commands.time(|| client.run_true_in(&prefix(&own)));
            usual.time(|| client.run_true_in(&prefix(&other)));
        }
        assert!(deleted.time(|| delete(client, &own)));
        assert!(usually_deleted.time(|| delete(client, &other)));
    }
    let row = "sandbox with namespaces: create";
    let note = "a process in the same namespaces, empty";
    table.times(row, &made, &floor, Limit::Below(4000.0), note);
    let row = "sandbox with namespaces: /bin/true";
    let limit = Limit::AtMost(1.1, 0.0);
    let note = "a sandbox without, in turn with it";
    table.times(row, &commands, &usual, limit, note);
    let row = "sandbox with namespaces: delete";
    table.times(row, &deleted, &usually_deleted, Limit::None, note);
}

/// Many of them, from many clients, against the same from one.
fn bulk(plan: &Plan, host: &Host, table: &mut Table) {
    let life = |client: &mut Client| {
        let id = create(client, 1).remove(0);
        client.run_true_in(&prefix(&id));
        assert!(delete(client, &id));
    };
    let mut clients: Vec<_> = (0..CLIENTS).map(|_| host.program.connect()).collect();
    let [mut together, mut one_by_one] = [(); 2].map(|()| Vec::new());
    for _ in 0..plan.rounds.div_ceil(2) {
        let begun = Instant::now();
        for _ in 0..MANY {
            life(&mut clients[0]);
        }
        one_by_one.push(begun.elapsed().as_secs_f64() * 1e3);

        let left = AtomicUsize::new(MANY);
        let take = || {
            let less = |left: usize| left.checked_sub(1);
            left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less)
                .is_ok()
        };
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for client in &mut clients {
                scope.spawn(|| {
                    while take() {
                        life(client);
                    }
                });
            }
        });
        together.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    let [ours, floor] = [together, one_by_one].map(|times| Figure::highest(&times));
    let row = format!("sandbox: {MANY} x create, /bin/true, delete by {CLIENTS} clients, ms");
    let note = "the same one by one";
    table.row(&row, ours, Some(floor), Limit::AtMost(0.45, 0.0), note);
}
