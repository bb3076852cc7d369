//! The control plane: sandboxes as E2B's API knows them.
//!
//! On a host these are its sandboxes. A machine that is one sandbox shows itself, with a fixed id; it ends with its job
//! and not by this API.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use super::access::names_machine;
use super::calls::{Answer, Call};
use super::documents::{Size, VERSION, page, page_of, uptime_ms};
use super::errors::{Code, E2bError};
use super::paths::USUAL_HOME;
use super::processes::variables_in;
use super::templates::{TEMPLATES, Templates, templates};
use crate::clock::now_ms;
use crate::codec::fields::{Change, Fields, JsonType, strings, wrong_type};
use crate::codec::object::{object, object_of};
use crate::codec::query::{Query, percent_decoded};
use crate::codec::table::Table;
use crate::codec::time::{parse_rfc3339, rfc3339};
use crate::error::Kind;
use crate::host::{By, Host, RulesChange, Sandbox, SandboxState, SettingsChange, Waker};
use crate::http::{Body, Response};
use crate::machine::MACHINE_ID;
use crate::spec::command::{check_environment, environment_bytes};
use crate::spec::network::{Filter, NetworkPolicy, Rule, Rules};
use crate::spec::sandbox::{Fate, LifeRules, SandboxSpec, Settings};
use crate::sys::proc;
use crate::workspace::Workspace;

/// How long a sandbox lives unless its client says how long.
const LIFETIME: Duration = Duration::from_secs(300);

/// The end of a sandbox that has none, in milliseconds since 1970: the last second of the year 9999.
const NEVER_MS: u64 = 253_402_300_799_000;

/// Most bytes of the environment of a sandbox, and of its metadata.
const MAX_ENVIRONMENT_BYTES: usize = 64 * 1024;
const MAX_METADATA_BYTES: usize = 16 * 1024;

/// Most characters of a key that makes creating idempotent.
const MAX_KEY: usize = 256;

/// The time between two points of E2B's metrics.
const POINT_MS: u64 = 5000;

/// The states of a sandbox.
const RUNNING: &str = "running";
const PAUSED: &str = "paused";

/// All addresses, as clients write it.
const ALL_TRAFFIC: &str = "0.0.0.0/0";

/// Most rules in each list.
const MAX_RULES: usize = 256;

/// `POST /v2/sandboxes`.
pub(super) fn create(call: &mut Call<'_, '_>, _: &str) -> Answer {
    let key = call.request.head.header("idempotency-key");
    let key = key.map(|key| String::from_utf8_lossy(key).into_owned());
    if key.as_ref().is_some_and(|key| key.len() > MAX_KEY) {
        let text = format!("Idempotency-Key takes at most {MAX_KEY} characters");
        return Err(E2bError::invalid(text));
    }
    let body = call.body()?;
    let mut spec = sandbox_spec(Fields::parse(&body)?, &templates(call))?;
    spec.key = key;
    let Ok(host) = call.context.machine.host() else {
        // It has the network that it has.
        if spec.network.is_some() {
            let text = "the network of this machine is chosen when the server starts (SBX_NETWORK)";
            return Err(E2bError::unimplemented(text));
        }
        if !spec.environment.is_empty() {
            let text =
                "envVars of this machine are those of the server; pass others with each command";
            return Err(E2bError::unimplemented(text));
        }
        if spec.settings.rules != LifeRules::default() {
            let text = "this machine ends with its job: it is not paused when its timeout passes";
            return Err(E2bError::unimplemented(text));
        }
        let labels = Table::clone(&spec.settings.labels);
        call.context.machine.set_labels(labels);
        return Ok(created(call, MACHINE_ID, &spec.template));
    };
    let made = host.create_once(&spec)?;
    Ok(created(call, &made.id, &made.spec.template))
}

/// `POST /v2/sandboxes/{id}/connect`. One that rests runs again; without `memory` it runs anew.
pub(super) fn connect(call: &mut Call<'_, '_>, id: &str) -> Answer {
    let body = call.body()?;
    let mut fields = fields(&body)?;
    let least = lifetime(&mut fields, "timeout")?.unwrap_or(LIFETIME);
    let with_memory = fields.boolean("memory")?.unwrap_or(true);
    let on_expiry = on_expiry(&mut fields)?;
    let Some((host, sandbox)) = place(call, id)? else {
        let mut response = created(call, id, TEMPLATES[0]);
        response.status = 200;
        return Ok(response);
    };
    if sandbox.state().0 == SandboxState::Paused && !with_memory {
        host.stop(id, HOST)?;
    }
    // Before it runs, so that what was left of its time does not end it at once.
    let rests = sandbox.state().0 != SandboxState::Running;
    let change = SettingsChange {
        lifetime: if rests {
            Change::Set(least)
        } else {
            Change::Keep
        },
        rules: RulesChange {
            on_expiry,
            ..RulesChange::default()
        },
        ..SettingsChange::default()
    };
    host.change(id, HOST, change)?;
    let (mut sandbox, is_resumed) = host.resume(id, Waker::Host)?;
    if !is_resumed {
        sandbox = host.extend_lifetime(id, least)?;
    }
    let mut response = created(call, id, &template_of(&sandbox));
    response.status = if is_resumed { 201 } else { 200 };
    Ok(response)
}

/// Clients of this door that manage sandboxes have the host's token.
const HOST: By = By::Host { holds: false };

/// The change that has a sandbox live for so long from now on.
fn lasting(lifetime: Duration) -> SettingsChange {
    SettingsChange {
        lifetime: Change::Set(lifetime),
        ..SettingsChange::default()
    }
}

/// What becomes of a sandbox when its timeout passes; `None` if the client does not say.
fn on_expiry(fields: &mut Fields<'_>) -> Result<Option<Fate>, E2bError> {
    let pauses = fields.boolean("autoPause")?;
    let with_memory = fields.boolean("autoPauseMemory")?.unwrap_or(true);
    Ok(pauses.map(|pauses| match (pauses, with_memory) {
        (false, _) => Fate::Delete,
        (true, true) => Fate::Pause,
        (true, false) => Fate::Stop,
    }))
}

/// `POST /sandboxes/{id}/pause`.
pub(super) fn pause(call: &mut Call<'_, '_>, id: &str) -> Answer {
    let body = call.body()?;
    let with_memory = fields(&body)?.boolean("memory")?.unwrap_or(true);
    let Some((host, _)) = place(call, id)? else {
        let text = "this machine ends with its job, and cannot be paused";
        return Err(E2bError::unimplemented(text));
    };
    let paused = if with_memory {
        host.pause(id, HOST)
    } else {
        // One that is paused keeps its memory.
        host.stop_if(id, HOST, |state| state == SandboxState::Running)
    };
    match paused {
        Ok((_, true)) => Ok(Response::new(204, Body::Empty)),
        Err(error) if error.kind() != Kind::Stopped => Err(error.into()),
        Ok((_, false)) | Err(_) => {
            let text = format!("sandbox {id} is already paused");
            Err(E2bError::new(Code::AlreadyExists, text))
        }
    }
}

/// `GET /sandboxes/{id}`.
pub(super) fn describe(call: &mut Call<'_, '_>, id: &str) -> Answer {
    let mut document = match place(call, id)? {
        None => machine_document(call),
        Some((_, sandbox)) => {
            let mut document = document(&sandbox, Size::of_machine(&proc::machine_use()));
            let rules = sandbox.rules();
            let is_kept = rules.on_expiry != Fate::Delete;
            document["lifecycle"] = object! {
                "onTimeout": if is_kept { "pause" } else { "kill" },
                "autoResume": rules.auto_resume,
            };
            document
        }
    };
    document["envdAccessToken"] = call.context.authenticator.sandbox_token(id).into();
    if let Some(domain) = domain(call) {
        document["domain"] = domain.into();
    }
    Ok(Response::json(&document))
}

/// `DELETE /sandboxes/{id}`.
pub(super) fn kill(call: &mut Call<'_, '_>, id: &str) -> Answer {
    let Some((host, _)) = place(call, id)? else {
        let text = "this machine ends with its job, and not by this API";
        return Err(E2bError::not_found(text));
    };
    call.request.slot.waits_for_end();
    host.delete(id)?;
    Ok(Response::new(204, Body::Empty))
}

/// `POST /sandboxes/{id}/timeout`.
pub(super) fn set_timeout(call: &mut Call<'_, '_>, id: &str) -> Answer {
    let body = call.body()?;
    let missing = || E2bError::invalid("timeout is missing; it takes seconds");
    let lifetime = lifetime(&mut fields(&body)?, "timeout")?.ok_or_else(missing)?;
    let Some((host, sandbox)) = place(call, id)? else {
        let text = "this machine ends with its job, and not after a timeout";
        return Err(E2bError::unimplemented(text));
    };
    if sandbox.state().0 != SandboxState::Running {
        let text = format!("sandbox {id} is paused; connect to it");
        return Err(E2bError::not_found(text));
    }
    host.change(id, HOST, lasting(lifetime))?;
    Ok(Response::new(204, Body::Empty))
}

/// `POST /sandboxes/{id}/refreshes`.
pub(super) fn refresh(call: &mut Call<'_, '_>, id: &str) -> Answer {
    let body = call.body()?;
    let least = lifetime(&mut fields(&body)?, "duration")?;
    if let Some((host, _)) = place(call, id)? {
        host.extend_lifetime(id, least.unwrap_or(LIFETIME))?;
    }
    Ok(Response::new(204, Body::Empty))
}

/// `GET /v2/sandboxes`.
pub(super) fn list(call: &mut Call<'_, '_>, _: &str) -> Answer {
    let query = &call.query;
    let filter = metadata_filter(query)?;
    let states = query.values("state");
    let states: Vec<u8> = states.collect::<Vec<_>>().join(&b',');
    let shows = |state: &str| {
        let mut words = states.split(|byte| *byte == b',');
        states.is_empty() || words.any(|word| word == state.as_bytes())
    };
    let shows_running = shows(RUNNING);
    let time = |name| {
        query.parsed(name, "a time such as 2026-01-31T12:00:00Z", |text| {
            parse_rfc3339(text).or_else(|| text.parse().ok())
        })
    };
    // Both moments are part of it.
    let (after, before) = (time("startedAfter")?, time("startedBefore")?);
    let is_of_time = |started: u64| {
        let started = started.cast_signed();
        after.is_none_or(|after| started >= after) && before.is_none_or(|before| started <= before)
    };
    let is_descending = query.choice("order", &[("asc", false), ("desc", true)])?;
    // The newest come first unless the client says otherwise.
    let is_descending = is_descending.unwrap_or(true);
    let (limit, next) = page(query)?;
    let template = query.value("template")?.map(<[u8]>::to_vec);
    let Ok(host) = call.context.machine.host() else {
        let labels = call.context.machine.labels();
        let started = now_ms().saturating_sub(uptime_ms(call));
        let is_shown = shows_running
            && next.is_none()
            && filter
                .iter()
                .all(|(key, value)| labels.get(key) == Some(value))
            && is_of_time(started)
            && template.is_none_or(|asked| asked == TEMPLATES[0].as_bytes());
        let all = is_shown.then(|| machine_document(call));
        return Ok(Response::json(&all.into_iter().collect::<Vec<_>>()));
    };
    let mut all = host.list();
    if is_descending {
        all.reverse();
    }
    let is_next = |sandbox: &Sandbox| match next {
        None => true,
        Some(last) if is_descending => sandbox.number() < last,
        Some(last) => sandbox.number() > last,
    };
    let has_metadata = |sandbox: &Sandbox| {
        let metadata = sandbox.settings().labels;
        filter
            .iter()
            .all(|(key, value)| metadata.get(key) == Some(value))
    };
    all.retain(|sandbox| {
        shows(state_of(sandbox).0)
            && is_next(sandbox)
            && has_metadata(sandbox)
            && is_of_time(sandbox.created_at_ms)
            && template
                .as_ref()
                .is_none_or(|asked| template_of(sandbox).as_bytes() == asked)
    });
    let has_more = all.len() > limit;
    all.truncate(limit);
    let whole = Size::of_machine(&proc::machine_use());
    let documents = all.iter().map(|sandbox| document(sandbox, whole));
    let documents: Vec<_> = documents.collect();
    let last = all.last().filter(|_| has_more);
    Ok(page_of(&documents, last.map(|last| last.number())))
}

/// `GET /snapshots`: there are none.
pub(super) fn list_snapshots(_: &mut Call<'_, '_>, _: &str) -> Answer {
    Ok(Response::json(&json!([])))
}

/// `GET /sandboxes/{id}/metrics`.
pub(super) fn metrics(call: &mut Call<'_, '_>, id: &str) -> Answer {
    let place = place(call, id)?;
    let query = &call.query;
    let (start, end) = (query.number("start")?, query.number("end")?);
    let now = now_ms();
    // There is one point, that of now. A client that asks for those until now has read its clock a moment ago, or has
    // another clock.
    let now = end.map_or(now, |end| now.min(end.saturating_mul(1000)));
    let is_asked = now + POINT_MS >= now_ms() && start.is_none_or(|start| start <= now / 1000 + 1);
    if !is_asked {
        return Ok(Response::json(&json!([])));
    }
    let rests = |(_, sandbox): &(_, Arc<Sandbox>)| state_of(sandbox).0 == PAUSED;
    if place.as_ref().is_some_and(rests) {
        return Ok(Response::json(&json!([])));
    }
    let figures = Figures::of(call, place.as_ref().map(|(_, sandbox)| &**sandbox));
    Ok(Response::json(&json!([{
        "timestamp": rfc3339(now.cast_signed()),
        "timestampUnix": now / 1000,
        "cpuCount": figures.size.processors,
        "cpuUsedPct": figures.processor_share,
        "memUsed": figures.memory_used,
        "memTotal": figures.size.memory,
        "memCache": 0,
        "diskUsed": figures.disk_used,
        "diskTotal": figures.disk,
    }])))
}

/// `GET /metrics` of a sandbox: those of the machine, because a look at all processes for each request of a tenant
/// would be too much.
pub(super) fn metrics_inside(call: &mut Call<'_, '_>, _: &Workspace) -> Answer {
    let figures = Figures::of(call, None);
    Ok(Response::json(&object! {
        "ts": now_ms() / 1000,
        "cpu_count": figures.size.processors,
        "cpu_used_pct": figures.processor_share,
        "mem_total": figures.size.memory,
        "mem_used": figures.memory_used,
        "mem_cache": 0,
        "disk_used": figures.disk_used,
        "disk_total": figures.disk,
    }))
}

/// What a sandbox uses, in bytes, and of how much.
struct Figures {
    size: Size,
    /// Percent of one processor, on average since it was made.
    processor_share: f64,
    memory_used: u64,
    disk: u64,
    disk_used: u64,
}

impl Figures {
    /// Those of a sandbox, or of the machine.
    fn of(call: &Call<'_, '_>, sandbox: Option<&Sandbox>) -> Self {
        let machine = &call.context.machine;
        let whole = proc::machine_use();
        let disk = machine.disk();
        let own = sandbox.map(|sandbox| {
            let all = proc::use_by_user();
            all.get(&sandbox.user.uid).copied().unwrap_or_default()
        });
        let cpu = own.map_or(whole.cpu, |own| Some(own.cpu));
        let age = match sandbox {
            Some(sandbox) => Duration::from_millis(now_ms().saturating_sub(sandbox.created_at_ms)),
            None => uptime().unwrap_or_else(|| machine.uptime()),
        };
        let share = cpu.unwrap_or_default().as_secs_f64() / age.as_secs_f64().max(0.001);
        Self {
            size: Size::of_machine(&whole).limited_by(sandbox),
            processor_share: (share * 10_000.0).round() / 100.0,
            memory_used: match own {
                Some(own) => own.memory_bytes,
                None => whole.memory_used_bytes.unwrap_or(0),
            },
            disk: disk.map_or(0, |disk| disk.bytes),
            disk_used: disk.map_or(0, |disk| disk.used_bytes),
        }
    }
}

/// How long the machine runs.
fn uptime() -> Option<Duration> {
    let text = std::fs::read_to_string("/proc/uptime").ok()?;
    let (seconds, _) = text.split_once('.')?;
    seconds.parse().ok().map(Duration::from_secs)
}

/// A sandbox of the host by its id, or the machine itself.
pub(super) fn place<'a>(
    call: &Call<'a, '_>,
    id: &str,
) -> Result<Option<(&'a Host, Arc<Sandbox>)>, E2bError> {
    let unknown = || E2bError::not_found(format_args!("there is no sandbox {id}"));
    match call.context.machine.host() {
        Ok(host) => {
            let sandbox = host.find(id).map_err(|_| unknown())?;
            Ok(Some((host, sandbox)))
        }
        Err(_) if names_machine(call.context, id) => Ok(None),
        Err(_) => Err(unknown()),
    }
}

/// The answer to a client that may use a sandbox from now on.
fn created(call: &Call<'_, '_>, id: &str, template: &str) -> Response {
    let token = call.context.authenticator.sandbox_token(id);
    let mut document = object! {
        "templateID": template,
        "sandboxID": id,
        "clientID": CLIENT,
        "envdVersion": VERSION,
        "envdAccessToken": token.as_str(),
        "trafficAccessToken": token,
    };
    if let Some(domain) = domain(call) {
        document["domain"] = domain.into();
    }
    let mut response = Response::json(&document);
    response.status = 201;
    response
}

/// A word that clients pass on and do not use.
const CLIENT: &str = "sbx-server";

/// The domain below which the names of sandboxes are: that by which the client has reached the server. Names below
/// `localhost` lead to it, too.
fn domain(call: &Call<'_, '_>) -> Option<String> {
    let host = std::str::from_utf8(call.request.head.host()?).ok()?;
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b".:-[]".contains(&byte);
    if host.is_empty() || !host.bytes().all(is_plain) {
        return None;
    }
    for own in ["127.0.0.1", "[::1]"] {
        if let Some(port) = host.strip_prefix(own) {
            return Some(format!("localhost{port}"));
        }
    }
    // E2B's clients ask `api.` before the domain.
    Some(host.strip_prefix("api.").unwrap_or(host).to_owned())
}

fn template_of(sandbox: &Sandbox) -> String {
    let template = &sandbox.spec.template;
    let usual = || TEMPLATES[0].to_owned();
    Some(template.clone())
        .filter(|template| !template.is_empty())
        .unwrap_or_else(usual)
}

/// A sandbox of a machine of this size.
fn document(sandbox: &Sandbox, whole: Size) -> Value {
    let (state, mode) = state_of(sandbox);
    let end = match mode {
        None => sandbox.expiry().map_or(NEVER_MS, |expiry| expiry.at_ms),
        Some(_) => sandbox.state().1,
    };
    let mut document = listed(
        &sandbox.id,
        &template_of(sandbox),
        (sandbox.created_at_ms, end.min(NEVER_MS)),
        whole.limited_by(Some(sandbox)),
        &sandbox.settings().labels,
    );
    document["state"] = state.into();
    if let Some(mode) = mode {
        document["pauseMode"] = mode.into();
    }
    document
}

/// The words for what a sandbox does, and for what a pause has kept.
fn state_of(sandbox: &Sandbox) -> (&'static str, Option<&'static str>) {
    match sandbox.state().0 {
        SandboxState::Running => (RUNNING, None),
        SandboxState::Paused => (PAUSED, Some("full")),
        SandboxState::Stopped => (PAUSED, Some("filesystem")),
    }
}

fn machine_document(call: &Call<'_, '_>) -> Value {
    let mut document = listed(
        MACHINE_ID,
        TEMPLATES[0],
        (now_ms().saturating_sub(uptime_ms(call)), NEVER_MS),
        Size::of_machine(&proc::machine_use()),
        &call.context.machine.labels(),
    );
    let disk = call.context.machine.disk();
    document["diskSizeMB"] = disk.map_or(0, |disk| disk.bytes >> 20).into();
    document
}

fn listed(
    id: &str,
    template: &str,
    (start, end): (u64, u64),
    size: Size,
    metadata: &Table<String, String>,
) -> Value {
    let pairs = metadata.iter();
    let metadata = object_of(pairs.map(|(name, value)| (name.clone(), value.as_str().into())));
    let time = |at: u64| rfc3339(at.cast_signed());
    object! {
        "templateID": template,
        "alias": template,
        "sandboxID": id,
        "clientID": CLIENT,
        "startedAt": time(start),
        "endAt": time(end),
        "envdVersion": VERSION,
        "cpuCount": size.processors,
        "memoryMB": size.memory >> 20,
        "diskSizeMB": 0,
        "state": RUNNING,
        "metadata": metadata,
    }
}

/// The members of a body that may be missing.
fn fields(body: &[u8]) -> Result<Fields<'_>, E2bError> {
    let body = if body.trim_ascii().is_empty() {
        b"{}"
    } else {
        body
    };
    Ok(Fields::parse(body)?)
}

fn lifetime(fields: &mut Fields<'_>, name: &'static str) -> Result<Option<Duration>, E2bError> {
    let seconds = fields.whole(name, 0..=u32::MAX.into())?;
    Ok(seconds.map(Duration::from_secs))
}

/// What a client asks of a new sandbox.
fn sandbox_spec(
    mut fields: Fields<'_>,
    templates: &Templates<'_>,
) -> Result<SandboxSpec, E2bError> {
    let missing = || E2bError::invalid("templateID is missing");
    let template = fields.string("templateID")?.ok_or_else(missing)?;
    let root_choice = templates.root(&template).ok_or_else(|| {
        let names: Vec<_> = templates.names().collect();
        let text = format_args!(
            "the template {template:?} does not exist: it takes {}; SBX_E2B_TEMPLATES adds names",
            names.join(" or ")
        );
        E2bError::not_found(text)
    })?;
    let on_expiry = on_expiry(&mut fields)?.unwrap_or_default();
    let auto_resume = match fields.take("autoResume") {
        None => false,
        Some(value) if JsonType::of(value) == JsonType::Object => {
            let mut rule = Fields::parse(value.get().as_bytes())?;
            rule.boolean("enabled")?.unwrap_or(false)
        }
        Some(value) => return Err(wrong_type("autoResume", "an object", value).into()),
    };
    for name in ["mcp", "iam", "volumeMounts"] {
        let value = fields.take(name);
        if value.is_some_and(|value| !matches!(value.get(), "{}" | "[]")) {
            return Err(E2bError::unimplemented(format_args!(
                "{name} is unavailable here"
            )));
        }
    }
    let environment = variables_in(&mut fields, "envVars")?;
    check_environment(&environment)?;
    if environment_bytes(&environment) > MAX_ENVIRONMENT_BYTES {
        let text = format!("envVars are larger than {MAX_ENVIRONMENT_BYTES} bytes");
        return Err(E2bError::invalid(text));
    }
    let metadata = variables_in(&mut fields, "metadata")?;
    if environment_bytes(&metadata) > MAX_METADATA_BYTES {
        let text = format!("metadata is larger than {MAX_METADATA_BYTES} bytes");
        return Err(E2bError::invalid(text));
    }
    let given = metadata.into_iter();
    let metadata = given.filter_map(|(key, value)| Some((key, value?)));
    let metadata = Table::from(metadata.collect::<Vec<_>>());
    let has_internet = fields.boolean("allow_internet_access")?.unwrap_or(true);
    let network = network(&mut fields)?;
    Ok(SandboxSpec {
        environment: environment.into(),
        settings: Settings {
            labels: Arc::new(metadata),
            lifetime: Some(lifetime(&mut fields, "timeout")?.unwrap_or(LIFETIME)),
            rules: LifeRules {
                on_expiry,
                auto_resume,
                ..LifeRules::default()
            },
            ..Settings::default()
        },
        template,
        root_choice,
        network: if has_internet {
            network
        } else {
            Some(NetworkPolicy::Blocked)
        },
        shown_home: Some(PathBuf::from(USUAL_HOME)),
        ..SandboxSpec::default()
    })
}

/// The policy that `network` means, if that is one that can be had.
fn network(fields: &mut Fields<'_>) -> Result<Option<NetworkPolicy>, E2bError> {
    let Some(value) = fields.take("network") else {
        return Ok(None);
    };
    if JsonType::of(value) != JsonType::Object {
        return Err(wrong_type("network", "an object", value).into());
    }
    let mut network = Fields::parse(value.get().as_bytes())?;
    for name in ["rules", "egressProxy", "maskRequestHost", "dnsServers"] {
        let value = network.take(name);
        if value.is_some_and(|value| !matches!(value.get(), "{}" | "[]")) {
            return Err(E2bError::unimplemented(format_args!(
                "network.{name} is unavailable here"
            )));
        }
    }
    let allow = rules(&mut network, "allowOut")?;
    let deny = rules(&mut network, "denyOut")?;
    let is_closed = deny.iter().any(|rule| rule.text() == ALL_TRAFFIC);
    let filtered = |allow, deny| {
        let filter = Filter::new(Rules { allow, deny }, None);
        Ok(Some(NetworkPolicy::Filtered(Arc::new(filter))))
    };
    match (allow.is_empty(), deny.is_empty()) {
        (true, true) => Ok(None),
        (true, false) if is_closed => Ok(Some(NetworkPolicy::Blocked)),
        (true, false) => filtered(None, deny),
        (false, _) if is_closed => filtered(Some(allow), Vec::new()),
        (false, _) => Err(E2bError::invalid(
            "network.allowOut goes with denyOut [\"0.0.0.0/0\"] here: what is not allowed is then denied",
        )),
    }
}

fn rules(network: &mut Fields<'_>, name: &'static str) -> Result<Vec<Rule>, E2bError> {
    let accepted = format!("an array of at most {MAX_RULES} rules");
    let texts = network
        .take(name)
        .map(|array| strings(&format!("network.{name}"), &accepted, array));
    let texts = texts.transpose()?.unwrap_or_default();
    if texts.len() > MAX_RULES {
        return Err(E2bError::invalid(format_args!(
            "network.{name} takes {accepted}"
        )));
    }
    let parsed = texts.iter().map(|text| {
        Rule::parse(text).ok_or_else(|| {
            let text = format_args!("network.{name} has {text:?}; it takes {}", Rule::ACCEPTED);
            E2bError::invalid(text)
        })
    });
    parsed.collect()
}

/// The pairs that a sandbox must have. They are a form in a parameter, and clients escape them once more.
fn metadata_filter(query: &Query) -> Result<Vec<(String, String)>, E2bError> {
    let form = query.value("metadata")?;
    let form = Query::parse(form)?;
    let text = |bytes: &[u8]| {
        let decoded = percent_decoded(bytes)?;
        String::from_utf8(decoded).map_err(|_| E2bError::invalid("metadata is not UTF-8"))
    };
    form.pairs()
        .map(|(key, value)| Ok((text(key)?, text(value)?)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(body: &str) -> Result<SandboxSpec, E2bError> {
        sandbox_spec(
            Fields::parse(body.as_bytes()).unwrap(),
            &Templates::default(),
        )
    }

    #[test]
    fn what_cannot_be_had_is_refused() {
        for (more, status) in [
            (r#""autoPause":1"#, 400),
            (r#""autoResume":true"#, 400),
            (r#""mcp":{"a":{}}"#, 501),
            (r#""iam":{"a":1}"#, 501),
            (r#""volumeMounts":[{"name":"v"}]"#, 501),
            (r#""network":{"rules":{"a":[]}}"#, 501),
            (r#""network":{"egressProxy":{"address":"x:1"}}"#, 501),
            (r#""network":{"allowOut":["x.org"]}"#, 400),
            (
                r#""network":{"allowOut":["x.org"],"denyOut":["1.1.1.1"]}"#,
                400,
            ),
            (r#""network":{"denyOut":["not a rule"]}"#, 400),
            (r#""network":7"#, 400),
            (r#""metadata":{"a":1}"#, 400),
            (r#""envVars":{"a=b":"x"}"#, 400),
            (r#""timeout":-1"#, 400),
            (r#""timeout":"5""#, 400),
        ] {
            let failure = spec(&format!(r#"{{"templateID":"base",{more}}}"#)).err();
            assert_eq!(
                failure.map(|failure| failure.status),
                Some(status),
                "{more}"
            );
        }
        assert_eq!(spec(r#"{"templateID":"mine"}"#).err().unwrap().status, 404);
        assert_eq!(spec("{}").err().unwrap().status, 400);
    }

    #[test]
    fn what_becomes_of_a_sandbox_after_its_timeout_can_be_chosen() {
        for (more, on_expiry, auto_resume) in [
            (r#""timeout":5"#, Fate::Delete, false),
            (r#""autoPause":false"#, Fate::Delete, false),
            (r#""autoPause":true"#, Fate::Pause, false),
            (
                r#""autoPause":true,"autoPauseMemory":false"#,
                Fate::Stop,
                false,
            ),
            (
                r#""autoPause":true,"autoResume":{"enabled":true}"#,
                Fate::Pause,
                true,
            ),
            (
                r#""autoPause":true,"autoResume":{"enabled":false}"#,
                Fate::Pause,
                false,
            ),
        ] {
            let spec = spec(&format!(r#"{{"templateID":"base",{more}}}"#));
            let rules = spec.map_err(|failure| failure.text).unwrap().settings.rules;
            assert_eq!(
                (rules.on_expiry, rules.auto_resume),
                (on_expiry, auto_resume),
                "{more}"
            );
        }
    }

    #[test]
    fn a_network_is_a_policy() {
        let network = |more: &str| {
            let body = format!(r#"{{"templateID":"base",{more}}}"#);
            let policy = spec(&body).map_err(|failure| failure.text).unwrap().network;
            policy.map(|policy| match policy {
                NetworkPolicy::Filtered(filter) => {
                    let texts = |rules: &[Rule]| -> Vec<_> {
                        rules.iter().map(|rule| rule.text().to_owned()).collect()
                    };
                    let Rules { allow, deny } = &filter.rules;
                    format!("{:?} {:?}", allow.as_deref().map(texts), texts(deny))
                }
                other => other.name().to_owned(),
            })
        };
        for (more, expected) in [
            (r#""autoPause":false"#, None),
            (r#""network":{}"#, None),
            (r#""allow_internet_access":false"#, Some("blocked")),
            (r#""network":{"denyOut":["0.0.0.0/0"]}"#, Some("blocked")),
            (
                r#""network":{"denyOut":["0.0.0.0/0"],"allowOut":["pypi.org"]}"#,
                Some(r#"Some(["pypi.org"]) []"#),
            ),
            (
                r#""network":{"denyOut":["10.0.0.0/8"]}"#,
                Some(r#"None ["10.0.0.0/8"]"#),
            ),
        ] {
            assert_eq!(network(more).as_deref(), expected, "{more}");
        }
    }

    #[test]
    fn metadata_is_escaped_twice() {
        // {"a b": "c&d=%+"} in Python: urlencode({quote(k): quote(v)}), as a parameter.
        let query =
            Query::parse(Some(b"metadata=a%252520b%3Dc%252526d%25253D%252525%25252B")).unwrap();
        let expected = vec![("a b".to_owned(), "c&d=%+".to_owned())];
        assert_eq!(metadata_filter(&query).unwrap(), expected);
        assert!(
            metadata_filter(&Query::parse(None).unwrap())
                .unwrap()
                .is_empty()
        );
    }
}
