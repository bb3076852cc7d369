//! Paths of the machine that a sandbox is given besides its own: those, and nothing around them.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use nix::sys::signal::Signal;
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::{Value, json};

use super::lasting::{describe, end, resume, stop};
use super::{SANDBOXES, in_place_of, needs_root, target};
use crate::files::Mount;
use crate::fixture::{Sandbox, Server, TempDir, assert_error};
use crate::skip;
use crate::walls::probe::{Plan, Probe};

/// A tree in which permissions keep nobody from anything.
struct Tree(TempDir);

impl Tree {
    fn new() -> Self {
        let tree = Self(TempDir::new());
        for directory in ["given", "given/below", "beside"] {
            fs::create_dir(tree.path(directory)).unwrap();
        }
        for file in ["given/file", "given/below/file", "beside/file", "file"] {
            fs::write(tree.path(file), file).unwrap();
        }
        fs::write(tree.path("given/run"), "#!/bin/sh\necho ran\n").unwrap();
        symlink("../beside/file", tree.path("given/link")).unwrap();
        symlink("given", tree.path("to-given")).unwrap();
        open_to_all(tree.0.path());
        tree
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name)
    }
}

fn open_to_all(path: &Path) {
    if path.is_symlink() {
        return;
    }
    fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
    if path.is_dir() {
        for entry in fs::read_dir(path).unwrap() {
            open_to_all(&entry.unwrap().path());
        }
    }
}

fn made(reply: &Value) -> &Value {
    &reply["sandboxes"][0]
}

fn names(list: &Value) -> Vec<&str> {
    let list = list.as_array().unwrap().iter();
    list.map(|name| name.as_str().unwrap()).collect()
}

#[test]
fn a_path_that_is_given_for_reading_can_be_read_and_executed() {
    needs_root!();
    let (server, tree) = (Server::host().start(), Tree::new());
    // By a link: what counts is where it leads.
    let sandbox = server.sandbox_with(&json!({ "read_only_paths": [tree.path("to-given")] }));
    let mut plan = Plan::default();
    let given = |name: &str| tree.path(&format!("given/{name}"));
    for (act, expected) in [
        (&["read", &given("file")][..], "ok"),
        (&["read", &given("below/file")], "ok"),
        (&["list", &given("below")], "ok"),
        (&["exec", &given("run")], "0 ran"),
        (&["read", &tree.path("to-given/file")], "ok"),
        (&["write", &given("file")], "EACCES"),
        (&["truncate-path", &given("file")], "EACCES"),
        (&["create", &given("new")], "EACCES"),
        (&["mkdir", &given("new")], "EACCES"),
        (&["unlink", &given("file")], "EACCES"),
        (&["rename", &given("file"), "own"], "EACCES|EXDEV"),
        (&["link", &given("file"), "own"], "EACCES|EXDEV|EPERM"),
        (&["read", &given("link")], "EACCES"),
        (&["read", &given("../beside/file")], "EACCES"),
        (&["read", &tree.path("file")], "EACCES"),
        (&["list", &tree.path("")], "EACCES"),
        (&["create", &tree.path("beside/new")], "EACCES"),
    ] {
        plan.add(act, expected);
    }
    Probe::new(&sandbox).check(&plan);
    // The name leads elsewhere now, and what was given is given wherever it is.
    fs::rename(tree.path("given"), tree.path("moved")).unwrap();
    fs::rename(tree.path("beside"), tree.path("given")).unwrap();
    let mut plan = Plan::default();
    plan.add(&["read", &tree.path("moved/file")], "ok");
    plan.add(&["read", &given("file")], "EACCES");
    Probe::new(&sandbox).check(&plan);
    // Another sandbox has none of it.
    let mut plan = Plan::default();
    plan.add(&["read", &tree.path("moved/file")], "EACCES");
    Probe::new(&server.sandbox()).check(&plan);
}

#[test]
fn a_path_that_is_given_for_writing_can_be_changed() {
    needs_root!();
    let (server, tree) = (Server::host().start(), Tree::new());
    let body = json!({ "read_write_paths": [tree.path("given/below"), tree.path("file")] });
    let sandbox = server.sandbox_with(&body);
    let mut plan = Plan::default();
    let below = |name: &str| tree.path(&format!("given/below/{name}"));
    for (act, expected) in [
        (&["create", &below("new")][..], "ok"),
        (&["mkdir", &below("directory")], "ok"),
        (&["rename", &below("new"), &below("directory/new")], "ok"),
        (&["unlink", &below("file")], "ok"),
        (&["write", &tree.path("file")], "ok"),
        (&["unlink", &tree.path("file")], "EACCES"),
        (&["read", &tree.path("given/file")], "EACCES"),
        (&["create", &tree.path("given/new")], "EACCES"),
        (
            &["rename", &below("directory"), &tree.path("given/out")],
            "EACCES|EXDEV",
        ),
    ] {
        plan.add(act, expected);
    }
    Probe::new(&sandbox).check(&plan);
    assert!(fs::exists(below("directory/new")).unwrap());
    // Permissions hold as ever.
    fs::set_permissions(below(""), Permissions::from_mode(0o755)).unwrap();
    let mut plan = Plan::default();
    plan.add(&["create", &below("newer")], "EACCES");
    Probe::new(&sandbox).check(&plan);
    // Files are requested of the home, as ever.
    let reply = sandbox.get(&format!("files/read?path={}", tree.path("file")));
    assert_error(&reply, 404, "not_found");
}

#[test]
fn each_sandbox_shows_the_paths_that_it_reaches() {
    needs_root!();
    // Not below /tmp, which holds the homes of the other tests.
    let homes = TempDir::below("/var/tmp").unwrap();
    let builder = Server::host().env("SBX_HOMES_DIR", homes.join("homes"));
    let (server, tree) = (builder.start(), Tree::new());
    let usual = server.post(SANDBOXES, &json!({})).json();
    let body = json!({
        "read_only_paths": [tree.path("to-given")], "read_write_paths": [tree.path("beside"), "/tmp"]
    });
    let more = server.post(SANDBOXES, &body).json();
    let (usual, more) = (made(&usual), made(&more));
    let shown = |sandbox: &Value, list: &str| {
        let paths = names(&sandbox["filesystem"][list]).into_iter();
        paths.map(str::to_owned).collect::<Vec<_>>()
    };
    let mut read_only = shown(usual, "read_only");
    for path in ["/usr", "/etc", "/proc"] {
        assert!(read_only.contains(&path.to_owned()), "{read_only:?}");
    }
    read_only.push(tree.path("given"));
    assert_eq!(shown(more, "read_only"), read_only);
    let home = |sandbox: &Value| sandbox["home"].as_str().unwrap().to_owned();
    assert_eq!(shown(usual, "read_write")[0], home(usual));
    let read_write = shown(more, "read_write");
    assert_eq!(
        read_write[..3],
        [home(more), tree.path("beside"), "/tmp".to_owned()]
    );
    assert!(read_write.contains(&"/dev/null".to_owned()));
    // What programs will miss.
    assert_eq!(usual["restrictions"], json!(["tmp", "shm", "tcp_bind"]));
    assert_eq!(more["restrictions"], json!(["shm", "tcp_bind"]));
    assert_eq!(usual["isolation"]["mode"], "landlock");
    let target = format!("{SANDBOXES}/{}", more["id"].as_str().unwrap());
    assert_eq!(server.get(&target).json()["filesystem"], more["filesystem"]);
}

/// The kernel's file systems, devices, and what holds them.
const CLOSED: [&str; 8] = [
    "/",
    "/proc",
    "/proc/1",
    "/sys",
    "/dev",
    "/dev/shm",
    "/dev/null",
    "/dev/fd",
];

#[test]
fn what_must_stay_closed_is_given_to_nobody() {
    needs_root!();
    let tree = Tree::new();
    let token = tree.path("beside/token");
    fs::write(&token, "secret-of-the-host").unwrap();
    let builder = Server::host().no_token().env("SBX_TOKEN_FILE", &token);
    let mut server = builder.start();
    server.token = Some("secret-of-the-host".to_owned());
    let neighbour = server.sandbox();
    let homes = neighbour
        .home
        .parent()
        .unwrap()
        .to_str()
        .unwrap()
        .to_owned();
    let home = neighbour.home.to_str().unwrap().to_owned();
    symlink(&home, tree.path("to-home")).unwrap();
    symlink("/", tree.path("to-root")).unwrap();
    let above = neighbour.home.ancestors().skip(2);
    let above = above.map(|path| path.to_str().unwrap().to_owned());
    let closed = above
        .chain([homes, home, tree.path("to-home"), tree.path("to-root")])
        .chain([token, tree.path("beside"), tree.path("to-given/../beside")])
        .chain(CLOSED.map(str::to_owned));
    let mut refused: Vec<(String, u16, &str)> =
        closed.map(|path| (path, 403, "forbidden")).collect();
    for path in ["", "relative", "./x", "~", "/tmp/\0"] {
        refused.push((path.to_owned(), 400, "bad_request"));
    }
    let long = format!("/{}", "x".repeat(5000));
    for path in ["/no/such/path", "/etc/passwd/x", &long] {
        refused.push((path.to_owned(), 404, "not_found"));
    }
    let pipe = tree.path("given/pipe");
    mkfifo(pipe.as_str(), Mode::S_IRUSR).unwrap();
    refused.push((pipe, 409, "not_regular"));
    for (path, status, code) in &refused {
        for field in ["read_only_paths", "read_write_paths"] {
            let reply = server.post(SANDBOXES, &json!({ field: [tree.path("given"), path] }));
            assert_error(&reply, *status, code);
            assert!(reply.text().contains(field), "{}", reply.text());
        }
    }
    let many = vec![tree.path("given"); 65];
    for value in [
        json!("/tmp"),
        json!([5]),
        json!({}),
        json!(true),
        json!(many),
    ] {
        let reply = server.post(SANDBOXES, &json!({ "read_only_paths": value }));
        assert_error(&reply, 400, "bad_request");
    }
    assert_eq!(server.get(SANDBOXES).json().as_array().unwrap().len(), 1);
    let body = json!({ "read_only_paths": vec![tree.path("given"); 64], "read_write_paths": null });
    let _: Sandbox<'_> = server.sandbox_with(&body);
}

/// One that may change a directory chooses where paths lead that are given to others below it.
#[test]
fn what_a_sandbox_links_to_is_given_to_no_other() {
    needs_root!();
    let (server, tree) = (Server::host().start(), Tree::new());
    let given = tree.path("given");
    let sandbox = server.sandbox_with(&json!({ "read_write_paths": [given] }));
    let beside = tree.path("beside");
    sandbox.sh(&format!(
        "cd {given} && ln -s {beside} planted && ln -s ../beside below/planted && mkdir -p own/deep \
         && chmod 777 own own/deep && rm link && ln -s . round && ln -s planted/file to-planted"
    ));
    // Its owner cannot be taken for the operator by what he lays into a directory of the sandbox.
    symlink(&beside, tree.path("given/own/link")).unwrap();
    symlink("given/own/deep", tree.path("to-deep")).unwrap();
    for path in [
        "given/planted",
        "given/planted/file",
        "given/below/planted",
        "given/round/file",
        "given/own/link",
        "to-given/planted",
        "given/to-planted",
    ] {
        for field in ["read_only_paths", "read_write_paths"] {
            let reply = server.post(SANDBOXES, &json!({ field: [tree.path(path)] }));
            assert_error(&reply, 403, "forbidden");
        }
    }
    // Its directories lead nowhere else.
    for path in [
        "given/own/deep",
        "to-deep",
        "given/own/../below",
        "given/file",
    ] {
        server.sandbox_with(&json!({ "read_only_paths": [tree.path(path)] }));
    }
    assert_eq!(server.get(SANDBOXES).json().as_array().unwrap().len(), 5);
}

/// One that may change the directory above lays something else there, while the other one is stopped or no server runs.
#[test]
fn what_a_stopped_sandbox_was_given_is_exchanged_for_nothing_else() {
    needs_root!();
    let (server, tree) = (Server::host().start(), Tree::new());
    let (given, below) = (tree.path("given"), tree.path("given/below"));
    let one_that_changes = server.sandbox_with(&json!({ "read_write_paths": [given] }));
    let body = json!({ "read_only_paths": [tree.path("file"), below] });
    let (stopped, running) = (server.sandbox_with(&body), server.sandbox_with(&body));
    let untouched = server.sandbox_with(&json!({ "read_write_paths": [tree.path("beside")] }));
    let read = format!("cat {below}/file");
    let refused = |sandbox: &Sandbox<'_>, route: &str, body: &Value| {
        let reply = sandbox.post(route, body);
        assert_error(&reply, 409, "changed");
        let text = reply.text();
        for part in ["read_only_paths", &below, "put it back"] {
            assert!(text.contains(part), "{text}");
        }
        assert_eq!(describe(sandbox.server, &sandbox.id)["state"], "stopped");
    };
    assert_eq!(stopped.sh(&read), "given/below/file");
    stop(&server, &stopped.id);
    stop(&server, &untouched.id);
    resume(&server, &untouched.id);
    one_that_changes.sh(&format!("mv {below} {given}/away"));
    refused(&stopped, "resume", &json!({}));
    for act in [
        format!("ln -s away {below}"),
        format!("rm {below} && ln -s ../beside {below}"),
        format!("rm {below} && mkfifo {below}"),
        format!("rm {below} && cp -r {given}/away {below} && echo other > {below}/file"),
    ] {
        one_that_changes.sh(&act);
        refused(&stopped, "resume", &json!({}));
    }
    // What runs has what it was given.
    assert_eq!(
        running.sh(&format!("cat {given}/away/file")),
        "given/below/file"
    );

    // The next server knows what it was.
    let before = [one_that_changes, stopped, running, untouched].map(|sandbox| {
        let Sandbox {
            id,
            token,
            uid,
            home,
            ..
        } = sandbox;
        (id, token, uid, home)
    });
    let place = end(server, Signal::SIGTERM);
    let next = in_place_of(&place).start();
    let [one_that_changes, stopped, running, untouched] =
        before.map(|(id, token, uid, home)| Sandbox {
            server: &next,
            id,
            token,
            uid,
            home,
        });
    refused(&stopped, "resume", &json!({}));
    refused(&running, "exec", &json!({ "cmd": read }));
    refused(&running, "processes", &json!({ "cmd": read }));
    let kept = next.get(&target(&running.id, "/files/list?path=."));
    assert_eq!(kept.status, 200, "{}", kept.text());
    let beside = tree.path("beside");
    assert_eq!(untouched.sh(&format!("cat {beside}/file")), "beside/file");
    one_that_changes.sh(&format!("rm -r {below} && mv {given}/away {below}"));
    resume(&next, &stopped.id);
    assert_eq!(stopped.sh(&read), "given/below/file");
    assert_eq!(running.sh(&read), "given/below/file");
}

/// In a container the first change of a file of the image makes a copy of it, with a birth of its own.
#[test]
fn what_an_overlay_copies_for_a_change_is_what_was_given() {
    needs_root!();
    let (tree, parts) = (Tree::new(), TempDir::new());
    let at = parts.path().join("merged");
    fs::create_dir(&at).unwrap();
    let Some(_mount) = Mount::overlay(&tree.path(""), &parts.join(""), &at) else {
        skip!("cannot mount an overlay here");
    };
    let server = Server::host().start();
    let [directory, file] = ["given", "file"].map(|name| parts.join(&format!("merged/{name}")));
    let born = |path: &str| {
        let output = Command::new("stat").args(["-c", "%w", path]).output();
        output.unwrap().stdout
    };
    let before = [&directory, &file].map(|path| born(path));
    let sandbox = server.sandbox_with(&json!({ "read_write_paths": [directory, file] }));
    let change = format!("echo more >> {file}; echo new > {directory}/new; cat {directory}/new");
    assert_eq!(sandbox.sh(&change), "new\n");
    for (path, before) in [&directory, &file].into_iter().zip(before) {
        assert_ne!(born(path), before, "a copy");
    }
    stop(&server, &sandbox.id);
    resume(&server, &sandbox.id);
    assert_eq!(sandbox.sh(&format!("cat {directory}/new")), "new\n");
    stop(&server, &sandbox.id);
    fs::rename(&file, parts.join("merged/away")).unwrap();
    fs::write(&file, "file").unwrap();
    let reply = server.post(&target(&sandbox.id, "/resume"), &json!({}));
    assert_error(&reply, 409, "changed");
}

/// A sandbox is never weaker than asked.
#[test]
fn walls_that_are_not_enforced_here_are_refused() {
    needs_root!();
    let server = Server::host().start();
    assert_error(
        &server.post(SANDBOXES, &json!({ "isolation": "none" })),
        400,
        "bad_request",
    );
    assert_eq!(server.get("/health").json()["sandboxes"], 0);
    server.sandbox_with(&json!({ "isolation": "landlock", "max_cpu": null }));
}
