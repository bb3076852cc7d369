//! A server in host mode, and what is asked of it.

use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use super::client::Client;
use super::program::{Program, Scratch, free_port, memory_of};

pub struct Host {
    pub program: Program,
    pub homes: PathBuf,
}

impl Host {
    pub fn start(scratch: &Scratch, homes: &str, users: &str) -> Self {
        Self::start_with(scratch, homes, users, &[])
    }

    /// With these settings too.
    pub fn start_with(
        scratch: &Scratch,
        homes: &str,
        users: &str,
        settings: &[(&str, &str)],
    ) -> Self {
        let homes = scratch.path(homes);
        let port = free_port();
        let mut command = Program::server_command(port);
        command
            .env("SBX_HOST_MODE", "1")
            .env("SBX_HOMES_DIR", &homes)
            .env("SBX_UID_RANGE", users)
            .envs(settings.iter().copied());
        let program = Program::start(port, &mut command);
        program.connect().health();
        Self { program, homes }
    }

    /// The server proper: what was started is its init.
    pub fn server(&self) -> u32 {
        children_of(self.program.child.id())[0]
    }

    /// Resident, in KiB.
    pub fn memory(&self) -> u64 {
        memory_of(self.server())
    }
}

pub fn children_of(pid: u32) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    threads
        .filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("children")).ok())
        .flat_map(|children| {
            let children = children.split_ascii_whitespace();
            children
                .map(|child| child.parse().unwrap())
                .collect::<Vec<_>>()
        })
        .collect()
}

pub fn create(client: &mut Client, count: usize) -> Vec<String> {
    create_with(client, count, &format!(r#"{{"count":{count}}}"#))
}

/// As many sandboxes as the body of the request asks for.
pub fn create_with(client: &mut Client, count: usize, body: &str) -> Vec<String> {
    let reply = client.post("/v1/sandboxes", body);
    let ids: Vec<_> = reply
        .split(r#"{"id":""#)
        .skip(1)
        .map(|rest| rest.split_once('"').unwrap().0.to_owned())
        .collect();
    assert_eq!(ids.len(), count, "{reply}");
    ids
}

/// Whether this request did it.
pub fn delete(client: &mut Client, id: &str) -> bool {
    client.send("DELETE", &format!("/v1/sandboxes/{id}"), 0, b"");
    client.reply().contains(r#""deleted":true"#)
}

pub fn spawn_sleep(client: &mut Client, prefix: &str) {
    let body = r#"{"cmd":["/bin/sleep","3600"]}"#;
    let reply = client.post(&format!("{prefix}/processes"), body);
    assert!(reply.contains(r#""running":true"#), "{reply}");
}

/// Where the routes of a sandbox begin.
pub fn prefix(id: &str) -> String {
    format!("/v1/sandboxes/{id}")
}

/// What one process writes into its log, which holds no more.
pub const LOG_BYTES: usize = 4 << 20;

/// Starts a process that fills its log and goes on; a log of one that ends may be forgotten.
pub fn spawn_with_log(client: &mut Client, prefix: &str) {
    let body = format!(r#"{{"cmd":"head -c {LOG_BYTES} /dev/zero; exec sleep 3600"}}"#);
    let started = client.post(&format!("{prefix}/processes"), &body);
    let id = started.split_once(r#""id":""#).unwrap().1;
    let target = format!("{prefix}/processes/{}", id.split_once('"').unwrap().0);
    let whole = format!(r#""stdout_bytes":{LOG_BYTES},"#);
    loop {
        client.send("GET", &target, 0, b"");
        let process = client.reply();
        if process.contains(&whole) {
            return;
        }
        assert!(process.contains(r#""running":true"#), "{process}");
        thread::sleep(Duration::from_millis(1));
    }
}
