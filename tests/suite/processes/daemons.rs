//! Daemons: what a command has started and let go of ends when the command is ended by force, and not
//! before; whatever it has done to lose its parents, its session and its output.

use std::path::Path;
use std::time::Duration;

use serde_json::json;

use super::place::{Place, in_both_modes};
use crate::fixture::{Mark, PATIENCE, Server, is_alive, pid_of, wait_until};

in_both_modes!(
    a_daemon_ends_with_its_command_however_that_is_ended,
    a_daemon_that_outruns_every_look_is_caught,
    what_an_ended_command_left_behind_is_counted_and_ends_with_its_delete,
    one_that_hides_its_mark_hides_only_itself,
);

/// Commands that leave `sleep MARK` behind.
const DAEMONS: [(&str, &str); 4] = [
    ("in a session of its own", "(setsid sleep MARK &)"),
    (
        "that ignores hangups",
        "(nohup sleep MARK >/dev/null 2>&1 &)",
    ),
    (
        "orphaned twice",
        "(setsid sh -c '(setsid sh -c \"(exec setsid sleep MARK &)\" &)' &)",
    ),
    (
        "below another daemon",
        "(setsid sh -c 'sleep MARK & sleep MARK; :' &)",
    ),
];

fn a_daemon_ends_with_its_command_however_that_is_ended(place: &Place<'_>) {
    for (kind, daemon) in DAEMONS {
        for ending in ["timeout", "kill", "delete", "disconnect"] {
            let what = format!("a daemon {kind} ends by {ending}");
            let (mark, other) = (Mark::new(), Mark::new());
            let (mut lifeline, fifo) = place.lifeline(&mark.to_string());
            let daemon = |mark: &Mark| daemon.replace("MARK", &mark.to_string());
            // Of another command, which is none of this one's business.
            let bystander = place.post("processes", &json!({"cmd": daemon(&other)}));
            place.orphan(&other, pid_of(&bystander));
            let script = format!("exec 9>{fifo}; {}; exec sleep {mark}", daemon(&mark));
            let mut body = json!({"cmd": script});
            if ending == "disconnect" {
                let target = format!("{}exec", place.prefix);
                let body = body.to_string();
                let mut stream = place.server.stream("POST", &target, body.as_bytes());
                let start = stream.next().unwrap();
                place.orphan(&mark, pid_of(&start));
            } else {
                if ending == "timeout" {
                    body["timeout"] = json!(1.5);
                }
                let process = place.post("processes", &body);
                place.orphan(&mark, pid_of(&process));
                let id = process["id"].as_str().unwrap();
                match ending {
                    "kill" => {
                        place.post(&format!("processes/{id}/kill"), &json!({}));
                    }
                    "delete" => place.delete(&process),
                    _ => {}
                }
            }
            lifeline.wait_cut(&what);
            other.find(&format!("{what}, and no other does"), |pid| {
                std::fs::read(format!("/proc/{pid}/comm")).is_ok_and(|name| name == b"sleep\n")
            });
        }
    }
}

fn a_daemon_that_outruns_every_look_is_caught(place: &Place<'_>) {
    let hopping = |name: &str, mark: &Mark, timeout: f64| {
        let (lifeline, fifo) = place.lifeline(name);
        let sign = place.directory.join(format!("{name} hops"));
        let hop = place.probe(&json!([["hop", sign]]), mark);
        let script = format!("exec 9>{fifo}; (setsid sh -c '{hop}' &); sleep 3600");
        let process = place.post("processes", &json!({"cmd": script, "timeout": timeout}));
        (lifeline, sign, process)
    };
    let goes_on = |what: &str, sign: &Path| {
        // It is there or not, depending on how far the daemon has come.
        let _ = std::fs::remove_file(sign);
        wait_until(what, PATIENCE, || sign.exists());
    };
    let mark = Mark::new();
    let (mut other_lifeline, other_sign, other) = hopping("other", &mark, 3600.0);
    for ending in ["timeout", "delete"] {
        let timeout = if ending == "timeout" { 4.0 } else { 3600.0 };
        let (mut lifeline, sign, process) = hopping(ending, &mark, timeout);
        wait_until("the daemon hops", PATIENCE, || sign.exists());
        if ending == "delete" {
            place.delete(&process);
        }
        lifeline.wait_cut(ending);
        goes_on("that of another command goes on", &other_sign);
    }
    place.delete(&other);
    other_lifeline.wait_cut("the other one");
}

fn what_an_ended_command_left_behind_is_counted_and_ends_with_its_delete(place: &Place<'_>) {
    let (mark, other) = (Mark::new(), Mark::new());
    let (mut lifeline, fifo) = place.lifeline("line");
    let daemon = |mark: &Mark| format!("exec 9>{fifo}; (setsid sleep {mark} &)");
    let process = place.post("processes", &json!({"cmd": daemon(&mark)}));
    let bystander = place.post("processes", &json!({"cmd": daemon(&other)}));
    let id = process["id"].as_str().unwrap();
    wait_until("both are orphans", PATIENCE, || place.left_behind() == 2);
    let entry = format!("{}processes/{id}", place.prefix);
    // The command is reaped, but its end is known only when its output was read.
    wait_until("the end is known", PATIENCE, || {
        place.server.get(&entry).json()["reason"] == "exited"
    });
    // A signal is for the process, which has ended.
    let signalled = place.post(&format!("processes/{id}/kill"), &json!({}));
    assert_eq!(signalled["signaled"], false);
    assert_eq!((mark.pids().len(), other.pids().len()), (1, 1));
    let reply = place.server.delete(&entry);
    assert_eq!(reply.json()["killed"], false, "the process had ended");
    mark.wait_gone(PATIENCE);
    // A process that ends loses its command line before the kernel makes it a zombie, and counts until then.
    wait_until("one is counted", PATIENCE, || place.left_behind() == 1);
    assert_eq!(other.pids().len(), 1);
    place.delete(&bystander);
    lifeline.wait_cut("and so does the other");
    wait_until("none is counted", PATIENCE, || place.left_behind() == 0);
}

fn one_that_hides_its_mark_hides_only_itself(place: &Place<'_>) {
    let (hidden, plain) = (Mark::new(), Mark::new());
    let (mut lifeline, fifo) = place.lifeline("line");
    let hide = place.probe(&json!([["lower-mark", "1000000000"], ["daemon"]]), &hidden);
    let script = format!("{hide}; exec 9>{fifo}; (setsid sleep {plain} &)");
    let process = place.post("processes", &json!({"cmd": script}));
    let survivor = place.orphan(&hidden, pid_of(&process));
    place.orphan(&plain, pid_of(&process));
    place.delete(&process);
    lifeline.wait_cut("the other daemon ends");
    assert!(is_alive(survivor));
    if let Some(sandbox) = place.prefix.strip_suffix('/')
        && sandbox.contains("sandboxes")
    {
        assert_eq!(place.server.delete(sandbox).status, 200);
    } else {
        place.server.signal(nix::libc::SIGTERM);
    }
    hidden.wait_gone(Duration::from_secs(20));
}

/// Marks are no secret, and any process can take one that is lower than its own. It only harms itself,
/// and not even that where it has another user.
#[test]
fn a_neighbour_that_takes_a_commands_mark_is_not_taken_for_its_daemon() {
    if !crate::fixture::is_root() {
        crate::skip!("needs root: every sandbox has a user of its own");
    }
    let server = Server::host().start();
    let [victim, neighbour] = [server.sandbox(), server.sandbox()];
    let place = |sandbox: &crate::fixture::Sandbox<'_>| Place {
        server: &server,
        prefix: sandbox.target(""),
        directory: sandbox.home.clone(),
    };
    let (victim, neighbour) = (place(&victim), place(&neighbour));
    let mark = Mark::new();
    let process = victim.post("processes", &json!({"cmd": "sleep 3600"}));
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", pid_of(&process))).unwrap();
    let limit = limits
        .lines()
        .find_map(|line| line.strip_prefix("Max realtime timeout"))
        .and_then(|values| values.split_whitespace().next())
        .unwrap();
    let impostor = neighbour.probe(&json!([["lower-mark", limit], ["daemon"]]), &mark);
    let other = neighbour.post("processes", &json!({"cmd": impostor}));
    let impostor = neighbour.orphan(&mark, pid_of(&other));
    victim.delete(&process);
    assert!(is_alive(impostor));
}

/// Without marks, for example as a command of another server, trees are still ended.
#[test]
fn a_server_that_cannot_give_marks_ends_groups_sessions_and_descendants() {
    let server = Server::builder()
        .wrapped_in(&["prlimit", "--rttime=1000000000"])
        .start();
    let mark = Mark::new();
    let script = format!("(sleep {mark} &); setsid sleep {mark} & sleep {mark}");
    let process = server.spawn(&json!({"cmd": script}));
    mark.wait_for(3);
    let id = process["id"].as_str().unwrap();
    assert_eq!(server.delete(&format!("/v1/processes/{id}")).status, 200);
    mark.wait_gone(PATIENCE);
}
