//! The virtual environment of a workspace: made once, and there for everything that starts afterwards.

use std::thread;

use serde_json::{Value, json};

use super::{PATH, Place, everywhere};
use crate::fixture::{Outcome, PATIENCE, Server, TempDir, assert_error, is_root, wait_until};
use crate::programs::python::WHEEL;
use crate::skip;

/// Ends the test where no virtual environment can be made.
macro_rules! needs_venv {
    ($place:expr) => {
        if !$place.has("python3") || !$place.can("python3 -c 'import venv'") {
            skip!("there is no python3 with venv");
        }
    };
}

impl Place<'_> {
    fn can(&self, command: &str) -> bool {
        self.exec(&json!({ "cmd": command })).code() == Some(0)
    }

    #[track_caller]
    fn make(&self, body: &Value) -> Value {
        let reply = self.post("venv", body);
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()
    }

    fn sh(&self, command: &str) -> String {
        self.output(&json!({ "cmd": command }))
    }

    /// A path below the directory, as commands see it.
    fn path(&self, below: &str) -> String {
        self.directory.join(below).to_str().unwrap().to_owned()
    }
}

#[test]
fn what_is_installed_is_there_for_commands_and_scripts() {
    everywhere(|place| {
        needs_venv!(place);
        assert_error(&place.get("venv"), 404, "not_found");
        let path = place.path(".sbx/venv");
        let described = |created: bool| json!({ "path": path, "python": format!("{path}/bin/python"), "created": created });
        assert_eq!(place.make(&json!({})), described(true));
        assert_eq!(place.make(&json!({ "path": null })), described(false));
        assert_eq!(
            place.make(&json!({ "path": ".sbx//./venv/" })),
            described(false)
        );
        assert_eq!(place.make(&json!({ "path": path })), described(false));
        assert_eq!(place.get("venv").json(), described(false));

        let shown = place.sh(
            "echo $VIRTUAL_ENV; for name in python3 python pip pip3; do command -v $name; done",
        );
        let expected = ["", "/bin/python3", "/bin/python", "/bin/pip", "/bin/pip3"];
        let expected = expected.map(|below| format!("{path}{below}\n"));
        assert_eq!(shown, expected.concat());
        let prefix = "import sys; print(sys.prefix)";
        assert_eq!(place.run("python", prefix), format!("{path}\n"));

        // The machine's pip installs into it. Not every machine has one.
        let mut environment = json!({});
        if !place.can("pip --version") {
            if !place.can("python3 -m venv helper") {
                skip!("python3 has no pip and cannot make one");
            }
            let packages = place.sh("echo $PWD/helper/lib/python3*/site-packages");
            environment = json!({ "PYTHONPATH": packages.trim_end() });
        }
        place.run("python", WHEEL);
        let install = "pip install --quiet --disable-pip-version-check --no-index ./greeting-1.0-py3-none-any.whl";
        place.output(&json!({ "cmd": install, "env": environment }));
        let module = "import greeting; greeting.main()";
        for shown in [
            place.sh("greeting"),
            place.output(&json!({ "cmd": ["python3", "-c", module] })),
            place.run("python", module),
            place.sh("cd / && exec greeting"),
        ] {
            let installed = format!("hello from {path}/lib/python3");
            assert!(shown.starts_with(&installed), "{shown}");
        }
        // It has the packages of the machine, too.
        assert_eq!(
            place.sh("grep include-system $VIRTUAL_ENV/pyvenv.cfg"),
            "include-system-site-packages = true\n"
        );
    });
}

#[test]
fn a_commands_own_environment_comes_first() {
    everywhere(|place| {
        needs_venv!(place);
        let before = place.sh("echo $PATH");
        let path = place.path("env");
        // Files of the workspace are not taken for Python's modules.
        place.sh("for name in venv shlex subprocess; do echo 1/0 > $name.py; done");
        assert_eq!(place.make(&json!({ "path": "env" }))["path"], *path);
        let shown = |environment: Value| {
            place.output(&json!({ "cmd": "echo $PATH,$VIRTUAL_ENV", "env": environment }))
        };
        assert_eq!(
            shown(json!({})),
            format!("{path}/bin:{},{path}\n", before.trim_end())
        );
        assert_eq!(shown(json!({ "PATH": PATH })), format!("{PATH},{path}\n"));
        let without = shown(json!({ "VIRTUAL_ENV": null }));
        assert!(without.ends_with(",\n"), "{without}");
    });
}

#[test]
fn it_comes_before_the_path_of_a_sandbox() {
    if !is_root() {
        skip!("only root can be a host");
    }
    let server = Server::host().env("PATH", PATH).start();
    let chosen = json!({ "env": { "PATH": PATH, "VIRTUAL_ENV": "/none" } });
    let sandbox = server.sandbox_with(&chosen);
    if sandbox
        .exec(&json!({ "cmd": "python3 -c 'import venv'" }))
        .code()
        != Some(0)
    {
        skip!("there is no python3 with venv");
    }
    // Without a body.
    let reply = sandbox.request("POST", "venv", b"");
    assert_eq!(reply.status, 200, "{}", reply.text());
    let path = format!("{}/.sbx/venv", sandbox.home.display());
    assert_eq!(
        sandbox.sh("echo $PATH,$VIRTUAL_ENV"),
        format!("{path}/bin:{PATH},{path}\n")
    );
    // It is the sandbox's own, and nobody else's.
    assert_eq!(
        sandbox.sh("stat -c %u .sbx/venv/pyvenv.cfg"),
        format!("{}\n", sandbox.uid)
    );
    let other = server.sandbox();
    assert_eq!(other.sh("echo $VIRTUAL_ENV"), "\n");
    assert_error(&other.get("venv"), 404, "not_found");
}

#[test]
fn requests_at_the_same_time_make_it_once() {
    everywhere(|place| {
        needs_venv!(place);
        let created: Vec<bool> = thread::scope(|scope| {
            let make = || place.make(&json!({}))["created"].as_bool().unwrap();
            let all: Vec<_> = (0..4).map(|_| scope.spawn(make)).collect();
            all.into_iter().map(|one| one.join().unwrap()).collect()
        });
        assert_eq!(created.iter().filter(|created| **created).count(), 1);
        let listed = place.get("processes").json();
        let makers = listed.as_array().unwrap().iter();
        assert_eq!(
            makers.filter(|entry| entry.get("code").is_some()).count(),
            1
        );
    });
}

#[test]
fn one_that_is_there_is_taken_and_a_removed_one_is_made_again() {
    everywhere(|place| {
        needs_venv!(place);
        place.sh("python3 -m venv --without-pip own && touch own/mark");
        let path = place.path("own");
        let made = place.make(&json!({ "path": "own" }));
        assert_eq!(
            (&made["created"], &made["path"]),
            (&json!(false), &json!(path))
        );
        assert_eq!(
            place.sh("echo $VIRTUAL_ENV; ls own/mark"),
            format!("{path}\nown/mark\n")
        );
        let reply = place.post("venv", &json!({ "path": "other" }));
        assert_error(&reply, 409, "exists");
        assert!(reply.text().contains(&path), "{}", reply.text());
        assert_eq!(place.make(&json!({}))["path"], *path);

        place.sh("rm -r own");
        assert_error(&place.get("venv"), 404, "not_found");
        let made = place.make(&json!({ "path": "other" }));
        assert_eq!(
            (&made["created"], &made["path"]),
            (&json!(true), &json!(place.path("other")))
        );
        // One that was cut short has no configuration yet.
        place.sh("rm other/pyvenv.cfg");
        assert_eq!(place.make(&json!({ "path": "other" }))["created"], true);
        assert_eq!(
            place.run("python", "import sys; print(sys.prefix)"),
            format!("{}\n", place.path("other"))
        );
    });
}

#[test]
fn what_cannot_be_made_is_refused_with_a_reason() {
    everywhere(|place| {
        for path in [
            json!(1),
            json!(""),
            json!("a:b"),
            json!("a\u{0}"),
            json!([]),
        ] {
            assert_error(
                &place.post("venv", &json!({ "path": path })),
                400,
                "bad_request",
            );
        }
        assert_error(&place.post("venv", &json!([])), 400, "bad_request");
        needs_venv!(place);
        place.sh("touch file");
        let reply = place.post("venv", &json!({ "path": "file/below" }));
        assert_error(&reply, 409, "venv_failed");
        assert!(
            reply.text().contains("NotADirectoryError"),
            "{}",
            reply.text()
        );
        assert_error(&place.get("venv"), 404, "not_found");
        if place.sandbox.is_some() {
            let reply = place.post("venv", &json!({ "path": "../neighbour" }));
            assert_error(&reply, 403, "forbidden");
            place.sh("ln -s /tmp link");
            assert_error(
                &place.post("venv", &json!({ "path": "link/x" })),
                403,
                "forbidden",
            );
            // Below the home, as paths of files are.
            let made = place.make(&json!({ "path": "/tmp/x" }));
            assert_eq!(made["path"], *place.path("tmp/x"));
        }
    });
}

/// A dedicated server in a directory, with a shell script that becomes python3 unless it ends before.
fn with_python(script: &str) -> Option<(Server, TempDir)> {
    let mut all = PATH
        .split(':')
        .map(|directory| format!("{directory}/python3"));
    let real = all.find(|python| std::path::Path::new(python).exists())?;
    let script = format!("#!/bin/sh\n{script}\nexec {real} \"$@\"\n");
    let directory = TempDir::new();
    let python = directory.join("python3");
    std::fs::write(&python, script).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&python, mode).unwrap();
    let builder = Server::builder().env("PATH", format!("{}:{PATH}", directory.path().display()));
    let mut command = builder.command();
    command.current_dir(directory.path());
    Some((builder.start_as(command), directory))
}

#[test]
fn a_machine_without_python_has_none() {
    let server = Server::builder().env("PATH", "/nowhere").start();
    let reply = server.post("/v1/venv", &json!({}));
    assert_error(&reply, 400, "not_found");
    let said = "cannot start python: there is no python3 in PATH";
    assert_eq!(reply.json()["error"], said);
}

#[test]
fn a_client_that_leaves_ends_the_making_and_the_next_one_makes_it() {
    // The first start hangs.
    let hang = "[ -e \"$0.used\" ] || { touch \"$0.used\"; sleep 1000; }";
    let Some((server, directory)) = with_python(hang) else {
        skip!("there is no python3");
    };
    let mut connection = server.connect();
    connection.send_request("POST", "/v1/venv", &[], b"{}");
    let used = directory.path().join("python3.used");
    wait_until("it is being made", PATIENCE, || used.exists());
    drop(connection);
    wait_until("the making ends", PATIENCE, || {
        server.get("/v1/processes").json()[0]["reason"] == "disconnected"
    });
    let reply = server.post("/v1/venv", &json!({}));
    assert_eq!(reply.json()["created"], true, "{}", reply.text());
}

#[test]
fn one_that_takes_long_is_waited_for() {
    let Some((server, _directory)) = with_python("sleep 6") else {
        skip!("there is no python3");
    };
    let reply = server.post("/v1/venv", &json!({}));
    assert_eq!(
        (reply.status, &reply.json()["created"]),
        (200, &json!(true))
    );
    let outcome: Outcome = server.exec(&json!({ "cmd": "echo $VIRTUAL_ENV" }));
    assert!(outcome.stdout.ends_with("/.sbx/venv\n"), "{outcome:?}");
}

#[test]
fn a_place_that_leads_out_of_the_home_is_none() {
    if !is_root() {
        skip!("host mode needs root");
    }
    let server = Server::host().env("PATH", PATH).start();
    let (own, other) = (server.sandbox(), server.sandbox());
    let theirs = other.home.join(".sbx/venv");
    let made = other.post("venv", &json!({}));
    if made.status != 200 {
        skip!("no venv can be made: {}", made.text());
    }
    let before = std::fs::read(theirs.join("pyvenv.cfg")).unwrap();
    own.sh(&format!(
        "mkdir .sbx; ln -s {} .sbx/venv; ln -s / root",
        theirs.display()
    ));
    let way = format!("../{}/.sbx/venv", other.id);
    let below = format!("root{}", theirs.display());
    for path in [
        Value::Null,
        json!(way),
        json!(theirs),
        json!(below),
        json!("root/etc/venv"),
    ] {
        let reply = own.post("venv", &json!({ "path": path }));
        // What a path names is below the home, so a venv may be made there; it is never one of another.
        if reply.status == 200 {
            let python = reply.json()["python"].as_str().unwrap().to_owned();
            assert!(python.starts_with(own.home.to_str().unwrap()), "{python}");
        }
        assert_eq!(std::fs::read(theirs.join("pyvenv.cfg")).unwrap(), before);
    }
    assert!(!std::path::Path::new("/etc/venv").exists());
    let prefix = own.sh("python3 -c 'import sys; print(sys.prefix)'");
    assert!(
        !prefix.starts_with(other.home.to_str().unwrap()),
        "{prefix}"
    );
}
