//! Host mode: what sandboxes cost, and whether anything is left of a hundred thousand of them.
//!
//! The floors are the kernel's own work, done here without a server: the directories of a home, a
//! command that becomes another user under a Landlock ruleset, a kill by user.

use std::ffi::{CStr, c_int};
use std::fs::{self, DirBuilder};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, chown};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use landlock::{
    ABI, Access, AccessFs, PathBeneath, PathFd, Ruleset, RulesetAttr, RulesetCreatedAttr,
};
use nix::sched::{CloneFlags, clone};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::Pid;

use super::Plan;
use super::client::Client;
use super::program::{Program, Scratch, free_port, memory_of};
use super::report::{Figure, Limit, Samples, Table};

/// How many are alive when the machine is said to be full.
const MANY: usize = 500;

/// How many clients make, use and delete sandboxes at once.
const CLIENTS: usize = 32;

/// A user that the server does not give.
const OWN_USER: u32 = 19_999;

/// Measures everything about sandboxes; without root there are none.
pub fn measure(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    if !nix::unistd::geteuid().is_root() {
        eprintln!("note: not root: the rows about sandboxes are left out");
        return;
    }
    let host = Host::start(scratch, "20000-64999");
    let floor = Floor::new(scratch);
    let mut client = host.program.connect();
    measure_each(plan, &mut client, &floor, "", table);

    let before = host.memory();
    let many = create(&mut client, MANY);
    let each = (host.memory() - before) as f64 / MANY as f64;
    measure_each(plan, &mut client, &floor, ", 500 others alive", table);
    for id in many {
        assert!(delete(&mut client, &id));
    }
    measure_bulk(&host, table);
    table.row(
        "memory of one idle sandbox, KiB",
        Figure::one(each),
        None,
        Limit::Below(4.0),
        "",
    );
}

/// One after another, over a kept connection.
fn measure_each(plan: &Plan, client: &mut Client, floor: &Floor, when: &str, table: &mut Table) {
    let rounds = plan.commands / 4;
    let [mut create_ours, mut create_floor] = [(); 2].map(|()| Samples::default());
    let [mut exec_ours, mut exec_floor] = [(); 2].map(|()| Samples::default());
    let [mut delete_ours, mut delete_floor] = [(); 2].map(|()| Samples::default());
    for round in 0..rounds + 10 {
        // The first few find cold caches.
        if round == 10 {
            for samples in [
                &mut create_ours,
                &mut create_floor,
                &mut exec_ours,
                &mut exec_floor,
                &mut delete_ours,
                &mut delete_floor,
            ] {
                *samples = Samples::default();
            }
        }
        let mut id = String::new();
        create_ours.time(|| id = create(client, 1).remove(0));
        exec_ours.time(|| run_true(client, &id));
        spawn_sleep(client, &id);
        delete_ours.time(|| assert!(delete(client, &id)));

        create_floor.time(|| floor.make_home());
        exec_floor.time(|| Floor::wait(floor.start(&[c"/bin/true"])));
        let sleeper = floor.start(&[c"/bin/sleep", c"3600"]);
        delete_floor.time(|| floor.end(sleeper));
    }
    let row =
        |what: &str, ours: &Samples, against: &Samples, limit, note: &str, table: &mut Table| {
            table.times(&format!("{what}{when}"), ours, against, limit, note);
        };
    let note = "the directories of a home, made and given away";
    row(
        "sandbox: create",
        &create_ours,
        &create_floor,
        Limit::AtMost(2.5, 0.0),
        note,
        table,
    );
    let note = "vfork, setuid, Landlock, exec and wait";
    row(
        "sandbox: /bin/true",
        &exec_ours,
        &exec_floor,
        Limit::AtMost(1.3, 100.0),
        note,
        table,
    );
    let note = "kill by user, wait, and the home's directories removed";
    row(
        "sandbox: delete with a command in it",
        &delete_ours,
        &delete_floor,
        Limit::AtMost(2.5, 0.0),
        note,
        table,
    );
}

/// Many of them, from many clients, against the same from one.
fn measure_bulk(host: &Host, table: &mut Table) {
    let life = |client: &mut Client| {
        let id = create(client, 1).remove(0);
        run_true(client, &id);
        assert!(delete(client, &id));
    };
    let mut client = host.program.connect();
    let begun = Instant::now();
    for _ in 0..MANY {
        life(&mut client);
    }
    let one_by_one = begun.elapsed();

    let left = AtomicUsize::new(MANY);
    let take = || {
        let less = |left: usize| left.checked_sub(1);
        left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less)
            .is_ok()
    };
    let mut clients: Vec<_> = (0..CLIENTS).map(|_| host.program.connect()).collect();
    let begun = Instant::now();
    thread::scope(|scope| {
        for client in &mut clients {
            scope.spawn(|| {
                while take() {
                    life(client);
                }
            });
        }
    });
    let together = begun.elapsed();
    table.row(
        &format!("sandbox: {MANY} x create, /bin/true, delete by {CLIENTS} clients, ms"),
        Figure::one(together.as_secs_f64() * 1e3),
        Some(Figure::one(one_by_one.as_secs_f64() * 1e3)),
        Limit::AtMost(0.5, 0.0),
        "the same by one client",
    );
}

// ---------------------------------------------------------------- the soak

/// Users of the soak's server: few, so that each is given very often.
const SOAK_USERS: usize = 40;

/// Makes and deletes so many sandboxes in one life of a server, and fails if anything is left of them.
pub fn soak(cycles: usize) {
    assert!(
        nix::unistd::geteuid().is_root(),
        "sandboxes need a server that runs as root"
    );
    let scratch = Scratch::new();
    let first = 18_000;
    let host = Host::start(&scratch, &format!("{first}-{}", first + SOAK_USERS - 1));
    let mut client = host.program.connect();
    let mut cycle = |number: usize| {
        let id = create(&mut client, 1).remove(0);
        if number.is_multiple_of(100) {
            run_true(&mut client, &id);
            spawn_sleep(&mut client, &id);
        }
        assert!(delete(&mut client, &id));
    };
    // What is made once and kept: stacks of threads, rooms of tables, ids that are remembered.
    let warm_up = 4_500.min(cycles);
    (0..warm_up).for_each(&mut cycle);
    let before = Remains::of(&host);
    println!("after {warm_up} cycles: {before:?}");
    let begun = Instant::now();
    for number in 0..cycles {
        cycle(number);
        if (number + 1).is_multiple_of(cycles.div_ceil(10)) || number + 1 == cycles {
            let each = begun.elapsed().as_micros() / (number as u128 + 1);
            println!(
                "{} cycles more, {each} µs each: {:?}",
                number + 1,
                Remains::of(&host)
            );
        }
    }
    let after = Remains::of(&host);
    assert!(
        after.resident <= before.resident + 2048,
        "memory grows: {before:?}, {after:?}"
    );
    let but_memory = |remains: Remains| Remains {
        resident: 0,
        ..remains
    };
    assert_eq!(but_memory(before), but_memory(after));
    assert_eq!((after.homes, after.processes), (0, 0));
    let all = create(&mut client, SOAK_USERS);
    assert_eq!(all.len(), SOAK_USERS, "every user can be given");
    for id in all {
        assert!(delete(&mut client, &id));
    }
    println!(
        "nothing is left of {} sandboxes",
        warm_up + cycles + SOAK_USERS
    );
}

/// What could be left of sandboxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Remains {
    descriptors: usize,
    threads: usize,
    /// Children of the server and of its init, zombies included.
    processes: usize,
    homes: usize,
    /// KiB.
    resident: u64,
}

impl Remains {
    fn of(host: &Host) -> Self {
        let count = |path: String| fs::read_dir(path).unwrap().count();
        let init = host.program.child.id();
        let server = host.server();
        let children = |pid: u32| children_of(pid).len();
        // What a deleted sandbox's orphans leave is init's to reap, a moment later.
        let limit = Instant::now() + Duration::from_secs(5);
        while children(init) > 1 && Instant::now() < limit {
            thread::sleep(Duration::from_millis(1));
        }
        Self {
            descriptors: count(format!("/proc/{server}/fd")),
            threads: count(format!("/proc/{server}/task")),
            processes: children(server) + children(init) - 1,
            homes: fs::read_dir(&host.homes).unwrap().count(),
            resident: host.memory(),
        }
    }
}

// ---------------------------------------------------------------- the server

struct Host {
    program: Program,
    homes: PathBuf,
}

impl Host {
    fn start(scratch: &Scratch, users: &str) -> Self {
        let homes = scratch.path("homes");
        let port = free_port();
        let mut command = Program::server_command(port);
        command
            .env("SBX_HOST_MODE", "1")
            .env("SBX_HOMES_DIR", &homes)
            .env("SBX_UID_RANGE", users);
        let program = Program::start(port, &mut command);
        program.connect().health();
        Self { program, homes }
    }

    /// The server proper: what was started is its init.
    fn server(&self) -> u32 {
        children_of(self.program.child.id())[0]
    }

    /// Resident, in KiB.
    fn memory(&self) -> u64 {
        memory_of(self.server())
    }
}

fn children_of(pid: u32) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    threads
        .filter_map(|thread| fs::read_to_string(thread.ok()?.path().join("children")).ok())
        .flat_map(|children| {
            let children = children.split_ascii_whitespace();
            children
                .map(|child| child.parse().unwrap())
                .collect::<Vec<_>>()
        })
        .collect()
}

fn create(client: &mut Client, count: usize) -> Vec<String> {
    let body = format!(r#"{{"count":{count}}}"#);
    client.send("POST", "/v1/sandboxes", body.len(), body.as_bytes());
    let reply = client.reply();
    let ids: Vec<_> = reply
        .split(r#"{"id":""#)
        .skip(1)
        .map(|rest| rest.split_once('"').unwrap().0.to_owned())
        .collect();
    assert_eq!(ids.len(), count, "{reply}");
    ids
}

/// Whether this request did it.
fn delete(client: &mut Client, id: &str) -> bool {
    client.send("DELETE", &format!("/v1/sandboxes/{id}"), 0, b"");
    client.reply().contains(r#""deleted":true"#)
}

fn run_true(client: &mut Client, id: &str) {
    let body = br#"{"cmd":["/bin/true"]}"#;
    let target = format!("/v1/sandboxes/{id}/exec");
    client.send("POST", &target, body.len(), body);
    let events = client.reply();
    assert!(events.contains(r#""exit_code":0"#), "{events}");
}

fn spawn_sleep(client: &mut Client, id: &str) {
    let body = br#"{"cmd":["/bin/sleep","3600"]}"#;
    let target = format!("/v1/sandboxes/{id}/processes");
    client.send("POST", &target, body.len(), body);
    let reply = client.reply();
    assert!(reply.contains(r#""running":true"#), "{reply}");
}

// ---------------------------------------------------------------- the floor

/// The same work without a server.
struct Floor {
    home: PathBuf,
    ruleset: OwnedFd,
}

impl Floor {
    const DIRECTORIES: [&str; 4] = ["", ".tmp", ".sbx", ".sbx/proxy"];

    fn new(scratch: &Scratch) -> Self {
        let home = scratch.path("floor");
        let read = AccessFs::from_read(ABI::V6);
        let system = [
            "/bin",
            "/lib",
            "/lib64",
            "/usr",
            "/etc",
            "/proc",
            "/dev/null",
        ];
        let system = system
            .iter()
            .filter_map(|path| Some(PathBeneath::new(PathFd::new(path).ok()?, read)));
        let ruleset = Ruleset::default()
            .handle_access(AccessFs::from_all(ABI::V6))
            .unwrap()
            .create()
            .unwrap()
            .add_rules(system.map(Ok::<_, landlock::RulesetError>))
            .unwrap();
        let ruleset: Option<OwnedFd> = ruleset.into();
        Self {
            home,
            ruleset: ruleset.expect("the server started, so there is Landlock"),
        }
    }

    fn make_home(&self) {
        for name in Self::DIRECTORIES {
            let path = self.home.join(name);
            DirBuilder::new().mode(0o700).create(&path).unwrap();
            chown(&path, Some(OWN_USER), Some(OWN_USER)).unwrap();
        }
    }

    /// Starts a program as another user, in the ruleset.
    fn start(&self, words: &[&CStr]) -> Pid {
        let ruleset = self.ruleset.as_raw_fd();
        let mut arguments: Vec<_> = words.iter().map(|word| word.as_ptr()).collect();
        arguments.push(std::ptr::null());
        let arguments = arguments.as_ptr();
        in_child(&mut || become_and_execute(ruleset, arguments))
    }

    fn wait(pid: Pid) {
        assert_eq!(waitpid(pid, None), Ok(WaitStatus::Exited(pid, 0)));
    }

    /// Ends what runs as the user, and removes the home.
    fn end(&self, running: Pid) {
        let killer = in_child(&mut kill_own);
        Self::wait(killer);
        let ended = waitpid(running, None).unwrap();
        assert!(matches!(ended, WaitStatus::Signaled(..)), "{ended:?}");
        for name in Self::DIRECTORIES.iter().rev() {
            fs::remove_dir(self.home.join(name)).unwrap();
        }
    }
}

/// Runs `steps` in a new process that borrows this one's memory until it has executed or ended, as
/// the server does it (and `posix_spawn`, which knows neither users nor rulesets).
#[allow(unsafe_code)]
fn in_child(steps: &mut dyn FnMut() -> isize) -> Pid {
    let mut stack = vec![0; 64 << 10];
    let flags = CloneFlags::CLONE_VM | CloneFlags::CLONE_VFORK;
    // SAFETY: the calling thread stands still until the new process has memory of its own, so the
    // stack and `steps` outlive its use of them; the steps are system calls.
    unsafe { clone(Box::new(steps), &mut stack, flags, Some(libc::SIGCHLD)) }.unwrap()
}

/// The steps of a command that is kept in; returns only if it cannot start.
#[allow(unsafe_code)]
fn become_and_execute(ruleset: c_int, arguments: *const *const libc::c_char) -> isize {
    let environment: [*const libc::c_char; 1] = [std::ptr::null()];
    // SAFETY: numbers, and strings and arrays of them that end as they must and outlive the calls.
    // The raw setresuid changes this process alone; the C library's would look for its threads.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::syscall(libc::SYS_landlock_restrict_self, ruleset, 0);
        libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>());
        libc::syscall(libc::SYS_setresgid, OWN_USER, OWN_USER, OWN_USER);
        libc::syscall(libc::SYS_setresuid, OWN_USER, OWN_USER, OWN_USER);
        libc::execve(*arguments, arguments, environment.as_ptr());
        libc::_exit(127)
    }
}

/// Kills everything that runs as the user.
#[allow(unsafe_code)]
fn kill_own() -> isize {
    // SAFETY: numbers; as above.
    unsafe {
        libc::syscall(libc::SYS_setresuid, OWN_USER, OWN_USER, OWN_USER);
        libc::kill(-1, libc::SIGKILL);
        libc::_exit(0)
    }
}
