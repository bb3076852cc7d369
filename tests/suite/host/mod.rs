//! Host mode: one machine, many sandboxes, from the outside.
//!
//! What a sandbox's commands can and cannot do is `walls`; here is how sandboxes are made, counted,
//! opened, used, left alone and ended. One file, one promise.

mod capacity;
mod create;
mod delete;
pub(super) mod devices;
mod ending;
mod held;
mod homes;
mod idle;
mod inside;
mod kills;
pub(super) mod lasting;
mod paths;
mod pausing;
mod requests;
mod rules;
mod starting;
mod stops;
mod tcp_ports;
mod tokens;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use serde_json::{Value, json};

use crate::fixture::{Builder, HostPlace, Sandbox, Server, TOKEN, homes_in, names_in};

/// Leaves a test that cannot run as anybody but root.
macro_rules! needs_root {
    () => {
        if !$crate::fixture::is_root() {
            $crate::skip!("needs root: every sandbox has a user of its own");
        }
    };
}
use needs_root;

/// Where sandboxes are made and listed.
const SANDBOXES: &str = "/v1/sandboxes";

/// The target of one sandbox, and what may follow it.
fn target(id: &str, rest: &str) -> String {
    format!("{SANDBOXES}/{id}{rest}")
}

/// What a server lists, by its host token.
#[track_caller]
fn list(server: &Server) -> Vec<Value> {
    let reply = server.get(SANDBOXES);
    assert_eq!(reply.status, 200, "{}", reply.text());
    serde_json::from_slice(&reply.body).expect("a bare array")
}

/// Asks for `count` sandboxes; those that were made, and how many were rejected.
#[track_caller]
fn create(server: &Server, count: u64) -> (Vec<Sandbox<'_>>, u64) {
    let reply = server.post(SANDBOXES, &json!({ "count": count }));
    assert_eq!(reply.status, 200, "{}", reply.text());
    let made = reply.json();
    let sandboxes = made["sandboxes"].as_array().unwrap();
    let sandboxes = sandboxes.iter().map(|made| Sandbox::of(server, made));
    (sandboxes.collect(), made["rejected"].as_u64().unwrap())
}

/// Makes `count` sandboxes for code that starts as many processes as it can: so many that nobody could
/// keep up with them one by one, and so few that the machine is left to others too.
#[track_caller]
fn create_for_trouble(server: &Server, count: u64) -> Vec<Sandbox<'_>> {
    let body = json!({ "count": count, "max_procs": 100 });
    let made = server.post(SANDBOXES, &body).json();
    let sandboxes = made["sandboxes"].as_array().unwrap();
    assert_eq!(sandboxes.len() as u64, count);
    let sandboxes = sandboxes.iter().map(|made| Sandbox::of(server, made));
    sandboxes.collect()
}

/// The status of a request to a server that may end before it has answered.
fn try_request(address: SocketAddr, method: &str, target: &str, body: &str) -> Option<u16> {
    let mut stream = TcpStream::connect(address).ok()?;
    let length = body.len();
    let head = format!(
        "{method} {target} HTTP/1.0\r\nX-Sandbox-Token: {TOKEN}\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    stream.write_all(head.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    answer.split(' ').nth(1)?.parse().ok()
}

/// Ends a sandbox by the host token; whether this call did it.
#[track_caller]
fn delete(server: &Server, id: &str) -> bool {
    let reply = server.delete(&target(id, ""));
    assert_eq!(reply.status, 200, "{}", reply.text());
    reply.json()["deleted"].as_bool().unwrap()
}

/// The homes that a server has.
#[track_caller]
fn homes_of(server: &Server) -> Vec<String> {
    homes_in(server.place.as_ref().unwrap().homes())
}

/// Starts where another server was, with its homes and users.
pub(super) fn in_place_of(place: &HostPlace) -> Builder {
    Server::builder()
        .env("SBX_HOST_MODE", 1)
        .env("SBX_HOMES_DIR", place.homes().display())
        .env("SBX_UID_RANGE", place.range())
}

/// The variables that a server will be started with.
fn variables(builder: &Builder) -> BTreeMap<String, String> {
    let text = |value: &std::ffi::OsStr| value.to_str().unwrap().to_owned();
    let command = builder.command();
    let set = command.get_envs();
    set.filter_map(|(name, value)| Some((text(name), text(value?))))
        .collect()
}

/// The first of the users that a server will have to itself.
pub(super) fn first_user(builder: &Builder) -> u32 {
    let range = &variables(builder)["SBX_UID_RANGE"];
    range.split_once('-').unwrap().0.parse().unwrap()
}

/// A server whose range is the first `count` of its users.
fn with_users(count: u32) -> Builder {
    let builder = Server::host();
    let first = first_user(&builder);
    builder.env("SBX_UID_RANGE", format!("{first}-{}", first + count - 1))
}
