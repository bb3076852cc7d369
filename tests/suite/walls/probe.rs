//! What a hostile program does, one act at a time.
//!
//! The suite is a static program: a copy of it in a sandbox's home, told to run this one "test",
//! is a program that does there whatever its standard input says, and says how each act ended.
//! So a test is a table of acts and expected outcomes, and needs no compiler or interpreter in the
//! image. [`Probe`] is the outer half, which knows the sandbox; [`act`] is the inner half.
//!
//! This is also the one file of these tests with `unsafe`: most of what is to be attempted is a
//! bare system call.

#![allow(unsafe_code)]

use std::cmp::Ordering;
use std::ffi::{CStr, CString};
use std::fmt::Write as _;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write as _};
use std::net::{SocketAddr, SocketAddrV4, TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, symlink};
use std::os::unix::net::{SocketAddr as UnixAddress, UnixDatagram, UnixListener, UnixStream};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{self, AtomicBool};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, SockaddrIn,
    SockaddrLike, bind, connect, recvmsg, sendmsg, socket,
};
use serde_json::{Value, json};

use crate::fixture::{
    Connection, PATIENCE, Sandbox, copy_program, exchange, stat_of, uid_of, wait_until,
};

/// Acts, each a name and its operands, and what is to come of them: `ok`, the name of an errno, or
/// several of these with `|` between them.
#[derive(Default)]
pub struct Plan(Vec<(Vec<String>, String)>);

impl Plan {
    pub fn add(&mut self, act: &[&str], expected: &str) {
        let act = act.iter().map(|word| (*word).to_owned()).collect();
        self.0.push((act, expected.to_owned()));
    }

    /// The acts.
    pub fn acts(&self) -> Vec<Vec<String>> {
        self.0.iter().map(|(act, _)| act.clone()).collect()
    }

    /// Tells together of all acts that did not end as expected.
    #[track_caller]
    pub fn compare(&self, outcomes: &[String]) {
        assert_eq!(outcomes.len(), self.0.len(), "not all acts ended");
        let mut wrong = String::new();
        for ((act, expected), outcome) in self.0.iter().zip(outcomes) {
            if !expected.split('|').any(|one| one == outcome) {
                let _ = writeln!(wrong, "{act:?}: {outcome}, not {expected}");
            }
        }
        assert!(wrong.is_empty(), "\n{wrong}");
    }
}

/// What makes a copy of the suite do what its standard input says: a JSON array of acts. It is two
/// threads then.
pub const ARGUMENTS: [&str; 5] = [
    "--exact",
    "walls::probe::act",
    "--ignored",
    "--nocapture",
    "--test-threads=1",
];

/// The command line of a copy of the suite at this path.
pub fn words(program: &str) -> Vec<&str> {
    [program].into_iter().chain(ARGUMENTS).collect()
}

/// The request that has such a copy perform acts as one process, one after the other.
pub fn command(program: &str, acts: &Value) -> Value {
    json!({ "cmd": words(program), "stdin": acts.to_string() })
}

/// The hostile program in a sandbox.
pub struct Probe<'a> {
    pub sandbox: &'a Sandbox<'a>,
    program: String,
}

impl<'a> Probe<'a> {
    /// Puts it there, by hand, so that nothing depends on the server's file routes.
    pub fn new(sandbox: &'a Sandbox<'a>) -> Self {
        let program = Self::put(sandbox);
        Self { sandbox, program }
    }

    /// One that is at this path in the sandbox already.
    pub fn at(sandbox: &'a Sandbox<'a>, program: &str) -> Self {
        let program = program.to_owned();
        Self { sandbox, program }
    }

    /// Only puts it there; its path.
    pub fn put(sandbox: &Sandbox<'_>) -> String {
        let path = sandbox.home.join("probe");
        if !path.exists() {
            copy_program(std::env::current_exe().unwrap(), &path);
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
            std::os::unix::fs::chown(&path, Some(sandbox.uid), Some(sandbox.uid)).unwrap();
        }
        path.to_str().unwrap().to_owned()
    }

    /// The request that runs acts as one process, one after the other.
    pub fn command(&self, acts: &[&[&str]]) -> Value {
        command(&self.program, &json!(acts))
    }

    /// Its command line.
    pub fn words(&self) -> Vec<&str> {
        words(&self.program)
    }

    /// Runs acts as one process and returns how they ended.
    #[track_caller]
    pub fn run(&self, acts: &[&[&str]]) -> Vec<String> {
        let outcome = self.sandbox.exec(&self.command(acts));
        let outcomes = outcomes(&outcome.stdout);
        assert_eq!(outcomes.len(), acts.len(), "{acts:?}: {outcome:?}");
        outcomes
    }

    /// Runs one act as a process of its own.
    #[track_caller]
    pub fn run_one(&self, act: &[&str]) -> String {
        self.run(&[act]).remove(0)
    }

    /// Runs a plan as one process; reports everything that does not end as expected at once.
    #[track_caller]
    pub fn check(&self, plan: &Plan) {
        let acts: Vec<Vec<&str>> = plan
            .0
            .iter()
            .map(|(act, _)| act.iter().map(String::as_str).collect())
            .collect();
        let acts: Vec<&[&str]> = acts.iter().map(Vec::as_slice).collect();
        plan.compare(&self.run(&acts));
    }

    /// Runs acts in the background and waits until all of them have ended; the process stays.
    #[track_caller]
    pub fn hold(&self, acts: &[&[&str]]) -> Value {
        let acts: Vec<&[&str]> = acts.iter().copied().chain([&["stay"][..]]).collect();
        let process = self.sandbox.spawn(&self.command(&acts));
        let logs = format!("processes/{}/logs", process["id"].as_str().unwrap());
        wait_until("the probe has done what it was told", PATIENCE, || {
            let text = self.sandbox.get(&logs).text();
            let done: String = text
                .lines()
                .filter_map(|line| serde_json::from_str::<Value>(line).ok())
                .filter(|event| event["event"] == "stdout")
                .filter_map(|event| event["data"].as_str().map(str::to_owned))
                .collect();
            let done = outcomes(&done);
            assert!(!text.contains("\"exit\""), "the probe ended: {text}");
            assert!(done.iter().all(|outcome| outcome == "ok"), "{done:?}");
            done.len() == acts.len() - 1
        });
        process
    }
}

/// What the inner half printed.
pub fn outcomes(output: &str) -> Vec<String> {
    output
        .lines()
        .filter_map(|line| line.strip_prefix("@"))
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[test]
#[ignore = "the other tests run it inside sandboxes"]
fn act() {
    let mut plan = String::new();
    io::stdin().read_to_string(&mut plan).unwrap();
    if plan.is_empty() {
        return;
    }
    let plan: Vec<Vec<String>> = serde_json::from_str(&plan).unwrap();
    for words in plan {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let outcome = perform(&words).unwrap_or_else(|error| name_of(&error));
        println!("\n@{}", json!(outcome));
    }
}

fn name_of(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(number) => format!("{:?}", Errno::from_raw(number)),
        None => error.to_string(),
    }
}

/// A number, in hexadecimal with `0x`.
fn number(text: &str) -> i64 {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).unwrap().cast_signed(),
        None => text.parse().unwrap(),
    }
}

fn done<T>(result: io::Result<T>) -> io::Result<String> {
    result.map(|_| "ok".to_owned())
}

/// Opens connections as fast as it can, and keeps the newest of each thread. Whether any was refused.
fn flood(address: SocketAddr, kept: usize, limit: Duration) -> String {
    let end = Instant::now() + limit;
    let open = move || {
        let mut held = std::collections::VecDeque::<TcpStream>::new();
        let mut refused = 0;
        while Instant::now() < end {
            if held.len() >= kept
                && let Some(mut oldest) = held.pop_front()
                && oldest.set_nonblocking(true).is_ok()
            {
                let mut answer = [0; 12];
                let is_refused =
                    oldest.read_exact(&mut answer).is_ok() && answer.ends_with(b" 503");
                refused += usize::from(is_refused);
            }
            held.extend(TcpStream::connect(address));
        }
        refused
    };
    let threads = [(); 4].map(|()| std::thread::spawn(open));
    let refused = threads.map(|thread| thread.join().unwrap());
    if refused.iter().sum::<usize>() > 0 {
        "refused"
    } else {
        "ok"
    }
    .to_owned()
}

/// Does one act.
#[expect(clippy::too_many_lines, reason = "it is a table of all acts")]
fn perform(words: &[&str]) -> io::Result<String> {
    match *words {
        ["read", path] => done(
            open(OpenOptions::new().read(true), path).and_then(|mut file| {
                let mut byte = [0];
                file.read(&mut byte)
            }),
        ),
        ["write", path] => {
            done(open(OpenOptions::new().write(true), path).and_then(|mut file| file.write(b"!")))
        }
        ["open-path", path] => done(
            OpenOptions::new()
                .read(true)
                .custom_flags(libc::O_PATH)
                .open(path),
        ),
        ["put", path, text] => done(
            open(OpenOptions::new().write(true), path)
                .and_then(|mut file| file.write_all(text.as_bytes())),
        ),
        ["create", path] => done(open(OpenOptions::new().write(true).create_new(true), path)),
        ["truncate", path] => done(open(OpenOptions::new().write(true).truncate(true), path)),
        ["truncate-path", path] => {
            let path = CString::new(path)?;
            // SAFETY: a string that ends in NUL and outlives the call.
            status(unsafe { libc::truncate(path.as_ptr(), 0) }.into())
        }
        ["list", path] => done(fs::read_dir(path).map(Iterator::count)),
        ["stat", path] => done(fs::symlink_metadata(path)),
        ["readlink", path] => done(fs::read_link(path)),
        ["mkdir", path] => done(fs::create_dir(path)),
        ["rmdir", path] => done(fs::remove_dir(path)),
        ["unlink", path] => done(fs::remove_file(path)),
        ["rename", from, to] => done(fs::rename(from, to)),
        ["exchange", one, other] => {
            let (one, other) = (CString::new(one)?, CString::new(other)?);
            if exchange(&one, &other) {
                Ok("ok".to_owned())
            } else {
                Err(io::Error::last_os_error())
            }
        }
        ["link", from, to] => done(fs::hard_link(from, to)),
        ["symlink", to, path] => done(symlink(to, path)),
        ["chmod", path] => done(fs::set_permissions(path, fs::Permissions::from_mode(0o777))),
        ["chown", path, uid] => done(std::os::unix::fs::chown(
            path,
            Some(u32::try_from(number(uid)).unwrap()),
            None,
        )),
        ["touch", path] => {
            let path = CString::new(path)?;
            // SAFETY: a string that ends in NUL; no times stand for now.
            status(
                unsafe { libc::utimensat(libc::AT_FDCWD, path.as_ptr(), std::ptr::null(), 0) }
                    .into(),
            )
        }
        ["watch", path] => {
            let path = CString::new(path)?;
            // SAFETY: a string that ends in NUL and outlives the call.
            unsafe {
                let watcher = libc::inotify_init1(libc::IN_NONBLOCK);
                status(libc::inotify_add_watch(watcher, path.as_ptr(), libc::IN_ALL_EVENTS).into())
            }
        }
        ["chdir", path] => done(std::env::set_current_dir(path)),
        // What a program says, when it is started; its status besides.
        ["exec", path, ref arguments @ ..] => Command::new(path)
            .args(arguments)
            .stdin(std::process::Stdio::null())
            .output()
            .map(|output| {
                let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
                format!("{} {text}", output.status.into_raw())
                    .trim()
                    .to_owned()
            }),
        // Takes the place of this process with another identity first, if the kernel lets it.
        ["exec-as", uid, path] => {
            let uid = u32::try_from(number(uid)).unwrap();
            done(Command::new(path).uid(uid).gid(uid).status())
        }
        ["kill", pid, signal] => {
            // SAFETY: plain integers.
            status(unsafe { libc::syscall(libc::SYS_kill, number(pid), number(signal)) })
        }
        // By a descriptor that stands for a process: to signal it, and to take a descriptor of its.
        ["pidfd-attack", pid] => {
            // SAFETY: plain integers.
            unsafe {
                let pidfd = libc::syscall(libc::SYS_pidfd_open, number(pid), 0);
                status(pidfd)?;
                let outcome = |result: i64| match status(result) {
                    Ok(text) => text,
                    Err(error) => name_of(&error),
                };
                let signalled = outcome(libc::syscall(libc::SYS_pidfd_send_signal, pidfd, 9, 0, 0));
                let taken = outcome(libc::syscall(libc::SYS_pidfd_getfd, pidfd, 0, 0));
                Ok(format!("{signalled} {taken}"))
            }
        }
        ["syscall", call, ref arguments @ ..] => syscall(number(call), arguments),
        ["unix-connect", path] => done(UnixStream::connect(path)),
        ["unix-send", path] => done(UnixDatagram::unbound()?.send_to(b"x", path)),
        ["unix-listen", path] => UnixListener::bind(path).map(keep),
        ["unix-listen-many", prefix, count] => {
            for index in 0..number(count) {
                keep(UnixListener::bind(format!("{prefix}-{index}"))?);
            }
            Ok("ok".to_owned())
        }
        ["unix-bind", path] => UnixDatagram::bind(path).map(keep),
        ["abstract-connect", name] => done(UnixStream::connect_addr(
            &UnixAddress::from_abstract_name(name)?,
        )),
        ["abstract-send", name] => done(
            UnixDatagram::unbound()?.send_to_addr(b"x", &UnixAddress::from_abstract_name(name)?),
        ),
        ["abstract-listen", name] => {
            UnixListener::bind_addr(&UnixAddress::from_abstract_name(name)?).map(keep)
        }
        ["abstract-bind", name] => {
            UnixDatagram::bind_addr(&UnixAddress::from_abstract_name(name)?).map(keep)
        }
        ["tcp-bind", address] => done(TcpListener::bind(address)),
        ["tcp-connect", address] => done(TcpStream::connect(address)),
        ["leave", address, ref steps @ ..] => leave(address.parse().unwrap(), steps),
        ["leave-accepted", path, address] => leave_accepted(path, address.parse().unwrap()),
        ["race-address", milliseconds, allowed, wanted] => race_address(
            Duration::from_millis(number(milliseconds).cast_unsigned()),
            [allowed, wanted].map(|address| address.parse().unwrap()),
        ),
        ["fast-open", call, address] => fast_open(number(call), address.parse().unwrap()),
        ["listen-without-bind", family, ref options @ ..] => listen_without_bind(family, options),
        ["take-ports", family] => done(listen_without_bind(family, &[])),
        ["connect-and-listen", address] => connect_and_listen(address.parse().unwrap()),
        ["give-sockets", path] => give_sockets(path),
        ["use-given", path, act, address] => use_given(path, act, address.parse().unwrap()),
        ["udp-bind", address] => done(UdpSocket::bind(address)),
        ["udp-send", from, to] => done(UdpSocket::bind(from)?.send_to(b"x", to)),
        ["udp-echo"] => {
            let socket = UdpSocket::bind("127.0.0.1:0")?;
            socket.send_to(b"x", socket.local_addr()?)?;
            done(socket.recv(&mut [0]))
        }
        // A request to the server, as any program here can make one.
        ["http", address, method, target, token, body] => {
            let token = (!token.is_empty()).then(|| token.to_owned());
            let address: SocketAddr = address.parse().unwrap();
            let reply =
                Connection::open(address, token).request(method, target, &[], body.as_bytes());
            Ok(reply.status.to_string())
        }
        ["half-open", address, count] => {
            let address: SocketAddr = address.parse().unwrap();
            for _ in 0..number(count) {
                let mut stream = TcpStream::connect(address)?;
                stream.write_all(b"POST /v1/sandboxes HTTP/1.1\r\nHost:")?;
                keep(stream);
            }
            Ok("ok".to_owned())
        }
        ["flood", address, kept, milliseconds] => {
            let limit = Duration::from_millis(number(milliseconds).cast_unsigned());
            Ok(flood(
                address.parse().unwrap(),
                kept.parse().unwrap(),
                limit,
            ))
        }
        // State.
        ["descriptors"] => Ok(descriptors()),
        ["raise-limit", resource] => {
            let resource = resource.parse().unwrap();
            let mut limit = limit_of(resource);
            limit.rlim_max += 1;
            // SAFETY: a structure that outlives the call.
            status(unsafe { libc::setrlimit(resource, &raw const limit) }.into())
        }
        ["limit", resource] => Ok(limit(resource.parse().unwrap())),
        ["ids"] => {
            // SAFETY: plain integers.
            let (pid, group, session) =
                unsafe { (libc::getpid(), libc::getpgrp(), libc::getsid(0)) };
            Ok(format!("{pid} {group} {session}"))
        }
        ["cwd"] => Ok(std::env::current_dir()?.to_str().unwrap().to_owned()),
        ["environment"] => {
            let mut all: Vec<String> = std::env::vars()
                .map(|(name, value)| format!("{name}={value}"))
                .collect();
            all.sort();
            Ok(all.join("\n"))
        }
        ["status"] => fs::read_to_string("/proc/self/status"),
        ["groups"] => {
            // SAFETY: asks for the number only.
            Ok(unsafe { libc::getgroups(0, std::ptr::null_mut()) }.to_string())
        }
        // Hogs, which stay below what makes the machine useless to others.
        ["hog-memory", megabytes] => Ok(hog_memory(number(megabytes))),
        // In one piece.
        ["hog-private", megabytes] => {
            let bytes = usize::try_from(number(megabytes) << 20).unwrap();
            // SAFETY: within the new memory.
            unsafe { pages(bytes).write_bytes(1, bytes) };
            Ok("ok".to_owned())
        }
        ["hog-shared", megabytes] => hog_shared(None, number(megabytes)),
        ["hog-file", megabytes] => {
            let mut file = memory_file()?;
            let piece = vec![1; 1 << 20];
            for _ in 0..number(megabytes) {
                file.write_all(&piece)?;
            }
            keep(file);
            Ok("ok".to_owned())
        }
        ["hog-mapped-file", megabytes] => hog_shared(Some(memory_file()?), number(megabytes)),
        // Goes on as so many copies more, which have what was there before in common.
        ["copies", count] => {
            for _ in 0..number(count) {
                // SAFETY: every copy does the same from here on, but makes no others.
                if unsafe { libc::fork() } == 0 {
                    break;
                }
            }
            Ok("ok".to_owned())
        }
        // Children that have its memory, or a copy, while a thread of it waits for each as in vfork(2).
        ["waited-for", how, count] => waited_for(how, number(count)),
        // Children each of which takes so much of its own, and shows the same figures as this process.
        ["doubles", megabytes, count] => doubles(number(megabytes), number(count)),
        // A process whose first thread has ended, while others have so much memory.
        ["without-first-thread", megabytes] => {
            let megabytes = number(megabytes);
            // SAFETY: in the copy, its only thread starts another and ends alone.
            unsafe {
                if libc::fork() == 0 {
                    std::thread::spawn(move || {
                        hog_memory(megabytes);
                        stay();
                    });
                    libc::syscall(libc::SYS_exit, 0);
                }
            }
            Ok("ok".to_owned())
        }
        // Mappings of one page of a memory file of this size, no two of which can be one.
        ["mappings", count, megabytes] => mappings(number(count), number(megabytes), 1),
        // The same, of all of it.
        ["whole-mappings", count, megabytes] => {
            let pages = number(megabytes) << 8;
            mappings(number(count), number(megabytes), pages)
        }
        // Maps a TCP socket that is not read at the other end, and that takes a day to close.
        ["lingering-socket", address] => lingering_socket(address.parse().unwrap()),
        // Closes its files in /proc to its own user.
        ["hide"] => {
            // SAFETY: plain integers.
            status(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0).into() })
        }
        // Starts programs, each of which has this one's memory for a moment.
        ["start-programs"] => loop {
            Command::new("/bin/true").status()?;
        },
        ["hog-descriptors"] => loop {
            if let Err(error) = File::open("/dev/null").map(keep) {
                return Ok(name_of(&error));
            }
        },
        ["fork-storm"] => fork_storm(false),
        ["fork-storm", "in-sessions"] => fork_storm(true),
        ["fork-limit"] => Ok(fork_limit()),
        ["signal-everybody", signal] => loop {
            // SAFETY: plain integers. All but itself.
            unsafe { libc::syscall(libc::SYS_kill, -1, number(signal)) };
        },
        // Takes a lower mark than its own, so that it is not known for what it is.
        ["lower-mark", to] => {
            let to = number(to).cast_unsigned();
            let limit = libc::rlimit {
                rlim_cur: to,
                rlim_max: to,
            };
            // SAFETY: a structure that outlives the call.
            status(unsafe { libc::setrlimit(libc::RLIMIT_RTTIME, &raw const limit) }.into())
        }
        // Leaves a process behind that has neither its parent nor its session.
        ["daemon"] => {
            // SAFETY: plain system calls; the copies return from none of these.
            unsafe {
                if libc::fork() == 0 {
                    libc::setsid();
                    if libc::fork() != 0 {
                        libc::_exit(0);
                    }
                    loop {
                        libc::pause();
                    }
                }
                status(libc::wait(std::ptr::null_mut()).into())
            }
        }
        // Leaves everything behind and goes on as the child of nobody here.
        ["daemonize"] => {
            // SAFETY: plain system calls.
            unsafe {
                for _ in 0..2 {
                    if libc::fork() != 0 {
                        libc::_exit(0);
                    }
                    libc::setsid();
                }
            }
            Ok("ok".to_owned())
        }
        // Makes a process that is not its own child but its parent's, in another session; it stays.
        ["sibling"] => {
            let flags = libc::CLONE_PARENT | libc::SIGCHLD;
            // SAFETY: as fork does it; the copy makes system calls only.
            unsafe {
                let pid = libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0);
                if pid == 0 {
                    libc::setsid();
                    loop {
                        libc::pause();
                    }
                }
                status(pid)
            }
        }
        // The same for many that end at once.
        ["siblings", count] => {
            let flags = libc::CLONE_PARENT | libc::SIGCHLD;
            for _ in 0..number(count) {
                // SAFETY: as fork does it; the copy makes one system call.
                unsafe {
                    if libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) == 0 {
                        libc::_exit(0);
                    }
                }
            }
            Ok("ok".to_owned())
        }
        // Becomes the tracer of a process, and never asks what it does.
        ["seize", pid] => {
            // SAFETY: plain integers.
            status(unsafe { libc::ptrace(libc::PTRACE_SEIZE, number(pid), 0, 0) })
        }
        // For ever becomes another process in another session, each the child of one that has ended. Nobody
        // can count on seeing one of them, so every tenth makes a file.
        ["hop", path] => {
            for hop in 1_u64.. {
                if hop.is_multiple_of(10) {
                    File::create(path)?;
                }
                // SAFETY: plain system calls.
                unsafe {
                    match libc::fork() {
                        0 => libc::setsid(),
                        // Those before are not reaped yet, and the sandbox has as many as it may.
                        -1 => libc::sched_yield(),
                        _ => libc::_exit(0),
                    };
                }
            }
            unreachable!("the numbers do not end")
        }
        // Leaves a process behind that holds the lock of a standard stream's pipe for ever, and ends.
        ["hold-pipe", way] => hold_pipe(way),
        // The same for the pipe that each client of a socket gives, by a thread of this process.
        ["hold-given", path] => hold_given(path),
        // Gives its standard output to such a process, and ends.
        ["give-output", path] => {
            let holder = UnixStream::connect(path)?;
            let (descriptors, data) = ([1], [io::IoSlice::new(b"x")]);
            let rights = [ControlMessage::ScmRights(&descriptors)];
            sendmsg::<()>(holder.as_raw_fd(), &data, &rights, MsgFlags::empty(), None)?;
            (&holder).read_exact(&mut [0])?;
            std::thread::sleep(Duration::from_millis(300));
            std::process::exit(0);
        }
        // Leaves processes behind, one after the other. Every second one stops itself; each writes to the file if it was
        // told to go on, which nobody here does.
        ["orphans", count, path] => {
            static TOLD: AtomicBool = AtomicBool::new(false);
            extern "C" fn note(_signal: i32) {
                TOLD.store(true, atomic::Ordering::Relaxed);
            }
            let file = OpenOptions::new().append(true).create(true).open(path)?;
            for orphan in 0..number(count) {
                // SAFETY: plain system calls, and a handler that stores a byte.
                unsafe {
                    if libc::fork() != 0 {
                        libc::wait(std::ptr::null_mut());
                        libc::usleep(10_000);
                        continue;
                    }
                    if libc::fork() != 0 {
                        libc::_exit(0);
                    }
                    libc::setsid();
                    libc::signal(libc::SIGCONT, note as *const () as libc::sighandler_t);
                    let mut left = libc::timespec {
                        tv_sec: 3,
                        tv_nsec: 0,
                    };
                    if orphan % 2 == 0 {
                        libc::raise(libc::SIGSTOP);
                    } else {
                        while libc::nanosleep(&raw const left, &raw mut left) != 0 {}
                    }
                    if TOLD.load(atomic::Ordering::Relaxed) {
                        libc::write(file.as_raw_fd(), c"x".as_ptr().cast(), 1);
                    }
                    libc::_exit(0);
                }
            }
            std::thread::sleep(Duration::from_secs(4));
            Ok("ok".to_owned())
        }
        // Whoever opens the file waits until the kernel has lost its patience, see fcntl(2).
        ["lease", path] => {
            let file = File::open(path)?;
            // SAFETY: plain integers; being asked to give it back is ignored.
            unsafe {
                libc::signal(libc::SIGIO, libc::SIG_IGN);
                let lease = libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, libc::F_WRLCK);
                status(lease.into())?;
            }
            Ok(keep(file))
        }
        ["peek", milliseconds] => peek(Duration::from_millis(number(milliseconds).cast_unsigned())),
        ["swap", ref pairs @ ..] => swap(pairs),
        ["other-architecture"] => Ok(other_architecture()),
        ["stay"] => stay(),
        _ => panic!("an act that there is not: {words:?}"),
    }
}

/// Without waiting for the other end of a pipe, and without a terminal of its own.
fn open(options: &mut OpenOptions, path: &str) -> io::Result<File> {
    options
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(path)
}

/// Leaves a descriptor open for as long as the process lives.
fn keep(descriptor: impl IntoRawFd) -> String {
    let _ = descriptor.into_raw_fd();
    "ok".to_owned()
}

fn status(result: i64) -> io::Result<String> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok("ok".to_owned())
    }
}

/// Any system call. Arguments are numbers, `buffer` (zeroes), `text:...` (a C string), `open:PATH`
/// (a descriptor), `socket:FAMILY` (another), `iov` (one of a buffer), `filter` (a program that allows everything), `self`
/// (the pid).
fn syscall(call: i64, arguments: &[&str]) -> io::Result<String> {
    let mut buffer = vec![0u64; 8192];
    let mut target = vec![0u8; 4096];
    let mut vector = libc::iovec {
        iov_base: target.as_mut_ptr().cast(),
        iov_len: 8,
    };
    let mut everything = libc::sock_filter {
        code: u16::try_from(libc::BPF_RET | libc::BPF_K).unwrap(),
        jt: 0,
        jf: 0,
        k: libc::SECCOMP_RET_ALLOW,
    };
    let filter = libc::sock_fprog {
        len: 1,
        filter: &raw mut everything,
    };
    let mut texts = Vec::new();
    let mut files: Vec<OwnedFd> = Vec::new();
    let mut raw = [0i64; 6];
    for (slot, word) in raw.iter_mut().zip(arguments) {
        *slot = if let Some(text) = word.strip_prefix("text:") {
            texts.push(CString::new(text)?);
            texts.last().unwrap().as_ptr() as i64
        } else if let Some(path) = word.strip_prefix("open:") {
            let whole = open(OpenOptions::new().read(true).write(true), path);
            files.push(
                whole
                    .or_else(|_| open(OpenOptions::new().read(true), path))?
                    .into(),
            );
            i64::from(files.last().unwrap().as_raw_fd())
        } else if let Some(family) = word.strip_prefix("socket:") {
            let (family, kind) = match family {
                "unix" => (AddressFamily::Unix, SockType::Stream),
                "tcp" => (AddressFamily::Inet, SockType::Stream),
                "udp" => (AddressFamily::Inet6, SockType::Datagram),
                "route" => (AddressFamily::Netlink, SockType::Raw),
                other => panic!("{other} is no family"),
            };
            files.push(socket(family, kind, SockFlag::empty(), None)?);
            i64::from(files.last().unwrap().as_raw_fd())
        } else {
            match *word {
                "buffer" => buffer.as_mut_ptr() as i64,
                "iov" => (&raw mut vector) as i64,
                "filter" => (&raw const filter) as i64,
                "self" => i64::from(std::process::id()),
                digits => number(digits),
            }
        };
    }
    let own = std::process::id();
    let [first, second, third, fourth, fifth, sixth] = raw;
    // SAFETY: every pointer among the arguments is to memory that outlives the call and is larger
    // than what any call that the tests make writes. What a call does to this process is the tests'
    // business: it is theirs alone.
    let result = unsafe { libc::syscall(call, first, second, third, fourth, fifth, sixth) };
    // SAFETY: plain integers; a new process that a call made has nothing to do here.
    unsafe {
        if libc::syscall(libc::SYS_getpid) != i64::from(own) {
            libc::_exit(0);
        }
    }
    status(result)
}

/// Gives a fresh TCP socket to everybody who connects to a Unix socket, on a thread that stays.
fn give_sockets(path: &str) -> io::Result<String> {
    let hidden = format!("{path}.new");
    let listener = UnixListener::bind(&hidden)?;
    fs::rename(&hidden, path)?;
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let kind = SockType::Stream;
            let socket = socket(AddressFamily::Inet, kind, SockFlag::empty(), None).unwrap();
            let descriptors = [socket.as_raw_fd()];
            let rights = [ControlMessage::ScmRights(&descriptors)];
            let client = client.unwrap();
            let data = [io::IoSlice::new(b"x")];
            sendmsg::<()>(client.as_raw_fd(), &data, &rights, MsgFlags::empty(), None).unwrap();
        }
    });
    Ok("ok".to_owned())
}

/// Dissolves a connection, and what the socket is bound to as far as the kernel lets it (connect(2)).
fn unspecify(socket: i32) {
    // SAFETY: zeroes are an address without a family.
    unsafe {
        let nobody: libc::sockaddr = std::mem::zeroed();
        let length = u32::try_from(size_of::<libc::sockaddr>()).unwrap();
        libc::connect(socket, &raw const nobody, length);
    }
}

/// Connects a TCP socket to an address after some steps, which may fail.
fn leave(address: SocketAddrV4, steps: &[&str]) -> io::Result<String> {
    let socket = socket(
        AddressFamily::Inet,
        SockType::Stream,
        SockFlag::empty(),
        None,
    )?;
    let raw = socket.as_raw_fd();
    let set = |level: i32, option: i32, value: &[u8]| {
        let length = u32::try_from(value.len()).unwrap();
        // SAFETY: the value outlives the call.
        unsafe { libc::setsockopt(raw, level, option, value.as_ptr().cast(), length) };
    };
    let on = 1_i32.to_ne_bytes();
    // A packet that gets no answer is EINPROGRESS then (socket(7)), which no test expects.
    let limit = [2_i64.to_ne_bytes(), 0_i64.to_ne_bytes()].concat();
    set(libc::SOL_SOCKET, libc::SO_SNDTIMEO, &limit);
    for step in steps {
        match step.split_once(':').unwrap_or((step, "")) {
            ("unspecified", _) => unspecify(raw),
            // Leads to the proxy, where that is.
            ("gate", _) => {
                let gate = std::env::var("HTTP_PROXY").unwrap_or_default();
                let port = gate
                    .rsplit_once(':')
                    .and_then(|(_, port)| port.parse().ok());
                let gate = SockaddrIn::new(127, 0, 0, 1, port.unwrap_or(9));
                let _ = connect(raw, &gate);
            }
            // SAFETY: plain integers.
            ("shutdown", _) => unsafe {
                libc::shutdown(raw, libc::SHUT_RDWR);
            },
            // SAFETY: plain integers.
            ("listen", _) => unsafe {
                libc::listen(raw, 1);
            },
            ("bind", at) => {
                let at: SocketAddrV4 = at.parse().unwrap();
                let _ = bind(raw, &SockaddrIn::from(at));
            }
            ("device", name) => set(libc::SOL_SOCKET, libc::SO_BINDTODEVICE, name.as_bytes()),
            ("do-not-route", _) => set(libc::SOL_SOCKET, libc::SO_DONTROUTE, &on),
            ("mark", _) => set(libc::SOL_SOCKET, libc::SO_MARK, &on),
            ("free-bind", _) => set(libc::IPPROTO_IP, libc::IP_FREEBIND, &on),
            ("transparent", _) => set(libc::IPPROTO_IP, libc::IP_TRANSPARENT, &on),
            ("interface", index) => {
                let index: u32 = index.parse().unwrap();
                set(libc::IPPROTO_IP, libc::IP_UNICAST_IF, &index.to_be_bytes());
            }
            // Loose source routing (RFC 791) by way of the destination.
            ("source-route", _) => {
                let hop = address.ip().octets();
                let route = [&[131, 7, 4][..], &hop, &[0]].concat();
                set(libc::IPPROTO_IP, libc::IP_OPTIONS, &route);
            }
            ("repair", _) => set(libc::IPPROTO_TCP, libc::TCP_REPAIR, &on),
            ("ulp", name) => set(libc::IPPROTO_TCP, libc::TCP_ULP, name.as_bytes()),
            ("fast-open-connect", _) => {
                set(libc::IPPROTO_TCP, libc::TCP_FASTOPEN_CONNECT, &on);
            }
            _ => panic!("no step: {step}"),
        }
    }
    let mut socket = TcpStream::from(socket);
    connect(raw, &SockaddrIn::from(address))?;
    // With fast open the first data connects.
    socket.write_all(b"x").map(|()| "ok".to_owned())
}

/// The same with a socket that was accepted. The port at which it waits for somebody goes into a file.
fn leave_accepted(path: &str, address: SocketAddrV4) -> io::Result<String> {
    let listener = socket(
        AddressFamily::Inet,
        SockType::Stream,
        SockFlag::empty(),
        None,
    )?;
    // SAFETY: plain integers.
    status(unsafe { libc::listen(listener.as_raw_fd(), 1) }.into())?;
    let listener = TcpListener::from(listener);
    let hidden = format!("{path}.new");
    fs::write(&hidden, listener.local_addr()?.port().to_string())?;
    fs::rename(hidden, path)?;
    let (accepted, _) = listener.accept()?;
    unspecify(accepted.as_raw_fd());
    connect(accepted.as_raw_fd(), &SockaddrIn::from(address))?;
    Ok("ok".to_owned())
}

/// Connects again and again by an address that another thread changes all the time. Tells whether the wanted one was
/// ever connected to.
fn race_address(time: Duration, addresses: [SocketAddrV4; 2]) -> io::Result<String> {
    let [allowed, wanted] = addresses.map(SockaddrIn::from);
    let place = Box::leak(Box::new(allowed));
    let place = (&raw mut *place) as usize;
    std::thread::spawn(move || {
        loop {
            for address in [wanted, allowed] {
                // SAFETY: the place is never freed; that another thread reads it meanwhile is the test.
                unsafe { std::ptr::write_volatile(place as *mut SockaddrIn, address) };
            }
        }
    });
    let begun = Instant::now();
    while begun.elapsed() < time {
        let socket = socket(
            AddressFamily::Inet,
            SockType::Stream,
            SockFlag::empty(),
            None,
        )?;
        // SAFETY: the address is as long as it says.
        let connected = unsafe {
            let length = u32::try_from(size_of::<libc::sockaddr_in>()).unwrap();
            libc::connect(socket.as_raw_fd(), place as *const libc::sockaddr, length) == 0
        };
        let peer = TcpStream::from(socket).peer_addr();
        if connected && peer.is_ok_and(|peer| peer == SocketAddr::V4(addresses[1])) {
            return Ok("reached".to_owned());
        }
    }
    Ok("ok".to_owned())
}

/// What another process gives over a Unix socket.
fn receive(passer: &UnixStream) -> io::Result<i32> {
    let mut buffer = nix::cmsg_space!([i32; 1]);
    let mut data = [0];
    let mut data = [io::IoSliceMut::new(&mut data)];
    let flags = MsgFlags::empty();
    let message = recvmsg::<()>(passer.as_raw_fd(), &mut data, Some(&mut buffer), flags)?;
    let given = message.cmsgs()?.find_map(|message| match message {
        ControlMessageOwned::ScmRights(descriptors) => descriptors.first().copied(),
        _ => None,
    });
    Ok(given.expect("a descriptor was given"))
}

/// Takes a TCP socket that another process gives, and uses it.
fn use_given(path: &str, act: &str, address: SocketAddrV4) -> io::Result<String> {
    let socket = receive(&UnixStream::connect(path)?)?;
    let connect = || connect(socket, &SockaddrIn::from(address)).map_err(io::Error::from);
    match act {
        "connect" => done(connect()),
        "connect-after-unspecified" => {
            unspecify(socket);
            done(connect())
        }
        "bind" => done(bind(socket, &SockaddrIn::new(127, 0, 0, 1, 0)).map_err(io::Error::from)),
        "fast-open" => fast_open_on(socket, libc::SYS_sendto, address),
        _ => panic!("no use: {act}"),
    }
}

/// Opens a TCP connection with its first data (RFC 7413) by one of the calls that can.
fn fast_open(call: i64, address: SocketAddrV4) -> io::Result<String> {
    let kind = SockType::Stream;
    let socket = socket(AddressFamily::Inet, kind, SockFlag::empty(), None)?;
    fast_open_on(socket.as_raw_fd(), call, address)
}

fn fast_open_on(socket: i32, call: i64, address: SocketAddrV4) -> io::Result<String> {
    let to = SockaddrIn::from(address);
    let mut data = *b"first";
    let mut vector = libc::iovec {
        iov_base: data.as_mut_ptr().cast(),
        iov_len: data.len(),
    };
    // SAFETY: plain data, of which zeros are a value.
    let mut message: libc::mmsghdr = unsafe { std::mem::zeroed() };
    message.msg_hdr.msg_name = to.as_ptr().cast_mut().cast();
    message.msg_hdr.msg_namelen = to.len();
    message.msg_hdr.msg_iov = &raw mut vector;
    message.msg_hdr.msg_iovlen = 1;
    let message = &raw mut message;
    let (flags, bytes) = (libc::MSG_FASTOPEN, vector.iov_base);
    // SAFETY: every pointer is to memory that outlives the call.
    status(unsafe {
        match call {
            libc::SYS_sendto => libc::syscall(
                call,
                socket,
                bytes,
                data.len(),
                flags,
                to.as_ptr(),
                to.len(),
            ),
            libc::SYS_sendmsg => libc::syscall(call, socket, message, flags),
            _ => libc::syscall(call, socket, message, 1, flags),
        }
    })
}

/// The open descriptors but for the one that lists them.
fn descriptors() -> String {
    let list = File::open("/proc/self/fd").unwrap();
    let own = list.as_raw_fd().to_string();
    drop(list);
    let mut all: Vec<String> = fs::read_dir("/proc/self/fd")
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_str().unwrap().to_owned())
        .filter(|name| *name != own)
        .collect();
    all.sort();
    all.join(" ")
}

fn limit_of(resource: i32) -> libc::rlimit {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the kernel fills the structure.
    unsafe { libc::getrlimit(resource, &raw mut limit) };
    limit
}

fn limit(resource: i32) -> String {
    let limit = limit_of(resource);
    format!("{} {}", limit.rlim_cur, limit.rlim_max)
}

/// How many megabytes there are to be had, and used, up to a limit; they stay.
fn hog_memory(limit: i64) -> String {
    for megabytes in 0..limit {
        // SAFETY: anonymous memory of its own.
        let memory = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                1 << 20,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if memory == libc::MAP_FAILED {
            return format!("{megabytes} {}", name_of(&io::Error::last_os_error()));
        }
        // SAFETY: the megabyte that was just given.
        unsafe { memory.write_bytes(1, 1 << 20) };
    }
    format!("{limit} ok")
}

fn stay() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

/// What a child does that shares the memory of its parent, which it leaves as it is.
fn pause() -> ! {
    loop {
        // SAFETY: waits for a signal.
        unsafe { libc::pause() };
    }
}

/// clone(2) on the stack of the caller. With `CLONE_VM` it needs `CLONE_VFORK` too, and the child must not return.
unsafe fn clone_here(flags: i32) -> i64 {
    // SAFETY: the caller's.
    unsafe { libc::syscall(libc::SYS_clone, flags | libc::SIGCHLD, 0, 0, 0, 0) }
}

/// Starts threads that each do this once all of them run, so that none of their stacks is made later.
fn together(count: i64, act: impl Fn(i64) + Send + Sync + 'static) {
    let act = std::sync::Arc::new(act);
    let ready = usize::try_from(count).unwrap() + 1;
    let barrier = std::sync::Arc::new(std::sync::Barrier::new(ready));
    for number in 0..count {
        let (act, barrier) = (act.clone(), barrier.clone());
        std::thread::spawn(move || {
            barrier.wait();
            act(number);
        });
    }
    barrier.wait();
}

fn children_of_this_process() -> usize {
    let threads = fs::read_dir("/proc/self/task").unwrap();
    let lists = threads.map(|thread| thread.unwrap().path().join("children"));
    let lists = lists.map(|list| fs::read_to_string(list).unwrap_or_default());
    lists.map(|list| list.split_whitespace().count()).sum()
}

fn waited_for(how: &str, count: i64) -> io::Result<String> {
    let vfork = libc::CLONE_VM | libc::CLONE_VFORK;
    let before = children_of_this_process();
    match how {
        // As long as it has not called execve.
        "vfork" => together(count, move |_| unsafe {
            if clone_here(vfork) == 0 {
                pause();
            }
        }),
        "nested-vfork" => together(count, move |_| unsafe {
            if clone_here(vfork) == 0 {
                clone_here(vfork);
                pause();
            }
        }),
        // Nothing waits.
        "shared" => {
            extern "C" fn run(_: *mut libc::c_void) -> i32 {
                pause()
            }
            for _ in 0..count {
                let stack = Box::leak(vec![0_u128; 4096].into_boxed_slice());
                let (top, flags) = (stack.as_mut_ptr_range().end, libc::CLONE_VM | libc::SIGCHLD);
                // SAFETY: the stack is the child's for good, and it makes only system calls.
                status(
                    unsafe { libc::clone(run, top.cast(), flags, std::ptr::null_mut()) }.into(),
                )?;
            }
        }
        // Of a child that has the memory of its parent, and open files of its own.
        "file" => together(1, move |_| unsafe {
            static PIECE: [u8; 1 << 20] = [1; 1 << 20];
            if clone_here(vfork) == 0 {
                let file = libc::memfd_create(c"hog".as_ptr(), 0);
                for _ in 0..count {
                    libc::write(file, PIECE.as_ptr().cast(), PIECE.len());
                }
                pause();
            }
        }),
        _ => panic!("no such way: {how}"),
    }
    let expected = before
        + if how == "file" {
            1
        } else {
            usize::try_from(count).unwrap()
        };
    wait_until("the children are there", PATIENCE, || {
        children_of_this_process() >= expected
    });
    Ok("ok".to_owned())
}

/// Anonymous memory, by pages.
fn pages(bytes: usize) -> *mut u8 {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: memory of its own.
    unsafe {
        let memory = libc::mmap(std::ptr::null_mut(), bytes, access, kind, -1, 0);
        assert_ne!(memory, libc::MAP_FAILED);
        libc::madvise(memory, bytes, libc::MADV_NOHUGEPAGE);
        memory.cast()
    }
}

/// Private memory of a process, without any memory of its own.
fn private_by(status: &CStr) -> usize {
    let mut text = [0; 4096];
    // SAFETY: reads into the array.
    let count = unsafe {
        let file = libc::open(status.as_ptr(), libc::O_RDONLY);
        let count = libc::read(file, text.as_mut_ptr().cast(), text.len());
        libc::close(file);
        usize::try_from(count).unwrap()
    };
    let mut lines = text[..count].split(|byte| *byte == b'\n');
    let line = lines
        .find_map(|line| line.strip_prefix(b"RssAnon:"))
        .unwrap();
    let digits = line.iter().filter(|byte| byte.is_ascii_digit());
    1024 * digits.fold(0, |number, digit| 10 * number + usize::from(digit - b'0'))
}

fn doubles(megabytes: i64, count: i64) -> io::Result<String> {
    const PAGE: usize = 4096;
    const SPARE: usize = 4 << 20;
    let bytes = usize::try_from(megabytes << 20).unwrap();
    let (memory, spare) = (pages(bytes), pages(SPARE));
    // SAFETY: within both.
    unsafe {
        memory.write_bytes(1, bytes);
        spare.write_bytes(1, SPARE / 2);
    }
    let (memory, spare) = (memory.expose_provenance(), spare.expose_provenance());
    let parent = CString::new(format!("/proc/{}/status", std::process::id())).unwrap();
    let (done, told) = io::pipe()?;
    let told = told.into_raw_fd();
    // SAFETY: the children make system calls, and write to what was given above.
    together(count, move |number| unsafe {
        let page = |base: usize, at: usize| std::ptr::with_exposed_provenance_mut::<u8>(base + at);
        // The thread waits although the child has a copy of the memory.
        if clone_here(libc::CLONE_VFORK) != 0 {
            return;
        }
        let (mut end, mut rounds) = (SPARE / 2, 0);
        loop {
            let (mine, theirs) = (private_by(c"/proc/self/status"), private_by(&parent));
            match mine.cmp(&theirs) {
                Ordering::Less => {
                    for _ in 0..((theirs - mine) / PAGE).min((SPARE - end) / PAGE) {
                        page(spare, end).write(1);
                        end += PAGE;
                    }
                }
                Ordering::Greater => {
                    let less = (mine - theirs).min(end);
                    end -= less;
                    libc::madvise(page(spare, end).cast(), less, libc::MADV_DONTNEED);
                }
                Ordering::Equal => rounds += 1,
            }
            if rounds == 5 {
                rounds += 1;
                for at in (0..bytes).step_by(PAGE) {
                    page(memory, at).write(2 + number.to_le_bytes()[0]);
                }
                libc::write(told, [1_u8].as_ptr().cast(), 1);
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    });
    let mut all = vec![0; usize::try_from(count).unwrap()];
    File::from(OwnedFd::from(done)).read_exact(&mut all)?;
    Ok("ok".to_owned())
}

fn mappings(count: i64, megabytes: i64, pages: i64) -> io::Result<String> {
    let mut file = memory_file()?;
    let piece = vec![1; 1 << 20];
    for _ in 0..megabytes {
        file.write_all(&piece)?;
    }
    let bytes = usize::try_from(pages << 12).unwrap();
    let kind = libc::MAP_SHARED | if pages > 1 { libc::MAP_POPULATE } else { 0 };
    for number in 0..count {
        let access = libc::PROT_READ | if number % 2 == 0 { libc::PROT_WRITE } else { 0 };
        // SAFETY: new mappings that nothing uses.
        let mapped = unsafe {
            let (to, file) = (std::ptr::null_mut(), file.as_raw_fd());
            libc::mmap(to, bytes, access, kind, file, 0)
        };
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(keep(file))
}

fn lingering_socket(address: SocketAddr) -> io::Result<String> {
    let mut socket = TcpStream::connect(address)?;
    socket.set_nonblocking(true)?;
    while socket.write(&[0; 4096]).is_ok() {}
    let linger = libc::linger {
        l_onoff: 1,
        l_linger: 86400,
    };
    let length = libc::socklen_t::try_from(size_of_val(&linger)).unwrap();
    // SAFETY: the structure outlives the call, and the mapping is new.
    unsafe {
        let descriptor = socket.into_raw_fd();
        let option = (&raw const linger).cast();
        let set = libc::setsockopt(
            descriptor,
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            option,
            length,
        );
        status(set.into())?;
        let (to, kind) = (std::ptr::null_mut(), libc::MAP_SHARED);
        let mapped = libc::mmap(to, 4096, libc::PROT_READ, kind, descriptor, 0);
        if mapped == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // Nothing but the mapping has it then.
        status(libc::close(descriptor).into())
    }
}

/// A file in memory.
fn memory_file() -> io::Result<File> {
    let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
    let file = nix::sys::memfd::memfd_create(c"hog", flags).map_err(io::Error::from)?;
    Ok(File::from(file))
}

/// Uses shared memory, of a file if there is one. It stays.
fn hog_shared(file: Option<File>, megabytes: i64) -> io::Result<String> {
    let bytes = usize::try_from(megabytes << 20).unwrap();
    if let Some(file) = &file {
        file.set_len(bytes as u64)?;
    }
    let anonymous = if file.is_none() {
        libc::MAP_ANONYMOUS
    } else {
        0
    };
    let descriptor = file.as_ref().map_or(-1, File::as_raw_fd);
    // SAFETY: memory of its own, which is written within its bounds.
    unsafe {
        let memory = libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | anonymous,
            descriptor,
            0,
        );
        if memory == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        memory.write_bytes(1, bytes);
    }
    file.map(keep);
    Ok("ok".to_owned())
}

/// How many processes there are to be had; not so many that the machine has none left for others.
fn fork_limit() -> String {
    for count in 0..1000 {
        // SAFETY: the child makes one call and never returns.
        let pid = unsafe { libc::fork() };
        if pid < 0 {
            return format!("{count} {}", name_of(&io::Error::last_os_error()));
        }
        if pid == 0 {
            loop {
                // SAFETY: waits for a signal.
                unsafe { libc::pause() };
            }
        }
    }
    "1000 ok".to_owned()
}

/// As [`hold_pipe`] by splice(2), of the pipes that others give.
fn hold_given(path: &str) -> io::Result<String> {
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o777))?;
    for giver in listener.incoming() {
        let giver = giver?;
        let pipe = receive(&giver)?;
        std::thread::spawn(move || {
            let (near, _far) = UnixStream::pair().unwrap();
            (&giver).write_all(b"x").unwrap();
            let none = std::ptr::null_mut();
            // SAFETY: a plain system call on descriptors that are open.
            unsafe { libc::splice(near.as_raw_fd(), none, pipe, none, 4096, 0) }
        });
    }
    unreachable!("clients do not end")
}

/// The process that stays waits for data of a socket or a terminal that nobody sends, or for room in a socket that nobody
/// reads, and the kernel has locked the pipe meanwhile (splice(2), sendfile(2)).
fn hold_pipe(way: &str) -> io::Result<String> {
    let (near, _far) = UnixStream::pair()?;
    let source = near.as_raw_fd();
    let none = std::ptr::null_mut();
    if way == "stdin" || way == "reader" {
        near.set_nonblocking(true)?;
        while (&near).write(&[0; 4096]).is_ok() {}
        near.set_nonblocking(false)?;
    }
    // SAFETY: plain system calls on descriptors that are open.
    unsafe {
        if libc::fork() != 0 {
            libc::usleep(300_000);
            libc::_exit(0);
        }
        let ended = match way {
            "splice" => libc::splice(source, none, 1, none, 4096, 0),
            "sendfile" => libc::sendfile(1, source, std::ptr::null_mut(), 4096),
            "terminal" => {
                let master = libc::open(c"/dev/ptmx".as_ptr(), libc::O_RDWR | libc::O_NOCTTY);
                status(libc::grantpt(master).into())?;
                status(libc::unlockpt(master).into())?;
                let terminal =
                    libc::ioctl(master, libc::TIOCGPTPEER, libc::O_RDWR | libc::O_NOCTTY);
                status(terminal.into())?;
                libc::splice(master, none, 1, none, 4096, 0)
            }
            "stdin" => libc::splice(9, none, source, none, 65536, 0),
            "reader" => {
                let flags = libc::O_RDONLY | libc::O_NONBLOCK;
                let own = libc::open(c"/proc/self/fd/1".as_ptr(), flags);
                status(own.into())?;
                loop {
                    // The server may read it first.
                    libc::write(1, [0_u8; 9000].as_ptr().cast(), 9000);
                    let ended = libc::splice(own, none, source, none, 65536, 0);
                    if ended >= 0 || Errno::last() != Errno::EAGAIN {
                        break ended;
                    }
                }
            }
            _ => panic!("no way to hold a pipe: {way}"),
        };
        // It has not held it.
        eprintln!("{ended}: {}", io::Error::last_os_error());
        libc::_exit(1)
    }
}

/// Becomes as many processes as there can be, all of which try to become more; each in a session of
/// its own if so wished.
fn fork_storm(in_sessions: bool) -> io::Result<String> {
    loop {
        // SAFETY: plain system calls; every copy does the same.
        unsafe {
            if libc::fork() == 0 && in_sessions {
                libc::setsid();
            }
        }
    }
}

/// Sockets that listen at any port, until there is none left; they stay. Tells the ports and why there are no more.
fn listen_without_bind(family: &str, options: &[&str]) -> io::Result<String> {
    let (family, only_v6) = match family {
        "v4" => (libc::AF_INET, None),
        "v6" => (libc::AF_INET6, Some(1)),
        "both" => (libc::AF_INET6, Some(0)),
        _ => panic!("no family: {family}"),
    };
    let set = |socket: i32, level, option, value: i32| {
        let length = u32::try_from(size_of::<i32>()).unwrap();
        // SAFETY: an integer that outlives the call, or the name of an interface and a NUL.
        status(unsafe {
            libc::setsockopt(socket, level, option, (&raw const value).cast(), length).into()
        })
    };
    let mut ports = Vec::new();
    loop {
        // SAFETY: plain integers.
        let socket = unsafe { libc::socket(family, libc::SOCK_STREAM, 0) };
        status(socket.into())?;
        if let Some(value) = only_v6 {
            set(socket, libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, value)?;
        }
        for option in options {
            let (level, option) = match *option {
                "reuse-address" => (libc::SOL_SOCKET, libc::SO_REUSEADDR),
                "reuse-port" => (libc::SOL_SOCKET, libc::SO_REUSEPORT),
                "repair" => (libc::IPPROTO_TCP, libc::TCP_REPAIR),
                "port-range" => (libc::IPPROTO_IP, 51),
                "loopback-only" => (libc::SOL_SOCKET, libc::SO_BINDTODEVICE),
                _ => panic!("no option: {option}"),
            };
            let is_name = option == libc::SO_BINDTODEVICE;
            let value = if is_name {
                i32::from_ne_bytes(*b"lo\0\0")
            } else {
                1
            };
            set(socket, level, option, value)?;
        }
        // SAFETY: plain integers.
        if unsafe { libc::listen(socket, 1) } != 0 {
            let error = io::Error::last_os_error();
            return Ok(told(ports, &error));
        }
        ports.push(port_of(socket));
    }
}

/// Gets ports by connecting, and listens on the same sockets when they are connected no more; as above.
fn connect_and_listen(address: SocketAddr) -> io::Result<String> {
    let mut ports = Vec::new();
    loop {
        let stream = match TcpStream::connect(address) {
            Ok(stream) => stream,
            Err(error) => return Ok(told(ports, &error)),
        };
        ports.push(stream.local_addr()?.port());
        let socket = stream.into_raw_fd();
        // SAFETY: zeroes are an address without a family, which dissolves a connection (connect(2)).
        unsafe {
            let nobody: libc::sockaddr = std::mem::zeroed();
            let length = u32::try_from(size_of::<libc::sockaddr>()).unwrap();
            status(libc::connect(socket, &raw const nobody, length).into())?;
            status(libc::listen(socket, 1).into())?;
        }
        ports.push(port_of(socket));
    }
}

fn told(mut ports: Vec<u16>, error: &io::Error) -> String {
    ports.sort_unstable();
    ports.dedup();
    let ports: Vec<String> = ports.iter().map(u16::to_string).collect();
    format!("{} {}", ports.join(" "), name_of(error))
}

/// The port that a socket is bound to.
fn port_of(socket: i32) -> u16 {
    // SAFETY: the descriptor is open, and stays so.
    let socket = unsafe { std::os::fd::BorrowedFd::borrow_raw(socket) };
    let listener = TcpListener::from(socket.try_clone_to_owned().unwrap());
    listener.local_addr().unwrap().port()
}

/// For a while stops every other process of its own user, and looks into those that stand still: how
/// many it met on their way to a program, and what it could see of any.
fn peek(length: Duration) -> io::Result<String> {
    let own = std::process::id().cast_signed();
    // SAFETY: plain integers.
    let user = unsafe { libc::getuid() };
    let deadline = Instant::now() + length;
    let mut seen = std::collections::BTreeSet::new();
    let mut on_their_way = 0;
    while Instant::now() < deadline {
        // Whatever becomes a process of this user meanwhile is stopped where it is, and goes on after
        // it was looked at.
        let burst = Instant::now() + Duration::from_millis(5);
        while Instant::now() < burst {
            // SAFETY: plain integers. All but itself.
            unsafe { libc::kill(-1, libc::SIGSTOP) };
        }
        for entry in fs::read_dir("/proc")? {
            let name = entry?.file_name();
            let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else {
                continue;
            };
            if pid == own
                || uid_of(pid) != Some(user)
                || stat_of(pid).is_none_or(|process| process.state != 'T')
            {
                continue;
            }
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let is_on_its_way = String::from_utf8_lossy(&line).contains("sbx-server");
            on_their_way += u32::from(is_on_its_way);
            let mut note = |what: &str| {
                let whose = if is_on_its_way { "server" } else { "command" };
                seen.insert(format!("{what} of a {whose}"));
            };
            for what in ["mem", "environ", "maps", "auxv", "syscall", "stack", "io"] {
                let file = File::open(format!("/proc/{pid}/{what}"));
                if file.is_ok_and(|mut file| matches!(file.read(&mut [0; 8]), Ok(1..))) {
                    note(what);
                }
            }
            for what in ["exe", "cwd", "root", "fd/0", "fd/1"] {
                if fs::read_link(format!("/proc/{pid}/{what}")).is_ok() {
                    note(what);
                }
            }
            // The numbers of a program's descriptors are its user's to see.
            if is_on_its_way && fs::read_dir(format!("/proc/{pid}/fd")).is_ok() {
                note("fd");
            }
            // SAFETY: plain integers.
            if unsafe { libc::ptrace(libc::PTRACE_SEIZE, pid, 0, 0) } == 0 {
                note("ptrace");
            }
        }
        // SAFETY: plain integers.
        unsafe { libc::kill(-1, libc::SIGCONT) };
    }
    let seen: Vec<String> = seen.into_iter().collect();
    Ok(format!("{on_their_way} {}", seen.join(", ")))
}

/// For ever gives names each other's files: first pairs, as fast as it can, then repairs what was
/// removed. A pair is a name, `=` and what else it is at times: a path that it links to, `fifo`,
/// `hard:PATH` (another name of a file), `dir` or `file`.
fn swap(pairs: &[&str]) -> io::Result<String> {
    let pairs: Vec<(CString, CString, &str)> = pairs
        .iter()
        .map(|pair| {
            let (name, other) = pair.split_once('=').unwrap();
            let hidden = format!("{name}.other");
            (
                CString::new(name).unwrap(),
                CString::new(hidden).unwrap(),
                other,
            )
        })
        .collect();
    loop {
        for (name, hidden, other) in &pairs {
            let path = |name: &CStr| Path::new(name.to_str().unwrap()).to_owned();
            let (name, hidden) = (path(name), path(hidden));
            if name.to_str().unwrap().starts_with("dir") {
                let _ = fs::create_dir(&name);
                let _ = fs::write(name.join("inner"), "own");
            } else if fs::symlink_metadata(&name).is_err() {
                let _ = fs::write(&name, "own");
            }
            if fs::symlink_metadata(&hidden).is_err() {
                let _ = match other.split_once(':') {
                    Some(("hard", path)) => fs::hard_link(path, &hidden),
                    _ if *other == "fifo" => {
                        nix::unistd::mkfifo(&hidden, nix::sys::stat::Mode::S_IRWXU)
                            .map_err(io::Error::from)
                    }
                    _ if *other == "dir" => fs::create_dir(&hidden),
                    _ if *other == "file" => fs::write(&hidden, "own"),
                    _ => symlink(other, &hidden),
                };
            }
        }
        for _ in 0..500 {
            for (name, hidden, _) in &pairs {
                exchange(name, hidden);
            }
        }
    }
}

/// A system call as 32-bit programs make it, which has another number for everything.
#[cfg(target_arch = "x86_64")]
fn other_architecture() -> String {
    let result: i32;
    // SAFETY: getpid(2), number 20 there, which changes no memory.
    unsafe {
        std::arch::asm!("int 0x80", inlateout("eax") 20 => result);
    }
    format!("returned {result}")
}

#[cfg(not(target_arch = "x86_64"))]
fn other_architecture() -> String {
    // Without 32-bit code there is no way to make such a call.
    // SAFETY: plain integers.
    unsafe { libc::raise(libc::SIGSYS) };
    "returned".to_owned()
}

/// Makes a program that is started by `command` see a kernel without this system call.
pub fn hide_call(command: &mut Command, call: i64) {
    hide(command, call, &[], libc::ENOSYS);
}

/// `SO_PASSRIGHTS` of asm-generic/socket.h, since Linux 6.16.
pub const SO_PASSRIGHTS: i32 = 83;

/// Whether the kernel can refuse descriptors to a socket.
pub fn refuses_descriptors() -> bool {
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    let off = 0_i32;
    // SAFETY: the kernel reads four bytes of a value that outlives the call.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw const off).cast(),
            4,
        )
    };
    result == 0
}

/// Makes a program that is started by `command` see a kernel without this option of sockets.
pub fn hide_option(command: &mut Command, level: i32, option: i32) {
    let arguments = [(1, level), (2, option)];
    hide(command, libc::SYS_setsockopt, &arguments, libc::ENOPROTOOPT);
}

/// Makes a system call fail in a program that is started by `command`, if its arguments with these numbers are these.
fn hide(command: &mut Command, call: i64, arguments: &[(u32, i32)], errno: i32) {
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let answer = libc::BPF_RET | libc::BPF_K;
    let missing = libc::SECCOMP_RET_ERRNO | errno.cast_unsigned();
    let line = |code: u32, k: u32, no: usize| libc::sock_filter {
        code: u16::try_from(code).unwrap(),
        jt: 0,
        jf: u8::try_from(no).unwrap(),
        k,
    };
    // `struct seccomp_data`: the number, and the arguments from byte 16 on, their lower half first.
    let mut words = vec![(0, u32::try_from(call).unwrap())];
    let wanted = |(number, value): &(u32, i32)| (16 + 8 * number, value.cast_unsigned());
    words.extend(arguments.iter().map(wanted));
    let mut filter = Vec::new();
    for (index, (at, value)) in words.iter().enumerate() {
        filter.push(line(load, *at, 0));
        // To the last line.
        filter.push(line(equal, *value, 2 * (words.len() - index) - 1));
    }
    filter.push(line(answer, missing, 0));
    filter.push(line(answer, libc::SECCOMP_RET_ALLOW, 0));
    let len = libc::c_ushort::try_from(filter.len()).unwrap();
    // SAFETY: between fork and execve only two system calls are made, on memory of the closure.
    unsafe {
        command.pre_exec(move || {
            let program = libc::sock_fprog {
                len,
                filter: filter.as_ptr().cast_mut(),
            };
            if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0
                || libc::syscall(
                    libc::SYS_seccomp,
                    libc::SECCOMP_SET_MODE_FILTER,
                    0,
                    &raw const program,
                ) < 0
            {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        });
    }
}

/// Gives a program capabilities of its own, as setcap(8) does: all that there are, effective at once.
///
/// # Errors
/// The file system or the machine does not allow it.
pub fn set_file_capabilities(path: &Path) -> io::Result<()> {
    let path = CString::new(path.to_str().unwrap()).unwrap();
    // `struct vfs_cap_data` of linux/capability.h: revision 2 with the effective bit, then
    // permitted and inheritable, twice.
    let words: [u32; 5] = [0x0200_0001, 1 << libc_cap_setuid(), 0, 0, 0];
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    // SAFETY: strings that end in NUL, and bytes of the length given.
    let result = unsafe {
        libc::setxattr(
            path.as_ptr(),
            c"security.capability".as_ptr(),
            bytes.as_ptr().cast(),
            bytes.len(),
            0,
        )
    };
    status(result.into()).map(drop)
}

/// `CAP_SETUID` of linux/capability.h.
const fn libc_cap_setuid() -> u32 {
    7
}
