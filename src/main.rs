//! sbx-server: turns the machine it starts on into a sandbox, driven over HTTP.
//!
//! This file is the boot story, in order: hide the token, read the settings, split off init, make
//! the machine, listen, say so, and then one loop that accepts connections, watches for the signal
//! to end and for idleness.

mod activity;
mod api;
mod auth;
mod command;
mod config;
mod confine;
mod error;
mod files;
#[cfg(test)]
mod fuzz;
mod host;
mod http;
mod init;
mod logging;
mod machine;
mod memory;
mod ports;
mod proc;
mod process;
mod sys;
mod workspace;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::prctl;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use api::Api;
use auth::Authenticator;
use config::Config;
use error::{Error, Kind, Result};
use http::server::{self, Connections, Limits, Server};
use machine::Machine;
use sys::{Events, PollEntry, poll};

/// The exit status for settings that cannot be used.
const BAD_SETTINGS: u8 = 2;

/// What is to be done, from the command line.
enum Task {
    Serve { as_init: bool },
    Health,
    Print(String),
}

fn main() -> ExitCode {
    sys::occupy_standard_streams();
    logging::describe_panics();
    sys::close_inherited_on_exec();
    sys::reserve_child_descriptors();
    let arguments: Vec<_> = std::env::args_os()
        .skip(1)
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    let task = match task(&arguments) {
        Ok(task) => task,
        Err(text) => {
            logging::info(format_args!("{text}"));
            return ExitCode::from(BAD_SETTINGS);
        }
    };
    match task {
        Task::Print(text) => {
            let _ = std::io::stdout().write_all(text.as_bytes());
            ExitCode::SUCCESS
        }
        Task::Health => health(),
        Task::Serve { as_init } => {
            let (environment, settings) = take_environment();
            let config = match Config::from_variables(settings) {
                Ok(config) => config,
                Err(error) => {
                    logging::info(format_args!("{error}"));
                    return ExitCode::from(BAD_SETTINGS);
                }
            };
            match serve(config, environment, as_init) {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    logging::info(format_args!("{error}"));
                    ExitCode::FAILURE
                }
            }
        }
    }
}

fn task(arguments: &[String]) -> std::result::Result<Task, String> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        [] => Ok(Task::Serve {
            as_init: std::process::id() == 1,
        }),
        ["--init"] => Ok(Task::Serve { as_init: true }),
        ["health"] => Ok(Task::Health),
        ["--help" | "-h"] => Ok(Task::Print(config::help())),
        ["--version" | "-V"] => Ok(Task::Print(format!(
            "sbx-server {}\n",
            env!("CARGO_PKG_VERSION")
        ))),
        other => Err(format!(
            "unknown arguments {:?}; sbx-server --help says what there is",
            other.join(" ")
        )),
    }
}

type Environment = Vec<(std::ffi::OsString, std::ffi::OsString)>;

/// Reads the environment, and takes the token out of everybody's sight: out of the bytes that
/// `/proc/<pid>/environ` shows, and, by making the process non-dumpable, the server's memory out of
/// the reach of its commands.
fn take_environment() -> (Environment, BTreeMap<String, String>) {
    let environment: Environment = std::env::vars_os().collect();
    sys::scrub_environment("SBX_TOKEN");
    let _ = prctl::set_dumpable(false);
    sys::withhold_ptrace_from_children();
    let settings = settings(&environment);
    (environment, settings)
}

/// The variables that are for this program. Those of others may hold anything.
fn settings(environment: &Environment) -> BTreeMap<String, String> {
    environment
        .iter()
        .filter(|(name, _)| name.to_string_lossy().starts_with("SBX_"))
        .map(|(name, value)| {
            (
                name.to_string_lossy().into_owned(),
                value.to_string_lossy().into_owned(),
            )
        })
        .collect()
}

fn serve(config: Config, environment: Environment, as_init: bool) -> Result<()> {
    sys::restore_default(libc::SIGCHLD);
    // The library's own handlers, which tell of a full stack: on the way to execve a child still has
    // them, and whoever runs as its user could have them run there.
    sys::restore_default(libc::SIGSEGV);
    sys::restore_default(libc::SIGBUS);
    // A file that grows beyond the limit the server was started with is an error of one request.
    sys::ignore(libc::SIGXFSZ);
    if let Some(settings) = &config.host {
        host::check_rights(settings)?;
        prepare_for_sandboxes()?;
    }
    // What a sandbox's processes leave behind must be reaped, or its user is never free again.
    let is_split = as_init || config.host.is_some();
    let init = is_split.then(init::split).transpose()?;
    if config.log_requests {
        logging::enable_debug();
    }
    // Set before there is a second thread: all of them inherit it, and commands get theirs reset.
    let mut ending = SigSet::empty();
    ending.add(Signal::SIGTERM);
    ending.add(Signal::SIGINT);
    let no_signals = |errno| Error::system("cannot watch for signals", errno);
    ending.thread_set_mask().map_err(no_signals)?;
    let signals = SignalFd::with_flags(&ending, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
        .map_err(no_signals)?;

    let machine = Machine::new(&config, environment)?;
    if let Some(init) = init {
        init.keep()?;
    }
    raise_descriptor_limit();
    let listener = server::listen(config.listen)
        .map_err(|error| Error::io(format_args!("cannot listen on {}", config.listen), &error))?;
    let address = listener
        .local_addr()
        .map_err(|error| Error::io("cannot listen", &error))?;
    let connections = Connections::default();
    let authenticator = Authenticator::new(config.token, config.strict_scopes)?;
    let api = Arc::new(Api::new(machine, authenticator, connections.clone()));
    let limits = Limits {
        all: config.max_connections,
        // Those who are served here are elsewhere, and those who run here are not trusted.
        from_here: match config.host {
            Some(_) => config.max_connections.div_ceil(4),
            None => config.max_connections,
        },
        keeps_thread: config.host.is_some(),
    };
    let mut server = Server::new(listener, Arc::clone(&api), limits, connections)
        .map_err(|error| Error::io("cannot listen", &error))?;
    let version = env!("CARGO_PKG_VERSION");
    let machine = api.machine();
    logging::whole_line(format_args!(
        "sbx-server {version} listening on {address} mode={} isolation={}",
        machine.mode(),
        isolation(machine)
    ));
    loop {
        let mut entries = [
            PollEntry::new(server.descriptor(), Events::READABLE),
            PollEntry::new(signals.as_fd(), Events::READABLE),
        ];
        poll(&mut entries, machine.next_idle_check());
        let [connecting, told] = entries.map(|entry| entry.is_ready());
        if told {
            logging::info(format_args!("told to end"));
            machine.shut_down();
            machine.wait_for_streams(Duration::from_millis(500));
            return Ok(());
        }
        if connecting {
            server.accept();
        } else if machine.has_idled_out() {
            logging::info(format_args!("idle for too long, ending"));
            return Ok(());
        }
    }
}

/// Gives up, for itself or for all it will start, what no sandbox may have.
fn prepare_for_sandboxes() -> Result<()> {
    sys::withhold_capabilities_from_children();
    // Acting as a sandbox changes user and group of a thread, not its further groups.
    nix::unistd::setgroups(&[])
        .map_err(|errno| Error::system("cannot hold sandboxes: cannot give up groups", errno))?;
    // What sandboxes make is as open as usual, whatever the server was started with.
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o022));
    Ok(())
}

/// The ready line's word for what stands between sandboxes.
fn isolation(machine: &Machine) -> String {
    match machine.layers() {
        layers if layers.is_empty() => "none".to_owned(),
        layers => format!(
            "{} landlock_abi={}",
            layers.join(","),
            machine.landlock_abi()
        ),
    }
}

/// Every connection, pipe and process takes descriptors; the soft limit is usually a small part of
/// what is allowed. Commands get the limit the server was started with.
fn raise_descriptor_limit() {
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}

/// `sbx-server health`: asks the server on this machine, for images that have no HTTP client.
fn health() -> ExitCode {
    let port = match config::port(settings(&std::env::vars_os().collect())) {
        Ok(port) => port,
        Err(error) => {
            logging::info(format_args!("{error}"));
            return ExitCode::from(BAD_SETTINGS);
        }
    };
    match ask_health(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            logging::info(format_args!("{error}"));
            ExitCode::FAILURE
        }
    }
}

fn ask_health(address: SocketAddr) -> Result<()> {
    let limit = Duration::from_secs(5);
    let failed =
        |error: std::io::Error| Error::io(format_args!("no answer from {address}"), &error);
    let mut socket = TcpStream::connect_timeout(&address, limit).map_err(failed)?;
    socket.set_read_timeout(Some(limit)).map_err(failed)?;
    socket
        .write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        .map_err(failed)?;
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).map_err(failed)?;
    if answer.starts_with(b"HTTP/1.1 200 ") {
        return Ok(());
    }
    Err(Error::new(
        Kind::System,
        format!("{address} answers, but not as a healthy server"),
    ))
}
