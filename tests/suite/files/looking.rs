//! The promise of what looks at files: lines by their numbers, and hashes, of files of any size in
//! constant memory, for as long as the client is there.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use serde_json::json;

use super::grepping::nice_values;
use super::{MIB, Place, expect_error, expect_ok, mkfifo};
use crate::fixture::{PATIENCE, memory_of, numbered_text, random_bytes, sha256, wait_until};
use crate::skip;

#[test]
fn lines_are_those_with_the_numbers() {
    Place::each(|place| {
        place.make("ten", "1\n2\n3\n4\n5\n6\n7\n8\n9\n10\n");
        place.make("open", "a\r\n\nc");
        place.make("empty", "");
        for (name, lines, expected, shown) in [
            ("ten", "1", "1\n", "1-1/10"),
            ("ten", "3-5", "3\n4\n5\n", "3-5/10"),
            ("ten", "9-", "9\n10\n", "9-10/10"),
            ("ten", "10-99999999999999999999999", "10\n", "10-10/10"),
            ("ten", "11", "", "*/10"),
            ("ten", "11-20", "", "*/10"),
            ("open", "1-2", "a\r\n\n", "1-2/3"),
            ("open", "3-", "c", "3-3/3"),
            ("empty", "1", "", "*/0"),
        ] {
            let route = format!("files/read?path=@{name}&lines={lines}");
            let reply = place.get(&route);
            assert_eq!(reply.status, 200, "{}", reply.text());
            assert_eq!(reply.text(), expected, "{name} {lines}");
            assert_eq!(reply.header("x-sbx-lines"), Some(shown), "{name} {lines}");
            let head = place.request("HEAD", &route, b"");
            assert_eq!((head.status, head.body.len()), (200, 0));
            assert_eq!(head.header("x-sbx-lines"), Some(shown));
            let length = expected.len().to_string();
            assert_eq!(head.header("content-length"), Some(length.as_str()));
        }
    });
}

#[test]
fn lines_of_large_files_and_large_lines_cost_no_memory() {
    Place::each(|place| {
        let text = numbered_text(40 * MIB);
        let lines: Vec<&str> = text.split_inclusive('\n').collect();
        place.make("text", &text);
        let reply = place.get("files/read?path=@text&lines=70000-70002");
        assert_eq!(reply.text(), lines[69_999..70_002].concat());
        let shown = format!("70000-70002/{}", lines.len());
        assert_eq!(reply.header("x-sbx-lines"), Some(shown.as_str()));
        // One line of 1 GiB, and a short one behind it.
        let path = place.make("long", "");
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(1 << 30).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"\nend\n", 1 << 30).unwrap();
        let pid = place.pid();
        let before = memory_of(pid, "VmRSS");
        let reply = place.get("files/read?path=@long&lines=2");
        assert_eq!(reply.text(), "end\n");
        assert_eq!(reply.header("x-sbx-lines"), Some("2-2/2"));
        let head = place.request("HEAD", "files/read?path=@long&lines=1", b"");
        assert_eq!(head.header("content-length"), Some("1073741825"));
        assert!(memory_of(pid, "VmRSS") < before + 16 * MIB as u64);
    });
}

#[test]
fn lines_of_what_has_none_are_refused() {
    Place::each(|place| {
        place.make("file", "a\n");
        mkfifo(place.path("pipe"));
        place.give(&place.path("pipe"));
        fs::create_dir(place.path("dir")).unwrap();
        place.give(&place.path("dir"));
        for (route, status, code) in [
            ("path=@file&lines=0", 400, "bad_request"),
            ("path=@file&lines=2-1", 400, "bad_request"),
            ("path=@file&lines=", 400, "bad_request"),
            ("path=@file&lines=-1", 400, "bad_request"),
            ("path=@file&lines=1,2", 400, "bad_request"),
            ("path=@file&lines=1&offset=0", 400, "bad_request"),
            ("path=@file&lines=1&length=1", 400, "bad_request"),
            ("path=@pipe&lines=1", 409, "not_regular"),
            ("path=@dir&lines=1", 409, "is_directory"),
            ("path=@none&lines=1", 404, "not_found"),
        ] {
            expect_error(&place.get(&format!("files/read?{route}")), status, code);
        }
        let target = place.target("files/read?path=@file&lines=1");
        let range = [("Range", "bytes=0-0")];
        let reply = place.connect().request("GET", &target, &range, b"");
        expect_error(&reply, 400, "bad_request");
    });
}

#[test]
fn a_hash_is_that_of_the_content() {
    Place::each(|place| {
        let content = random_bytes(3 * MIB + 17, 1);
        place.make("file", &content);
        place.make("empty", "");
        let plain = expect_ok(&place.get("files/stat?path=@file"));
        assert!(plain.get("sha256").is_none(), "only if it is asked for");
        for (name, content) in [("file", &content[..]), ("empty", b"")] {
            let entry = expect_ok(&place.get(&format!("files/stat?path=@{name}&hash=sha256")));
            assert_eq!(entry["sha256"], sha256(content), "{name}");
            assert_eq!(entry["size"], content.len());
            assert_eq!(entry["name"], name);
        }
        let full = expect_ok(&place.get("files/stat?path=@file&hash=sha256&detail=full"));
        assert_eq!(full["kind"], "file");
        assert!(full["sha256"].is_string());
    });
}

#[test]
fn many_hashes_are_in_the_order_of_their_paths_with_their_errors() {
    Place::each(|place| {
        mkfifo(place.path("pipe"));
        place.give(&place.path("pipe"));
        fs::create_dir(place.path("dir")).unwrap();
        place.give(&place.path("dir"));
        place.make("b", "bytes of b");
        place.make("a", "a");
        let names = ["b", "pipe", "a", "dir", "none", "b"];
        let paths = names.map(|name| format!("@{name}"));
        let answer = expect_ok(&place.post("files/hash", &json!({ "paths": paths })));
        let files = answer["files"].as_array().unwrap();
        assert_eq!(files.len(), names.len());
        for (file, name) in files.iter().zip(names) {
            assert_eq!(file["path"], place.told(&format!("@{name}")));
            let refused = match name {
                "pipe" => "not_regular",
                "dir" => "is_directory",
                "none" => "not_found",
                _ => {
                    let content = fs::read(place.path(name)).unwrap();
                    assert_eq!(file["sha256"], sha256(&content));
                    assert_eq!(file["size"], content.len());
                    assert!(file.get("error").is_none());
                    continue;
                }
            };
            assert_eq!(file["code"], refused);
            assert!(file["error"].as_str().unwrap().contains(name));
            assert!(file.get("sha256").is_none());
        }
        for (body, word) in [
            (json!({}), "paths"),
            (json!({"paths": []}), "10000"),
            (json!({"paths": vec!["a"; 10_001]}), "10000"),
            (json!({"paths": "a"}), "list"),
            (json!({"paths": [1]}), "list"),
            (json!({"paths": [""]}), "empty"),
            (json!({"paths": ["a\0b"]}), "NUL"),
        ] {
            let reply = place.post("files/hash", &body);
            expect_error(&reply, 400, "bad_request");
            assert!(reply.text().contains(word), "{}", reply.text());
        }
        for (name, status, code) in [
            ("pipe", 409, "not_regular"),
            ("dir", 409, "is_directory"),
            ("none", 404, "not_found"),
        ] {
            let reply = place.get(&format!("files/stat?path=@{name}&hash=sha256"));
            expect_error(&reply, status, code);
        }
        expect_error(
            &place.get("files/stat?path=@a&hash=md5"),
            400,
            "bad_request",
        );
    });
}

#[test]
fn links_are_hashed_as_they_are_read() {
    Place::each(|place| {
        place.make("file", "content");
        std::os::unix::fs::symlink("file", place.path("link")).unwrap();
        place.give(&place.path("link"));
        let reply = place.get("files/stat?path=@link&hash=sha256");
        if place.is_sandbox {
            expect_error(&reply, 403, "forbidden");
        } else {
            let entry = expect_ok(&reply);
            assert_eq!(entry["type"], "symlink");
            assert_eq!(entry["sha256"], sha256(b"content"));
        }
    });
}

/// Nobody waits for the end of these: the file is a tebibyte of holes.
#[test]
fn what_reads_a_large_file_ends_when_its_client_leaves() {
    Place::each(|place| {
        let path = place.make("large", "");
        let file = File::options().write(true).open(&path).unwrap();
        file.set_len(1 << 40).unwrap();
        drop(file);
        let Some(before) = place.open_files() else {
            skip!("only root can see what the server reads");
        };
        let body = place.told(r#"{"paths":["@large","@large"]}"#);
        let entry = json!({"path": "large", "size": 1_u64 << 40, "sha256": sha256(b"")});
        let compare = place.told(&json!({"path": "@.", "entries": [entry]}).to_string());
        for (method, route, body) in [
            ("GET", "files/read?path=@large&lines=5", ""),
            ("GET", "files/stat?path=@large&hash=sha256", ""),
            ("POST", "files/hash", body.as_str()),
            ("POST", "files/compare", compare.as_str()),
        ] {
            let mut connection = place.connect();
            connection.send_request(method, &place.target(route), &[], body.as_bytes());
            wait_until("the file is read", PATIENCE, || {
                place.open_files().unwrap().len() > before.len()
            });
            if method == "POST" || route.contains("hash") {
                wait_until("a thread reads at nice 10", PATIENCE, || {
                    nice_values(place.pid()).contains(&10)
                });
            }
            drop(connection);
            let begun = Instant::now();
            wait_until("the file is closed", PATIENCE, || {
                place.open_files().unwrap().len() == before.len()
            });
            let took = begun.elapsed();
            assert!(took < Duration::from_secs(5), "{method} {route}: {took:?}");
        }
    });
}

/// Only the first of it is read by the thread of the connection.
#[test]
fn what_is_hashed_elsewhere_is_read_as_the_sandbox() {
    Place::each(|place| {
        let large = vec![b'x'; 3 * MIB];
        place.make("large", &large);
        let secret = place.path("secret");
        File::create(&secret).unwrap();
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
        let paths = json!({"paths": ["@large", "@large", "@secret", "@large"]});
        let files = expect_ok(&place.post("files/hash", &paths))["files"].take();
        for number in [0, 1, 3] {
            assert_eq!(files[number]["sha256"], sha256(&large));
        }
        let empty = json!(sha256(b""));
        let entry = json!({"path": "secret", "size": 0, "sha256": empty});
        let body = json!({"path": "@.", "entries": [entry]});
        let different = expect_ok(&place.post("files/compare", &body))["different"].take();
        if place.is_sandbox {
            assert_eq!(files[2]["code"], "forbidden");
            assert_eq!(different, json!(["secret"]));
        } else {
            assert_eq!(files[2]["sha256"], empty);
            assert_eq!(different, json!([]));
        }
    });
}

#[test]
fn a_hash_that_takes_long_keeps_its_connection_alive() {
    let server = crate::fixture::Server::builder()
        .env("SBX_PING_SECS", 1)
        .start();
    let dir = crate::fixture::TempDir::new();
    let file = File::create(dir.join("large")).unwrap();
    file.set_len(1 << 40).unwrap();
    let mut connection = server.connect();
    let target = super::target("stat", dir.join("large"), "&hash=sha256");
    connection.send_request("GET", &target, &[], b"");
    // The head, and the chunks of two pings.
    let mut seen = Vec::new();
    let mut byte = [0];
    let pings = |seen: &[u8]| {
        let text = String::from_utf8_lossy(seen).into_owned();
        text.split_once("\r\n\r\n")
            .map_or(0, |(_, body)| body.matches(" \r\n").count())
    };
    while pings(&seen) < 2 {
        std::io::Read::read_exact(&mut connection.stream, &mut byte).unwrap();
        seen.extend_from_slice(&byte);
    }
    assert!(seen.starts_with(b"HTTP/1.1 200 "));
}
