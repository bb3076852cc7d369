//! The promise of content: bytes come back as they were written, with the mode and owner that
//! belong to them, and a file that changes while it is sent desynchronises nothing.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;

use super::{
    MIB, begin, chmod, delete, expect_error, expect_ok, list, mode_of, moving, read, stat, target,
    write,
};
use crate::fixture::{
    Server, TOKEN, TempDir, expect_same, is_root, names_in, random_bytes, status_of,
};

#[test]
fn a_file_is_read_back_as_it_was_written() {
    let server = Server::start();
    let dir = TempDir::new();
    for (number, length) in [0, 1, 2, 4095, 4096, 65_535, 65_537, MIB + 3, 9 * MIB]
        .into_iter()
        .enumerate()
    {
        let path = dir.join(&format!("file-{number}"));
        let content = random_bytes(length, number as u64);
        let method = if number % 2 == 0 { "PUT" } else { "POST" };
        let reply = expect_ok(&server.request(method, &target("write", &path, ""), &content));
        assert_eq!(reply["path"], path.as_str());
        assert_eq!(reply["size"], length);
        expect_same(
            &format!("{length} bytes written"),
            &fs::read(&path).unwrap(),
            &content,
        );
        expect_same(
            &format!("{length} bytes read"),
            &read(&server, &path, ""),
            &content,
        );
    }
}

#[test]
fn a_chunked_upload_is_written_like_any_other() {
    let server = Server::start();
    let dir = TempDir::new();
    let path = dir.join("file");
    let content = random_bytes(700_001, 3);
    let mut connection = server.connect();
    connection.send_request(
        "PUT",
        &target("write", &path, ""),
        &[("Transfer-Encoding", "chunked")],
        b"",
    );
    for (number, chunk) in content.chunks(9_973).enumerate() {
        let size = if number % 2 == 0 {
            format!("{:x}\r\n", chunk.len())
        } else {
            format!("{:X};a=b\r\n", chunk.len())
        };
        connection.send(&[size.as_bytes(), chunk, b"\r\n"].concat());
    }
    connection.send(b"0\r\n\r\n");
    assert_eq!(expect_ok(&connection.read_reply())["size"], content.len());
    expect_same("the content", &fs::read(&path).unwrap(), &content);
    // The connection is still in step.
    assert_eq!(
        connection
            .request("GET", &target("read", &path, ""), &[], b"")
            .body
            .len(),
        content.len()
    );
}

/// However the bytes come, and whatever comes behind them. More uploads at once than there are pipes to
/// splice them through.
#[test]
fn an_upload_in_pieces_is_whole_and_takes_nothing_of_what_follows() {
    let server = Server::start();
    let dir = TempDir::new();
    let upload = |number: usize| {
        let path = dir.join(&format!("file-{number}"));
        let range = if number.is_multiple_of(2) {
            ""
        } else {
            "&offset=0"
        };
        let content = random_bytes(300_000 + 7919 * number, number as u64);
        let mut connection = server.connect();
        let head = format!(
            "PUT {} HTTP/1.1\r\nHost: x\r\nX-Sandbox-Token: {TOKEN}\r\nContent-Length: {}\r\n\r\n",
            target("write", &path, range),
            content.len()
        );
        let next = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n";
        let all = [head.as_bytes(), &content, next].concat();
        let mut rest = &all[..];
        for size in [head.len() + number * 100, 1, 70_000, 1447, 131_072]
            .into_iter()
            .chain(std::iter::repeat(20_011))
        {
            let (piece, behind) = rest.split_at(size.min(rest.len()));
            connection.send(piece);
            rest = behind;
            if rest.is_empty() {
                break;
            }
        }
        assert_eq!(expect_ok(&connection.read_reply())["size"], content.len());
        assert_eq!(expect_ok(&connection.read_reply())["status"], "ok");
        expect_same("the content", &fs::read(&path).unwrap(), &content);
    };
    thread::scope(|scope| {
        for number in 0..48 {
            let upload = &upload;
            scope.spawn(move || upload(number));
        }
    });
}

#[test]
fn a_head_request_tells_what_a_get_would() {
    let server = Server::start();
    let dir = TempDir::new();
    fs::write(dir.path().join("file"), random_bytes(12_345, 1)).unwrap();
    let mut connection = server.connect();
    for target in [
        target("read", dir.join("file"), ""),
        target("stat", dir.join("file"), ""),
        target("list", dir.join(""), ""),
        target("read", dir.join("missing"), ""),
    ] {
        let head = connection.request("HEAD", &target, &[], b"");
        let get = connection.request("GET", &target, &[], b"");
        assert_eq!(head.status, get.status, "{target}");
        assert_eq!(
            head.header("content-length"),
            get.header("content-length"),
            "{target}"
        );
        assert_eq!(
            head.header("content-type"),
            get.header("content-type"),
            "{target}"
        );
    }
    let head = connection.request("HEAD", &target("read", dir.join("file"), ""), &[], b"");
    assert_eq!(head.header("content-length"), Some("12345"));
}

#[test]
fn writing_makes_parents_unless_told_not_to() {
    let server = Server::start();
    let dir = TempDir::new();
    write(&server, dir.join("a/b/c/file"), "", b"deep");
    assert_eq!(fs::read(dir.join("a/b/c/file")).unwrap(), b"deep");
    write(&server, dir.join("x/y/ranged"), "&offset=3", b"deep");
    assert_eq!(fs::read(dir.join("x/y/ranged")).unwrap(), b"\0\0\0deep");
    for rest in ["&mkdir=0", "&mkdir=false", "&mkdir=0&offset=0"] {
        expect_error(
            &server.put(&target("write", dir.join("no/file"), rest), b"x"),
            404,
            "not_found",
        );
        assert!(!Path::new(&dir.join("no")).exists(), "{rest}");
    }
    write(&server, dir.join("a/file"), "&mkdir=0", b"x");
    expect_error(
        &server.put(&target("write", dir.join("no/file"), "&mkdir=maybe"), b"x"),
        400,
        "bad_request",
    );
    assert_eq!(names_in(dir.path()), ["a", "x"]);
}

#[test]
fn relative_paths_start_in_the_servers_working_directory() {
    let dir = TempDir::new();
    let place = dir.path().to_str().unwrap().to_owned();
    let server = Server::builder()
        .wrapped_in(&["sh", "-c", "cd \"$0\" && exec \"$@\"", &place])
        .start();
    write(&server, "sub/file", "", b"relative");
    assert_eq!(fs::read(dir.join("sub/file")).unwrap(), b"relative");
    assert_eq!(read(&server, "sub/file", ""), b"relative");
    assert_eq!(read(&server, "./sub/../sub/file", ""), b"relative");
    // Whatever form the paths of entries have, each names its file when it is sent back.
    for listed in [".", "sub"] {
        for entry in list(&server, listed, "") {
            assert_eq!(stat(&server, entry["path"].as_str().unwrap(), ""), entry);
        }
    }
    expect_ok(&moving(&server, "sub/file", "moved"));
    assert_eq!(names_in(dir.path()), ["moved", "sub"]);
}

#[test]
fn a_replaced_file_keeps_its_mode_and_owner() {
    let server = Server::start();
    let dir = TempDir::new();
    let path = dir.join("file");
    for mode in [0o600, 0o644, 0o755, 0o4755, 0o2711, 0o444] {
        let _ = fs::remove_file(&path);
        fs::write(&path, "old content that is longer").unwrap();
        if is_root() {
            std::os::unix::fs::chown(&path, Some(1234), Some(4321)).unwrap();
        }
        chmod(&path, mode);
        write(&server, &path, "", b"new");
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(mode_of(&path), mode, "mode {mode:o}");
        if is_root() {
            let owner = fs::metadata(&path).unwrap();
            assert_eq!((owner.uid(), owner.gid()), (1234, 4321), "mode {mode:o}");
        }
    }
    write(&server, &path, "&mode=4750", b"newer");
    assert_eq!(mode_of(&path), 0o4750);
    if is_root() {
        assert_eq!(
            fs::metadata(&path).unwrap().uid(),
            1234,
            "a given mode does not change the owner"
        );
    }
}

#[test]
fn a_new_file_has_the_mode_that_any_program_would_give_it() {
    let server = Server::start();
    let dir = TempDir::new();
    File::create(dir.join("usual")).unwrap();
    for rest in ["", "&offset=0"] {
        write(&server, dir.join("new"), rest, b"x");
        assert_eq!(
            mode_of(dir.join("new")),
            mode_of(dir.join("usual")),
            "{rest}"
        );
        delete(&server, dir.join("new"), "");
    }
}

#[test]
fn a_mode_is_octal_digits_and_nothing_else() {
    let server = Server::start();
    let dir = TempDir::new();
    for (text, mode) in [
        ("755", 0o755),
        ("0600", 0o600),
        ("7777", 0o7777),
        ("0", 0),
        ("777", 0o777),
    ] {
        for rest in ["", "&offset=0"] {
            write(
                &server,
                dir.join("file"),
                &format!("&mode={text}{rest}"),
                b"x",
            );
            assert_eq!(mode_of(dir.join("file")), mode, "{text}{rest}");
        }
    }
    for text in [
        "8",
        "rwx",
        "10000",
        "-1",
        "",
        "0o755",
        "%2B755",
        "%20755",
        "755%20",
        "7.5",
        "77777777777777777777",
    ] {
        for rest in ["", "&offset=0"] {
            let reply = server.put(
                &target("write", dir.join("refused"), &format!("&mode={text}{rest}")),
                b"x",
            );
            expect_error(&reply, 400, "bad_request");
        }
        let reply = server.request(
            "POST",
            &target("mkdir", dir.join("refused"), &format!("&mode={text}")),
            b"",
        );
        expect_error(&reply, 400, "bad_request");
        assert_eq!(names_in(dir.path()), ["file"], "{text}");
    }
}

#[test]
fn files_beyond_four_gibibytes_are_addressed_exactly() {
    let server = Server::start();
    let dir = TempDir::new();
    let path = dir.join("sparse");
    let far = 5 * 1024 * MIB as u64 + 7;
    let reply = write(&server, &path, &format!("&offset={far}"), b"the end");
    assert_eq!(reply["size"], far + 7);
    assert_eq!(stat(&server, &path, "")["size"], far + 7);
    assert_eq!(
        read(&server, &path, &format!("&offset={}&length=100", far - 2)),
        b"\0\0the end"
    );
    let head = server.request("HEAD", &target("read", &path, ""), b"");
    assert_eq!(
        head.header("content-length"),
        Some((far + 7).to_string().as_str())
    );
    let mut connection = server.connect();
    let range = format!("bytes={far}-");
    let reply = connection.request("GET", &target("read", &path, ""), &[("Range", &range)], b"");
    assert_eq!(
        (reply.status, reply.body.as_slice()),
        (206, b"the end".as_slice())
    );
}

#[test]
fn transfers_cost_the_server_no_memory() {
    let server = Server::start();
    let dir = TempDir::new();
    let path = dir.join("file");
    let piece = random_bytes(4 * MIB, 1);
    thread::scope(|scope| {
        for number in 0..3 {
            let (server, piece, path) = (&server, &piece, format!("{path}-{number}"));
            scope.spawn(move || {
                let mut connection =
                    begin(server, "PUT", &target("write", &path, ""), 16 * piece.len());
                for _ in 0..16 {
                    connection.send(piece);
                }
                expect_ok(&connection.read_reply());
                let mut connection = server.connect();
                connection.send_request("GET", &target("read", &path, ""), &[], b"");
                connection.read_head();
                for _ in 0..16 {
                    assert!(
                        connection.read_exactly(piece.len()) == *piece,
                        "the content differs"
                    );
                }
            });
        }
    });
    let peak = status_of(server.pid(), "VmHWM") / 1024;
    assert!(
        peak < 48,
        "the server needed {peak} MiB for three transfers of 64 MiB each way"
    );
}

#[test]
fn a_file_that_shrinks_while_it_is_sent_closes_the_connection() {
    let server = Server::start();
    let dir = TempDir::new();
    let path = dir.join("file");
    let size = 256 * MIB as u64;
    for (rest, range) in [
        ("", None),
        ("&offset=1000", None),
        ("&offset=0&length=200000000", None),
        ("", Some("bytes=5-")),
    ] {
        File::create(&path).unwrap().set_len(size).unwrap();
        let mut connection = server.connect();
        let headers: Vec<(&str, &str)> = range.iter().map(|range| ("Range", *range)).collect();
        connection.send_request("GET", &target("read", &path, rest), &headers, b"");
        // The next request is on its way already; its answer must not come out of step.
        connection.send_request("GET", "/health", &[], b"");
        let head = connection.read_head();
        let promised: usize = head.header("content-length").unwrap().parse().unwrap();
        assert!(promised >= 200_000_000);
        OpenOptions::new()
            .write(true)
            .open(&path)
            .unwrap()
            .set_len(1)
            .unwrap();
        let rest = connection.read_to_close();
        assert!(rest.len() < promised, "{} of {promised} bytes", rest.len());
        assert!(
            rest.iter().all(|byte| *byte == 0),
            "something else follows the content"
        );
    }
    assert_eq!(server.get("/health").status, 200, "and the server lives");
}

#[test]
fn a_file_that_grows_while_it_is_sent_is_sent_as_it_was_measured() {
    let server = Server::start();
    let dir = TempDir::new();
    let path = dir.join("file");
    let content = random_bytes(24 * MIB, 1);
    fs::write(&path, &content).unwrap();
    let mut connection = server.connect();
    connection.send_request("GET", &target("read", &path, ""), &[], b"");
    let head = connection.read_head();
    assert_eq!(
        head.header("content-length"),
        Some(content.len().to_string().as_str())
    );
    OpenOptions::new()
        .append(true)
        .open(&path)
        .unwrap()
        .write_all(&random_bytes(MIB, 2))
        .unwrap();
    let reply = connection.read_body(head);
    expect_same("the content", &reply.body, &content);
    assert_eq!(
        connection.request("GET", "/health", &[], b"").status,
        200,
        "the connection is in step"
    );
}

#[test]
fn a_file_that_is_replaced_or_deleted_while_it_is_sent_arrives_as_it_was() {
    let server = Server::start();
    let dir = TempDir::new();
    let path = dir.join("file");
    let content = random_bytes(24 * MIB, 1);
    for replace in [true, false] {
        fs::write(&path, &content).unwrap();
        let mut connection = server.connect();
        connection.send_request("GET", &target("read", &path, ""), &[], b"");
        let head = connection.read_head();
        if replace {
            write(&server, &path, "", b"another");
        } else {
            delete(&server, &path, "");
        }
        expect_same("the content", &connection.read_body(head).body, &content);
    }
}
