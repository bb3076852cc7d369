//! Archives down: what is in them, what is not, and that every program reads them.

use std::fs::{self, File, Permissions};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::{Value, json};

use super::hostile::bomb;
use super::{BLOCK, Place, in_both_modes, listing};
use crate::fixture::{
    Connection, PATIENCE, TempDir, assert_error, cpu_time_of, expect_same, is_root, wait_until,
};
use crate::skip;

impl Place {
    /// The archive of the directory.
    #[track_caller]
    fn pack(&self, rest: &str) -> Vec<u8> {
        let reply = self.connect().request("GET", &self.target(rest), &[], b"");
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.body
    }

    /// Gives a file to whom the server acts as.
    fn give(&self, name: impl AsRef<Path>) {
        let owner = fs::metadata(self.directory.parent().unwrap()).unwrap();
        let ids = (Some(owner.uid()), Some(owner.gid()));
        std::os::unix::fs::lchown(self.directory.join(name), ids.0, ids.1).unwrap();
    }

    fn make(&self, name: &str, content: &[u8]) {
        if let Some((directory, _)) = name.rsplit_once('/') {
            self.make_directory(directory);
        }
        fs::write(self.path(name), content).unwrap();
        self.give(name);
    }

    /// Makes a directory and those above it.
    fn make_directory(&self, name: &str) {
        for (end, _) in name.match_indices('/').chain([(name.len(), "")]) {
            let _ = fs::create_dir(self.path(&name[..end]));
            self.give(&name[..end]);
        }
    }

    fn link(&self, target: impl AsRef<Path>, name: &str) {
        symlink(target, self.path(name)).unwrap();
        self.give(name);
    }

    /// A tree with a bit of everything.
    fn fill(&self) {
        fs::create_dir(&self.directory).unwrap();
        self.give("");
        self.make("file", b"content");
        self.make("dir/deeper/large", &vec![7; 300_000]);
        self.make("dir/empty-file", b"");
        self.make("dir/caf\u{e9} with blanks\n", b"name");
        self.make_directory("empty");
        self.make_directory("closed");
        self.make("closed/inside", b"x");
        fs::hard_link(self.path("file"), self.path("dir/hard")).unwrap();
        self.link("../file", "dir/link");
        self.link("/nowhere", "dangling");
        self.link("t".repeat(200), "far-link");
        let deep = format!("{}/{}", "d".repeat(150), "e".repeat(120));
        self.make(&format!("{deep}/{}", "f".repeat(200)), b"far");
        // No format but pax has a name of 255 bytes in a directory of 120.
        self.make(&format!("{}/{}", "g".repeat(120), "h".repeat(255)), b"x");
        let odd = std::ffi::OsStr::from_bytes(b"odd-\xff\xfe");
        fs::write(self.directory.join(odd), "bytes").unwrap();
        self.give(odd);
        let modified = std::time::UNIX_EPOCH + Duration::new(1_600_000_000, 123_456_789);
        let old = std::time::UNIX_EPOCH + Duration::new(5, 250_000_000);
        for (name, time) in [
            ("file", modified),
            ("dir/empty-file", old),
            ("closed/inside", modified),
        ] {
            let file = File::options().write(true).open(self.path(name)).unwrap();
            file.set_modified(time).unwrap();
        }
        for (name, mode) in [
            ("file", 0o640),
            ("dir/empty-file", 0o4755),
            ("dir/deeper", 0o1777),
            ("empty", 0o2750),
            ("closed", 0o555),
        ] {
            fs::set_permissions(self.path(name), Permissions::from_mode(mode)).unwrap();
        }
    }
}

/// Names of the members, and the text of the report.
fn members(archive: &[u8]) -> (Vec<String>, Value) {
    let script = "import io, json, sys, tarfile\n\
                  with tarfile.open(fileobj=io.BytesIO(sys.stdin.buffer.read())) as tar:\n\
                  \x20   names = tar.getnames()\n\
                  \x20   report = tar.pax_headers.get('SBX.report', 'null')\n\
                  print(json.dumps([names, json.loads(report)]))\n";
    let output = run("python3", &["-c", script], archive, Path::new("/"));
    let [names, report]: [Value; 2] = serde_json::from_slice(&output).unwrap();
    (serde_json::from_value(names).unwrap(), report)
}

/// Runs a program that must succeed, in silence.
#[track_caller]
fn run(program: &str, arguments: &[&str], input: &[u8], directory: &Path) -> Vec<u8> {
    let mut child = Command::new(program)
        .args(arguments)
        .current_dir(directory)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{program}: {error}"));
    let mut pipe = child.stdin.take().unwrap();
    let input = input.to_vec();
    let writer = std::thread::spawn(move || std::io::Write::write_all(&mut pipe, &input));
    let output = child.wait_with_output().unwrap();
    let _ = writer.join().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {errors}");
    assert_eq!(errors, "", "{program} {arguments:?}");
    output.stdout
}

/// How many descriptors of other processes lead to a file.
fn readers_of(path: &Path) -> usize {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let open = processes.flat_map(|process| {
        fs::read_dir(process.path().join("fd"))
            .into_iter()
            .flatten()
    });
    let targets = open.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    targets.filter(|target| target == path).count()
}

fn exists(program: &str) -> bool {
    Command::new(program).arg("--help").output().is_ok()
}

#[test]
fn every_program_unpacks_what_was_packed() {
    let python = "import sys, tarfile\n\
                  with tarfile.open(fileobj=sys.stdin.buffer, mode='r|*') as tar:\n\
                  \x20   tar.extractall('.', **({'filter': 'fully_trusted'} if hasattr(tarfile, 'data_filter') else {}))\n";
    in_both_modes(|place| {
        place.fill();
        let expected = listing(&place.directory);
        for format in ["tar", "tar.gz"] {
            let archive = place.pack(&format!("&format={format}"));
            let zip = if format == "tar" { "-" } else { "-z" };
            let gnu = format!("{zip}xpf").replace("--", "-");
            for (program, arguments, keeps) in [
                ("tar", &[gnu.as_str(), "-"][..], true),
                ("bsdtar", &["-xpf", "-"], true),
                ("python3", &["-c", python], false),
                ("busybox", &["tar", &gnu, "-"], false),
            ] {
                if !exists(program) {
                    skip!("needs {program}");
                }
                let copy = TempDir::new();
                run(program, arguments, &archive, copy.path());
                let (mut found, mut expected) = (listing(copy.path()), expected.clone());
                if !keeps {
                    // Python keeps microseconds, and busybox seconds, and no times of links.
                    found = without_times(found);
                    expected = without_times(expected);
                }
                assert_eq!(found, expected, "{program} {format}");
                let hard = [copy.join("file"), copy.join("dir/hard")];
                let [one, other] = hard.map(|path| fs::metadata(path).unwrap().ino());
                assert_eq!(one, other, "{program}: one file with two names");
                if is_root() && program != "busybox" {
                    let owner = fs::metadata(place.path("file")).unwrap().uid();
                    assert_eq!(
                        fs::metadata(copy.join("file")).unwrap().uid(),
                        owner,
                        "{program}"
                    );
                }
            }
        }
    });
}

fn without_times(listing: Vec<String>) -> Vec<String> {
    let without = |line: String| {
        let words = line.split(' ').filter(|word| {
            let digits = word.trim_start_matches('-').split('.');
            let is_time = word.contains('.') && digits.clone().count() == 2;
            !(is_time
                && digits
                    .into_iter()
                    .all(|part| part.bytes().all(|byte| byte.is_ascii_digit())))
        });
        words.collect::<Vec<_>>().join(" ")
    };
    listing.into_iter().map(without).collect()
}

#[test]
fn an_empty_tree_and_a_single_file_are_archives_too() {
    in_both_modes(|place| {
        fs::create_dir(&place.directory).unwrap();
        place.give("");
        for program in ["tar", "bsdtar", "busybox"] {
            let copy = TempDir::new();
            let arguments: &[&str] = if program == "busybox" {
                &["tar", "-xf", "-"]
            } else {
                &["-xf", "-"]
            };
            if exists(program) {
                run(program, arguments, &place.pack(""), copy.path());
            }
        }
        let (names, report) = members(&place.pack(""));
        assert_eq!(names, ["."]);
        assert_eq!(
            report,
            json!({"files": 0, "dirs": 0, "links": 0, "bytes": 0, "changed": 0,
                   "skipped": [], "skipped_total": 0})
        );
        place.make("file", b"12345");
        assert_eq!(members(&place.pack("/file")).0, ["file"]);
        assert_eq!(
            run(
                "tar",
                &["-xOf", "-", "file"],
                &place.pack("/file"),
                Path::new("/")
            ),
            b"12345"
        );
        mkfifo(&place.path("pipe"), Mode::S_IRWXU).unwrap();
        place.give("pipe");
        for (rest, status, code) in [("/none", 404, "not_found"), ("/pipe", 409, "not_regular")] {
            let reply = place
                .connect()
                .request("GET", &place.target(rest), &[], b"");
            assert_error(&reply, status, code);
        }
    });
}

#[test]
fn names_are_sorted_and_patterns_choose_among_them() {
    in_both_modes(|place| {
        fs::create_dir(&place.directory).unwrap();
        place.give("");
        for name in [
            "b",
            "a/2",
            "a/1.log",
            "a.txt",
            "a/keep/x.log",
            "c/.gitignore",
            "c/y",
            "c/z.o",
            ".hidden",
        ] {
            place.make(
                name,
                if name.ends_with("ignore") {
                    b"*.o\n"
                } else {
                    b"x"
                },
            );
        }
        let all = [
            ".hidden",
            "a",
            "a/1.log",
            "a/2",
            "a/keep",
            "a/keep/x.log",
            "a.txt",
            "b",
            "c",
            "c/.gitignore",
            "c/y",
            "c/z.o",
            ".",
        ];
        for (rest, expected) in [
            ("", &all[..]),
            (
                "&include=a/",
                &["a", "a/1.log", "a/2", "a/keep", "a/keep/x.log", "."],
            ),
            (
                "&include=*.log&include=b",
                &["a/1.log", "a/keep/x.log", "b", "."],
            ),
            (
                "&exclude=*.log&exclude=!1.log&exclude=c",
                &[
                    ".hidden", "a", "a/1.log", "a/2", "a/keep", "a.txt", "b", ".",
                ],
            ),
            ("&include=*.log&exclude=keep", &["a/1.log", "."]),
            ("&include=c&gitignore=1", &["c", "c/.gitignore", "c/y", "."]),
            ("&include=nothing", &["."]),
        ] {
            let (names, _) = members(&place.pack(rest));
            assert_eq!(names, expected, "{rest}");
        }
        for rest in [
            "&format=zip",
            "&errors=all",
            "&include=[",
            "&gitignore=2",
            "&newer_than_ms=x",
        ] {
            let reply = place
                .connect()
                .request("GET", &place.target(rest), &[], b"");
            assert_error(&reply, 400, "bad_request");
        }
        let old = File::options().write(true).open(place.path("b")).unwrap();
        old.set_modified(std::time::UNIX_EPOCH + Duration::from_secs(5))
            .unwrap();
        let count = |rest: &str| members(&place.pack(rest)).1["files"].clone();
        assert_eq!(count("&newer_than_ms=4999"), 9);
        assert_eq!(count("&newer_than_ms=5000"), 8);
    });
}

#[test]
fn what_cannot_be_packed_is_told_or_breaks_the_archive_off() {
    in_both_modes(|place| {
        fs::create_dir(&place.directory).unwrap();
        place.give("");
        place.make("a", b"12345");
        place.make("z", b"12345");
        for number in 0..120 {
            mkfifo(&place.path(&format!("pipe-{number:03}")), Mode::S_IRWXU).unwrap();
        }
        let _socket = UnixListener::bind(place.path("socket")).unwrap();
        let is_sandbox = place.shown == "tree";
        if is_sandbox {
            place.make("secret", b"of root");
            std::os::unix::fs::chown(place.path("secret"), Some(0), Some(0)).unwrap();
            fs::set_permissions(place.path("secret"), Permissions::from_mode(0o600)).unwrap();
            place.make_directory("shut");
            fs::set_permissions(place.path("shut"), Permissions::from_mode(0o000)).unwrap();
        }
        let archive = place.pack("");
        let (names, report) = members(&archive);
        assert_eq!(
            names,
            if is_sandbox {
                &["a", "shut", "z", "."][..]
            } else {
                &["a", "z", "."]
            }
        );
        assert_eq!(
            (&report["files"], &report["bytes"], &report["skipped_total"]),
            (
                &json!(2),
                &json!(10),
                &json!(if is_sandbox { 123 } else { 121 })
            )
        );
        let skipped = report["skipped"].as_array().unwrap();
        assert_eq!(skipped.len(), 100);
        assert_eq!(skipped[0], json!({"name": "pipe-000", "reason": "fifo"}));
        for number in 0..120 {
            fs::remove_file(place.path(&format!("pipe-{number:03}"))).unwrap();
        }
        let (_, report) = members(&place.pack(""));
        let told = report["skipped"].as_array().unwrap();
        let reason = |name: &str| {
            told.iter()
                .find(|file| file["name"] == name)
                .map(|file| &file["reason"])
        };
        assert_eq!(reason("socket"), Some(&json!("socket")));
        if is_sandbox {
            assert_eq!(reason("secret"), Some(&json!("permission")));
            assert_eq!(reason("shut"), Some(&json!("permission")));
        }
        // The head is sent by then: what tells is that the last chunk does not come.
        for format in ["tar", "tar.gz"] {
            let mut connection = place.connect();
            let target = place.target(&format!("&errors=fail&format={format}"));
            connection.send_request("GET", &target, &[], b"");
            assert_eq!(connection.read_head().status, 200);
            let body = connection.read_to_close();
            assert!(!body.ends_with(b"0\r\n\r\n"), "{format}");
        }
        place.pack("&errors=fail&include=z&exclude=shut");
    });
}

/// Makes the file `large` of 1 TiB, all of it a hole.
fn make_large(place: &Place) {
    place.make("large", b"");
    let file = File::options().write(true).open(place.path("large"));
    file.unwrap().set_len(1 << 40).unwrap();
}

#[test]
fn a_head_request_does_not_walk() {
    in_both_modes(|place| {
        fs::create_dir(&place.directory).unwrap();
        place.give("");
        make_large(place);
        place.make_directory("inner");
        // The time of the last read of a directory tells of a walk.
        let old = std::time::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
        let times = fs::FileTimes::new()
            .set_accessed(old)
            .set_modified(old + Duration::from_secs(1));
        for name in ["inner", ""] {
            let directory = File::open(place.path(name)).unwrap();
            directory.set_times(times).unwrap();
        }
        let is_walked = || {
            let accessed = |name| fs::metadata(place.path(name)).unwrap().accessed().unwrap();
            accessed("") != old || accessed("inner") != old
        };
        let mut connection = place.connect();
        for (format, kind) in [("tar", "application/x-tar"), ("tar.gz", "application/gzip")] {
            let target = place.target(&format!("&format={format}"));
            let head = connection.request("HEAD", &target, &[], b"");
            assert_eq!(
                (head.status, head.header("content-type")),
                (200, Some(kind))
            );
            assert!(!is_walked(), "{format}");
        }
        place.pack("&exclude=large");
        if !is_walked() {
            skip!("this file system does not keep the times of reads");
        }
        assert_eq!(
            connection
                .request("HEAD", &place.target("/none"), &[], b"")
                .status,
            404
        );
    });
}

/// Reads the archive's first megabyte.
fn begin(place: &Place, rest: &str) -> (Connection, Vec<u8>) {
    let mut connection = place.connect();
    connection.send_request("GET", &place.target(rest), &[], b"");
    assert_eq!(connection.read_head().status, 200);
    let mut archive = Vec::new();
    while archive.len() < 1 << 20 {
        archive.extend(connection.read_chunk().unwrap());
    }
    (connection, archive)
}

#[test]
fn files_that_change_while_they_are_packed_have_the_size_that_was_promised() {
    in_both_modes(|place| {
        fs::create_dir(&place.directory).unwrap();
        place.give("");
        // More than sockets hold: the server waits for the test in the middle of the file.
        let size = 32 << 20;
        for (name, after) in [("shrinks", 1 << 20), ("grows", size + 1_000_000)] {
            place.make(name, &vec![b'x'; usize::try_from(size).unwrap()]);
            let (mut connection, mut archive) = begin(place, &format!("&include={name}"));
            let file = File::options().write(true).open(place.path(name)).unwrap();
            if after > size {
                file.write_all_at(&vec![b'y'; 1_000_000], size).unwrap();
            } else {
                file.set_len(after).unwrap();
            }
            while let Some(chunk) = connection.read_chunk() {
                archive.extend(chunk);
            }
            let (names, report) = members(&archive);
            assert_eq!(names, [name, "."]);
            assert_eq!(
                (&report["changed"], &report["bytes"]),
                (&json!(1), &json!(size))
            );
            let content = run("tar", &["-xOf", "-", name], &archive, Path::new("/"));
            assert_eq!(content.len() as u64, size, "{name}");
            let rest = &content[usize::try_from(size.min(after + (8 << 20))).unwrap()..];
            assert!(
                rest.iter().all(|byte| *byte == 0 || after > size),
                "zeros after it"
            );
        }
    });
}

#[test]
fn archives_of_a_tenant_take_one_processor_together() {
    let place = Place::dedicated();
    fs::create_dir(&place.directory).unwrap();
    make_large(&place);
    let bomb = bomb();
    for request in [
        place.request("GET", "&format=tar.gz", b""),
        place.request("PUT", "&strip=1", &bomb),
    ] {
        let streams: Vec<_> = (0..4).map(|_| place.connect().stream).collect();
        std::thread::scope(|scope| {
            for mut stream in &streams {
                let request = &request;
                scope.spawn(move || {
                    let _ = stream.write_all(request);
                    let _ = std::io::copy(&mut stream, &mut std::io::sink());
                });
            }
            let (begun, used) = (Instant::now(), || cpu_time_of(place.files_pid()));
            let before = used();
            let limit = Duration::from_secs(3);
            wait_until("they have used some time", 3 * PATIENCE, || {
                used() >= before + limit
            });
            let took = begun.elapsed();
            for stream in &streams {
                let _ = stream.shutdown(Shutdown::Both);
            }
            assert!(took >= limit.mul_f64(0.75), "more than one: {took:?}");
        });
    }
}

#[test]
fn work_for_a_client_that_leaves_ends() {
    in_both_modes(|place| {
        fs::create_dir(&place.directory).unwrap();
        place.give("");
        make_large(place);
        for format in ["tar", "tar.gz"] {
            let mut connection = place.connect();
            let target = place.target(&format!("&format={format}"));
            connection.send_request("GET", &target, &[], b"");
            assert_eq!(connection.read_head().status, 200);
            connection.read_chunk().unwrap();
            let readers = || readers_of(&place.path("large"));
            if readers() == 0 {
                skip!("only root can see what the server reads");
            }
            drop(connection);
            let begun = Instant::now();
            wait_until("the file is closed", PATIENCE, || readers() == 0);
            assert!(
                begun.elapsed() < Duration::from_secs(5),
                "{format}: {:?}",
                begun.elapsed()
            );
        }
    });
}

#[test]
fn a_deep_tree_is_packed_whole() {
    in_both_modes(|place| {
        fs::create_dir(&place.directory).unwrap();
        place.give("");
        // Deeper than one path can name.
        let script = "import os\n\
                      for level in range(2100):\n\
                      \x20   os.mkdir('d'); os.chdir('d')\n\
                      open('bottom', 'w').close()\n";
        run("python3", &["-c", script], b"", &place.directory);
        run(
            "chown",
            &["-R", "--reference=.", "d"],
            b"",
            &place.directory,
        );
        let (_, report) = members(&place.pack("&format=tar.gz"));
        assert_eq!(
            (&report["dirs"], &report["files"]),
            (&json!(2100), &json!(1))
        );
        run("rm", &["-rf", "d"], b"", &place.directory);
    });
}

#[test]
fn what_is_packed_is_unpacked_as_it_was() {
    in_both_modes(|place| {
        place.fill();
        // These bits are dropped on the way up.
        for name in ["dir/empty-file", "dir/deeper", "empty"] {
            let mode = place.mode(name) & 0o777;
            fs::set_permissions(place.path(name), Permissions::from_mode(mode)).unwrap();
        }
        let expected = listing(&place.directory);
        for format in ["tar", "tar.gz"] {
            let archive = place.pack(&format!("&format={format}"));
            fs::remove_dir_all(&place.directory).unwrap();
            let done = place.unpack("&atomic=1", &archive);
            assert_eq!(done["skipped_total"], 0);
            assert_eq!(listing(&place.directory), expected, "{format}");
            let again = place.pack(&format!("&format={format}"));
            expect_same(
                format,
                &again[..again.len() - 4 * BLOCK],
                &archive[..again.len() - 4 * BLOCK],
            );
        }
    });
}

#[test]
fn an_archive_of_a_sandbox_has_nothing_of_others() {
    if !is_root() {
        skip!("needs root");
    }
    let place = Place::sandbox();
    fs::create_dir(&place.directory).unwrap();
    place.give("");
    let other = place.server.sandbox();
    other.sh("echo other-marker > marker; chmod 777 . marker");
    let outside = TempDir::new();
    fs::write(outside.join("marker"), "outside-marker").unwrap();
    for (target, name) in [
        (other.home.as_path(), "neighbour"),
        (outside.path(), "outside"),
    ] {
        place.link(target, name);
        place.link(target.join("marker"), &format!("{name}-file"));
        for rest in [
            format!("/{name}"),
            format!("/{name}/marker"),
            format!("/{name}-file"),
        ] {
            let reply = place
                .connect()
                .request("GET", &place.target(&rest), &[], b"");
            assert_error(&reply, 403, "forbidden");
        }
    }
    let archive = place.pack("");
    for marker in ["other-marker", "outside-marker"] {
        assert!(
            crate::fixture::find(&archive, marker.as_bytes()).is_none(),
            "{marker}"
        );
    }
    let (_, report) = members(&archive);
    assert_eq!((&report["links"], &report["files"]), (&json!(4), &json!(0)));
}

#[test]
fn a_slow_client_slows_down_nobody_else() {
    let place = Place::dedicated();
    fs::create_dir(&place.directory).unwrap();
    make_large(&place);
    let mut stalled = place.connect();
    stalled.send_request("GET", &place.target(""), &[], b"");
    assert_eq!(stalled.read_head().status, 200);
    let mut byte = [0];
    stalled.stream.read_exact(&mut byte).unwrap();
    place.make("small/file", b"x");
    assert_eq!(members(&place.pack("/small")).0, ["file", "."]);
}
