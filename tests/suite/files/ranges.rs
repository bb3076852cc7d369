//! The promise of ranges: written in parallel and in any order, read as asked for, and refused
//! before anything happens when the numbers make no sense.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::thread;

use super::{
    MIB, chmod, expect_error, expect_ok, his_directory, mode_of, read, target, unprivileged, write,
};
use crate::fixture::{Server, TempDir, expect_same, names_in, random_bytes};
use crate::skip;

#[test]
fn ranges_written_in_parallel_and_in_any_order_make_the_file() {
    let server = Server::start();
    let dir = TempDir::new();
    let content = random_bytes(24 * MIB + 123, 9);
    let ranges: Vec<(usize, &[u8])> = content
        .chunks(MIB)
        .enumerate()
        .map(|(number, part)| (number * MIB, part))
        .collect();
    // Into nothing (every range may have to make the parents and the file) and over a longer file.
    for path in [dir.join("new/deep/file"), dir.join("old")] {
        if path.ends_with("old") {
            fs::write(&path, random_bytes(40 * MIB, 5)).unwrap();
        }
        thread::scope(|scope| {
            for worker in 0..8 {
                let (server, ranges, path, total) = (&server, &ranges, &path, content.len());
                scope.spawn(move || {
                    let mut connection = server.connect();
                    // Backwards, so that the last range and its truncation come early.
                    for (offset, part) in ranges.iter().rev().skip(worker).step_by(8) {
                        let last = offset + part.len() == total;
                        let truncate = if last {
                            format!("&truncate_to={total}")
                        } else {
                            String::new()
                        };
                        let target = target(
                            "write",
                            path,
                            &format!("&offset={offset}&mode=640{truncate}"),
                        );
                        expect_ok(&connection.request("PUT", &target, &[], part));
                    }
                });
            }
        });
        expect_same(&path, &fs::read(&path).unwrap(), &content);
        assert_eq!(mode_of(&path), 0o640);
    }
    // And read back in the same way.
    let parts: Vec<Vec<u8>> = thread::scope(|scope| {
        let workers: Vec<_> = ranges
            .iter()
            .map(|(offset, part)| {
                let rest = format!("&offset={offset}&length={}", part.len());
                scope.spawn(|| {
                    let rest = rest;
                    read(&server, dir.join("old"), &rest)
                })
            })
            .collect();
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap())
            .collect()
    });
    expect_same("the content", &parts.concat(), &content);
}

#[test]
fn a_range_changes_its_own_bytes_and_nothing_else() {
    let server = Server::start();
    let dir = TempDir::new();
    let path = dir.join("file");
    fs::write(&path, "0123456789").unwrap();
    chmod(&path, 0o604);
    let inode = fs::metadata(&path).unwrap().ino();
    write(&server, &path, "&offset=2", b"ab");
    assert_eq!(fs::read(&path).unwrap(), b"01ab456789");
    write(&server, &path, "&offset=0", b"");
    assert_eq!(
        fs::read(&path).unwrap(),
        b"01ab456789",
        "an empty range changes nothing"
    );
    let reply = write(&server, &path, "&offset=12", b"end");
    assert_eq!(reply["size"], 15);
    assert_eq!(fs::read(&path).unwrap(), b"01ab456789\0\0end");
    // The final size may come with any range, before the others, smaller or larger than the file.
    write(&server, &path, "&offset=0&truncate_to=5", b"AB");
    assert_eq!(fs::read(&path).unwrap(), b"ABab4");
    write(&server, &path, "&offset=3&truncate_to=8", b"xyz");
    assert_eq!(fs::read(&path).unwrap(), b"ABaxyz\0\0");
    write(&server, &path, "&offset=0&truncate_to=0", b"");
    assert_eq!(fs::read(&path).unwrap(), b"");
    let meta = fs::metadata(&path).unwrap();
    assert_eq!(
        (meta.ino(), meta.mode() & 0o7777),
        (inode, 0o604),
        "it is the same file"
    );
}

#[test]
fn a_ranged_read_gives_what_there_is() {
    let server = Server::start();
    let dir = TempDir::new();
    let path = dir.join("file");
    let content = random_bytes(200_000, 4);
    fs::write(&path, &content).unwrap();
    let size = content.len();
    let mut connection = server.connect();
    let last = usize::try_from(i64::MAX).unwrap() - 1;
    for offset in [0, 1, 99_999, size - 1, size, size + 1, 10 * size, last] {
        for length in [0, 1, 65_536, size - 1, size, size + 1, usize::MAX >> 1] {
            let rest = format!("&offset={offset}&length={length}");
            let reply = connection.request("GET", &target("read", &path, &rest), &[], b"");
            let from = offset.min(size);
            let to = from.saturating_add(length).min(size);
            assert_eq!(reply.status, 200, "{rest}: {}", reply.text());
            assert!(
                reply.body == content[from..to],
                "{rest}: {} bytes",
                reply.body.len()
            );
            assert_eq!(
                reply.header("content-length"),
                Some((to - from).to_string().as_str()),
                "{rest}"
            );
        }
    }
    assert!(read(&server, &path, "&offset=5") == content[5..]);
    assert!(read(&server, &path, "&length=5") == content[..5]);
    fs::write(&path, "").unwrap();
    assert_eq!(read(&server, &path, "&offset=0&length=0"), b"");
}

#[test]
fn an_http_range_is_answered_with_206_or_416() {
    let server = Server::start();
    let dir = TempDir::new();
    let path = dir.join("file");
    fs::write(&path, "0123456789").unwrap();
    let mut connection = server.connect();
    let mut ask = |path: &str, range: &str| {
        connection.request("GET", &target("read", path, ""), &[("Range", range)], b"")
    };
    for (range, body, said) in [
        ("bytes=0-0", "0", "bytes 0-0/10"),
        ("bytes=2-4", "234", "bytes 2-4/10"),
        ("bytes=7-", "789", "bytes 7-9/10"),
        ("bytes=0-", "0123456789", "bytes 0-9/10"),
        ("bytes=-3", "789", "bytes 7-9/10"),
        ("bytes=-99", "0123456789", "bytes 0-9/10"),
        ("bytes=8-99", "89", "bytes 8-9/10"),
        ("bytes=9-9223372036854775807", "9", "bytes 9-9/10"),
    ] {
        let reply = ask(&path, range);
        assert_eq!(
            (reply.status, reply.text().as_str()),
            (206, body),
            "{range}"
        );
        assert_eq!(reply.header("content-range"), Some(said), "{range}");
        assert_eq!(
            reply.header("content-length"),
            Some(body.len().to_string().as_str()),
            "{range}"
        );
    }
    for range in ["bytes=10-", "bytes=10-20", "bytes=999-", "bytes=-0"] {
        let reply = ask(&path, range);
        expect_error(&reply, 416, "range");
        assert_eq!(reply.header("content-range"), Some("bytes */10"), "{range}");
    }
    // What is no single range is no range: the whole file.
    for range in [
        "bytes=0-1,4-5",
        "bytes=4-2",
        "bytes=",
        "bytes=-",
        "bytes=a-b",
        "lines=1-2",
        "0-5",
        "bytes=1-2-3",
        "bytes 1-2",
    ] {
        let reply = ask(&path, range);
        assert_eq!(
            (reply.status, reply.text().as_str()),
            (200, "0123456789"),
            "{range}"
        );
    }
    // Numbers that fit nowhere neither crash nor wrap around.
    for range in [
        "bytes=0-99999999999999999999999",
        "bytes=99999999999999999999999-",
        "bytes=-99999999999999999999999",
    ] {
        let reply = ask(&path, range);
        assert!(
            [200, 206, 416].contains(&reply.status),
            "{range}: {}",
            reply.status
        );
        assert!(
            reply.status == 416 || reply.text() == "0123456789",
            "{range}: {}",
            reply.text()
        );
    }
    let empty = dir.join("empty");
    fs::write(&empty, "").unwrap();
    let reply = ask(&empty, "bytes=0-");
    assert_eq!(
        (reply.status, reply.header("content-range")),
        (416, Some("bytes */0"))
    );
    assert_eq!(ask(&dir.join("missing"), "bytes=0-").status, 404);
}

#[test]
fn numbers_that_make_no_sense_are_refused_before_anything_happens() {
    let server = Server::start();
    let dir = TempDir::new();
    fs::write(dir.join("file"), "content").unwrap();
    let nonsense = [
        "-1",
        "abc",
        "1.5",
        "",
        "%2B1",
        "%201",
        "1%20",
        "0x10",
        "1e3",
        "99999999999999999999",
        "9223372036854775808",
    ];
    for number in nonsense {
        for name in ["offset", "length"] {
            // A length is an upper bound, so it may be larger than any file.
            if name == "length" && number == "9223372036854775808" {
                continue;
            }
            let rest = format!("&{name}={number}");
            let reply = server.get(&target("read", dir.join("file"), &rest));
            assert_eq!(reply.status, 400, "{rest}: {}", reply.text());
            expect_error(&reply, 400, "bad_request");
        }
        for rest in [
            format!("&offset={number}"),
            format!("&offset=0&truncate_to={number}"),
        ] {
            for path in ["file", "new", "sub/new"] {
                expect_error(
                    &server.put(&target("write", dir.join(path), &rest), b"XX"),
                    400,
                    "bad_request",
                );
            }
        }
        expect_error(
            &server.get(&target("list", dir.join(""), &format!("&limit={number}"))),
            400,
            "bad_request",
        );
    }
    for limit in ["0", "100001"] {
        expect_error(
            &server.get(&target("list", dir.join(""), &format!("&limit={limit}"))),
            400,
            "bad_request",
        );
    }
    for flag in ["yes", "2", "", "TRUE", "on"] {
        let reply = server.delete(&target(
            "delete",
            dir.join("file"),
            &format!("&recursive={flag}"),
        ));
        expect_error(&reply, 400, "bad_request");
    }
    // The last byte that an offset can address, and one more.
    for offset in ["9223372036854775806", "9223372036854775807"] {
        let reply = server.put(
            &target("write", dir.join("file"), &format!("&offset={offset}")),
            b"XX",
        );
        assert!(
            reply.status >= 400 && reply.status != 500,
            "{} {}",
            reply.status,
            reply.text()
        );
        reply.code();
    }
    assert_eq!(names_in(dir.path()), ["file"]);
    assert_eq!(fs::read(dir.join("file")).unwrap(), b"content");
}

#[test]
fn ranges_in_parallel_may_all_take_away_the_right_to_write() {
    let dir = TempDir::new();
    let Some(server) = unprivileged(&dir) else {
        skip!("becoming another user needs root and setpriv");
    };
    let path = format!("{}/file", his_directory(&dir, "his"));
    thread::scope(|scope| {
        for number in 0..16_u8 {
            let (server, path) = (&server, &path);
            scope.spawn(move || {
                let rest = format!("&mode=444&offset={}", u32::from(number) * 1000);
                write(server, path, &rest, &[number; 1000]);
            });
        }
    });
    let content = fs::read(&path).unwrap();
    assert!((0..16_000).all(|at| usize::from(content[at]) == at / 1000));
    assert_eq!((content.len(), mode_of(&path)), (16_000, 0o444));
    // Without a mode the file says who may write, and a range that fails changes none of that.
    let range = target("write", &path, "&offset=0");
    expect_error(&server.put(&range, b"x"), 403, "forbidden");
    let mut connection = server.connect();
    connection.send_request(
        "PUT",
        &target("write", &path, "&offset=0&mode=644"),
        &[("Transfer-Encoding", "chunked")],
        b"",
    );
    connection.send(b"zz\r\n");
    expect_error(&connection.read_reply(), 400, "bad_request");
    assert_eq!(mode_of(&path), 0o444);
}

#[test]
fn a_range_goes_into_somebody_elses_file_in_a_directory_for_all() {
    // Where fs.protected_regular is set, the kernel refuses O_CREAT there, to root as well.
    let server = Server::start();
    let dir = TempDir::new();
    fs::write(dir.join("file"), "old").unwrap();
    chmod(dir.join("file"), 0o666);
    chmod(dir.path(), 0o1777);
    if std::os::unix::fs::chown(dir.join("file"), Some(1234), Some(1234)).is_err() {
        skip!("giving files away needs root");
    }
    write(&server, dir.join("file"), "&offset=3", b" new");
    assert_eq!(fs::read(dir.join("file")).unwrap(), b"old new");
}

#[test]
fn a_range_beyond_every_file_makes_none() {
    let server = Server::start();
    let dir = TempDir::new();
    let chunked = [("Transfer-Encoding", "chunked")];
    let mut connection = server.connect();
    for offset in ["9223372036854775806", "9223372036854775807"] {
        let target = target("write", dir.join("file"), &format!("&offset={offset}"));
        connection.send_request("PUT", &target, &chunked, b"");
        connection.send(b"3\r\nabc\r\n0\r\n\r\n");
        expect_error(&connection.read_reply(), 400, "bad_request");
        assert_eq!(names_in(dir.path()), Vec::<String>::new(), "{offset}");
    }
    // Beyond what this file system can hold, which only it knows.
    let far = target("write", dir.join("file"), "&offset=9000000000000000000");
    let reply = server.put(&far, b"abc");
    if reply.status == 200 {
        skip!("this file system holds everything");
    }
    expect_error(&reply, 400, "bad_request");
    assert_eq!(names_in(dir.path()), Vec::<String>::new());
}

#[test]
fn only_an_unconditional_get_has_a_range() {
    let server = Server::start();
    let dir = TempDir::new();
    fs::write(dir.join("file"), "0123456789").unwrap();
    let mut connection = server.connect();
    let target = target("read", dir.join("file"), "");
    let range = ("Range", "bytes=2-4");
    let head = connection.request("HEAD", &target, &[range], b"");
    assert_eq!(
        (head.status, head.header("content-length")),
        (200, Some("10"))
    );
    // There is no validator that it could match.
    let condition = ("If-Range", "\"v1\"");
    let whole = connection.request("GET", &target, &[range, condition], b"");
    assert_eq!(
        (whole.status, whole.body.as_slice()),
        (200, &b"0123456789"[..])
    );
}
