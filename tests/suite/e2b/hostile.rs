//! What no client sends: the server answers, stays well, and holds no more memory for it.

use std::time::Duration;

use serde_json::json;

use super::{Door, envelope, machine, on_a_host};
use crate::fixture::{Random, Reply, Server, memory_of};

const START: &str = "/process.Process/Start";

fn raw(door: &Door<'_>, method: &str, body: &[u8]) -> Reply {
    let headers = [("content-type", "application/connect+json")];
    door.request("POST", method, &headers, body)
}

/// The code of the error at the end of a stream that says nothing else.
#[track_caller]
fn code(reply: &Reply) -> String {
    assert_eq!(reply.status, 200, "{}", reply.text());
    let mut body = reply.body.clone();
    let (flags, message) = super::take_message(&mut body).expect("a message");
    assert_eq!((flags, body.len()), (2, 0), "{message}");
    message["error"]["code"]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

#[test]
fn envelopes_that_are_cut_anywhere_start_nothing() {
    let (_home, server) = machine();
    let door = Door::open(&server);
    let message = json!({ "process": { "cmd": "sleep", "args": ["1000"] } }).to_string();
    let whole = envelope(0, message.as_bytes());
    for end in 0..whole.len() {
        assert_eq!(
            code(&raw(&door, START, &whole[..end])),
            "invalid_argument",
            "cut at {end}"
        );
    }
    for (body, expected) in [
        ([&whole[..], b"x"].concat(), "invalid_argument"),
        ([&whole[..], &whole].concat(), "invalid_argument"),
        (envelope(1, message.as_bytes()), "unimplemented"),
        (envelope(2, message.as_bytes()), "invalid_argument"),
        (envelope(255, message.as_bytes()), "unimplemented"),
        (b"\0\xff\xff\xff\xff{}".to_vec(), "resource_exhausted"),
        (b"\0\x7f\xff\xff\xff".to_vec(), "resource_exhausted"),
        (envelope(0, b"[]"), "invalid_argument"),
        (envelope(0, b"{\"process\":7}"), "invalid_argument"),
        (
            envelope(0, b"{\"process\":{\"cmd\":\"a\\u0000b\"}}"),
            "invalid_argument",
        ),
        (envelope(0, b"\xff\xfe"), "invalid_argument"),
        (envelope(0, &b"[".repeat(200_000)), "invalid_argument"),
    ] {
        assert_eq!(
            code(&raw(&door, START, &body)),
            expected,
            "{:?}",
            &body[..body.len().min(60)]
        );
    }
    let start = envelope(0, b"{\"start\":{\"process\":{\"pid\":1}}}");
    let early = envelope(0, b"{\"data\":{\"input\":{\"stdin\":\"aGk=\"}}}");
    for (body, expected) in [
        (early, "invalid_argument"),
        (start.clone(), "not_found"),
        (start[..start.len() - 1].to_vec(), "invalid_argument"),
        (b"\0\xff\xff\xff\xff{}".to_vec(), "resource_exhausted"),
        (b"\0\0".to_vec(), "invalid_argument"),
    ] {
        let reply = raw(&door, "/process.Process/StreamInput", &body);
        assert_eq!(code(&reply), expected, "{body:?}");
    }
    assert_eq!(
        door.ok("/process.Process/List", &json!({})),
        json!({ "processes": [] })
    );
}

#[test]
fn lengths_that_are_announced_take_no_memory() {
    let (_home, server) = machine();
    let door = Door::open(&server);
    door.sh("true");
    let before = memory_of(server.pid(), "VmRSS");
    let mut waiting = Vec::new();
    for _ in 0..50 {
        let mut connection = door.connect();
        let head = format!(
            "POST /process.Process/StreamInput HTTP/1.1\r\nHost: x\r\nContent-Type: application/connect+json\r\n\
             X-Access-Token: {}\r\nContent-Length: 16777221\r\n\r\n",
            door.token
        );
        connection.send(head.as_bytes());
        // A message of 16 MiB is announced, and a byte of it comes.
        connection.send(b"\0\x01\0\0\0{");
        waiting.push(connection);
    }
    door.sh("true");
    let after = memory_of(server.pid(), "VmRSS");
    assert!(after < before + (40 << 20), "{before} {after}");
}

#[test]
fn bodies_of_many_parts_are_answered() {
    let (_home, server) = machine();
    let door = Door::open(&server);
    let mut random = Random(5);
    let headers = [("content-type", "multipart/form-data; boundary=b")];
    let pieces: [&[u8]; 10] = [
        b"\r\n--b\r\n",
        b"--b--",
        b"--b",
        b"\r\n",
        b"\r\n\r\n",
        b"Content-Disposition: form-data; name=\"file\"; filename=\"/dev/null/x\"\r\n",
        b"Content-Disposition: form-data; name=\"x\"\r\n\r\n",
        b"\0\xff",
        b"content",
        b"\"; \\",
    ];
    for _ in 0..300 {
        let count = random.below(12);
        let body: Vec<u8> = (0..count)
            .flat_map(|_| random.of(&pieces).to_vec())
            .collect();
        let reply = door.request("POST", "/files", &headers, &body);
        assert!(
            matches!(reply.status, 200 | 400),
            "{}: {:?}",
            reply.text(),
            String::from_utf8_lossy(&body)
        );
    }
    let long = [
        b"--b\r\nContent-Disposition: form-data; name=\"".to_vec(),
        vec![b'x'; 1 << 20],
    ]
    .concat();
    assert_eq!(door.request("POST", "/files", &headers, &long).status, 400);
    let many = b"--b\r\nContent-Disposition: form-data; name=\"x\"\r\n\r\n\r\n".repeat(20_000);
    let many = [&many[..], b"--b--"].concat();
    assert_eq!(
        door.request("POST", "/files", &headers, &many).json(),
        json!([])
    );
}

#[test]
fn a_slow_reader_is_told_that_it_lost_output() {
    let server = Server::builder().env("SBX_LOG_BYTES", 65536).start();
    let door = Door::open(&server);
    let start = json!({ "process": { "cmd": "/bin/sh", "args": ["-c", "read x; head -c 30000000 /dev/zero"] } });
    let mut own = door.begin(START, &start, &[]);
    let pid = own.next().unwrap().1["event"]["start"]["pid"].clone();
    let selector = json!({ "process": { "pid": pid } });
    let slow = door.begin("/process.Process/Connect", &selector, &[]);
    door.ok(
        "/process.Process/SendInput",
        &json!({ "process": { "pid": pid }, "input": { "stdin": "Cg==" } }),
    );
    // Who started it gets every byte.
    let all = own.rest();
    let bytes: usize = all
        .iter()
        .filter_map(|(_, message)| message["event"]["data"]["stdout"].as_str())
        .map(|data| crate::fixture::decode_base64(data).len())
        .sum();
    assert_eq!(bytes, 30_000_000);
    let messages = slow.rest();
    let [.., (0, end), (2, last)] = &messages[..] else {
        panic!("{:?}", messages.last());
    };
    assert_eq!(end["event"]["end"]["exitCode"], 0);
    assert_eq!(last["error"]["code"], "data_loss", "{last}");
}

#[test]
fn a_flood_of_clients_that_leave_leaves_nothing_behind() {
    on_a_host(|server| {
        let door = Door::open(server);
        let message = json!({ "process": { "cmd": "sleep", "args": ["0.2"] } });
        for round in 0..40 {
            let mut stream = door.begin(START, &message, &[]);
            if round % 2 == 0 {
                stream.next().unwrap();
            }
        }
        crate::fixture::wait_until("all have ended", Duration::from_secs(20), || {
            door.ok("/process.Process/List", &json!({})) == json!({ "processes": [] })
        });
        assert_eq!(door.sh("echo hi").text(), "hi\n");
    });
}

#[test]
fn long_lists_take_no_more_memory_than_their_text() {
    on_a_host(|server| {
        let door = Door::open(server);
        // As many attributes as ext4 has room for.
        let script = "import os\nopen('f', 'w').close()\n\
                      for i in range(40): os.setxattr('f', f'user.e2b.{i}', b'v' * 50)\n\
                      os.mkdir('d')\nfor i in range(10000): os.link('f', f'd/{i}')";
        let ran = door.run(&json!({ "cmd": "python3", "args": ["-c", script] }));
        if ran.end["exitCode"] != 0 {
            crate::skip!("no python3, or no attributes here: {ran:?}");
        }
        let before = memory_of(server.pid(), "VmRSS");
        let reply = door.call("/filesystem.Filesystem/ListDir", &json!({ "path": "d" }));
        let text = reply.body.len() as u64;
        assert!(
            reply.status == 200 && text > 10_000 * 40 * 50,
            "{}",
            reply.status
        );
        let after = memory_of(server.pid(), "VmHWM");
        assert!(after < before + 3 * text, "{before} {after} {text}");
    });
}
