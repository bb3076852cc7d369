//! The promise of copies and modes: a copy has what the original has, a file of it is whole, nothing is
//! overwritten unasked, and no link leads anywhere.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;

use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;

use super::{DeepTree, MIB, Mount, Place, chmod, expect_error, expect_ok, mkfifo, mode_of};
use crate::fixture::{
    PATIENCE, Reply, Server, TempDir, is_root, names_in, random_bytes, wait_until,
};
use crate::skip;

fn copy(place: &Place<'_>, rest: &str) -> Reply {
    place.request("POST", &format!("files/copy?{rest}"), b"")
}

/// Runs a shell script in the place's directory, as the user whose it is.
fn sh(place: &Place<'_>, script: &str) {
    let owner = fs::metadata(&place.directory).unwrap();
    let mut command = Command::new("sh");
    std::os::unix::process::CommandExt::uid(&mut command, owner.uid());
    std::os::unix::process::CommandExt::gid(&mut command, owner.gid());
    // Who changes its user may not see the directory of the tests.
    command.args(["-c", &format!("set -e; {script}")]);
    let status = command.current_dir(&place.directory).status().unwrap();
    assert!(status.success(), "{script}");
}

/// Names, types, modes, sizes, times and targets below a directory.
fn description(directory: &Path) -> String {
    let output = Command::new("find")
        .args([".", "-printf", "%P %y %m %l %T@ "])
        // The size of a directory depends on its past.
        .args([
            "(", "-type", "d", "-o", "-printf", "%s", ")", "-printf", "\\n",
        ])
        .current_dir(directory)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines.join("\n")
}

#[test]
fn a_copied_file_has_the_content_mode_and_times() {
    Place::each(|place| {
        for (name, size, mode) in [
            ("empty", 0, 0o600),
            ("small", 100, 0o4755),
            ("large", 20 * MIB + 1, 0o444),
        ] {
            let content = random_bytes(size, 1);
            let path = place.make(name, &content);
            chmod(&path, mode);
            sh(
                place,
                &format!("touch -d '2001-02-03 04:05:06.123456789' {name}"),
            );
            let report = expect_ok(&copy(place, &format!("from=@{name}&to=@made/of/{name}")));
            assert_eq!(report["path"], place.told(&format!("@made/of/{name}")));
            assert_eq!(
                (&report["files"], &report["bytes"]),
                (&1.into(), &size.into())
            );
            assert_eq!(report["skipped_total"], 0);
            let made = place.path(&format!("made/of/{name}"));
            assert!(fs::read(&made).unwrap() == content, "{name}");
            assert_eq!(mode_of(&made), mode, "{name}");
            let (old, new) = (fs::metadata(&path).unwrap(), fs::metadata(&made).unwrap());
            assert_eq!(
                (old.mtime(), old.mtime_nsec()),
                (new.mtime(), new.mtime_nsec())
            );
            assert_eq!(old.uid(), new.uid());
        }
        assert_eq!(names_in(place.path("made/of")), ["empty", "large", "small"]);
    });
}

#[test]
fn nothing_is_overwritten_unasked_and_nothing_copied_into_itself() {
    Place::each(|place| {
        sh(
            place,
            "echo new > new; echo old > old; mkdir -p dir/sub full; echo x > full/x; ln old hard",
        );
        for (rest, status, code) in [
            ("from=@new&to=@old", 409, "exists"),
            ("from=@new&to=@dir", 409, "exists"),
            ("from=@new&to=@dir&overwrite=1", 409, "is_directory"),
            ("from=@dir&to=@other", 409, "is_directory"),
            ("from=@dir&to=@full&recursive=1", 409, "exists"),
            (
                "from=@dir&to=@old&recursive=1&overwrite=1",
                409,
                "not_directory",
            ),
            (
                "from=@dir&to=@dir&recursive=1&overwrite=1",
                400,
                "bad_request",
            ),
            ("from=@dir&to=@dir/in&recursive=1", 400, "bad_request"),
            ("from=@dir&to=@dir/sub/in&recursive=1", 400, "bad_request"),
            ("from=@dir&to=@dir/made/in&recursive=1", 400, "bad_request"),
            ("from=@old&to=@old&overwrite=1", 400, "bad_request"),
            ("from=@old&to=@hard&overwrite=1", 400, "bad_request"),
            ("from=@none&to=@made/other", 404, "not_found"),
            ("from=@old", 400, "bad_request"),
            ("to=@old", 400, "bad_request"),
        ] {
            expect_error(&copy(place, rest), status, code);
        }
        assert_eq!(names_in(place.path("dir")), ["sub"]);
        assert!(names_in(place.path("dir/sub")).is_empty());
        assert!(!place.path("made").exists());
        assert_eq!(fs::read(place.path("old")).unwrap(), b"old\n");
        expect_ok(&copy(place, "from=@new&to=@old&overwrite=1"));
        assert_eq!(fs::read(place.path("old")).unwrap(), b"new\n");
        assert_eq!(
            fs::read(place.path("hard")).unwrap(),
            b"old\n",
            "it was replaced, not written to"
        );
        // A directory is added to a directory.
        sh(place, "echo more > dir/more; echo y > dir/sub/y");
        let report = expect_ok(&copy(place, "from=@dir&to=@full&recursive=1&overwrite=1"));
        assert_eq!((&report["files"], &report["dirs"]), (&2.into(), &1.into()));
        assert_eq!(names_in(place.path("full")), ["more", "sub", "x"]);
    });
}

#[test]
fn a_tree_is_copied_as_cp_would() {
    Place::each(|place| {
        sh(
            place,
            "mkdir tree; cd tree; mkdir empty closed deep; echo a > a; chmod 751 empty
            ln -s a link; ln -s nowhere dangling; ln -s /etc out; ln -s deep to-dir
            echo in > closed/in; chmod 555 closed; printf 'odd' > 'odd
name'
            (cd deep; for i in $(seq 60); do echo $i > z; echo $i > 0; mkdir m; touch -d @$((i * 1000)) z; cd m; done)
            touch -d 2001-01-01 closed empty; touch -h -d 2002-02-02 link",
        );
        let report = expect_ok(&copy(place, "from=@tree&to=@copied/tree&recursive=1"));
        sh(place, "cp -a tree expected");
        let original = description(&place.path("expected"));
        assert_eq!(description(&place.path("copied/tree")), original);
        assert_eq!(report["links"], 4, "{report}");
        assert_eq!(report["files"], 123, "{report}");
        assert_eq!(report["dirs"], 64, "{report}");
        let text = fs::read_to_string(place.path("copied/tree/closed/in")).unwrap();
        assert_eq!(text, "in\n");
        // A link itself is copied, not what it leads to.
        expect_ok(&copy(place, "from=@tree/out&to=@out"));
        assert_eq!(fs::read_link(place.path("out")).unwrap(), Path::new("/etc"));
        expect_error(&copy(place, "from=@tree/link&to=@out"), 409, "exists");
        expect_ok(&copy(place, "from=@tree/link&to=@out&overwrite=1"));
        assert_eq!(fs::read_link(place.path("out")).unwrap(), Path::new("a"));
    });
}

#[test]
fn what_has_no_content_is_left_out_and_told() {
    Place::each(|place| {
        sh(place, "mkdir -p tree/sub; echo a > tree/a");
        for name in ["tree/pipe", "tree/sub/pipe"] {
            mkfifo(place.path(name));
            place.give(&place.path(name));
        }
        let socket = std::os::unix::net::UnixListener::bind(place.path("tree/socket"));
        let report = expect_ok(&copy(place, "from=@tree&to=@copy&recursive=1"));
        drop(socket);
        assert_eq!(report["skipped_total"], 3, "{report}");
        assert_eq!(
            report["skipped"],
            serde_json::json!([
                {"name": "pipe", "reason": "fifo"},
                {"name": "socket", "reason": "socket"},
                {"name": "sub/pipe", "reason": "fifo"}
            ])
        );
        assert_eq!(names_in(place.path("copy")), ["a", "sub"]);
        let reply = copy(place, "from=@tree/pipe&to=@other");
        expect_error(&reply, 409, "not_regular");
    });
}

#[test]
fn what_may_not_be_read_is_left_out_and_told() {
    Place::each(|place| {
        sh(
            place,
            "mkdir -p tree/shut; echo a > tree/a; echo b > tree/closed; chmod 0 tree/shut tree/closed",
        );
        let report = expect_ok(&copy(place, "from=@tree&to=@copy&recursive=1"));
        if !place.is_sandbox {
            assert_eq!(report["skipped_total"], 0, "root may read all: {report}");
            return;
        }
        assert_eq!(
            report["skipped"],
            serde_json::json!([
                {"name": "closed", "reason": "permission"},
                {"name": "shut", "reason": "permission"}
            ])
        );
        assert_eq!(
            (&report["skipped_total"], &report["files"]),
            (&2.into(), &1.into())
        );
    });
}

/// Half a tebibyte would come out of it.
#[test]
fn a_file_that_tells_no_size_and_does_not_end_is_refused() {
    let server = Server::start();
    let dir = TempDir::new();
    let endless = format!("/proc/{}/pagemap", std::process::id());
    if fs::File::open(&endless).is_err() {
        skip!("this kernel has no /proc/PID/pagemap");
    }
    let to = dir.join("copy");
    for (method, route) in [
        ("GET", format!("stat?path={endless}&hash=sha256")),
        ("POST", format!("copy?from={endless}&to={to}")),
    ] {
        let target = format!("/v1/files/{route}");
        let reply = server.request(method, &target, b"");
        assert!(reply.text().contains("EFBIG"), "{}", reply.text());
        assert_eq!(reply.json()["code"], "bad_request");
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn holes_stay_holes() {
    Place::each(|place| {
        let path = place.make("sparse", "start");
        let file = File::options().write(true).open(&path).unwrap();
        file.write_all_at(b"middle", 1 << 30).unwrap();
        file.set_len(3 << 30).unwrap();
        let report = expect_ok(&copy(place, "from=@sparse&to=@copy"));
        assert_eq!(report["bytes"], 3_u64 << 30);
        let copied = File::open(place.path("copy")).unwrap();
        let status = copied.metadata().unwrap();
        assert_eq!(status.len(), 3 << 30);
        assert!(
            status.blocks() * 512 < 64 << 20,
            "{} blocks",
            status.blocks()
        );
        let mut bytes = [0; 8];
        copied.read_exact_at(&mut bytes, (1 << 30) - 1).unwrap();
        assert_eq!(&bytes, b"\0middle\0");
    });
}

#[test]
fn another_file_system_and_files_without_a_size_are_no_matter() {
    let server = crate::fixture::Server::start();
    let (dir, other) = (TempDir::new(), TempDir::in_memory());
    let content = random_bytes(3 * MIB, 1);
    fs::write(dir.join("a"), &content).unwrap();
    let copy = |from: &str, to: &str| {
        let target = format!("/v1/files/copy?from={from}&to={to}");
        expect_ok(&server.request("POST", &target, b""))
    };
    copy(&dir.join("a"), &other.join("b"));
    copy(&other.join("b"), &dir.join("c"));
    assert!(fs::read(dir.join("c")).unwrap() == content);
    copy("/proc/version", &dir.join("version"));
    assert_eq!(
        fs::read(dir.join("version")).unwrap(),
        fs::read("/proc/version").unwrap()
    );
}

#[test]
fn nothing_is_copied_into_what_is_mounted_in_a_home() {
    if !is_root() {
        skip!("only root can be a host");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let place = Place::sandbox(&server, &sandbox);
    let outside = TempDir::new();
    fs::write(outside.join("file"), "stays").unwrap();
    chmod(outside.path(), 0o777);
    chmod(Path::new(&outside.join("file")), 0o666);
    sh(
        &place,
        "mkdir -p src/deep/dir dst/deep/dir; echo harm | tee src/deep/dir/new >src/deep/file; echo >dst/deep/file",
    );
    let mounts = [("", "dst/deep/dir"), ("file", "dst/deep/file")]
        .map(|(from, at)| Mount::bind(Path::new(&outside.join(from)), &place.path(at)));
    if mounts.iter().any(Option::is_none) {
        skip!("a bind mount needs privileges");
    }
    for paths in [
        "from=src/deep/file&to=dst/deep/file",
        "from=src/deep/dir&to=dst/deep/dir",
        "from=src&to=dst",
    ] {
        let reply = copy(&place, &format!("{paths}&recursive=1&overwrite=1"));
        expect_error(&reply, 403, "forbidden");
        assert!(reply.text().contains("EXDEV"), "{}", reply.text());
        assert_eq!(names_in(outside.path()), ["file"], "{paths}");
        assert_eq!(fs::read(outside.join("file")).unwrap(), b"stays", "{paths}");
    }
}

#[test]
fn a_copy_that_does_not_fit_leaves_whole_files_only() {
    let server = Server::start();
    let dir = TempDir::new();
    let Some(_disk) = Mount::tmpfs(dir.path(), "size=6m,mode=755") else {
        skip!("mounting a small tmpfs needs root");
    };
    let place = Place::machine(&server, &dir);
    fs::create_dir(dir.join("tree")).unwrap();
    fs::write(dir.join("tree/a"), random_bytes(MIB, 1)).unwrap();
    fs::write(dir.join("tree/b"), random_bytes(3 * MIB, 2)).unwrap();
    fs::write(dir.join("old"), "old").unwrap();
    for (rest, left) in [
        ("from=@tree/b&to=@new", &["old", "tree"][..]),
        ("from=@tree/b&to=@old&overwrite=1", &["old", "tree"]),
        ("from=@tree&to=@copy&recursive=1", &["copy", "old", "tree"]),
    ] {
        expect_error(&copy(&place, rest), 507, "no_space");
        assert_eq!(names_in(dir.path()), left, "{rest}");
        assert_eq!(fs::read(dir.join("old")).unwrap(), b"old");
    }
    assert_eq!(names_in(dir.join("copy")), ["a"]);
    assert!(fs::read(dir.join("copy/a")).unwrap() == random_bytes(MIB, 1));
    // What there is goes on being copied when there is room.
    fs::remove_file(dir.join("copy/a")).unwrap();
    fs::write(dir.join("tree/b"), "small").unwrap();
    expect_ok(&copy(&place, "from=@tree&to=@copy&recursive=1&overwrite=1"));
    assert_eq!(names_in(dir.join("copy")), ["a", "b"]);
}

#[test]
fn a_tree_deeper_than_any_path_is_copied() {
    const LEVELS: usize = 2_500;
    let server = crate::fixture::Server::start();
    let dir = TempDir::new();
    let _from = DeepTree::make(dir.path().join("deep"), LEVELS, |number, level| {
        if number == LEVELS {
            let flags = OFlag::O_CREAT | OFlag::O_WRONLY;
            openat(level, "bottom", flags, Mode::S_IRWXU).unwrap();
        }
    });
    let _to = DeepTree(dir.path().join("copy"));
    let target = format!(
        "/v1/files/copy?from={0}/deep&to={0}/copy&recursive=1",
        dir.path().display()
    );
    let report = expect_ok(&server.request("POST", &target, b""));
    assert_eq!(
        (&report["dirs"], &report["files"]),
        (&(LEVELS + 1).into(), &1.into())
    );
}

#[test]
fn a_copy_ends_when_its_client_leaves() {
    Place::each(|place| {
        let Some(before) = place.open_files() else {
            skip!("only root can see what the server reads");
        };
        let many = 20_000;
        sh(
            place,
            &format!("mkdir many; cd many; seq {many} | xargs touch"),
        );
        let mut connection = place.connect();
        let target = place.target("files/copy?from=@many&to=@copy&recursive=1");
        connection.send_request("POST", &target, &[], b"");
        let made = || fs::read_dir(place.path("copy")).map_or(0, Iterator::count);
        wait_until("the copy has begun", PATIENCE, || made() > 0);
        drop(connection);
        wait_until("the copy has ended", PATIENCE, || {
            place.open_files().unwrap().len() == before.len()
        });
        assert!(made() < many, "it ended before all was copied");
    });
}

#[test]
fn modes_are_changed_and_links_left_alone() {
    Place::each(|place| {
        sh(
            place,
            "mkdir -p tree/sub; echo a > tree/a; echo b > tree/sub/b; echo c > kept; chmod 640 kept
            ln -s ../kept tree/link; mkdir -m 750 kept-dir; ln -s ../kept-dir tree/dir-link; ln -s kept link",
        );
        let change = |rest: &str| place.request("POST", &format!("files/chmod?{rest}"), b"");
        let done = expect_ok(&change("path=@tree/a&mode=4711"));
        assert_eq!((&done["changed"], &done["skipped"]), (&1.into(), &0.into()));
        assert_eq!(mode_of(place.path("tree/a")), 0o4711);
        expect_ok(&change("path=@tree&mode=700"));
        assert_eq!(mode_of(place.path("tree")), 0o700);
        assert_eq!(mode_of(place.path("tree/a")), 0o4711);
        // The tests are root, so they see also what its owner may not enter any more.
        for mode in [0o755, 0o600, 0o000] {
            let done = expect_ok(&change(&format!("path=@tree&mode={mode:o}&recursive=1")));
            let counts = (&done["changed"], &done["skipped"]);
            assert_eq!(counts, (&4.into(), &2.into()), "{mode:o}");
            for name in ["tree", "tree/a", "tree/sub", "tree/sub/b"] {
                assert_eq!(mode_of(place.path(name)), mode, "{name}");
            }
            chmod(place.path("tree/sub"), 0o700);
            chmod(place.path("tree"), 0o700);
        }
        assert_eq!(mode_of(place.path("kept")), 0o640);
        assert_eq!(mode_of(place.path("kept-dir")), 0o750);
        expect_error(&change("path=@link&mode=600"), 409, "not_regular");
        expect_error(&change("path=@none&mode=600"), 404, "not_found");
        for rest in [
            "path=@kept",
            "path=@kept&mode=8",
            "path=@kept&mode=17777",
            "mode=600",
        ] {
            expect_error(&change(rest), 400, "bad_request");
        }
        assert_eq!(mode_of(place.path("kept")), 0o640);
    });
}
