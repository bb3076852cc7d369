//! Who may type, and what becomes of it.

use std::thread;

use serde_json::{Value, json};

use super::in_both_modes;
use crate::fixture::{Frame, PATIENCE, find, frame, numbered_text, resize, wait_until};

#[test]
fn requests_reach_the_terminal() {
    in_both_modes(|place| {
        let id = place.terminal("trap 'echo caught' INT; cat; echo ended; cat; echo again; cat");
        let mut socket = place.attach(&id, "");
        socket.type_in("some text\n");
        socket.read_until("some text\r\nsome text\r\n");
        socket.ask(json!({ "eof": true }));
        socket.read_until("ended");
        // Its answer tells that the next program is there to be interrupted.
        socket.type_in("second\n");
        socket.read_until("second\r\nsecond\r\n");
        socket.ask(json!({ "signal": "INT" }));
        socket.read_until("again");
        socket.type_in("third\n");
        socket.read_until("third\r\nthird\r\n");
        socket.ask(json!({ "signal": 18, "resize": { "rows": 5, "cols": 6 } }));
        // Events in fragments, with a ping between, are requests as well.
        socket.send_frame(0x01, b"{\"signal\"");
        socket.send_frame(0x89, b"payload");
        socket.send_frame(0x80, b":\"KILL\"}");
        let mut has_pong = false;
        let close = loop {
            match socket.next_frame() {
                Frame::Pong(payload) => {
                    assert_eq!(payload, b"payload");
                    has_pong = true;
                }
                Frame::Close(code, _) => break code,
                _ => {}
            }
        };
        assert!(has_pong);
        assert_eq!(close, 1000);
    });
}

#[test]
fn a_request_that_cannot_be_carried_out_is_an_error_event() {
    in_both_modes(|place| {
        let id = place.reader("-echo");
        let mut socket = place.attach(&id, "");
        socket.read_until("ready");
        for request in [
            json!({}),
            json!({ "other": 1 }),
            json!({ "resize": {} }),
            json!({ "resize": { "rows": 0, "cols": 1 } }),
            json!({ "resize": [24, 80] }),
            json!({ "signal": "NONE" }),
            json!({ "signal": true }),
            json!({ "eof": "yes" }),
            json!({ "take": 1 }),
        ] {
            socket.ask(request.clone());
            let event = socket.wait_for_event("error");
            assert_eq!(event["code"], "bad_request", "{request}");
            assert!(event["error"].as_str().is_some_and(|text| !text.is_empty()));
        }
        socket.type_in("it goes on\n");
        socket.read_until("it goes on");
        place.delete(&id);
    });
}

/// Each is answered, in their order, even if they arrive in one segment.
#[test]
fn every_refused_request_has_its_own_error() {
    in_both_modes(|place| {
        let id = place.reader("-echo");
        let mut socket = place.attach(&id, "");
        let mut watcher = place.attach(&id, "mode=ro");
        socket.read_until("ready");
        watcher.read_until("ready");
        let wrong = [
            (json!({ "signal": "FIRST" }), "FIRST"),
            (json!({ "resize": { "rows": 0, "cols": 1 } }), "rows"),
            (json!({ "eof": "yes" }), "eof"),
            (json!({ "signal": "SECOND" }), "SECOND"),
            (json!({ "signal": "SECOND" }), "SECOND"),
        ];
        let frames = wrong.clone().map(|(request, _)| text_frame(&request));
        socket.connection.send(&frames.concat());
        for (_, named) in &wrong {
            let event = socket.wait_for_event("error");
            assert_eq!(event["code"], "bad_request");
            assert!(event["error"].as_str().unwrap().contains(named), "{event}");
        }
        // Of one that only watches, what it types is refused once, and each request by itself.
        let requests = [
            json!({ "eof": true }),
            resize(10, 10),
            json!({ "signal": "NONE" }),
            json!({ "eof": true }),
        ];
        let mut frames = frame(0x82, b"typed").repeat(10);
        frames.extend(requests.iter().flat_map(text_frame));
        watcher.connection.send(&frames);
        // The takeover is answered last.
        watcher.ask(json!({ "take": true }));
        let mut codes = Vec::new();
        loop {
            let event = watcher.next_event();
            match event["event"].as_str() {
                Some("error") => codes.push(event["code"].as_str().unwrap().to_owned()),
                Some("mode") => break,
                _ => {}
            }
        }
        let of_input = codes.len() - requests.len();
        assert!((1..=10).contains(&of_input), "{codes:?}");
        assert!(codes[..of_input].iter().all(|code| code == "read_only"));
        assert_eq!(
            codes[of_input..],
            ["read_only", "read_only", "bad_request", "read_only"]
        );
        place.delete(&id);
    });
}

fn text_frame(request: &Value) -> Vec<u8> {
    frame(0x81, request.to_string().as_bytes())
}

#[test]
fn who_only_watches_types_nothing() {
    in_both_modes(|place| {
        let id = place.reader("-echo");
        let mut watcher = place.attach(&id, "mode=ro");
        assert_eq!(watcher.next_event()["mode"], "ro");
        let mut raw = place.attach_raw(&id, "mode=ro");
        watcher.read_until("ready");
        raw.read_until("ready");
        for attempt in 0..5 {
            match attempt {
                0 => watcher.type_in("from the watcher\n"),
                1 => watcher.ask(resize(10, 10)),
                2 => watcher.ask(json!({ "signal": "KILL" })),
                3 => watcher.ask(json!({ "eof": true })),
                _ => watcher.type_in("x".repeat(1 << 20)),
            }
            assert_eq!(watcher.wait_for_event("error")["code"], "read_only");
        }
        raw.type_in("from the raw watcher\n");
        raw.send_frame(0x81, b"{\"take\":true}\n");
        // A flood costs nobody anything; the pong tells that all of it was read.
        for _ in 0..2000 {
            raw.type_in("flood\n");
            watcher.type_in("flood\n");
        }
        raw.send_frame(0x89, b"");
        while !matches!(raw.next_frame(), Frame::Pong(_)) {}
        let mut typist = place.attach(&id, "");
        assert_eq!(typist.next_event()["rows"], 24);
        typist.type_in("from the typist\n");
        let shown = typist.read_until("typist\r\n");
        assert_eq!(shown, "ready\r\nfrom the typist\r\n");
        place.delete(&id);
    });
}

#[test]
fn whoever_takes_the_input_over_has_it_alone() {
    in_both_modes(|place| {
        let id = place.reader("-echo");
        let mut first = place.attach(&id, "");
        let mut second = place.attach(&id, "");
        for socket in [&mut first, &mut second] {
            socket.read_until("ready");
            socket.type_in("both\n");
        }
        let mut third = place.attach(&id, "take=1");
        assert_eq!(third.next_event()["mode"], "rw");
        for socket in [&mut first, &mut second] {
            assert_eq!(socket.wait_for_event("mode")["mode"], "ro");
            socket.type_in("nothing\n");
            assert_eq!(socket.wait_for_event("error")["code"], "read_only");
        }
        first.ask(json!({ "take": true }));
        assert_eq!(first.wait_for_event("mode")["mode"], "rw");
        assert_eq!(third.wait_for_event("mode")["mode"], "ro");
        first.type_in("first again\n");
        let shown = first.read_until("first again");
        assert!(!shown.contains("nothing"), "{shown}");
        // Who comes after a takeover may type beside the one who has it.
        let mut fourth = place.attach(&id, "");
        fourth.type_in("fourth\n");
        first.read_until("fourth");
        place.delete(&id);
    });
}

#[test]
fn of_many_who_take_over_at_once_one_has_it() {
    in_both_modes(|place| {
        let id = place.reader("-echo");
        let mut sockets: Vec<_> = (0..8).map(|_| place.attach(&id, "mode=ro")).collect();
        thread::scope(|scope| {
            for socket in &mut sockets {
                scope.spawn(|| socket.ask(json!({ "take": true })));
            }
        });
        // Each learns that it has the input, and all but one that they have lost it.
        let mut modes = vec![String::new(); sockets.len()];
        for (socket, last) in sockets.iter_mut().zip(&mut modes) {
            assert_eq!(socket.wait_for_event("mode")["mode"], "rw");
            // After this error every takeover has been carried out.
            socket.ask(json!({ "resize": 1 }));
            *last = "rw".to_owned();
        }
        for (socket, last) in sockets.iter_mut().zip(&mut modes) {
            loop {
                let event = socket.next_event();
                match event["event"].as_str() {
                    Some("mode") => *last = event["mode"].as_str().unwrap().to_owned(),
                    Some("error") => break,
                    _ => {}
                }
            }
            socket.ask(resize(20, 20));
        }
        let typists = sockets.iter_mut().filter_map(|socket| {
            socket.ask(json!({}));
            let event = socket.wait_for_event("error");
            (event["code"] != "read_only").then_some(())
        });
        assert_eq!(typists.count(), 1);
        place.delete(&id);
    });
}

/// A piece of input that comes in one message is not torn by what others type, however slowly it is read.
#[test]
fn what_several_type_is_merged_message_by_message() {
    in_both_modes(|place| {
        let lines = 400;
        let id = place.terminal(&format!(
            "stty raw -echo; echo ready; head -n {}; echo; echo all",
            3 * lines
        ));
        let mut reader = place.attach(&id, "");
        reader.read_until("ready");
        thread::scope(|scope| {
            for name in ["a", "b", "c"] {
                let id = &id;
                scope.spawn(move || {
                    let mut socket = place.attach(id, "");
                    for _ in 0..lines {
                        socket.type_in(name.repeat(99) + "\n");
                    }
                    socket.close();
                });
            }
        });
        let shown = reader.read_until("\nall");
        let mut found = shown.lines().filter(|line| line.len() == 99);
        assert!(found.all(|line| { line.bytes().all(|byte| byte == line.as_bytes()[0]) }));
        let whole = shown.lines().filter(|line| line.len() == 99).count();
        assert_eq!(whole, 3 * lines, "{}", shown.len());
    });
}

#[test]
fn a_large_paste_arrives_byte_for_byte() {
    in_both_modes(|place| {
        let text = numbered_text(1_000_000);
        let text = &text[..text.len().min(1 << 20)];
        let id = place.terminal(&format!(
            "stty raw -echo; printf ready; head -c {} > /dev/null; printf read; head -c 3 >/dev/null",
            text.len()
        ));
        let mut socket = place.attach(&id, "");
        socket.read_until("ready");
        socket.type_in(text);
        socket.read_until("read");
        let id = place.terminal(&format!(
            "stty raw -echo; printf ready; head -c {} | sha256sum",
            text.len()
        ));
        let mut socket = place.attach_raw(&id, "");
        socket.read_until("ready");
        socket.send_frame(0x02, &text.as_bytes()[..5]);
        socket.send_frame(0x80, &text.as_bytes()[5..]);
        socket.read_until(&crate::fixture::sha256(text.as_bytes()));
    });
}

/// A program that does not read holds up who pastes, and nobody else: signals and takeovers work.
#[test]
fn a_paste_that_nobody_reads_can_be_ended() {
    in_both_modes(|place| {
        let id = place.terminal("stty raw -echo; echo ready; exec sleep 1000");
        let mut stuck = place.attach(&id, "");
        stuck.read_until("ready");
        stuck.type_in("x".repeat(1 << 20));
        let mut other = place.attach(&id, "");
        other.ask(json!({ "signal": "KILL" }));
        assert_eq!(stuck.wait_for_event("exit")["signal"], 9);
        // A client that goes away meanwhile leaves nothing behind.
        let id = place.terminal("stty raw -echo; echo ready; exec sleep 1000");
        let mut gone = place.attach(&id, "");
        gone.read_until("ready");
        gone.type_in("x".repeat(1 << 20));
        drop(gone);
        let mut next = place.attach(&id, "offset=-1");
        next.type_in("y");
        next.ask(json!({ "signal": "KILL" }));
        assert_eq!(next.wait_for_event("exit")["signal"], 9);
    });
}

/// What a client has typed before it closes is typed, as if it had stayed.
#[test]
fn input_before_the_close_is_not_lost() {
    in_both_modes(|place| {
        let id = place.terminal("stty raw -echo; printf ready; head -c 60003 | tail -c 3; read x");
        let mut watcher = place.attach(&id, "mode=ro");
        watcher.read_until("ready");
        let mut socket = place.attach(&id, "offset=-1");
        socket.type_in("x".repeat(60_000) + "end");
        socket.close();
        watcher.read_until("end");
        place.delete(&id);
    });
}

#[test]
fn a_shell_lives_on_without_its_viewer() {
    in_both_modes(|place| {
        let started = place.post("processes", &json!({ "pty": { "rows": 10, "cols": 40 } }));
        let id = started["id"].as_str().unwrap();
        let mut socket = place.attach(id, "");
        socket.type_in("PS1=; cd /; x=kept; echo st''arted\n");
        socket.read_until("started");
        let offset = socket.offset;
        crate::fixture::reset(socket.connection);
        wait_until("the process is there", PATIENCE, || {
            let target = place.target(&format!("processes/{id}"));
            let reply = place.connect().request("GET", &target, &[], b"");
            reply.json()["running"] == true
        });
        let mut socket = place.attach(id, &format!("offset={offset}"));
        socket.type_in("echo \"[$PWD $x]\"; stty size; exit 4\n");
        let (output, events, close) = socket.read_to_end();
        for text in ["[/ kept]", "10 40"] {
            assert!(find(&output, text.as_bytes()).is_some(), "{output:?}");
        }
        assert_eq!(events.last().unwrap()["exit_code"], 4);
        assert_eq!(close, (1000, "exit 4".to_owned()));
    });
}
