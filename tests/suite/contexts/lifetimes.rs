//! Many contexts, one after the other: nothing of them stays.

use serde_json::json;

use super::{Place, everywhere, in_parallel, needs, on_a_machine};
use crate::fixture::{
    PATIENCE, count_entries, descendants_of, descriptors_of, is_alive, memory_of, wait_until,
};

/// Makes and ends so many contexts of a language by four clients, and looks for what is left of them.
#[track_caller]
fn live(place: Place<'_>, language: &str, code: &str, count: usize) {
    let server = match place.sandbox {
        Some(_) => place.server.inner_pid(),
        None => place.server.pid(),
    };
    let run = |count: usize| {
        in_parallel(4, |client| {
            for number in 0..count / 4 {
                let made = place.make(&json!({ "language": language, "backend": "auto" }));
                let id = made["id"].as_str().unwrap();
                if number % 3 == 0 {
                    place.run(id, code).expect("completed", "kept");
                }
                if number % 5 == client {
                    place
                        .run(
                            id,
                            if language == "bash" {
                                "exit 1"
                            } else {
                                "import os; os._exit(1)"
                            },
                        )
                        .expect("died", "lost");
                }
                place.remove(id);
            }
        });
    };
    let look = || {
        let processes = descendants_of(server);
        let alive = processes
            .iter()
            .filter(|process| is_alive(process.pid))
            .count();
        (
            descriptors_of(server),
            count_entries(&format!("/proc/{server}/task")),
            alive,
        )
    };
    run(24);
    let settled = |most: (usize, usize, usize)| {
        let now = look();
        now.0 <= most.0 && now.1 <= most.1 && now.2 <= most.2
    };
    // A spare, its thread and its descriptors may be there or not.
    let first = look();
    let most = (first.0 + 8, first.1 + 4, first.2 + 1);
    let memory = memory_of(server, "VmRSS");
    run(count);
    wait_until("nothing is left", PATIENCE, || settled(most));
    let grown = memory_of(server, "VmRSS").saturating_sub(memory);
    assert!(grown < 6 << 20, "{grown} bytes");
    assert_eq!(place.document("contexts"), json!([]));
    assert_eq!(place.document("processes"), json!([]));
}

#[test]
fn three_hundred_lifetimes_leave_nothing() {
    everywhere(|place| {
        live(place, "bash", "echo hello; sleep 1000 & cd /", 260);
        needs!(place, "python");
        live(
            place,
            "python",
            "print('hello'); import threading; threading.Thread(target=print).start()",
            40,
        );
    });
}

#[test]
#[ignore = "takes minutes; scripts for CI run it"]
fn ten_thousand_lifetimes_leave_nothing() {
    on_a_machine(|place| {
        live(place, "bash", "echo hello; sleep 1000 & cd /", 9_000);
        needs!(place, "python");
        live(place, "python", "print('hello')", 1_000);
    });
}
