//! The registry: starting, listing and describing processes; ids, pids and the memory of ended ones.

use std::collections::BTreeSet;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};

use super::{follow, listed, path, wait};
use crate::fixture::{
    Mark, PATIENCE, Server, assert_error, events_of, output_of, pid_of, random_bytes, stat_of,
    wait_until,
};

fn now_ms() -> u64 {
    u64::try_from(SystemTime::UNIX_EPOCH.elapsed().unwrap().as_millis()).unwrap()
}

#[test]
fn a_start_answers_at_once_with_pid_id_and_tag() {
    let server = Server::start();
    let mark = Mark::new();
    for (route, body) in [
        (
            "/v1/processes",
            json!({"cmd": ["sleep", mark.to_string()], "tag": "web server"}),
        ),
        (
            "/v1/procs",
            json!({"cmd": ["sleep", mark.to_string()], "tag": "web server", "background": true}),
        ),
        (
            "/v1/exec",
            json!({"cmd": ["sleep", mark.to_string()], "tag": "web server", "background": true}),
        ),
    ] {
        let begin = Instant::now();
        let reply = server.post(route, &body);
        assert!(
            begin.elapsed() < Duration::from_secs(5),
            "the answer does not wait for the end"
        );
        assert_eq!(reply.status, 200, "{route}: {}", reply.text());
        assert!(
            reply
                .header("content-type")
                .unwrap()
                .starts_with("application/json"),
            "{route}"
        );
        let process = reply.json();
        assert!(
            stat_of(pid_of(&process)).is_some(),
            "{route}: the pid is alive"
        );
        let id = process["id"].as_str().unwrap();
        assert!(
            id.strip_prefix("p-")
                .unwrap()
                .bytes()
                .all(|byte| byte.is_ascii_digit()),
            "{id}"
        );
        assert_eq!(process["tag"], "web server", "{route}");
        assert_eq!(process["background"], true, "{route}");
        assert_eq!(process["running"], true, "{route}");
    }
    assert_eq!(server.spawn(&json!({"cmd": "true"}))["tag"], Value::Null);
}

#[test]
fn the_list_is_a_bare_array_oldest_first_with_everything_in_it() {
    let server = Server::start();
    let mark = Mark::new();
    assert_eq!(server.get("/v1/processes").body, b"[]\n");
    let begin = now_ms();
    let shell = format!("echo é; sleep {mark}; :");
    let argv = json!(["sh", "-c", "echo out; echo error >&2; exit 3", "\u{2028}"]);
    let running = server.spawn(&json!({"cmd": shell, "tag": "a"}));
    let finished = server.spawn(&json!({"cmd": argv}));
    let killed = server.spawn(&json!({"cmd": ["sleep", mark.to_string()], "tag": ""}));
    let end = now_ms();
    wait(&server, &finished);
    server.post(&path(&killed, "/kill"), &json!({"signal": 15}));
    wait(&server, &killed);
    wait_until("its output is in", PATIENCE, || {
        server.entry(&running["id"])["stdout_bytes"] == 3
    });

    let list = server.get("/v1/processes").json();
    let list = list.as_array().unwrap();
    assert_eq!(list.len(), 3);
    for (listed, started) in list.iter().zip([&running, &finished, &killed]) {
        assert_eq!(
            (&listed["id"], &listed["pid"]),
            (&started["id"], &started["pid"])
        );
        let started_at = listed["started_at_ms"].as_u64().unwrap();
        assert!(
            (begin..=end).contains(&started_at),
            "{started_at} is between {begin} and {end}"
        );
        for key in [
            "cmd",
            "tag",
            "running",
            "exit_code",
            "signal",
            "reason",
            "background",
            "stdout_bytes",
            "stderr_bytes",
        ] {
            assert!(listed.get(key).is_some(), "{key} is in {listed}");
        }
        assert_eq!(
            listed,
            &server.entry(&started["id"]),
            "one is like in the list"
        );
    }
    assert_eq!(
        (&list[0]["cmd"], &list[0]["tag"]),
        (&json!(shell), &json!("a")),
        "as it was sent"
    );
    assert_eq!(
        (
            &list[0]["running"],
            &list[0]["exit_code"],
            &list[0]["signal"]
        ),
        (&json!(true), &Value::Null, &Value::Null)
    );
    assert_eq!(
        (&list[0]["reason"], &list[0]["duration_ms"]),
        (&Value::Null, &Value::Null)
    );
    assert_eq!((&list[1]["cmd"], &list[1]["tag"]), (&argv, &Value::Null));
    assert_eq!(
        (
            &list[1]["running"],
            &list[1]["exit_code"],
            &list[1]["signal"]
        ),
        (&json!(false), &json!(3), &Value::Null)
    );
    assert_eq!(
        (
            &list[1]["reason"],
            &list[1]["stdout_bytes"],
            &list[1]["stderr_bytes"]
        ),
        (&json!("exited"), &json!(4), &json!(6))
    );
    assert!(list[1]["duration_ms"].is_u64());
    assert_eq!(
        (
            &list[2]["running"],
            &list[2]["exit_code"],
            &list[2]["signal"]
        ),
        (&json!(false), &Value::Null, &json!(15))
    );
    assert_eq!(
        (&list[2]["reason"], &list[2]["tag"]),
        (&json!("killed"), &json!(""))
    );
}

#[test]
fn both_route_families_are_the_same() {
    let server = Server::start();
    let mark = Mark::new();
    for (one, other) in [("processes", "procs"), ("procs", "processes")] {
        let started = server
            .post(
                &format!("/v1/{one}"),
                &json!({"cmd": format!("cat; exec sleep {mark}")}),
            )
            .json();
        let id = started["id"].as_str().unwrap();
        let at = |rest: &str| format!("/v1/{other}/{id}{rest}");
        assert_eq!(server.get(&at("")).json()["pid"], started["pid"]);
        assert_eq!(
            server.get(&format!("/v1/{other}")).json(),
            server.get(&format!("/v1/{one}")).json()
        );
        assert_eq!(
            server.request("POST", &at("/stdin?eof=1"), b"hello").json()["written"],
            5
        );
        let mut stream = server.stream("GET", &at("/logs?follow=1"), b"");
        assert_eq!(stream.next_output().unwrap()["data"], "hello");
        assert_eq!(
            server.get(&at("/wait?timeout=0.01")).json()["running"],
            true
        );
        assert_eq!(
            server.post(&at("/kill"), &json!({"signal": "TERM"})).json()["signaled"],
            true
        );
        assert_eq!(stream.next_output().unwrap()["reason"], "killed");
        assert_eq!(server.get(&at("/wait")).json()["signal"], 15);
        assert_eq!(server.delete(&at("")).json()["killed"], false);
        assert_eq!(server.get(&at("")).status, 404);
    }
}

#[test]
fn ids_are_never_used_again() {
    let server = Server::start();
    let mut seen = BTreeSet::new();
    let mut last = 0;
    for round in 0..60 {
        let process = server.spawn(&json!({"cmd": ["true"]}));
        let id = process["id"].as_str().unwrap();
        let number: u64 = id.strip_prefix("p-").unwrap().parse().unwrap();
        assert!(number > last, "{id} after p-{last}");
        last = number;
        assert!(seen.insert(id.to_owned()));
        if round % 2 == 0 {
            server.delete(&path(&process, ""));
        }
    }
}

#[test]
fn unknown_processes_are_404_and_wrong_methods_405() {
    let server = Server::start();
    server.spawn(&json!({"cmd": ["true"]}));
    for id in [
        "p-99999",
        "p-0",
        "nope",
        "4194304",
        "0",
        "-1",
        "p-",
        "p-1x",
        "P-1",
        "%2e%2e",
        "p-99999999999999999999999999",
    ] {
        for (method, rest) in [
            ("GET", ""),
            ("GET", "/logs"),
            ("GET", "/wait"),
            ("POST", "/kill"),
            ("POST", "/stdin"),
            ("DELETE", ""),
        ] {
            let reply = server.request(method, &format!("/v1/processes/{id}{rest}"), b"");
            assert_eq!(reply.status, 404, "{method} {id}{rest}: {}", reply.text());
        }
    }
    for (method, target, allowed) in [
        ("PUT", "/v1/processes", "POST"),
        ("DELETE", "/v1/processes", "POST"),
        ("POST", "/v1/processes/p-1", "DELETE"),
        ("PUT", "/v1/processes/p-1/kill", "POST"),
        ("DELETE", "/v1/processes/p-1/logs", "GET"),
        ("GET", "/v1/processes/p-1/stdin", "POST"),
        ("GET", "/v1/exec", "POST"),
    ] {
        let reply = server.request(method, target, b"");
        assert_eq!(reply.status, 405, "{method} {target}: {}", reply.text());
        assert!(
            reply.header("allow").unwrap().contains(allowed),
            "{method} {target}: {:?}",
            reply.header("allow")
        );
    }
}

#[test]
fn a_decimal_pid_stands_for_the_process() {
    let server = Server::start();
    let mark = Mark::new();
    let started = server.spawn(&json!({"cmd": format!("echo hi; exec sleep {mark}"), "tag": "t"}));
    let pid = started["pid"].to_string();
    let at = |rest: &str| format!("/v1/processes/{pid}{rest}");
    assert_eq!(server.get(&at("")).json()["id"], started["id"]);
    let mut stream = server.stream("GET", &at("/logs?follow=1"), b"");
    assert_eq!(stream.next_output().unwrap()["data"], "hi\n");
    assert_eq!(
        server.get(&at("/wait?timeout=0.01")).json()["running"],
        true
    );
    assert_eq!(
        server.post(&at("/kill"), &json!({"signal": "CONT"})).json()["signaled"],
        true
    );
    let reply = server.delete(&at(""));
    assert_eq!((reply.status, &reply.json()["killed"]), (200, &json!(true)));
    mark.wait_gone(PATIENCE);
    // A pid that is not one of the server's own processes is nobody.
    for pid in [server.pid(), std::process::id().cast_signed(), 1] {
        assert_eq!(server.delete(&format!("/v1/processes/{pid}")).status, 404);
        assert_eq!(
            server
                .post(
                    &format!("/v1/processes/{pid}/kill"),
                    &json!({"signal": "CONT"})
                )
                .status,
            404
        );
    }
    // Nor is the pid of a grandchild.
    let parent = server.spawn(&json!({"cmd": format!("sleep {mark} & echo $!; wait")}));
    let mut stream = follow(&server, &parent);
    let grandchild = stream.next_output().unwrap()["data"]
        .as_str()
        .unwrap()
        .trim()
        .to_owned();
    assert_eq!(
        server.delete(&format!("/v1/processes/{grandchild}")).status,
        404
    );
    assert_eq!(server.delete(&path(&parent, "")).json()["killed"], true);
}

#[test]
fn a_pid_still_stands_for_a_process_that_has_ended_by_itself() {
    // Old clients kill by pid, and must not get an error when the process was faster.
    let server = Server::start();
    let started = server.spawn(&json!({"cmd": "exit 3"}));
    wait(&server, &started);
    let target = format!("/v1/processes/{}", started["pid"]);
    assert_eq!(server.get(&target).json()["exit_code"], 3);
    let reply = server.delete(&target);
    assert_eq!(
        (reply.status, &reply.json()["killed"]),
        (200, &json!(false))
    );
}

#[test]
fn the_last_256_finished_processes_are_remembered_and_running_ones_always() {
    let server = Server::start();
    let mark = Mark::new();
    let oldest = server.spawn(&json!({"cmd": ["sleep", mark.to_string()]}));
    let mut ids = Vec::new();
    for round in 0..300 {
        // One kind forgets like the other.
        if round % 3 == 0 {
            let process = server.spawn(&json!({"cmd": format!("echo {round}")}));
            wait(&server, &process);
            ids.push(process["id"].as_str().unwrap().to_owned());
        } else {
            let outcome = server.exec(&json!({"cmd": format!("echo {round}")}));
            ids.push(outcome.start["id"].as_str().unwrap().to_owned());
        }
    }
    let mut expected = vec![oldest["id"].as_str().unwrap().to_owned()];
    expected.extend_from_slice(&ids[300 - 256..]);
    // Of those that end one right after the other, any may be the first that is forgotten.
    let kept = listed(&server);
    assert_eq!((kept.len(), &kept[0]), (expected.len(), &expected[0]));
    assert_eq!(kept[9..], expected[9..]);
    let forgotten = format!("/v1/processes/{}", ids[0]);
    assert_eq!(server.get(&forgotten).status, 404);
    let reply = server.delete(&forgotten);
    assert_eq!(
        (reply.status, &reply.json()["killed"]),
        (200, &json!(false)),
        "it was once there"
    );
    let remembered = server.get(&format!("/v1/processes/{}/logs", ids[44]));
    assert_eq!(
        output_of(&events_of(&remembered.body), "stdout", 0).data,
        b"44\n"
    );
    assert_eq!(server.entry(&oldest["id"])["running"], true);
}

#[test]
fn a_background_start_that_fails_leaves_nothing() {
    let server = Server::start();
    assert_error(
        &server.post("/v1/processes", &json!({"cmd": ["no-such-program-here"]})),
        400,
        "not_found",
    );
    assert_error(
        &server.post(
            "/v1/processes",
            &json!({"cmd": "true", "cwd": "/nonexistent"}),
        ),
        400,
        "bad_cwd",
    );
    assert_eq!(server.get("/v1/processes").json(), json!([]));
}

#[test]
fn a_start_under_the_same_id_happens_once_in_the_background_too() {
    let server = Server::start();
    let mark = Mark::new();
    let body = json!({"cmd": format!("echo up; exec sleep {mark}"), "id": "web"});
    let started: BTreeSet<String> = thread::scope(|scope| {
        let workers: Vec<_> = (0..16)
            .map(|_| scope.spawn(|| server.spawn(&body)["pid"].to_string()))
            .collect();
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap())
            .collect()
    });
    assert_eq!(started.len(), 1, "one pid: {started:?}");
    mark.wait_for(1);
    assert_eq!(mark.pids().len(), 1);
    assert_eq!(listed(&server), ["web"]);
    assert_error(
        &server.post("/v1/processes", &json!({"cmd": "true", "id": "web"})),
        409,
        "id_in_use",
    );
    // A client in the foreground can attach to what runs in the background.
    let mut stream = server.exec_stream(&body);
    assert_eq!(stream.next().unwrap()["attached"], true);
    assert_eq!(stream.next_output().unwrap()["data"], "up\n");
    assert_eq!(server.delete("/v1/processes/web").json()["killed"], true);
    assert_eq!(stream.next_output().unwrap()["reason"], "deleted");
}

#[test]
fn a_storm_of_everything_on_the_same_processes_breaks_nothing() {
    let server = Server::start();
    let mark = Mark::new();
    let body = |name: usize| {
        json!({"cmd": format!("cat; sleep {mark}"), "id": format!("target-{name}")}).to_string()
    };
    thread::scope(|scope| {
        for worker in 0..6_u64 {
            let (server, body) = (&server, &body);
            scope.spawn(move || {
                let mut connection = server.connect();
                for choice in random_bytes(400, worker + 1).chunks(2) {
                    let name = usize::from(choice[0] % 3);
                    let target = |rest: &str| format!("/v1/processes/target-{name}{rest}");
                    let reply = match choice[1] % 9 {
                        0 | 1 => {
                            connection.request("POST", "/v1/processes", &[], body(name).as_bytes())
                        }
                        2 => connection.request("DELETE", &target(""), &[], b""),
                        3 => connection.request(
                            "POST",
                            &target("/kill"),
                            &[],
                            b"{\"signal\": \"TERM\"}",
                        ),
                        4 => connection.request("POST", &target("/stdin"), &[], b"some input\n"),
                        5 => connection.request("POST", &target("/stdin?eof=1"), &[], b""),
                        6 => connection.request("GET", &target("/logs"), &[], b""),
                        7 => connection.request("GET", &target("/wait?timeout=0.01"), &[], b""),
                        _ => connection.request("GET", "/v1/processes", &[], b""),
                    };
                    assert!(
                        matches!(reply.status, 200 | 404 | 409),
                        "{} {}",
                        reply.status,
                        reply.text()
                    );
                }
            });
        }
    });
    for name in 0..3 {
        server.delete(&format!("/v1/processes/target-{name}"));
    }
    mark.wait_gone(PATIENCE);
    assert_eq!(listed(&server), Vec::<String>::new());
    assert_eq!(server.exec(&json!({"cmd": "echo fine"})).stdout, "fine\n");
}
