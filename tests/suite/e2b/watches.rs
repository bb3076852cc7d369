//! Watches, by polling and as a stream.

use std::time::Instant;

use serde_json::{Value, json};

use super::{Door, everywhere, machine};
use crate::fixture::PATIENCE;

const CREATE: &str = "/filesystem.Filesystem/CreateWatcher";
const EVENTS: &str = "/filesystem.Filesystem/GetWatcherEvents";
const REMOVE: &str = "/filesystem.Filesystem/RemoveWatcher";
const WATCH: &str = "/filesystem.Filesystem/WatchDir";

/// A directory to watch, and its path as commands see it.
fn place(door: &Door<'_>) -> String {
    let path = json!({ "path": "e2b-watch" });
    door.ok("/filesystem.Filesystem/Remove", &path);
    let made = door.ok("/filesystem.Filesystem/MakeDir", &path);
    made["entry"]["path"].as_str().unwrap().to_owned()
}

fn brief(event: &Value) -> String {
    let text = |name: &str| event[name].as_str().unwrap().to_owned();
    format!(
        "{} {}",
        text("type").replace("EVENT_TYPE_", ""),
        text("name")
    )
}

/// Polls until an event about this name has come.
#[track_caller]
fn until(door: &Door<'_>, id: &Value, last: &str) -> Vec<Value> {
    let begun = Instant::now();
    let mut events = Vec::new();
    while !events.iter().any(|event| brief(event) == last) {
        assert!(begun.elapsed() < PATIENCE, "{events:?}");
        let found = door.ok(EVENTS, &json!({ "watcherId": id }));
        events.extend(found["events"].as_array().unwrap().iter().cloned());
    }
    events
}

#[test]
fn a_client_that_polls_gets_what_has_happened_since() {
    everywhere(|door| {
        let place = place(door);
        let id = door.ok(CREATE, &json!({ "path": "e2b-watch" }))["watcherId"].clone();
        let upload = |name: &str| {
            let headers = [("content-type", "application/octet-stream")];
            let reply = door.request(
                "POST",
                &format!("/files?path=e2b-watch/{name}"),
                &headers,
                b"content",
            );
            assert_eq!(reply.status, 200);
        };
        upload("new");
        door.sh(&format!(": > {place}/first"));
        let events: Vec<_> = until(door, &id, "CREATE first").iter().map(brief).collect();
        // No more and no less: an upload is a file without a name until it is complete, and then it has its owner set.
        assert_eq!(
            events,
            ["CREATE new", "WRITE new", "CHMOD new", "CREATE first"]
        );
        upload("new");
        door.sh(&format!("cd {place} && chmod 600 first && mv first second && mkdir sub && touch sub/deep && rm second && : > last"));
        let events: Vec<_> = until(door, &id, "CREATE last").iter().map(brief).collect();
        for expected in [
            "WRITE new",
            "CHMOD first",
            "RENAME first",
            "CREATE second",
            "CREATE sub",
            "REMOVE second",
        ] {
            assert!(
                events.iter().any(|event| event == expected),
                "{expected}: {events:?}"
            );
        }
        assert!(
            !events.iter().any(|event| event.contains("deep")),
            "{events:?}"
        );
        assert_eq!(
            door.ok(EVENTS, &json!({ "watcherId": id })),
            json!({ "events": [] })
        );
        assert_eq!(door.ok(REMOVE, &json!({ "watcher_id": id })), json!({}));
        door.fails(EVENTS, &json!({ "watcherId": id }), 404, "not_found");
        door.fails(REMOVE, &json!({ "watcherId": id }), 404, "not_found");
        door.fails(
            CREATE,
            &json!({ "path": "e2b-watch/last" }),
            400,
            "invalid_argument",
        );
        door.fails(
            CREATE,
            &json!({ "path": "e2b-watch/none" }),
            404,
            "not_found",
        );
        door.ok(
            "/filesystem.Filesystem/Remove",
            &json!({ "path": "e2b-watch" }),
        );
    });
}

#[test]
fn a_client_that_polls_gets_all_that_has_happened_before() {
    everywhere(|door| {
        place(door);
        let id = door.ok(CREATE, &json!({ "path": "e2b-watch" }))["watcherId"].clone();
        let asked = || -> Vec<String> {
            let found = door.ok(EVENTS, &json!({ "watcherId": id }));
            found["events"]
                .as_array()
                .unwrap()
                .iter()
                .map(brief)
                .collect()
        };
        let headers = [("content-type", "application/octet-stream")];
        for number in 0..30 {
            let target = format!("/files?path=e2b-watch/{number}");
            let reply = door.request("POST", &target, &headers, b"content");
            assert_eq!(reply.status, 200);
            let expected = ["CREATE", "WRITE", "CHMOD"].map(|kind| format!("{kind} {number}"));
            assert_eq!(asked(), expected);
            let reply = door.request("POST", &target, &headers, b"other");
            assert_eq!(reply.status, 200);
            assert_eq!(asked(), expected[1..]);
            // What went out of the tree is half a move.
            door.sh(&format!("cd e2b-watch && mv {number} .."));
            assert_eq!(asked(), [format!("REMOVE {number}")]);
        }
        // It reports a file that somebody still writes to.
        let path = door.ok(
            "/filesystem.Filesystem/Stat",
            &json!({ "path": "e2b-watch" }),
        );
        let path = path["entry"]["path"].as_str().unwrap();
        let script = format!("exec 3> {path}/open; echo text >&3; echo written; sleep 1000");
        let process = json!({ "cmd": "/bin/sh", "args": ["-c", script] });
        let start = json!({ "process": process, "stdin": false });
        let mut stream = door.begin("/process.Process/Start", &start, &[]);
        let pid = stream.next().unwrap().1["event"]["start"]["pid"].clone();
        stream.next().unwrap();
        let events = asked();
        assert_eq!(events.first().unwrap(), "CREATE open");
        assert_eq!(events.last().unwrap(), "WRITE open");
        let signal = json!({ "process": { "pid": pid }, "signal": 9 });
        door.ok("/process.Process/SendSignal", &signal);
        door.sh("rm -rf e2b-watch; cd; rm -f [0-9]*");
    });
}

#[test]
fn a_stream_tells_what_happens_below_and_what_the_files_are() {
    everywhere(|door| {
        let place = place(door);
        let message = json!({ "path": "e2b-watch", "recursive": true, "includeEntry": true });
        let mut stream = door.begin(WATCH, &message, &[("keepalive-ping-interval", "1")]);
        assert_eq!(stream.next().unwrap(), (0, json!({ "start": {} })));
        assert_eq!(stream.next().unwrap(), (0, json!({ "keepalive": {} })));
        door.sh(&format!("mkdir -p {place}/a/b"));
        let mut until = |last: &str| loop {
            let (_, message) = stream.next().unwrap();
            let event = &message["filesystem"];
            if !event.is_null() && brief(event) == last {
                break event.clone();
            }
        };
        assert_eq!(until("CREATE a")["entry"]["type"], "FILE_TYPE_DIRECTORY");
        until("CREATE a/b");
        door.sh(&format!("echo hello > {place}/a/b/f"));
        let entry = until("CREATE a/b/f")["entry"].clone();
        assert_eq!(
            (&entry["name"], &entry["path"]),
            (&"f".into(), &format!("{place}/a/b/f").into())
        );
        door.sh(&format!("rm {place}/a/b/f"));
        assert_eq!(until("REMOVE a/b/f")["entry"], Value::Null);
        door.ok(
            "/filesystem.Filesystem/Remove",
            &json!({ "path": "e2b-watch" }),
        );
        let messages = stream.rest();
        assert_eq!(messages.last().unwrap().1["error"]["code"], "not_found");

        let messages = door
            .begin(
                WATCH,
                &json!({ "path": "~" }),
                &[("connect-timeout-ms", "300")],
            )
            .rest();
        assert_eq!(
            messages.last().unwrap().1["error"]["code"],
            "deadline_exceeded"
        );
    });
}

/// The kernel counts watches of all servers of a user, so this is alone.
#[test]
#[ignore = "takes a while: .ci/run runs it"]
fn the_watch_that_was_unread_for_longest_makes_room() {
    let check = |doors: &[&Door<'_>]| {
        for door in doors {
            place(door);
            let create = || door.ok(CREATE, &json!({ "path": "e2b-watch" }))["watcherId"].clone();
            let first = create();
            let second = create();
            for _ in 0..70 {
                create();
                // It is read, so others go.
                door.ok(EVENTS, &json!({ "watcherId": first }));
            }
            door.fails(EVENTS, &json!({ "watcherId": second }), 404, "not_found");
            let messages = door
                .begin(
                    WATCH,
                    &json!({ "path": "~" }),
                    &[("connect-timeout-ms", "100")],
                )
                .rest();
            assert_eq!(messages[0].1, json!({ "start": {} }), "{messages:?}");
        }
    };
    let (_home, server) = machine();
    check(&[&Door::open(&server)]);
    drop(server);
    // A tenant may have fewer, and those after it fewer still.
    super::on_a_host(|server| {
        let [one, two, three] = [(); 3].map(|()| Door::open(server));
        check(&[&one, &two, &three]);
    });
}
