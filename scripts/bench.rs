//! Measures the server against floors: what the kernel alone, or a program that does nothing but
//! the work itself, needs for the same thing on the same machine in the same run.
//!
//! Run it by `scripts/bench`. It starts the real program, takes turns between it and the floor so
//! that a noisy moment hits both, checks every byte it is given, and prints a Markdown table.
//! The floors' servers are this program again, started with a mode as its first argument.

// Sizes and counts become figures for people here.
#![allow(clippy::cast_precision_loss)]

mod sandboxes;

use std::fmt::Display;
use std::fs::{self, File};
use std::io::{BufRead, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::spawn::{PosixSpawnAttr, PosixSpawnFileActions, posix_spawn};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::wait::{WaitStatus, waitpid};

const SERVER: &str = env!("CARGO_BIN_EXE_sbx-server");
const TOKEN: &str = "bench";
const MIB: usize = 1 << 20;
/// How much is moved by one read or write of the bench's own.
const BLOCK: usize = 256 << 10;

const USAGE: &str = "\
usage: scripts/bench                  measure everything; a few minutes
       scripts/bench --quick          the same with fewer and smaller rounds; half a minute
       scripts/bench --soak [CYCLES]  make and delete so many sandboxes (10,000) in one life of a server,
                                      every 100th with commands, and fail if anything is left of them";

fn main() {
    // cargo bench says --bench to whatever it runs.
    let words: Vec<String> = std::env::args()
        .skip(1)
        .filter(|word| word != "--bench")
        .collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        [] => measure(&Plan::FULL),
        ["--quick"] => measure(&Plan::QUICK),
        ["--soak"] => sandboxes::soak(10_000),
        ["--soak", cycles] if cycles.parse().is_ok_and(|cycles: usize| cycles > 0) => {
            sandboxes::soak(cycles.parse().unwrap());
        }
        ["respond", port, reply] => respond(port.parse().unwrap(), &fs::read(reply).unwrap()),
        ["move", port] => move_files(port.parse().unwrap()),
        ["serve", port] => serve_bytes(port.parse().unwrap()),
        ["lines", count] => lines(count.parse().unwrap()),
        _ => {
            eprintln!("{USAGE}");
            std::process::exit(if words == ["--help"] { 0 } else { 2 });
        }
    }
}

/// How much is measured.
struct Plan {
    starts: usize,
    commands: usize,
    output_rounds: usize,
    output_bytes: usize,
    file_rounds: usize,
    file_bytes: usize,
    health_rounds: usize,
    health_time: Duration,
}

impl Plan {
    const FULL: Self = Self {
        starts: 200,
        commands: 2000,
        output_rounds: 7,
        output_bytes: 512 * MIB,
        file_rounds: 7,
        file_bytes: 1024 * MIB,
        health_rounds: 7,
        health_time: Duration::from_secs(2),
    };
    const QUICK: Self = Self {
        starts: 20,
        commands: 200,
        output_rounds: 3,
        output_bytes: 64 * MIB,
        file_rounds: 3,
        file_bytes: 128 * MIB,
        health_rounds: 3,
        health_time: Duration::from_millis(500),
    };
}

fn measure(plan: &Plan) {
    let scratch = Scratch::new();
    let mut table = Table::new();
    measure_start(plan, &scratch, &mut table);
    measure_commands(plan, &mut table);
    measure_output(plan, &mut table);
    measure_files(plan, &scratch, &mut table);
    measure_proxy(plan, &mut table);
    measure_health(plan, &scratch, &mut table);
    measure_memory(&scratch, &mut table);
    sandboxes::measure(plan, &scratch, &mut table);
    let size = fs::metadata(SERVER).unwrap().len();
    table.row(
        "size of the program, KiB",
        kib(size),
        "1024",
        ratio(size, MIB as u64),
        "the limit",
    );
    table.print();
}

// ---------------------------------------------------------------- the measurements

fn measure_start(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    let reply = scratch.reply_file();
    let mut ours = Samples::default();
    let mut floor = Samples::default();
    for _ in 0..plan.starts {
        ours.push(time_start(Program::server));
        floor.push(time_start(|port| Program::responder(port, &reply)));
    }
    table.times(
        "start to first /health",
        &ours,
        &floor,
        "a server that answers anything with one string",
    );
}

/// From before the program is started until it has answered.
fn time_start(program: impl FnOnce(u16) -> Program) -> Duration {
    let port = free_port();
    let start = Instant::now();
    let program = program(port);
    let mut client = program.connect();
    client.health();
    start.elapsed()
}

fn measure_commands(plan: &Plan, table: &mut Table) {
    let server = Program::server(free_port());
    let mut client = server.connect();
    // The first few find cold caches.
    for _ in 0..20 {
        client.run_true();
        spawn_true();
    }
    let mut kept = Samples::default();
    let mut fresh = Samples::default();
    let mut floor = Samples::default();
    for _ in 0..plan.commands {
        kept.time(|| client.run_true());
        fresh.time(|| server.connect().run_true());
        floor.time(spawn_true);
    }
    let what = "posix_spawn and wait of the same program";
    table.times("/bin/true over a kept connection", &kept, &floor, what);
    table.times("/bin/true, a connection each", &fresh, &floor, what);

    // The same with 256 MiB of logs in memory; of processes that go on, since others are forgotten.
    let program = std::env::current_exe().unwrap();
    let size = 4 * MIB;
    let script = r#"\"$0\" lines \"$1\"; exec sleep 3600"#;
    let body = format!(
        r#"{{"cmd":["/bin/sh","-c","{script}","{}","{size}"]}}"#,
        program.display()
    );
    for _ in 0..64 {
        client.send("POST", "/v1/processes", body.len(), body.as_bytes());
        let started = client.reply();
        let id = started.split_once(r#""id":""#).unwrap().1;
        let target = format!("/v1/processes/{}", id.split_once('"').unwrap().0);
        let whole = format!(r#""stdout_bytes":{size},"#);
        loop {
            client.send("GET", &target, 0, b"");
            let process = client.reply();
            if process.contains(&whole) {
                break;
            }
            assert!(process.contains(r#""running":true"#), "{process}");
            thread::sleep(Duration::from_millis(1));
        }
    }
    let mut grown = Samples::default();
    let mut floor = Samples::default();
    for _ in 0..plan.commands {
        grown.time(|| client.run_true());
        floor.time(spawn_true);
    }
    let memory = server.memory().resident / 1024;
    let row = format!("/bin/true, the server holding {memory} MiB");
    table.times(&row, &grown, &floor, what);
}

fn spawn_true() {
    let words = [c"/bin/true"];
    let actions = PosixSpawnFileActions::init().unwrap();
    let attributes = PosixSpawnAttr::init().unwrap();
    let pid = posix_spawn(
        words[0],
        &actions,
        &attributes,
        &words,
        &[] as &[&std::ffi::CStr],
    )
    .unwrap();
    assert_eq!(waitpid(pid, None).unwrap(), WaitStatus::Exited(pid, 0));
}

fn measure_output(plan: &Plan, table: &mut Table) {
    let server = Program::server(free_port());
    let mut client = server.connect();
    let mut ours = Samples::default();
    let mut floor = Samples::default();
    for _ in 0..plan.output_rounds {
        ours.time(|| client.run_lines(plan.output_bytes));
        floor.time(|| read_lines(plan.output_bytes));
    }
    let row = format!("output of {} MiB of lines", plan.output_bytes / MIB);
    table.speeds(
        &row,
        plan.output_bytes,
        &ours,
        &floor,
        "the same program's pipe, read directly",
    );
}

/// The floor of output: the same program, its pipe read and checked by nobody in between.
fn read_lines(count: usize) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["lines", &count.to_string()])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = child.stdout.take().unwrap();
    let mut expected = Expected::new(LINE);
    let mut block = vec![0; BLOCK];
    loop {
        match output.read(&mut block).unwrap() {
            0 => break,
            length => expected.check(&block[..length]),
        }
    }
    assert!(child.wait().unwrap().success());
    assert_eq!(expected.seen, count);
}

fn measure_files(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    let size = plan.file_bytes;
    let path = scratch.path("data");
    let mut file = File::create(&path).unwrap();
    send_pattern(&mut file, size);
    drop(file);

    let server = Program::server(free_port());
    let nginx = Program::nginx(free_port(), scratch);
    let mover = Program::mover(free_port());
    let mut client = server.connect();

    let [mut ours, mut theirs, mut floor] = [(); 3].map(|()| Samples::default());
    for _ in 0..plan.file_rounds {
        ours.time(|| client.download(&format!("/v1/files/read?path={}", path.display()), size));
        if let Some(nginx) = &nginx {
            theirs.time(|| nginx.connect().download("/data", size));
        }
        floor.time(|| mover.connect().pull(&path, size));
    }
    let row = format!("read a file of {} MiB", size / MIB);
    table.speeds(&row, size, &ours, &theirs, "nginx, sendfile");
    table.speeds(&row, size, &ours, &floor, "a loop of read and write");

    let copy = scratch.path("copy");
    let [mut ours, mut theirs, mut floor] = [(); 3].map(|()| Samples::default());
    for _ in 0..plan.file_rounds {
        ours.time(|| client.upload(&format!("/v1/files/write?path={}", copy.display()), size));
        check_and_remove(&copy, size);
        if let Some(nginx) = &nginx {
            theirs.time(|| nginx.connect().upload("/copy", size));
            check_and_remove(&copy, size);
        }
        floor.time(|| mover.connect().push(&copy, size));
        check_and_remove(&copy, size);
    }
    let row = format!("write a file of {} MiB", size / MIB);
    table.speeds(&row, size, &ours, &theirs, "nginx, PUT");
    table.speeds(&row, size, &ours, &floor, "a loop of read and write");
}

/// A server inside, through the port proxy and directly. What is between the two is one more process
/// through which every byte goes: half the speed is what copying alone would leave on two processors.
fn measure_proxy(plan: &Plan, table: &mut Table) {
    let size = plan.file_bytes;
    let server = Program::server(free_port());
    let inside = Program::bytes(free_port());
    let target = format!("/{size}");
    let proxied = format!("/v1/proxy/{}{target}", inside.port);
    drop(inside.connect());
    let mut client = server.connect();
    let [mut down, mut up, mut direct_down, mut direct_up] = [(); 4].map(|()| Samples::default());
    for _ in 0..plan.file_rounds {
        down.time(|| client.download(&proxied, size));
        direct_down.time(|| inside.connect().download(&target, size));
        up.time(|| client.upload(&proxied, size));
        direct_up.time(|| inside.connect().upload(&target, size));
    }
    let row = format!("through the port proxy, download of {} MiB", size / MIB);
    table.speeds(&row, size, &down, &direct_down, "without it");
    let row = format!("through the port proxy, upload of {} MiB", size / MIB);
    table.speeds(&row, size, &up, &direct_up, "without it");
}

fn check_and_remove(path: &Path, size: usize) {
    let mut file = File::open(path).unwrap();
    let mut expected = Expected::pattern();
    let mut block = vec![0; BLOCK];
    loop {
        match file.read(&mut block).unwrap() {
            0 => break,
            length => expected.check(&block[..length]),
        }
    }
    assert_eq!(expected.seen, size);
    fs::remove_file(path).unwrap();
}

const LOAD_CONNECTIONS: usize = 32;

fn measure_health(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    let server = Program::server(free_port());
    let responder = Program::responder(free_port(), &scratch.reply_file());
    let [mut rate, mut floor_rate] = [(); 2].map(|()| Vec::new());
    let [mut times, mut floor_times] = [(); 2].map(|()| Samples::default());
    for _ in 0..plan.health_rounds {
        rate.push(load(&server, plan.health_time, &mut times));
        floor_rate.push(load(&responder, plan.health_time, &mut floor_times));
    }
    let note = "a thread a connection that does not parse";
    let [ours, floor] = [rate, floor_rate].map(|mut rates| {
        rates.sort_unstable();
        rates[rates.len() / 2]
    });
    let row = format!("/health a second, {LOAD_CONNECTIONS} connections");
    table.row(&row, ours, floor, ratio(ours, floor), note);
    table.times(
        &format!("one of these, {LOAD_CONNECTIONS} at a time"),
        &times,
        &floor_times,
        note,
    );
}

/// Keeps one request under way on each of many connections. Returns the requests a second.
fn load(program: &Program, time: Duration, samples: &mut Samples) -> u64 {
    let epoll = Epoll::new(EpollCreateFlags::empty()).unwrap();
    let mut clients: Vec<_> = (0..LOAD_CONNECTIONS)
        .map(|number| {
            let client = program.connect();
            let event = EpollEvent::new(EpollFlags::EPOLLIN, number as u64);
            epoll.add(client.stream.as_fd(), event).unwrap();
            (client, Instant::now())
        })
        .collect();
    for (client, sent) in &mut clients {
        client.send("GET", "/health", 0, b"");
        *sent = Instant::now();
    }
    let start = Instant::now();
    let mut count = 0_u128;
    let mut events = [EpollEvent::empty(); LOAD_CONNECTIONS];
    while start.elapsed() < time {
        let ready = epoll.wait(&mut events, EpollTimeout::NONE).unwrap();
        for event in &events[..ready] {
            let (client, sent) = &mut clients[usize::try_from(event.data()).unwrap()];
            let reply = client.reply();
            assert!(reply.contains(r#""status":"ok""#), "{reply}");
            samples.push(sent.elapsed());
            *sent = Instant::now();
            client.send("GET", "/health", 0, b"");
            count += 1;
        }
    }
    u64::try_from(count * 1_000_000 / start.elapsed().as_micros()).unwrap()
}

const IDLE_CONNECTIONS: u64 = 200;

fn measure_memory(scratch: &Scratch, table: &mut Table) {
    let note = "the same with a thread a connection that does not parse";
    let reply = scratch.reply_file();
    let programs = [
        Program::server(free_port()),
        Program::responder(free_port(), &reply),
    ];
    let idle = programs.each_ref().map(|program| {
        program.connect().health();
        program.memory()
    });
    let crowded = programs.each_ref().map(|program| {
        let mut clients: Vec<_> = (0..IDLE_CONNECTIONS).map(|_| program.connect()).collect();
        clients.iter_mut().for_each(Client::health);
        program.memory()
    });
    let mut row = |what: &str, [ours, floor]: [Memory; 2]| {
        let cell = |memory: Memory| format!("{} ({})", memory.resident, memory.proportional);
        table.row(
            what,
            cell(ours),
            cell(floor),
            ratio(ours.resident, floor.resident),
            note,
        );
    };
    row("memory when idle, KiB resident (proportional)", idle);
    row(
        &format!("memory with {IDLE_CONNECTIONS} idle connections, KiB"),
        crowded,
    );
    let each = |side: usize| {
        let more = crowded[side].resident.saturating_sub(idle[side].resident);
        more as f64 / IDLE_CONNECTIONS as f64
    };
    let [ours, floor] = [each(0), each(1)];
    let quotient = format!("{:.2}", ours / floor);
    table.row(
        "memory of one idle connection, KiB",
        format!("{ours:.1}"),
        format!("{floor:.1}"),
        quotient,
        note,
    );
}

// ---------------------------------------------------------------- the floors' own servers

/// Answers whatever arrives with the same bytes, a thread a connection.
fn respond(port: u16, reply: &[u8]) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    thread::scope(|scope| {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            stream.set_nodelay(true).unwrap();
            let serve = move || {
                let mut block = [0; 1024];
                while stream.read(&mut block).is_ok_and(|length| length > 0) {
                    if stream.write_all(reply).is_err() {
                        break;
                    }
                }
            };
            thread::Builder::new()
                .stack_size(64 << 10)
                .spawn_scoped(scope, serve)
                .unwrap();
        }
    });
}

/// Moves files between the file system and connections. A request is a line: `pull <path>` is
/// answered with the file, `push <size> <path>` is followed by it and answered with a line.
fn move_files(port: u16) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    let mut block = vec![0; BLOCK];
    for stream in listener.incoming() {
        let mut stream = stream.unwrap();
        let mut line = Vec::new();
        let mut byte = [0];
        while stream.read(&mut byte).is_ok_and(|length| length == 1) && byte != *b"\n" {
            line.push(byte[0]);
        }
        let line = String::from_utf8(line).unwrap();
        if let Some(path) = line.strip_prefix("pull ") {
            let mut file = File::open(path).unwrap();
            copy_to_end(&mut file, &mut stream, &mut block, usize::MAX);
        } else if let Some((size, path)) = line
            .strip_prefix("push ")
            .and_then(|rest| rest.split_once(' '))
        {
            let mut file = File::create(path).unwrap();
            copy_to_end(&mut stream, &mut file, &mut block, size.parse().unwrap());
            stream.write_all(b"done\n").unwrap();
        }
    }
}

/// A server for the port proxy: `GET /<size>` is answered with so many bytes, and a body is read to its
/// end.
fn serve_bytes(port: u16) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap();
    let mut block = vec![0; BLOCK];
    for stream in listener.incoming() {
        let mut stream = stream.unwrap();
        stream.set_nodelay(true).unwrap();
        let (mut head, mut end) = (Vec::new(), None);
        while end.is_none() {
            let length = stream.read(&mut block).unwrap_or(0);
            if length == 0 {
                break;
            }
            head.extend_from_slice(&block[..length]);
            end = find(&head, b"\r\n\r\n");
        }
        let Some(end) = end else { continue };
        let text = String::from_utf8(head[..end].to_vec()).unwrap();
        let words: Vec<&str> = text.split_whitespace().collect();
        let size: usize = words[1][1..].parse().unwrap();
        if words[0] == "GET" {
            let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n");
            stream.write_all(head.as_bytes()).unwrap();
            send_pattern(&mut stream, size);
        } else {
            let left = size - (head.len() - end - 4);
            copy_to_end(&mut stream, &mut std::io::sink(), &mut block, left);
            let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
            stream.write_all(answer).unwrap();
        }
    }
}

fn copy_to_end(from: &mut impl Read, to: &mut impl Write, block: &mut [u8], mut left: usize) {
    while left > 0 {
        let most = left.min(block.len());
        match from.read(&mut block[..most]).unwrap() {
            0 => break,
            length => {
                to.write_all(&block[..length]).unwrap();
                left -= length;
            }
        }
    }
}

/// What the lines of the output row look like; as JSON each is one byte longer.
const LINE: &[u8] = b"the quick brown fox jumps over the lazy dog, again and again, 0\n";
const LINE_IN_JSON: &[u8] = br"the quick brown fox jumps over the lazy dog, again and again, 0\n";

/// Prints that many bytes of lines in large writes.
fn lines(count: usize) {
    let block = LINE.repeat((64 << 10) / LINE.len());
    let mut output = File::from(std::io::stdout().as_fd().try_clone_to_owned().unwrap());
    let mut left = count;
    while left > 0 {
        let length = left.min(block.len());
        output.write_all(&block[..length]).unwrap();
        left -= length;
    }
}

// ---------------------------------------------------------------- programs and connections

/// A running server of whatever kind, killed with the value.
struct Program {
    child: Child,
    port: u16,
}

impl Program {
    fn server(port: u16) -> Self {
        Self::start(port, &mut Self::server_command(port))
    }

    fn server_command(port: u16) -> Command {
        let mut command = Command::new(SERVER);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("SBX_") {
                command.env_remove(name);
            }
        }
        command
            .env("SBX_PORT", port.to_string())
            .env("SBX_TOKEN", TOKEN)
            .env("SBX_BIND", "127.0.0.1");
        command
    }

    fn responder(port: u16, reply: &Path) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        Self::start(
            port,
            command.arg("respond").arg(port.to_string()).arg(reply),
        )
    }

    fn mover(port: u16) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        Self::start(port, command.args(["move", &port.to_string()]))
    }

    fn bytes(port: u16) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        Self::start(port, command.args(["serve", &port.to_string()]))
    }

    /// Nothing where nginx is not installed.
    fn nginx(port: u16, scratch: &Scratch) -> Option<Self> {
        let path = ["/usr/sbin/nginx", "/usr/bin/nginx", "/usr/local/sbin/nginx"];
        let path = path.into_iter().find(|path| Path::new(path).exists())?;
        let directory = scratch.0.display();
        let user = if nix::unistd::geteuid().is_root() {
            "user root;"
        } else {
            ""
        };
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|kind| format!("{kind}_temp_path {directory}/{kind};"))
            .concat();
        let configuration = format!(
            "{user} daemon off; worker_processes 2; pid {directory}/nginx.pid; error_log stderr crit;
            events {{ worker_connections 256; }}
            http {{
                access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000;
                client_max_body_size 0; {temporary}
                server {{
                    listen 127.0.0.1:{port}; root {directory};
                    location = /health {{ return 200 '{{\"status\":\"ok\"}}'; }}
                    location / {{ dav_methods PUT; }}
                }}
            }}"
        );
        let file = scratch.path("nginx.conf");
        fs::write(&file, configuration).unwrap();
        Some(Self::start(port, Command::new(path).arg("-c").arg(file)))
    }

    fn start(port: u16, command: &mut Command) -> Self {
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
    fn connect(&self) -> Client {
        let limit = Instant::now() + Duration::from_secs(20);
        loop {
            match TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)) {
                Ok(stream) => return Client::new(stream),
                Err(error) => assert!(Instant::now() < limit, "nothing listens: {error}"),
            }
            thread::sleep(Duration::from_micros(50));
        }
    }

    fn memory(&self) -> Memory {
        let read = |file| fs::read_to_string(format!("/proc/{}/{file}", self.child.id()));
        Memory {
            resident: field(&read("status").unwrap(), "VmRSS:"),
            // Not for everybody to read.
            proportional: field(&read("smaps_rollup").unwrap_or_default(), "Pss:"),
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

/// In KiB.
#[derive(Clone, Copy)]
struct Memory {
    resident: u64,
    proportional: u64,
}

/// The number after `name` in a file of /proc; 0 where it is not there.
fn field(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.map_or(0, |line| {
        line.trim().trim_end_matches(" kB").parse().unwrap()
    })
}

fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

/// One connection, and what it has received and not yet used.
struct Client {
    stream: TcpStream,
    buffer: Vec<u8>,
    used: usize,
    filled: usize,
}

/// How a reply's body is framed.
enum Framing {
    Length(usize),
    Chunked,
}

impl Client {
    fn new(stream: TcpStream) -> Self {
        stream.set_nodelay(true).unwrap();
        Self {
            stream,
            buffer: Vec::new(),
            used: 0,
            filled: 0,
        }
    }

    /// Sends a request that announces `length` bytes of body and begins with `body`.
    fn send(&mut self, method: &str, target: &str, length: usize, body: &[u8]) {
        let mut request = format!(
            "{method} {target} HTTP/1.1\r\nHost: sandbox\r\nX-Sandbox-Token: {TOKEN}\r\nContent-Length: {length}\r\n\r\n"
        )
        .into_bytes();
        request.extend_from_slice(body);
        self.stream.write_all(&request).unwrap();
    }

    /// Received and not yet used.
    fn rest(&self) -> &[u8] {
        &self.buffer[self.used..self.filled]
    }

    /// Receives once.
    fn fill(&mut self) {
        if self.used == self.filled {
            self.used = 0;
            self.filled = 0;
        } else if self.buffer.len() - self.filled < BLOCK / 2 {
            self.buffer.copy_within(self.used..self.filled, 0);
            self.filled -= self.used;
            self.used = 0;
        }
        if self.buffer.len() - self.filled < BLOCK / 2 {
            self.buffer.resize(self.filled + BLOCK, 0);
        }
        let length = self.stream.read(&mut self.buffer[self.filled..]).unwrap();
        assert!(length > 0, "the connection ended too soon");
        self.filled += length;
    }

    /// Reads the head of a reply that must be a success.
    fn head(&mut self) -> Framing {
        let end = loop {
            if let Some(end) = find(self.rest(), b"\r\n\r\n") {
                break end + 4;
            }
            self.fill();
        };
        let head = String::from_utf8_lossy(&self.rest()[..end]).to_ascii_lowercase();
        self.used += end;
        assert!(head.starts_with("http/1.1 2"), "{head}");
        match head.split_once("content-length: ") {
            Some((_, rest)) => Framing::Length(rest.split_once('\r').unwrap().0.parse().unwrap()),
            None if head.starts_with("http/1.1 204") => Framing::Length(0),
            None => {
                assert!(head.contains("transfer-encoding: chunked"), "{head}");
                Framing::Chunked
            }
        }
    }

    /// Hands `length` bytes to `take`, in pieces.
    fn take(&mut self, length: usize, mut take: impl FnMut(&[u8])) {
        let mut left = length;
        while left > 0 {
            if self.rest().is_empty() {
                self.fill();
            }
            let piece = self.rest().len().min(left);
            take(&self.rest()[..piece]);
            self.used += piece;
            left -= piece;
        }
    }

    /// The whole body, in pieces.
    fn body(&mut self, mut take: impl FnMut(&[u8])) {
        match self.head() {
            Framing::Length(length) => self.take(length, take),
            Framing::Chunked => loop {
                let line = loop {
                    if let Some(end) = find(self.rest(), b"\r\n") {
                        break end;
                    }
                    self.fill();
                };
                let size = std::str::from_utf8(&self.rest()[..line]).unwrap();
                let size = usize::from_str_radix(size, 16).unwrap();
                self.used += line + 2;
                self.take(size, &mut take);
                self.take(2, |_| ());
                if size == 0 {
                    return;
                }
            },
        }
    }

    /// A short reply's body.
    fn reply(&mut self) -> String {
        let mut body = Vec::new();
        self.body(|piece| body.extend_from_slice(piece));
        String::from_utf8(body).unwrap()
    }

    fn health(&mut self) {
        self.send("GET", "/health", 0, b"");
        let reply = self.reply();
        assert!(reply.contains(r#""status":"ok""#), "{reply}");
    }

    fn run_true(&mut self) {
        let body = br#"{"cmd":["/bin/true"]}"#;
        self.send("POST", "/v1/exec", body.len(), body);
        let events = self.reply();
        assert!(events.contains(r#""exit_code":0"#), "{events}");
    }

    /// Runs the program of lines and checks that all of them came, as they were printed.
    fn run_lines(&mut self, count: usize) {
        let program = std::env::current_exe().unwrap();
        let body = format!(r#"{{"cmd":["{}","lines","{count}"]}}"#, program.display());
        self.send("POST", "/v1/exec", body.len(), body.as_bytes());
        let mut expected = Expected::new(LINE_IN_JSON);
        let mut exit = None;
        let mut event = |line: &[u8]| {
            if let Some(start) = find(line, br#""data":""#) {
                let data = line[start + 8..].strip_suffix(b"\"}\n");
                expected.check(data.expect("data comes last in an event"));
            } else {
                exit = Some(String::from_utf8_lossy(line).into_owned());
            }
        };
        let mut line = Vec::new();
        self.body(|mut piece| {
            while !piece.is_empty() {
                piece.read_until(b'\n', &mut line).unwrap();
                if line.ends_with(b"\n") {
                    event(&line);
                    line.clear();
                }
            }
        });
        let exit = exit.unwrap();
        assert!(exit.contains(r#""exit_code":0"#), "{exit}");
        assert_eq!(expected.seen, count / LINE.len() * LINE_IN_JSON.len());
    }

    fn download(&mut self, target: &str, size: usize) {
        self.send("GET", target, 0, b"");
        let mut expected = Expected::pattern();
        self.body(|piece| expected.check(piece));
        assert_eq!(expected.seen, size);
    }

    fn upload(&mut self, target: &str, size: usize) {
        self.send("PUT", target, size, b"");
        send_pattern(&mut self.stream, size);
        self.body(|_| ());
    }

    fn pull(&mut self, path: &Path, size: usize) {
        self.stream
            .write_all(format!("pull {}\n", path.display()).as_bytes())
            .unwrap();
        let mut expected = Expected::pattern();
        self.take(size, |piece| expected.check(piece));
    }

    fn push(&mut self, path: &Path, size: usize) {
        self.stream
            .write_all(format!("push {size} {}\n", path.display()).as_bytes())
            .unwrap();
        send_pattern(&mut self.stream, size);
        self.take(5, |_| ());
    }
}

/// Position of `needle`, which is near the start if it is there at all.
fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack
        .windows(needle.len())
        .position(|window| window == needle)
}

// ---------------------------------------------------------------- what bytes must be

/// A stream that must repeat one unit, however it is cut into pieces.
struct Expected {
    /// The unit over and over, longer than a piece and a unit.
    repeated: Vec<u8>,
    unit: usize,
    seen: usize,
}

impl Expected {
    fn new(unit: &[u8]) -> Self {
        let repeated = unit.repeat((BLOCK + BLOCK / 2) / unit.len() + 2);
        Self {
            repeated,
            unit: unit.len(),
            seen: 0,
        }
    }

    /// What the files hold.
    fn pattern() -> Self {
        Self::new(&pattern())
    }

    #[track_caller]
    fn check(&mut self, mut piece: &[u8]) {
        while !piece.is_empty() {
            let phase = self.seen % self.unit;
            let length = piece.len().min(self.repeated.len() - phase);
            let wanted = &self.repeated[phase..phase + length];
            assert!(
                same(&piece[..length], wanted),
                "wrong bytes after {}",
                self.seen
            );
            self.seen += length;
            piece = &piece[length..];
        }
    }
}

/// Whether two slices of one length are equal. The C library's own comparison goes byte by byte and
/// would be what is measured; this loop the compiler turns into vectors.
fn same(a: &[u8], b: &[u8]) -> bool {
    a.iter()
        .zip(b)
        .fold(0, |difference, (a, b)| difference | (a ^ b))
        == 0
}

/// Bytes without structure; their number is prime, so no block begins like another.
fn pattern() -> Vec<u8> {
    let mut state = 1_u32;
    let step = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    };
    (0..65_521).map(step).collect()
}

fn send_pattern(to: &mut impl Write, size: usize) {
    let unit = pattern();
    let block = unit.repeat(BLOCK / unit.len());
    let mut left = size;
    while left > 0 {
        let length = left.min(block.len());
        to.write_all(&block[..length]).unwrap();
        left -= length;
    }
}

// ---------------------------------------------------------------- scratch, samples, the table

/// A directory in memory, removed with the value.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        let memory = Path::new("/dev/shm");
        let parent = if memory.is_dir() {
            memory.to_owned()
        } else {
            std::env::temp_dir()
        };
        let path = parent.join(format!("sbx-bench-{}", std::process::id()));
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// A reply of the server's to /health, for the floor to send.
    fn reply_file(&self) -> PathBuf {
        let path = self.path("reply");
        if !path.exists() {
            let server = Program::server(free_port());
            let mut client = server.connect();
            client.send("GET", "/health", 0, b"");
            client.fill();
            fs::write(&path, client.rest()).unwrap();
        }
        path
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[derive(Default)]
struct Samples(Vec<Duration>);

impl Samples {
    fn push(&mut self, sample: Duration) {
        self.0.push(sample);
    }

    fn time(&mut self, action: impl FnOnce()) {
        let start = Instant::now();
        action();
        self.push(start.elapsed());
    }

    /// The smallest sample that so many percent do not exceed; `None` without samples.
    fn percentile(&self, percent: usize) -> Option<Duration> {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let rank = (sorted.len() * percent).div_ceil(100);
        sorted.get(rank.saturating_sub(1)).copied()
    }
}

struct Table(Vec<[String; 5]>);

impl Table {
    fn new() -> Self {
        Self(Vec::new())
    }

    fn row(
        &mut self,
        what: &str,
        ours: impl Display,
        floor: impl Display,
        ratio: impl Display,
        note: &str,
    ) {
        let row = [
            what.to_owned(),
            ours.to_string(),
            floor.to_string(),
            ratio.to_string(),
            note.to_owned(),
        ];
        eprintln!("{}", row.join(" | "));
        self.0.push(row);
    }

    /// A row of times: medians, and in brackets the 99th percentile.
    fn times(&mut self, what: &str, ours: &Samples, floor: &Samples, note: &str) {
        let cell = |samples: &Samples| {
            let [median, high] =
                [50, 99].map(|percent| micros(samples.percentile(percent).unwrap()));
            format!("{median:.0} ({high:.0})")
        };
        let [a, b] = [ours, floor].map(|samples| micros(samples.percentile(50).unwrap()));
        self.row(
            &format!("{what}, µs"),
            cell(ours),
            cell(floor),
            format!("{:.2}", a / b),
            note,
        );
    }

    /// A row of speeds: medians, and in brackets that of the slowest round.
    fn speeds(&mut self, what: &str, size: usize, ours: &Samples, floor: &Samples, note: &str) {
        let speed = |samples: &Samples, percent| {
            Some(size as f64 / samples.percentile(percent)?.as_secs_f64() / 1e6)
        };
        let cell = |samples: &Samples| match (speed(samples, 50), speed(samples, 100)) {
            (Some(median), Some(low)) => format!("{median:.0} ({low:.0})"),
            _ => "not installed".to_owned(),
        };
        let quotient = match (speed(ours, 50), speed(floor, 50)) {
            (Some(ours), Some(floor)) => format!("{:.2}", ours / floor),
            _ => String::new(),
        };
        self.row(
            &format!("{what}, MB/s"),
            cell(ours),
            cell(floor),
            quotient,
            note,
        );
    }

    fn print(&self) {
        let line = |command: &str, words: &[&str]| {
            let output = Command::new(command).args(words).output().unwrap();
            String::from_utf8(output.stdout).unwrap().trim().to_owned()
        };
        let processor = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let processor = processor
            .lines()
            .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
            .map_or("unknown processor", |(_, name)| name);
        let cores = thread::available_parallelism().unwrap();
        println!(
            "{} on {} ({cores} cores, {}), Linux {}\n",
            line(SERVER, &["--version"]),
            processor,
            line("uname", &["-m"]),
            line("uname", &["-r"]),
        );
        println!(
            "Measured on {} by `scripts/bench`.",
            line("date", &["-u", "+%F"])
        );
        println!(
            "Times: median (99th percentile). Speeds: median (slowest round). Ratio: server / floor.\n"
        );
        println!("| what | sbx-server | floor | ratio | the floor is |");
        println!("|---|---:|---:|---:|---|");
        for row in &self.0 {
            println!("| {} |", row.join(" | "));
        }
    }
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

fn kib(bytes: u64) -> u64 {
    bytes.div_ceil(1024)
}

fn ratio(ours: u64, floor: u64) -> String {
    format!("{:.2}", ours as f64 / floor as f64)
}
