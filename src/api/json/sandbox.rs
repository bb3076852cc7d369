//! Sandboxes and their server in JSON.

use serde::Serialize;

use super::command::environment;
use super::network::{self, NetworkPolicyDocument};
use super::settings::{SettingsDocument, settings};
use crate::codec::fields::{Fields, strings};
use crate::error::{Error, Result};
use crate::host::Sandbox;
use crate::machine::Machine;
use crate::spec::command::{EnvironmentChange, check_environment};
use crate::spec::isolation::Isolation;
use crate::spec::sandbox::{RootChoice, SandboxSpec, StopCause, is_device_name};
use crate::sys::IDS_OF_SANDBOX;

/// Most sandboxes of one request.
const MAX_SANDBOXES: u64 = 10_000;

/// Most bytes of a sandbox's environment: as much as the kernel takes in a single variable
/// (`MAX_ARG_STRLEN`, execve(2)).
const MAX_ENVIRONMENT_BYTES: usize = 128 * 1024;

/// Most TCP ports of a sandbox.
const MAX_TCP_PORTS: u64 = 16;

/// Most paths that are added to what a sandbox can read, or change; and most devices.
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
    let network = network::asked(fields)?;
    let spec = SandboxSpec {
        environment: environment.into(),
        settings: settings(fields)?,
        isolation: fields.choice("isolation", &Isolation::NAMES)?,
        root_choice: root(fields)?,
        shares_network: network.as_ref().is_some_and(|network| network.is_shared),
        network: network.map(|network| network.policy),
        read_only_paths: paths(fields, "read_only_paths")?,
        read_write_paths: paths(fields, "read_write_paths")?,
        devices: devices(fields)?,
        tcp_ports: usize::try_from(ports).unwrap_or(usize::MAX),
        ..SandboxSpec::default()
    };
    Ok((usize::try_from(count).unwrap_or(usize::MAX), spec))
}

/// Longest name of a template and of a user.
const MAX_NAME: usize = 256;

/// Which root a sandbox is to have.
fn root(fields: &mut Fields<'_>) -> Result<RootChoice> {
    let private = fields.choice("root", &[("shared", false), ("private", true)])?;
    let template = fields.string("template")?;
    let user = fields.string("user")?;
    let texts = [&template, &user].into_iter().flatten();
    if texts
        .clone()
        .any(|text| text.is_empty() || text.len() > MAX_NAME)
    {
        let text = format!("template and user take 1 to {MAX_NAME} bytes");
        return Err(Error::invalid(text));
    }
    let durable = fields.boolean("durable")?;
    let has_more = texts.count() > 0 || durable.is_some();
    match private {
        Some(true) => Ok(RootChoice::Private {
            template,
            user,
            makes_user: false,
            is_volatile: durable == Some(false),
        }),
        private => {
            if has_more {
                let text = "template, user and durable go with root private only";
                return Err(Error::invalid(text));
            }
            Ok(private.map_or(RootChoice::Default, |_| RootChoice::Shared))
        }
    }
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
    texts(fields, name, "absolute paths")
}

/// Names of devices; none if there is no such field.
fn devices(fields: &mut Fields<'_>) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for name in texts(fields, "devices", DEVICE_NAMES)? {
        if !is_device_name(&name) {
            let text = format_args!("devices has {name:?}; it takes {DEVICE_NAMES}");
            return Err(Error::invalid(text));
        }
        if !names.contains(&name) {
            names.push(name);
        }
    }
    Ok(names)
}

const DEVICE_NAMES: &str = "names such as nvidia.com/gpu=all";

/// At most [`MAX_PATHS`] texts.
fn texts(fields: &mut Fields<'_>, name: &'static str, what: &str) -> Result<Vec<String>> {
    let accepted = format!("an array of at most {MAX_PATHS} {what}");
    let texts = fields
        .take(name)
        .map(|array| strings(name, &accepted, array));
    let texts = texts.transpose()?.unwrap_or_default();
    if texts.len() > MAX_PATHS {
        let count = texts.len();
        return Err(Error::invalid(format_args!(
            "{name} has {count} elements; it takes {accepted}"
        )));
    }
    Ok(texts)
}

/// The version of the contract with clients.
pub(in crate::api) const PROTOCOL: u32 = 3;

/// `GET /health`.
#[derive(Serialize)]
pub(in crate::api) struct Health {
    pub(in crate::api) status: &'static str,
    pub(in crate::api) version: &'static str,
    pub(in crate::api) protocol: u32,
    pub(in crate::api) uptime_ms: u128,
    pub(in crate::api) mode: &'static str,
    pub(in crate::api) sandboxes: usize,
    pub(in crate::api) isolation: MachineDocument,
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
    /// What the operator has named for roots of sandboxes: anybody may ask.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    templates: Vec<String>,
    /// Why sandboxes cannot have roots of their own.
    #[serde(skip_serializing_if = "Option::is_none")]
    no_private_root: Option<String>,
    /// Of sandboxes that choose none.
    #[serde(skip_serializing_if = "Option::is_none")]
    default: Option<&'static str>,
    limits: Vec<&'static str>,
}

impl MachineDocument {
    /// The machine's capabilities.
    pub(in crate::api) fn of(machine: &Machine) -> Self {
        Self {
            always: IsolationDocument::of(machine),
            postures: machine.network_policies(),
            isolations: machine.isolations(),
            templates: machine.given_templates(),
            no_private_root: machine.lack_of_roots(),
            default: machine.default_isolation(),
            limits: machine.limits(),
        }
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
    #[serde(skip_serializing_if = "Vec::is_empty")]
    devices: Vec<String>,
    root: &'static str,
    /// What a root of its own was made of.
    #[serde(skip_serializing_if = "Option::is_none")]
    template: Option<String>,
    /// The snapshot that this was.
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshot: Option<String>,
    /// Who runs commands that choose nobody, in a root of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    user: Option<String>,
    /// The ids of the machine that those of a root of its own are.
    #[serde(skip_serializing_if = "Option::is_none")]
    ids: Option<IdsDocument>,
    /// Whether the files of a root of its own outlast a failure of the machine.
    #[serde(skip_serializing_if = "Option::is_none")]
    durable: Option<bool>,
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

/// A block of ids.
#[derive(Serialize)]
struct IdsDocument {
    first: u32,
    count: u32,
}

/// The paths that commands reach.
#[derive(Serialize)]
struct FilesystemDocument {
    /// `shared` or `private`.
    root: &'static str,
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
        let root = sandbox.own_root();
        Self {
            id: sandbox.id.clone(),
            token,
            uid: sandbox.user.uid,
            home: sandbox.shown_home().to_string_lossy().into_owned(),
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
            devices: sandbox.spec.devices.clone(),
            root: root.map_or("shared", |_| "private"),
            template: root.map(|(spec, ..)| spec.template.clone()),
            snapshot: root.and_then(|(spec, ..)| spec.snapshot.clone()),
            user: root.map(|(_, user, _)| user.to_owned()),
            ids: root.map(|(.., first)| IdsDocument {
                first,
                count: IDS_OF_SANDBOX,
            }),
            durable: root.map(|(spec, ..)| !spec.is_volatile),
            filesystem: FilesystemDocument {
                root: root.map_or("shared", |_| "private"),
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
