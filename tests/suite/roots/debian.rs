//! A Debian in a root of the sandbox's own, and what people do on a machine of theirs: packages with users and services,
//! accounts, databases, servers. Everything comes from Debian's archive and the registries of Python and Node.js.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;

use super::{Root, root_with};
use crate::fixture::{PATIENCE, Server, events_of, is_root, output_of, wait_until};
use crate::skip;

/// Seconds that a step may take: many wait for a network.
const STEP: u32 = 600;

/// The tree that `debootstrap` makes, or why there is none. It is kept between runs.
fn tree() -> Result<PathBuf, String> {
    let tree = Path::new(env!("CARGO_TARGET_TMPDIR")).join("debian");
    if tree.exists() {
        return Ok(tree);
    }
    let part = tree.with_extension("part");
    let _ = fs::remove_dir_all(&part);
    let mut command = Command::new("debootstrap");
    command.args(["--variant=minbase", "bookworm"]).arg(&part);
    let made = command
        .output()
        .map_err(|error| format!("debootstrap: {error}"))?;
    if !made.status.success() {
        return Err(format!(
            "debootstrap: {}",
            String::from_utf8_lossy(&made.stdout)
        ));
    }
    fs::rename(&part, &tree).map_err(|error| error.to_string())?;
    Ok(tree)
}

/// What a step prints at its end; it must succeed.
#[track_caller]
fn step(sandbox: &Root<'_>, user: &str, command: &str) -> String {
    let command = format!("set -e\n{command}");
    let body = json!({ "cmd": ["bash", "-c", command], "user": user, "timeout": STEP });
    let outcome = sandbox.exec(&body);
    assert_eq!(outcome.code(), Some(0), "{command}: {outcome:?}");
    outcome.stdout
}

#[test]
#[ignore = "installs packages from Debian's archive: docs/testing.md"]
fn a_debian_is_a_machine() {
    if !is_root() {
        skip!("needs root");
    }
    let tree = match tree() {
        Ok(tree) => tree,
        Err(why) => skip!("{why}"),
    };
    let server = Server::host()
        .env("SBX_TEMPLATES", format!("debian={}", tree.display()))
        .start();
    if let Some(why) = super::lack(&server) {
        skip!("{why}");
    }
    let sandbox = root_with(&server, json!({ "template": "debian", "network": "open" }));
    let root = |command: &str| step(&sandbox, "root", command);

    root("apt-get update -q");
    root(
        "export DEBIAN_FRONTEND=noninteractive
         apt-get install -qy --no-install-recommends ca-certificates git npm postgresql procps python3-pip python3-venv sudo",
    );
    // Whom this machine trusts: on the way to registries there may be a proxy with a certificate of its own.
    let trusted = fs::read("/etc/ssl/certs/ca-certificates.crt").unwrap();
    let path = "files/write?path=/etc/ssl/certs/ca-certificates.crt";
    assert_eq!(sandbox.put(path, &trusted).status, 200);
    root("npm config set -g cafile /etc/ssl/certs/ca-certificates.crt");
    // The package made the user of its service.
    assert_eq!(
        root("id -un postgres; stat -c %U /var/lib/postgresql"),
        "postgres\npostgres\n"
    );

    root(
        "useradd -m -s /bin/bash worker && echo 'worker ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/worker",
    );
    assert_eq!(
        root("su worker -c 'id -un; cd; pwd'"),
        "worker\n/home/worker\n"
    );
    assert_eq!(
        step(&sandbox, "worker", "id -un; sudo id -un"),
        "worker\nroot\n"
    );
    root("echo worker:secret | chpasswd && passwd -S worker");

    root("pip install -q --break-system-packages six==1.17.0");
    assert_eq!(
        root("python3 -c 'import six; print(six.__version__)'"),
        "1.17.0\n"
    );
    root("npm install -g --silent semver@7.7.3");
    assert_eq!(root("semver 1.2.3"), "1.2.3\n");

    let cloned = step(
        &sandbox,
        "worker",
        "mkdir /tmp/work && cd /tmp/work && git init -q origin && cd origin && echo text > file && git add file
         git -c user.name=n -c user.email=e@x commit -qm first
         cd .. && git clone -q origin copy && cat copy/file && git -C copy log --format=%s",
    );
    assert_eq!(cloned, "text\nfirst\n");

    let answer = step(
        &sandbox,
        "postgres",
        "bin=$(echo /usr/lib/postgresql/*/bin)
         $bin/initdb -D /tmp/data > /dev/null
         $bin/pg_ctl -D /tmp/data -l /tmp/log -w start > /dev/null
         psql -h localhost -tAc 'select 6 * 7' postgres
         $bin/pg_ctl -D /tmp/data -m fast stop > /dev/null",
    );
    assert_eq!(answer, "42\n");

    root("mkdir /www && echo served > /www/page");
    sandbox
        .spawn(&json!({ "cmd": "exec python3 -m http.server 80", "cwd": "/www", "user": "root" }));
    let waited = sandbox.get("ports/80/wait?timeout=20");
    assert_eq!(waited.json()["listening"], true, "{}", waited.text());
    let page = sandbox.get("proxy/80/page");
    assert_eq!((page.status, &*page.text()), (200, "served\n"));

    let environment = json!({ "TERM": "xterm" });
    let top =
        sandbox.spawn(&json!({ "cmd": ["top"], "pty": true, "env": environment, "user": "root" }));
    let id = top["id"].as_str().unwrap();
    wait_until("top shows processes", PATIENCE, || {
        let logs = sandbox.get(&format!("processes/{id}/logs?encoding=base64"));
        let shown = output_of(&events_of(&logs.body), "stdout", 0).data;
        let shown = String::from_utf8_lossy(&shown).into_owned();
        shown.contains("COMMAND") && shown.contains("python3")
    });

    let context = json!({ "language": "python", "id": "own", "user": "worker" });
    let made = sandbox.post("contexts", &context);
    assert_eq!(made.status, 200, "{}", made.text());
    let code = "import getpass, sys; print(getpass.getuser(), sys.version_info.major)";
    let reply = sandbox.post("execute", &json!({ "code": code, "context": "own" }));
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(
        output_of(&events_of(&reply.body), "stdout", 0).data,
        b"worker 3\n"
    );
    sandbox.delete();
}
