//! Sandboxes with a root of their own: what a machine is to programs, what stays closed to the root of one, and what is
//! left when the server is killed.
//!
//! The template is made of busybox. The hostile program of [`crate::walls::probe`] is in it too.

mod debian;
mod devices;
mod kills;
mod machine;
mod templates;
pub(crate) mod users;
mod walls;

use std::fs;
use std::ops::{Deref, Range};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::fixture::{
    Builder, HostPlace, Outcome, Sandbox, Server, TempDir, all_processes, copy_program, find,
    is_alive, uid_of,
};
use crate::host::in_place_of;
use crate::walls::probe::Probe;

/// Where the hostile program is in every root.
const PROBE: &str = "/probe";

const BUSYBOX: &str = "/bin/busybox";

/// A directory that roots are made of.
pub(crate) struct Template(TempDir);

impl Template {
    /// `None` without the program that it consists of.
    pub(crate) fn new() -> Option<Self> {
        let template = Self(TempDir::new());
        let applets = Command::new(BUSYBOX).arg("--list").output().ok()?;
        let root = template.path("");
        fs::set_permissions(&root, fs::Permissions::from_mode(0o755)).unwrap();
        for (name, mode) in [
            ("bin", 0o755),
            ("etc", 0o755),
            ("home", 0o755),
            ("home/user", 0o755),
            ("root", 0o700),
            ("tmp", 0o1777),
        ] {
            let path = template.path(name);
            fs::create_dir(&path).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        }
        chown(template.path("home/user"), Some(1000), Some(1000)).unwrap();
        copy_program(BUSYBOX, template.path("bin/busybox"));
        for applet in String::from_utf8(applets.stdout).unwrap().lines() {
            if !["busybox", "su"].contains(&applet) {
                symlink("busybox", template.path("bin").join(applet)).unwrap();
            }
        }
        for (name, mode) in [("bin/su", 0o4755), ("bin/as-root", 0o4755)] {
            copy_program(BUSYBOX, template.path(name));
            fs::set_permissions(template.path(name), fs::Permissions::from_mode(mode)).unwrap();
        }
        template.write(
            "etc/passwd",
            "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n\
             homeless:x:1001:1001::/nowhere:/bin/sh\n",
        );
        template.write("etc/group", "root:x:0:\nuser:x:1000:\nstaff:x:50:user\n");
        let own = std::env::current_exe().unwrap();
        // It is large.
        if fs::hard_link(&own, template.path("probe")).is_err() {
            copy_program(&own, template.path("probe"));
        }
        Some(template)
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        let path = self.path(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    }

    /// The value of the variable that names it.
    fn variable(&self) -> String {
        format!("box={}", self.0.path().display())
    }

    /// A server that makes roots of it.
    fn builder(&self) -> Builder {
        Server::host().env("SBX_TEMPLATES", self.variable())
    }

    /// The one after it.
    fn next(&self, place: &HostPlace) -> Builder {
        in_place_of(place).env("SBX_TEMPLATES", self.variable())
    }
}

/// Why a server makes no roots; `None` if it does.
pub(crate) fn lack(server: &Server) -> Option<String> {
    let health = server.get("/health").json();
    health["isolation"]["no_private_root"]
        .as_str()
        .map(str::to_owned)
}

/// Makes a template, and starts a server with it. Skips a test that cannot run here.
macro_rules! needs_roots {
    ($template:ident, $server:ident $(, $name:literal = $value:expr)*) => {
        if !crate::fixture::is_root() {
            crate::skip!("needs root");
        }
        let Some($template) = super::Template::new() else {
            crate::skip!("there is no {}", super::BUSYBOX);
        };
        #[allow(unused_mut)]
        let mut $server = $template.builder()$(.env($name, $value))*.start();
        if let Some(why) = super::lack(&$server) {
            crate::skip!("{why}");
        }
    };
}
use needs_roots;

/// A sandbox with a root of its own.
struct Root<'a> {
    sandbox: Sandbox<'a>,
    /// Its ids, as the machine sees them.
    ids: Range<u32>,
}

impl<'a> Deref for Root<'a> {
    type Target = Sandbox<'a>;

    fn deref(&self) -> &Sandbox<'a> {
        &self.sandbox
    }
}

fn root(server: &Server) -> Root<'_> {
    root_with(server, json!({}))
}

/// The same with further fields.
#[track_caller]
fn root_with(server: &Server, mut fields: Value) -> Root<'_> {
    fields["root"] = json!("private");
    let reply = server.post("/v1/sandboxes", &fields);
    assert_eq!(reply.status, 200, "{}", reply.text());
    let made = reply.json();
    assert_eq!(made["rejected"], 0, "{made}");
    Root::of(server, &made["sandboxes"][0])
}

impl<'a> Root<'a> {
    fn of(server: &'a Server, made: &Value) -> Self {
        let first = u32::try_from(made["ids"]["first"].as_u64().unwrap()).unwrap();
        assert_eq!(made["ids"]["count"], 65_536);
        Self {
            sandbox: Sandbox::of(server, made),
            ids: first..first + 65_536,
        }
    }

    fn probe(&self) -> Probe<'_> {
        Probe::at(&self.sandbox, PROBE)
    }

    /// Runs a shell command as a user.
    #[track_caller]
    fn exec_as(&self, user: &str, command: &str) -> Outcome {
        self.exec(&json!({ "cmd": command, "user": user }))
    }

    /// What a shell command writes as a user; it must succeed.
    #[track_caller]
    fn sh_as(&self, user: &str, command: &str) -> String {
        let outcome = self.exec_as(user, command);
        assert_eq!(outcome.code(), Some(0), "{command}: {outcome:?}");
        outcome.stdout
    }

    /// Processes that have one of its ids, zombies too.
    fn own_processes(&self) -> Vec<i32> {
        processes_of(&self.ids)
    }

    /// What the server shows of it.
    #[track_caller]
    fn described(&self) -> Value {
        let reply = self.server.get(&format!("/v1/sandboxes/{}", self.id));
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()
    }

    /// Where the machine has its files.
    fn on_disk(&self) -> PathBuf {
        let place = self.server.place.as_ref().unwrap();
        place.homes().join(&self.id)
    }

    #[track_caller]
    fn stop(&self) {
        let reply = self.server.post(
            &format!("/v1/sandboxes/{}/pause", self.id),
            &json!({ "keep": "files" }),
        );
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.json()["state"], "stopped");
        assert_eq!(self.own_processes(), Vec::<i32>::new());
    }

    #[track_caller]
    fn start(&self) {
        let reply = self
            .server
            .post(&format!("/v1/sandboxes/{}/resume", self.id), &json!({}));
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.json()["state"], "running");
    }

    /// Ends it; nothing of it may be left.
    #[track_caller]
    fn delete(self) {
        let home = self.on_disk();
        assert!(home.exists());
        let reply = self
            .server
            .delete(&format!("/v1/sandboxes/{}", self.sandbox.id));
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.json()["deleted"], true);
        assert!(!home.exists(), "its home is gone");
        assert_eq!(self.own_processes(), Vec::<i32>::new());
        assert_no_mounts(&home);
    }
}

fn processes_of(ids: &Range<u32>) -> Vec<i32> {
    let pids = all_processes().into_iter().map(|process| process.pid);
    pids.filter(|pid| uid_of(*pid).is_some_and(|uid| ids.contains(&uid)))
        .collect()
}

/// Nothing is mounted at, or made of, a directory that is visible to this process.
#[track_caller]
fn assert_no_mounts(directory: &Path) {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(
        !mounts.contains(directory.to_str().unwrap()) && !mounts.contains(" overlay box "),
        "{mounts}"
    );
}

/// The first processes of namespaces that are the children of a process.
fn holders_below(parent: i32) -> Vec<i32> {
    let children = all_processes().into_iter();
    let pids = children
        .filter(|process| process.parent == parent)
        .map(|process| process.pid);
    let is_holder = |pid: &i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        is_alive(*pid) && find(&line, b"hold-namespaces").is_some()
    };
    pids.filter(is_holder).collect()
}
