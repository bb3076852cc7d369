//! The promise of what `scripts/release` makes: it is what the manifest says, the script beside it
//! finds it, and the aarch64 program does its work.
//!
//! `scripts/release --check` runs these tests with the directory in `SBX_TEST_RELEASE`; elsewhere
//! they are ignored. The aarch64 program runs under qemu's user emulation, whose kernel is this
//! machine's. What that cannot do is not tested here and said so by the test: the same suite in an
//! emulated machine, with a kernel of its own, is `scripts/release --emulate`.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use serde_json::{Value, json};

use crate::bootstrap::{SCRIPT, find};
use crate::fixture::{Bucket, Builder, Mark, PATIENCE, Server, TempDir, sha256, wait_until};
use crate::skip;

const AARCH64: &str = "aarch64-unknown-linux-musl";

fn release() -> PathBuf {
    std::env::var_os("SBX_TEST_RELEASE")
        .expect("SBX_TEST_RELEASE is not set: run scripts/release --check")
        .into()
}

fn manifest() -> Value {
    let text = fs::read(release().join("manifest.json")).unwrap();
    serde_json::from_slice(&text).unwrap()
}

/// The path of the program for a target.
fn program(target: &str) -> String {
    let manifest = manifest();
    let files = manifest["files"].as_array().unwrap();
    let entry = files
        .iter()
        .find(|entry| entry["target"] == target)
        .unwrap();
    let path = release().join(entry["file"].as_str().unwrap());
    path.to_str().unwrap().to_owned()
}

/// The aarch64 server under user emulation, wrapped in further words.
fn emulated(wrapper: &[&str]) -> Builder {
    // The builder's own program comes after these words, as `$0` of the shell.
    let start = format!("exec qemu-aarch64 {}", program(AARCH64));
    let words = [wrapper, &["/bin/sh", "-c", &start]].concat();
    Server::builder().wrapped_in(&words)
}

/// Whether the emulation can start commands. Old ones refuse `clone` with a pidfd.
fn starts_commands(server: &Server) -> bool {
    let reply = server.post("/v1/exec", &json!({"cmd": ["true"]}));
    if reply.status == 200 {
        return true;
    }
    assert_eq!(reply.status, 500, "{}", reply.text());
    assert!(
        reply.text().contains("(EINVAL) while preparing it (Clone)"),
        "not what is known of the emulation: {}",
        reply.text()
    );
    false
}

#[test]
#[ignore = "needs a release: scripts/release --check"]
fn the_manifest_describes_the_files() {
    let manifest = manifest();
    assert_eq!(manifest["version"], env!("CARGO_PKG_VERSION"));
    let files = manifest["files"].as_array().unwrap();
    assert_eq!(files.len(), 2);
    let mut names = vec!["bootstrap.sh".to_owned(), "manifest.json".to_owned()];
    for (entry, (target, machine)) in files
        .iter()
        .zip([("x86_64-unknown-linux-musl", 62), (AARCH64, 183)])
    {
        assert_eq!(entry["target"], target);
        let name = entry["file"].as_str().unwrap();
        let bytes = fs::read(release().join(name)).unwrap();
        assert_eq!(entry["size"], bytes.len());
        assert_eq!(entry["sha256"], sha256(&bytes));
        assert_eq!(name, format!("sbx-server-{}", sha256(&bytes)));
        // ELF, 64 bits, for that machine.
        assert_eq!(&bytes[..5], b"\x7fELF\x02");
        assert_eq!(bytes[18], machine);
        names.push(name.to_owned());
    }
    let mut there: Vec<String> = fs::read_dir(release())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    there.sort();
    assert_eq!(there, names);
}

#[test]
#[ignore = "needs a release: scripts/release --check"]
fn the_script_beside_the_programs_finds_the_one_for_this_machine() {
    let target = format!("{}-unknown-linux-musl", std::env::consts::ARCH);
    let bucket = Bucket::start();
    for name in [program("x86_64-unknown-linux-musl"), program(AARCH64)] {
        let path = format!("/{}", name.rsplit('/').next().unwrap());
        bucket.put(&path, &fs::read(name).unwrap());
    }
    let digest = |target: &str| sha256(&fs::read(program(target)).unwrap());
    let script = release().join("bootstrap.sh");
    let same = fs::read(&script).unwrap() == fs::read(SCRIPT).unwrap();
    assert!(same, "the release is not of these sources");
    let place = TempDir::new();
    let output = Command::new("/bin/sh")
        .arg(script)
        .arg("--version")
        .env("TMPDIR", place.path())
        .env("SBX_SERVER_URL", bucket.url("/sbx-server-{sha256}"))
        .env("SBX_SERVER_SHA256", digest("x86_64-unknown-linux-musl"))
        .env("SBX_SERVER_SHA256_AARCH64", digest(AARCH64))
        .output()
        .unwrap();
    let version = format!("sbx-server {}\n", env!("CARGO_PKG_VERSION"));
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        version,
        "{output:?}"
    );
    let asked = &bucket.requests()[0].path;
    assert_eq!(*asked, format!("/sbx-server-{}", digest(&target)));
}

#[test]
#[ignore = "needs a release: scripts/release --check"]
fn the_aarch64_program_serves_files_and_ends_cleanly() {
    if find("qemu-aarch64").is_none() {
        skip!("qemu-aarch64 is missing (Debian: apt-get install qemu-user)");
    }
    let mut server = emulated(&[]).start();
    assert_eq!(server.get("/health").json()["protocol"], 3);
    let directory = TempDir::new();
    let path = directory.join("a/file");
    let bytes: Vec<u8> = (0..=255).cycle().take(3 << 20).collect();
    let target = format!("/v1/files/write?path={path}&mode=640");
    assert_eq!(server.put(&target, &bytes).status, 200);
    assert!(server.get(&format!("/v1/files/read?path={path}")).body == bytes);
    let part = server.get(&format!("/v1/files/read?path={path}&offset=255&length=2"));
    assert_eq!(part.body, [255, 0]);
    let listed = server.get(&format!("/v1/files/list?path={}", directory.join("a")));
    assert_eq!(listed.json()["entries"][0]["mode"], "640");
    let moved = format!("/v1/files/move?from={path}&to={}", directory.join("b"));
    assert_eq!(server.request("POST", &moved, b"").status, 200);
    assert_eq!(
        server.get(&format!("/v1/files/stat?path={path}")).status,
        404
    );
    server.signal(libc::SIGTERM);
    assert!(server.wait_for_exit(PATIENCE).success());
}

#[test]
#[ignore = "needs a release: scripts/release --check"]
fn the_aarch64_program_runs_commands_in_foreground_and_background() {
    if find("qemu-aarch64").is_none() {
        skip!("qemu-aarch64 is missing (Debian: apt-get install qemu-user)");
    }
    let mut server = emulated(&[]).start();
    if !starts_commands(&server) {
        // No failure in CI either: it is the emulation that cannot, and the emulated machine does.
        eprintln!("NOT TESTED: this qemu-aarch64 knows no CLONE_PIDFD");
        return;
    }
    let outcome = server.exec(&json!({"cmd": "echo out; echo err >&2; exit 3"}));
    assert_eq!(
        (outcome.stdout.as_str(), outcome.stderr.as_str()),
        ("out\n", "err\n")
    );
    assert_eq!(outcome.code(), Some(3));
    let outcome = server.exec(&json!({"cmd": "sleep 60", "timeout": 0.3}));
    assert_eq!(outcome.exit["reason"], "timeout");
    let mark = Mark::new();
    let process = server.spawn(&json!({"cmd": format!("sleep {mark}")}));
    mark.wait_for(1);
    let id = process["id"].as_str().unwrap();
    assert_eq!(
        server.delete(&format!("/v1/processes/{id}")).json()["killed"],
        true
    );
    mark.wait_gone(PATIENCE);
    server.spawn(&json!({"cmd": format!("sleep {mark}")}));
    mark.wait_for(1);
    server.signal(libc::SIGTERM);
    assert!(server.wait_for_exit(PATIENCE).success());
    mark.wait_gone(PATIENCE);
}

#[test]
#[ignore = "needs a release: scripts/release --check"]
fn the_aarch64_program_splits_when_it_is_the_first_process() {
    if find("qemu-aarch64").is_none() {
        skip!("qemu-aarch64 is missing (Debian: apt-get install qemu-user)");
    }
    if !crate::fixture::has_namespaces() {
        skip!("needs a pid namespace");
    }
    let server = emulated(&crate::fixture::NAMESPACE).start();
    assert_eq!(server.get("/health").status, 200);
    // unshare, init, server.
    let below = || crate::fixture::descendants_of(server.pid());
    assert_eq!(below().len(), 2, "{:?}", below());
    let init = below().into_iter().find(|each| each.parent == server.pid());
    let init = nix::unistd::Pid::from_raw(init.unwrap().pid);
    nix::sys::signal::kill(init, nix::sys::signal::Signal::SIGTERM).unwrap();
    wait_until("both have ended", PATIENCE, || {
        below().iter().all(|process| process.state == 'Z')
    });
}
