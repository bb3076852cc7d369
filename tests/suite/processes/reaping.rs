//! Children of the server that it did not start: they are reaped, and never a command in their place.

use std::thread;

use serde_json::json;

use super::place::Place;
use crate::fixture::{
    Mark, PATIENCE, Server, Stop, TempDir, all_processes, is_alive, pid_of, wait_until,
};

fn zombies_of(server: &Server) -> usize {
    let all = all_processes().into_iter();
    all.filter(|process| process.state == 'Z' && process.parent == server.pid())
        .count()
}

#[test]
fn children_that_commands_give_the_server_leave_no_zombies_and_cost_no_exit_code() {
    let server = Server::start();
    let directory = TempDir::new();
    let place = Place::machine(&server, &directory);
    let mark = Mark::new();
    let storm = place.probe(&json!([["siblings", "2000"]]), &mark);
    let orphans = "for i in 1 2 3 4 5 6 7 8; do (true & true &); done";
    let stop = Stop::default();
    thread::scope(|scope| {
        let _guard = stop.guard();
        scope.spawn(|| {
            while !stop.is_set() {
                assert_eq!(server.exec(&json!({"cmd": storm})).code(), Some(0));
                assert_eq!(server.exec(&json!({"cmd": orphans})).code(), Some(0));
            }
        });
        for round in 0..300 {
            let code = i64::from(round % 250);
            let outcome = server.exec(&json!({"cmd": format!("exit {code}")}));
            assert_eq!(outcome.code(), Some(code), "{outcome:?}");
        }
    });
    wait_until("all are reaped", PATIENCE, || zombies_of(&server) == 0);
}

#[test]
fn a_sibling_in_a_session_of_its_own_ends_with_its_command() {
    let server = Server::start();
    let directory = TempDir::new();
    let place = Place::machine(&server, &directory);
    let mark = Mark::new();
    let script = format!(
        "exec {}",
        place
            .probe(&json!([["sibling"], ["stay"]]), &mark)
            .split_once("| ")
            .unwrap()
            .1
    );
    let acts = json!([["sibling"], ["stay"]]).to_string();
    let process = server.spawn(&json!({"cmd": script, "stdin": acts}));
    let sibling = place.orphan(&mark, pid_of(&process));
    place.delete(&process);
    wait_until("it ends", PATIENCE, || !is_alive(sibling));
    wait_until("it is reaped", PATIENCE, || zombies_of(&server) == 0);
}
