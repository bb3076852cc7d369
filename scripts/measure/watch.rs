//! From before a file is changed until who watches its directory is told. The floor is inotify, read
//! directly.

use std::fs;

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

use super::Plan;
use super::client::{Framing, find};
use super::program::{Program, Scratch, free_port};
use super::report::{Limit, Table, in_turns};

pub fn measure(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    let server = Program::server(free_port());
    let mut client = server.connect();
    let [watched, floor_watched] = ["watched", "read"].map(|name| scratch.path(name));
    for directory in [&watched, &floor_watched] {
        fs::create_dir(directory).unwrap();
        fs::write(directory.join("file"), "").unwrap();
    }
    let target = format!("/v1/files/watch?path={}&recursive=1", watched.display());
    client.send("GET", &target, 0, b"");
    assert!(matches!(client.head(), Framing::Chunked));
    // Each event is a chunk.
    let mut wait_for = |event: &[u8]| {
        while find(client.rest(), event).is_none() {
            client.fill();
        }
        let length = client.rest().len();
        client.take(length, |_| ());
    };
    wait_for(b"watching");
    let inotify = Inotify::init(InitFlags::IN_CLOEXEC).unwrap();
    let flags = AddWatchFlags::IN_CLOSE_WRITE;
    inotify.add_watch(&floor_watched, flags).unwrap();
    let [ours, floor] = in_turns(
        plan.samples,
        |samples| {
            samples.time(|| {
                fs::write(watched.join("file"), "changed").unwrap();
                wait_for(br#""event":"modified""#);
            });
        },
        |samples| {
            samples.time(|| {
                fs::write(floor_watched.join("file"), "changed").unwrap();
                inotify.read_events().unwrap();
            });
        },
    );
    let note = "inotify read directly";
    let limit = Limit::AtMost(1.0, 300.0);
    table.times("watch: change to event", &ours, &floor, limit, note);
}
