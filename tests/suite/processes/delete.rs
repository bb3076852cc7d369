//! `DELETE` kills the tree, forgets the process, and reports whether this call killed it.

use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::{follow, listed, path, wait};
use crate::fixture::{Mark, PATIENCE, Server};

#[test]
fn delete_kills_the_tree_and_forgets_and_says_who_did_it() {
    let server = Server::start();
    let mark = Mark::new();
    let process = server.spawn(&json!({"cmd": format!("trap '' TERM; setsid sh -c 'sleep {mark} & sleep {mark}' & sleep {mark} & sleep {mark}; :")}));
    mark.wait_for(6);
    let mut stream = follow(&server, &process);
    let mut patient = server.connect();
    patient.send_request("GET", &path(&process, "/wait"), &[], b"");
    let reply = server.delete(&path(&process, ""));
    assert_eq!(reply.status, 200);
    assert_eq!(
        (&reply.json()["killed"], &reply.json()["id"]),
        (&json!(true), &process["id"])
    );
    mark.wait_gone(Duration::from_secs(2));
    let exit = stream.next_output().unwrap();
    assert_eq!(
        (&exit["event"], &exit["reason"], &exit["signal"]),
        (&json!("exit"), &json!("deleted"), &json!(9))
    );
    assert!(stream.next().is_none());
    // A client that waited gets the end; one that comes later finds nothing.
    let waited = patient.read_reply();
    if waited.status == 200 {
        assert_eq!(waited.json()["reason"], "deleted");
    } else {
        assert_eq!(waited.status, 404, "{}", waited.text());
    }
    assert_eq!(server.get(&path(&process, "")).status, 404, "forgotten");
    assert_eq!(listed(&server), Vec::<String>::new());
    for _ in 0..2 {
        let reply = server.delete(&path(&process, ""));
        assert_eq!(
            (reply.status, &reply.json()["killed"]),
            (200, &json!(false)),
            "once more"
        );
    }
}

#[test]
fn a_second_delete_by_pid_is_no_error() {
    // Clients before 1.32 know a process by its pid only, and may kill it twice.
    let server = Server::start();
    let mark = Mark::new();
    let running = server.spawn(&json!({"cmd": ["sleep", mark.to_string()]}));
    let ended = server.spawn(&json!({"cmd": ["true"], "id": "chosen"}));
    wait(&server, &ended);
    for (process, was_running) in [(&running, true), (&ended, false)] {
        let target = format!("/v1/processes/{}", process["pid"]);
        for killed in [was_running, false, false] {
            let reply = server.delete(&target);
            assert_eq!(reply.status, 200, "{}", reply.text());
            assert_eq!(reply.json()["killed"], killed);
        }
        assert_eq!(server.get(&target).status, 404);
    }
    assert_eq!(server.delete("/v1/processes/chosen").status, 200);
    mark.wait_gone(PATIENCE);
}

#[test]
fn delete_of_what_has_ended_forgets_it_and_killed_nothing() {
    let server = Server::start();
    let process = server.spawn(&json!({"cmd": ["true"]}));
    wait(&server, &process);
    let reply = server.delete(&path(&process, ""));
    assert_eq!(
        (reply.status, &reply.json()["killed"]),
        (200, &json!(false))
    );
    assert_eq!(server.get(&path(&process, "")).status, 404);
    // What an ended command left running is not the process any more, and lives on.
    let mark = Mark::new();
    let outcome = server.exec(&json!({"cmd": format!("sleep {mark} & echo")}));
    assert_eq!(outcome.code(), Some(0));
}

#[test]
fn of_many_deletes_one_has_killed() {
    let server = Server::start();
    let mark = Mark::new();
    for _ in 0..10 {
        let process = server.spawn(&json!({"cmd": ["sleep", mark.to_string()]}));
        let killed: usize = thread::scope(|scope| {
            let workers: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| server.delete(&path(&process, ""))))
                .collect();
            workers
                .into_iter()
                .map(|worker| worker.join().unwrap())
                .map(|reply| {
                    assert_eq!(reply.status, 200, "{}", reply.text());
                    usize::from(reply.json()["killed"] == true)
                })
                .sum()
        });
        assert_eq!(killed, 1);
    }
    mark.wait_gone(PATIENCE);
}

#[test]
fn a_foreground_command_can_be_deleted_and_its_client_is_told() {
    let server = Server::start();
    let mark = Mark::new();
    let mut stream = server.exec_stream(&json!({"cmd": ["sleep", mark.to_string()]}));
    let start = stream.next().unwrap();
    assert_eq!(server.delete(&path(&start, "")).json()["killed"], true);
    let exit = stream.next_output().unwrap();
    assert_eq!(
        (&exit["event"], &exit["reason"], &exit["signal"]),
        (&json!("exit"), &json!("deleted"), &json!(9))
    );
    assert!(stream.next().is_none());
    mark.wait_gone(PATIENCE);
}

#[test]
fn a_delete_that_meets_the_end_tells_the_truth() {
    // The race between an end by itself and a kill: whichever came first, the followed stream and
    // the answer must tell the same story. Several at once, because a delete may also come when
    // the process was reaped and what it wrote is still being read.
    let server = Server::start();
    let meet = |round: u64| {
        let process = server.spawn(&json!({"cmd": ["sleep", format!("0.0{}", round % 10)]}));
        let stream = follow(&server, &process);
        if round.is_multiple_of(2) {
            thread::sleep(Duration::from_millis(round % 20));
        }
        let killed = server.delete(&path(&process, "")).json()["killed"].clone();
        let exit = stream.last().unwrap();
        let expected = if killed == true {
            ("deleted", json!(9))
        } else {
            ("exited", Value::Null)
        };
        assert_eq!(
            (exit["reason"].as_str().unwrap(), exit["signal"].clone()),
            expected,
            "round {round}"
        );
    };
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| (0..25).for_each(meet));
        }
    });
}
