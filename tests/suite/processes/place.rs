//! Where a command of these tests runs: on a dedicated machine, or in a sandbox. What is true of
//! processes is true of both.

use std::io::Read;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::PathBuf;

use serde_json::Value;

use crate::fixture::{Mark, PATIENCE, Server, copy_program, stat_of, wait_until};
use crate::walls::probe::ARGUMENTS;

/// Where commands run: the machine, or a sandbox with a neighbour.
pub struct Place<'a> {
    pub server: &'a Server,
    pub prefix: String,
    pub directory: PathBuf,
}

/// A FIFO that everything that descends from a command has open for writing.
pub struct Lifeline(std::fs::File);

impl<'a> Place<'a> {
    /// The machine of a dedicated server.
    pub fn machine(server: &'a Server, directory: &crate::fixture::TempDir) -> Self {
        Self {
            server,
            prefix: "/v1/".to_owned(),
            directory: directory.path().to_owned(),
        }
    }

    pub fn post(&self, route: &str, body: &Value) -> Value {
        let reply = self.server.post(&format!("{}{route}", self.prefix), body);
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()
    }

    pub fn delete(&self, process: &Value) {
        let id = process["id"].as_str().unwrap();
        let target = format!("{}processes/{id}", self.prefix);
        let reply = self.server.delete(&target);
        assert_eq!(reply.status, 200, "{}", reply.text());
    }

    pub fn lifeline(&self, name: &str) -> (Lifeline, String) {
        let path = self.directory.join(name);
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666)).unwrap();
        let file = std::fs::OpenOptions::new()
            .read(true)
            .custom_flags(nix::libc::O_NONBLOCK)
            .open(&path)
            .unwrap();
        (Lifeline(file), path.display().to_string())
    }

    /// A shell command that does acts of the hostile program, marked. The shell replaces variables in
    /// them.
    pub fn probe(&self, acts: &Value, mark: &Mark) -> String {
        let path = self.directory.join("probe");
        if !path.exists() {
            copy_program(std::env::current_exe().unwrap(), &path);
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        let (path, arguments) = (path.display(), ARGUMENTS.join(" "));
        let acts = acts.to_string().replace('"', "\\\"");
        format!("echo \"{acts}\" | {path} {arguments} {mark} >/dev/null")
    }

    /// Waits until a process of this mark is an orphan, which the server or its init has adopted.
    pub fn orphan(&self, mark: &Mark, leader: i32) -> i32 {
        mark.find("a daemon has lost its parents", |pid| {
            pid != leader && stat_of(pid).is_some_and(|stat| stat.parent == self.server.pid())
        })
    }

    pub fn left_behind(&self) -> Value {
        let mut connection = self.server.connect();
        let accept = [("Accept", "application/json")];
        let reply = connection.request("GET", "/v1/metrics", &accept, b"");
        reply.json()["processes_left_behind"].clone()
    }
}

impl Lifeline {
    /// Waits until nothing is left that could write to it.
    #[track_caller]
    pub fn wait_cut(&mut self, what: &str) {
        wait_until(what, PATIENCE, || {
            matches!(self.0.read(&mut [0; 64]), Ok(0))
        });
    }
}

/// Runs checks on a dedicated machine and in a sandbox.
macro_rules! in_both_modes {
    ($($check:ident),* $(,)?) => {
        mod dedicated {
            $(#[test] fn $check() {
                let server = $crate::fixture::Server::start();
                let directory = $crate::fixture::TempDir::new();
                super::$check(&$crate::processes::place::Place::machine(&server, &directory));
            })*
        }
        mod host {
            $(#[test] fn $check() {
                if !$crate::fixture::is_root() {
                    $crate::skip!("needs root: every sandbox has a user of its own");
                }
                let server = $crate::fixture::Server::host().start();
                let sandbox = server.sandbox();
                super::$check(&$crate::processes::place::Place {
                    server: &server,
                    prefix: sandbox.target(""),
                    directory: sandbox.home.clone(),
                });
            })*
        }
    };
}

pub(super) use in_both_modes;
