//! What may be asked of a new sandbox, what the answer holds, and what is refused.

use std::collections::BTreeSet;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use serde_json::{Value, json};

use super::{SANDBOXES, create, homes_of, list, needs_root, target};
use crate::fixture::{Outcome, PATIENCE, Sandbox, Server, TOKEN, assert_error, wait_until};

#[test]
fn a_sandbox_is_usable_by_the_very_next_request() {
    needs_root!();
    let server = Server::host().start();
    let mut connection = server.connect();
    for _ in 0..10 {
        let reply = connection.request("POST", SANDBOXES, &[], b"{}");
        assert_eq!(reply.status, 200, "{}", reply.text());
        let sandbox = Sandbox::of(&server, &reply.json()["sandboxes"][0]);
        connection.token = Some(sandbox.token.clone());
        let body = json!({"cmd": "id -u; pwd"}).to_string();
        let reply = connection.request("POST", &sandbox.target("exec"), &[], body.as_bytes());
        assert_eq!(reply.status, 200, "{}", reply.text());
        let outcome = Outcome::of(crate::fixture::events_of(&reply.body));
        let expected = format!("{}\n{}\n", sandbox.uid, sandbox.home.display());
        assert_eq!(outcome.stdout, expected);
        connection.token = Some(TOKEN.to_owned());
    }
}

#[test]
fn the_answer_describes_each_sandbox() {
    needs_root!();
    let server = Server::host().start();
    let place = server.place.as_ref().unwrap();
    let reply = server.post(SANDBOXES, &json!({}));
    assert_eq!(reply.status, 200);
    let answer = reply.json();
    assert_eq!(answer["rejected"], 0);
    assert_eq!(answer["sandboxes"].as_array().unwrap().len(), 1);
    let made = &answer["sandboxes"][0];
    let health = server.get("/health").json();
    for layer in ["landlock_abi", "layers"] {
        assert_eq!(made["isolation"][layer], health["isolation"][layer]);
    }
    assert_eq!(health["mode"], "host");
    assert_eq!(health["sandboxes"], 1);
    assert_eq!(made["idle_timeout_secs"], Value::Null);
    assert_eq!(made["max_mem_mb"], Value::Null);
    assert!(made["max_procs"].as_u64().unwrap() > 0);
    assert!(made["created_at_ms"].as_u64().unwrap() > 1_600_000_000_000);

    let sandbox = Sandbox::of(&server, made);
    assert!(!sandbox.token.is_empty() && sandbox.token != TOKEN);
    assert_eq!(sandbox.home.parent(), Some(&*place.homes()));
    let home = std::fs::metadata(&sandbox.home).unwrap();
    assert_eq!((home.uid(), home.gid()), (sandbox.uid, sandbox.uid));
    assert_eq!(home.permissions().mode() & 0o7777, 0o700);
    let range = place.range();
    let (first, last) = range.split_once('-').unwrap();
    let users = first.parse().unwrap()..=last.parse().unwrap();
    assert!(users.contains(&sandbox.uid));
}

#[test]
fn a_body_is_optional_and_unknown_fields_are_ignored() {
    needs_root!();
    let server = Server::host().start();
    for body in [
        "",
        "  \n",
        "{}",
        r#"{"colour":"blue","nested":{"a":[1]}}"#,
        r#"{"count":null,"env":null,"idle_timeout_secs":null,"max_procs":null,"max_mem_mb":null}"#,
    ] {
        let reply = server.request("POST", SANDBOXES, body.as_bytes());
        assert_eq!(reply.status, 200, "{body}: {}", reply.text());
        assert_eq!(reply.json()["sandboxes"].as_array().unwrap().len(), 1);
    }
    // Neither a length nor a chunk.
    let mut connection = server.connect();
    let head = format!("POST {SANDBOXES} HTTP/1.1\r\nHost: a\r\nX-Sandbox-Token: {TOKEN}\r\n\r\n");
    connection.send(head.as_bytes());
    assert_eq!(connection.read_reply().status, 200);
    let chunked = [("Transfer-Encoding", "chunked")];
    let body = b"b\r\n{\"count\": 2}\r\n0\r\n\r\n";
    let body = String::from_utf8_lossy(body).replace("b\r\n", "c\r\n");
    let reply = server
        .connect()
        .request("POST", SANDBOXES, &chunked, body.as_bytes());
    assert_eq!(reply.json()["sandboxes"].as_array().unwrap().len(), 2);
    assert_eq!(list(&server).len(), 8);
}

#[test]
fn a_count_makes_so_many_and_no_two_share_anything() {
    needs_root!();
    let server = Server::host().start();
    let (made, rejected) = create(&server, 64);
    assert_eq!((made.len(), rejected), (64, 0));
    let distinct = |each: &dyn Fn(&Sandbox<'_>) -> String| {
        made.iter().map(each).collect::<BTreeSet<_>>().len()
    };
    assert_eq!(distinct(&|sandbox| sandbox.id.clone()), 64);
    assert_eq!(distinct(&|sandbox| sandbox.token.clone()), 64);
    assert_eq!(distinct(&|sandbox| sandbox.uid.to_string()), 64);
    assert_eq!(distinct(&|sandbox| sandbox.home.display().to_string()), 64);
    for sandbox in &made {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
        let id = &sandbox.id;
        assert!(
            !id.is_empty() && id.bytes().all(is_plain),
            "{id:?} goes into paths"
        );
    }
    for sandbox in [&made[0], &made[63]] {
        assert_eq!(sandbox.sh("id -u").trim(), sandbox.uid.to_string());
    }
}

#[test]
fn env_is_in_the_environment_of_every_command() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox_with(&json!({"env": {
        "TEXT": "a b=c\nd é", "EMPTY": "", "WHOLE": 1, "NEGATIVE": -3, "FRACTION": 1.5,
        "YES": true, "NO": false, "USER": null, "TMPDIR": "/elsewhere",
    }}));
    let show = |body: &Value| -> BTreeSet<String> {
        let outcome = sandbox.exec(body);
        assert_eq!(outcome.code(), Some(0), "{outcome:?}");
        outcome.stdout.split('\0').map(str::to_owned).collect()
    };
    let all = show(&json!({"cmd": ["env", "-0"]}));
    for expected in [
        "TEXT=a b=c\nd é",
        "EMPTY=",
        "WHOLE=1",
        "NEGATIVE=-3",
        "FRACTION=1.5",
        "YES=true",
        "NO=false",
        "TMPDIR=/elsewhere",
    ] {
        assert!(all.contains(expected), "{expected}: {all:?}");
    }
    let has = |all: &BTreeSet<String>, name: &str| {
        let start = format!("{name}=");
        all.iter().any(|entry| entry.starts_with(&start))
    };
    assert!(!has(&all, "USER"), "null removes: {all:?}");
    assert!(has(&all, "HOME") && has(&all, "LOGNAME"));
    assert!(!has(&all, "SBX_TOKEN"));

    // A command's own changes come after the sandbox's.
    let body = json!({"cmd": ["env", "-0"], "env": {"TEXT": "mine", "WHOLE": null, "NEW": 7}});
    let own = show(&body);
    assert!(
        own.contains("TEXT=mine") && own.contains("NEW=7"),
        "{own:?}"
    );
    assert!(!has(&own, "WHOLE") && own.contains("YES=true"), "{own:?}");
    assert_eq!(show(&json!({"cmd": ["env", "-0"]})), all);

    // And nobody else's.
    let other = server.sandbox().sh("env");
    assert!(
        !other.contains("WHOLE=") && other.contains("USER="),
        "{other}"
    );
}

#[test]
fn a_field_that_cannot_be_is_named_and_nothing_is_made() {
    needs_root!();
    let server = Server::host().start();
    let numbers: &[&str] = &[
        "-1",
        "-0.5",
        "1.5",
        "\"1\"",
        "\"\"",
        "true",
        "false",
        "[]",
        "[1]",
        "{}",
        "1e99",
        "-1e99",
        "18446744073709551616",
        "99999999999999999999999999",
        "9223372036854775808",
    ];
    for (field, values) in [
        ("count", numbers),
        ("count", &["0", "10001", "4294967297"]),
        ("idle_timeout_secs", numbers),
        ("idle_timeout_secs", &["4294967296"]),
        ("max_procs", numbers),
        ("max_procs", &["0", "1048577"]),
        ("max_mem_mb", numbers),
        ("max_total_mem_mb", numbers),
        ("max_mem_mb", &["0", "1073741825", "17592186044416"]),
        ("max_total_mem_mb", &["0", "1073741825", "17592186044416"]),
        ("env", &["[]", "[\"A=1\"]", "\"A=1\"", "1", "true"]),
        (
            "env",
            &[
                r#"{"A":[]}"#,
                r#"{"A":{}}"#,
                r#"{"A":["x"]}"#,
                r#"{"":"x"}"#,
                r#"{"A=B":"x"}"#,
                r#"{"A":"x\u0000y"}"#,
                r#"{"A\u0000B":"x"}"#,
            ],
        ),
    ] {
        for value in values {
            // Beside what is right, before and after it.
            for body in [
                format!(r#"{{"count":2,"{field}":{value}}}"#),
                format!(r#"{{"{field}":{value},"max_procs_":1}}"#),
            ] {
                if field == "count" && body.starts_with(r#"{"count":2"#) {
                    continue;
                }
                let reply = server.request("POST", SANDBOXES, body.as_bytes());
                assert_eq!(reply.status, 400, "{body}: {}", reply.text());
                let text = reply.json()["error"].as_str().unwrap().to_owned();
                assert!(text.contains(field), "{body}: {text}");
            }
        }
    }
    assert_eq!(list(&server), Vec::<Value>::new());
    assert_eq!(homes_of(&server), Vec::<String>::new());
}

#[test]
fn a_body_that_is_no_object_is_refused_and_nothing_is_made() {
    needs_root!();
    let server = Server::host().start();
    for body in [
        &b"{"[..],
        b"[]",
        b"1",
        b"null",
        b"\"count\"",
        b"{\"count\":1}}",
        b"{\"count\":1} x",
        b"{count:1}",
        b"{\"count\":}",
        b"{\"count\":01}",
        b"{\"env\":{\"A\":\"\xff\"}}",
        b"\0",
    ] {
        let reply = server.request("POST", SANDBOXES, body);
        let shown = String::from_utf8_lossy(body);
        assert_eq!(reply.status, 400, "{shown}: {}", reply.text());
    }
    let head = [("Content-Length", "16777217")];
    let mut connection = server.connect();
    connection.send_request("POST", SANDBOXES, &head, b"");
    assert_error(&connection.read_reply(), 413, "too_large");
    assert_eq!(list(&server), Vec::<Value>::new());
    assert_eq!(homes_of(&server), Vec::<String>::new());
}

#[test]
fn limits_are_told_and_hold() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox_with(&json!({"max_procs": 9, "max_mem_mb": 64}));
    let told = server.get(&target(&sandbox.id, "")).json();
    assert_eq!(
        (&told["max_procs"], &told["max_mem_mb"]),
        (&json!(9), &json!(64))
    );
    let limits = sandbox.sh("cat /proc/self/limits");
    let line = |name: &str| {
        let line = limits.lines().find(|line| line.starts_with(name)).unwrap();
        let fields: Vec<&str> = line[name.len()..].split_whitespace().collect();
        (fields[0].to_owned(), fields[1].to_owned())
    };
    assert_eq!(line("Max processes"), ("9".to_owned(), "9".to_owned()));
    let bytes = (64 << 20).to_string();
    assert_eq!(line("Max data size"), (bytes.clone(), bytes));

    // 8 beside the shell are too many by none, and 20 by more than one.
    let outcome = sandbox.exec(&json!({
        "cmd": "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do sleep 3600 & done; echo all"
    }));
    assert!(!outcome.stdout.contains("all"), "{outcome:?}");
    let mut most = 0;
    wait_until("the sleepers are counted", PATIENCE, || {
        most = sandbox.processes().len();
        most > 0
    });
    assert!(most <= 9, "{most}");
    // Another's limit is its own.
    assert_eq!(
        server
            .sandbox()
            .sh("for i in 1 2 3 4 5 6 7 8 9 10; do sleep 0 & done; wait; echo all"),
        "all\n"
    );
}

#[test]
fn the_list_is_in_the_order_of_making_and_tells_no_token() {
    needs_root!();
    let server = Server::host().start();
    assert_eq!(server.get(SANDBOXES).text().trim(), "[]");
    let made: Vec<_> = (0..20).map(|_| server.sandbox()).collect();
    let reply = server.get(SANDBOXES);
    assert_eq!(reply.header("content-type"), Some("application/json"));
    let listed: Vec<Value> = serde_json::from_slice(&reply.body).unwrap();
    let ids: Vec<_> = listed
        .iter()
        .map(|entry| entry["id"].as_str().unwrap())
        .collect();
    let expected: Vec<_> = made.iter().map(|sandbox| sandbox.id.as_str()).collect();
    assert_eq!(ids, expected);
    for (sandbox, entry) in made.iter().zip(&listed) {
        let one = server.get(&target(&sandbox.id, ""));
        assert_eq!(one.json(), *entry, "the same alone and in the list");
        for text in [reply.text(), one.text()] {
            assert!(
                !text.contains(&sandbox.token) && !text.contains("\"token\""),
                "{text}"
            );
        }
        let token = server.get(&target(&sandbox.id, "/token"));
        assert_eq!(token.json()["token"], sandbox.token.as_str());
    }
}

#[test]
fn what_was_never_made_is_not_found() {
    needs_root!();
    let server = Server::host().start();
    let unknown = "0123456789abcdef01234567";
    for id in [unknown, "x", "..", "%2e%2e", "p-1"] {
        for (method, rest) in [
            ("GET", ""),
            ("DELETE", ""),
            ("GET", "/token"),
            ("GET", "/processes"),
        ] {
            let reply = server.request(method, &target(id, rest), b"");
            assert_error(&reply, 404, "not_found");
        }
    }
    let reply = server.get(&target(unknown, ""));
    assert!(reply.text().contains(unknown), "{}", reply.text());
}

#[test]
fn each_route_says_what_methods_it_has() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    for (rest, allow) in [
        ("", "GET, DELETE, PATCH, HEAD, OPTIONS"),
        ("/token", "GET, HEAD, OPTIONS"),
        ("/exec", "POST, OPTIONS"),
    ] {
        let reply = server.request("OPTIONS", &target(&sandbox.id, rest), b"");
        assert_eq!((reply.status, reply.header("allow")), (204, Some(allow)));
        let reply = server.request("PUT", &target(&sandbox.id, rest), b"");
        assert_eq!((reply.status, reply.header("allow")), (405, Some(allow)));
    }
    let allow = Some("GET, POST, DELETE, HEAD, OPTIONS");
    let reply = server.request("PUT", SANDBOXES, b"{}");
    assert_eq!((reply.status, reply.header("allow")), (405, allow));
    let head = server.request("HEAD", SANDBOXES, b"");
    assert_eq!(head.status, 200);
    assert_eq!(list(&server).len(), 1);
}
