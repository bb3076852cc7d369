//! What the server knows of a sandbox, as lines.

use serde_json::{Value, json};

use super::{Door, api, everywhere, on_a_host};
use crate::fixture::{PATIENCE, wait_until};

/// The lines since a time: each with its time, its logger and its message.
#[track_caller]
fn lines(door: &Door<'_>, query: &str) -> Vec<(i64, String)> {
    let target = format!("/sandboxes/{}/logs{query}", door.id);
    let reply = api(door.server, "GET", &target, &Value::Null);
    assert_eq!(reply.status, 200, "{}", reply.text());
    let document = reply.json();
    let line = |entry: &Value| {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let line: Value = serde_json::from_str(&text(&entry["line"])).unwrap();
        assert_eq!(line["level"], "info");
        let time = milliseconds(&text(&entry["timestamp"]));
        let status = line["status"].as_str().unwrap_or_default();
        let text = format!(
            "{} {} {status}",
            text(&line["logger"]),
            text(&line["message"])
        );
        (time, text.trim_end().to_owned())
    };
    document["logs"]
        .as_array()
        .unwrap()
        .iter()
        .map(line)
        .collect()
}

/// The milliseconds since 1970 of a time such as `2026-01-31T12:00:00.000Z`.
fn milliseconds(time: &str) -> i64 {
    let number = |from: usize, to: usize| time[from..to].parse::<i64>().unwrap();
    let (year, month, day) = (number(0, 4), number(5, 7), number(8, 10));
    // Years that begin in March end with the day that not all of them have.
    let (year, month) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    let days =
        year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day - 719_469;
    let minutes = (days * 24 + number(11, 13)) * 60 + number(14, 16);
    (minutes * 60 + number(17, 19)) * 1000 + number(20, 23)
}

#[track_caller]
fn wait_for(door: &Door<'_>, expected: &str) {
    wait_until(expected, PATIENCE, || {
        lines(door, "").iter().any(|(_, line)| line == expected)
    });
}

#[test]
fn logs_have_the_commands_and_what_they_print() {
    everywhere(|door| {
        door.sh("echo one; echo two >&2; printf three; exit 3");
        wait_for(door, "command ended exit status 3");
        let found = lines(door, "");
        let texts: Vec<_> = found.iter().map(|(_, line)| line.as_str()).collect();
        // The streams are read one after the other.
        let printed = ["stdout one", "stderr two", "stdout three"];
        let begin = texts.iter().position(|line| *line == "command started");
        let rest = &texts[begin.unwrap() + 1..];
        assert!(printed.iter().all(|line| rest.contains(line)), "{texts:?}");
        assert_eq!(rest.last(), Some(&"command ended exit status 3"));
        assert_eq!(rest.len(), 4, "{texts:?}");
        assert!(found.is_sorted_by_key(|(time, _)| *time), "{found:?}");
        assert_eq!(lines(door, "?limit=1").len(), 1);
        let last = found.last().unwrap().0;
        assert_eq!(lines(door, &format!("?start={}", last + 1)), []);
        assert!(!lines(door, &format!("?start={last}")).is_empty());
    });
}

#[test]
fn a_client_that_follows_gets_each_line_once() {
    everywhere(|door| {
        // Many of them are of the same moment.
        let script = "i=0; while [ $i -lt 300 ]; do i=$((i+1)); echo n$i; [ $((i % 50)) -gt 0 ] || sleep 0.15; done; \
                      read line; echo $line";
        let process = json!({ "cmd": "/bin/sh", "args": ["-c", script] });
        let start = json!({ "process": process, "stdin": true });
        let mut stream = door.begin("/process.Process/Start", &start, &[]);
        let (_, first) = stream.next().unwrap();
        let (mut start, mut followed) = (0, Vec::new());
        let mut follow = |until: &str| {
            wait_until(until, PATIENCE, || {
                let found = lines(door, &format!("?start={start}"));
                if let Some((last, _)) = found.last() {
                    start = last + 1;
                }
                followed.extend(found.into_iter().map(|(_, line)| line));
                followed.iter().any(|line| line == until)
            });
        };
        follow("stdout n300");
        let process = json!({ "pid": first["event"]["start"]["pid"] });
        let input = json!({ "process": process, "input": { "stdin": "bGFzdAo=" } });
        door.ok("/process.Process/SendInput", &input);
        follow("command ended exit status 0");
        followed.retain(|line| line.starts_with("stdout "));
        let mut expected: Vec<_> = (1..=300)
            .map(|number| format!("stdout n{number}"))
            .collect();
        expected.push("stdout last".to_owned());
        assert_eq!(followed, expected);
        stream.rest();
    });
}

#[test]
fn logs_end_with_their_sandbox() {
    on_a_host(|server| {
        let door = Door::open(server);
        assert_eq!(lines(&door, "?start=1&limit=5").len().min(1), 0);
        wait_for(&door, "sandbox started");
        let target = format!("/sandboxes/{}", door.id);
        assert_eq!(api(server, "DELETE", &target, &Value::Null).status, 204);
        let ended: Vec<_> = lines(&door, "").into_iter().map(|(_, line)| line).collect();
        assert_eq!(ended, ["sandbox ended"]);
        let unknown = "/sandboxes/0123456789abcdef01234567/logs";
        assert_eq!(api(server, "GET", unknown, &Value::Null).status, 404);
        for query in ["?start=x", "?limit=-1"] {
            let reply = api(
                server,
                "GET",
                &format!("{target}/logs{query}"),
                &Value::Null,
            );
            assert_eq!(reply.status, 400, "{query}");
        }
    });
}
