//! Sandboxes and their server in JSON.

use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};

use super::command::environment;
use super::network::{self, NetworkPolicyDocument};
use super::settings::{SettingsDocument, settings};
use crate::codec::fields::{Fields, strings};
use crate::error::{Error, Result};
use crate::host::Sandbox;
use crate::machine::Machine;
use crate::spec::command::{EnvironmentChange, check_environment};
use crate::spec::isolation::Isolation;
use crate::spec::sandbox::{SandboxSpec, StopCause};

/// Most sandboxes of one request.
const MAX_SANDBOXES: u64 = 10_000;

/// Most bytes of a sandbox's environment: as much as the kernel takes in a single variable
/// (`MAX_ARG_STRLEN`, execve(2)).
const MAX_ENVIRONMENT_BYTES: usize = 128 * 1024;

/// Most TCP ports of a sandbox.
const MAX_TCP_PORTS: u64 = 16;

/// Most paths that are added to what a sandbox can read, or change.
const MAX_PATHS: usize = 64;

/// Reads the body of a request for sandboxes: their number and settings. An empty body asks for one
/// sandbox with the defaults.
///
/// # Errors
/// `Invalid` if the body is no JSON object, or a field has a wrong type or value.
pub(in crate::api) fn sandbox_request(fields: &mut Fields<'_>) -> Result<(usize, SandboxSpec)> {
    let environment = environment(fields)?;
    // The same rules hold for the variables of a command.
    check_environment(&environment)?;
    let size =
        |(name, value): &EnvironmentChange| name.len() + value.as_ref().map_or(0, String::len);
    if environment.iter().map(size).sum::<usize>() > MAX_ENVIRONMENT_BYTES {
        return Err(Error::invalid(format_args!(
            "env is larger than {MAX_ENVIRONMENT_BYTES} bytes; every command would carry it: put large values into files"
        )));
    }
    let count = fields.whole("count", 1..=MAX_SANDBOXES)?.unwrap_or(1);
    let ports = fields.whole("tcp_ports", 0..=MAX_TCP_PORTS)?.unwrap_or(0);
    let spec = SandboxSpec {
        environment: environment.into(),
        settings: settings(fields)?,
        isolation: fields.choice("isolation", &Isolation::NAMES)?,
        network: network::policy(fields)?,
        read_only_paths: paths(fields, "read_only_paths")?,
        read_write_paths: paths(fields, "read_write_paths")?,
        tcp_ports: usize::try_from(ports).unwrap_or(usize::MAX),
        ..SandboxSpec::default()
    };
    Ok((usize::try_from(count).unwrap_or(usize::MAX), spec))
}

/// What is kept of a sandbox that is paused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::api) enum Keep {
    /// All that runs, in memory.
    Memory,
    /// Its files: all that runs is ended.
    Files,
}

/// Reads the body of a request to pause a sandbox: what is kept of it, and whether only the host's token resumes it.
///
/// # Errors
/// `Invalid` if a field has a wrong type or value.
pub(in crate::api) fn pause_request(fields: &mut Fields<'_>) -> Result<(Keep, bool)> {
    let choices = [("memory", Keep::Memory), ("files", Keep::Files)];
    let keep = fields.choice("keep", &choices)?;
    let holds = fields.boolean("hold")?.unwrap_or(false);
    Ok((keep.unwrap_or(Keep::Memory), holds))
}

/// Absolute paths; none if there is no such field.
fn paths(fields: &mut Fields<'_>, name: &'static str) -> Result<Vec<String>> {
    let accepted = format!("an array of at most {MAX_PATHS} absolute paths");
    let paths = fields
        .take(name)
        .map(|array| strings(name, &accepted, array));
    let paths = paths.transpose()?.unwrap_or_default();
    if paths.len() > MAX_PATHS {
        let count = paths.len();
        return Err(Error::invalid(format_args!(
            "{name} has {count} paths; it takes {accepted}"
        )));
    }
    Ok(paths)
}

/// The version of the contract with clients.
pub(in crate::api) const PROTOCOL: u32 = 3;

/// `GET /health`.
#[derive(Serialize)]
pub(in crate::api) struct Health<'a> {
    pub(in crate::api) status: &'static str,
    pub(in crate::api) version: &'static str,
    pub(in crate::api) protocol: u32,
    pub(in crate::api) uptime_ms: u128,
    pub(in crate::api) mode: &'static str,
    pub(in crate::api) sandboxes: usize,
    pub(in crate::api) isolation: &'a RawValue,
}

/// `GET /v1/access`.
#[derive(Serialize)]
pub(in crate::api) struct AccessDocument {
    pub(in crate::api) mode: &'static str,
    /// `server`, `sandbox` or `nothing`.
    pub(in crate::api) opens: &'static str,
    /// The id, if it opens one sandbox.
    pub(in crate::api) sandbox: Option<String>,
}

/// What is enforced on every sandbox, and what can be chosen.
#[derive(Serialize)]
pub(in crate::api) struct MachineDocument {
    #[serde(flatten)]
    always: IsolationDocument,
    postures: Vec<&'static str>,
    isolations: Vec<&'static str>,
    /// Of sandboxes that choose none.
    #[serde(skip_serializing_if = "Option::is_none")]
    default: Option<&'static str>,
    limits: Vec<&'static str>,
}

impl MachineDocument {
    /// The machine's capabilities as JSON; constant, so callers cache it.
    pub(in crate::api) fn of(machine: &Machine) -> Box<RawValue> {
        let isolation = Self {
            always: IsolationDocument::of(machine),
            postures: machine.network_policies(),
            isolations: machine.isolations(),
            default: machine.default_isolation(),
            limits: machine.limits(),
        };
        to_raw_value(&isolation).expect("names and numbers are JSON")
    }
}

/// The isolation layers that are enforced.
#[derive(Clone, Serialize)]
pub(in crate::api) struct IsolationDocument {
    landlock_abi: u32,
    layers: Vec<&'static str>,
}

impl IsolationDocument {
    /// Describes the isolation of a machine's sandboxes.
    pub(in crate::api) fn of(machine: &Machine) -> Self {
        Self {
            landlock_abi: machine.landlock_abi,
            layers: machine.layers(),
        }
    }
}

/// The answer to a request for sandboxes.
#[derive(Serialize)]
pub(in crate::api) struct CreatedDocument {
    pub(in crate::api) sandboxes: Vec<SandboxDocument>,
    /// Number of sandboxes that were not made.
    pub(in crate::api) rejected: usize,
    /// Why they were not, in a word and in a sentence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(in crate::api) rejected_code: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(in crate::api) rejected_reason: Option<String>,
}

#[derive(Serialize)]
pub(in crate::api) struct SandboxDocument {
    id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    token: Option<String>,
    uid: u32,
    home: String,
    created_at_ms: u64,
    /// `running`, `paused` or `stopped`.
    state: &'static str,
    state_since_ms: u64,
    /// Why it is stopped.
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<&'static str>,
    #[serde(flatten)]
    settings: SettingsDocument,
    max_procs: u64,
    max_mem_mb: Option<u64>,
    max_total_mem_mb: Option<u64>,
    max_cpu: Option<f64>,
    limits: LimitsDocument,
    network: NetworkPolicyDocument,
    tcp_ports: Vec<u16>,
    filesystem: FilesystemDocument,
    restrictions: Vec<&'static str>,
    isolation: SandboxIsolation,
}

/// What keeps the limits of a sandbox as a whole; those that it does not have are absent.
#[derive(Serialize)]
struct LimitsDocument {
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu: Option<&'static str>,
    processes: &'static str,
}

/// The paths that commands reach.
#[derive(Serialize)]
struct FilesystemDocument {
    read_only: Vec<String>,
    read_write: Vec<String>,
}

/// The isolation of a sandbox.
#[derive(Serialize)]
struct SandboxIsolation {
    #[serde(flatten)]
    layers: IsolationDocument,
    mode: &'static str,
}

impl SandboxDocument {
    /// Describes a sandbox; its token is for the client that made it only.
    pub(in crate::api) fn of(sandbox: &Sandbox, landlock_abi: u32, token: Option<String>) -> Self {
        let (limits, (state, state_since_ms)) = (&sandbox.limits, sandbox.state());
        Self {
            id: sandbox.id.clone(),
            token,
            uid: sandbox.user.uid,
            home: sandbox.home.to_string_lossy().into_owned(),
            created_at_ms: sandbox.created_at_ms,
            state: state.name(),
            state_since_ms,
            why: sandbox.phase.stopped.map(StopCause::name),
            settings: SettingsDocument::of(sandbox),
            max_procs: sandbox.max_processes(),
            max_mem_mb: sandbox.resource_limits().data.map(|bytes| bytes >> 20),
            max_total_mem_mb: limits.asked().memory.map(|bytes| bytes >> 20),
            max_cpu: limits.asked().cpu.map(|time| time.as_secs_f64()),
            limits: LimitsDocument {
                memory: limits.memory_by(),
                cpu: limits.cpu_by(),
                processes: limits.processes_by(),
            },
            network: NetworkPolicyDocument::of(sandbox.network()),
            tcp_ports: sandbox.tcp_ports().to_vec(),
            filesystem: FilesystemDocument {
                read_only: sandbox.read_only_paths(),
                read_write: sandbox.read_write_paths(),
            },
            restrictions: sandbox.restrictions(),
            isolation: SandboxIsolation {
                layers: IsolationDocument {
                    landlock_abi,
                    layers: sandbox.layers(),
                },
                mode: sandbox.isolation().name(),
            },
        }
    }
}
