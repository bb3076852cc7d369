//! What a program finds at its start, and what its entry says.

use serde_json::{Value, json};

use super::{Place, everywhere};
use crate::fixture::{Outcome, Server};

/// What a script writes on the terminal, with the line ends of a file.
#[track_caller]
fn printed(place: &Place<'_>, body: &Value) -> String {
    let outcome = Outcome::of(place.stream("POST", "exec", body).collect());
    assert_eq!(outcome.code(), Some(0), "{outcome:?}");
    assert_eq!(outcome.stderr, "", "a terminal is one stream");
    outcome.stdout.replace("\r\n", "\n")
}

#[test]
fn all_three_descriptors_are_the_controlling_terminal_of_a_session_of_its_own() {
    everywhere(|place| {
        let script = "for n in 0 1 2; do [ -t $n ] && readlink /proc/self/fd/$n; done; tty; \
                      ps -o pid=,sid=,pgid=,tpgid= -p $$; echo here > /dev/tty; ls -ln $(tty); id -u";
        let text = printed(place, &json!({ "cmd": script, "pty": true }));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 8, "{text}");
        assert!(lines[0].starts_with("/dev/pts/"), "{text}");
        assert_eq!(lines[1..4], [lines[0]; 3], "{text}");
        let ids: Vec<&str> = lines[4].split_whitespace().collect();
        assert_eq!(
            ids, [ids[0]; 4],
            "it leads its session and is in the foreground"
        );
        assert_eq!(lines[5], "here");
        let node: Vec<&str> = lines[6].split_whitespace().collect();
        assert_eq!(node[0], "crw-------", "{text}");
        assert_eq!(
            node[2], lines[7],
            "the terminal is the command's own: {text}"
        );
    });
}

#[test]
fn the_size_and_the_type_are_as_asked() {
    everywhere(|place| {
        let show = "stty size; echo \"$TERM ${LINES-none} ${COLUMNS-none}\"";
        for (pty, expected) in [
            (json!(true), "24 80\nxterm-256color none none\n"),
            (json!({}), "24 80\nxterm-256color none none\n"),
            (json!({ "rows": 7 }), "7 80\nxterm-256color none none\n"),
            (
                json!({ "rows": 4096, "cols": 1, "term": "vt100" }),
                "4096 1\nvt100 none none\n",
            ),
        ] {
            assert_eq!(
                printed(place, &json!({ "cmd": show, "pty": pty })),
                expected
            );
        }
        let body = json!({
            "cmd": show, "pty": true, "env": { "TERM": "dumb", "LINES": "5", "COLUMNS": 9 },
        });
        assert_eq!(printed(place, &body), "24 80\ndumb 5 9\n");
        let body = json!({ "cmd": "echo ${TERM-none}", "pty": true, "env": { "TERM": null } });
        assert_eq!(printed(place, &body), "none\n");
    });
}

#[test]
fn the_servers_own_size_is_not_inherited() {
    let server = Server::builder()
        .env("LINES", 3)
        .env("COLUMNS", 4)
        .env("TERM", "dumb")
        .start();
    let show = "echo \"$TERM ${LINES-none} ${COLUMNS-none}\"";
    let with = server.exec(&json!({ "cmd": show, "pty": true }));
    assert_eq!(with.stdout, "xterm-256color none none\r\n");
    let without = server.exec(&json!({ "cmd": show }));
    assert_eq!(without.stdout, "dumb 3 4\n");
}

#[test]
fn without_a_command_there_is_a_shell() {
    everywhere(|place| {
        let screen = place.open(&json!({ "pty": true, "env": { "PS1": "$ " } }));
        screen.press("echo $((6*7)) $0; exit 3\n");
        screen.expect("42 /bin/bash\r\n");
        assert_eq!(screen.end()["exit_code"], 3);
        let reply = place.post("processes", &json!({ "pty": false }));
        assert_eq!(reply.status, 400);
        assert!(reply.text().contains("cmd is missing"), "{}", reply.text());
    });
}

#[test]
fn entries_say_what_terminal_a_process_has() {
    everywhere(|place| {
        let pty = json!({ "rows": 30, "cols": 100, "term": "screen" });
        let screen = place.open(&json!({ "cmd": ["cat"], "pty": pty, "id": "a-terminal" }));
        assert_eq!(screen.process["pty"], pty);
        assert_eq!(screen.process["background"], true);
        screen.resize(31, 101);
        let resized = json!({ "rows": 31, "cols": 101, "term": "screen" });
        assert_eq!(screen.entry()["pty"], resized);
        let pipes = place.open(&json!({ "cmd": ["cat"] }));
        assert_eq!(pipes.process["pty"], Value::Null);
        let list = place.get("processes").json();
        assert_eq!(list[0]["pty"], resized);
        assert_eq!(list[1]["pty"], Value::Null);
        assert!(list[1].as_object().unwrap().contains_key("pty"));
        assert_eq!(
            screen
                .place
                .request("DELETE", &screen.route(""), b"")
                .status,
            200
        );
    });
}

#[test]
fn an_id_stands_for_one_command_with_one_terminal() {
    everywhere(|place| {
        let body = json!({ "cmd": "printf ready; exec cat", "pty": true, "id": "editor" });
        let screen = place.open(&body);
        screen.expect("ready");
        let again = place.post("processes", &body);
        assert_eq!(again.json()["pid"], screen.process["pid"]);
        for other in [
            json!({ "cmd": "printf ready; exec cat", "id": "editor" }),
            json!({ "cmd": "printf ready; exec cat", "pty": { "rows": 25 }, "id": "editor" }),
            json!({ "cmd": "printf ready; exec cat", "pty": { "term": "dumb" }, "id": "editor" }),
        ] {
            let reply = place.post("processes", &other);
            assert_eq!(
                (reply.status, &reply.json()["code"]),
                (409, &json!("id_in_use"))
            );
        }
        // An exec attaches, from the beginning.
        let mut stream = place.stream("POST", "exec", &body);
        assert_eq!(stream.next().unwrap()["attached"], true);
        assert_eq!(stream.next_output().unwrap()["data"], "ready");
        screen.press("\u{4}");
        assert_eq!(stream.next_output().unwrap()["exit_code"], 0);
    });
}
