//! Standard input: any size, one writer at a time, and an end only when a writer asks for it.

use std::net::Shutdown;
use std::thread;

use serde_json::json;

use super::{feed, follow, path, stdout_of, wait};
use crate::fixture::{
    Gate, Mark, PATIENCE, READ_ONE, Server, TempDir, assert_error, memory_of, numbered_text, reset,
    wait_until,
};

#[test]
fn stdin_stays_open_until_it_is_ended() {
    let server = Server::start();
    let process = server.spawn(&json!({"cmd": ["cat"]}));
    let mut stream = follow(&server, &process);
    for (method, query, text) in [
        ("POST", "", "one"),
        ("PUT", "?eof=0", "two é\u{2028}"),
        ("POST", "?eof=false", "\0three\n"),
    ] {
        let reply = server.request(
            method,
            &path(&process, &format!("/stdin{query}")),
            text.as_bytes(),
        );
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.json(), json!({"written": text.len(), "eof": false}));
        assert_eq!(
            stream.next_output().unwrap()["data"],
            text,
            "it is passed on at once"
        );
    }
    assert_eq!(
        feed(&server, &process, "", b"").json(),
        json!({"written": 0, "eof": false})
    );
    assert_eq!(server.entry(&process["id"])["running"], true);
    assert_eq!(
        feed(&server, &process, "?eof=1", b"end").json(),
        json!({"written": 3, "eof": true})
    );
    assert_eq!(stream.next_output().unwrap()["data"], "end");
    assert_eq!(stream.next_output().unwrap()["exit_code"], 0);
    assert_error(&feed(&server, &process, "", b"late"), 409, "stdin_closed");
    assert_error(&feed(&server, &process, "?eof=1", b""), 409, "stdin_closed");

    let process = server.spawn(&json!({"cmd": "cat; echo end"}));
    assert_eq!(
        feed(&server, &process, "?eof=true", b"").json(),
        json!({"written": 0, "eof": true})
    );
    wait(&server, &process);
    assert_eq!(stdout_of(&server, &process).data, b"end\n");
}

#[test]
fn stdin_that_is_not_open_is_409() {
    let server = Server::start();
    let mark = Mark::new();
    let given = server.spawn(&json!({"cmd": format!("cat; exec sleep {mark}"), "stdin": "given"}));
    assert_error(&feed(&server, &given, "", b"more"), 409, "stdin_closed");
    let empty =
        server.spawn(&json!({"cmd": format!("cat; echo end; exec sleep {mark}"), "stdin": ""}));
    assert_error(&feed(&server, &empty, "", b"more"), 409, "stdin_closed");
    wait_until("an empty stdin has ended", PATIENCE, || {
        stdout_of(&server, &empty).data == b"end\n"
    });
    wait_until("a given stdin was fed", PATIENCE, || {
        stdout_of(&server, &given).data == b"given"
    });
    let mut stream = server.exec_stream(&json!({"cmd": ["sleep", mark.to_string()]}));
    let foreground = stream.next().unwrap();
    assert_error(
        &feed(&server, &foreground, "", b"more"),
        409,
        "stdin_closed",
    );
    let closed = server.spawn(&json!({"cmd": format!("exec <&-; echo ready; exec sleep {mark}")}));
    assert_eq!(
        follow(&server, &closed).next_output().unwrap()["data"],
        "ready\n"
    );
    assert_error(&feed(&server, &closed, "", b"more"), 409, "stdin_closed");
    let ended = server.spawn(&json!({"cmd": ["true"]}));
    wait(&server, &ended);
    assert_error(&feed(&server, &ended, "", b"more"), 409, "stdin_closed");
    assert_error(&feed(&server, &ended, "?eof=1", b""), 409, "stdin_closed");
    let open = server.spawn(&json!({"cmd": ["cat"]}));
    for bad in ["?eof=maybe", "?eof=", "?eof=2", "?eof=1&eof=0"] {
        assert_eq!(feed(&server, &open, bad, b"x").status, 400, "{bad}");
    }
    assert_eq!(
        feed(&server, &open, "?eof=1", b"").status,
        200,
        "none of it was done"
    );
    wait(&server, &open);
    assert_eq!(stdout_of(&server, &open).data, b"");
}

#[test]
fn sixty_four_mebibytes_of_stdin_arrive_intact() {
    let directory = TempDir::new();
    let text = numbered_text(64 << 20);
    let copy = directory.join("copy");
    // Large enough to keep it all, so that it can be read back from the logs.
    let server = Server::builder().env("SBX_LOG_BYTES", 80 << 20).start();
    let process = server.spawn(&json!({"cmd": ["tee", copy]}));
    let reply = feed(&server, &process, "?eof=1", text.as_bytes());
    assert_eq!(
        (reply.status, reply.json()),
        (200, json!({"written": text.len(), "eof": true}))
    );
    assert_eq!(wait(&server, &process)["exit_code"], 0);
    assert!(
        std::fs::read(&copy).unwrap() == text.as_bytes(),
        "the command got every byte"
    );
    let output = stdout_of(&server, &process);
    assert_eq!(output.dropped, 0);
    assert!(
        output.data == text.as_bytes(),
        "every byte came back: {}",
        output.data.len()
    );
}

#[test]
fn large_stdin_costs_no_memory() {
    let server = Server::start();
    let text = numbered_text(64 << 20);
    let before = memory_of(server.pid(), "VmHWM");
    let process = server.spawn(&json!({"cmd": ["sha256sum"]}));
    // In two requests, the first of them chunked.
    let (head, tail) = text.as_bytes().split_at(30_000_001);
    let mut connection = server.connect();
    connection.send_request(
        "POST",
        &path(&process, "/stdin"),
        &[("Transfer-Encoding", "chunked")],
        b"",
    );
    for piece in head.chunks(1_000_000) {
        connection.send(format!("{:x}\r\n", piece.len()).as_bytes());
        connection.send(piece);
        connection.send(b"\r\n");
    }
    connection.send(b"0\r\n\r\n");
    assert_eq!(
        connection.read_reply().json(),
        json!({"written": head.len(), "eof": false})
    );
    let reply = connection.request("POST", &path(&process, "/stdin?eof=1"), &[], tail);
    assert_eq!(reply.json(), json!({"written": tail.len(), "eof": true}));
    wait(&server, &process);
    let grown = memory_of(server.pid(), "VmHWM").saturating_sub(before);
    assert!(grown < 8 << 20, "the server grew by {grown} bytes");
    let directory = TempDir::new();
    std::fs::write(directory.path().join("text"), &text).unwrap();
    let expected = server
        .exec(&json!({"cmd": format!("sha256sum < {}", directory.join("text"))}))
        .stdout;
    assert_eq!(
        String::from_utf8(stdout_of(&server, &process).data).unwrap(),
        expected
    );
}

#[test]
fn one_writer_at_a_time_feeds_stdin() {
    let server = Server::start();
    let mark = Mark::new();
    let process = server.spawn(&json!({"cmd": format!("{READ_ONE}; exec sleep {mark}")}));
    let body = numbered_text(4 << 20);
    thread::scope(|scope| {
        let target = path(&process, "/stdin");
        let mut first = server.connect();
        // More than a pipe holds, and nobody reads: it is stuck until the process ends.
        let mut sender = first.stream.try_clone().unwrap();
        let head = format!(
            "POST {target} HTTP/1.1\r\nHost: localhost\r\nX-Sandbox-Token: {}\r\nContent-Length: {}\r\n\r\n",
            server.token.clone().unwrap(),
            body.len()
        );
        let body = &body;
        scope.spawn(move || {
            use std::io::Write as _;
            // The server may close in the middle of it.
            let _ = sender
                .write_all(head.as_bytes())
                .and_then(|()| sender.write_all(body.as_bytes()));
        });
        assert!(follow(&server, &process).next_output().is_some());
        let refused = feed(&server, &process, "", b"more");
        assert_error(&refused, 409, "stdin_busy");
        assert_eq!(refused.json()["written"], 0);
        assert_eq!(server.delete(&path(&process, "")).json()["killed"], true);
        // The stuck one is let go, with an answer or with a close.
        let answer = String::from_utf8_lossy(&first.read_to_close()).into_owned();
        assert!(
            answer.is_empty()
                || answer.starts_with("HTTP/1.1 409 ")
                || answer.starts_with("HTTP/1.1 404 "),
            "{answer}"
        );
    });
}

#[test]
fn a_reader_that_stops_reading_lets_the_writer_go() {
    let server = Server::start();
    let process = server.spawn(&json!({"cmd": ["head", "-c", "10"]}));
    let body = numbered_text(4 << 20);
    let mut connection = server.connect();
    let mut sender = connection.stream.try_clone().unwrap();
    let token = server.token.clone().unwrap();
    let target = path(&process, "/stdin");
    thread::scope(|scope| {
        scope.spawn(|| {
            use std::io::Write as _;
            let head = format!(
                "POST {target} HTTP/1.1\r\nHost: localhost\r\nX-Sandbox-Token: {token}\r\nContent-Length: {}\r\n\r\n",
                body.len()
            );
            let _ = sender
                .write_all(head.as_bytes())
                .and_then(|()| sender.write_all(body.as_bytes()));
        });
        let answer = String::from_utf8_lossy(&connection.read_to_close()).into_owned();
        assert!(
            answer.is_empty() || answer.starts_with("HTTP/1.1 409 "),
            "{answer}"
        );
    });
    assert_eq!(wait(&server, &process)["exit_code"], 0);
    assert_eq!(stdout_of(&server, &process).data, &body.as_bytes()[..10]);
    assert_error(&feed(&server, &process, "", b"x"), 409, "stdin_closed");
}

#[test]
fn a_writer_that_vanishes_leaves_stdin_open_for_the_next() {
    let server = Server::start();
    let process = server.spawn(&json!({"cmd": ["cat"]}));
    let mut stream = follow(&server, &process);
    let mut connection = server.connect();
    connection.send_request(
        "POST",
        &path(&process, "/stdin?eof=1"),
        &[("Content-Length", "1000")],
        b"part",
    );
    assert_eq!(stream.next_output().unwrap()["data"], "part");
    reset(connection);
    wait_until("the next writer is let in", PATIENCE, || {
        feed(&server, &process, "", b"").status == 200
    });
    assert_eq!(
        server.entry(&process["id"])["running"],
        true,
        "an upload that broke off is no end of file"
    );
    assert_eq!(feed(&server, &process, "?eof=1", b" rest").status, 200);
    assert_eq!(stream.next_output().unwrap()["data"], " rest");
    assert_eq!(stream.next_output().unwrap()["exit_code"], 0);
}

#[test]
fn a_writer_that_has_only_closed_its_sending_half_is_served_to_the_end() {
    let server = Server::start();
    let mut gate = Gate::new();
    // It reads nothing more until the writer has said all it has to say.
    let command = format!("{READ_ONE}; : < {}; exec wc -c", gate.path());
    let process = server.spawn(&json!({ "cmd": command }));
    let body = numbered_text(200_000);
    let mut connection = server.connect();
    connection.send_request(
        "POST",
        &path(&process, "/stdin?eof=1"),
        &[],
        body.as_bytes(),
    );
    connection.stream.shutdown(Shutdown::Write).unwrap();
    assert!(follow(&server, &process).next_output().is_some());
    assert_error(&feed(&server, &process, "", b""), 409, "stdin_busy");
    gate.open();
    // The server may have asked, by an interim response, whether all of the client was gone.
    let head = loop {
        let head = connection.read_head();
        if head.status >= 200 {
            break head;
        }
    };
    let reply = connection.read_body(head);
    assert_eq!(
        (reply.status, reply.json()),
        (200, json!({"written": body.len(), "eof": true}))
    );
    wait(&server, &process);
    let first = &body.as_bytes()[..1];
    assert_eq!(
        stdout_of(&server, &process).data,
        [first, b"199999\n"].concat()
    );
}
