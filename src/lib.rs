//! sbx-server: turns the machine it starts on into a sandbox, driven over HTTP.
//!
//! This file starts the server: it hides the token, reads the settings, prepares the process,
//! splits off init, sets up the machine, listens, and prints the ready line. Then one loop accepts
//! connections until a signal or idleness ends the server. Comments name the steps that must
//! precede others.

// Each part is written for the build that has all of them, which is checked without this.
#![cfg_attr(
    not(all(
        feature = "attach",
        feature = "console",
        feature = "e2b",
        feature = "file-tools",
        feature = "interpreter",
        feature = "mcp"
    )),
    allow(
        dead_code,
        unused_imports,
        reason = "parts that are left out are the only users of some things, and of what modules re-export"
    )
)]

mod api;
mod auth;
mod client;
mod clock;
mod codec;
mod config;
mod confine;
mod egress;
mod error;
mod fault;
mod files;
#[cfg(test)]
mod fuzz;
mod host;
mod http;
#[cfg_attr(not(feature = "interpreter"), path = "interpreter/none.rs")]
mod interpreter;
mod limits;
mod logging;
mod machine;
mod ports;
mod process;
mod relay;
mod spec;
mod startup;
mod sys;
mod threads;
mod workspace;

use std::ffi::OsString;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::prctl;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect, socket};

use api::{Api, ApiSettings};
use auth::Authenticator;
use codec::carried::carried;
use config::{Config, ConfigError, HostSettings, Variables};
use error::Error;
use http::server::Server;
use machine::Machine;
use startup::init;
use startup::signals::Signals;
use sys::listen::{self, HeldPort};
use sys::{Events, PollEntry, poll};
use threads::{panics, priority};

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// What the program was built from, if the build was told, as that of a release is.
const COMMIT: Option<&str> = option_env!("SBX_COMMIT");

/// How long open streams may take to send their last events when the server ends.
const STREAM_GRACE: Duration = Duration::from_millis(500);

/// How long a host waits for the port of one that was killed, and the time between two attempts.
const PORT_LIMIT: Duration = Duration::from_secs(5);
const PORT_PAUSE: Duration = Duration::from_millis(20);

/// How long `sbx-server health` waits for the connection, and for each part of the answer.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(5);

/// Why the program fails: its exit status and the line that it logs.
struct ExitError {
    status: u8,
    text: String,
}

impl ExitError {
    /// Settings or arguments that cannot be used.
    fn usage(text: String) -> Self {
        Self { status: 2, text }
    }

    /// A server that cannot start, or is not healthy.
    fn other(text: String) -> Self {
        Self { status: 1, text }
    }
}

impl From<ConfigError> for ExitError {
    fn from(error: ConfigError) -> Self {
        Self::usage(error.to_string())
    }
}

impl From<Error> for ExitError {
    fn from(error: Error) -> Self {
        Self::other(error.to_string())
    }
}

pub fn main() -> ExitCode {
    // The first process of a sandbox's namespaces: it does nothing, not even prepare to.
    let mut words = std::env::args_os().skip(1);
    if words
        .next()
        .is_some_and(|word| word == confine::HOLDER_ARGUMENT)
    {
        sys::wait_for_end();
    }
    panics::install();
    sys::prepare_descriptors();
    match panics::essential(run_task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            logging::info(format_args!("{}", failure.text));
            ExitCode::from(failure.status)
        }
    }
}

/// Runs the task that the command line names.
fn run_task() -> Result<(), ExitError> {
    let arguments: Vec<String> = std::env::args_os()
        .skip(1)
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        [] => serve(std::process::id() == 1),
        ["--init"] => serve(true),
        ["health"] => check_health(),
        ["--help" | "-h"] => {
            print(config::help().as_bytes());
            Ok(())
        }
        ["--version" | "-V"] => {
            let commit = COMMIT.map_or(String::new(), |commit| format!(" ({commit})"));
            print(format!("sbx-server {VERSION}{commit}\n").as_bytes());
            Ok(())
        }
        ["--licenses"] => {
            print(&carried!("NOTICES"));
            Ok(())
        }
        other => Err(ExitError::usage(format!(
            "unknown arguments {:?}; sbx-server --help lists the known ones",
            other.join(" ")
        ))),
    }
}

/// Prints `text`. A reader that closes its end early is no failure.
fn print(text: &[u8]) {
    let _ = io::stdout().write_all(text);
}

/// Serves until a signal or idleness ends the server.
fn serve(as_init: bool) -> Result<(), ExitError> {
    let environment = take_environment();
    let variables = Variables::new(&environment);
    for warning in variables.warnings() {
        logging::info(format_args!("{warning}"));
    }
    let config = Config::from_variables(&variables)?;
    if config.log_requests {
        logging::enable_debug();
    }

    set_signal_actions();
    if let Some(settings) = &config.host {
        host::check_rights(settings)?;
        host::check_templates(settings).map_err(|error| ExitError::usage(error.to_string()))?;
        if let Some(file) = &config.token_file {
            host::check_token_file(file)?;
        }
        if let Some(ports) = &settings.tcp_ports {
            listen::reserve(ports);
        }
        prepare_for_sandboxes()?;
    }
    // Init reaps the orphans of a sandbox: until then its user cannot be given to another one.
    let is_split = as_init || config.host.is_some();
    let init = is_split.then(init::split).transpose()?;
    priority::raise();
    if init.is_none() {
        // The orphans of commands come to the server, which finds and ends them. Without this, they are
        // lost to it.
        let _ = prctl::set_child_subreaper(true);
    }
    // Before the second thread.
    let signals =
        Signals::watch(false).map_err(|errno| Error::system("cannot watch for signals", errno))?;
    // Before the first sandbox, which could get the port at another address.
    let hosting = config.host.as_ref();
    let held_port = hosting.map(|settings| hold_port(config.listen.port(), settings));
    let held_port = held_port.transpose()?;
    let machine = Machine::new(&config, environment)?;
    // After the machine has noted the limit that commands get.
    raise_descriptor_limit();
    machine.take_over()?;
    // Both acted as owners of sandboxes.
    if let Some(init) = init {
        init.keep()?;
    }

    let cannot_listen =
        |error: io::Error| Error::io(format_args!("cannot listen on {}", config.listen), &error);
    let listener = match &held_port {
        Some(port) => port.listen(config.listen),
        None => listen::listen(config.listen),
    }
    .map_err(cannot_listen)?;
    let address = listener.local_addr().map_err(cannot_listen)?;
    machine.egress.close_port(address.port());
    let slots = machine.slots.clone();
    let users = config.host.map(|settings| settings.users);
    let kept_out = users.clone().filter(|_| config.token.is_none());
    let kept_key = machine.token_key(config.token.as_ref())?;
    let authenticator = Authenticator::new(config.token, kept_key, config.strict_scopes)?;
    let api = Arc::new(Api::new(
        machine,
        authenticator,
        slots.clone(),
        ApiSettings {
            allowed_origins: config.allowed_origins,
            is_local: config.is_local,
            doors: config.doors,
            #[cfg(feature = "e2b")]
            e2b_templates: config.e2b_templates,
            kept_out,
        },
    ));
    let server = Server::new(listener, Arc::clone(&api), slots, users).map_err(cannot_listen)?;
    if let Some(made) = config.made_token {
        made.publish()?;
    }
    let machine = api.machine();
    logging::whole_line(format_args!(
        "sbx-server {VERSION} listening on {address} mode={} isolation={}",
        machine.mode(),
        isolation(machine)
    ));
    // After the ready line, which clients wait for.
    let (most, wanted) = (machine.slots.most(), config.max_connections);
    if most < wanted {
        logging::info(format_args!(
            "serves {most} of SBX_MAX_CONNECTIONS={wanted} connections: memory, descriptors or threads suffice for no more"
        ));
    }
    accept_until_end(server, machine, &signals);
    Ok(())
}

/// Returns the environment, after hiding the token from every other process: it overwrites the
/// bytes that `/proc/<pid>/environ` shows, and makes the server's memory unreadable.
fn take_environment() -> Vec<(OsString, OsString)> {
    let environment = std::env::vars_os().collect();
    sys::scrub_environment("SBX_TOKEN");
    let _ = prctl::set_dumpable(false);
    sys::withhold_ptrace_from_children();
    environment
}

fn set_signal_actions() {
    sys::restore_default(libc::SIGCHLD);
    // The standard library handles these to report a stack overflow. A child keeps the handlers
    // until execve, and its user could make them run.
    sys::restore_default(libc::SIGSEGV);
    sys::restore_default(libc::SIGBUS);
    // A write beyond RLIMIT_FSIZE then fails with EFBIG, which fails one request.
    sys::ignore(libc::SIGXFSZ);
}

/// Gives up rights that no sandbox must get: some of the server, others only of its children.
fn prepare_for_sandboxes() -> Result<(), Error> {
    sys::withhold_capabilities_from_children();
    // A thread that acts as a sandbox changes its user and group, and keeps supplementary groups.
    nix::unistd::setgroups(&[])
        .map_err(|errno| Error::system("cannot hold sandboxes: cannot give up groups", errno))?;
    // Files that sandboxes make get the usual modes, whatever umask the server inherited.
    nix::sys::stat::umask(nix::sys::stat::Mode::from_bits_truncate(0o022));
    Ok(())
}

/// Takes the port of the server on every address, so that no sandbox receives what clients send to it.
fn hold_port(port: u16, settings: &HostSettings) -> Result<HeldPort, Error> {
    let act = format_args!("cannot hold sandboxes: cannot take port {port} on every address");
    let deadline = Instant::now() + PORT_LIMIT;
    let mut held = HeldPort::take(port);
    let is_in_use = |error: &io::Error| error.kind() == ErrorKind::AddrInUse;
    while held.as_ref().is_err_and(is_in_use) && Instant::now() < deadline {
        let is_ending = host::free_port(settings)?;
        if is_ending {
            std::thread::sleep(PORT_PAUSE);
        }
        held = HeldPort::take(port);
        if !is_ending {
            break;
        }
    }
    let held = held.map_err(|error| Error::io(act, &error))?;
    if port != 0 {
        listen::reserve(&(port..=port));
    }
    Ok(held)
}

/// Raises the soft limit on descriptors to the hard one: every connection, pipe and process takes
/// some. Commands get the limit that the server was started with.
fn raise_descriptor_limit() {
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}

/// The isolation layers of sandboxes, for the ready line.
fn isolation(machine: &Machine) -> String {
    let (layers, abi) = (machine.layers().join(","), machine.landlock_abi);
    if layers.is_empty() {
        return "none".to_owned();
    }
    let default = machine.default_isolation().unwrap_or_default();
    format!("{layers} landlock_abi={abi} default_isolation={default}")
}

/// The server's loop. Returns when a signal or idleness ends it.
fn accept_until_end(mut server: Server<Api>, machine: &Machine, signals: &Signals) {
    loop {
        let mut entries = [
            PollEntry::new(server.descriptor(), Events::READABLE),
            PollEntry::new(signals.as_fd(), Events::READABLE),
        ];
        poll(&mut entries, machine.next_idle_check());
        let [has_connection, has_signal] = entries.map(|entry| entry.events().any());
        if has_signal && signals.take_end() {
            logging::info(format_args!("told to end"));
            machine.shut_down();
            machine.wait_for_streams(STREAM_GRACE);
            return;
        }
        if has_connection {
            server.accept();
        } else if machine.has_idled_out() {
            logging::info(format_args!("idle for too long, ending"));
            machine.end_idle();
            return;
        }
    }
}

/// `sbx-server health`: asks the server on this machine, for images that have no HTTP client.
fn check_health() -> Result<(), ExitError> {
    let port = config::port(&Variables::new(&take_environment()))?;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let answer = request_health(address)
        .map_err(|error| Error::io(format_args!("no answer from {address}"), &error))?;
    if answer.starts_with(b"HTTP/1.1 200 ") {
        return Ok(());
    }
    let text = format!("{address} answers, but not as a healthy server");
    Err(ExitError::other(text))
}

fn request_health(address: SocketAddr) -> io::Result<Vec<u8>> {
    let mut socket = match TcpStream::connect_timeout(&address, HEALTH_TIMEOUT) {
        // Sandboxes can use up the ports that the kernel chooses from.
        Err(error) if error.kind() == ErrorKind::AddrNotAvailable => {
            connect_from_privileged_port(address)?
        }
        other => other?,
    };
    socket.set_read_timeout(Some(HEALTH_TIMEOUT))?;
    socket.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer)?;
    Ok(answer)
}

/// Connects from one of the ports that the kernel gives only to root, and only by number.
fn connect_from_privileged_port(address: SocketAddr) -> io::Result<TcpStream> {
    for port in (512..1024).rev() {
        let flags = SockFlag::SOCK_CLOEXEC;
        let socket = socket(AddressFamily::Inet, SockType::Stream, flags, None)?;
        let from = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        match bind(socket.as_raw_fd(), &SockaddrStorage::from(from)) {
            Err(Errno::EADDRINUSE) => continue,
            bound => bound?,
        }
        // It also limits connect (socket(7)).
        let socket = TcpStream::from(socket);
        socket.set_write_timeout(Some(HEALTH_TIMEOUT))?;
        connect(socket.as_raw_fd(), &SockaddrStorage::from(address))?;
        return Ok(socket);
    }
    Err(ErrorKind::AddrNotAvailable.into())
}
