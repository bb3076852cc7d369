//! Processes that exist: ending one beside many, ending many, listing, and waiting for a port. The floor of an end is
//! kill(2) and wait of a child beside as many; that of a list is `/health` of the same server.

use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use super::Plan;
use super::client::Client;
use super::host::{Host, create, prefix, spawn_sleep};
use super::program::{Program, Scratch, free_port};
use super::report::{Limit, Samples, Table};

/// How many there are.
const OTHERS: usize = 200;

pub fn measure(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    let server = Program::server(free_port());
    let mut client = server.connect();
    ends(plan, &mut client, table);
    waits(plan, &mut client, table);
    if super::is_root() {
        lists(plan, scratch, table);
    }
}

/// Starts a process that does nothing, and returns its id.
fn start(client: &mut Client) -> String {
    let made = client.post("/v1/processes", r#"{"cmd":["sleep","1000"]}"#);
    let made: Value = serde_json::from_str(&made).unwrap();
    made["id"].as_str().unwrap().to_owned()
}

fn child() -> Child {
    let mut sleep = Command::new("sleep");
    sleep.arg("1000").stdin(Stdio::null()).spawn().unwrap()
}

fn end(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

fn delete(client: &mut Client, id: &str) {
    client.send("DELETE", &format!("/v1/processes/{id}"), 0, b"");
    assert!(client.reply().contains("true"));
}

fn ends(plan: &Plan, client: &mut Client, table: &mut Table) {
    let [mut one, mut floor_of_one, mut all, mut floor_of_all] =
        [(); 4].map(|()| Samples::default());
    let mut others: Vec<String> = (0..OTHERS).map(|_| start(client)).collect();
    let mut children: Vec<Child> = (0..OTHERS).map(|_| child()).collect();
    for _ in 0..plan.samples.div_ceil(10) {
        let (id, own) = (start(client), child());
        // Both have begun to sleep.
        std::thread::sleep(Duration::from_millis(5));
        one.time(|| delete(client, &id));
        floor_of_one.time(|| end(own));
    }
    for round in 0..plan.rounds {
        if round > 0 {
            others = (0..OTHERS).map(|_| start(client)).collect();
            children = (0..OTHERS).map(|_| child()).collect();
        }
        all.time(|| others.iter().for_each(|id| delete(client, id)));
        floor_of_all.time(|| children.drain(..).for_each(end));
    }
    let note = "kill and wait of a child beside 200";
    let limit = Limit::AtMost(1.0, 400.0);
    let row = "ending one process beside 200 others";
    table.times(row, &one, &floor_of_one, limit, note);
    let limit = Limit::AtMost(1.0, 60_000.0);
    let row = "ending 200 processes, one after the other";
    table.times(row, &all, &floor_of_all, limit, note);
}

/// From listen(2) until the answer to a request that waits for the port.
fn waits(plan: &Plan, client: &mut Client, table: &mut Table) {
    let mut ours = Samples::default();
    for _ in 0..plan.samples.div_ceil(10) {
        let port = free_port();
        let target = format!("/v1/ports/{port}/wait");
        client.send("GET", &target, 0, b"");
        // The request has arrived, and finds nobody.
        std::thread::sleep(Duration::from_millis(20));
        let begun = Instant::now();
        let _listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
        client.reply();
        ours.push(begun.elapsed());
    }
    let row = "ports/{port}/wait, after the port listens, µs";
    table.row(row, ours.times(), None, Limit::Below(2000.0), "");
}

/// A list of one process of a sandbox.
fn lists(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    let host = Host::start(scratch, "lists", "20000-29999");
    let mut client = host.program.connect();
    let id = create(&mut client, 1).remove(0);
    spawn_sleep(&mut client, &prefix(&id));
    let target = format!("{}/processes", prefix(&id));
    let [mut ours, mut floor] = [(); 2].map(|()| Samples::default());
    for _ in 0..plan.samples {
        ours.time(|| {
            client.send("GET", &target, 0, b"");
            assert!(client.reply().contains("sleep"));
        });
        floor.time(|| client.health());
    }
    let limit = Limit::AtMost(1.3, 0.0);
    let row = "list of the processes of a sandbox, one";
    table.times(row, &ours, &floor, limit, "GET /health");
}
