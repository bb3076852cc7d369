//! What could hold up the end of a command, or of the server: a tracer that does not wait, and a program
//! that the kernel does not give yet.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::place::{Place, in_both_modes};
use crate::fixture::{
    Mark, PATIENCE, Server, TempDir, copy_program, cpu_time_of, is_root, pid_of, status_of,
    wait_until,
};
use crate::skip;

in_both_modes!(
    a_tracer_that_never_waits_does_not_defeat_a_timeout,
    a_tracer_that_never_waits_does_not_hold_back_the_exit,
    a_leased_program_does_not_defeat_a_timeout,
);

/// Whether a process may trace another one that is not below it.
fn may_trace() -> bool {
    std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope")
        .map_or(true, |scope| scope.trim() == "0")
}

/// Time that the program as a whole may use while it has nothing to do.
const IDLE: Duration = Duration::from_millis(300);

impl Place<'_> {
    fn server_pid(&self) -> i32 {
        if self.prefix == "/v1/" {
            self.server.pid()
        } else {
            self.server.inner_pid()
        }
    }

    fn wait(&self, process: &Value, seconds: u32) -> Value {
        let id = process["id"].as_str().unwrap();
        let target = format!("{}processes/{id}/wait?timeout={seconds}", self.prefix);
        self.server.get(&target).json()
    }
}

fn a_tracer_that_never_waits_does_not_defeat_a_timeout(place: &Place<'_>) {
    if !may_trace() {
        skip!("the machine does not let processes trace their parents");
    }
    for acts in [
        json!([["seize", "$LEADER"], ["stay"]]),
        json!([["lower-mark", "1000000000"], ["seize", "$LEADER"], ["stay"]]),
        json!([
            ["lower-mark", "1000000000"],
            ["daemonize"],
            ["seize", "$LEADER"],
            ["stay"]
        ]),
    ] {
        let mark = Mark::new();
        let tracer = place.probe(&acts, &mark);
        let script = format!("export LEADER=$$; setsid sh -c '{tracer}' & exec sleep {mark}");
        for background in [true, false] {
            let begun = Instant::now();
            let body = json!({"cmd": script, "timeout": 2.5});
            let ended = if background {
                let process = place.post("processes", &body);
                wait_until("it is traced", PATIENCE, || {
                    status_of(pid_of(&process), "TracerPid") != 0
                });
                let server = place.server_pid();
                let before = cpu_time_of(server);
                let ended = place.wait(&process, 20);
                let used = cpu_time_of(server).saturating_sub(before);
                assert!(used < IDLE, "the server has used {used:?} while it waited");
                ended
            } else {
                let target = format!("{}exec", place.prefix);
                let body = body.to_string();
                let mut events = place.server.stream("POST", &target, body.as_bytes());
                events.by_ref().last().unwrap()
            };
            assert_eq!(ended["reason"], "timeout", "{acts}: {ended}");
            assert!(begun.elapsed() < Duration::from_secs(8), "{acts}");
        }
    }
}

fn a_tracer_that_never_waits_does_not_hold_back_the_exit(place: &Place<'_>) {
    if !may_trace() {
        skip!("the machine does not let processes trace their parents");
    }
    let mark = Mark::new();
    let tracer = place.probe(&json!([["seize", "$LEADER"], ["stay"]]), &mark);
    let script = format!("export LEADER=$$; setsid sh -c '{tracer}' & exec sleep 3");
    for background in [true, false] {
        let server = place.server_pid();
        let before = cpu_time_of(server);
        let body = json!({"cmd": script});
        let ended = if background {
            let process = place.post("processes", &body);
            wait_until("it is traced", PATIENCE, || {
                status_of(pid_of(&process), "TracerPid") != 0
            });
            place.wait(&process, 20)
        } else {
            let target = format!("{}exec", place.prefix);
            let body = body.to_string();
            let mut events = place.server.stream("POST", &target, body.as_bytes());
            events.by_ref().last().unwrap()
        };
        assert_eq!(ended["exit_code"], 0, "{ended}");
        let used = cpu_time_of(server).saturating_sub(before);
        assert!(used < IDLE, "the server has used {used:?} while it waited");
        // It goes with the command whose end it held up.
        mark.wait_gone(PATIENCE);
    }
}

/// A program that cannot be executed for as long as another process holds a lease on it.
fn leased(place: &Place<'_>, mark: &Mark) -> String {
    let program = place.directory.join("leased");
    let shown = program.display().to_string();
    copy_program("/bin/true", &program);
    if place.prefix != "/v1/" {
        let owner = std::fs::metadata(&place.directory).unwrap();
        let uid = std::os::unix::fs::MetadataExt::uid(&owner);
        std::os::unix::fs::chown(&program, Some(uid), Some(uid)).unwrap();
    }
    let holder = place.probe(&json!([["lease", shown], ["stay"]]), mark);
    place.post("processes", &json!({"cmd": holder}));
    let leases = || std::fs::read_to_string("/proc/locks").unwrap_or_default();
    let inode = std::os::unix::fs::MetadataExt::ino(&std::fs::metadata(&program).unwrap());
    wait_until("it has a lease", PATIENCE, || {
        leases()
            .lines()
            .any(|line| line.contains("LEASE") && line.contains(&format!(":{inode} ")))
    });
    shown
}

fn a_leased_program_does_not_defeat_a_timeout(place: &Place<'_>) {
    let mark = Mark::new();
    let program = leased(place, &mark);
    for background in [true, false] {
        let begun = Instant::now();
        let body = json!({"cmd": [program], "timeout": 1});
        let ended = if background {
            let process = place.post("processes", &body);
            place.wait(&process, 20)
        } else {
            let target = format!("{}exec", place.prefix);
            let body = body.to_string();
            let mut events = place.server.stream("POST", &target, body.as_bytes());
            let start = events.next().unwrap();
            assert_eq!(start["event"], "start");
            events.by_ref().last().unwrap()
        };
        assert_eq!(
            (&ended["timed_out"], &ended["reason"]),
            (&json!(true), &json!("timeout"))
        );
        assert!(
            begun.elapsed() < Duration::from_secs(10),
            "{:?}",
            begun.elapsed()
        );
    }
}

#[test]
fn a_start_that_hangs_does_not_hold_up_the_end_of_the_server() {
    if !is_root() {
        skip!("needs root: a lease belongs to the owner of the file");
    }
    let mut server = Server::start();
    let directory = TempDir::new();
    let place = Place::machine(&server, &directory);
    let mark = Mark::new();
    let program = leased(&place, &mark);
    let mut connection = server.connect();
    let body = json!({"cmd": [program]}).to_string();
    connection.send_request("POST", "/v1/exec", &[], body.as_bytes());
    wait_until("the start hangs", PATIENCE, || {
        std::fs::read_to_string("/proc/locks").is_ok_and(|locks| locks.contains("BREAKING"))
    });
    server.signal(nix::libc::SIGTERM);
    server.wait_for_exit(Duration::from_secs(20));
}
