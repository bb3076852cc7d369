//! A home is removed whatever is in it, and nothing that is not.

use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use super::needs_root;
use crate::fixture::{Sandbox, Server, Stop, TempDir};

/// What root has outside, and how it was.
struct Treasure {
    dir: TempDir,
    before: Vec<String>,
}

impl Treasure {
    fn new() -> Self {
        let dir = TempDir::new();
        std::fs::create_dir(dir.join("deep")).unwrap();
        for (name, text) in [
            ("secret", "root's"),
            ("deep/file", "deeper"),
            ("linked", "twice"),
        ] {
            std::fs::write(dir.join(name), text).unwrap();
        }
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).unwrap();
        let before = Self::look(&dir);
        Self { dir, before }
    }

    /// Everything about each file that a removal could change, but for the links to it.
    fn look(dir: &TempDir) -> Vec<String> {
        ["", "secret", "deep", "deep/file", "linked"]
            .into_iter()
            .map(|name| {
                let path = dir.join(name);
                let status = std::fs::symlink_metadata(&path).unwrap();
                let text = std::fs::read(&path).ok();
                let (mode, uid, gid) = (status.mode(), status.uid(), status.gid());
                format!(
                    "{name} {mode:o} {uid} {gid} {:?} {text:?}",
                    status.modified().unwrap()
                )
            })
            .collect()
    }

    #[track_caller]
    fn assert_untouched(&self) {
        assert_eq!(Self::look(&self.dir), self.before);
    }
}

#[test]
fn links_to_the_files_of_others_go_and_the_files_stay() {
    needs_root!();
    let treasure = Treasure::new();
    let server = Server::host().start();
    let other = server.sandbox();
    other.sh("echo theirs > file");
    let sandbox = server.sandbox();
    let (outside, theirs) = (treasure.dir.path().display(), other.home.display());
    sandbox.sh(&format!(
        "ln -s {outside} to_dir; ln -s {outside}/secret to_file; ln -s {outside}/deep {theirs} / .; \
         mkdir d; ln -s ../to_dir d/again; ln -s loop loop; ln -s .. up; ln -s /proc/1/root proc; \
         ln -s {theirs}/file theirs; ln -s /dev/null null; ln -s nowhere dangling; \
         rm -rf .tmp; ln -s {outside} .tmp; rm -rf .sbx; ln -s {outside}/deep .sbx; ln -s {theirs} .local"
    ));
    // A file with a name in two places is the other place's too.
    std::fs::hard_link(treasure.dir.join("linked"), sandbox.home.join("hard")).unwrap();
    sandbox.delete();
    treasure.assert_untouched();
    assert_eq!(other.sh("cat file"), "theirs\n");
}

#[test]
fn what_a_sandbox_made_of_its_home_itself_is_no_obstacle() {
    needs_root!();
    let server = Server::host().start();
    for trick in [
        // Nobody may enter.
        "mkdir -p a/b/c; echo x > a/b/c/f; chmod 000 a/b/c a/b a . ",
        "mkdir -p a/b; echo x > a/b/f; chmod 500 a/b a; chmod 000 a/b/f; chmod 1777 . ",
        // Nobody may change.
        "mkdir s; echo x > s/f; chmod 7000 s/f s",
        // Names.
        "printf 'x' > \"$(printf 'bad\\377\\200name')\"; mkdir \"$(printf '\\377')\"; touch \"$(printf '\\377/\\001')\"; \
         touch -- -rf '*' ' ' '\n' '\\' '...' \"$(printf 'a\\nb')\"; mkdir -- --help '\n\n'",
        "touch \"$(head -c 255 /dev/zero | tr '\\0' x)\"; mkdir \"$(head -c 255 /dev/zero | tr '\\0' y)\"",
        // Kinds.
        "mkfifo p q; mkdir d; mkfifo d/p",
        // Links of one file.
        "echo x > f; for i in 1 2 3 4 5; do mkdir d$i; ln f d$i/f; done",
        // Nothing at all.
        "rm -rf .tmp .sbx",
        // A file that is open, mapped and running.
        "cp /bin/sleep sleep; ./sleep 3600 & exec 3> held; rm held; ./sleep 3600 & sleep 0.1",
    ] {
        let sandbox = server.sandbox();
        let outcome = sandbox.exec(&json!({ "cmd": trick }));
        assert_eq!(outcome.code(), Some(0), "{trick}: {outcome:?}");
        sandbox.delete();
    }
}

#[test]
fn sockets_and_what_root_left_in_a_home_go_with_it() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let inside = |name: &str| sandbox.home.join(name);
    let _listener = UnixListener::bind(inside("socket")).unwrap();
    std::fs::create_dir(inside("roots")).unwrap();
    std::fs::write(inside("roots/file"), "x").unwrap();
    std::fs::set_permissions(inside("roots"), PermissionsExt::from_mode(0o000)).unwrap();
    sandbox.delete();
}

#[test]
fn a_home_that_was_swapped_for_something_else_costs_nobody_anything() {
    needs_root!();
    let treasure = Treasure::new();
    let server = Server::host().start();
    // Its parent is root's, so only root can do this; whoever does, links are not followed.
    let sandbox = server.sandbox();
    let moved = treasure.dir.join("moved");
    if std::fs::rename(&sandbox.home, &moved).is_err() {
        crate::skip!("needs homes and other directories on one file system");
    }
    std::os::unix::fs::symlink(treasure.dir.join("deep"), &sandbox.home).unwrap();
    let reply = server.delete(&super::target(&sandbox.id, ""));
    assert!(matches!(reply.status, 200 | 500), "{}", reply.text());
    assert!(Path::new(&treasure.dir.join("deep/file")).exists());
    assert_eq!(server.sandbox().sh("echo on"), "on\n");
}

/// Ends a sandbox while another client asks for others; the longest that one had to wait.
fn delete_watched(server: &Server, sandbox: Sandbox<'_>) -> (Duration, Duration) {
    let calm = server.sandbox();
    let stop = Stop::default();
    thread::scope(|scope| {
        let asker = scope.spawn(|| {
            let mut connection = calm.connect();
            let mut slowest = Duration::ZERO;
            while !stop.is_set() {
                let begun = Instant::now();
                let target = calm.target("processes");
                assert_eq!(connection.request("GET", &target, &[], b"").status, 200);
                assert_eq!(server.get("/health").status, 200);
                slowest = slowest.max(begun.elapsed());
            }
            slowest
        });
        let guard = stop.guard();
        let begun = Instant::now();
        sandbox.delete();
        let taken = begun.elapsed();
        drop(guard);
        (taken, asker.join().unwrap())
    })
}

#[test]
fn a_home_with_fifty_thousand_files_goes_while_others_are_served() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    sandbox.sh("mkdir d && cd d && seq 50000 | xargs touch && cd .. && seq 5000 | xargs mkdir");
    let (taken, slowest) = delete_watched(&server, sandbox);
    eprintln!("removed in {taken:?}; the slowest answer to another took {slowest:?}");
    // They do not wait for all of it; the machine may keep them waiting for a while.
    assert!(
        slowest < (taken / 2).max(Duration::from_secs(5)),
        "{slowest:?} of {taken:?}"
    );
}

#[test]
fn a_home_that_is_thousands_of_directories_deep_goes_while_others_are_served() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    // Each half is as long as a path may be, so that together they are longer.
    sandbox.sh(
        "long=$(printf 'd/%.0s' $(seq 2000)); mkdir -p $long; mkdir upper; mkdir -p upper/$long; \
         echo x > ${long}f; mv d upper/$long; chmod 000 upper/d/d/d",
    );
    let (taken, slowest) = delete_watched(&server, sandbox);
    eprintln!("removed in {taken:?}; the slowest answer to another took {slowest:?}");
    // They do not wait for all of it; the machine may keep them waiting for a while.
    assert!(
        slowest < (taken / 2).max(Duration::from_secs(5)),
        "{slowest:?} of {taken:?}"
    );
    // Descriptors are not used up by depth, nor is the stack: the server lives and makes another.
    assert_eq!(server.sandbox().sh("echo on"), "on\n");
}
