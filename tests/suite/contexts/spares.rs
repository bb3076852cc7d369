//! Spares: interpreters that are ready before they are asked for.

use std::fs;

use serde_json::{Value, json};

use super::{Place, everywhere, needs};
use crate::fixture::{Mark, PATIENCE, is_alive, pid_of, wait_until};

/// Makes contexts until one was a spare, and returns it.
#[track_caller]
fn make_warm(place: Place<'_>, body: &Value) -> Value {
    let mut made = Value::Null;
    wait_until("one was a spare", PATIENCE, || {
        made = place.make(body);
        if made["warm"] == false {
            place.remove(made["id"].as_str().unwrap());
        }
        made["warm"] == true
    });
    made
}

#[test]
fn a_spare_becomes_what_was_asked_for() {
    everywhere(|place| {
        for (language, seen, expected) in [
            (
                "python",
                "import os; print(os.getcwd(), os.environ['A'], os.environ.get('HOME'), __name__)",
                "/usr b None __main__\n",
            ),
            (
                "javascript",
                "console.log(process.cwd(), process.env.A, process.env.HOME, typeof require)",
                "/usr b undefined function\n",
            ),
        ] {
            needs!(place, language);
            let plain = json!({ "language": language, "id": format!("first-{language}") });
            assert_eq!(place.make(&plain)["warm"], false);
            let body = json!({
                "language": language, "cwd": "/usr", "env": { "A": "b", "HOME": null }, "tag": "t",
                "id": format!("warm-{language}")
            });
            let made = make_warm(place, &body);
            assert_eq!((&made["cwd"], &made["tag"]), (&json!("/usr"), &json!("t")));
            let ran = place.run(made["id"].as_str().unwrap(), seen);
            ran.expect("completed", "kept");
            assert_eq!(ran.text("stdout"), expected);
            assert_eq!(ran.one("start")["fresh"], true);
            assert_eq!(ran.one("start")["execution_count"], 1);
            assert_eq!(ran.one("start")["stdout_offset"], 0);
            // A restart has the same surroundings.
            place.post(&format!("contexts/warm-{language}/restart"), &json!({}));
            assert_eq!(
                place.run(&format!("warm-{language}"), seen).text("stdout"),
                expected
            );
            // What reads its surroundings when it starts is started for them.
            for name in ["PYTHONPATH", "NODE_OPTIONS", "LD_LIBRARY_PATH"] {
                let value = if name == "NODE_OPTIONS" {
                    "--no-warnings"
                } else {
                    "/usr"
                };
                let body = json!({ "language": language, "env": { name: value } });
                let made = place.make(&body);
                assert_eq!(made["warm"], false, "{name}");
                place.remove(made["id"].as_str().unwrap());
            }
            let reply = place.post(
                "contexts",
                &json!({ "language": language, "cwd": "/nowhere" }),
            );
            crate::fixture::assert_error(&reply, 400, "bad_cwd");
        }
        // Bash is quick enough without.
        for _ in 0..3 {
            assert_eq!(place.make(&json!({ "language": "bash" }))["warm"], false);
        }
    });
}

#[test]
fn a_spare_that_was_killed_is_not_given_away() {
    everywhere(|place| {
        needs!(place, "python");
        let mark = Mark::new();
        // Whatever starts in this workspace is found by its environment; a spare is what is no context.
        let first = place.python("first");
        for round in 0..5 {
            let mut spare = None;
            let mut more = 0;
            wait_until("there is a spare", PATIENCE, || {
                spare = look_for_spare(place, &[pid_of(&first)]);
                if spare.is_none() {
                    // The one before may have been killed when it had just been started, so that it still counted as
                    // one when the next was due.
                    more += 1;
                    let id = format!("more-{round}-{more}");
                    place.python(&id);
                    place.remove(&id);
                }
                spare.is_some()
            });
            let spare = spare.unwrap();
            place.post("exec", &json!({ "cmd": format!("kill -9 {spare}") }));
            let id = format!("next-{round}");
            let made = place.python(&id);
            assert_ne!(pid_of(&made), spare);
            assert_eq!(place.value(&id, "1 + 1"), "2");
            place.remove(&id);
        }
        drop(mark);
    });
}

/// The spare, once it is there: the only Python that is no context's.
#[track_caller]
fn find_spare(place: Place<'_>, contexts: &[i32]) -> i32 {
    let mut found = None;
    wait_until("there is a spare", PATIENCE, || {
        found = look_for_spare(place, contexts);
        found.is_some()
    });
    found.unwrap()
}

#[track_caller]
fn look_for_spare(place: Place<'_>, contexts: &[i32]) -> Option<i32> {
    let server = if place.sandbox.is_some() {
        place.server.inner_pid()
    } else {
        place.server.pid()
    };
    let processes = crate::fixture::descendants_of(server);
    let mut pids = processes.iter().map(|process| process.pid);
    pids.find(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.starts_with(b"python3\0") && !contexts.contains(pid)
    })
}

#[test]
fn a_spare_ends_with_its_workspace_and_counts_as_no_context() {
    everywhere(|place| {
        needs!(place, "python");
        let first = place.python("first");
        let spare = find_spare(place, &[pid_of(&first)]);
        assert_eq!(place.ids(), ["first"]);
        assert_eq!(place.document("processes"), json!([]));
        match place.sandbox {
            Some(sandbox) => {
                let reply = place
                    .server
                    .delete(&format!("/v1/sandboxes/{}", sandbox.id));
                assert_eq!(reply.status, 200);
            }
            None => place.server.signal(15),
        }
        wait_until("it is gone", PATIENCE, || !is_alive(spare));
        wait_until("it is gone too", PATIENCE, || !is_alive(pid_of(&first)));
    });
}
