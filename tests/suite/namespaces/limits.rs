//! What a sandbox with namespaces holds in memory: its directories there count for its limit, and are smaller than that.

use serde_json::json;

use super::{Way, needs_namespaces, sandbox_with};
use crate::fixture::{PATIENCE, Sandbox, wait_until};
use crate::walls::probe::{Plan, Probe};

/// The limit of the sandboxes here, in MiB. A quarter of it fits into each directory.
const LIMIT: u64 = 64;

/// Writes 15 MiB to each directory in memory.
const FILL: &str =
    "head -c 15728640 /dev/zero > /tmp/file; head -c 15728640 /dev/zero > /dev/shm/file";

fn reason(sandbox: &Sandbox<'_>, id: &str) -> serde_json::Value {
    sandbox.get(&format!("processes/{id}")).json()["reason"].clone()
}

#[test]
fn files_in_memory_count() {
    needs_namespaces!();
    for way in Way::BOTH {
        let server = way.builder().start();
        let sandbox = sandbox_with(&server, json!({ "max_total_mem_mb": LIMIT }));
        let probe = Probe::new(&sandbox);
        let alone = probe.command(&[&["hog-memory", "40"]]);
        assert_eq!(sandbox.exec(&alone).exit["reason"], "exited");
        sandbox.sh(FILL);
        let outcome = sandbox.exec(&probe.command(&[&["hog-memory", "40"], &["stay"]]));
        assert_eq!(outcome.exit["reason"], "memory_limit", "{outcome:?}");
        // What is left of them leaves room to go on.
        assert_eq!(
            sandbox.sh("du -m /tmp/file /dev/shm/file | cut -f 1"),
            "15\n15\n"
        );
        let full = sandbox.exec(&json!({ "cmd": "head -c 20000000 /dev/zero > /tmp/more" }));
        assert_ne!(full.code(), Some(0));
        assert!(full.stderr.contains("No space left"), "{full:?}");
    }
}

#[test]
fn a_mapped_file_in_memory_counts_once() {
    needs_namespaces!();
    let server = Way::Capabilities.builder().start();
    let sandbox = sandbox_with(&server, json!({ "max_total_mem_mb": LIMIT }));
    sandbox.sh(FILL);
    // Together less than the limit, and more if the mapping and the file counted both.
    let code = "import mmap, time
f = open('/dev/shm/file', 'r+b'); m = mmap.mmap(f.fileno(), 0); m[:] = b'x' * len(m)
hog = bytearray(15 << 20)
open('ready', 'w').close()
time.sleep(1000)";
    let process = sandbox.spawn(&json!({ "cmd": ["python3", "-c", code] }));
    let id = process["id"].as_str().unwrap();
    let used = || {
        let metrics = server.get("/v1/metrics").text();
        let line = metrics
            .lines()
            .find(|line| line.starts_with("sbx_sandbox_memory_limit_used_bytes{"));
        line.and_then(|line| line.rsplit(' ').next()?.parse::<u64>().ok())
            .unwrap_or(0)
    };
    let mut seen = 0;
    wait_until("its memory was measured three times", PATIENCE, || {
        assert_eq!(reason(&sandbox, id), json!(null));
        seen += u32::from((45..LIMIT).contains(&(used() >> 20)));
        std::thread::sleep(std::time::Duration::from_millis(500));
        seen >= 3
    });
}

#[test]
fn shared_memory_of_system_v_has_a_limit() {
    needs_namespaces!();
    for way in Way::BOTH {
        let server = way.builder().start();
        let sandbox = sandbox_with(&server, json!({ "max_total_mem_mb": LIMIT }));
        let probe = Probe::new(&sandbox);
        let (call, create) = (
            libc::SYS_shmget.to_string(),
            (libc::IPC_CREAT | 0o600).to_string(),
        );
        let mut plan = Plan::default();
        for (megabytes, expected) in [(17, "ENOSPC"), (8, "ok"), (9, "ENOSPC"), (7, "ok")] {
            let bytes = (megabytes << 20).to_string();
            plan.add(&["syscall", &call, "0", &bytes, &create], expected);
        }
        probe.check(&plan);
    }
}

/// Its objects take memory of the kernel that no limit of processes counts.
#[test]
fn semaphores_and_queues_of_system_v_are_few() {
    needs_namespaces!();
    for way in Way::BOTH {
        let server = way.builder().start();
        let sandbox = sandbox_with(&server, json!({}));
        let probe = Probe::new(&sandbox);
        let create = (libc::IPC_CREAT | 0o600).to_string();
        let (queue, set) = (libc::SYS_msgget.to_string(), libc::SYS_semget.to_string());
        let mut plan = Plan::default();
        for _ in 0..16 {
            plan.add(&["syscall", &queue, "0", &create], "ok");
        }
        plan.add(&["syscall", &queue, "0", &create], "ENOSPC");
        plan.add(&["syscall", &set, "0", "251", &create], "EINVAL");
        for _ in 0..128 {
            plan.add(&["syscall", &set, "0", "250", &create], "ok");
        }
        plan.add(&["syscall", &set, "0", "1", &create], "ENOSPC");
        probe.check(&plan);
    }
}
