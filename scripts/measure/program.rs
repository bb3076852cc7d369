//! Running programs: the server itself and whatever else listens on a port, their memory, and the
//! directory that they work in.

use std::fs;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::statvfs::statvfs;

use super::client::{Client, TOKEN};

/// The program that is measured.
pub const SERVER: &str = env!("SBX_BUILT_PROGRAM");

/// A running server of whatever kind, killed with the value.
pub struct Program {
    pub child: Child,
    pub port: u16,
}

impl Program {
    pub fn server(port: u16) -> Self {
        Self::start(port, &mut Self::server_command(port))
    }

    pub fn server_command(port: u16) -> Command {
        Self::with_settings(Command::new(SERVER), port)
    }

    /// As [`Program::server_command`], in a session of its own.
    pub fn leader_command(port: u16) -> Command {
        let mut command = Command::new("setsid");
        command.arg(SERVER);
        Self::with_settings(command, port)
    }

    fn with_settings(mut command: Command, port: u16) -> Command {
        // Commands have the server's environment, and what cargo sets in it has every program look for
        // its libraries in more places.
        command.env_clear();
        command.envs(std::env::vars_os().filter(|(name, _)| name == "PATH"));
        command
            .env("SBX_PORT", port.to_string())
            .env("SBX_TOKEN", TOKEN)
            .env("SBX_BIND", "127.0.0.1");
        command
    }

    pub fn start(port: u16, command: &mut Command) -> Self {
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        Self {
            child: child.unwrap(),
            port,
        }
    }

    /// A new connection, waiting for the program to listen.
    pub fn connect(&self) -> Client {
        let limit = Instant::now() + Duration::from_secs(20);
        loop {
            match TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)) {
                // Where nothing listens yet, a connection to a port of the range that is given out can
                // be one with itself.
                Ok(stream) if stream.local_addr().ok() == stream.peer_addr().ok() => {}
                Ok(stream) => return Client::new(stream),
                Err(error) => assert!(Instant::now() < limit, "nothing listens: {error}"),
            }
            thread::sleep(Duration::from_micros(50));
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // nginx has workers to end, so ask first; the others need not be asked.
        let pid = nix::unistd::Pid::from_raw(self.child.id().cast_signed());
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
        let _ = self.child.wait();
    }
}

/// What a process has resident, in KiB.
pub fn memory_of(pid: u32) -> u64 {
    status_of(pid, "VmRSS:")
}

/// The most that a process ever had resident, in KiB.
pub fn peak_memory_of(pid: u32) -> u64 {
    status_of(pid, "VmHWM:")
}

fn status_of(pid: u32, name: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let number = line.unwrap().trim().trim_end_matches(" kB");
    number.parse().unwrap()
}

pub fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

/// A directory, removed with the value.
pub struct Scratch {
    directory: PathBuf,
    /// Where its files are: in memory if there is room.
    pub medium: &'static str,
}

/// What all files of a group take together.
const ROOM: u64 = 4 << 30;

impl Scratch {
    pub fn new() -> Self {
        let memory = Path::new("/dev/shm");
        let has_room = statvfs(memory)
            .is_ok_and(|found| found.blocks_available() * found.fragment_size() >= ROOM);
        let (parent, medium) = if has_room {
            (memory.to_owned(), "in memory (tmpfs)")
        } else {
            (std::env::temp_dir(), "on disk")
        };
        let directory = parent.join(format!("sbx-bench-{}", std::process::id()));
        fs::create_dir(&directory).unwrap();
        Self { directory, medium }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}
