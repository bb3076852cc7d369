//! `GET /v1/metrics`: the work of the server, and the resources that it and its sandboxes use.
//!
//! The figures are gathered into one document, which is sent as JSON if `Accept` names it and in
//! Prometheus' text format (version 0.0.4) otherwise. They are gathered only on request, by a walk
//! through /proc and, with `disk=1`, through every home. `GET /v1/sandboxes/{id}/metrics` has those of one sandbox
//! alone, for its own token; however often its holder asks, the walks do not become more than one a second.

use std::collections::HashMap;
use std::fmt::{self, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Serialize, Serializer};

use super::call::{Answer, BeforeAnswer, Call};
use crate::api::context::Context;
use crate::client::Stopped;
use crate::codec::table::Table;
use crate::confine::ended_for_memory;
use crate::files::watch::watched;
use crate::host::{Host, Sandbox, SandboxState};
use crate::http::{Body, Request, Response};
#[cfg(feature = "interpreter")]
use crate::interpreter::interpreter_use;
use crate::process;
use crate::sys::proc;
use crate::sys::proc::UserUse;
use crate::threads::lock::{Mutex, lock};

/// Most time for walking through homes for one answer. Homes that were not reached have no figure.
const DISK_LIMIT: Duration = Duration::from_secs(10);

#[derive(Serialize)]
struct RequestCount {
    route: &'static str,
    /// `None` for statuses that are counted together.
    status: Option<u16>,
    count: u64,
}

#[derive(Serialize)]
struct Document {
    version: &'static str,
    mode: &'static str,
    #[serde(rename = "uptime_seconds", serialize_with = "as_seconds")]
    uptime: Duration,
    connections: usize,
    processes_running: usize,
    processes_left_behind: Option<usize>,
    log_bytes: usize,
    terminals: u64,
    viewers: u64,
    viewer_sent_bytes: u64,
    viewer_typed_bytes: u64,
    #[cfg(feature = "interpreter")]
    contexts: usize,
    #[cfg(feature = "interpreter")]
    executions: u64,
    #[cfg(feature = "interpreter")]
    #[serde(rename = "execution_seconds", serialize_with = "as_seconds")]
    execution_time: Duration,
    sandboxes: usize,
    sandbox_states: Table<&'static str, u64>,
    memory_limit_kills: u64,
    watches: usize,
    watched_dirs: usize,
    egress_allowed: u64,
    egress_refused: u64,
    egress_bytes: u64,
    requests: Vec<RequestCount>,
    machine: MachineDocument,
    per_sandbox: Vec<SandboxUse>,
}

#[derive(Serialize)]
struct MachineDocument {
    #[serde(rename = "cpu_seconds", serialize_with = "as_seconds_or_null")]
    cpu: Option<Duration>,
    /// How many processors may be used.
    cpus: Option<usize>,
    memory_used_bytes: Option<u64>,
    memory_bytes: Option<u64>,
    disk_used_bytes: Option<u64>,
    disk_bytes: Option<u64>,
}

#[derive(Serialize)]
struct SandboxUse {
    id: String,
    processes: u64,
    #[serde(rename = "cpu_seconds", serialize_with = "as_seconds")]
    cpu: Duration,
    memory_bytes: u64,
    /// Of a sandbox with a limit on memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_limit_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_limit_used_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    disk_bytes: Option<u64>,
}

impl SandboxUse {
    fn of(sandbox: &Sandbox, users: &UseByUser, disk_bytes: Option<u64>) -> Self {
        let taken = users.get(&sandbox.user.uid).copied().unwrap_or_default();
        Self {
            id: sandbox.id.clone(),
            processes: taken.processes,
            cpu: taken.cpu,
            memory_bytes: taken.memory_bytes,
            memory_limit_bytes: sandbox.limits.asked().memory,
            memory_limit_used_bytes: sandbox.limits.memory_used(),
            disk_bytes,
        }
    }
}

/// Answers with the present figures.
pub(super) fn answer(call: &Call<'_, '_>) -> Answer {
    let with_disk = call.query.flag("disk")?;
    let until = Instant::now() + DISK_LIMIT;
    let mut interrupt = with_disk.then(|| call.interrupt_at(until));
    let document = gather(call.context, interrupt.as_mut())?;
    Ok(respond(call.request, &document, text))
}

/// Answers with those of one sandbox, about a second old.
pub(super) fn of_sandbox(call: &mut Call<'_, '_>, host: &Host, id: &str) -> Answer {
    let with_disk = call.query.flag("disk")?;
    let sandbox = host.find(id)?;
    let users = RECENT_USE.get();
    let disk_bytes = if with_disk {
        sandbox.own_disk_bytes(&mut call.interrupt())?
    } else {
        None
    };
    let document = SandboxUse::of(&sandbox, &users, disk_bytes);
    let text = |document: &SandboxUse| {
        let mut text = Text(String::new());
        figures_of(&mut text, std::slice::from_ref(document));
        text.0
    };
    Ok(respond(call.request, &document, text))
}

fn respond<T: Serialize>(
    request: &Request<'_>,
    document: &T,
    text: impl Fn(&T) -> String,
) -> Response {
    if wants_json(request) {
        return Response::json(document);
    }
    Response::new(200, Body::Bytes(text(document).into_bytes()))
        .with_header("Content-Type", "text/plain; version=0.0.4")
}

/// What processes use, by uid.
type UseByUser = HashMap<libc::uid_t, UserUse>;

/// What was found last. A walk through /proc costs what all sandboxes run, so the holders of their tokens share it. The
/// lock is held to look and to store, and not during a walk.
struct RecentUse(Mutex<Recent>);

struct Recent {
    found: Option<(Instant, Arc<UseByUser>)>,
    is_walking: bool,
}

static RECENT_USE: RecentUse = RecentUse(Mutex::new(Recent {
    found: None,
    is_walking: false,
}));

impl RecentUse {
    /// What was found within the last second, or is found now. While one thread walks, the others get the walk before,
    /// if that is not long ago.
    fn get(&self) -> Arc<UseByUser> {
        let mut recent = lock(&self.0);
        if let Some((at, users)) = &recent.found {
            let limit = if recent.is_walking { 10 } else { 1 };
            if at.elapsed() < Duration::from_secs(limit) {
                return Arc::clone(users);
            }
        }
        recent.is_walking = true;
        drop(recent);
        let users = Arc::new(proc::use_by_user());
        *lock(&self.0) = Recent {
            found: Some((Instant::now(), Arc::clone(&users))),
            is_walking: false,
        };
        users
    }
}

fn wants_json(request: &Request<'_>) -> bool {
    request.head.values("accept").any(|accepted| {
        accepted
            .to_ascii_lowercase()
            .windows(16)
            .any(|window| window == b"application/json")
    })
}

/// All figures: those of homes if there is an interrupt, which ends the walks through them when they take too long.
///
/// # Errors
/// The client disconnected.
fn gather(
    context: &Context,
    mut interrupt: Option<&mut BeforeAnswer>,
) -> Result<Document, Stopped> {
    let machine = &context.machine;
    let disk = machine.disk();
    let use_of_all = proc::machine_use();
    let users = proc::use_by_user();
    let mut per_sandbox = Vec::new();
    let mut states = Table::new();
    if let Ok(host) = machine.host() {
        for state in SandboxState::ALL {
            states.insert(state.name(), 0);
        }
        for sandbox in host.list() {
            *states.get_or_default(sandbox.state().0.name()) += 1;
            let walked = interrupt.as_deref_mut().map(|own| sandbox.disk_bytes(own));
            // A home that was deleted meanwhile has no figure, nor have those that are not reached in time.
            let disk_bytes = match walked {
                Some(Ok(found)) => found,
                Some(Err(Stopped::Disconnected)) => return Err(Stopped::Disconnected),
                Some(Err(Stopped::Due)) => {
                    interrupt = None;
                    None
                }
                Some(Err(Stopped::Failed(_))) | None => None,
            };
            per_sandbox.push(SandboxUse::of(&sandbox, &users, disk_bytes));
        }
    }
    let terminals = process::terminal_use();
    #[cfg(feature = "interpreter")]
    let interpreters = interpreter_use();
    let (watched_dirs, watches) = watched();
    let egress = machine.egress.totals();
    let requests = context.requests.all().into_iter();
    let requests = requests.map(|((route, status), count)| RequestCount {
        route,
        status,
        count,
    });
    Ok(Document {
        version: env!("CARGO_PKG_VERSION"),
        mode: machine.mode(),
        uptime: machine.uptime(),
        connections: context.connections.count(),
        processes_running: machine.processes_running(),
        processes_left_behind: process::count_left_behind(),
        log_bytes: machine.log_bytes(),
        terminals: terminals.open,
        viewers: terminals.viewers,
        viewer_sent_bytes: terminals.sent_bytes,
        viewer_typed_bytes: terminals.typed_bytes,
        #[cfg(feature = "interpreter")]
        contexts: interpreters.contexts,
        #[cfg(feature = "interpreter")]
        executions: interpreters.executions,
        #[cfg(feature = "interpreter")]
        execution_time: interpreters.execution_time,
        sandboxes: machine.sandboxes(),
        sandbox_states: states,
        memory_limit_kills: ended_for_memory(),
        watches,
        watched_dirs,
        egress_allowed: egress.allowed,
        egress_refused: egress.refused,
        egress_bytes: egress.bytes,
        requests: requests.collect(),
        machine: MachineDocument {
            cpu: use_of_all.cpu,
            cpus: Some(proc::processors()),
            memory_used_bytes: use_of_all.memory_used_bytes,
            memory_bytes: use_of_all.memory_bytes,
            disk_used_bytes: disk.map(|disk| disk.used_bytes),
            disk_bytes: disk.map(|disk| disk.bytes),
        },
        per_sandbox,
    })
}

/// Prometheus' text format: each figure's help and type, then its values.
#[rustfmt::skip]
fn text(document: &Document) -> String {
    let mut text = Text(String::new());
    let machine = &document.machine;
    let count = |value: usize| Some(value as u64);
    text.gauge("uptime_seconds", "Seconds since the start.", Some(Value::Time(document.uptime)));
    text.whole("connections", "Open connections.", count(document.connections));
    text.whole("processes_running", "Running commands, in the foreground or background.", count(document.processes_running));
    text.whole("processes_left_behind", "Processes that live on after their command has ended.", document.processes_left_behind.map(|count| count as u64));
    text.whole("log_bytes", "Bytes of output that are kept.", count(document.log_bytes));
    text.whole("terminals", "Terminals of running commands.", Some(document.terminals));
    text.whole("viewers", "Clients that are attached to terminals.", Some(document.viewers));
    #[cfg(feature = "interpreter")]
    text.whole("contexts", "Interpreters that run, and those that are ready for new contexts.", count(document.contexts));
    for (name, help, value) in [
        ("viewer_sent_bytes_total", "Bytes of output for attached clients.", Value::Count(document.viewer_sent_bytes)),
        ("viewer_typed_bytes_total", "Bytes that attached clients have typed.", Value::Count(document.viewer_typed_bytes)),
        ("egress_allowed_total", "Connections of commands with filtered networks that were allowed.", Value::Count(document.egress_allowed)),
        ("egress_refused_total", "Those that were refused.", Value::Count(document.egress_refused)),
        ("egress_bytes_total", "Bytes that went over them, both ways.", Value::Count(document.egress_bytes)),
        #[cfg(feature = "interpreter")]
        ("executions_total", "Executions in contexts that have ended.", Value::Count(document.executions)),
        ("memory_limit_kills_total", "Commands that were killed for the limit on the memory of their sandbox.", Value::Count(document.memory_limit_kills)),
        #[cfg(feature = "interpreter")]
        ("execution_seconds_total", "How long they took together.", Value::Time(document.execution_time)),
    ] {
        text.figure(name, "counter", help, [(String::new(), Some(value))]);
    }
    let by_state = document.sandbox_states.iter().map(|(state, number)| {
        let labels = format!("state=\"{state}\"");
        (labels, Some(Value::Count(*number)))
    });
    text.figure("sandboxes", "gauge", "Sandboxes by what they do.", by_state);
    text.whole("watches", "Trees that are watched, for streams and for clients that poll.", count(document.watches));
    text.whole("watched_dirs", "Directories that are watched in them.", count(document.watched_dirs));
    text.whole("machine_cpus", "Processors that may be used.", machine.cpus.map(|count| count as u64));
    text.whole("machine_memory_used_bytes", "Memory in use, of the container or the machine.", machine.memory_used_bytes);
    text.whole("machine_memory_bytes", "Memory in all.", machine.memory_bytes);
    text.whole("machine_disk_used_bytes", "Disk space in use where files are written.", machine.disk_used_bytes);
    text.whole("machine_disk_bytes", "Disk space in all.", machine.disk_bytes);
    let cpu = [(String::new(), machine.cpu.map(Value::Time))];
    text.figure("machine_cpu_seconds_total", "counter", "Processor time used, of the container or the machine.", cpu);
    let requests = document.requests.iter().map(|request| {
        let status = request.status.map_or_else(|| "other".to_owned(), |status| status.to_string());
        let labels = format!("route=\"{}\",status=\"{status}\"", request.route);
        (labels, Some(Value::Count(request.count)))
    });
    text.figure("requests_total", "counter", "Requests by route and status.", requests);
    figures_of(&mut text, &document.per_sandbox);
    text.0
}

/// The figures of sandboxes.
#[rustfmt::skip]
fn figures_of(text: &mut Text, sandboxes: &[SandboxUse]) {
    let of_sandboxes = |value: fn(&SandboxUse) -> Option<Value>| {
        let all = sandboxes.iter();
        all.map(move |sandbox| (format!("sandbox=\"{}\"", sandbox.id), value(sandbox)))
    };
    let processes = of_sandboxes(|sandbox| Some(Value::Count(sandbox.processes)));
    text.figure("sandbox_processes", "gauge", "Processes of a sandbox.", processes);
    let cpu = of_sandboxes(|sandbox| Some(Value::Time(sandbox.cpu)));
    text.figure("sandbox_cpu_seconds", "gauge", "Processor time used by the present processes of a sandbox.", cpu);
    let memory = of_sandboxes(|sandbox| Some(Value::Count(sandbox.memory_bytes)));
    text.figure("sandbox_memory_bytes", "gauge", "Memory of the processes of a sandbox; shared memory counts for each.", memory);
    let limit = of_sandboxes(|sandbox| sandbox.memory_limit_bytes.map(Value::Count));
    text.figure("sandbox_memory_limit_bytes", "gauge", "Limit on the memory of a sandbox.", limit);
    let used = of_sandboxes(|sandbox| sandbox.memory_limit_used_bytes.map(Value::Count));
    text.figure("sandbox_memory_limit_used_bytes", "gauge", "Memory that counts for that limit, as found last.", used);
    let disk = of_sandboxes(|sandbox| sandbox.disk_bytes.map(Value::Count));
    text.figure("sandbox_disk_bytes", "gauge", "Disk space of a sandbox's home.", disk);
}

/// A value of a figure.
enum Value {
    Count(u64),
    /// Shown in seconds, to the microsecond.
    Time(Duration),
}

impl fmt::Display for Value {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Count(count) => write!(formatter, "{count}"),
            Self::Time(time) => {
                write!(formatter, "{}.{:06}", time.as_secs(), time.subsec_micros())
            }
        }
    }
}

fn as_seconds<S: Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64())
}

#[expect(clippy::ref_option, reason = "serde passes the field")]
fn as_seconds_or_null<S: Serializer>(
    time: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    time.map(|time| time.as_secs_f64()).serialize(serializer)
}

struct Text(String);

impl Text {
    fn whole(&mut self, name: &str, help: &str, value: Option<u64>) {
        self.gauge(name, help, value.map(Value::Count));
    }

    fn gauge(&mut self, name: &str, help: &str, value: Option<Value>) {
        self.figure(name, "gauge", help, [(String::new(), value)]);
    }

    /// Writes a figure. Values that are not known are left out.
    fn figure(
        &mut self,
        name: &str,
        kind: &str,
        help: &str,
        values: impl IntoIterator<Item = (String, Option<Value>)>,
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
    fn a_figure_that_is_not_known_is_left_out() {
        let mut text = Text(String::new());
        text.figure("a", "gauge", "A.", [(String::new(), None)]);
        text.figure(
            "b",
            "gauge",
            "B.",
            [("x=\"1\"".to_owned(), Some(Value::Count(2)))],
        );
        let time = Value::Time(Duration::from_millis(1050));
        text.gauge("c", "C.", Some(time));
        assert_eq!(
            text.0,
            "# HELP sbx_b B.\n# TYPE sbx_b gauge\nsbx_b{x=\"1\"} 2\n\
             # HELP sbx_c C.\n# TYPE sbx_c gauge\nsbx_c 1.050000\n"
        );
    }
}
