//! The promise of moving, deleting and making directories: all of it or none of it, nothing beyond
//! the names that were given, however deep or wide the tree is.

use std::ffi::CString;
use std::fs::{self, File};
use std::os::unix::fs::{MetadataExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode, SFlag};

use super::{
    DeepTree, MIB, Mount, Watcher, chmod, delete, expect_error, expect_ok, his_directory, list,
    meanwhile, mkfifo, mode_of, moving, read, stat, target, unprivileged, write,
};
use crate::fixture::{
    BINARY, Reply, Server, TempDir, copy_program, exchange, expect_same, is_root, names_in,
    random_bytes,
};
use crate::skip;

#[test]
fn a_move_renames_and_makes_the_way() {
    let server = Server::start();
    let dir = TempDir::new();
    fs::write(dir.join("file"), "content").unwrap();
    chmod(dir.join("file"), 0o640);
    let inode = fs::metadata(dir.join("file")).unwrap().ino();
    expect_ok(&moving(&server, dir.join("file"), dir.join("renamed")));
    expect_ok(&moving(
        &server,
        dir.join("renamed"),
        dir.join("new/deep/file"),
    ));
    let meta = fs::metadata(dir.join("new/deep/file")).unwrap();
    assert_eq!((meta.ino(), meta.mode() & 0o7777), (inode, 0o640));
    assert_eq!(names_in(dir.path()), ["new"]);
    // Onto a file: it is replaced. Onto itself: nothing happens.
    fs::write(dir.join("other"), "other").unwrap();
    expect_ok(&moving(
        &server,
        dir.join("new/deep/file"),
        dir.join("other"),
    ));
    assert_eq!(fs::read(dir.join("other")).unwrap(), b"content");
    expect_ok(&moving(&server, dir.join("other"), dir.join("other")));
    assert_eq!(fs::read(dir.join("other")).unwrap(), b"content");
    // Directories move with all that is in them; so do links, as links.
    fs::write(dir.join("new/deep/inside"), "inside").unwrap();
    symlink("other", dir.join("new/link")).unwrap();
    symlink("nowhere", dir.join("dangling")).unwrap();
    expect_ok(&moving(&server, dir.join("new"), dir.join("moved")));
    assert_eq!(fs::read(dir.join("moved/deep/inside")).unwrap(), b"inside");
    expect_ok(&moving(&server, dir.join("moved/link"), dir.join("link")));
    expect_ok(&moving(
        &server,
        dir.join("dangling"),
        dir.join("still-dangling"),
    ));
    assert_eq!(fs::read_link(dir.join("link")).unwrap(), Path::new("other"));
    assert_eq!(
        fs::read_link(dir.join("still-dangling")).unwrap(),
        Path::new("nowhere")
    );
    // Onto a link: the link is replaced, not its target.
    fs::write(dir.join("third"), "third").unwrap();
    expect_ok(&moving(&server, dir.join("third"), dir.join("link")));
    assert!(fs::symlink_metadata(dir.join("link")).unwrap().is_file());
    assert_eq!(fs::read(dir.join("other")).unwrap(), b"content");
    assert_eq!(
        names_in(dir.path()),
        ["link", "moved", "other", "still-dangling"]
    );
}

#[test]
fn a_move_that_cannot_be_leaves_both_ends_as_they_were() {
    let server = Server::start();
    let dir = TempDir::new();
    fs::write(dir.join("file"), "content").unwrap();
    fs::create_dir_all(dir.join("full/sub")).unwrap();
    fs::create_dir_all(dir.join("dir/sub")).unwrap();
    for (from, to, status, code) in [
        ("missing", "x", 404, "not_found"),
        ("missing", "file", 404, "not_found"),
        ("file", "dir", 409, "is_directory"),
        ("dir", "file", 409, "not_directory"),
        ("dir", "full", 409, "not_empty"),
        ("file", "file/below", 409, "not_directory"),
        ("file/below", "x", 409, "not_directory"),
    ] {
        let reply = moving(&server, dir.join(from), dir.join(to));
        assert_eq!(
            (reply.status, reply.code().as_str()),
            (status, code),
            "{from} to {to}: {}",
            reply.text()
        );
    }
    // A directory cannot become its own child, and the root and the dots cannot be moved.
    for (from, to) in [
        ("dir", "dir/sub/deeper"),
        ("dir", "dir/new"),
        ("dir", "dir/new/parents/too"),
        (".", "x"),
        ("dir/.", "x"),
        ("dir/..", "x"),
        ("dir", "full/.."),
        ("dir", "."),
    ] {
        let reply = moving(&server, dir.join(from), dir.join(to));
        assert!(
            [400, 403, 409].contains(&reply.status),
            "{from} to {to}: {} {}",
            reply.status,
            reply.text()
        );
        reply.code();
    }
    assert_eq!(names_in(dir.path()), ["dir", "file", "full"]);
    assert_eq!(names_in(dir.join("dir")), ["sub"]);
    assert_eq!(names_in(dir.join("full")), ["sub"]);
    assert_eq!(fs::read(dir.join("file")).unwrap(), b"content");
    // An empty directory gives way, as rename has it.
    fs::create_dir(dir.join("empty")).unwrap();
    expect_ok(&moving(&server, dir.join("dir"), dir.join("empty")));
    assert_eq!(names_in(dir.join("empty")), ["sub"]);
}

#[test]
fn a_file_moves_to_another_file_system_whole_or_not_at_all() {
    let server = Server::start();
    let dir = TempDir::new();
    let other = TempDir::new();
    let Some(_disk) = Mount::tmpfs(other.path(), "size=4m,mode=755") else {
        skip!("mounting a small tmpfs needs root");
    };
    let content = random_bytes(2 * MIB, 1);
    for to in ["file", "new/deep/file"] {
        fs::write(dir.join("file"), &content).unwrap();
        std::os::unix::fs::chown(dir.join("file"), Some(1234), Some(4321)).unwrap();
        chmod(dir.join("file"), 0o4711);
        expect_ok(&moving(&server, dir.join("file"), other.join(to)));
        let meta = fs::metadata(other.join(to)).unwrap();
        expect_same("the content", &fs::read(other.join(to)).unwrap(), &content);
        assert_eq!(
            (meta.mode() & 0o7777, meta.uid(), meta.gid()),
            (0o4711, 1234, 4321)
        );
        assert_eq!(names_in(dir.path()), Vec::<String>::new());
        expect_ok(&moving(&server, other.join(to), dir.join("file")));
        expect_same(
            "the content",
            &fs::read(dir.join("file")).unwrap(),
            &content,
        );
    }
    fs::remove_dir_all(other.join("new")).unwrap();
    assert_eq!(names_in(other.path()), Vec::<String>::new());

    // Replacing is atomic there too, and what does not fit changes nothing.
    fs::write(other.join("file"), "old").unwrap();
    fs::write(dir.join("large"), random_bytes(8 * MIB, 2)).unwrap();
    let watcher = Watcher::start(other.join("file"), vec![b"old".to_vec(), content.clone()]);
    expect_error(
        &moving(&server, dir.join("large"), other.join("file")),
        507,
        "no_space",
    );
    assert_eq!(fs::read(other.join("file")).unwrap(), b"old");
    expect_ok(&moving(&server, dir.join("file"), other.join("file")));
    watcher.finish();
    expect_same(
        "the content",
        &fs::read(dir.join("large")).unwrap(),
        &random_bytes(8 * MIB, 2),
    );
    assert_eq!(names_in(other.path()), ["file"]);
    assert_eq!(names_in(dir.path()), ["large"]);

    // Directories stay, and say why.
    fs::create_dir_all(dir.join("tree/sub")).unwrap();
    expect_error(
        &moving(&server, dir.join("tree"), other.join("tree")),
        409,
        "cross_device",
    );
    assert_eq!(names_in(dir.join("tree")), ["sub"]);
    assert_eq!(names_in(other.path()), ["file"]);
    // Onto a directory or a missing source: the same refusals as on one file system.
    fs::create_dir(other.join("dir")).unwrap();
    expect_error(
        &moving(&server, dir.join("large"), other.join("dir")),
        409,
        "is_directory",
    );
    expect_error(
        &moving(&server, dir.join("missing"), other.join("x")),
        404,
        "not_found",
    );
    // A pipe cannot be copied and must not be read: refused, and at once.
    mkfifo(dir.join("pipe"));
    let reply = moving(&server, dir.join("pipe"), other.join("pipe"));
    assert!(
        reply.status == 200 || (400..500).contains(&reply.status),
        "{}",
        reply.text()
    );
    let places = [dir.join("pipe"), other.join("pipe")];
    assert_eq!(
        places
            .iter()
            .filter(|path| Path::new(path).exists())
            .count(),
        1,
        "it is in one place"
    );
    // A link moves as a link or stays; it is never turned into a copy of its target.
    symlink("large", dir.join("link")).unwrap();
    let _ = moving(&server, dir.join("link"), other.join("link"));
    let places: Vec<String> = [dir.join("link"), other.join("link")]
        .into_iter()
        .filter(|path| fs::symlink_metadata(path).is_ok())
        .collect();
    assert_eq!(places.len(), 1, "it is in one place: {places:?}");
    assert_eq!(fs::read_link(&places[0]).unwrap(), Path::new("large"));
}

#[test]
fn a_tree_is_deleted_and_nothing_that_it_links_to() {
    let server = Server::start();
    let dir = TempDir::new();
    fs::create_dir_all(dir.join("outside/sub")).unwrap();
    fs::write(dir.join("outside/file"), "stays").unwrap();
    fs::write(dir.join("outside/sub/file"), "stays").unwrap();
    for sub in ["a/b/c", "a/closed", "a/empty"] {
        fs::create_dir_all(dir.join(&format!("tree/{sub}"))).unwrap();
    }
    for place in ["tree", "tree/a", "tree/a/b/c", "tree/a/closed"] {
        symlink(dir.join("outside"), dir.join(&format!("{place}/to-dir"))).unwrap();
        symlink(
            dir.join("outside/file"),
            dir.join(&format!("{place}/to-file")),
        )
        .unwrap();
        symlink("..", dir.join(&format!("{place}/up"))).unwrap();
        symlink("nowhere", dir.join(&format!("{place}/dangling"))).unwrap();
        fs::write(dir.join(&format!("{place}/file")), "goes").unwrap();
        fs::hard_link(dir.join("outside/file"), dir.join(&format!("{place}/hard"))).unwrap();
        mkfifo(dir.join(&format!("{place}/fifo")));
        let _ = UnixListener::bind(dir.join(&format!("{place}/socket"))).unwrap();
    }
    chmod(dir.join("tree/a/b/c/file"), 0);
    if is_root() {
        chmod(dir.join("tree/a/closed"), 0);
    }
    for rest in ["", "&recursive=0", "&recursive=false"] {
        expect_error(
            &server.delete(&target("delete", dir.join("tree"), rest)),
            409,
            "not_empty",
        );
    }
    assert!(
        Path::new(&dir.join("tree/a/b/c/file")).exists(),
        "a refused delete leaves all in place"
    );
    assert_eq!(
        delete(&server, dir.join("tree"), "&recursive=true")["deleted"],
        true
    );
    assert!(!Path::new(&dir.join("tree")).exists());
    assert_eq!(names_in(dir.join("outside")), ["file", "sub"]);
    assert_eq!(fs::read(dir.join("outside/file")).unwrap(), b"stays");
    assert_eq!(fs::read(dir.join("outside/sub/file")).unwrap(), b"stays");
}

#[test]
fn a_delete_takes_the_name_it_was_given_and_no_more() {
    let server = Server::start();
    let dir = TempDir::new();
    fs::create_dir_all(dir.join("target/sub")).unwrap();
    fs::write(dir.join("target/file"), "stays").unwrap();
    symlink("target", dir.join("link")).unwrap();
    symlink("target/file", dir.join("to-file")).unwrap();
    symlink("nowhere", dir.join("dangling")).unwrap();
    mkfifo(dir.join("fifo"));
    fs::create_dir(dir.join("empty")).unwrap();
    // A link is deleted, not what it leads to, recursive or not, with a slash or without.
    let _ = server.delete(&target("delete", dir.join("link/"), "&recursive=1"));
    assert_eq!(names_in(dir.join("target")), ["file", "sub"]);
    let _ = fs::remove_file(dir.join("link"));
    symlink("target", dir.join("link")).unwrap();
    for (name, rest) in [
        ("link", "&recursive=1"),
        ("to-file", ""),
        ("dangling", ""),
        ("fifo", "&recursive=1"),
        ("empty", ""),
    ] {
        assert_eq!(
            delete(&server, dir.join(name), rest)["deleted"],
            true,
            "{name}"
        );
        assert!(fs::symlink_metadata(dir.join(name)).is_err(), "{name}");
        expect_error(
            &server.delete(&target("delete", dir.join(name), rest)),
            404,
            "not_found",
        );
    }
    assert_eq!(names_in(dir.join("target")), ["file", "sub"]);
    // POST is the same, for clients that cannot send DELETE.
    expect_ok(&server.request("POST", &target("delete", dir.join("target/file"), ""), b""));
    expect_error(
        &server.delete(&target("delete", dir.join("target/sub/below/file"), "")),
        404,
        "not_found",
    );
    fs::write(dir.join("file"), "x").unwrap();
    expect_error(
        &server.delete(&target("delete", dir.join("file/below"), "")),
        409,
        "not_directory",
    );
    assert_eq!(names_in(dir.path()), ["file", "target"]);
}

#[test]
fn deletes_of_one_tree_at_the_same_time_remove_it() {
    let server = Server::start();
    let dir = TempDir::in_memory();
    for turn in 0..10 {
        let tree = dir.join(&format!("tree-{turn}"));
        for sub in 0..150 {
            fs::create_dir_all(format!("{tree}/{sub}/a/b")).unwrap();
            for file in 0..8 {
                File::create(format!("{tree}/{sub}/a/{file}")).unwrap();
            }
        }
        let replies: Vec<Reply> = thread::scope(|scope| {
            let deletes: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| server.delete(&target("delete", &tree, "&recursive=1"))))
                .collect();
            deletes
                .into_iter()
                .map(|delete| delete.join().unwrap())
                .collect()
        });
        // Whoever comes late finds nothing; nobody stops because another was faster.
        for reply in &replies {
            assert!([200, 404].contains(&reply.status), "{}", reply.text());
        }
        assert!(!Path::new(&tree).exists(), "turn {turn}: {replies:?}");
        assert!(replies.iter().any(|reply| reply.status == 200));
    }
}

/// The deleter looks at `tree/sub` while another thread swaps it for a link, thousands of times a
/// second:
///
/// ```text
/// deleter: unlink(sub) -> it is a directory; rmdir(sub) -> not empty;        open(sub), empty it
/// swapper:                                              sub <-> link to outside
/// ```
///
/// What it opens is then not what it looked at, and must not be followed out of the tree.
#[test]
fn a_link_swapped_in_during_a_delete_leads_nowhere() {
    let server = Server::start();
    let dir = TempDir::in_memory();
    fs::create_dir(dir.join("outside")).unwrap();
    File::create(dir.join("outside/file")).unwrap();
    let [sub, link] = ["tree/sub", "link"].map(|name| CString::new(dir.join(name)).unwrap());
    let mut connection = server.connect();
    for _ in 0..400 {
        fs::create_dir_all(dir.join("tree/sub")).unwrap();
        File::create(dir.join("tree/sub/file")).unwrap();
        symlink(dir.join("outside"), dir.join("link")).unwrap();
        let swapped = AtomicBool::new(false);
        let swap = || {
            if exchange(&sub, &link) {
                swapped.store(true, Ordering::SeqCst);
            }
        };
        meanwhile(swap, || {
            while !swapped.load(Ordering::SeqCst) {
                thread::yield_now();
            }
            // It may fail, as the tree changes under it, but cleanly.
            let target = target("delete", dir.join("tree"), "&recursive=1");
            let reply = connection.request("DELETE", &target, &[], b"");
            assert!(reply.status < 500, "{}", reply.text());
        });
        assert!(Path::new(&dir.join("outside/file")).exists());
        for name in ["tree", "link"] {
            let path = dir.join(name);
            let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir_all(&path));
        }
    }
}

#[test]
fn the_root_and_the_dots_cannot_be_deleted() {
    // In a root of its own, because a server that got this wrong would take the machine with it.
    let dir = TempDir::new();
    let binary = dir.path().join(BINARY.trim_start_matches('/'));
    fs::create_dir_all(binary.parent().unwrap()).unwrap();
    copy_program(BINARY, &binary);
    fs::create_dir_all(dir.join("a/b")).unwrap();
    fs::write(dir.join("a/b/file"), "stays").unwrap();
    // What every image has.
    fs::create_dir(dir.join("dev")).unwrap();
    let null = dir.join("dev/null");
    let device = nix::sys::stat::makedev(1, 3);
    let mode = Mode::from_bits_truncate(0o666);
    if nix::sys::stat::mknod(null.as_str(), SFlag::S_IFCHR, mode, device).is_err() {
        skip!("a root of its own needs root");
    }
    let root = dir.path().to_str().unwrap().to_owned();
    let server = Server::builder().wrapped_in(&["chroot", &root]).start();
    for path in [
        "/",
        "//",
        "/.",
        "/..",
        "/../..",
        ".",
        "..",
        "./",
        "a/..",
        "/a/.",
        "/a/b/..",
        "/a/b/../",
        "a/./.",
        "/a/b/../..",
        "/a/.//",
    ] {
        for rest in ["", "&recursive=1"] {
            let reply = server.delete(&target("delete", path, rest));
            assert!(
                [400, 403].contains(&reply.status),
                "{path}{rest}: {} {}",
                reply.status,
                reply.text()
            );
            reply.code();
            assert_eq!(
                fs::read(dir.join("a/b/file")).unwrap(),
                b"stays",
                "{path}{rest}"
            );
        }
        for (from, to) in [(path, "/x"), ("/a", path)] {
            let reply = moving(&server, from, to);
            assert!(
                (400..500).contains(&reply.status),
                "{from} to {to}: {} {}",
                reply.status,
                reply.text()
            );
        }
    }
    // Dots in the middle are an ordinary way to a file.
    assert_eq!(read(&server, "/a/../a/./b//file", ""), b"stays");
    assert_eq!(list(&server, "/a/b/..", "").len(), 1);
    assert_eq!(stat(&server, "/", "")["type"], "dir");
    // Nothing that an image may lack is needed, such as /proc.
    for content in [b"new".as_slice(), b"newer"] {
        write(&server, "/a/b/other", "", content);
        assert_eq!(fs::read(dir.join("a/b/other")).unwrap(), content);
    }
    delete(&server, "/a/b/other", "");
    delete(&server, "/a/../a/b/./file", "");
    assert_eq!(names_in(dir.join("a/b")), Vec::<String>::new());
}

#[test]
fn a_tree_of_three_thousand_levels_is_deleted() {
    const LEVELS: usize = 3_000;
    let server = Server::start();
    let dir = TempDir::new();
    fs::create_dir(dir.join("outside")).unwrap();
    fs::write(dir.join("outside/file"), "stays").unwrap();
    let top = DeepTree::make(dir.path().join("top"), LEVELS, |number, level| {
        if number % 50 == 0 {
            nix::unistd::symlinkat(dir.join("outside").as_str(), level, "link").unwrap();
            let flags = OFlag::O_CREAT | OFlag::O_WRONLY;
            openat(level, "file", flags, Mode::S_IRWXU).unwrap();
        }
    });
    let started = Instant::now();
    delete(&server, top.0.to_str().unwrap(), "&recursive=1");
    assert!(
        started.elapsed() < Duration::from_secs(60),
        "a client would have given up"
    );
    assert!(!top.0.exists());
    assert_eq!(fs::read(dir.join("outside/file")).unwrap(), b"stays");
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn directories_are_made_with_their_parents() {
    let server = Server::start();
    let dir = TempDir::new();
    let mkdir = |path: &str, rest: &str| {
        server.request("POST", &target("mkdir", dir.join(path), rest), b"")
    };
    expect_ok(&mkdir("a/b/c", ""));
    expect_ok(&mkdir("a/b/c", ""));
    expect_ok(&mkdir("a/b/c/", ""));
    assert!(Path::new(&dir.join("a/b/c")).is_dir());
    fs::create_dir(dir.join("usual")).unwrap();
    assert_eq!(mode_of(dir.join("a/b")), mode_of(dir.join("usual")));
    expect_ok(&mkdir("private/inner", "&mode=700"));
    assert_eq!(mode_of(dir.join("private/inner")), 0o700);
    assert_eq!(
        mode_of(dir.join("private")),
        mode_of(dir.join("usual")),
        "the mode is the last one's"
    );
    expect_ok(&mkdir("open", "&mode=1777"));
    assert_eq!(mode_of(dir.join("open")), 0o1777, "whatever the umask");
    symlink("a/b", dir.join("link")).unwrap();
    expect_ok(&mkdir("link", ""));
    expect_ok(&mkdir("link/d", ""));
    assert!(Path::new(&dir.join("a/b/d")).is_dir());
    fs::write(dir.join("file"), "x").unwrap();
    expect_error(&mkdir("file/below", ""), 409, "not_directory");
    let reply = mkdir("file", "");
    assert_eq!(reply.status, 409, "{}", reply.text());
    assert!(["exists", "not_directory"].contains(&reply.code().as_str()));
    // Many at once, all making the same way.
    thread::scope(|scope| {
        for number in 0..16 {
            let mkdir = &mkdir;
            scope.spawn(move || expect_ok(&mkdir(&format!("p/q/r/s/{number}"), "")));
        }
    });
    assert_eq!(names_in(dir.join("p/q/r/s")).len(), 16);
}

#[test]
fn a_move_to_another_file_system_is_a_move() {
    let server = Server::start();
    let dir = TempDir::new();
    let other = TempDir::new();
    let Some(_disk) = Mount::tmpfs(other.path(), "size=4m,mode=755") else {
        skip!("mounting a small tmpfs needs root");
    };
    // A link or pipe that has the new name already is replaced, and not written through.
    fs::write(other.join("target"), "stays").unwrap();
    symlink("target", other.join("link")).unwrap();
    mkfifo(other.join("pipe"));
    for name in ["link", "pipe"] {
        let file = File::create(dir.join("file")).unwrap();
        fs::write(dir.join("file"), "content").unwrap();
        let time = SystemTime::UNIX_EPOCH + Duration::from_nanos(1_234_567_890_123_456_789);
        file.set_modified(time).unwrap();
        expect_ok(&moving(&server, dir.join("file"), other.join(name)));
        let meta = fs::symlink_metadata(other.join(name)).unwrap();
        assert!(meta.is_file(), "{name}");
        assert_eq!(meta.modified().unwrap(), time);
        assert_eq!(fs::read(other.join(name)).unwrap(), b"content");
    }
    assert_eq!(fs::read(other.join("target")).unwrap(), b"stays");
    // A link moves as what it is.
    symlink("anywhere", dir.join("link")).unwrap();
    fs::write(other.join("replaced"), "x").unwrap();
    for name in ["replaced", "new/link"] {
        expect_ok(&moving(&server, dir.join("link"), other.join(name)));
        let target = fs::read_link(other.join(name)).unwrap();
        assert_eq!(target, Path::new("anywhere"));
        expect_ok(&moving(&server, other.join(name), dir.join("link")));
    }
    assert_eq!(names_in(dir.path()), ["link"]);
    assert_eq!(names_in(other.path()), ["link", "new", "pipe", "target"]);
}

#[test]
fn of_two_names_of_one_file_a_move_leaves_the_new_one() {
    let server = Server::start();
    let dir = TempDir::new();
    fs::write(dir.join("a"), "content").unwrap();
    fs::hard_link(dir.join("a"), dir.join("b")).unwrap();
    symlink(".", dir.join("here")).unwrap();
    // One name, spelled in two ways.
    expect_ok(&moving(&server, dir.join("a"), dir.join("here/a")));
    assert_eq!(names_in(dir.path()), ["a", "b", "here"]);
    expect_ok(&moving(&server, dir.join("a"), dir.join("b")));
    assert_eq!(names_in(dir.path()), ["b", "here"]);
    assert_eq!(fs::read(dir.join("b")).unwrap(), b"content");
}

#[test]
fn what_is_mounted_in_a_tree_is_not_deleted_with_it() {
    let server = Server::start();
    let dir = TempDir::new();
    fs::create_dir_all(dir.join("tree/mounted")).unwrap();
    fs::create_dir(dir.join("outside")).unwrap();
    fs::write(dir.join("outside/file"), "stays").unwrap();
    let mounted = dir.join("tree/mounted");
    let Some(_mount) = Mount::bind(Path::new(&dir.join("outside")), Path::new(&mounted)) else {
        skip!("a bind mount needs root");
    };
    for path in ["tree", "tree/mounted"] {
        let reply = server.delete(&target("delete", dir.join(path), "&recursive=1"));
        expect_error(&reply, 403, "forbidden");
        assert_eq!(fs::read(dir.join("outside/file")).unwrap(), b"stays");
    }
}

#[test]
fn a_directory_needs_not_be_readable_to_be_given_a_mode() {
    let dir = TempDir::new();
    let Some(server) = unprivileged(&dir) else {
        skip!("becoming another user needs root and setpriv");
    };
    let his = his_directory(&dir, "his");
    chmod(&his, 0o300);
    expect_ok(&server.request("POST", &target("mkdir", &his, "&mode=750"), b""));
    assert_eq!(mode_of(&his), 0o750);
}
