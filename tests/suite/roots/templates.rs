//! Templates that are snapshots: sandboxes of them, what keeps them, and archives that a start imports.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use super::{Root, Template, root_with};
use crate::fixture::{
    Builder, HostPlace, PATIENCE, Server, TempDir, assert_error, copy_program, has_namespaces,
    is_alive, is_root, names_in, wait_until,
};
use crate::host::in_place_of;
use crate::skip;
use crate::snapshots::{
    SNAPSHOTS, archive, check_tidy, file, id_of, images, listed, made, needs_store, packed, store,
};

/// The archive of a machine that has what busybox has.
macro_rules! needs_archive {
    ($archive:ident) => {
        let Some(template) = Template::new() else {
            skip!("there is no {}", super::BUSYBOX);
        };
        let Some($archive) = packed(&template.path(""), false) else {
            skip!("there is no tar");
        };
        drop(template);
    };
}

/// What anybody is told of templates.
fn templates(server: &Server) -> Value {
    server.get("/health").json()["isolation"]["templates"].clone()
}

fn of_snapshot<'a>(server: &'a Server, name: &str) -> Root<'a> {
    root_with(server, json!({ "template": name }))
}

#[test]
fn sandboxes_are_made_of_a_snapshot_and_do_not_change_it() {
    needs_store!(server);
    needs_archive!(archive);
    assert_eq!(templates(&server), Value::Null);
    let nothing = server.post("/v1/sandboxes", &json!({ "root": "private" }));
    assert_error(&nothing, 400, "bad_request");
    let id = id_of(&made(&server, "box", &archive));
    assert_eq!(templates(&server), Value::Null, "clients' names are theirs");
    let before = crate::snapshots::contents(&store(&server).join(&id));
    // By its name, by its id, and because it is the only one.
    for asked in [
        json!({ "template": "box" }),
        json!({ "template": id }),
        json!({}),
    ] {
        let sandbox = root_with(&server, asked.clone());
        let document = sandbox.described();
        assert_eq!(document["snapshot"], *id, "{document}");
        assert_eq!(
            document["template"],
            *asked["template"].as_str().unwrap_or("box")
        );
        assert_eq!(
            sandbox.sh_as("root", "id -u; touch /x; rm /bin/ls; chmod 700 /etc"),
            "0\n"
        );
        // Owners and bits of modes are those of the archive.
        assert_eq!(
            sandbox.sh_as("user", "stat -c '%u:%g' ~; as-root 2>&1 | head -n 1; id -u"),
            "1000:1000\n\
            as-root: applet not found\n1000\n"
        );
        assert_eq!(
            sandbox.sh_as("root", "stat -c %a /bin/su /tmp"),
            "4755\n1777\n"
        );
        sandbox.delete();
    }
    assert_eq!(
        crate::snapshots::contents(&store(&server).join(&id)),
        before
    );
    for unknown in ["other", "s-0123456789abcdef01234567"] {
        let asked = json!({ "root": "private", "template": unknown });
        let reply = server.post("/v1/sandboxes", &asked);
        assert_error(&reply, 400, "bad_request");
        assert!(
            reply.text().contains("it takes one of box"),
            "{}",
            reply.text()
        );
    }
}

#[test]
fn a_snapshot_stays_as_long_as_a_sandbox_is_made_of_it() {
    needs_store!(server);
    needs_archive!(archive);
    let old = id_of(&made(&server, "box", &archive));
    let first = of_snapshot(&server, "box");
    first.sh_as("root", "echo mine > /mine");
    let delete = |key: &str| server.delete(&format!("{SNAPSHOTS}/{key}"));
    let in_use = |key: &str, by: &str| {
        let reply = delete(key);
        assert_error(&reply, 409, "in_use");
        assert!(reply.text().contains(by), "{}", reply.text());
    };
    in_use("box", &first.id);
    // Another one takes the name: the sandbox stays on what it was made of.
    let new = id_of(&made(&server, "box", &archive));
    in_use(&old, &first.id);
    let second = of_snapshot(&server, "box");
    assert_eq!(
        (
            &first.described()["snapshot"],
            &second.described()["snapshot"]
        ),
        (&json!(old), &json!(new))
    );
    first.stop();
    in_use(&old, &first.id);
    first.start();
    assert_eq!(
        first.sh_as("root", "cat /mine; ls /bin/su"),
        "mine\n/bin/su\n"
    );
    in_use(&old, &first.id);
    first.delete();
    assert_eq!(delete(&old).json(), json!({ "id": old, "deleted": true }));
    in_use("box", &second.id);
    second.delete();
    assert_eq!(delete("box").json()["deleted"], true);
    assert_eq!(names_in(store(&server)), Vec::<String>::new());
}

#[test]
fn a_snapshot_on_which_twenty_sandboxes_live_is_not_deleted() {
    needs_store!(server);
    needs_archive!(archive);
    let id = id_of(&made(&server, "box", &archive));
    let asked = json!({ "count": 20, "root": "private", "template": "box" });
    let document = server.post("/v1/sandboxes", &asked).json();
    let made = document["sandboxes"].as_array().unwrap();
    let mut sandboxes: Vec<_> = made.iter().map(|made| Root::of(&server, made)).collect();
    assert_eq!(sandboxes.len(), 20);
    // While all of them use it.
    std::thread::scope(|scope| {
        for sandbox in &sandboxes {
            scope.spawn(|| {
                let printed =
                    sandbox.sh_as("root", "rm -r /bin/su && ls /bin/ls && echo $$ > /own");
                assert_eq!(printed, "/bin/ls\n");
            });
        }
        for key in ["box", &id] {
            let reply = server.delete(&format!("{SNAPSHOTS}/{key}"));
            assert_error(&reply, 409, "in_use");
        }
    });
    while let Some(sandbox) = sandboxes.pop() {
        if let Some(other) = sandboxes.last() {
            assert_eq!(other.sh_as("root", "ls /bin/ls /own"), "/bin/ls\n/own\n");
        }
        let reply = server.delete(&format!("{SNAPSHOTS}/box"));
        assert_error(&reply, 409, "in_use");
        sandbox.delete();
    }
    let reply = server.delete(&format!("{SNAPSHOTS}/box"));
    assert_eq!(reply.json(), json!({ "id": id, "deleted": true }));
    check_tidy(&server);
}

#[test]
fn deletions_and_creations_at_the_same_time_do_not_meet() {
    needs_store!(server);
    needs_archive!(archive);
    for _ in 0..8 {
        made(&server, "box", &archive);
        let asked = json!({ "root": "private", "template": "box" });
        let (created, deleted) = std::thread::scope(|scope| {
            let created = scope.spawn(|| server.post("/v1/sandboxes", &asked));
            let deleted = scope.spawn(|| server.delete(&format!("{SNAPSHOTS}/box")));
            (created.join().unwrap(), deleted.join().unwrap())
        });
        match (created.status, deleted.status) {
            // Whichever came first, the other knows.
            (200, 409) => {
                let sandbox = Root::of(&server, &created.json()["sandboxes"][0]);
                assert_eq!(sandbox.sh_as("root", "ls /bin/su"), "/bin/su\n");
                sandbox.delete();
                assert_eq!(server.delete(&format!("{SNAPSHOTS}/box")).status, 200);
            }
            (400, 200) => {}
            _ => panic!("{}\n{}", created.text(), deleted.text()),
        }
    }
    check_tidy(&server);
}

#[test]
fn a_deletion_that_is_refused_keeps_nobody_from_a_snapshot() {
    needs_store!(server);
    needs_archive!(archive);
    made(&server, "box", &archive);
    let _keeper = of_snapshot(&server, "box");
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let reply = server.delete(&format!("{SNAPSHOTS}/box"));
                assert_error(&reply, 409, "in_use");
            }
        });
        let asked = json!({ "root": "private", "template": "box" });
        let made: Vec<_> = (0..50)
            .map(|_| server.post("/v1/sandboxes", &asked).status)
            .collect();
        is_over.store(true, Ordering::Relaxed);
        assert_eq!(made, [200; 50]);
    });
}

#[test]
fn sandboxes_of_snapshots_survive_the_server() {
    needs_store!(server);
    needs_archive!(archive);
    let id = id_of(&made(&server, "box", &archive));
    let sandbox = of_snapshot(&server, "box").id.clone();
    let stopped = of_snapshot(&server, "box");
    stopped.stop();
    let stopped = stopped.id.clone();
    let exec = |server: &Server, sandbox: &str, cmd: &str| {
        let target = format!("/v1/sandboxes/{sandbox}/exec");
        let reply = server.post(&target, &json!({ "cmd": cmd }));
        assert!(reply.text().contains("\"exit_code\":0"), "{}", reply.text());
    };
    exec(&server, &sandbox, "echo mine > /mine");
    // The name goes to another one, which a restart must not mix up with it.
    let new = id_of(&made(
        &server,
        "box",
        &crate::snapshots::archive(&[file("empty", b"")]),
    ));
    let place = server.place.take().unwrap();
    server.signal(libc::SIGKILL);
    server.wait_for_exit(PATIENCE);
    server = in_place_of(&place).start();
    server.place = Some(place);
    assert_eq!(
        listed(&server).iter().map(id_of).collect::<Vec<_>>(),
        [id.clone(), new]
    );
    exec(
        &server,
        &sandbox,
        "test $(cat /mine) = mine && test -u /bin/su",
    );
    assert_error(&server.delete(&format!("{SNAPSHOTS}/{id}")), 409, "in_use");
    for one in [&sandbox, &stopped] {
        assert_eq!(server.delete(&format!("/v1/sandboxes/{one}")).status, 200);
    }
    assert_eq!(server.delete(&format!("{SNAPSHOTS}/{id}")).status, 200);
    // If there is nothing at all in the store, perhaps it is not mounted.
    let last = of_snapshot(&server, "box").id.clone();
    let other = crate::snapshots::archive(&[file("other", b"")]);
    made(&server, "other", &other);
    let place = server.place.take().unwrap();
    server.signal(libc::SIGKILL);
    server.wait_for_exit(PATIENCE);
    let (store, away) = (
        crate::snapshots::store_of(&place),
        place.homes().join("away"),
    );
    fs::rename(&store, &away).unwrap();
    let output = in_place_of(&place).command().output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("SBX_SNAPSHOTS_DIR") && text.contains(&last));
    fs::remove_dir(&store).unwrap();
    fs::rename(&away, &store).unwrap();
    server = in_place_of(&place).start();
    assert_eq!(
        server.get(&format!("/v1/sandboxes/{last}")).json()["id"],
        *last
    );
    // One whose snapshot alone is gone is put aside.
    let gone = id_of(&server.get(&format!("{SNAPSHOTS}/box")).json());
    server.signal(libc::SIGKILL);
    server.wait_for_exit(PATIENCE);
    fs::remove_dir_all(store.join(&gone)).unwrap();
    fs::remove_file(store.join(format!("{gone}.record"))).unwrap();
    server = in_place_of(&place).start();
    server.place = Some(place);
    assert_error(
        &server.get(&format!("/v1/sandboxes/{last}")),
        404,
        "not_found",
    );
    assert!(server.log().contains("its snapshot"), "{}", server.log());
}

/// Waits for the end of a server that is told to, and starts the next.
fn restarted(mut server: Server, variable: &str) -> Server {
    let place = server.place.take().unwrap();
    server.signal(libc::SIGTERM);
    server.wait_for_exit(PATIENCE);
    let mut next = in_place_of(&place).env("SBX_TEMPLATES", variable).start();
    next.place = Some(place);
    next
}

#[test]
fn archives_of_the_machine_are_imported_once_per_content() {
    if !cfg!(feature = "file-tools") {
        return;
    }
    if !is_root() {
        skip!("needs root");
    }
    needs_archive!(whole);
    let directory = TempDir::new();
    let path = directory.path().join("box.tar");
    fs::write(&path, &whole).unwrap();
    let variable = format!("box={}", path.display());
    let server = Server::host().env("SBX_TEMPLATES", &variable).start();
    if let Some(why) = super::lack(&server) {
        skip!("{why}");
    }
    let ids = |server: &Server| listed(server).iter().map(id_of).collect::<Vec<_>>();
    let first = ids(&server);
    assert_eq!(first.len(), 1);
    let sandbox = of_snapshot(&server, "box");
    assert_eq!(sandbox.sh_as("root", "id -u"), "0\n");
    sandbox.delete();
    // The operator's names are the operator's.
    let other = archive(&[file("a", b"")]);
    assert_error(
        &crate::snapshots::put(&server, "box", &other),
        409,
        "exists",
    );
    let tree = |server: &Server| fs::metadata(store(server).join(&first[0])).unwrap().ino();
    let inode = tree(&server);
    let server = restarted(server, &variable);
    assert_eq!((ids(&server), tree(&server)), (first.clone(), inode));
    // The same content in another file, of another time.
    let copy = directory.path().join("copy.tar");
    fs::copy(&path, &copy).unwrap();
    fs::rename(&copy, &path).unwrap();
    let server = restarted(server, &variable);
    assert_eq!((ids(&server), tree(&server)), (first.clone(), inode));
    let server = restarted(server, &variable);
    assert_eq!(ids(&server), first);
    assert_eq!(templates(&server), json!(["box"]));
    // Without room for other content the former stays.
    fs::write(&path, archive(&[file("changed", b"")])).unwrap();
    let mut server = server;
    let place = server.place.take().unwrap();
    server.signal(libc::SIGTERM);
    server.wait_for_exit(PATIENCE);
    let mut server = in_place_of(&place)
        .env("SBX_TEMPLATES", &variable)
        .env("SBX_SNAPSHOTS_MAX", 1)
        .start();
    server.place = Some(place);
    let log = server.log();
    assert!(log.contains("SBX_SNAPSHOTS_MAX is 1"), "{log}");
    assert_eq!(ids(&server), first);
    of_snapshot(&server, "box").delete();
    // Other content takes the name; the old one keeps its id.
    let server = restarted(server, &variable);
    let both = ids(&server);
    assert_eq!((both.len(), &both[0]), (2, &first[0]));
    assert_eq!(
        server.get(&format!("{SNAPSHOTS}/box")).json()["id"],
        both[1]
    );
    assert!(store(&server).join(&both[1]).join("changed").exists());
    check_tidy(&server);
    // One that was deleted comes again.
    assert_eq!(server.delete(&format!("{SNAPSHOTS}/box")).status, 200);
    let server = restarted(server, &variable);
    assert_eq!(ids(&server).len(), 2);
    assert_ne!(ids(&server)[1], both[1]);
}

#[test]
fn a_start_without_room_for_a_template_goes_on() {
    let disk = TempDir::new();
    let Some(_disk) = crate::files::Mount::tmpfs(disk.path(), "size=1m,mode=755") else {
        skip!("mounting a small tmpfs needs root");
    };
    let directory = TempDir::new();
    let path = directory.path().join("large.tar");
    let content = crate::fixture::random_bytes(2 << 20, 1);
    fs::write(&path, archive(&[file("large", &content)])).unwrap();
    let place = disk.path().join("snapshots");
    needs_store!(
        server,
        "SBX_TEMPLATES" = format!("large={}", path.display()),
        "SBX_SNAPSHOTS_DIR" = place.display()
    );
    assert_eq!(names_in(&place), Vec::<String>::new());
    let log = server.log();
    assert!(
        log.contains("cannot import") && log.contains("large"),
        "{log}"
    );
    let asked = json!({ "root": "private", "template": "large" });
    assert_error(&server.post("/v1/sandboxes", &asked), 400, "bad_request");
    assert_eq!(server.sandbox().sh("echo well"), "well\n");
}

#[test]
fn a_start_that_fails_at_a_template_has_ended_what_a_killed_server_left() {
    if !cfg!(feature = "file-tools") {
        return;
    }
    needs_store!(server);
    let pid = server.sandbox().spawn(&json!({ "cmd": "exec sleep 1000" }));
    let pid = i32::try_from(pid["pid"].as_i64().unwrap()).unwrap();
    let place = server.place.take().unwrap();
    server.signal(libc::SIGKILL);
    server.wait_for_exit(PATIENCE);
    let directory = TempDir::new();
    let broken = directory.path().join("broken.tar");
    fs::write(&broken, "no archive").unwrap();
    let variable = format!("box={}", broken.display());
    let builder = in_place_of(&place).env("SBX_TEMPLATES", variable);
    let output = builder.command().output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    wait_until("it is gone", PATIENCE, || !is_alive(pid));
}

#[test]
fn a_start_with_a_template_that_is_not_there_or_no_archive_fails() {
    if !is_root() {
        skip!("needs root");
    }
    let directory = TempDir::new();
    let start = |path: &Path| {
        let place = HostPlace::new();
        let builder = in_place_of(&place).env("SBX_TEMPLATES", format!("box={}", path.display()));
        let output = builder.command().output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(
            text.contains("SBX_TEMPLATES") && text.contains("box"),
            "{text}"
        );
        let store = crate::snapshots::store_of(&place);
        assert!(!store.exists() || names_in(&store).is_empty(), "{text}");
        (output.status.code(), text)
    };
    for missing in ["missing", "missing/tree", "missing.tar"] {
        assert_eq!(start(&directory.path().join(missing)).0, Some(2));
    }
    assert_eq!(start(Path::new("/dev/null")).0, Some(2));
    let place = HostPlace::new();
    let id = format!("s-{:024x}={}", 1, directory.path().display());
    let builder = in_place_of(&place).env("SBX_TEMPLATES", id);
    let output = builder.command().output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    // Whatever way leads to the store, a template does not hold it.
    let [real, link] = ["real", "link"].map(|name| directory.path().join(name));
    fs::create_dir(&real).unwrap();
    symlink(&real, &link).unwrap();
    let output = in_place_of(&place)
        .env("SBX_TEMPLATES", format!("box={}", real.display()))
        .env("SBX_SNAPSHOTS_DIR", link.join("store").display())
        .command()
        .output()
        .unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("holds the homes or the snapshots"), "{text}");
    let broken = directory.path().join("broken.tar");
    fs::write(&broken, "no archive").unwrap();
    if !cfg!(feature = "file-tools") {
        assert_eq!(start(&broken).0, Some(2));
        return;
    }
    // Where no root can be made, none is imported.
    needs_store!(server);
    let (code, text) = start(&broken);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("cannot read the archive"), "{text}");
    wait_until("the server is well", PATIENCE, || {
        server.get("/health").status == 200
    });
}

fn names_in_if_any(directory: &Path) -> Vec<String> {
    if directory.exists() {
        names_in(directory)
    } else {
        Vec::new()
    }
}

/// A machine with few programs, some of which are not for everybody: directories for `/usr`, `/etc` and `/opt`.
struct Small(TempDir);

impl Small {
    fn new() -> Self {
        let small = Self(TempDir::new());
        let directories = [
            ("usr", 0o755),
            ("usr/bin", 0o755),
            ("usr/sbin", 0o755),
            ("usr/lib", 0o755),
            ("usr/lib/listed", 0o711),
            ("usr/lib/closed", 0o700),
            ("etc", 0o755),
            ("etc/keys", 0o750),
            ("opt", 0o755),
        ];
        for (name, mode) in directories {
            let path = small.path(name);
            fs::create_dir(&path).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        }
        let files = [
            ("usr/bin/busybox", 0o755, 0),
            ("usr/bin/su", 0o4755, 0),
            ("usr/bin/mine", 0o6755, 1234),
            ("usr/bin/few", 0o4750, 0),
            ("usr/bin/unread", 0o4711, 0),
            ("usr/bin/foreign", 0o755, 100_000),
            ("usr/bin/grouped", 0o2755, 0),
        ];
        for (name, mode, owner) in files {
            copy_program(super::BUSYBOX, small.path(name));
            small.give(name, mode, owner);
        }
        chown(small.path("usr/bin/grouped"), None, Some(100_000)).unwrap();
        fs::set_permissions(
            small.path("usr/bin/grouped"),
            fs::Permissions::from_mode(0o2755),
        )
        .unwrap();
        let texts = [
            ("usr/lib/listed/text", 0o644),
            ("usr/lib/closed/text", 0o644),
            ("etc/keys/text", 0o644),
            ("etc/shadow", 0o640),
            ("etc/gshadow", 0o600),
            ("etc/passwd", 0o644),
            ("opt/text", 0o644),
        ];
        for (name, mode) in texts {
            fs::write(small.path(name), "root:x:0:0:root:/:/bin/sh\n").unwrap();
            small.give(name, mode, 0);
        }
        for applet in ["sh", "ls", "cat", "id", "stat", "find"] {
            symlink("busybox", small.path("usr/bin").join(applet)).unwrap();
        }
        small
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn give(&self, name: &str, mode: u32, owner: u32) {
        chown(self.path(name), Some(owner), Some(owner)).unwrap();
        fs::set_permissions(self.path(name), fs::Permissions::from_mode(mode)).unwrap();
    }

    /// A server that sees it in place of the machine.
    fn builder(&self) -> Builder {
        let own = self.0.path().display();
        let script = format!(
            "for name in usr etc opt; do {own}/usr/bin/busybox mount --bind {own}/$name /$name || exit; done; exec \"$0\""
        );
        Server::host().wrapped_in(&["unshare", "--mount", "sh", "-c", &script])
    }
}

#[test]
fn the_machine_is_a_template_of_what_everybody_may_read() {
    if !cfg!(feature = "file-tools") {
        return;
    }
    if !is_root() || !has_namespaces() {
        skip!("needs root, and mounts of its own");
    }
    if !Path::new(super::BUSYBOX).exists() || !Path::new("/bin").is_symlink() {
        skip!("there is no {}, or /bin is no part of /usr", super::BUSYBOX);
    }
    let small = Small::new();
    let server = small.builder().start();
    if let Some(why) = super::lack(&server) {
        skip!("{why}");
    }
    assert_eq!(listed(&server), Vec::<Value>::new(), "nobody needs it yet");
    let none = archive(&[file("a", b"")]);
    assert_error(
        &crate::snapshots::put(&server, "machine", &none),
        409,
        "exists",
    );
    let sandbox = of_snapshot(&server, "machine");
    let id = id_of(&server.get(&format!("{SNAPSHOTS}/machine")).json());
    let tree = store(&server).join(&id);
    let names = names_in(&tree);
    for closed in [
        "home", "root", "tmp", "run", "proc", "sys", "dev", "boot", "srv", "mnt",
    ] {
        assert!(!names.contains(&closed.to_owned()), "{closed}: {names:?}");
    }
    // The way to certificates, and nothing else that is there.
    for (way, next) in [("var", "lib"), ("var/lib", "ca-certificates")] {
        let names = names_in_if_any(&tree.join(way));
        assert!(names.iter().all(|name| name == next), "{way}: {names:?}");
    }
    for (name, expected) in [
        ("usr/bin/busybox", Some((0o755, 0))),
        ("usr/bin/su", Some((0o4755, 0))),
        // Whose rights are not root's loses them, and whoever has no number is root.
        ("usr/bin/mine", Some((0o755, 1234))),
        ("usr/bin/foreign", Some((0o755, 0))),
        ("usr/bin/grouped", Some((0o755, 0))),
        ("opt/text", Some((0o644, 0))),
        ("etc/passwd", Some((0o644, 0))),
        ("usr/bin/few", None),
        ("usr/bin/unread", None),
        ("usr/lib/listed", None),
        ("usr/lib/closed", None),
        ("etc/keys", None),
        ("etc/shadow", None),
        ("etc/gshadow", None),
    ] {
        let found = fs::symlink_metadata(tree.join(name)).ok();
        let found = found.map(|status| (status.mode() & 0o7777, status.uid()));
        assert_eq!(found, expected, "{name}");
    }
    assert_eq!(
        sandbox.sh_as("root", "id -u; cat /etc/shadow 2>&1; true"),
        "0\ncat: can't open '/etc/shadow': No such file or directory\n"
    );
    // It is made once, and anew when it was deleted.
    let again = of_snapshot(&server, "machine");
    assert_eq!(again.described()["snapshot"], *id);
    assert_error(
        &server.delete(&format!("{SNAPSHOTS}/machine")),
        409,
        "in_use",
    );
    again.delete();
    sandbox.delete();
    assert_eq!(server.delete(&format!("{SNAPSHOTS}/machine")).status, 200);
    fs::write(small.path("opt/later"), "later").unwrap();
    let later = of_snapshot(&server, "machine");
    assert_eq!(later.sh_as("root", "cat /opt/later"), "later");
    assert_ne!(later.described()["snapshot"], *id);
    later.delete();
    check_tidy(&server);
    drop(server);
    // A start makes it if it is the default.
    let server = small.builder().env("SBX_TEMPLATE", "machine").start();
    assert_eq!(listed(&server)[0]["name"], "machine");
    let sandbox = root_with(&server, json!({}));
    assert_eq!(sandbox.described()["template"], "machine");
    sandbox.delete();
}

#[test]
fn commands_have_what_their_image_says() {
    needs_store!(server);
    needs_archive!(archive);
    let image = |config: &Value| images::of_layer(&archive, config);
    let config = json!({
        "Env": ["A=image", "B=image", "PATH=/bin:/image"],
        "WorkingDir": "/home/user",
        "User": "user:staff",
    });
    made(&server, "box", &image(&config));
    let sandbox = of_snapshot(&server, "box");
    assert_eq!(sandbox.described()["user"], "user");
    let shown = "id -un; pwd; echo $A $B $PATH";
    assert_eq!(
        sandbox.sh(shown),
        "user\n/home/user\nimage image /bin:/image\n"
    );
    assert_eq!(
        sandbox.sh_as("root", shown),
        "root\n/home/user\nimage image /bin:/image\n"
    );
    // What the sandbox asks for counts more.
    let own = json!({ "template": "box", "user": "root", "env": { "A": "own", "B": null } });
    let own = root_with(&server, own);
    assert_eq!(own.sh(shown), "root\n/home/user\nown /bin:/image\n");
    // It stays so when it is started anew.
    own.stop();
    own.start();
    assert_eq!(own.sh(shown), "root\n/home/user\nown /bin:/image\n");
    // A directory that is not there, and a user that is not.
    let config = json!({ "WorkingDir": "/nowhere", "User": "nobody-there" });
    made(&server, "other", &image(&config));
    let other = of_snapshot(&server, "other");
    assert_eq!(other.sh_as("root", "pwd"), "/root\n");
    let reply = other.post("exec", &json!({ "cmd": "true" }));
    assert_error(&reply, 400, "bad_request");
}
