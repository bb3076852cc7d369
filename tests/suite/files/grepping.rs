//! The promise of `files/grep`: every line that matches, in order, with its place; what was not searched
//! is told; the last event says whether it is all; and a search does not outlive its client.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Command;
use std::time::Duration;

use nix::sys::stat::Mode;
use serde_json::{Value, json};

use super::{MIB, Site, encode, expect_error, in_both_modes};
use crate::fixture::{PATIENCE, Random, Server, TempDir, events_of, wait_until};

/// The events of a search, the last one of which must be its end.
fn grep(site: &Site<'_>, request: &Value) -> (Vec<Value>, Value) {
    let mut request = request.clone();
    let name = request["path"].as_str().unwrap_or("").to_owned();
    request["path"] = site.path(&name).into();
    let reply = site.post("grep", &request);
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(reply.header("content-type"), Some("application/x-ndjson"));
    let mut events = events_of(&reply.body);
    let end = events.pop().expect("no events");
    assert_eq!(end["event"], "end", "{end}");
    events.retain(|event| event["event"] != "ping");
    for event in &mut events {
        let path = event["path"]
            .as_str()
            .unwrap()
            .strip_prefix(&site.path(""))
            .unwrap()
            .to_owned();
        event["path"] = path.into();
    }
    (events, end)
}

/// `path:line:text` of each match.
fn lines(events: &[Value]) -> Vec<String> {
    let is_match = |event: &&Value| event["event"] == "match";
    let line = |event: &Value| {
        let text = |name: &str| event[name].as_str().unwrap().to_owned();
        format!("{}:{}:{}", text("path"), event["line"], text("text"))
    };
    events.iter().filter(is_match).map(line).collect()
}

fn populate(site: &Site<'_>) {
    site.write("a.txt", "one\nTwo two\nthree\n");
    site.write("b/c.txt", "\u{e9}t\u{e9} two\r\nlast two");
    site.write("b.rs", "fn two() {}\n");
    site.write(".hidden", "two\n");
    site.write("ignored.log", "two\n");
    site.write(".gitignore", "*.log\n");
    site.write("binary", [&[b'x'; 1000][..], b"two\0two"].concat());
    site.write(
        "late",
        [&"x\n".repeat(40_000).into_bytes()[..], b"two\0\n"].concat(),
    );
    site.write("large", "two\n".repeat(1000));
    symlink("a.txt", site.root.join("link")).unwrap();
    symlink(".", site.root.join("circle")).unwrap();
    nix::unistd::mkfifo(&site.root.join("pipe"), Mode::S_IRWXU | Mode::S_IRWXO).unwrap();
}

#[test]
fn matches_are_told_in_order_with_their_places() {
    in_both_modes(|site| {
        populate(site);
        let (events, end) = grep(
            site,
            &json!({"pattern": "two", "max_file_bytes": 200_000, "per_file": 3, "before": 1, "after": 1}),
        );
        assert_eq!(
            events[0],
            json!({"event": "match", "path": "a.txt", "line": 2, "offset": 4, "text": "Two two", "spans": [[4, 7]], "before": ["one"], "after": ["three"]})
        );
        assert_eq!(
            events[1],
            json!({"event": "match", "path": "b/c.txt", "line": 1, "offset": 0, "text": "\u{e9}t\u{e9} two", "spans": [[4, 7]], "before": [], "after": ["last two"]})
        );
        assert_eq!(
            lines(&events)[2..],
            [
                "b/c.txt:2:last two",
                "b.rs:1:fn two() {}",
                "large:1:two",
                "large:2:two",
                "large:3:two",
                "late:40001:two\0"
            ]
        );
        let skipped: Vec<_> = events
            .iter()
            .filter(|event| event["event"] == "skipped")
            .collect();
        assert_eq!(
            skipped,
            [&json!({"event": "skipped", "path": "binary", "reason": "binary"})]
        );
        assert_eq!(
            end,
            json!({"event": "end", "matches": 8, "files": 5, "searched": 5, "skipped": 1, "truncated": true})
        );
        let (events, end) = grep(
            site,
            &json!({"pattern": "two", "max_file_bytes": 2000, "all": true, "glob": ["!b"]}),
        );
        assert_eq!(
            lines(&events),
            [
                ".hidden:1:two",
                "a.txt:2:Two two",
                "b.rs:1:fn two() {}",
                "ignored.log:1:two"
            ]
        );
        assert_eq!(
            (&end["skipped"], &end["truncated"]),
            (&json!(3), &json!(false))
        );
        let (events, _) = grep(site, &json!({"pattern": "two", "path": "b/c.txt"}));
        assert_eq!(lines(&events).len(), 2, "a file is searched by itself");
    });
}

#[test]
fn options_change_what_matches() {
    in_both_modes(|site| {
        site.write("f", "a.b\nA.B aXb\nword words\nx\ty\nend\n");
        for (request, expected) in [
            (json!({"pattern": "a.b"}), &["a.b", "A.B aXb"][..]),
            (json!({"pattern": "a.b", "literal": true}), &["a.b"]),
            (
                json!({"pattern": "a.b", "literal": true, "case": "insensitive"}),
                &["a.b", "A.B aXb"],
            ),
            (json!({"pattern": "A.b", "case": "smart"}), &[]),
            (
                json!({"pattern": "WORD", "case": "insensitive", "word": true}),
                &["word words"],
            ),
            (json!({"pattern": "ord", "word": true}), &[]),
            (json!({"pattern": "\\d|\\t"}), &["x\ty"]),
            (
                json!({"pattern": "y\\nend", "multiline": true}),
                &["x\ty\nend"],
            ),
            (json!({"pattern": "^end$"}), &["end"]),
            (json!({"pattern": "$", "limit": 2}), &["a.b", "A.B aXb"]),
        ] {
            let (events, _) = grep(site, &request);
            let texts: Vec<_> = events
                .iter()
                .map(|event| event["text"].as_str().unwrap())
                .collect();
            assert_eq!(texts, expected, "{request}");
        }
        let (events, _) = grep(site, &json!({"pattern": "word", "limit": 1}));
        assert_eq!(events[0]["spans"], json!([[0, 4], [5, 9]]));
        site.write(
            "g",
            format!("{}needle{}\n", "x".repeat(10_000), "y".repeat(10_000)),
        );
        let (events, _) = grep(site, &json!({"pattern": "needle"}));
        assert_eq!(events[0]["cut"], true);
        assert_eq!(events[0]["text"].as_str().unwrap().len(), 2000);
        let from = usize::try_from(events[0]["spans"][0][0].as_u64().unwrap()).unwrap();
        assert_eq!(
            &events[0]["text"].as_str().unwrap()[from..from + 6],
            "needle"
        );
        assert_eq!(events[0]["offset"].as_u64().unwrap() + from as u64, 10_000);
    });
}

#[test]
fn a_byte_order_mark_is_no_part_of_the_first_line() {
    in_both_modes(|site| {
        site.write("f", "\u{feff}first\nsecond \u{feff}\n");
        site.write("empty", "\u{feff}");
        let (events, end) = grep(site, &json!({"pattern": "^first$"}));
        assert_eq!(
            events,
            [
                json!({"event": "match", "path": "f", "line": 1, "offset": 3, "text": "first", "spans": [[0, 5]], "before": [], "after": []})
            ]
        );
        assert_eq!(end["searched"], 2);
        // Elsewhere it is a character like others.
        let (events, _) = grep(site, &json!({"pattern": "\u{feff}|\\Asecond", "before": 1}));
        assert_eq!(
            events,
            [
                json!({"event": "match", "path": "f", "line": 2, "offset": 9, "text": "second \u{feff}", "spans": [[7, 8]], "before": ["first"], "after": []})
            ]
        );
    });
}

/// The lines of a match are its own, and no match is lost where lines meet.
#[test]
fn matches_with_line_ends_are_all_told() {
    in_both_modes(|site| {
        site.write("f", "x\ny\nz\n");
        let (events, end) = grep(
            site,
            &json!({"pattern": "x\\n", "multiline": true, "after": 1}),
        );
        assert_eq!(
            events,
            [
                json!({"event": "match", "path": "f", "line": 1, "offset": 0, "text": "x", "spans": [[0, 1]], "before": [], "after": ["y"]})
            ]
        );
        assert_eq!(end["truncated"], false);
        let line = "a".repeat(60) + "x\n";
        site.write("f", line.repeat(300));
        // Matches that are lines, and those that meet within lines.
        for (pattern, count) in [("x\\n", 300), ("a\\w{9}x\\na", 299)] {
            let request = |per_file: u64| json!({"pattern": pattern, "multiline": true, "per_file": per_file});
            let (events, end) = grep(site, &request(1000));
            let spans = events
                .iter()
                .map(|event| event["spans"].as_array().unwrap().len());
            assert_eq!(spans.sum::<usize>(), count, "{pattern}");
            assert!(events.iter().all(|event| event["cut"].is_null()));
            assert_eq!(
                (&end["matches"], &end["truncated"]),
                (&json!(events.len()), &json!(false))
            );
            let (events, end) = grep(site, &request(2));
            assert_eq!(
                (events.len(), &end["matches"], &end["truncated"]),
                (2, &json!(2), &json!(true))
            );
        }
        // More matches in a line than one match tells.
        site.write("f", "a".repeat(250) + "\nb\n");
        let (events, _) = grep(site, &json!({"pattern": "a\\nb|a", "multiline": true}));
        assert_eq!(events.last().unwrap()["text"], "a".repeat(250) + "\nb");
    });
}

#[test]
fn a_search_is_truncated_only_if_there_is_more() {
    in_both_modes(|site| {
        site.write("f", "a\nb\na\nb\n");
        site.write("g", "none\n");
        let request = |limit: u64, per_file: u64| json!({"pattern": "^(a|b)$", "limit": limit, "per_file": per_file});
        let ask = |limit, per_file| {
            let (events, end) = grep(site, &request(limit, per_file));
            assert_eq!(end["matches"], events.len());
            (events.len(), end["files"].clone(), end["truncated"].clone())
        };
        assert_eq!(ask(4, 4), (4, json!(1), json!(false)));
        assert_eq!(ask(3, 4), (3, json!(1), json!(true)));
        assert_eq!(ask(4, 3), (3, json!(1), json!(true)));
        site.write("h", "b\n");
        assert_eq!(ask(4, 4), (4, json!(1), json!(true)));
        assert_eq!(ask(5, 4), (5, json!(2), json!(false)));
    });
}

#[test]
fn what_may_not_be_read_is_told() {
    in_both_modes(|site| {
        // The server of a machine is root here, whom no mode stops.
        if site.base.is_empty() {
            site.write("closed", "two\n");
            site.write("shut/inside", "two\n");
            site.write("z", "two\n");
            for name in ["closed", "shut"] {
                fs::set_permissions(site.root.join(name), fs::Permissions::from_mode(0o000))
                    .unwrap();
            }
            let (events, end) = grep(site, &json!({"pattern": "two"}));
            let denied =
                |path: &str| json!({"event": "skipped", "path": path, "reason": "permission"});
            assert_eq!(events[..2], [denied("closed"), denied("shut")]);
            assert_eq!(lines(&events), ["z:1:two"]);
            assert_eq!(end["skipped"], 2);
        }
    });
}

#[test]
fn context_that_is_cut_is_told() {
    in_both_modes(|site| {
        let fits = "\u{e9}".repeat(2000);
        for (before, after, is_cut) in [
            (fits.clone(), String::new(), false),
            (format!("{fits}x"), String::new(), true),
            (String::new(), "x".repeat(9000), true),
        ] {
            site.write("f", format!("{before}\nhere\n{after}\n"));
            let request =
                json!({"pattern": "here", "path": site.path("f"), "before": 1, "after": 1});
            let event = site.post("grep", &request).text();
            let event: Value = serde_json::from_str(event.lines().next().unwrap()).unwrap();
            assert_eq!(event.get("context_cut").is_some(), is_cut);
            assert_eq!(event.get("cut"), None);
            let kept: String = before.chars().take(2000).collect();
            assert_eq!(event["before"], json!([kept]));
        }
    });
}

#[test]
fn a_file_that_cannot_be_read_is_told() {
    in_both_modes(|site| {
        // Nothing is at the address 0 of the server, and a sandbox has no such file.
        if site.base.is_empty() {
            return;
        }
        let path = "/proc/self/mem";
        let reply = site.post("grep", &json!({"pattern": "two", "path": path}));
        let events = reply.text();
        assert!(events.contains("\"reason\":\"io\""), "{events}");
        assert!(events.contains("\"searched\":0,\"skipped\":1"), "{events}");
    });
}

#[test]
fn what_is_not_accepted_is_refused_with_its_place() {
    in_both_modes(|site| {
        site.write("f", "x");
        let ask = |request: &Value| site.post("grep", request);
        for (pattern, offset) in [("a(b", 1), ("\u{e9}[z-a]", 2), ("x{2,1}", 1)] {
            let reply = ask(&json!({"pattern": pattern, "path": site.path("")}));
            expect_error(&reply, 400, "bad_request");
            assert_eq!(reply.json()["offset"], offset, "{}", reply.text());
        }
        for request in [
            json!({}),
            json!({"pattern": ""}),
            json!({"pattern": "x".repeat(70_000)}),
            json!({"pattern": "(a{1000}){1000}"}),
            json!({"pattern": "a\nb"}),
            json!({"pattern": "x", "limit": 0}),
            json!({"pattern": "x", "before": 101}),
            json!({"pattern": "x", "glob": ["["]}),
            json!({"pattern": "x", "case": "none"}),
            json!({"pattern": "x", "max_file_bytes": 0}),
            json!({"pattern": "x", "per_file": 0}),
        ] {
            expect_error(&ask(&request), 400, "bad_request");
        }
        expect_error(
            &ask(&json!({"pattern": "x", "path": site.path("none")})),
            404,
            "not_found",
        );
    });
}

/// GNU grep is the model, on random text.
#[test]
fn it_finds_what_grep_finds() {
    in_both_modes(|site| {
        let mut random = Random(7);
        let words = [
            "foo", "bar", "x", "foobar", " ", "  ", "_", "12", "\n", "\n", "(", "Foo", "a.b",
        ];
        for number in 0..40 {
            let text: String = (0..random.below(300))
                .map(|_| *random.of(&words.each_ref()))
                .collect();
            site.write(&format!("tree/d{}/f{number}", number % 5), text);
        }
        for pattern in [
            "foo",
            "fo+b?",
            "^foo",
            "x$",
            "[0-9]+ ",
            "(foo|bar)_",
            "o{2}.x",
            "^$",
            "[^a-z ]+x",
            "a\\.b",
            "foo.*bar",
            "\\(",
            "(x|_)(x|_)",
            "b*a",
            "nothing here",
        ] {
            let output = Command::new("grep")
                .args(["-rnE", "-e", pattern, "."])
                .env("LC_ALL", "C")
                .current_dir(site.root.join("tree"))
                .output()
                .unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            let mut expected: Vec<_> = text
                .lines()
                .map(|line| line.strip_prefix("./").unwrap().to_owned())
                .collect();
            let (events, end) = grep(
                site,
                &json!({"pattern": pattern, "path": "tree", "per_file": 1000, "limit": 10_000}),
            );
            let mut found: Vec<_> = lines(&events)
                .iter()
                .map(|line| line.strip_prefix("tree/").unwrap().to_owned())
                .collect();
            assert_eq!(end["matches"], found.len());
            expected.sort();
            found.sort();
            assert_eq!(found, expected, "{pattern}");
        }
    });
}

/// The nice values of a process's threads.
pub fn nice_values(pid: i32) -> Vec<i32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let nice = |task: std::io::Result<fs::DirEntry>| {
        let stat = fs::read_to_string(task.ok()?.path().join("stat")).ok()?;
        // After the name, which may have spaces, the seventeenth field (proc(5)).
        stat.rsplit(')')
            .next()?
            .split_ascii_whitespace()
            .nth(16)?
            .parse()
            .ok()
    };
    tasks.filter_map(nice).collect()
}

/// Each byte costs a new state of the automaton, and no match ever comes: a minute in one file, or in one line.
#[test]
fn a_search_within_a_file_ends_with_its_client() {
    let server = Server::start();
    let dir = TempDir::new();
    let mut random = Random(3);
    let line: String = (0..MIB)
        .map(|_| if random.one_in(2) { 'a' } else { 'b' })
        .collect();
    for (name, text, pattern) in [
        ("one", line.clone(), "[ab]*a[ab]{18}c"),
        ("many", line.replace("aabb", "aab\n"), "[ab]*a[ab]{18}c"),
        (
            "lines",
            line[..260_000].to_owned() + "\n",
            "(?:a[ab]{5000})c",
        ),
    ] {
        fs::write(dir.join(name), text.repeat(32)).unwrap();
        for is_multiline in [false, true] {
            let body =
                json!({"pattern": pattern, "path": dir.join(name), "multiline": is_multiline});
            let mut connection = server.connect();
            connection.send_request("POST", "/v1/files/grep", &[], body.to_string().as_bytes());
            let is_searching = || nice_values(server.pid()).contains(&10);
            wait_until("a thread searches at nice 10", PATIENCE, is_searching);
            drop(connection);
            let limit = PATIENCE.min(Duration::from_secs(10));
            wait_until("the search has ended", limit, || !is_searching());
        }
    }
}

#[test]
fn a_search_is_nice_and_ends_with_its_client() {
    let server = Server::start();
    let dir = TempDir::new();
    // Hours of searching in one file of many names.
    fs::write(
        dir.join("0"),
        "abcdefghijklmnopqrstuvwxyz 01234\n".repeat(MIB / 4),
    )
    .unwrap();
    for name in 1..2000 {
        fs::hard_link(dir.join("0"), dir.join(&name.to_string())).unwrap();
    }
    let before = nice_values(server.pid());
    let body = json!({"pattern": "[a-z]+ [0-9]+[5-9]", "path": dir.path()}).to_string();
    let mut connection = server.connect();
    connection.send_request("POST", "/v1/files/grep", &[], body.as_bytes());
    wait_until("a thread searches at nice 10", PATIENCE, || {
        nice_values(server.pid()).contains(&10)
    });
    drop(connection);
    wait_until(
        "the search has ended",
        PATIENCE.min(Duration::from_secs(10)),
        || !nice_values(server.pid()).contains(&10),
    );
    assert!(!before.contains(&10));
    let route = format!(
        "/v1/files/list?path={}&limit=1",
        encode(dir.path().as_os_str().as_encoded_bytes())
    );
    assert_eq!(server.get(&route).status, 200);
}
