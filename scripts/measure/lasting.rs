//! Sandboxes that last: what a record costs, how long a host takes over what the one before it had, and how long a pause and a
//! resume take. The floors are a host that keeps nothing, a host that finds nothing, and signals to as many children.

use std::process::{Child, Command, Stdio};

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;

use super::Plan;
use super::client::Client;
use super::host::{Host, create, delete, prefix, spawn_sleep};
use super::program::Scratch;
use super::report::{Limit, Samples, Table};

/// How many sandboxes are taken over.
const ADOPTED: usize = 1_000;

/// How many processes stand still.
const PROCESSES: usize = 100;

pub fn measure(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    if !super::is_root() {
        return;
    }
    records(plan, scratch, table);
    adoption(plan, scratch, table);
    standstill(plan, scratch, table);
}

fn records(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    let processor = OneProcessor::take();
    let keeping = Host::start(scratch, "keeping", "20000-29999");
    let settings = [("SBX_KEEP", "0")];
    let other = Host::start_with(scratch, "keeping-nothing", "30000-39999", &settings);
    let [mut ours, mut floor] = [(); 2].map(|()| Samples::default());
    let sides = [(&keeping, &mut ours), (&other, &mut floor)];
    let mut sides = sides.map(|(host, samples)| (host.program.connect(), samples));
    for _ in 0..plan.samples {
        for (client, samples) in &mut sides {
            let id = samples.time(|| create(client, 1).remove(0));
            assert!(delete(client, &id));
        }
    }
    drop(processor);
    let note = "a host with SBX_KEEP=0, both on one processor";
    let limit = Limit::AtMost(1.0, 25.0);
    table.times(
        "lasting: create a sandbox, with its record",
        &ours,
        &floor,
        limit,
        note,
    );
}

/// Everything that starts meanwhile runs on one processor, and this thread too. A request that wakes the server on another
/// one takes about 50 µs more, and with two servers the kernel may wake one here and one there each time.
struct OneProcessor {
    former: CpuSet,
}

impl OneProcessor {
    fn take() -> Self {
        let own = Pid::from_raw(0);
        let former = sched_getaffinity(own).unwrap();
        let mut numbers = 0..CpuSet::count();
        let first = numbers.find(|number| former.is_set(*number).unwrap());
        let mut one = CpuSet::new();
        one.set(first.unwrap()).unwrap();
        sched_setaffinity(own, &one).unwrap();
        Self { former }
    }
}

impl Drop for OneProcessor {
    fn drop(&mut self) {
        sched_setaffinity(Pid::from_raw(0), &self.former).unwrap();
    }
}

fn adoption(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    let mut ours = Samples::default();
    let mut floor = Samples::default();
    let mut host = Host::start(scratch, "adopted", "20000-29999");
    create(&mut host.program.connect(), ADOPTED);
    for _ in 0..plan.rounds {
        let server = Pid::from_raw(host.server().cast_signed());
        kill(server, Signal::SIGKILL).unwrap();
        drop(host);
        host = ours.time(|| Host::start(scratch, "adopted", "20000-29999"));
        let found = health(&mut host.program.connect());
        assert!(
            found.contains(&format!(r#""sandboxes":{ADOPTED},"#)),
            "{found}"
        );
        floor.time(|| Host::start(scratch, "empty", "30000-39999"));
    }
    let row = format!("lasting: start a host after a kill, {ADOPTED} sandboxes");
    let limit = Limit::AtMost(1.0, 300_000.0);
    table.times(&row, &ours, &floor, limit, "a host without any");
}

fn health(client: &mut Client) -> String {
    client.send("GET", "/health", 0, b"");
    client.reply()
}

fn standstill(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    let host = Host::start(scratch, "paused", "20000-29999");
    let mut client = host.program.connect();
    let id = create(&mut client, 1).remove(0);
    let route = prefix(&id);
    for _ in 0..PROCESSES {
        spawn_sleep(&mut client, &route);
    }
    let mut children: Vec<Child> = (0..PROCESSES).map(|_| sleeper()).collect();
    let [mut pause, mut resume, mut stop, mut go_on] = [(); 4].map(|()| Samples::default());
    let mut change = |act: &str, state: &str| {
        let reply = client.post(&format!("{route}/{act}"), "{}");
        assert!(reply.contains(&format!(r#""state":"{state}""#)), "{reply}");
    };
    for _ in 0..plan.samples.div_ceil(10) {
        pause.time(|| change("pause", "paused"));
        resume.time(|| change("resume", "running"));
        stop.time(|| signal(&children, Signal::SIGSTOP, WaitPidFlag::WUNTRACED));
        go_on.time(|| signal(&children, Signal::SIGCONT, WaitPidFlag::WCONTINUED));
    }
    for child in &mut children {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let limit = Limit::Below(10_000.0);
    for (act, ours, floor) in [("pause", pause, stop), ("resume", resume, go_on)] {
        let row = format!("lasting: {act} {PROCESSES} processes");
        table.times(
            &row,
            &ours,
            &floor,
            limit,
            "a signal to as many children, and wait",
        );
    }
}

fn sleeper() -> Child {
    let mut sleep = Command::new("sleep");
    sleep.arg("1000").stdin(Stdio::null()).spawn().unwrap()
}

/// Sends a signal to all children, and waits until each has done what it says.
fn signal(children: &[Child], signal: Signal, done: WaitPidFlag) {
    let pids = || {
        children
            .iter()
            .map(|child| Pid::from_raw(child.id().cast_signed()))
    };
    for pid in pids() {
        kill(pid, signal).unwrap();
    }
    for pid in pids() {
        waitpid(pid, Some(done)).unwrap();
    }
}
