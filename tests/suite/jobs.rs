//! The whole path, as users of the `huggingface_hub` client go it: the Jobs API, the client's own
//! bootstrap command as process 1 of a machine, the download, the proxy with TLS, and back.
//!
//! What is checked is in `tests/client/jobs_client.py`; the machines are namespaces of this one
//! (`machines.py`). Some of it takes time, because clients look every two seconds and idle machines
//! wait: the default suite has what is quick.

use crate::client::run_client;

const JOBS: &str = "jobs_client.py";

/// Parts of the names of checks that are over in a second or two.
const QUICK: &[&str] = &[
    "create_to_kill",
    "digest",
    "pooled_sandbox_is_reached",
    "never_packs_more",
];

#[test]
fn jobs_of_huggingface_hub_1_22_work_from_end_to_end() {
    run_client("1.22.0", JOBS, QUICK);
}

#[test]
fn jobs_of_huggingface_hub_2_4_work_from_end_to_end() {
    run_client("2.4.0", JOBS, QUICK);
}

#[test]
#[ignore = "takes half a minute"]
fn everything_about_jobs_of_huggingface_hub_1_22() {
    run_client("1.22.0", JOBS, &[]);
}

#[test]
#[ignore = "takes half a minute"]
fn everything_about_jobs_of_huggingface_hub_2_4() {
    run_client("2.4.0", JOBS, &[]);
}
