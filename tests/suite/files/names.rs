//! The promise of names: every entry is listed once, in order, and what is listed can be sent back,
//! whatever bytes the name is made of.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, symlink};
use std::os::unix::net::UnixListener;
use std::process::Command;
use std::time::{Duration, Instant, UNIX_EPOCH};

use nix::sys::stat::futimens;
use nix::sys::time::TimeSpec;
use serde_json::{Value, json};

use super::{
    PATH_ROUTES, chmod, delete, encode, expect_error, expect_ok, list, meanwhile, mkfifo, moving,
    read, stat, target, unprivileged, write,
};
use crate::fixture::{Server, TempDir, decode_base64, is_root, memory_of, names_in};
use crate::skip;

#[test]
fn entries_have_exactly_the_keys_that_clients_know() {
    let server = Server::start();
    let dir = TempDir::new();
    fs::write(dir.join("file"), "12345").unwrap();
    chmod(dir.join("file"), 0o640);
    fs::create_dir(dir.join("dir")).unwrap();
    chmod(dir.join("dir"), 0o1777);
    symlink("file", dir.join("link")).unwrap();
    mkfifo(dir.join("fifo"));
    let _socket = UnixListener::bind(dir.join("socket")).unwrap();
    let old = UNIX_EPOCH + Duration::from_millis(86_400_123);
    OpenOptions::new()
        .write(true)
        .open(dir.join("file"))
        .unwrap()
        .set_modified(old)
        .unwrap();

    let reply = expect_ok(&server.get(&target("list", dir.join(""), "")));
    assert_eq!(reply["next"], Value::Null);
    let entries = reply["entries"].as_array().unwrap().clone();
    let seen: Vec<_> = entries
        .iter()
        .map(|entry| entry["name"].as_str().unwrap())
        .collect();
    assert_eq!(seen, ["dir", "fifo", "file", "link", "socket"], "sorted");
    for entry in &entries {
        let keys: BTreeSet<&str> = entry
            .as_object()
            .unwrap()
            .keys()
            .map(String::as_str)
            .collect();
        assert_eq!(
            keys,
            BTreeSet::from(["name", "path", "type", "size", "mtime_ms", "mode"]),
            "{entry}"
        );
        let name = entry["name"].as_str().unwrap();
        assert_eq!(
            stat(&server, entry["path"].as_str().unwrap(), ""),
            *entry,
            "listed as it is described"
        );
        assert_eq!(entry["path"], dir.join(name).as_str());
        assert!(entry["mtime_ms"].is_i64(), "{entry}");
    }
    let of = |name: &str| entries.iter().find(|entry| entry["name"] == name).unwrap();
    assert_eq!(
        (&of("file")["type"], &of("file")["size"]),
        (&"file".into(), &5.into())
    );
    assert_eq!(
        (&of("file")["mode"], &of("file")["mtime_ms"]),
        (&"640".into(), &86_400_123.into())
    );
    assert_eq!(
        (&of("dir")["type"], &of("dir")["mode"]),
        (&"dir".into(), &"1777".into())
    );
    assert_eq!(
        (&of("link")["type"], &of("link")["size"]),
        (&"symlink".into(), &5.into())
    );
    assert_eq!(of("fifo")["type"], "file");
    assert_eq!(of("socket")["type"], "file");
}

#[test]
fn a_time_before_1970_is_a_negative_number() {
    let server = Server::start();
    let dir = TempDir::new();
    let file = File::create(dir.join("file")).unwrap();
    file.set_modified(UNIX_EPOCH - Duration::from_millis(86_400_500))
        .unwrap();
    assert_eq!(stat(&server, dir.join("file"), "")["mtime_ms"], -86_400_500);
}

/// The name of an entry as the file system has it.
fn raw_name(entry: &Value) -> Vec<u8> {
    decode_base64(entry["name_b64"].as_str().unwrap())
}

#[test]
fn detail_full_tells_everything_about_an_entry() {
    let server = Server::start();
    let dir = TempDir::new();
    fs::write(dir.join("file"), "12345").unwrap();
    fs::hard_link(dir.join("file"), dir.join("hard")).unwrap();
    fs::create_dir(dir.join("dir")).unwrap();
    symlink("fi\u{fffd}le/\u{2603}", dir.join("dangling")).unwrap();
    symlink(OsStr::from_bytes(b"caf\xe9"), dir.join("latin")).unwrap();
    symlink("file", dir.join("link")).unwrap();
    mkfifo(dir.join("fifo"));
    let _socket = UnixListener::bind(dir.join("socket")).unwrap();
    if is_root() {
        std::os::unix::fs::chown(dir.join("file"), Some(1234), Some(4321)).unwrap();
    }
    let kinds = BTreeMap::from([
        ("dangling", "symlink"),
        ("dir", "dir"),
        ("fifo", "fifo"),
        ("file", "file"),
        ("hard", "file"),
        ("latin", "symlink"),
        ("link", "symlink"),
        ("socket", "socket"),
    ]);
    let entries = list(&server, dir.join(""), "&detail=full");
    assert_eq!(entries.len(), kinds.len());
    for entry in &entries {
        let name = entry["name"].as_str().unwrap();
        assert_eq!(stat(&server, dir.join(name), "&detail=full"), *entry);
        let meta = fs::symlink_metadata(dir.join(name)).unwrap();
        assert_eq!(entry["kind"], kinds[name], "{entry}");
        assert_eq!(raw_name(entry), name.as_bytes(), "{entry}");
        assert_eq!(
            (&entry["uid"], &entry["gid"]),
            (&meta.uid().into(), &meta.gid().into()),
            "{entry}"
        );
        assert_eq!(
            (&entry["inode"], &entry["nlink"]),
            (&meta.ino().into(), &meta.nlink().into()),
            "{entry}"
        );
        let target = match name {
            "dangling" => "fi\u{fffd}le/\u{2603}".into(),
            "latin" => "caf\u{efe9}".into(),
            "link" => "file".into(),
            _ => Value::Null,
        };
        assert_eq!(entry["link_target"], target, "{entry}");
        for key in ["path", "type", "size", "mtime_ms", "mode"] {
            assert!(
                entry.get(key).is_some(),
                "{key} is there as without detail: {entry}"
            );
        }
    }
    for (path, kind) in [("/dev/null", "char"), ("/", "dir")] {
        assert_eq!(stat(&server, path, "&detail=full")["kind"], kind);
    }
    assert_eq!(stat(&server, "/dev/null", "")["type"], "file");
}

/// Names that something on the way might take for something else.
const ODD_NAMES: &[&[u8]] = &[
    b"a&b=c",
    b"+",
    b"a+b c",
    b"%",
    b"%25",
    b"%2",
    b"%zz",
    b"#",
    b"?",
    b";",
    "\u{2603}".as_bytes(),
    b"\\",
    b"\\n",
    b"new\nline",
    b"\r\n",
    b"\t",
    b" ",
    b" both ends ",
    b"'\"`$(x)",
    b"-rf",
    b"...",
    b"*",
    b"\x01\x1b\x7f",
    "\u{e9}".as_bytes(),
    "e\u{301}".as_bytes(),
    "\u{85}\u{2028}\u{2029}".as_bytes(),
    "\u{feff}".as_bytes(),
    "\u{1f600}".as_bytes(),
    // Not UTF-8: a lone byte, a truncated character, a surrogate, an overlong slash, a wild one.
    b"\xff",
    b"caf\xe9",
    b"a\xc3",
    b"\xed\xa0\x80",
    b"\xc0\xaf",
    b"\xf4\x90\x80\x80",
    b"\x80\xbf-\xfe\xff",
    // Characters that stand for bytes elsewhere, truly in a name.
    "\u{ef80}".as_bytes(),
    "\u{efff}\u{efe9}".as_bytes(),
    b"\xee\xbe\x80\xff",
];

#[test]
fn odd_names_can_be_used_as_they_are_listed() {
    let server = Server::start();
    let dir = TempDir::new();
    let long = "x".repeat(255).into_bytes();
    let odd: Vec<&[u8]> = ODD_NAMES.iter().copied().chain([long.as_slice()]).collect();
    let base = dir.join("");
    let in_dir = |name: &[u8]| [base.as_bytes(), name].concat();
    for name in &odd {
        // Raw bytes, percent-encoded, are taken as they are, but for the escape's own characters.
        if std::str::from_utf8(name)
            .is_ok_and(|name| name.contains(|c| ('\u{ef80}'..='\u{efff}').contains(&c)))
            || name.starts_with(b"\xee")
        {
            fs::write(OsStr::from_bytes(&in_dir(name)), name).unwrap();
        } else {
            write(&server, in_dir(name), "", name);
        }
    }
    let mut sorted = odd.clone();
    sorted.sort_unstable();
    let on_disk: BTreeSet<Vec<u8>> = fs::read_dir(dir.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_vec())
        .collect();
    assert_eq!(
        on_disk,
        odd.iter().map(|name| name.to_vec()).collect(),
        "they were made as they were sent"
    );

    let entries = list(&server, &base, "&detail=full");
    let listed: Vec<Vec<u8>> = entries.iter().map(raw_name).collect();
    assert_eq!(listed, sorted, "sorted by their bytes");
    let distinct: BTreeSet<&str> = entries
        .iter()
        .map(|entry| entry["name"].as_str().unwrap())
        .collect();
    assert_eq!(distinct.len(), odd.len(), "no two names look the same");

    // Page by page, with each name as the cursor.
    let mut after = String::new();
    let mut paged = Vec::new();
    loop {
        let reply = expect_ok(&server.get(&target("list", &base, &format!("&limit=1{after}"))));
        paged.extend(
            reply["entries"]
                .as_array()
                .unwrap()
                .iter()
                .map(|entry| entry["name"].clone()),
        );
        match reply["next"].as_str() {
            Some(next) if !next.is_empty() => after = format!("&after={}", encode(next)),
            _ => break,
        }
        assert!(paged.len() <= odd.len(), "the pages do not end: {paged:?}");
    }
    assert_eq!(
        paged,
        entries
            .iter()
            .map(|entry| entry["name"].clone())
            .collect::<Vec<_>>()
    );

    for (entry, name) in entries.iter().zip(&sorted) {
        let path = entry["path"].as_str().unwrap();
        assert_eq!(stat(&server, path, "&detail=full"), *entry);
        assert_eq!(read(&server, path, ""), *name, "{entry}");
        write(&server, path, "", b"again");
        assert_eq!(
            fs::read(OsStr::from_bytes(&in_dir(name))).unwrap(),
            b"again",
            "{entry}"
        );
        let moved = format!("{path}.d/x");
        if name.len() < 250 {
            expect_ok(&moving(&server, path, &moved));
            expect_ok(&moving(&server, &moved, path));
            delete(&server, format!("{path}.d"), "");
        }
        delete(&server, path, "");
    }
    assert_eq!(names_in(dir.path()), Vec::<String>::new());
}

#[test]
fn bytes_that_are_not_text_have_one_spelling() {
    let server = Server::start();
    let dir = TempDir::new();
    for (name, shown) in [
        (b"caf\xe9".as_slice(), "caf\u{efe9}"),
        (b"\x80\xff", "\u{ef80}\u{efff}"),
        // What truly holds such a character is shown byte for byte.
        (b"\xee\xbe\x80", "\u{efee}\u{efbe}\u{ef80}"),
        (
            "\u{ef00}\u{ef7f}\u{f000}".as_bytes(),
            "\u{ef00}\u{ef7f}\u{f000}",
        ),
    ] {
        let path = [dir.join("").as_bytes(), name].concat();
        fs::write(OsStr::from_bytes(&path), "found").unwrap();
        let entries = list(&server, dir.join(""), "");
        assert_eq!(entries[0]["name"], shown, "{name:?}");
        assert_eq!(read(&server, dir.join(shown), ""), b"found", "{name:?}");
        delete(&server, dir.join(shown), "");
    }
    // The same in a directory on the way, and in an error's text, which is JSON all the same.
    write(&server, dir.join("d\u{efff}/file"), "", b"below");
    let path = [dir.join("").as_bytes(), b"d\xff/file"].concat();
    assert_eq!(fs::read(OsStr::from_bytes(&path)).unwrap(), b"below");
    let entries = list(&server, dir.join("d\u{efff}"), "");
    assert_eq!(
        read(&server, entries[0]["path"].as_str().unwrap(), ""),
        b"below"
    );
    let missing = [dir.join("").as_bytes(), b"\xfe"].concat();
    expect_error(&server.get(&target("read", missing, "")), 404, "not_found");
}

#[test]
fn a_hundred_thousand_entries_are_listed_once_each_and_in_order() {
    const COUNT: usize = 100_000;
    let server = Server::start();
    let dir = TempDir::in_memory();
    for number in 0..COUNT {
        File::create(
            dir.path()
                .join(format!("{:05}&+%\u{2603}", number * 7 % COUNT)),
        )
        .unwrap();
    }
    let walk = |limit: &str| {
        let mut seen: Vec<String> = Vec::with_capacity(COUNT);
        let mut pages = 0;
        let mut after = String::new();
        let mut connection = server.connect();
        loop {
            let target = target("list", dir.join(""), &format!("{limit}{after}"));
            let reply = expect_ok(&connection.request("GET", &target, &[], b""));
            let entries = reply["entries"].as_array().unwrap();
            seen.extend(
                entries
                    .iter()
                    .map(|entry| entry["name"].as_str().unwrap().to_owned()),
            );
            pages += 1;
            let Some(next) = reply["next"].as_str() else {
                break;
            };
            assert!(pages <= COUNT, "the pages do not end");
            after = format!("&after={}", encode(next));
        }
        (seen, pages)
    };
    let expected: Vec<String> = (0..COUNT)
        .map(|number| format!("{number:05}&+%\u{2603}"))
        .collect();
    for (limit, least, most) in [
        ("", 10, 11),
        ("&limit=100000", 1, 2),
        ("&limit=33333", 4, 4),
    ] {
        let (seen, pages) = walk(limit);
        assert!((least..=most).contains(&pages), "{limit}: {pages} pages");
        assert!(seen == expected, "{limit}: {} names", seen.len());
    }
    // A cursor is a place, not an entry: it may be gone, or never have been.
    let reply = expect_ok(&server.get(&target("list", dir.join(""), "&limit=2&after=5")));
    assert_eq!(reply["entries"][0]["name"], expected[50_000]);
    fs::remove_file(dir.path().join(&expected[50_000])).unwrap();
    let after = encode(&expected[50_000]);
    let reply = expect_ok(&server.get(&target(
        "list",
        dir.join(""),
        &format!("&limit=2&after={after}"),
    )));
    assert_eq!(reply["entries"][0]["name"], expected[50_001]);
    assert_eq!(reply["entries"][1]["name"], expected[50_002]);
    let last = expect_ok(&server.get(&target("list", dir.join(""), "&after=~")));
    assert_eq!(
        (last["entries"].as_array().unwrap().len(), &last["next"]),
        (0, &Value::Null)
    );
    // As wide as it is, it is deleted in one request that answers before a client gives up.
    let started = Instant::now();
    delete(&server, dir.join(""), "&recursive=1");
    assert!(started.elapsed() < Duration::from_secs(60));
    assert!(!dir.path().exists());
}

#[test]
fn entries_that_come_and_go_disturb_no_others() {
    let server = Server::start();
    let dir = TempDir::in_memory();
    let stays: Vec<String> = (0..2000)
        .map(|number| format!("{number:04}-stays"))
        .collect();
    for name in &stays {
        File::create(dir.join(name)).unwrap();
    }
    let mut numbers = (0..2000).cycle();
    let come_and_go = || {
        let name = dir.join(&format!("{:04}-goes", numbers.next().unwrap()));
        File::create(&name).unwrap();
        fs::remove_file(&name).unwrap();
    };
    meanwhile(come_and_go, || {
        for _ in 0..3 {
            let mut seen: Vec<String> = Vec::new();
            let mut after = String::new();
            loop {
                let rest = format!("&limit=50{after}");
                let reply = expect_ok(&server.get(&target("list", dir.join(""), &rest)));
                let entries = reply["entries"].as_array().unwrap();
                seen.extend(
                    entries
                        .iter()
                        .map(|entry| entry["name"].as_str().unwrap().to_owned()),
                );
                let Some(next) = reply["next"].as_str() else {
                    break;
                };
                after = format!("&after={}", encode(next));
            }
            assert!(seen.is_sorted(), "in order");
            seen.retain(|name| name.ends_with("-stays"));
            assert_eq!(seen, stays, "each once");
        }
    });
    // Processes end between being found and being described.
    let start_and_end = || assert!(Command::new("true").status().unwrap().success());
    meanwhile(start_and_end, || {
        for _ in 0..50 {
            assert!(!list(&server, "/proc", "").is_empty());
        }
    });
}

#[test]
fn an_empty_directory_has_an_empty_list() {
    let server = Server::start();
    let dir = TempDir::new();
    let reply = expect_ok(&server.get(&target("list", dir.join(""), "")));
    assert_eq!(reply["entries"], Value::Array(Vec::new()));
    assert_eq!(reply["next"], Value::Null);
}

#[test]
fn a_query_is_decoded_as_forms_are() {
    let server = Server::start();
    let dir = TempDir::new();
    let base = dir.join("");
    fs::write(dir.join("a b+\u{e9}&?#%.txt"), "found").unwrap();
    for spelled in [
        "a+b%2B%C3%A9%26%3F%23%25.txt",
        "a%20b%2b%c3%a9%26%3f%23%25%2Etxt",
        "%61+b%2B%C3%a9%26?%23%25.txt",
    ] {
        let reply = server.get(&format!("/v1/files/read?path={}{spelled}", encode(&base)));
        assert_eq!(
            (reply.status, reply.text().as_str()),
            (200, "found"),
            "{spelled}"
        );
        let reply = server.get(&format!(
            "/v1/files/read?offset=0&path={}{spelled}&length=%35",
            encode(&base)
        ));
        assert_eq!(reply.status, 200, "{spelled}");
    }
    let file = encode(dir.join("a b+\u{e9}&?#%.txt"));
    for query in [
        String::new(),
        "path".to_owned(),
        "path=".to_owned(),
        "other=x".to_owned(),
        format!("path={file}&path={file}"),
        format!("path={file}&offset=0&offset=1"),
        format!("path={file}%00"),
        format!("path=%00{file}"),
        format!("path={file}%"),
        format!("path={file}%2"),
        format!("path={file}%zz"),
        format!("path={file}%2g"),
    ] {
        for (method, route) in PATH_ROUTES {
            // Only the routes that know an offset can refuse two of them.
            if query.contains("offset") && !matches!(route, "read" | "write") {
                continue;
            }
            let reply = server.request(method, &format!("/v1/files/{route}?{query}"), b"");
            assert_eq!(
                reply.status,
                400,
                "{method} {route}?{query}: {}",
                reply.text()
            );
            assert_eq!(reply.code(), "bad_request");
        }
    }
    for query in [
        String::new(),
        format!("from={file}"),
        format!("to={file}"),
        format!("from={file}&to="),
        format!("from={file}&to={file}%00"),
    ] {
        expect_error(
            &server.request("POST", &format!("/v1/files/move?{query}"), b""),
            400,
            "bad_request",
        );
    }
    assert_eq!(fs::read(dir.join("a b+\u{e9}&?#%.txt")).unwrap(), b"found");
    assert_eq!(names_in(dir.path()).len(), 1);
}

#[test]
fn a_list_costs_the_server_its_names_and_no_more() {
    let server = Server::start();
    let dir = TempDir::in_memory();
    for number in 0..10_000 {
        File::create(dir.join(&number.to_string())).unwrap();
    }
    // Every entry says the path that it was asked for by, however long that is.
    let (parent, name) = (
        dir.path().parent().unwrap(),
        dir.path().file_name().unwrap(),
    );
    let detour = "./".repeat(1900);
    let path = format!("{}/{detour}{}", parent.display(), name.display());
    let pid = server.pid();
    assert_eq!(server.get("/health").status, 200);
    let before = memory_of(pid, "VmHWM");
    let slow: Vec<_> = (0..4)
        .map(|_| {
            let mut connection = server.connect();
            connection.send_request("GET", &target("list", &path, ""), &[], b"");
            assert_eq!(connection.read_head().status, 200);
            connection
        })
        .collect();
    let used = memory_of(pid, "VmHWM").saturating_sub(before);
    assert!(used < 24 << 20, "{used} bytes");
    drop(slow);
    let entries = list(&server, &path, "&limit=500");
    assert_eq!(entries.len(), 500);
    assert_eq!(entries[0]["path"], format!("{path}/0"));
}

#[test]
fn what_cannot_be_looked_at_is_listed_all_the_same() {
    let dir = TempDir::new();
    let Some(server) = unprivileged(&dir) else {
        skip!("becoming another user needs root and setpriv");
    };
    fs::create_dir_all(dir.join("names-only/sub")).unwrap();
    fs::write(dir.join("names-only/file"), "x").unwrap();
    chmod(dir.join("names-only"), 0o744);
    let entries = list(&server, dir.join("names-only"), "");
    let shown: Vec<_> = entries
        .iter()
        .map(|entry| (&entry["name"], &entry["type"], &entry["mtime_ms"]))
        .collect();
    assert_eq!(
        shown,
        [
            (&json!("file"), &json!("file"), &Value::Null),
            (&json!("sub"), &json!("dir"), &Value::Null)
        ]
    );
}

#[test]
fn a_time_beyond_all_calendars_is_shown_as_the_last_there_is() {
    let server = Server::start();
    let dir = TempDir::in_memory();
    let file = File::create(dir.join("file")).unwrap();
    for (seconds, shown) in [(i64::MAX, i64::MAX), (i64::MIN, i64::MIN)] {
        let time = TimeSpec::new(seconds, 0);
        futimens(&file, &time, &time).unwrap();
        if fs::metadata(dir.join("file")).unwrap().mtime() != seconds {
            skip!("this file system has no such times");
        }
        assert_eq!(list(&server, dir.join(""), "")[0]["mtime_ms"], shown);
    }
}

#[test]
fn an_entry_has_the_name_that_was_asked_for() {
    let server = Server::start();
    let dir = TempDir::new();
    fs::create_dir(dir.join("sub")).unwrap();
    for (path, name) in [
        ("/", "/"),
        ("//", "/"),
        (&dir.join("sub/.."), ".."),
        (&dir.join("sub/."), "."),
        (&dir.join("sub//"), "sub"),
    ] {
        assert_eq!(stat(&server, path, "")["name"], name, "{path}");
    }
    // What is asked for is understood before it is looked for.
    let missing = target("stat", dir.join("missing"), "&detail=some");
    expect_error(&server.get(&missing), 400, "bad_request");
}
