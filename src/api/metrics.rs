//! `GET /v1/metrics`: what the server has done and what everything takes, for whoever operates it.
//!
//! The figures are gathered into one document, which is JSON for those who ask for it and
//! Prometheus' text format (version 0.0.4) for everybody else. Looking costs a walk through /proc,
//! and with `disk=1` one through every home, only when somebody looks.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::query::Query;
use super::route::Resource;
use super::{Answer, Api};
use crate::http::{Body, Request, Response};
use crate::proc;

/// The statuses that requests are counted by; others are one more.
const STATUSES: [u16; 20] = [
    200, 204, 206, 400, 403, 404, 405, 408, 409, 411, 413, 416, 417, 431, 500, 501, 502, 503, 504,
    507,
];

/// How long homes are walked through for one answer; those that are left are left out.
const DISK_LIMIT: Duration = Duration::from_secs(10);

/// How many requests there were, by what they asked for and how they were answered.
pub(super) struct RequestCounts([[AtomicU64; STATUSES.len() + 1]; Resource::NAMES.len() + 1]);

impl RequestCounts {
    pub(super) fn new() -> Self {
        Self(std::array::from_fn(|_| {
            std::array::from_fn(|_| AtomicU64::new(0))
        }))
    }

    /// Counts one, for something that is there or not.
    pub(super) fn count(&self, resource: Option<Resource<'_>>, status: u16) {
        let row = resource
            .and_then(|resource| {
                let name = resource.name();
                Resource::NAMES.iter().position(|other| *other == name)
            })
            .unwrap_or(Resource::NAMES.len());
        let column = STATUSES
            .iter()
            .position(|other| *other == status)
            .unwrap_or(STATUSES.len());
        self.0[row][column].fetch_add(1, Ordering::Relaxed);
    }

    fn all(&self) -> Vec<RequestCount> {
        let mut counts = Vec::new();
        let routes = Resource::NAMES.into_iter().chain(["none"]);
        for (route, row) in routes.zip(&self.0) {
            let statuses = STATUSES.into_iter().map(Some).chain([None]);
            for (status, count) in statuses.zip(row) {
                let count = count.load(Ordering::Relaxed);
                if count > 0 {
                    counts.push(RequestCount {
                        route,
                        status,
                        count,
                    });
                }
            }
        }
        counts
    }
}

#[derive(Serialize)]
struct RequestCount {
    route: &'static str,
    /// None for a rare one.
    status: Option<u16>,
    count: u64,
}

#[derive(Serialize)]
struct Document {
    version: &'static str,
    mode: &'static str,
    uptime_seconds: f64,
    connections: usize,
    processes_running: usize,
    log_bytes: usize,
    sandboxes: usize,
    requests: Vec<RequestCount>,
    machine: MachineDocument,
    per_sandbox: Vec<SandboxUse>,
}

#[derive(Serialize)]
struct MachineDocument {
    cpu_seconds: Option<f64>,
    memory_used_bytes: Option<u64>,
    memory_bytes: Option<u64>,
    disk_used_bytes: Option<u64>,
    disk_bytes: Option<u64>,
}

#[derive(Serialize)]
struct SandboxUse {
    id: String,
    processes: u64,
    cpu_seconds: f64,
    memory_bytes: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    disk_bytes: Option<u64>,
}

/// Answers with the figures of now.
pub(super) fn answer(api: &Api, request: &Request<'_>, query: &Query) -> Answer {
    let with_disk = query.flag("disk")?;
    let document = gather(api, with_disk);
    if wants_json(request) {
        return Ok(Response::json(&document));
    }
    let body = Body::Bytes(text(&document).into_bytes());
    Ok(Response::new(200, body).with_header("Content-Type", "text/plain; version=0.0.4"))
}

fn wants_json(request: &Request<'_>) -> bool {
    request.head.values("accept").any(|accepted| {
        accepted
            .to_ascii_lowercase()
            .windows(16)
            .any(|window| window == b"application/json")
    })
}

fn gather(api: &Api, with_disk: bool) -> Document {
    let machine = &api.machine;
    let disk = machine.disk();
    let use_of_all = proc::machine_use();
    let users = proc::use_by_user();
    let enough = Instant::now() + DISK_LIMIT;
    let mut per_sandbox = Vec::new();
    if let Ok(host) = machine.host() {
        for sandbox in host.list() {
            let taken = users.get(&sandbox.user().uid).copied().unwrap_or_default();
            per_sandbox.push(SandboxUse {
                id: sandbox.id().to_owned(),
                processes: taken.processes,
                cpu_seconds: taken.cpu_seconds,
                memory_bytes: taken.memory_bytes,
                // One that ends meanwhile has none, nor has one that its owner has closed.
                disk_bytes: (with_disk && Instant::now() < enough)
                    .then(|| sandbox.disk_bytes().ok())
                    .flatten()
                    .flatten(),
            });
        }
    }
    Document {
        version: env!("CARGO_PKG_VERSION"),
        mode: machine.mode(),
        uptime_seconds: machine.uptime().as_secs_f64(),
        connections: api.connections.count(),
        processes_running: machine.processes_running(),
        log_bytes: machine.log_bytes(),
        sandboxes: machine.sandboxes(),
        requests: api.requests.all(),
        machine: MachineDocument {
            cpu_seconds: use_of_all.cpu_seconds,
            memory_used_bytes: use_of_all.memory_used_bytes,
            memory_bytes: use_of_all.memory_bytes,
            disk_used_bytes: disk.map(|disk| disk.used_bytes),
            disk_bytes: disk.map(|disk| disk.bytes),
        },
        per_sandbox,
    }
}

/// Prometheus' text format: for each figure what it is, then its values.
fn text(document: &Document) -> String {
    let mut text = Text(String::new());
    text.figure(
        "uptime_seconds",
        "gauge",
        "Seconds since the start.",
        [(String::new(), Some(document.uptime_seconds))],
    );
    let whole = |value: Option<u64>| value.map(float);
    let count = |value: usize| Some(float(value as u64));
    for (name, help, value) in [
        (
            "connections",
            "Connections that are open.",
            count(document.connections),
        ),
        (
            "processes_running",
            "Commands that run, in the foreground or background.",
            count(document.processes_running),
        ),
        (
            "log_bytes",
            "Bytes of output that are kept.",
            count(document.log_bytes),
        ),
        (
            "sandboxes",
            "Sandboxes that there are.",
            count(document.sandboxes),
        ),
        (
            "machine_memory_used_bytes",
            "Memory in use, of the container or the machine.",
            whole(document.machine.memory_used_bytes),
        ),
        (
            "machine_memory_bytes",
            "Memory that there is.",
            whole(document.machine.memory_bytes),
        ),
        (
            "machine_disk_used_bytes",
            "Disk space in use where files are written.",
            whole(document.machine.disk_used_bytes),
        ),
        (
            "machine_disk_bytes",
            "Disk space that there is.",
            whole(document.machine.disk_bytes),
        ),
    ] {
        text.figure(name, "gauge", help, [(String::new(), value)]);
    }
    text.figure(
        "machine_cpu_seconds_total",
        "counter",
        "Processor time used, of the container or the machine.",
        [(String::new(), document.machine.cpu_seconds)],
    );
    text.requests(&document.requests);
    text.sandboxes(&document.per_sandbox);
    text.0
}

/// Prometheus knows only these.
#[allow(clippy::cast_precision_loss, reason = "of counts beyond 2^52")]
fn float(whole: u64) -> f64 {
    whole as f64
}

struct Text(String);

impl Text {
    fn requests(&mut self, requests: &[RequestCount]) {
        self.figure(
            "requests_total",
            "counter",
            "Requests by what they asked for and how they were answered.",
            requests.iter().map(|request| {
                let status = request
                    .status
                    .map_or_else(|| "other".to_owned(), |status| status.to_string());
                let labels = format!("route=\"{}\",status=\"{status}\"", request.route);
                (labels, Some(float(request.count)))
            }),
        );
    }

    fn sandboxes(&mut self, sandboxes: &[SandboxUse]) {
        let of_sandboxes = |value: fn(&SandboxUse) -> Option<f64>| {
            sandboxes
                .iter()
                .map(move |sandbox| (format!("sandbox=\"{}\"", sandbox.id), value(sandbox)))
        };
        self.figure(
            "sandbox_processes",
            "gauge",
            "Processes of a sandbox.",
            of_sandboxes(|sandbox| Some(float(sandbox.processes))),
        );
        self.figure(
            "sandbox_cpu_seconds",
            "gauge",
            "Processor time used by the processes that a sandbox has now.",
            of_sandboxes(|sandbox| Some(sandbox.cpu_seconds)),
        );
        self.figure(
            "sandbox_memory_bytes",
            "gauge",
            "Memory of the processes of a sandbox; what several share counts for each.",
            of_sandboxes(|sandbox| Some(float(sandbox.memory_bytes))),
        );
        self.figure(
            "sandbox_disk_bytes",
            "gauge",
            "Disk space of a sandbox's home.",
            of_sandboxes(|sandbox| sandbox.disk_bytes.map(float)),
        );
    }

    /// One figure, unless nothing is known of it.
    fn figure(
        &mut self,
        name: &str,
        kind: &str,
        help: &str,
        values: impl IntoIterator<Item = (String, Option<f64>)>,
    ) {
        let mut begun = false;
        for (labels, value) in values {
            let Some(value) = value else { continue };
            // Writing to memory does not fail.
            if !begun {
                let _ = writeln!(self.0, "# HELP sbx_{name} {help}");
                let _ = writeln!(self.0, "# TYPE sbx_{name} {kind}");
                begun = true;
            }
            let _ = if labels.is_empty() {
                writeln!(self.0, "sbx_{name} {value}")
            } else {
                writeln!(self.0, "sbx_{name}{{{labels}}} {value}")
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_counted_by_route_and_status() {
        let counts = RequestCounts::new();
        counts.count(Some(Resource::Health), 200);
        counts.count(Some(Resource::Health), 200);
        counts.count(Some(Resource::Health), 418);
        counts.count(None, 404);
        let all: Vec<_> = counts
            .all()
            .iter()
            .map(|count| (count.route, count.status, count.count))
            .collect();
        assert_eq!(
            all,
            [
                ("health", Some(200), 2),
                ("health", None, 1),
                ("none", Some(404), 1)
            ]
        );
    }

    #[test]
    fn a_figure_that_is_not_known_is_left_out() {
        let mut text = Text(String::new());
        text.figure("a", "gauge", "A.", [(String::new(), None)]);
        text.figure("b", "gauge", "B.", [("x=\"1\"".to_owned(), Some(1.5))]);
        assert_eq!(
            text.0,
            "# HELP sbx_b B.\n# TYPE sbx_b gauge\nsbx_b{x=\"1\"} 1.5\n"
        );
    }
}
