//! Devices of the machine by name: what a sandbox gets of them, and what stays closed.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;

use nix::sys::signal::Signal;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use serde_json::{Value, json};

use super::lasting::{describe, end, resume, stop};
use super::{SANDBOXES, in_place_of, needs_root, target};
use crate::fixture::{Builder, Reply, Sandbox, Server, TempDir, assert_error};
use crate::walls::probe::{Plan, Probe};

/// Devices of a machine: nodes that behave as `/dev/full`, and files that belong to them.
pub(crate) struct Machine(pub(crate) TempDir);

impl Machine {
    /// `None` where nodes have no effect.
    pub(crate) fn new() -> Option<Self> {
        let machine = Self(TempDir::new());
        for (name, mode) in [("", 0o755), ("cdi", 0o755), ("late", 0o755), ("lib", 0o777)] {
            fs::create_dir_all(machine.path(name)).unwrap();
            fs::set_permissions(machine.path(name), Permissions::from_mode(mode)).unwrap();
        }
        machine.node("node", SFlag::S_IFCHR, (1, 7), 0o666)?;
        machine.node("shut", SFlag::S_IFCHR, (1, 7), 0o600)?;
        machine.node("block", SFlag::S_IFBLK, (7, 200), 0o666)?;
        machine.file("lib/driver.so", "driver");
        machine.file("library", "library");
        fs::File::open(machine.path("node")).ok()?;
        Some(machine)
    }

    pub(crate) fn path(&self, name: &str) -> String {
        self.0.join(name)
    }

    /// Makes a file that permissions keep nobody from.
    fn file(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
        fs::set_permissions(self.path(name), Permissions::from_mode(0o666)).unwrap();
    }

    /// `None` where nobody may make devices.
    fn node(&self, name: &str, kind: SFlag, (major, minor): (u64, u64), mode: u32) -> Option<()> {
        let path = self.path(name);
        mknod(path.as_str(), kind, Mode::empty(), makedev(major, minor)).ok()?;
        fs::set_permissions(path, Permissions::from_mode(mode)).ok()
    }

    /// Writes a file with one device, `test.dev/box=NAME`.
    pub(crate) fn describe(&self, name: &str, edits: &Value) {
        let file = json!({
            "cdiVersion": "0.6.0", "kind": "test.dev/box",
            "devices": [{ "name": name, "containerEdits": edits }],
        });
        fs::write(self.path(&format!("cdi/{name}.json")), file.to_string()).unwrap();
    }

    pub(crate) fn remove(&self, name: &str) {
        fs::remove_file(self.path(&format!("cdi/{name}.json"))).unwrap();
    }

    pub(crate) fn with(&self, builder: Builder) -> Builder {
        let directories = format!(
            "{},{},/no/such/directory",
            self.path("cdi"),
            self.path("late")
        );
        builder.env("SBX_CDI_DIRS", directories)
    }
}

macro_rules! needs_machine {
    ($machine:ident) => {
        let Some($machine) = $crate::host::devices::Machine::new() else {
            $crate::skip!("needs devices of its own in a temporary directory");
        };
    };
}
pub(crate) use needs_machine;

fn create(server: &Server, devices: &Value) -> Reply {
    server.post(SANDBOXES, &json!({ "devices": devices }))
}

/// Uses a node as `/dev/full` is used.
pub(crate) fn check_use(sandbox: &Sandbox<'_>, node: &str) {
    let read = format!("head -c 3 {node} | od -An -tx1");
    assert_eq!(sandbox.sh(&read).trim(), "00 00 00");
    let command = format!("dd if=/dev/zero of={node} bs=1 count=1");
    let written = sandbox.exec(&json!({ "cmd": command }));
    assert!(written.stderr.contains("o space left"), "{written:?}");
}

#[test]
fn a_device_is_there_for_the_sandbox_that_asked_for_it() {
    needs_root!();
    needs_machine!(machine);
    let (node, library) = (machine.path("node"), machine.path("library"));
    machine.describe(
        "one",
        &json!({
            "deviceNodes": [{ "path": node, "type": "c", "major": 1, "minor": 7, "permissions": "rwm" }],
            "mounts": [{ "hostPath": library, "containerPath": library, "options": ["rw"] }],
            "env": ["OF_DEVICE=yes", "HOME=/", "CHOSEN=device"],
            "hooks": [{ "hookName": "createContainer", "path": "/bin/touch", "args": ["touch", machine.path("hooked")] }],
        }),
    );
    machine.describe(
        "other",
        &json!({ "deviceNodes": [{ "path": machine.path("shut") }] }),
    );
    let server = machine.with(Server::host()).start();
    let body = json!({ "devices": ["test.dev/box=one", "test.dev/box=other", "test.dev/box=one"], "env": { "CHOSEN": "client" } });
    let sandbox = server.sandbox_with(&body);
    let shown = describe(&server, &sandbox.id);
    assert_eq!(
        shown["devices"],
        json!(["test.dev/box=one", "test.dev/box=other"])
    );
    check_use(&sandbox, &node);
    let mut plan = Plan::default();
    // ENOTTY comes from the driver, EACCES would come from the rules.
    let opened = format!("open:{node}");
    let ioctl = libc::SYS_ioctl.to_string();
    plan.add(&["syscall", &ioctl, &opened, "0x1234", "buffer"], "ENOTTY");
    plan.add(&["read", &library], "ok");
    plan.add(&["write", &library], "EACCES");
    // Permissions hold as ever.
    plan.add(&["read", &machine.path("shut")], "EACCES");
    plan.add(&["list", &machine.path("")], "EACCES");
    plan.add(&["read", &machine.path("lib/driver.so")], "EACCES");
    Probe::new(&sandbox).check(&plan);
    let variables = sandbox.sh("echo $OF_DEVICE $CHOSEN $HOME");
    assert_eq!(
        variables,
        format!("yes client {}\n", sandbox.home.display())
    );
    assert!(!fs::exists(machine.path("hooked")).unwrap());

    let without = server.sandbox();
    assert_eq!(describe(&server, &without.id)["devices"], Value::Null);
    let mut plan = Plan::default();
    plan.add(&["read", &node], "EACCES");
    plan.add(&["read", &library], "EACCES");
    Probe::new(&without).check(&plan);
    assert_eq!(without.sh("echo $OF_DEVICE"), "\n");
}

#[test]
fn what_must_stay_closed_is_no_device() {
    needs_root!();
    needs_machine!(machine);
    let server = machine.with(Server::host()).start();
    let neighbour = server.sandbox();
    let home = neighbour.home.to_str().unwrap();
    neighbour.sh("echo secret > file; ln -s /etc/shadow planted");
    symlink(home, machine.path("to-home")).unwrap();
    let node = |path: &str| json!({ "deviceNodes": [{ "path": path }] });
    let mount = |path: &str| json!({ "mounts": [{ "hostPath": path, "containerPath": path }] });
    let library = machine.path("library");
    let cases = [
        (node(&machine.path("block")), "block device"),
        (
            json!({ "deviceNodes": [{ "path": "/dev/x", "hostPath": machine.path("block"), "type": "c" }] }),
            "block device",
        ),
        (node(&library), "character device"),
        (node("/no/such/node"), "/no/such/node"),
        (node("node"), "absolute"),
        (
            json!({ "deviceNodes": [{ "path": machine.path("node"), "permissions": "r" }] }),
            "permissions",
        ),
        (
            json!({ "deviceNodes": [{ "path": "/dev/x", "hostPath": machine.path("node") }] }),
            "landlock",
        ),
        (
            json!({ "mounts": [{ "hostPath": library, "containerPath": "/opt/library" }] }),
            "landlock",
        ),
        (
            json!({ "mounts": [{ "hostPath": "tmpfs", "containerPath": "/x", "type": "tmpfs" }] }),
            "tmpfs",
        ),
        (mount(home), "closed"),
        (mount(&format!("{home}/file")), "closed"),
        (mount(&format!("{home}/planted")), "link"),
        (mount(&machine.path("to-home")), "closed"),
        (mount("/"), "closed"),
        (mount("/proc/1"), "closed"),
        (mount("/sys/kernel"), "closed"),
        (mount("/dev/shm"), "closed"),
        (mount(&machine.path("node")), "neither"),
    ];
    for (edits, part) in &cases {
        machine.describe("bad", edits);
        let reply = create(&server, &json!(["test.dev/box=bad"]));
        assert_error(&reply, 400, "bad_request");
        assert!(reply.text().contains(part), "{part}: {}", reply.text());
    }
    machine.remove("bad");
    for isolation in ["namespaces", "landlock"] {
        let body = json!({ "devices": ["test.dev/box=none"], "isolation": isolation });
        let reply = server.post(SANDBOXES, &body);
        assert_error(&reply, 400, "bad_request");
    }
    let many: Vec<String> = (0..65)
        .map(|number| format!("test.dev/box={number}"))
        .collect();
    for devices in [
        json!("test.dev/box=one"),
        json!([1]),
        json!([""]),
        json!(["box"]),
        json!(["test.dev/box"]),
        json!(["test.dev=one"]),
        json!(["/box=one"]),
        json!(["test.dev/=one"]),
        json!(["test.dev/box="]),
        json!(["../etc/box=one"]),
        json!(["test.dev/box=one/../two"]),
        json!([format!("test.dev/box={}", "x".repeat(300))]),
        json!(many),
    ] {
        let reply = create(&server, &devices);
        assert_error(&reply, 400, "bad_request");
        assert!(reply.text().contains("devices"), "{}", reply.text());
    }
    assert_eq!(server.get(SANDBOXES).json().as_array().unwrap().len(), 1);
    let body = json!({ "devices": [] });
    let _: Sandbox<'_> = server.sandbox_with(&body);
}

#[test]
fn a_missing_device_says_what_is_there() {
    needs_root!();
    needs_machine!(machine);
    machine.describe("one", &json!({}));
    fs::write(machine.path("late/nvidia.yaml"), "cdiVersion: 0.5.0").unwrap();
    fs::write(machine.path("cdi/broken.json"), "{").unwrap();
    let server = machine.with(Server::host()).start();
    let reply = create(&server, &json!(["nvidia.com/gpu=all"]));
    assert_error(&reply, 400, "bad_request");
    let text = reply.text();
    for part in [
        "nvidia.com/gpu=all",
        "test.dev/box=one",
        "broken.json",
        "nvidia-ctk cdi generate --format=json --output=/etc/cdi/nvidia.json",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // They are no matter to a device that is there. The later directory counts.
    let node = machine.path("node");
    let late = json!({
        "cdiVersion": "1.0.0", "kind": "test.dev/box",
        "devices": [{ "name": "one", "containerEdits": { "deviceNodes": [{ "path": node }] } }],
    });
    fs::write(machine.path("late/one.json"), late.to_string()).unwrap();
    let sandbox = server.sandbox_with(&json!({ "devices": ["test.dev/box=one"] }));
    check_use(&sandbox, &node);
}

/// What a name means is found out anew at each start.
#[test]
fn a_stopped_sandbox_starts_only_with_its_devices() {
    needs_root!();
    needs_machine!(machine);
    let node = machine.path("node");
    let edits = json!({ "deviceNodes": [{ "path": node }], "env": ["RUN=first"] });
    machine.describe("one", &edits);
    let server = machine.with(Server::host()).start();
    let sandbox = server.sandbox_with(&json!({ "devices": ["test.dev/box=one"] }));
    assert_eq!(sandbox.sh("echo $RUN"), "first\n");
    stop(&server, &sandbox.id);
    machine.remove("one");
    let refused = |server: &Server, id: &str| {
        let reply = server.post(&target(id, "/resume"), &json!({}));
        assert_error(&reply, 409, "changed");
        assert!(
            reply.text().contains("test.dev/box=one"),
            "{}",
            reply.text()
        );
        let shown = describe(server, id);
        assert_eq!(shown["state"], "stopped");
        assert_eq!(shown["devices"], json!(["test.dev/box=one"]));
    };
    refused(&server, &sandbox.id);
    // So does one whose device may not be given any more.
    machine.describe(
        "one",
        &json!({ "deviceNodes": [{ "path": machine.path("block") }] }),
    );
    let reply = server.post(&target(&sandbox.id, "/resume"), &json!({}));
    assert_error(&reply, 409, "changed");
    machine.describe("one", &json!({ "env": ["RUN=second"] }));
    resume(&server, &sandbox.id);
    assert_eq!(sandbox.sh("echo $RUN"), "second\n");
    let mut plan = Plan::default();
    plan.add(&["read", &node], "EACCES");
    Probe::new(&sandbox).check(&plan);

    // The next server knows the names.
    let Sandbox {
        id,
        token,
        uid,
        home,
        ..
    } = sandbox;
    let place = end(server, Signal::SIGTERM);
    machine.remove("one");
    let next = machine.with(in_place_of(&place)).start();
    let sandbox = Sandbox {
        server: &next,
        id,
        token,
        uid,
        home,
    };
    refused(&next, &sandbox.id);
    let kept = next.get(&target(&sandbox.id, "/files/list?path=."));
    assert_eq!(kept.status, 200, "{}", kept.text());
    machine.describe("one", &edits);
    assert_eq!(sandbox.sh("echo $RUN"), "first\n");
    check_use(&sandbox, &node);
}

#[test]
fn a_socket_of_a_driver_is_reached() {
    needs_root!();
    needs_machine!(machine);
    let socket = machine.path("socket");
    let _listener = UnixListener::bind(&socket).unwrap();
    fs::set_permissions(&socket, Permissions::from_mode(0o666)).unwrap();
    machine.describe(
        "one",
        &json!({ "mounts": [{ "hostPath": socket, "containerPath": socket }] }),
    );
    let server = machine.with(Server::host()).start();
    let sandbox = server.sandbox_with(&json!({ "devices": ["test.dev/box=one"] }));
    let mut plan = Plan::default();
    plan.add(&["unix-connect", &socket], "ok");
    Probe::new(&sandbox).check(&plan);
}
