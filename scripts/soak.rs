//! A soak test: mixed load on a dedicated server and on a host at once. It checks every answer and
//! afterwards compares the servers' use of resources with that before.
//!
//! Run it with `scripts/soak`. Concurrent clients do tasks of random [`KINDS`], one after another. A check
//! that fails counts as an error of its kind, and the load continues. [`Remains`] reports resources that
//! are still in use at the end. The status is 0 if there were no errors and nothing remains.
//!
//! `scripts/soak hostile` is another test: one sandbox does one of [`ATTACKS`] after another, each beside a
//! sandbox whose commands, files and logs must stay right and in time.
//!
//! The servers and clients are started with the suite's [`fixture`]. The servers behind ports are this
//! program again, which is static and so runs in a sandbox too.

// The fixture has more than this program uses.
#[allow(dead_code, unused_imports, unused_macros)]
#[path = "../tests/suite/fixture/mod.rs"]
mod fixture;

use std::collections::BTreeMap;
use std::fmt::{Debug, Write as _};
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{SigSet, Signal};
use nix::unistd::Pid;
use serde_json::{Value, json};

use fixture::{
    Builder, Connection, EventStream, Mark, PATIENCE, Random, Reply, ReservedPort, Sandbox, Server,
    TempDir, count_entries, descendants_of, find, homes_in, memory_of, numbered_text, output_of,
    random_bytes, reset, wait_until,
};

/// Concurrent clients of each server.
const CLIENTS: u64 = 4;

/// Tasks that a client does in a sandbox before it makes a new one.
const STAY: u64 = 25;

/// Load before the first measurement, so that it includes what is allocated once and kept.
const WARM_UP: Duration = Duration::from_secs(20);

/// Resident memory in bytes that a server may gain after the warm-up: what the allocator keeps of its
/// peak, and remembered processes.
const MORE_MEMORY: u64 = 4 << 20;

/// Number of errors that ends the load early.
const ENOUGH_ERRORS: u64 = 20;

/// Bytes of output kept per process, and for all. They are small, so that logs are dropped often.
const LOG_BYTES: u64 = 1 << 20;
const LOG_TOTAL_BYTES: u64 = 8 << 20;

const USAGE: &str = "usage: scripts/soak [MINUTES] | scripts/soak hostile [ATTACK...]";

/// Status of a run that was ended by a signal.
const INTERRUPTED: i32 = 130;

fn main() {
    // cargo bench passes --bench to the programs that it runs.
    let words: Vec<String> = std::env::args()
        .skip(1)
        .filter(|word| word != "--bench")
        .collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let minutes = match words[..] {
        ["serve", name] => return serve(name),
        ["hostile", ref names @ ..] => std::process::exit(withstand(names)),
        [] => 1.0,
        [minutes] => minutes.parse().unwrap_or(0.0),
        _ => 0.0,
    };
    let Some(length) = Duration::try_from_secs_f64(minutes * 60.0)
        .ok()
        .filter(|length| !length.is_zero())
    else {
        eprintln!("{USAGE}");
        std::process::exit(2);
    };
    std::process::exit(soak(length));
}

/// Runs everything and returns the exit status.
fn soak(length: Duration) -> i32 {
    let stop = Stop::when_told();
    let seed = std::env::var("SOAK_SEED").map_or_else(
        |_| u64::from(std::process::id()) + 1,
        |text| text.parse().expect("SOAK_SEED is a number above 0"),
    );
    println!(
        "{} minutes from seed {seed}, {CLIENTS} clients of each server",
        length.as_secs_f64() / 60.0
    );
    let sites = [
        Site::start("dedicated", Server::builder()),
        Site::start("host", Server::host()),
    ];
    let tally = Tally::default();
    load(&sites, &tally, seed, WARM_UP, &stop);
    let before = sites.each_ref().map(Remains::at_rest);
    let warm = tally.take();
    let begun = Instant::now();
    load(&sites, &tally, seed + 1, length, &stop);
    let took = begun.elapsed();
    let after = sites
        .each_ref()
        .map(|site| Remains::after(site, &before[site.index()]));
    tally.print(&warm, took);
    let mut wrongs = Vec::new();
    for (site, (before, after)) in sites.iter().zip(before.iter().zip(&after)) {
        site.print_requests(&mut wrongs);
        before.compare(after, site.name, &mut wrongs);
    }
    let errors = tally.errors.load(Ordering::Relaxed);
    if errors > 0 {
        wrongs.push(format!("{errors} answers were not what they should be"));
    }
    for site in sites {
        site.end(&mut wrongs);
    }
    for wrong in &wrongs {
        println!("WRONG: {wrong}");
    }
    if stop.was_told() {
        println!("ended by a signal");
        return INTERRUPTED;
    }
    if !wrongs.is_empty() {
        return 1;
    }
    println!("\nEvery answer was right, and nothing is left.");
    0
}

/// The servers that were started.
static STARTED: Mutex<Vec<i32>> = Mutex::new(Vec::new());

/// Whether it is time to end.
struct Stop(&'static AtomicBool);

impl Stop {
    /// Takes the signals that end a program, in this thread and in all that it will start.
    fn when_told() -> Self {
        static TOLD: AtomicBool = AtomicBool::new(false);
        let signals = SigSet::from_iter([Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP]);
        signals.thread_block().unwrap();
        thread::spawn(move || {
            while signals.wait().is_ok() {
                if TOLD.swap(true, Ordering::Relaxed) {
                    // Told twice: at once, whatever is left then.
                    for pid in STARTED.lock().unwrap().iter() {
                        let pid = Pid::from_raw(*pid);
                        let _ = nix::sys::signal::kill(pid, Signal::SIGTERM);
                    }
                    std::process::exit(INTERRUPTED);
                }
            }
        });
        Self(&TOLD)
    }

    fn was_told(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

// ---------------------------------------------------------------- the servers

/// A server, and what is compared of it.
struct Site {
    name: &'static str,
    server: Server,
    /// The server proper: what was started is its init.
    inner: i32,
    /// Where the clients of a dedicated server have a directory each. It stays as long as the server:
    /// an upload that was broken off may be looked at later, and makes the directories above it.
    work: TempDir,
}

impl Site {
    fn start(name: &'static str, builder: Builder) -> Self {
        let builder = builder
            .env("SBX_LOG_BYTES", LOG_BYTES)
            .env("SBX_LOG_TOTAL_BYTES", LOG_TOTAL_BYTES)
            .env("SBX_PING_SECS", 2);
        let mut command = builder.command();
        // A key that ends this program does so in order, and is not for the servers.
        command.arg("--init").process_group(0);
        let server = builder.start_as(command);
        STARTED.lock().unwrap().push(server.pid());
        let inner = server.inner_pid();
        let work = TempDir::new();
        for client in 0..CLIENTS {
            fs::create_dir(work.join(&client.to_string())).unwrap();
        }
        Self {
            name,
            server,
            inner,
            work,
        }
    }

    fn is_host(&self) -> bool {
        self.server.place.is_some()
    }

    /// Its place among all sites.
    fn index(&self) -> usize {
        usize::from(self.is_host())
    }

    /// The pids of its init and of the server.
    fn pids(&self) -> [i32; 2] {
        [self.server.pid(), self.inner]
    }

    fn metrics(&self) -> Value {
        let headers = [("Accept", "application/json")];
        self.server
            .connect()
            .request("GET", "/v1/metrics", &headers, b"")
            .json()
    }

    /// What the server itself counted.
    fn print_requests(&self, wrongs: &mut Vec<String>) {
        println!(
            "\n| requests of the {} server | status: count |\n|---|---|",
            self.name
        );
        let metrics = self.metrics();
        let mut routes: BTreeMap<&str, String> = BTreeMap::new();
        for row in metrics["requests"].as_array().unwrap() {
            let route = row["route"].as_str().unwrap();
            let _ = write!(
                routes.entry(route).or_default(),
                "{}: {} ",
                row["status"],
                row["count"]
            );
            // 502 is for servers behind ports, which die here.
            let status = row["status"].as_u64().unwrap_or(0);
            if status >= 500 && status != 502 {
                wrongs.push(format!("{}: {row}", self.name));
            }
        }
        for (route, counts) in routes {
            println!("| {route} | {} |", counts.trim_end());
        }
    }

    /// Ends the server, as whoever runs it would.
    fn end(mut self, wrongs: &mut Vec<String>) {
        self.server.signal(libc::SIGTERM);
        let status = self.server.wait_for_exit(PATIENCE);
        if !status.success() {
            wrongs.push(format!("{} server: {status}", self.name));
        }
        let log = self.server.log();
        if log.contains("panicked") {
            wrongs.push(format!("{} server: {log}", self.name));
        }
    }
}

/// What could be left of a load.
#[derive(Debug, Clone)]
struct Remains {
    counts: Vec<(&'static str, usize)>,
    /// Resident, of the server: now, and at its most.
    memory: u64,
    peak: u64,
}

impl Remains {
    /// Takes away what clients leave on purpose: the memory of what has ended. Whatever else is there
    /// stays, and is counted.
    fn tidy(site: &Site) {
        if site.is_host() {
            return;
        }
        for process in site
            .server
            .get("/v1/processes")
            .json()
            .as_array()
            .unwrap()
            .iter()
            .filter(|process| process["running"] == false)
        {
            let id = process["id"].as_str().unwrap();
            site.server.delete(&format!("/v1/processes/{id}"));
        }
    }

    fn now(site: &Site) -> Self {
        let count = |what: &str| {
            site.pids()
                .iter()
                .map(|pid| count_entries(&format!("/proc/{pid}/{what}")))
                .sum()
        };
        let metrics = site.metrics();
        let told = |name: &str| usize::try_from(metrics[name].as_u64().unwrap()).unwrap();
        let place = site.server.place.as_ref();
        // Not counted: itself and its init.
        let processes = descendants_of(site.server.pid()).len() - 1;
        Self {
            counts: vec![
                ("processes", processes),
                (
                    "processes of sandboxes' users",
                    place.map_or(0, |place| place.processes().len()),
                ),
                ("threads", count("task")),
                ("descriptors", count("fd")),
                // But for the one that asks.
                ("connections", told("connections") - 1),
                ("processes that the server knows", told("processes_running")),
                ("bytes of logs", told("log_bytes")),
                ("sandboxes", told("sandboxes")),
                (
                    "homes",
                    place.map_or(0, |place| homes_in(place.homes()).len()),
                ),
                (
                    "files of clients",
                    files_below(site.work.path()) - usize::try_from(CLIENTS).unwrap(),
                ),
                ("files on their way", uploads_of(site)),
            ],
            memory: memory_of(site.inner, "VmRSS"),
            peak: memory_of(site.inner, "VmHWM"),
        }
    }

    /// When nothing changes any more.
    fn at_rest(site: &Site) -> Self {
        Self::tidy(site);
        let mut last = Self::now(site);
        let mut same = 0;
        wait_until("the server is at rest", 3 * PATIENCE, || {
            thread::sleep(Duration::from_millis(100));
            let now = Self::now(site);
            same = if now.counts == last.counts {
                same + 1
            } else {
                0
            };
            last = now;
            same >= 10
        });
        last
    }

    /// When it is as it was, or does not become so.
    fn after(site: &Site, before: &Self) -> Self {
        Self::tidy(site);
        let deadline = Instant::now() + PATIENCE;
        loop {
            let now = Self::now(site);
            if before.excess(&now).is_empty() || Instant::now() > deadline {
                return now;
            }
            thread::sleep(Duration::from_millis(100));
        }
    }

    /// What there is more than there was, or than nothing: a server at rest has threads and descriptors.
    fn excess(&self, after: &Self) -> Vec<String> {
        let mut excess = Vec::new();
        for ((what, before), (_, after)) in self.counts.iter().zip(&after.counts) {
            let may_be = ["threads", "descriptors"].contains(what);
            if after > before || (*after > 0 && !may_be) {
                excess.push(format!("{what}: {after}, and {before} before"));
            }
        }
        excess
    }

    /// Prints both, and says what is more than it was.
    fn compare(&self, after: &Self, name: &str, wrongs: &mut Vec<String>) {
        println!("\n| {name} server | before | after |\n|---|---:|---:|");
        for ((what, before), (_, after)) in self.counts.iter().zip(&after.counts) {
            println!("| {what} | {before} | {after} |");
        }
        let excess = self.excess(after);
        wrongs.extend(excess.iter().map(|what| format!("{name}: {what}")));
        let [before, now, most, peak] =
            [self.memory, after.memory, self.peak, after.peak].map(|bytes| bytes >> 10);
        println!("| memory, KiB | {before} | {now} |");
        println!("| memory at its most, KiB | {most} | {peak} |");
        if after.memory > self.memory + MORE_MEMORY {
            wrongs.push(format!(
                "{name}: memory: {now} KiB, and {before} KiB before; {} KiB more may be",
                MORE_MEMORY >> 10
            ));
        }
    }
}

/// Everything in a directory, at any depth.
fn files_below(directory: &Path) -> usize {
    let entries = fs::read_dir(directory).into_iter().flatten();
    entries
        .filter_map(Result::ok)
        .map(|entry| match entry.file_type() {
            Ok(kind) if kind.is_dir() => 1 + files_below(&entry.path()),
            _ => 1,
        })
        .sum()
}

/// Names of files that are not whole yet, wherever the server puts them.
fn uploads_of(site: &Site) -> usize {
    let prefix = format!(".sbx-upload-{:x}-", site.inner);
    // Those beside their target are among the clients' files.
    ["/tmp", "/var/tmp"]
        .into_iter()
        .filter_map(|place| fs::read_dir(place).ok())
        .flat_map(|entries| entries.filter_map(Result::ok))
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix))
        .count()
}

// ---------------------------------------------------------------- the load

/// Something that a client does, and checks.
type Act = fn(&Place<'_>, &mut Random);

/// What clients do, with how often among all.
const KINDS: [(&str, usize, Act); 13] = [
    ("commands with output", 20, run_with_output),
    ("short commands, one connection", 10, run_short_ones),
    ("commands that time out", 3, time_out),
    ("commands whose client goes", 5, go_away),
    ("commands read slowly", 2, read_slowly),
    ("background, readers that leave", 10, follow_and_leave),
    ("background, stdin, kill, wait", 8, feed_and_kill),
    ("files, whole and in ranges", 15, use_files),
    ("uploads that break off", 5, break_off_upload),
    ("directories", 5, use_directories),
    ("servers behind ports", 4, use_port),
    ("requests that are refused", 8, ask_nonsense),
    ("requests that never end", 5, leave_half_a_request),
];

/// Making, using up and deleting sandboxes; done by the clients of a host between the other kinds.
const LIFE: &str = "sandboxes made and deleted";

#[derive(Debug, Default, Clone, Copy)]
struct Count {
    done: u64,
    wrong: u64,
}

/// What was done.
#[derive(Default)]
struct Tally {
    counts: Mutex<BTreeMap<&'static str, Count>>,
    errors: AtomicU64,
}

impl Tally {
    /// Does something, and counts it.
    fn count(&self, name: &'static str, act: impl FnOnce()) -> bool {
        // What is half done then is a client's, and goes with it.
        let is_right = catch_unwind(AssertUnwindSafe(act)).is_ok();
        let mut counts = self.counts.lock().unwrap();
        let count = counts.entry(name).or_default();
        count.done += 1;
        if !is_right {
            count.wrong += 1;
            self.errors.fetch_add(1, Ordering::Relaxed);
            eprintln!("the above was wrong in: {name}");
        }
        is_right
    }

    fn done(&self) -> u64 {
        let counts = self.counts.lock().unwrap();
        counts.values().map(|count| count.done).sum()
    }

    fn take(&self) -> BTreeMap<&'static str, Count> {
        std::mem::take(&mut self.counts.lock().unwrap())
    }

    fn print(&self, warm: &BTreeMap<&'static str, Count>, took: Duration) {
        println!("\n| what clients did | warm-up | then | wrong |\n|---|---:|---:|---:|");
        let counts = self.counts.lock().unwrap();
        let mut all = 0;
        for (name, count) in counts.iter() {
            let warm = warm.get(name).copied().unwrap_or_default();
            println!(
                "| {name} | {} | {} | {} |",
                warm.done,
                count.done,
                warm.wrong + count.wrong
            );
            all += count.done;
        }
        println!("| all, in {} s | | {all} | |", took.as_secs());
    }
}

/// Clients of all servers, for so long; all of it is over when this returns.
fn load(sites: &[Site], tally: &Tally, seed: u64, length: Duration, stop: &Stop) {
    let deadline = Instant::now() + length;
    let goes_on = || {
        Instant::now() < deadline
            && !stop.was_told()
            && tally.errors.load(Ordering::Relaxed) < ENOUGH_ERRORS
    };
    thread::scope(|scope| {
        for site in sites {
            for client in 0..CLIENTS {
                let goes_on = &goes_on;
                let seed = (seed * 2 + site.index() as u64) * CLIENTS + client + 1;
                let client = Client {
                    site,
                    number: client,
                    tally,
                    random: Random(seed),
                };
                scope.spawn(move || client.work(goes_on));
            }
        }
        let mut said = Instant::now();
        while goes_on() {
            thread::sleep(Duration::from_millis(100));
            if said.elapsed() >= Duration::from_secs(60) {
                said = Instant::now();
                let done = tally.done();
                let memory = sites
                    .iter()
                    .map(|site| memory_of(site.inner, "VmRSS") >> 10);
                let memory: Vec<u64> = memory.collect();
                println!("{done} things done; servers' memory {memory:?} KiB");
            }
        }
    });
}

struct Client<'a> {
    site: &'a Site,
    number: u64,
    tally: &'a Tally,
    random: Random,
}

impl Client<'_> {
    fn work(mut self, goes_on: &dyn Fn() -> bool) {
        while goes_on() {
            if self.site.is_host() {
                self.live_in_a_sandbox(goes_on);
            } else {
                let place = Place {
                    server: &self.site.server,
                    token: self.site.server.token.clone().unwrap(),
                    prefix: "/v1".to_owned(),
                    directory: self.site.work.join(&format!("{}/", self.number)),
                };
                self.stay(&place, goes_on);
            }
        }
    }

    /// Does some things in one place.
    fn stay(&mut self, place: &Place<'_>, goes_on: &dyn Fn() -> bool) -> bool {
        let weights: usize = KINDS.iter().map(|(_, weight, _)| weight).sum();
        for _ in 0..STAY {
            if !goes_on() {
                break;
            }
            let chosen = self.random.below(weights);
            let mut until = 0;
            let is_it = |(_, weight, _): &&(_, usize, _)| {
                until += weight;
                chosen < until
            };
            let (name, _, act) = KINDS.iter().find(is_it).expect("less than all weights");
            if !self.tally.count(name, || act(place, &mut self.random)) {
                return false;
            }
        }
        true
    }

    fn live_in_a_sandbox(&mut self, goes_on: &dyn Fn() -> bool) {
        let mut made = None;
        let server = &self.site.server;
        self.tally.count(LIFE, || {
            let wish = json!({ "max_procs": 128, "env": { "SOAK": "1" } });
            made = Some(server.sandbox_with(&wish));
        });
        let Some(sandbox) = made else { return };
        let place = Place {
            server,
            token: sandbox.token.clone(),
            prefix: format!("/v1/sandboxes/{}", sandbox.id),
            directory: String::new(),
        };
        self.stay(&place, goes_on);
        let random = &mut self.random;
        self.tally.count(LIFE, || end(sandbox, &place, random));
    }
}

/// Deletes a sandbox in which all kinds of things are there and go on.
fn end(sandbox: Sandbox<'_>, place: &Place<'_>, random: &mut Random) {
    let stubborn = place.spawn(&json!({ "cmd": "trap '' TERM; sleep 3600 & sleep 3600" }));
    let mut follower = random.one_in(2).then(|| place.logs(&stubborn, "?follow=1"));
    let mut stream = random.one_in(2).then(|| {
        let body = json!({ "cmd": "echo here; setsid sleep 3600 & sleep 3600" });
        let mut stream = place.exec_stream(&body);
        assert_eq!(stream.next_output().unwrap()["event"], "start");
        stream
    });
    place.expect("PUT", "files/write?path=a/b/c/d&mkdir=1", b"deep", 200);
    sandbox.delete();
    for stream in [&mut follower, &mut stream].into_iter().flatten() {
        expect_one_exit(&stream.collect::<Vec<_>>(), "deleted");
    }
}

/// Where a client works: the machine, or a sandbox.
struct Place<'a> {
    server: &'a Server,
    token: String,
    prefix: String,
    /// Where its files are; ends with a slash, or is empty.
    directory: String,
}

impl Place<'_> {
    fn is_sandbox(&self) -> bool {
        self.directory.is_empty()
    }

    fn connect(&self) -> Connection {
        let mut connection = self.server.connect();
        connection.token = Some(self.token.clone());
        connection
    }

    fn target(&self, route: &str) -> String {
        format!("{}/{route}", self.prefix)
    }

    /// The target of a route about a file.
    fn file(&self, route: &str, name: &str) -> String {
        let (route, rest) = route.split_once('&').unwrap_or((route, ""));
        format!("files/{route}?path={}{name}&{rest}", self.directory)
    }

    fn ask(&self, method: &str, route: &str, body: &[u8]) -> Reply {
        self.connect()
            .request(method, &self.target(route), &[], body)
    }

    #[track_caller]
    fn expect(&self, method: &str, route: &str, body: &[u8], status: u16) -> Reply {
        let reply = self.ask(method, route, body);
        assert_eq!(reply.status, status, "{method} {route}: {}", reply.text());
        reply
    }

    #[track_caller]
    fn exec_stream(&self, body: &Value) -> EventStream {
        let target = self.target("exec");
        self.connect()
            .stream("POST", &target, body.to_string().as_bytes())
    }

    #[track_caller]
    fn spawn(&self, body: &Value) -> Value {
        self.expect("POST", "processes", body.to_string().as_bytes(), 200)
            .json()
    }

    #[track_caller]
    fn logs(&self, process: &Value, query: &str) -> EventStream {
        let target = self.target(&format!("processes/{}/logs{query}", id_of(process)));
        self.connect().stream("GET", &target, b"")
    }

    /// Kills and forgets; what is said of it.
    #[track_caller]
    fn delete(&self, process: &Value) -> Value {
        let route = format!("processes/{}", id_of(process));
        self.expect("DELETE", &route, b"", 200).json()
    }
}

fn id_of(process: &Value) -> &str {
    process["id"].as_str().unwrap()
}

/// Exactly one `exit`, at the end, and that for this reason.
#[track_caller]
fn expect_one_exit(events: &[Value], reason: &str) -> Value {
    let is_exit = |event: &&Value| event["event"] == "exit";
    assert_eq!(events.iter().filter(is_exit).count(), 1, "{reason}");
    let exit = events.last().unwrap();
    assert_eq!(exit["reason"], reason, "{exit}");
    exit.clone()
}

#[track_caller]
fn expect_same(what: &str, content: &[u8], expected: &[u8]) {
    if content != expected {
        let pairs = content.iter().zip(expected);
        let same = pairs.take_while(|(one, other)| one == other).count();
        panic!(
            "{what}: {} bytes, not {}; the first difference is at {same}",
            content.len(),
            expected.len()
        );
    }
}

/// Text with characters of every length, in which every position can be told from every other.
fn text(random: &mut Random, most: usize) -> String {
    let mut text = numbered_text(random.below(most));
    for _ in 0..random.below(20) {
        let at = random.below(text.len() + 1);
        if text.is_char_boundary(at) {
            text.insert_str(at, random.of(&["é", "€", "😀", "\u{2028}", "\u{85}", "\0"]));
        }
    }
    text
}

/// What `seq 1 COUNT` writes.
fn lines(count: usize) -> String {
    (1..=count).fold(String::new(), |mut lines, line| {
        let _ = writeln!(lines, "{line}");
        lines
    })
}

// ---------------------------------------------------------------- what clients do

fn run_with_output(place: &Place<'_>, random: &mut Random) {
    let most = *random.of(&[&100, &10_000, &300_000]);
    let (input, code) = (text(random, most), random.below(200));
    let encoding = random.of(&["utf-8", "base64"]);
    let body = json!({
        "cmd": format!("tee /dev/fd/2; exit {code}"),
        "stdin": input,
        "encoding": encoding,
        "timeout": 60,
        "env": { "N": code },
    });
    let events: Vec<Value> = place.exec_stream(&body).collect();
    assert_eq!(events[0]["event"], "start");
    for stream in ["stdout", "stderr"] {
        let output = output_of(&events, stream, 0);
        expect_same(stream, &output.data, input.as_bytes());
    }
    assert_eq!(expect_one_exit(&events, "exited")["exit_code"], code);
}

fn run_short_ones(place: &Place<'_>, random: &mut Random) {
    let mut connection = place.connect();
    for number in 0..=random.below(8) {
        let body = json!({ "cmd": ["echo", number.to_string()] }).to_string();
        let reply = connection.request("POST", &place.target("exec"), &[], body.as_bytes());
        let events = fixture::events_of(&reply.body);
        let output = output_of(&events, "stdout", 0);
        expect_same("stdout", &output.data, format!("{number}\n").as_bytes());
        assert_eq!(expect_one_exit(&events, "exited")["exit_code"], 0);
    }
}

fn time_out(place: &Place<'_>, random: &mut Random) {
    let mark = Mark::new();
    let body = json!({
        "cmd": format!("echo begun; setsid sleep {mark} & sleep {mark}"),
        "timeout": 0.05 + f64::from(u16::try_from(random.below(200)).unwrap()) / 1000.0,
    });
    let events: Vec<Value> = place.exec_stream(&body).collect();
    expect_one_exit(&events, "timeout");
    mark.wait_gone(PATIENCE);
}

fn go_away(place: &Place<'_>, random: &mut Random) {
    let mark = Mark::new();
    let script = format!("while :; do echo line; sleep 0.01; done & sleep {mark}");
    let mut stream = place.exec_stream(&json!({ "cmd": script }));
    for _ in 0..random.below(3) {
        stream.next_output().unwrap();
    }
    match random.below(2) {
        0 => drop(stream),
        _ => reset(stream.connection),
    }
    mark.wait_gone(PATIENCE);
}

fn read_slowly(place: &Place<'_>, random: &mut Random) {
    let count = 100_000 + random.below(100_000);
    let cmd = ["seq".to_owned(), "1".to_owned(), count.to_string()];
    let mut stream = place.exec_stream(&json!({ "cmd": cmd }));
    let mut events = Vec::new();
    for _ in 0..40 {
        events.extend(stream.next());
        thread::sleep(Duration::from_millis(5));
    }
    events.extend(stream);
    expect_one_exit(&events, "exited");
    let output = output_of(&events, "stdout", 0);
    expect_same("stdout", &output.data, lines(count).as_bytes());
}

fn follow_and_leave(place: &Place<'_>, random: &mut Random) {
    let count = 1 + random.below(100_000);
    let script = format!("seq 1 {count}; read line; echo $line >&2");
    let process = place.spawn(&json!({ "cmd": script, "tag": "soak" }));
    let mut follower = place.logs(&process, "?follow=1");
    for _ in 0..random.below(4) {
        let mut leaving = place.logs(&process, "?follow=1");
        for _ in 0..random.below(3) {
            leaving.next();
        }
        match random.below(3) {
            0 => reset(leaving.connection),
            _ => drop(leaving),
        }
    }
    let mut events = vec![follower.next().unwrap()];
    let stdin = format!("processes/{}/stdin?eof=1", id_of(&process));
    place.expect("PUT", &stdin, b"over\n", 200);
    events.extend(follower);
    expect_one_exit(&events, "exited");
    let output = output_of(&events, "stdout", 0);
    let expected = lines(count);
    // A ring of this size forgets nothing of it.
    assert!(expected.len() < usize::try_from(LOG_BYTES).unwrap() && output.dropped == 0);
    expect_same("stdout", &output.data, expected.as_bytes());
    expect_same("stderr", &output_of(&events, "stderr", 0).data, b"over\n");
    // From the middle, which is in the middle of a line.
    let middle = random.below(expected.len());
    let again: Vec<Value> = place
        .logs(&process, &format!("?stdout_offset={middle}"))
        .collect();
    let output = output_of(&again, "stdout", middle as u64);
    if output.dropped == 0 {
        expect_same("the rest", &output.data, &expected.as_bytes()[middle..]);
    }
    assert_eq!(place.delete(&process)["killed"], false);
}

fn feed_and_kill(place: &Place<'_>, random: &mut Random) {
    let id = format!("soak-{}", random.next());
    let body = json!({ "cmd": ["cat"], "id": id });
    let process = place.spawn(&body);
    assert_eq!(place.spawn(&body)["pid"], process["pid"], "the same one");
    let bytes = random_bytes(1 + random.below(200_000), random.next());
    let route = |rest: &str| format!("processes/{id}/{rest}");
    place.expect("PUT", &route("stdin"), &bytes, 200);
    let waited = place.expect("GET", &route("wait?timeout=0.01"), b"", 200);
    assert_eq!(waited.json()["running"], true, "{}", waited.text());
    match random.below(3) {
        0 => {
            place.expect("PUT", &route("stdin?eof=1"), b"", 200);
            let waited = place.expect("GET", &route("wait?timeout=60"), b"", 200);
            assert_eq!(waited.json()["exit_code"], 0, "{}", waited.text());
            let logs: Vec<Value> = place.logs(&process, "?encoding=base64").collect();
            let output = output_of(&logs, "stdout", 0);
            if output.dropped == 0 {
                expect_same("what came back", &output.data, &bytes);
            }
        }
        1 => {
            place.expect("POST", &route("kill"), br#"{"signal":"TERM"}"#, 200);
            let waited = place.expect("GET", &route("wait?timeout=60"), b"", 200);
            assert_eq!(waited.json()["signal"], 15, "{}", waited.text());
        }
        _ => {
            let state = place.expect("GET", &format!("processes/{id}"), b"", 200);
            assert_eq!(place.delete(&process)["killed"], true, "{}", state.text());
        }
    }
    assert_eq!(place.delete(&process)["killed"], false, "it is forgotten");
}

fn use_files(place: &Place<'_>, random: &mut Random) {
    let most = *random.of(&[&1, &5000, &(2 << 20)]);
    let mut content = random_bytes(random.below(most + 1), random.next());
    let name = format!("file-{}", random.next());
    place.expect("PUT", &place.file("write", &name), &content, 200);
    let read = place.expect("GET", &place.file("read", &name), b"", 200);
    expect_same("a file", &read.body, &content);
    for _ in 0..random.below(4) {
        let from = random.below(content.len() + 1);
        let piece = random_bytes(random.below(100_000), random.next());
        let route = format!("write&offset={from}");
        place.expect("PUT", &place.file(&route, &name), &piece, 200);
        let end = from + piece.len();
        content.resize(content.len().max(end), 0);
        content[from..end].copy_from_slice(&piece);
        let length = random.below(content.len() + 1);
        let route = format!("read&offset={from}&length={length}");
        let read = place.expect("GET", &place.file(&route, &name), b"", 200);
        let until = (from + length).min(content.len());
        expect_same("a range", &read.body, &content[from..until]);
    }
    let stat = place.expect("GET", &place.file("stat", &name), b"", 200);
    assert_eq!(stat.json()["size"], content.len());
    // A reader that goes in the middle.
    let mut connection = place.connect();
    connection.send_request("GET", &place.target(&place.file("read", &name)), &[], b"");
    connection.read_head();
    reset(connection);
    place.expect("DELETE", &place.file("delete", &name), b"", 200);
    place.expect("GET", &place.file("read", &name), b"", 404);
}

fn break_off_upload(place: &Place<'_>, random: &mut Random) {
    let name = format!("broken-{}", random.next());
    let is_there = random.one_in(2);
    if is_there {
        place.expect("PUT", &place.file("write", &name), b"old", 200);
    }
    let mut connection = place.connect();
    let target = place.target(&place.file("write", &name));
    let headers = [("Content-Length", "1000000")];
    connection.send_request("PUT", &target, &headers, &vec![b'x'; random.below(500_000)]);
    if random.one_in(2) {
        reset(connection);
    } else {
        drop(connection);
    }
    let status = if is_there { 200 } else { 404 };
    let read = place.expect("GET", &place.file("read", &name), b"", status);
    if is_there {
        expect_same("the old file", &read.body, b"old");
        place.expect("DELETE", &place.file("delete", &name), b"", 200);
    }
}

fn use_directories(place: &Place<'_>, random: &mut Random) {
    let top = format!("dir-{}", random.next());
    let count = random.below(30);
    for number in 0..count {
        let name = format!("{top}/sub/{number:02}");
        place.expect("PUT", &place.file("write&mkdir=1", &name), b"x", 200);
    }
    if count > 0 {
        let list = |rest: &str| {
            let route = place.file(&format!("list{rest}"), &format!("{top}/sub"));
            let listed = place.expect("GET", &route, b"", 200).json();
            let names = listed["entries"].as_array().unwrap().iter();
            names
                .map(|entry| entry["name"].as_str().unwrap().to_owned())
                .collect::<Vec<_>>()
        };
        let expected: Vec<String> = (0..count).map(|number| format!("{number:02}")).collect();
        assert_eq!(list(""), expected);
        assert_eq!(list("&limit=3"), expected[..count.min(3)]);
        let from = format!("{}{top}/sub", place.directory);
        let to = format!("{}{top}/other", place.directory);
        place.expect("POST", &format!("files/move?from={from}&to={to}"), b"", 200);
        place.expect("GET", &place.file("list", &format!("{top}/sub")), b"", 404);
        place.expect("DELETE", &place.file("delete", &top), b"", 409);
        place.expect("DELETE", &place.file("delete&recursive=1", &top), b"", 200);
    }
    place.expect("GET", &place.file("stat", &top), b"", 404);
}

fn ask_nonsense(place: &Place<'_>, random: &mut Random) {
    let mut connection = place.connect();
    let mut expect = |method: &str, route: &str, body: &str, status: u16| {
        let reply = connection.request(method, &place.target(route), &[], body.as_bytes());
        assert_eq!(reply.status, status, "{method} {route}: {}", reply.text());
        assert!(reply.json()["error"].is_string());
    };
    expect("GET", "nowhere", "", 404);
    expect("PUT", "exec", "", 405);
    expect("POST", "exec", r#"{"cmd":7}"#, 400);
    expect("POST", "exec", r#"{"cmd":["/no/such/program"]}"#, 400);
    expect("GET", "processes/p-999999999", "", 404);
    expect("GET", "files/read", "", 400);
    expect("GET", "files/read?path=/no/such/file", "", 404);
    expect("GET", "proxy/1/", "", 502);
    let mut stranger = place.connect();
    stranger.token = random.one_in(2).then(|| "wrong".to_owned());
    let body = br#"{"cmd":"true"}"#;
    let reply = stranger.request("POST", &place.target("exec"), &[], body);
    assert_eq!(reply.status, 403, "{}", reply.text());
    let mut broken = place.connect();
    broken.send(random.of::<[u8]>(&[
        b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"\0\0\0\0\r\n\r\n",
        b"POST /v1/exec HTTP/1.1\r\nTransfer-Encoding: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nName : x\r\n\r\n",
    ]));
    let reply = broken.read_reply();
    assert!([400, 501].contains(&reply.status), "{}", reply.text());
    broken.expect_close();
    assert_eq!(place.server.get("/health").status, 200);
}

/// Clients that stop in the middle of whatever they send.
fn leave_half_a_request(place: &Place<'_>, random: &mut Random) {
    let body = r#"{"cmd":"echo never > never"}"#;
    let whole = format!(
        "POST {} HTTP/1.1\r\nHost: sandbox\r\nX-Sandbox-Token: {}\r\nContent-Length: {}\r\n\r\n{body}",
        place.target("exec"),
        place.token,
        body.len(),
    );
    let mut held = Vec::new();
    for _ in 0..=random.below(8) {
        let mut connection = place.connect();
        connection.send(&whole.as_bytes()[..random.below(whole.len())]);
        if random.one_in(2) {
            held.push(connection);
        } else {
            reset(connection);
        }
    }
    assert_eq!(place.server.get("/health").status, 200);
}

/// A server is started behind a port, used, and dies in the middle of it.
fn use_port(place: &Place<'_>, random: &mut Random) {
    let own = std::env::current_exe().unwrap();
    // No other client's server gets the port, before or after this one's.
    let reserved = ReservedPort::new();
    let (program, name) = if place.is_sandbox() {
        let stat = place.ask("GET", "files/stat?path=backend", b"");
        if stat.status == 404 {
            let bytes = fs::read(own).unwrap();
            place.expect("PUT", "files/write?path=backend&mode=755", &bytes, 200);
        }
        ("./backend".to_owned(), format!("app-{}", random.next()))
    } else {
        let port = reserved.number().to_string();
        (own.to_str().unwrap().to_owned(), port)
    };
    let process = place.spawn(&json!({ "cmd": [program, "serve", name] }));
    let waited = place.expect("GET", &format!("ports/{name}/wait?timeout=20"), b"", 200);
    assert_eq!(waited.json()["listening"], true, "{}", waited.text());
    let at = |path: &str| format!("proxy/{name}{path}");
    for _ in 0..=random.below(4) {
        let bytes = random_bytes(random.below(300_000), random.next());
        let reply = place.expect("POST", &at("/echo"), &bytes, 200);
        expect_same("an answer", &reply.body, &bytes);
    }
    let upgrade = || {
        let mut socket = place.connect();
        let headers = [("Connection", "Upgrade"), ("Upgrade", "echo")];
        socket.send_request("GET", &place.target(&at("/upgrade")), &headers, b"");
        assert_eq!(socket.read_head().status, 101);
        socket
    };
    let mut socket = upgrade();
    for _ in 0..=random.below(5) {
        let message = random_bytes(1 + random.below(50_000), random.next());
        socket.send(&message);
        expect_same("an echo", &socket.read_exactly(message.len()), &message);
    }
    match random.below(3) {
        0 => drop(socket),
        1 => reset(socket),
        // It dies with the server.
        _ => {}
    }
    let open = upgrade();
    // Half of an answer, and the end of the server: the client must not take it for a whole one.
    let mut connection = place.connect();
    connection.send_request("GET", &place.target(&at("/die")), &[], b"");
    let received = connection.read_to_close();
    let half = find(&received, b"\r\n\r\n").map(|end| received.len() - end - 4);
    assert!(half.is_none_or(|half| half < 1000), "{half:?}");
    let mut open = open;
    assert!(open.read_to_close().is_empty(), "the upgraded one ends too");
    wait_until("nobody listens", PATIENCE, || {
        place.ask("GET", &at("/"), b"").status == 502
    });
    let waited = place.expect(
        "GET",
        &format!("processes/{}/wait", id_of(&process)),
        b"",
        200,
    );
    assert_eq!(waited.json()["exit_code"], 3, "{}", waited.text());
    place.delete(&process);
    if place.is_sandbox() {
        let socket = format!("files/delete?path=.sbx/proxy/{name}.sock");
        place.expect("DELETE", &socket, b"", 200);
    }
}

// ---------------------------------------------------------------- a hostile tenant

/// What a sandbox does to the others. It goes on until the sandbox is deleted and what is returned is
/// dropped.
type Attack = fn(&Sandbox<'_>) -> Vec<Connection>;

const ATTACKS: [(&str, Attack); 8] = [
    ("sessions", |sandbox| {
        let burn = "setsid sh -c 'while :; do :; done' &";
        let all = format!("for i in $(seq 100); do {burn} done; wait");
        sandbox.spawn(&json!({ "cmd": all }));
        Vec::new()
    }),
    ("forks", |sandbox| {
        let all = "for i in $(seq 20); do (while :; do setsid /bin/true; done) & done; wait";
        sandbox.spawn(&json!({ "cmd": all }));
        Vec::new()
    }),
    ("daemons", |sandbox| {
        for _ in 0..20 {
            sandbox.sh("(setsid sleep 3600 > /dev/null 2>&1 &) &");
        }
        Vec::new()
    }),
    ("log", |sandbox| {
        for _ in 0..4 {
            sandbox.spawn(&json!({ "cmd": "yes", "tag": "loud" }));
        }
        Vec::new()
    }),
    ("unread-output", |sandbox| {
        let body = json!({ "cmd": "yes" }).to_string();
        hold(sandbox, 40, |connection| {
            connection.send_request("POST", &sandbox.target("exec"), &[], body.as_bytes());
        })
    }),
    ("unread-lists", |sandbox| {
        sandbox.sh("for i in $(seq 2000); do : > a-file-with-quite-a-long-name-$i; done");
        hold(sandbox, 40, |connection| {
            for _ in 0..20 {
                connection.send_request("GET", &sandbox.target("files/list?path=/"), &[], b"");
            }
        })
    }),
    ("large-stdin", |sandbox| {
        let body = json!({ "cmd": "sleep 3600", "stdin": "x".repeat(4 << 20) }).to_string();
        hold(sandbox, 10, |connection| {
            connection.send_request("POST", &sandbox.target("exec"), &[], body.as_bytes());
        })
    }),
    ("half-bodies", |sandbox| {
        let headers = [("Content-Length", "8000000")];
        hold(sandbox, 40, |connection| {
            let half = vec![b' '; 1 << 20];
            connection.send_request("POST", &sandbox.target("exec"), &headers, &half);
        })
    }),
];

/// Connections on which something was sent, and of which nothing is read.
fn hold(sandbox: &Sandbox<'_>, count: usize, send: impl Fn(&mut Connection)) -> Vec<Connection> {
    let mut held: Vec<Connection> = (0..count).map(|_| sandbox.connect()).collect();
    held.iter_mut().for_each(send);
    held
}

/// How long each attack lasts.
const ATTACK_SECS: Duration = Duration::from_secs(5);

/// What honest clients are promised meanwhile, on two busy cores: the slowest `/health`, the slowest
/// short command, and the latest end of a command with a timeout of half a second.
const BOUNDS: [Duration; 3] = [
    Duration::from_secs(2),
    Duration::from_secs(10),
    Duration::from_secs(5),
];

/// Has one sandbox attack while another works, by each of the named attacks or by all. Returns the
/// exit status.
fn withstand(names: &[&str]) -> i32 {
    let known = |name: &&str| ATTACKS.iter().any(|(attack, _)| attack == name);
    if !names.iter().all(known) {
        eprintln!(
            "{USAGE}; attacks: {}",
            ATTACKS.map(|(name, _)| name).join(" ")
        );
        return 2;
    }
    let server = Server::host()
        .env("SBX_LOG_BYTES", LOG_BYTES)
        .env("SBX_LOG_TOTAL_BYTES", LOG_TOTAL_BYTES)
        .start();
    println!("| attack | /health, ms | echo | timeout of 500 | |\n|---|---:|---:|---:|---|");
    let mut status = 0;
    for (name, attack) in ATTACKS {
        if !names.is_empty() && !names.contains(&name) {
            continue;
        }
        let mut worst = [Duration::ZERO; 3];
        let attacked = AssertUnwindSafe(|| work_beside(&server, attack, &mut worst));
        let verdict = match catch_unwind(attacked) {
            Ok(()) if worst.iter().zip(BOUNDS).all(|(took, bound)| *took <= bound) => "",
            Ok(()) => "WRONG: too late",
            Err(_) => "WRONG: see above",
        };
        if !verdict.is_empty() {
            status = 1;
        }
        let [health, echo, timeout] = worst.map(|took| took.as_millis());
        println!("| {name} | {health} | {echo} | {timeout} | {verdict} |");
    }
    status
}

/// What an honest client does beside an attack. Nothing of it may fail or be lost.
fn work_beside(server: &Server, attack: Attack, worst: &mut [Duration; 3]) {
    let honest = server.sandbox();
    let text = numbered_text(100_000);
    let text = text.as_bytes();
    assert_eq!(honest.put("files/write?path=text", text).status, 200);
    let finished = honest.spawn(&json!({ "cmd": "cat text" }));
    let finished = finished["id"].as_str().unwrap();
    let route = format!("processes/{finished}/wait");
    assert_eq!(honest.get(&route).json()["exit_code"], 0);

    let attacker = server.sandbox_with(&json!({ "max_procs": 128 }));
    let held = attack(&attacker);
    let end = Instant::now() + ATTACK_SECS;
    while Instant::now() < end {
        let mut measure = |which: usize, act: &dyn Fn()| {
            let begun = Instant::now();
            act();
            worst[which] = worst[which].max(begun.elapsed());
        };
        measure(0, &|| assert_eq!(server.get("/health").status, 200));
        measure(1, &|| assert_eq!(honest.sh("echo here"), "here\n"));
        measure(2, &|| {
            let body = json!({ "cmd": "sleep 3600", "timeout": 0.5 });
            assert_eq!(honest.exec(&body).exit["reason"], "timeout");
        });
    }
    let logs = honest.get(&format!("processes/{finished}/logs"));
    let output = output_of(&fixture::events_of(&logs.body), "stdout", 0);
    expect_same("a log that was finished before", &output.data, text);
    let read = honest.get("files/read?path=text");
    expect_same("a file", &read.body, text);
    attacker.delete();
    drop(held);
    honest.delete();
}

// ---------------------------------------------------------------- the server behind a port

/// Listens at a port of loopback, or in a sandbox at the name that the proxy knows.
fn serve(name: &str) {
    if let Some(directory) = std::env::var_os("SBX_PROXY_DIR") {
        std::env::set_current_dir(directory).unwrap();
        let listener = UnixListener::bind(format!("{name}.sock")).unwrap();
        for stream in listener.incoming().map_while(Result::ok) {
            thread::spawn(move || respond(stream));
        }
    } else {
        let listener = TcpListener::bind(format!("127.0.0.1:{name}")).unwrap();
        for stream in listener.incoming().map_while(Result::ok) {
            thread::spawn(move || respond(stream));
        }
    }
}

/// Answers one request.
fn respond(mut stream: impl Read + Write + Debug) {
    let mut received = Vec::new();
    let end = loop {
        if let Some(end) = find(&received, b"\r\n\r\n") {
            break end + 4;
        }
        if !more(&mut stream, &mut received) {
            return;
        }
    };
    let head = String::from_utf8_lossy(&received[..end]).to_ascii_lowercase();
    let mut rest = received.split_off(end);
    if head.starts_with("get /upgrade") {
        let _ =
            stream.write_all(b"HTTP/1.1 101 Now\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n");
        while stream.write_all(&rest).is_ok() {
            rest.clear();
            if !more(&mut stream, &mut rest) {
                return;
            }
        }
    } else if head.starts_with("get /die") {
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf of it");
        std::process::exit(3);
    } else {
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "))
            .map_or(0, |length| length.trim().parse().unwrap());
        while rest.len() < length && more(&mut stream, &mut rest) {}
        let _ = write!(
            stream,
            "HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n"
        );
        let _ = stream.write_all(&rest);
    }
}

/// Receives once; false at the end.
fn more(stream: &mut impl Read, received: &mut Vec<u8>) -> bool {
    let mut piece = [0; 16384];
    loop {
        match stream.read(&mut piece) {
            Ok(0) => return false,
            Ok(count) => {
                received.extend_from_slice(&piece[..count]);
                return true;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return false,
        }
    }
}
