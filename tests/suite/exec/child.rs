//! What a command sees around it: no descriptor, signal or setting of the server's, a session of its
//! own, and the kernel's preference when memory runs out.

use std::collections::{BTreeMap, BTreeSet};
use std::thread;

use serde_json::json;

use super::write_file;
use crate::fixture::{
    Connection, Mark, PATIENCE, Server, Stop, TempDir, numbered_text, processes_with, stat_of,
    wait_until,
};
use crate::skip;

/// Fields of `/proc/self/status` of a command.
fn status_of_a_command(server: &Server) -> BTreeMap<String, String> {
    let text = server
        .exec(&json!({"cmd": ["cat", "/proc/self/status"]}))
        .stdout;
    text.lines()
        .filter_map(|line| line.split_once(":\t"))
        .map(|(name, value)| (name.to_owned(), value.trim().to_owned()))
        .collect()
}

#[test]
fn no_signal_is_blocked_or_ignored_in_a_child() {
    let clean = Server::start();
    let odd = [
        "env",
        "--block-signal=USR1,USR2,CHLD,ALRM",
        "--ignore-signal=INT,QUIT,HUP,PIPE,CHLD,USR1",
    ];
    let works = std::process::Command::new(odd[0])
        .args(&odd[1..])
        .arg("true")
        .status()
        .is_ok_and(|status| status.success());
    if !works {
        skip!("env cannot set signal masks here");
    }
    // Inherited or of its own making: neither reaches a child, nor keeps the server from its work.
    let inherited = Server::builder().wrapped_in(&odd).start();
    for server in [clean, inherited] {
        let status = status_of_a_command(&server);
        for field in ["SigBlk", "SigIgn", "SigCgt"] {
            assert_eq!(status[field], "0000000000000000", "{field}");
        }
        assert_eq!(
            server.exec(&json!({"cmd": "exit 7"})).code(),
            Some(7),
            "the end of a child is still seen"
        );
        let exit = server.exec(&json!({"cmd": "kill -PIPE $$"})).exit;
        assert_eq!(exit["signal"], 13);
        let background = server.spawn(&json!({"cmd": "exit 8"}));
        let ended = server
            .get(&format!(
                "/v1/processes/{}/wait",
                background["id"].as_str().unwrap()
            ))
            .json();
        assert_eq!(ended["exit_code"], 8);
    }
}

#[test]
fn a_child_has_three_descriptors_and_no_more() {
    // One that the server itself was handed must not go on either.
    let wrapper = ["sh", "-c", "exec 7</etc/passwd 8>/dev/null; exec \"$0\""];
    let server = Server::builder().wrapped_in(&wrapper).start();
    let directory = TempDir::new();
    let mark = Mark::new();
    let file = write_file(&directory, "text", numbered_text(1 << 20));
    let stop = Stop::default();
    thread::scope(|scope| {
        let stopping = stop.guard();
        // Everything that opens descriptors goes on meanwhile.
        let idle: Vec<Connection> = (0..20).map(|_| server.connect()).collect();
        let sleeper = server.exec_stream(&json!({"cmd": ["sleep", mark.to_string()]}));
        for busy in 0..3 {
            let (server, stop, file, directory) = (&server, &stop, &file, &directory);
            scope.spawn(move || {
                while !stop.is_set() {
                    match busy {
                        0 => drop(server.get(&format!("/v1/files/read?path={file}"))),
                        1 => drop(server.put(
                            &format!("/v1/files/write?path={}", directory.join("new")),
                            &vec![0; 100_000],
                        )),
                        _ => drop(server.exec(&json!({"cmd": ["cat"], "stdin": "x"}))),
                    }
                }
            });
        }
        for run in 0..150 {
            // The fourth is the directory that ls itself has open.
            let body = if run % 2 == 0 {
                json!({"cmd": ["ls", "/proc/self/fd"]})
            } else {
                json!({"cmd": ["ls", "/proc/self/fd"], "stdin": "x"})
            };
            let outcome = server.exec(&body);
            assert_eq!(outcome.stdout, "0\n1\n2\n3\n", "run {run}");
        }
        let background = server.spawn(&json!({"cmd": ["sleep", mark.to_string()]}));
        // It may still be opening its libraries.
        wait_until("it has three descriptors and no more", PATIENCE, || {
            let open = std::fs::read_dir(format!("/proc/{}/fd", background["pid"])).unwrap();
            let mut names: Vec<String> = open
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            names.sort();
            names == ["0", "1", "2"]
        });
        drop((idle, sleeper, stopping));
    });
}

#[test]
fn a_child_leads_a_session_of_its_own_without_a_terminal() {
    let server = Server::start();
    let outcome = server.exec(&json!({"cmd": ["cat", "/proc/self/stat"]}));
    let fields: Vec<&str> = outcome.stdout[outcome.stdout.rfind(')').unwrap() + 2..]
        .split(' ')
        .collect();
    let pid = outcome.start["pid"].to_string();
    assert!(
        outcome.stdout.starts_with(&format!("{pid} ")),
        "the pid that was told is the process's own"
    );
    assert_eq!(
        (fields[2], fields[3]),
        (pid.as_str(), pid.as_str()),
        "group and session"
    );
    assert_eq!(fields[4], "0", "no terminal");
    let own = stat_of(server.pid()).unwrap();
    assert_ne!(own.session.to_string(), pid);
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let umask = text
        .lines()
        .find_map(|line| line.strip_prefix("Umask:\t"))
        .unwrap();
    assert_eq!(
        status_of_a_command(&server)["Umask"],
        umask,
        "as the server was started"
    );
}

#[test]
fn the_kernel_is_told_to_prefer_a_child_when_memory_runs_out() {
    let server = Server::start();
    let score = |text: &str| text.trim().parse::<i32>().unwrap();
    let own =
        score(&std::fs::read_to_string(format!("/proc/{}/oom_score_adj", server.pid())).unwrap());
    for body in [
        json!({"cmd": ["cat", "/proc/self/oom_score_adj"]}),
        json!({"cmd": "cat /proc/self/oom_score_adj"}),
    ] {
        let child = score(&server.exec(&body).stdout);
        assert!(child > own, "child {child}, server {own}");
    }
    // Also where it cannot be raised any more, or was set from outside, commands run.
    let highest = Server::builder()
        .wrapped_in(&[
            "sh",
            "-c",
            "echo 1000 > /proc/self/oom_score_adj; exec \"$0\"",
        ])
        .start();
    assert_eq!(
        highest
            .exec(&json!({"cmd": ["cat", "/proc/self/oom_score_adj"]}))
            .stdout,
        "1000\n"
    );
}

#[test]
fn a_childs_output_is_not_seen_by_another() {
    // Descriptors of one command must not leak into the next: its pipe would never end, and its
    // neighbour could write into it.
    let server = Server::start();
    let mark = Mark::new();
    thread::scope(|scope| {
        for worker in 0..4 {
            let (server, mark) = (&server, &mark);
            scope.spawn(move || {
                for run in 0..50 {
                    let outcome = server.exec(&json!({"cmd": format!("echo {worker} {run}")}));
                    assert_eq!(outcome.stdout, format!("{worker} {run}\n"));
                    let background = server.spawn(&json!({"cmd": ["sleep", mark.to_string()]}));
                    let pipes: Vec<String> = (0..3)
                        .map(|fd| {
                            std::fs::read_link(format!("/proc/{}/fd/{fd}", background["pid"]))
                                .unwrap()
                        })
                        .map(|link| link.to_str().unwrap().to_owned())
                        .collect();
                    assert_eq!(pipes.iter().collect::<BTreeSet<_>>().len(), 3, "{pipes:?}");
                    server.delete(&format!(
                        "/v1/processes/{}",
                        background["id"].as_str().unwrap()
                    ));
                }
            });
        }
    });
    mark.wait_gone(PATIENCE);
    assert_eq!(processes_with(&mark.to_string()), Vec::<i32>::new());
}
