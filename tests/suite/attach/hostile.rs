//! Frames that no client should send, and as many of them as it likes.

use std::time::Duration;

use serde_json::{Value, json};

use super::in_both_modes;
use crate::fixture::{Frame, Random, WebSocket, assert_error, frame, memory_of, reset, resize};

/// Sends bytes after the handshake and returns what the server closes with.
#[track_caller]
fn closed_with(mut socket: WebSocket, bytes: &[u8]) -> u16 {
    socket.connection.send(bytes);
    loop {
        if let Frame::Close(code, _) = socket.next_frame() {
            socket.connection.expect_close();
            return code;
        }
    }
}

#[test]
fn broken_frames_end_the_connection_with_their_code() {
    in_both_modes(|place| {
        let id = place.reader("-echo");
        let unmasked = [&[0x82, 5][..], b"hello"].concat();
        let huge = [0x82, 0xff, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff];
        let cases: [(Vec<u8>, u16); 20] = [
            (unmasked, 1002),
            (vec![0x83], 1002),
            (vec![0xc2], 1002),
            (vec![0x80], 1002),
            (vec![0x09], 1002),
            (vec![0x89, 0xfe], 1002),
            ([frame(0x02, b"a"), frame(0x82, b"b")].concat(), 1002),
            (vec![0x82, 0xfe, 0, 125], 1002),
            (vec![0x82, 0xff, 0x80, 0, 0, 0, 0, 0, 0, 0], 1002),
            (frame(0x88, b"x"), 1002),
            (frame(0x88, &1005_u16.to_be_bytes()), 1002),
            (frame(0x88, b"\x03\xe8\xff"), 1007),
            (frame(0x81, b"\xff\xfe"), 1007),
            ([frame(0x01, b"\xe2\x98"), frame(0x80, b"")].concat(), 1007),
            (frame(0x81, b"no JSON"), 1007),
            (frame(0x81, b"[\"signal\"]"), 1007),
            (frame(0x81, b""), 1007),
            (huge.to_vec(), 1009),
            (vec![0x82, 0xff, 0, 0, 0, 0, 0, 0x10, 0, 1], 1009),
            // Right ones: they are answered in kind.
            (frame(0x88, &4000_u16.to_be_bytes()), 4000),
        ];
        for (bytes, code) in cases {
            assert_eq!(
                closed_with(place.attach(&id, ""), &bytes),
                code,
                "{bytes:x?}"
            );
        }
        let fragments = [frame(0x02, &vec![0; 1 << 20]), frame(0x00, b"x")].concat();
        assert_eq!(closed_with(place.attach(&id, "mode=ro"), &fragments), 1009);
        // Without events text is input, and only has to be UTF-8.
        assert_eq!(
            closed_with(place.attach_raw(&id, ""), &frame(0x81, b"\xff")),
            1007
        );
        let mut raw = place.attach_raw(&id, "");
        raw.send_frame(0x81, "caf\u{e9}\n".as_bytes());
        raw.read_until("caf\u{e9}");
        place.delete(&id);
    });
}

#[test]
fn floods_of_pings_and_of_fragments_are_bounded() {
    in_both_modes(|place| {
        let id = place.reader("-echo");
        let mut socket = place.attach(&id, "");
        socket.read_until("ready");
        let pings = frame(0x89, &[b'p'; 125]).repeat(400);
        let empty = [
            frame(0x02, b""),
            frame(0x00, b"").repeat(20_000),
            frame(0x80, b""),
        ]
        .concat();
        socket.connection.send(&empty);
        for round in 0..20 {
            socket.connection.send(&pings);
            let mut answers = 0;
            while answers < 400 {
                match socket.next_frame() {
                    Frame::Pong(payload) => {
                        assert_eq!(payload, [b'p'; 125]);
                        answers += 1;
                    }
                    Frame::Text(_) => {}
                    other => panic!("{round}: {other:?}"),
                }
            }
        }
        // The same from one that reads nothing: it is not read either, and others are served.
        let before = memory_of(place.server.pid(), "VmRSS");
        let mut deaf = place.attach(&id, "");
        let writer = deaf.connection.stream.try_clone().unwrap();
        writer
            .set_write_timeout(Some(Duration::from_millis(500)))
            .unwrap();
        let mut sent = 0;
        while std::io::Write::write_all(&mut &writer, &pings).is_ok() && sent < 1000 {
            sent += 1;
        }
        assert!(sent < 1000, "the server takes whatever comes");
        socket.type_in("served\n");
        socket.read_until("served");
        let after = memory_of(place.server.pid(), "VmRSS");
        assert!(after < before + (16 << 20), "{before} then {after}");
        deaf.pongs = false;
        place.delete(&id);
    });
}

/// Otherwise who sends megabytes and reads nothing makes the server hold them again, on nobody's account.
#[test]
fn errors_quote_no_more_than_a_part_of_what_was_sent() {
    in_both_modes(|place| {
        let id = place.reader("-echo");
        let request = json!({ "signal": "\u{2603}".repeat(300_000) });
        let is_short = |error: &Value| {
            let text = error["error"].as_str().unwrap();
            text.starts_with("signal ") && text.len() < 20_000
        };
        let mut socket = place.attach(&id, "");
        socket.ask(request.clone());
        assert!(is_short(&socket.wait_for_event("error")));
        let target = place.target(&format!("processes/{id}/kill"));
        let body = request.to_string();
        let reply = place
            .connect()
            .request("POST", &target, &[], body.as_bytes());
        assert_error(&reply, 400, "bad_request");
        assert!(is_short(&reply.json()));
        place.delete(&id);
    });
}

#[test]
fn half_a_frame_holds_nothing_up() {
    in_both_modes(|place| {
        let id = place.reader("-echo");
        let whole = frame(0x82, b"never whole\n");
        let mut halves: Vec<_> = (1..whole.len())
            .map(|end| {
                let mut socket = place.attach(&id, "");
                socket.connection.send(&whole[..end]);
                socket
            })
            .collect();
        let mut socket = place.attach(&id, "");
        socket.type_in("whole\n");
        socket.read_until("whole");
        // Half a message is never typed.
        let mut half = halves.pop().unwrap();
        reset(halves.pop().unwrap().connection);
        half.connection.send(&whole[whole.len() - 1..]);
        assert!(half.read_until("never whole").contains("whole"));
        drop(halves);
        socket.type_in("the end\n");
        let shown = socket.read_until("the end");
        assert_eq!(shown.matches("never").count(), 1, "{shown}");
        place.delete(&id);
    });
}

/// Bytes before the answer to the handshake, frames in one segment with it, and a close at any point.
#[test]
fn frames_may_come_with_the_handshake() {
    in_both_modes(|place| {
        let id = place.reader("-echo");
        let target = place.target(&format!("processes/{id}/attach?offset=-1"));
        let mut connection = place.connect();
        let token = connection.token.clone().unwrap();
        let mut bytes = format!(
            "GET {target} HTTP/1.1\r\nHost: h\r\nX-Sandbox-Token: {token}\r\nUpgrade: websocket\r\n\
             Connection: upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        .into_bytes();
        bytes.extend(frame(0x82, b"early\n"));
        bytes.extend(frame(0x88, b""));
        connection.send(&bytes);
        assert_eq!(connection.read_head().status, 101);
        connection.read_to_close();
        place.attach(&id, "").read_until("early");
        place.delete(&id);
    });
}

/// Frames of which some bytes are others, are missing, or come twice. A viewer that does nothing wrong is
/// served all the while.
#[test]
fn mutated_frames_end_their_own_connection_at_most() {
    in_both_modes(|place| {
        let id = place.reader("raw -echo");
        let mut honest = place.attach(&id, "");
        honest.read_until("ready");
        let mut random = Random(0x5eed);
        let valid = [
            frame(0x82, b"typed"),
            frame(0x81, resize(30, 100).to_string().as_bytes()),
            frame(0x01, b"{\"eof\""),
            frame(0x89, b"ping"),
            frame(0x80, b":false}"),
            frame(0x02, &[b'x'; 300]),
            frame(0x80, b""),
            frame(0x8a, b""),
        ]
        .concat();
        for round in 0..150 {
            let mut bytes = valid.clone();
            for _ in 0..=random.below(3) {
                let at = random.below(bytes.len());
                let end = (at + random.below(9)).min(bytes.len());
                match random.below(4) {
                    0 => bytes[at] ^= 1 << random.below(8),
                    1 => bytes[at] = random.byte(),
                    2 => drop(bytes.drain(at..end)),
                    _ => bytes.extend_from_within(at..end),
                }
            }
            let mut socket = match round % 2 {
                0 => place.attach(&id, "offset=-1"),
                _ => place.attach_raw(&id, "offset=-1"),
            };
            socket.connection.send(&bytes);
            let _ = socket.connection.stream.shutdown(std::net::Shutdown::Write);
            let received = socket.connection.read_to_close();
            let mut rest = &received[..];
            while let [first, second, after @ ..] = rest {
                assert!(matches!(first, 0x81 | 0x82 | 0x88..=0x8a), "{first:#x}");
                let (length, after) = match (second, after) {
                    (..=125, after) => (usize::from(*second), after),
                    (126, [high, low, after @ ..]) => {
                        (usize::from(u16::from_be_bytes([*high, *low])), after)
                    }
                    other => panic!("{other:?}"),
                };
                // It may be cut off: the client has left.
                rest = after.get(length..).unwrap_or_default();
            }
            if round % 10 == 0 {
                honest.type_in(format!("<{round}>"));
                honest.read_until(&format!("<{round}>"));
            }
        }
        place.delete(&id);
    });
}
