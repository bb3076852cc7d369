//! The promise of whole-file writes: whoever looks sees the old content or the new, and a write that
//! breaks off, for whatever reason, leaves the old file and no litter.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::thread;

use super::{
    MIB, Mount, Watcher, begin, chmod, delete, expect_error, expect_ok, expect_refusal,
    his_directory, meanwhile, mkfifo, mode_of, moving, open_files, send_what_is_wanted, target,
    unprivileged, wait_for_release, wait_for_upload, write,
};
use crate::fixture::{
    Connection, PATIENCE, Server, TempDir, expect_same, names_in, random_bytes, reset, wait_until,
};
use crate::skip;

#[test]
fn readers_see_the_old_or_the_new_content_and_nothing_between() {
    let server = Server::start();
    let dir = TempDir::new();
    let path = dir.join("file");
    let contents = [vec![b'a'; 3 * MIB], vec![b'b'; MIB], Vec::new()];
    fs::write(&path, &contents[0]).unwrap();
    let watchers: Vec<Watcher> = (0..2)
        .map(|_| Watcher::start(&path, contents.to_vec()))
        .collect();
    let mut reader = server.connect();
    let mut readings = 0;
    let read = || {
        let reply = reader.request("GET", &target("read", &path, ""), &[], b"");
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert!(
            contents.contains(&reply.body),
            "{} bytes of a mixture",
            reply.body.len()
        );
        readings += 1;
    };
    meanwhile(read, || {
        let mut connection = server.connect();
        for turn in 1..=60 {
            let content = &contents[turn % 3];
            expect_ok(&connection.request("PUT", &target("write", &path, ""), &[], content));
        }
    });
    assert!(readings > 1);
    for watcher in watchers {
        assert!(watcher.finish() > 1);
    }
    assert_eq!(names_in(dir.path()), ["file"]);
}

#[test]
fn of_many_writers_at_once_one_wins_entirely() {
    let server = Server::start();
    let dir = TempDir::new();
    let path = dir.join("file");
    let contents: Vec<Vec<u8>> = (0..8u8)
        .map(|number| vec![b'0' + number; 100_000 + usize::from(number)])
        .collect();
    fs::write(&path, &contents[0]).unwrap();
    let watcher = Watcher::start(&path, contents.clone());
    thread::scope(|scope| {
        for content in &contents {
            scope.spawn(|| {
                let mut connection = server.connect();
                for _ in 0..25 {
                    expect_ok(&connection.request(
                        "PUT",
                        &target("write", &path, ""),
                        &[],
                        content,
                    ));
                }
            });
        }
    });
    watcher.finish();
    assert_eq!(names_in(dir.path()), ["file"], "no litter");
}

#[test]
fn a_new_file_appears_only_when_it_is_whole() {
    let server = Server::start();
    let dir = TempDir::new();
    if open_files(&server, dir.path()).is_none() {
        skip!("only root can see how far the server has come");
    }
    let content = random_bytes(4 * MIB, 1);
    let mut connection = begin(
        &server,
        "PUT",
        &target("write", dir.join("new"), ""),
        content.len(),
    );
    connection.send(&content[..3 * MIB]);
    wait_for_upload(&server, dir.path(), MIB as u64);
    assert!(!Path::new(&dir.join("new")).exists());
    assert_eq!(server.get(&target("read", dir.join("new"), "")).status, 404);
    connection.send(&content[3 * MIB..]);
    expect_ok(&connection.read_reply());
    expect_same("the content", &fs::read(dir.join("new")).unwrap(), &content);
}

#[test]
fn a_killed_server_leaves_the_old_file_and_no_litter() {
    let dir = TempDir::new();
    let path = dir.join("file");
    let old = random_bytes(MIB, 1);
    fs::write(&path, &old).unwrap();
    chmod(&path, 0o640);
    let watcher = Watcher::start(&path, vec![old.clone()]);
    // Nothing sent yet, in the middle, and all but the last byte.
    for sent in [0, 1, 3 * MIB, 8 * MIB - 1] {
        let mut server = Server::start();
        if open_files(&server, dir.path()).is_none() {
            skip!("only root can see how far the server has come");
        }
        for target in [
            target("write", &path, ""),
            target("write", dir.join("new"), ""),
        ] {
            let mut connection = begin(&server, "PUT", &target, 8 * MIB);
            connection.send(&random_bytes(sent, 2));
            // Kept open: it is the server that goes.
            std::mem::forget(connection);
        }
        if sent > 1 {
            wait_until("both uploads are being written", PATIENCE, || {
                let open = open_files(&server, dir.path()).unwrap();
                open.iter().filter(|size| **size >= sent as u64 / 2).count() == 2
            });
        }
        server.signal(libc::SIGKILL);
        server.wait_for_exit(PATIENCE);
        assert_eq!(names_in(dir.path()), ["file"], "after {sent} bytes");
        expect_same(
            &format!("after {sent} bytes"),
            &fs::read(&path).unwrap(),
            &old,
        );
        assert_eq!(mode_of(&path), 0o640);
    }
    watcher.finish();
}

#[test]
fn a_client_that_vanishes_leaves_the_old_file_and_no_litter() {
    let server = Server::start();
    let dir = TempDir::new();
    let path = dir.join("file");
    if open_files(&server, dir.path()).is_none() {
        skip!("only root can see how far the server has come");
    }
    let old = random_bytes(MIB, 1);
    fs::write(&path, &old).unwrap();
    let watcher = Watcher::start(&path, vec![old.clone()]);
    let part = random_bytes(3 * MIB, 2);
    let framings = [
        ("Content-Length", "8000000"),
        ("Transfer-Encoding", "chunked"),
    ];
    for (framing, with_reset) in framings
        .iter()
        .flat_map(|framing| [(framing, false), (framing, true)])
    {
        for target in [
            target("write", &path, ""),
            target("write", dir.join("new"), ""),
        ] {
            let mut connection = server.connect();
            connection.send_request("PUT", &target, &[*framing], b"");
            if framing.0 == "Transfer-Encoding" {
                connection.send(format!("{:x}\r\n", 2 * part.len()).as_bytes());
            }
            connection.send(&part);
            wait_for_upload(&server, dir.path(), MIB as u64);
            if with_reset {
                reset(connection);
            } else {
                drop(connection);
            }
            wait_for_release(&server, dir.path());
            assert_eq!(names_in(dir.path()), ["file"], "{framing:?} {target}");
        }
    }
    // A body whose framing turns out to be broken is no whole file either.
    let mut connection = server.connect();
    connection.send_request(
        "PUT",
        &target("write", &path, ""),
        &[("Transfer-Encoding", "chunked")],
        b"",
    );
    connection.send(b"5\r\nhello\r\nzz\r\nmore\r\n0\r\n\r\n");
    expect_error(&connection.read_reply(), 400, "bad_request");
    connection.expect_close();
    assert_eq!(names_in(dir.path()), ["file"]);
    watcher.finish();
    expect_same("the content", &fs::read(&path).unwrap(), &old);
}

#[test]
fn an_upload_into_a_directory_that_goes_away_fails_cleanly() {
    let server = Server::start();
    let dir = TempDir::new();
    if open_files(&server, dir.path()).is_none() {
        skip!("only root can see how far the server has come");
    }
    for name in ["sub/new", "sub/old"] {
        fs::create_dir(dir.join("sub")).unwrap();
        fs::write(dir.join("sub/old"), "old").unwrap();
        let mut connection = begin(
            &server,
            "PUT",
            &target("write", dir.join(name), ""),
            4 * MIB,
        );
        connection.send(&random_bytes(3 * MIB, 1));
        wait_for_upload(&server, dir.path(), MIB as u64);
        fs::remove_dir_all(dir.join("sub")).unwrap();
        connection.send(&random_bytes(MIB, 2));
        expect_refusal(&connection.read_reply());
        assert_eq!(names_in(dir.path()), Vec::<String>::new());
        assert_eq!(connection.request("GET", "/health", &[], b"").status, 200);
    }
}

#[test]
fn a_full_disk_is_507_and_leaves_the_old_file() {
    let server = Server::start();
    let dir = TempDir::new();
    let Some(_disk) = Mount::tmpfs(dir.path(), "size=4m,mode=755") else {
        skip!("mounting a small tmpfs needs root");
    };
    let path = dir.join("file");
    let old = random_bytes(MIB, 1);
    fs::write(&path, &old).unwrap();
    let watcher = Watcher::start(&path, vec![old.clone()]);
    for length in [3 * MIB + 100_000, 6 * MIB, 40 * MIB] {
        for name in ["file", "new", "sub/new"] {
            let reply = send_what_is_wanted(
                &server,
                "PUT",
                &target("write", dir.join(name), ""),
                &random_bytes(length, 2),
            );
            expect_error(&reply, 507, "no_space");
            let _ = fs::remove_dir(dir.join("sub"));
            assert_eq!(names_in(dir.path()), ["file"], "{name}, {length} bytes");
        }
        expect_same("the content", &fs::read(&path).unwrap(), &old);
    }
    // A range has nothing to go back to, but says the same.
    let range = target("write", dir.join("ranged"), "&offset=0");
    expect_error(
        &send_what_is_wanted(&server, "PUT", &range, &random_bytes(6 * MIB, 3)),
        507,
        "no_space",
    );
    delete(&server, dir.join("ranged"), "");
    // Nothing of the failures has stayed on the disk: what fits goes in.
    watcher.finish();
    write(&server, &path, "", &random_bytes(2 * MIB, 4));
    assert_eq!(names_in(dir.path()), ["file"]);
}

#[test]
fn a_disk_without_inodes_is_507_too() {
    let server = Server::start();
    let dir = TempDir::new();
    let Some(_disk) = Mount::tmpfs(dir.path(), "size=4m,nr_inodes=10,mode=755") else {
        skip!("mounting a small tmpfs needs root");
    };
    let mut count = 0;
    while File::create(dir.join(&format!("file-{count}"))).is_ok() {
        count += 1;
    }
    expect_error(
        &server.put(&target("write", dir.join("new"), ""), b"x"),
        507,
        "no_space",
    );
    expect_error(
        &server.put(&target("write", dir.join("new"), "&offset=0"), b"x"),
        507,
        "no_space",
    );
    expect_error(
        &server.request("POST", &target("mkdir", dir.join("new"), ""), b""),
        507,
        "no_space",
    );
    assert_eq!(names_in(dir.path()).len(), count);
}

#[test]
fn where_every_file_has_a_name_a_write_is_whole_and_leaves_no_litter() {
    let server = Server::start();
    let (disk, mounted) = (TempDir::new(), TempDir::new());
    let Some(_disk) = Mount::tmpfs(disk.path(), "size=4m,mode=755") else {
        skip!("mounting a small tmpfs needs root");
    };
    let Some(_mount) = Mount::in_user_space(disk.path(), mounted.path()) else {
        skip!("needs bindfs, and FUSE");
    };
    let path = mounted.join("file");
    let (old, new) = (random_bytes(MIB, 1), random_bytes(MIB + 7, 2));
    write(&server, &path, "&mode=640", &old);
    assert_eq!(names_in(mounted.path()), ["file"]);
    // On the disk beneath: through FUSE there may be no file for a moment while one takes the name of another that is
    // open.
    let beneath = disk.join("file");
    let watcher = Watcher::start(&beneath, vec![old.clone(), new.clone()]);
    for end in [drop::<Connection>, reset] {
        let mut connection = begin(&server, "PUT", &target("write", &path, ""), 2 * MIB);
        connection.send(&new);
        wait_for_upload(&server, mounted.path(), MIB as u64);
        let names = names_in(mounted.path());
        assert_eq!(names.len(), 2, "it waits under a name");
        let staged = names.iter().find(|name| *name != "file").unwrap();
        // The file that it replaces may be read by fewer than a new one.
        assert_eq!(mode_of(mounted.join(staged)), 0o600, "{staged}");
        end(connection);
        wait_until("it is given up", PATIENCE, || {
            names_in(mounted.path()) == ["file"]
        });
    }
    let reply = send_what_is_wanted(
        &server,
        "PUT",
        &target("write", &path, ""),
        &random_bytes(6 * MIB, 3),
    );
    expect_error(&reply, 507, "no_space");
    assert_eq!(names_in(mounted.path()), ["file"]);
    expect_same("the content", &fs::read(&path).unwrap(), &old);
    write(&server, &path, "", &new);
    watcher.finish();
    expect_same("the content", &fs::read(&path).unwrap(), &new);
    assert_eq!(mode_of(&path), 0o640);
    assert_eq!(names_in(mounted.path()), ["file"]);
}

#[test]
fn a_file_that_is_a_mount_point_is_written_all_the_same() {
    let server = Server::start();
    let dir = TempDir::new();
    fs::write(dir.join("source"), "old content, the longer one").unwrap();
    fs::create_dir(dir.join("etc")).unwrap();
    fs::write(dir.join("etc/resolv.conf"), "beneath").unwrap();
    let Some(_mount) = Mount::bind(
        Path::new(&dir.join("source")),
        Path::new(&dir.join("etc/resolv.conf")),
    ) else {
        skip!("a bind mount needs root");
    };
    // A rename onto it fails with EBUSY, so it has to be written where it is.
    write(&server, dir.join("etc/resolv.conf"), "", b"new");
    assert_eq!(fs::read(dir.join("etc/resolv.conf")).unwrap(), b"new");
    assert_eq!(fs::read(dir.join("source")).unwrap(), b"new");
    write(
        &server,
        dir.join("etc/resolv.conf"),
        "&mode=600",
        &random_bytes(3 * MIB, 1),
    );
    assert_eq!(
        fs::read(dir.join("source")).unwrap(),
        random_bytes(3 * MIB, 1)
    );
    assert_eq!(mode_of(dir.join("source")), 0o600);
    write(&server, dir.join("etc/resolv.conf"), "", b"");
    assert_eq!(fs::read(dir.join("source")).unwrap(), b"");
    assert_eq!(names_in(dir.join("etc")), ["resolv.conf"]);
}

#[test]
fn a_mount_point_on_a_full_disk_keeps_its_old_content() {
    let server = Server::start();
    let (dir, disk) = (TempDir::new(), TempDir::new());
    let Some(_disk) = Mount::tmpfs(disk.path(), "size=4m,mode=755") else {
        skip!("mounting a small tmpfs needs root");
    };
    let old = random_bytes(MIB, 1);
    let path = dir.join("file");
    fs::write(disk.join("file"), &old).unwrap();
    fs::write(disk.join("other"), random_bytes(2 * MIB, 2)).unwrap();
    fs::write(&path, "beneath").unwrap();
    let Some(_mount) = Mount::bind(Path::new(&disk.join("file")), Path::new(&path)) else {
        skip!("a bind mount needs root");
    };
    // The upload has room beside the mount point, but not on the disk that it has to be copied to.
    let reply = send_what_is_wanted(
        &server,
        "PUT",
        &target("write", &path, ""),
        &random_bytes(3 * MIB, 3),
    );
    expect_error(&reply, 507, "no_space");
    expect_same("the content", &fs::read(&path).unwrap(), &old);
    // What fits is written.
    let new = random_bytes(MIB + MIB / 2, 4);
    write(&server, &path, "", &new);
    expect_same("the content", &fs::read(&path).unwrap(), &new);
    assert_eq!(names_in(dir.path()), ["file"]);
}

#[test]
fn a_user_without_privileges_gets_403_and_writes_what_is_his() {
    let dir = TempDir::new();
    fs::create_dir(dir.join("closed")).unwrap();
    for name in ["closed/his", "secret", "closed/secret"] {
        fs::write(dir.join(name), "old").unwrap();
        chmod(dir.join(name), 0o600);
    }
    std::os::unix::fs::chown(dir.join("closed/his"), Some(65534), Some(65534)).unwrap();
    for (name, mode) in [("open", 0o777), ("sticky", 0o1777), ("hidden", 0o700)] {
        fs::create_dir(dir.join(name)).unwrap();
        chmod(dir.join(name), mode);
    }
    for name in ["closed/shared", "open/shared", "sticky/shared"] {
        fs::write(dir.join(name), "old content").unwrap();
        chmod(dir.join(name), 0o666);
    }
    fs::write(dir.join("open/secret"), "old").unwrap();
    chmod(dir.join("open/secret"), 0o600);
    fs::write(dir.join("hidden/file"), "old").unwrap();

    let Some(server) = unprivileged(&dir) else {
        skip!("becoming another user needs root and setpriv");
    };
    let forbidden = [
        server.get(&target("read", dir.join("secret"), "")),
        server.get(&target("read", dir.join("hidden/file"), "")),
        server.get(&target("stat", dir.join("hidden/file"), "")),
        server.get(&target("list", dir.join("hidden"), "")),
        server.put(&target("write", dir.join("closed/new"), ""), b"new"),
        server.put(&target("write", dir.join("secret"), ""), b"new"),
        server.put(&target("write", dir.join("open/secret"), ""), b"new"),
        server.put(&target("write", dir.join("secret"), "&offset=0"), b"new"),
        server.delete(&target("delete", dir.join("closed/his"), "")),
        server.delete(&target("delete", dir.join("closed"), "&recursive=1")),
        server.request("POST", &target("mkdir", dir.join("closed/new"), ""), b""),
        moving(&server, dir.join("secret"), "/tmp/sbx-test-never"),
    ];
    for reply in forbidden {
        expect_error(&reply, 403, "forbidden");
    }
    // No file can be made beside it and renamed, so it is written in place, as his own programs
    // would.
    write(&server, dir.join("closed/his"), "", b"new");
    assert_eq!(fs::read(dir.join("closed/his")).unwrap(), b"new");
    // The same for somebody else's file that he may write: a new one in its place would be his.
    for name in ["closed/shared", "open/shared", "sticky/shared"] {
        write(&server, dir.join(name), "", b"new");
        let meta = fs::metadata(dir.join(name)).unwrap();
        assert_eq!(fs::read(dir.join(name)).unwrap(), b"new", "{name}");
        assert_eq!((meta.uid(), meta.mode() & 0o7777), (0, 0o666), "{name}");
    }
    assert_eq!(names_in(dir.join("closed")), ["his", "secret", "shared"]);
    assert_eq!(names_in(dir.join("open")), ["secret", "shared"]);
    assert_eq!(names_in(dir.join("sticky")), ["shared"]);
    assert_eq!(fs::read(dir.join("open/secret")).unwrap(), b"old");
    assert_eq!(fs::read(dir.join("secret")).unwrap(), b"old");
}

#[test]
fn a_whole_write_leaves_those_who_have_the_file_open_alone() {
    let server = Server::start();
    let dir = TempDir::new();
    fs::write(dir.join("file"), "old content").unwrap();
    let open = File::open(dir.join("file")).unwrap();
    write(&server, dir.join("file"), "", b"new");
    let mut content = [0; 11];
    open.read_exact_at(&mut content, 0).unwrap();
    assert_eq!(&content, b"old content");
}

#[test]
fn an_upload_that_breaks_off_changes_nothing_in_a_closed_directory_either() {
    let dir = TempDir::new();
    let Some(server) = unprivileged(&dir) else {
        skip!("becoming another user needs root and setpriv");
    };
    fs::create_dir(dir.join("closed")).unwrap();
    let path = dir.join("closed/shared");
    fs::write(&path, "old content").unwrap();
    chmod(&path, 0o666);
    let mut connection = server.connect();
    connection.send_request(
        "PUT",
        &target("write", &path, ""),
        &[("Transfer-Encoding", "chunked")],
        b"",
    );
    connection.send(b"3\r\nnew\r\nzz\r\n");
    expect_error(&connection.read_reply(), 400, "bad_request");
    assert_eq!(fs::read(&path).unwrap(), b"old content");
    let content = random_bytes(MIB + 1, 1);
    write(&server, &path, "", &content);
    expect_same("the content", &fs::read(&path).unwrap(), &content);
}

/// ```text
/// upload: sees a file, stages            is refused the replacing, would write over what is there
/// owner:                  rm, mkfifo, chmod
/// ```
#[test]
fn a_pipe_that_takes_a_files_place_during_an_upload_holds_nobody() {
    let dir = TempDir::new();
    let Some(server) = unprivileged(&dir) else {
        skip!("becoming another user needs root and setpriv");
    };
    let his = his_directory(&dir, "his");
    let path = format!("{his}/file");
    fs::write(&path, "old").unwrap();
    chmod(&path, 0o666);
    let length = (4 * MIB).to_string();
    let mut connection = server.connect();
    // The go-ahead comes when the server has looked at the file.
    let head = [
        ("Content-Length", length.as_str()),
        ("Expect", "100-continue"),
    ];
    connection.send_request("PUT", &target("write", &path, ""), &head, b"");
    assert_eq!(connection.read_head().status, 100);
    fs::remove_file(&path).unwrap();
    mkfifo(&path);
    chmod(&path, 0o666);
    chmod(&his, 0o555);
    connection.send(&random_bytes(4 * MIB, 1));
    expect_refusal(&connection.read_reply());
    assert_eq!(names_in(&his), ["file"]);
}
