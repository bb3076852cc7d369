//! What an attached client is shown, and in which order.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{in_both_modes, in_both_modes_with};
use crate::fixture::{Frame, PATIENCE, Server, WebSocket, resize, wait_until};

/// The output of a script that has ended, attached to from `query`.
fn names(events: &[Value]) -> Vec<&str> {
    let names = events.iter().map(|event| event["event"].as_str().unwrap());
    names.collect()
}

#[test]
fn a_running_terminal_is_replayed_and_then_followed_to_its_end() {
    in_both_modes(|place| {
        let id = place.terminal("printf 'one\\n'; read line; echo \"two $line\"; exit 3");
        let mut first = place.attach(&id, "");
        first.read_until("one\r\n");
        let mut socket = place.attach(&id, "rows=30&cols=100");
        let attached = socket.next_event();
        assert_eq!(
            attached,
            json!({
                "event": "attached", "id": id, "offset": 0, "rows": 30, "cols": 100, "mode": "rw"
            })
        );
        assert_eq!(socket.next_frame(), Frame::Binary(b"one\r\n".to_vec()));
        assert_eq!(socket.next_event(), json!({ "event": "live", "offset": 5 }));
        socket.type_in("hello\n");
        let (output, events, close) = socket.read_to_end();
        assert_eq!(String::from_utf8_lossy(&output), "hello\r\ntwo hello\r\n");
        assert_eq!(names(&events), ["exit"]);
        assert_eq!(events[0]["exit_code"], 3);
        assert_eq!(events[0]["reason"], "exited");
        assert_eq!(close, (1000, "exit 3".to_owned()));
        assert_eq!(first.wait_for_event("exit")["exit_code"], 3);
    });
}

#[test]
fn a_finished_terminal_is_replayed_from_any_offset() {
    in_both_modes(|place| {
        let id = place.terminal("printf 0123456789");
        place.attach(&id, "").wait_for_event("exit");
        for (query, offset, output) in [
            ("", 0, "0123456789"),
            ("offset=0", 0, "0123456789"),
            ("offset=7", 7, "789"),
            ("offset=10", 10, ""),
            ("offset=-1", 10, ""),
            ("mode=ro&offset=3", 3, "3456789"),
        ] {
            let mut socket = place.attach(&id, query);
            let attached = socket.next_event();
            assert_eq!(attached["offset"], offset, "{query}");
            let (shown, events, close) = socket.read_to_end();
            assert_eq!(String::from_utf8_lossy(&shown), output, "{query}");
            assert_eq!(names(&events), ["live", "exit"]);
            assert_eq!(events[0]["offset"], 10);
            assert_eq!(close, (1000, "exit 0".to_owned()));
            let mut raw = place.attach_raw(&id, query);
            let (shown, events, close) = raw.read_to_end();
            assert_eq!(String::from_utf8_lossy(&shown), output, "{query}");
            assert_eq!((events.len(), close.0), (0, 1000));
        }
    });
}

#[test]
fn the_end_tells_of_a_signal() {
    in_both_modes(|place| {
        let id = place.terminal("kill -9 $$");
        let mut socket = place.attach_raw(&id, "");
        let (_, _, close) = socket.read_to_end();
        assert_eq!(close, (1000, "signal 9".to_owned()));
        // A deletion has its exit event.
        let id = place.reader("sane");
        let mut socket = place.attach(&id, "");
        socket.read_until("ready");
        place.delete(&id);
        let (_, events, close) = socket.read_to_end();
        let exit = events.last().unwrap();
        assert_eq!(
            (&exit["event"], &exit["reason"]),
            (&json!("exit"), &json!("deleted"))
        );
        assert_eq!(close, (1000, "signal 9".to_owned()));
    });
}

#[test]
fn a_gap_is_told_and_skipped_without_events() {
    in_both_modes_with(&[("SBX_LOG_BYTES", "4096")], |place| {
        let script = "stty -opost; head -c 50000 /dev/zero | tr '\\0' x; printf end";
        let id = place.terminal(script);
        place.attach(&id, "offset=-1").wait_for_event("exit");
        let mut socket = place.attach(&id, "offset=100");
        assert_eq!(socket.next_event()["offset"], 100);
        let dropped = socket.next_event();
        let bytes = dropped["bytes"].as_u64().unwrap();
        assert_eq!(
            dropped,
            json!({ "event": "dropped", "stream": "stdout", "offset": 100, "bytes": bytes })
        );
        let (output, events, _) = socket.read_to_end();
        assert_eq!(100 + bytes + output.len() as u64, 50_003);
        assert!(output.ends_with(b"xend") && output.len() <= 4096);
        assert_eq!(events[0]["offset"], 50_003);
        // Without an offset it begins at the oldest byte, so nothing is missing.
        let mut socket = place.attach(&id, "");
        assert_eq!(socket.next_event()["offset"], 100 + bytes);
        let (same, events, _) = socket.read_to_end();
        assert_eq!((names(&events), &same), (vec!["live", "exit"], &output));
        let (same, ..) = place.attach_raw(&id, "offset=100").read_to_end();
        assert_eq!(same, output);
    });
}

#[test]
fn others_are_told_the_size_and_programs_too() {
    in_both_modes(|place| {
        let id = place.terminal("trap 'stty size' WINCH; echo ready; while :; do sleep 0.05; done");
        let mut watcher = place.attach(&id, "mode=ro");
        watcher.read_until("ready");
        let mut typist = place.attach(&id, "rows=31&cols=101");
        let told = watcher.wait_for_event("resize");
        assert_eq!(told, json!({ "event": "resize", "rows": 31, "cols": 101 }));
        watcher.read_until("31 101");
        typist.ask(resize(32, 102));
        let told = watcher.wait_for_event("resize");
        assert_eq!(told, json!({ "event": "resize", "rows": 32, "cols": 102 }));
        typist.read_until("32 102");
        // One that attaches later learns the size at once, and the one that has set it is not told.
        let attached = place.attach(&id, "").next_event();
        assert_eq!(
            (&attached["rows"], &attached["cols"]),
            (&json!(32), &json!(102))
        );
        place.post(
            &format!("processes/{id}/resize"),
            &json!({ "rows": 33, "cols": 103 }),
        );
        let told = typist.wait_for_event("resize");
        assert_eq!(told["rows"], 33);
        place.delete(&id);
    });
}

/// What a terminal would answer is in the output twice: before the client came, and after.
#[test]
fn old_questions_are_shown_only_to_those_who_can_tell() {
    in_both_modes(|place| {
        let questions = "\\033[c\\033[6n\\033[?25$p\\033]11;?\\007";
        let id = place.terminal(&format!(
            "stty -echo; printf 'a{questions}b\\033[31m\\033'; read line; printf '[5nc{questions}d'; read line"
        ));
        let all = "\x1b[c\x1b[6n\x1b[?25$p\x1b]11;?\x07";
        let mut socket = place.attach(&id, "");
        socket.read_until(&format!("a{all}b\x1b[31m\x1b"));
        let mut raw = place.attach_raw(&id, "");
        assert_eq!(raw.read_until("m\x1b"), "ab\x1b[31m\x1b");
        raw.type_in("\n");
        // The end of a question that has begun before is asked now.
        assert_eq!(raw.read_until("d"), format!("[5nc{all}d"));
        place.delete(&id);
    });
}

#[test]
fn a_slow_viewer_gets_a_gap_and_nobody_waits_for_it() {
    in_both_modes_with(&[("SBX_LOG_BYTES", "65536")], |place| {
        let bytes = 24_000_000_u64;
        let id = place.terminal(&format!(
            "stty -opost -echo; echo ready; read line; head -c {bytes} /dev/zero | tr '\\0' x; echo; echo end; read line"
        ));
        let mut slow = place.attach(&id, "");
        let mut never = place.attach_raw(&id, "mode=ro");
        let mut fast = place.attach(&id, "");
        for socket in [&mut slow, &mut fast] {
            socket.read_until("ready\n");
        }
        let begun = Instant::now();
        fast.type_in("\n");
        // The slow one and the one that never reads take nothing meanwhile.
        while fast.offset < bytes + 6 + 5 {
            let frame = fast.next_frame();
            assert!(
                matches!(frame, Frame::Binary(_) | Frame::Text(_)),
                "{frame:?}"
            );
        }
        assert!(begun.elapsed() < 3 * PATIENCE);
        let dropped = slow.wait_for_event("dropped");
        assert!(dropped["bytes"].as_u64().unwrap() > 0);
        slow.read_until("end\n");
        assert_eq!(slow.offset, fast.offset);
        fast.type_in("\n");
        assert_eq!(slow.wait_for_event("exit")["exit_code"], 0);
        let (_, _, close) = never.read_to_end();
        assert_eq!(close.0, 1000);
    });
}

#[test]
fn a_hundred_viewers_see_the_same() {
    in_both_modes(|place| {
        let id = place.terminal("stty -echo; echo ready; read line; seq 2000; read line");
        let mut viewers: Vec<WebSocket> = (0..100).map(|_| place.attach(&id, "")).collect();
        for viewer in &mut viewers {
            assert_eq!(viewer.read_until("ready\r\n"), "ready\r\n");
        }
        viewers[0].type_in("\n");
        let lines: Vec<String> = (1..=2000).map(|number| format!("{number}\r\n")).collect();
        let expected = lines.concat();
        for viewer in &mut viewers {
            assert_eq!(viewer.read_until("\n2000\r\n"), expected);
        }
        viewers[99].type_in("\n");
        for mut viewer in viewers {
            assert_eq!(viewer.wait_for_event("exit")["exit_code"], 0);
            viewer.expect_close(1000);
        }
    });
}

#[test]
fn a_viewer_is_work_and_a_vanished_one_is_not() {
    let mut server = Server::builder().env("SBX_IDLE_TIMEOUT", 1).start();
    let id = server.spawn(&json!({ "cmd": "echo hello", "pty": true }))["id"].clone();
    let id = id.as_str().unwrap();
    let target = format!("/v1/processes/{id}/attach");
    WebSocket::open(server.connect(), &target).wait_for_event("exit");
    let id = server.spawn(&json!({ "cmd": "read line", "pty": true }))["id"].clone();
    let target = format!("/v1/processes/{}/attach", id.as_str().unwrap());
    let socket = WebSocket::open(server.connect(), &target);
    socket.close();
    assert!(server.is_running());
    server.delete(&format!("/v1/processes/{}", id.as_str().unwrap()));
    server.wait_for_exit(PATIENCE);
}

#[test]
fn the_end_of_the_server_is_told() {
    let server = Server::start();
    let id = server
        .spawn(&json!({ "cmd": "trap 'exit 7' TERM; while :; do sleep 0.05; done", "pty": true }))
        ["id"]
        .clone();
    let target = format!("/v1/processes/{}/attach", id.as_str().unwrap());
    let mut socket = WebSocket::open(server.connect(), &target);
    socket.wait_for_event("live");
    server.signal(libc::SIGTERM);
    let (_, events, close) = socket.read_to_end();
    assert_eq!(events[0]["event"], "exit");
    assert_eq!(close.0, 1001);
}

#[test]
fn pings_find_who_is_gone_and_spare_who_answers() {
    in_both_modes_with(&[("SBX_PING_SECS", "1")], |place| {
        let id = place.reader("sane");
        let mut dead = place.attach(&id, "");
        dead.pongs = false;
        let mut alive = place.attach(&id, "");
        for socket in [&mut dead, &mut alive] {
            socket.wait_for_event("live");
        }
        let begun = Instant::now();
        let mut pings = 0;
        let close = loop {
            match dead.read_frame() {
                Frame::Ping(_) => {
                    pings += 1;
                    while !matches!(alive.read_frame(), Frame::Ping(_)) {}
                    alive.send_frame(0x8a, b"");
                }
                Frame::Close(code, _) => break code,
                _ => {}
            }
        };
        assert_eq!((pings, close), (2, 1011));
        assert!(begun.elapsed() > Duration::from_secs(2));
        // It has answered all, and is there.
        alive.type_in("still here\n");
        alive.read_until("still here");
        place.delete(&id);
        wait_until("the exit", PATIENCE, || {
            alive.next_event()["event"] == "exit"
        });
    });
}
