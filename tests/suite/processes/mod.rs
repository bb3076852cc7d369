//! Background processes: the registry, the logs and everything that can be done to a process.
//!
//! The promises held here: a list that clients can rely on; logs with offsets, in which nothing is
//! missing without being said and which cost a bounded amount of memory however many processes
//! write however much; readers that cost nobody else anything; standard input of any size; kill,
//! wait and delete that mean what they say, by id or by pid.

mod daemons;
mod delete;
mod holdups;
mod logs;
mod memory;
mod place;
mod reaping;
mod registry;
mod signals;
mod stdin;

use serde_json::Value;

use crate::fixture::{EventStream, Output, Reply, Server, events_of, output_of};

/// The path of a process and what may follow it.
fn path(process: &Value, rest: &str) -> String {
    format!("/v1/processes/{}{rest}", process["id"].as_str().unwrap())
}

/// Waits for the end of a process.
#[track_caller]
fn wait(server: &Server, process: &Value) -> Value {
    let reply = server.get(&path(process, "/wait"));
    assert_eq!(reply.status, 200, "{}", reply.text());
    let ended = reply.json();
    assert_eq!(
        ended["running"], false,
        "wait without a timeout returns at the end"
    );
    ended
}

/// All events of a process's logs from the given offsets.
#[track_caller]
fn logs(server: &Server, process: &Value, query: &str) -> Vec<Value> {
    let reply = server.get(&path(process, &format!("/logs{query}")));
    assert_eq!(reply.status, 200, "{}", reply.text());
    events_of(&reply.body)
}

#[track_caller]
fn stdout_of(server: &Server, process: &Value) -> Output {
    output_of(&logs(server, process, ""), "stdout", 0)
}

fn follow(server: &Server, process: &Value) -> EventStream {
    server.stream("GET", &path(process, "/logs?follow=1"), b"")
}

fn feed(server: &Server, process: &Value, query: &str, body: &[u8]) -> Reply {
    server.request("POST", &path(process, &format!("/stdin{query}")), body)
}

/// The ids in the list, in its order.
fn listed(server: &Server) -> Vec<String> {
    let list = server.get("/v1/processes").json();
    list.as_array()
        .unwrap()
        .iter()
        .map(|entry| entry["id"].as_str().unwrap().to_owned())
        .collect()
}
