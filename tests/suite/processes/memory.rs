//! Memory: all logs together stay within their limits, and finished processes cost little.

use serde_json::{Value, json};

use super::{listed, logs, stdout_of, wait};
use crate::fixture::{
    Mark, PATIENCE, Server, TempDir, memory_of, numbered_text, output_of, wait_until,
};

const RING: u64 = 1 << 20;
const TOTAL: u64 = 4 << 20;

/// A server that keeps [`RING`] bytes of a process's output and [`TOTAL`] of all.
fn with_small_logs() -> Server {
    Server::builder()
        .env("SBX_LOG_BYTES", RING)
        .env("SBX_LOG_TOTAL_BYTES", TOTAL)
        .start()
}

#[test]
fn all_logs_together_are_bounded_and_the_longest_finished_go_first() {
    let server = with_small_logs();
    let directory = TempDir::new();
    let text = numbered_text(900 << 10);
    std::fs::write(directory.path().join("text"), &text).unwrap();
    let processes: Vec<Value> = (0..12)
        .map(|_| {
            let process = server.spawn(&json!({"cmd": ["cat", directory.join("text")]}));
            wait(&server, &process);
            process
        })
        .collect();
    let mut kept = 0;
    let mut sizes = Vec::new();
    for process in &processes {
        let events = logs(&server, process, "");
        let output = output_of(&events, "stdout", 0);
        assert_eq!(
            output.end,
            text.len() as u64,
            "what is gone is said: {:?}",
            events[0]
        );
        assert!(text.as_bytes().ends_with(&output.data));
        assert_eq!(events.last().unwrap()["exit_code"], 0);
        kept += output.data.len() as u64;
        sizes.push(output.data.len());
    }
    assert!(kept <= TOTAL, "{kept} bytes are kept of at most {TOTAL}");
    assert!(
        kept >= TOTAL / 2,
        "only {kept} bytes are kept of {TOTAL}: {sizes:?}"
    );
    assert_eq!(sizes[11], text.len(), "the newest is whole: {sizes:?}");
    assert!(sizes.is_sorted(), "the oldest go first: {sizes:?}");
    assert_eq!(sizes[0], 0, "{sizes:?}");
}

#[test]
fn running_processes_are_within_the_bound_too() {
    let server = with_small_logs();
    let mark = Mark::new();
    let processes: Vec<Value> = (0..12)
        .map(|_| {
            let script = format!("yes text | tr -d '\\n' | head -c 1000000; exec sleep {mark}");
            server.spawn(&json!({"cmd": script}))
        })
        .collect();
    wait_until("all have written", PATIENCE, || {
        processes
            .iter()
            .all(|process| server.entry(&process["id"])["stdout_bytes"] == 1_000_000)
    });
    let kept: u64 = processes
        .iter()
        .map(|process| stdout_of(&server, process).data.len() as u64)
        .sum();
    assert!(kept <= TOTAL, "{kept} bytes are kept of at most {TOTAL}");
    assert!(kept >= TOTAL / 2, "only {kept} bytes are kept of {TOTAL}");
    for process in &processes {
        assert_eq!(
            stdout_of(&server, process).end,
            1_000_000,
            "the rest is said to be lost"
        );
    }
}

#[test]
fn the_memory_behind_the_logs_is_bounded() {
    const MIB: u64 = 1 << 20;
    let server = Server::builder()
        .env("SBX_LOG_BYTES", 8 * MIB)
        .env("SBX_LOG_TOTAL_BYTES", 32 * MIB)
        .start();
    let before = memory_of(server.pid(), "VmRSS");
    for _ in 0..10 {
        // 160 MiB in all; four at a time, so that some run while others are forgotten.
        let batch: Vec<Value> = (0..4)
            .map(|_| server.spawn(&json!({"cmd": ["head", "-c", "8388608", "/dev/zero"]})))
            .collect();
        for process in &batch {
            wait(&server, process);
        }
    }
    let peak = memory_of(server.pid(), "VmHWM").saturating_sub(before);
    assert!(
        peak < 56 * MIB,
        "the server grew by {} MiB for at most 32 MiB of logs",
        peak / MIB
    );
    for id in listed(&server) {
        server.delete(&format!("/v1/processes/{id}"));
    }
    let after = memory_of(server.pid(), "VmRSS") - before.min(memory_of(server.pid(), "VmRSS"));
    assert!(
        after < 16 * MIB,
        "{} MiB are left when all logs are deleted",
        after / MIB
    );
}

#[test]
fn small_processes_cost_little() {
    let server = Server::start();
    for _ in 0..20 {
        server.exec(&json!({"cmd": "echo hi"}));
    }
    let before = memory_of(server.pid(), "VmRSS");
    for _ in 0..200 {
        server.exec(&json!({"cmd": "echo hi"}));
    }
    let grown = memory_of(server.pid(), "VmRSS").saturating_sub(before);
    assert!(
        grown < 8 << 20,
        "200 remembered commands of three bytes cost {grown} bytes"
    );
}
