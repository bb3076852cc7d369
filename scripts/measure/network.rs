//! What a network policy costs: a command under it, a socket, a connection and bytes through the proxy. The floor is
//! the same with an open network.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;
use std::time::Instant;

use serde_json::{Value, json};

use super::client::Client;
use super::host::{Host, prefix};
use super::program::{Program, Scratch, free_port};
use super::report::{Figure, Limit, Samples, Table};
use super::{MIB, Plan};

pub fn measure(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    commands(plan, scratch, table);
    let server = Program::server(free_port());
    let mut client = server.connect();
    client.health();
    sockets(plan, &mut client, table);
    connections(plan, &mut client, table);
    redirected_connections(plan, &mut client, table);
}

/// A command in sandboxes of each policy.
fn commands(plan: &Plan, scratch: &Scratch, table: &mut Table) {
    if !super::is_root() {
        return;
    }
    let host = Host::start(scratch, "network", "20000-29999");
    let mut client = host.program.connect();
    let networks = [
        json!("open"),
        json!("blocked"),
        json!({ "mode": "allowlist", "allow": ["@pypi"] }),
    ];
    let prefixes = networks.map(|network| {
        let made = client.post("/v1/sandboxes", &json!({ "network": network }).to_string());
        let made: Value = serde_json::from_str(&made).unwrap();
        prefix(made["sandboxes"][0]["id"].as_str().unwrap())
    });
    let mut samples = [(); 3].map(|()| Samples::default());
    for round in 0..plan.samples + 10 {
        if round == 10 {
            samples = [(); 3].map(|()| Samples::default());
        }
        for (prefix, samples) in prefixes.iter().zip(&mut samples) {
            samples.time(|| client.run_true_in(prefix));
        }
    }
    let [open, blocked, filtered] = samples;
    for (name, samples) in [("blocked", blocked), ("allowlist", filtered)] {
        let row = format!("network {name}: exec of /bin/true");
        let limit = Limit::AtMost(1.05, 0.0);
        table.times(&row, &samples, &open, limit, "the same in an open sandbox");
    }
}

/// The network of a command that reaches the machine itself.
fn local() -> Value {
    json!({ "mode": "allowlist", "allow": ["localhost"] })
}

/// What a command prints.
fn run(client: &mut Client, cmd: &Value, network: &Value) -> String {
    let body = json!({ "cmd": cmd, "network": network }).to_string();
    let events = client.post("/v1/exec", &body);
    let events = events
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap());
    let data = events.filter_map(|event| event["data"].as_str().map(str::to_owned));
    data.collect()
}

/// Runs a command that prints nanoseconds, under a network and an open one. Returns microseconds of both.
fn each_in_turns(plan: &Plan, client: &mut Client, cmd: &Value, network: &Value) -> [Figure; 2] {
    let [mut ours, mut floor] = [(); 2].map(|()| Vec::new());
    for _ in 0..plan.rounds {
        for (network, times) in [(network, &mut ours), (&json!("open"), &mut floor)] {
            let nanoseconds: f64 = run(client, cmd, network).trim().parse().unwrap();
            times.push(nanoseconds / 1e3);
        }
    }
    [ours, floor].map(|times| Figure::highest(&times))
}

/// Makes sockets and closes them; prints how long each took, in nanoseconds.
pub fn make_sockets(count: u32) {
    let begun = Instant::now();
    for _ in 0..count {
        let (family, kind) = (
            nix::sys::socket::AddressFamily::Inet,
            nix::sys::socket::SockType::Stream,
        );
        let flags = nix::sys::socket::SockFlag::SOCK_CLOEXEC;
        drop(nix::sys::socket::socket(family, kind, flags, None).unwrap());
    }
    println!("{}", (begun.elapsed() / count).as_nanos());
}

/// Connects to a port of this machine, or to a Unix socket, and closes; prints how long each took, in nanoseconds.
pub fn make_connections(count: u32, target: &str) {
    let begun = Instant::now();
    for _ in 0..count {
        match target.parse::<u16>() {
            Ok(port) => drop(TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap()),
            Err(_) => drop(UnixStream::connect(target).unwrap()),
        }
    }
    println!("{}", (begun.elapsed() / count).as_nanos());
}

/// What `connect` costs where it is redirected to the gate. What is behind the gate goes on meanwhile.
fn redirected_connections(plan: &Plan, client: &mut Client, table: &mut Table) {
    let own = std::env::current_exe().unwrap();
    let path = std::env::temp_dir().join(format!("sbx-bench-{}", std::process::id()));
    let tcp = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let unix = UnixListener::bind(&path).unwrap();
    let port = tcp.local_addr().unwrap().port().to_string();
    thread::spawn(move || tcp.incoming().for_each(drop));
    thread::spawn(move || unix.incoming().for_each(drop));
    let mut transparent = local();
    transparent["transparent"] = json!(true);
    for (row, target) in [
        ("network transparent: a connection", port.as_str()),
        (
            "network transparent: one of a Unix socket",
            path.to_str().unwrap(),
        ),
    ] {
        let cmd = json!([own.to_str().unwrap(), "connections", "200", target]);
        let [ours, floor] = each_in_turns(plan, client, &cmd, &transparent);
        let row = format!("{row}, µs");
        table.row(&row, ours, Some(floor), Limit::None, "the kernel alone");
    }
    let _ = std::fs::remove_file(path);
}

fn sockets(plan: &Plan, client: &mut Client, table: &mut Table) {
    let own = std::env::current_exe().unwrap();
    let cmd = json!([own.to_str().unwrap(), "sockets", "2000"]);
    let [ours, floor] = each_in_turns(plan, client, &cmd, &local());
    let limit = Limit::AtMost(1.0, 25.0);
    table.row(
        "network allowlist: a socket, µs",
        ours,
        Some(floor),
        limit,
        "the kernel alone",
    );
}

/// Through the gate of a command that runs meanwhile, and without it.
fn connections(plan: &Plan, client: &mut Client, table: &mut Table) {
    let sleeper = json!({ "cmd": "sleep 3600", "network": local() }).to_string();
    let sleeper: Value = serde_json::from_str(&client.post("/v1/processes", &sleeper)).unwrap();
    let gate = run(client, &json!("echo $HTTP_PROXY"), &local());
    let gate: u16 = gate.trim().rsplit_once(':').unwrap().1.parse().unwrap();

    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for client in listener.incoming() {
            let mut client = client.unwrap();
            let mut byte = [0];
            if client.read_exact(&mut byte).is_ok() {
                let _ = client.write_all(&byte);
            }
        }
    });
    let echo = |mut stream: TcpStream| {
        let mut byte = [7];
        stream.write_all(&byte).unwrap();
        stream.read_exact(&mut byte).unwrap();
        assert_eq!(byte, [7]);
    };
    let direct = || TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    let [mut ours, mut floor] = [(); 2].map(|()| Samples::default());
    for _ in 0..plan.samples {
        ours.time(|| echo(tunnel(gate, port)));
        floor.time(|| echo(direct()));
    }
    let row = "network allowlist: a connection and a byte each way";
    table.times(
        row,
        &ours,
        &floor,
        Limit::AtMost(1.0, 100.0),
        "without the proxy",
    );

    let size = plan.file_bytes;
    let port = free_port();
    let inside = Program::own(&["serve", &port.to_string()], port);
    drop(inside.connect());
    let target = format!("/{size}");
    let [mut ours, mut floor] = [(); 2].map(|()| Samples::default());
    for _ in 0..plan.rounds {
        let mut through = Client::new(tunnel(gate, port));
        ours.time(|| through.download(&target, "", 0, size));
        let mut direct = inside.connect();
        floor.time(|| direct.download(&target, "", 0, size));
    }
    let row = format!("network allowlist: download of {} MiB, MB/s", size / MIB);
    let [ours, floor] = [ours, floor].map(|samples| samples.speeds(size));
    table.row(
        &row,
        ours,
        Some(floor),
        Limit::AtLeast(0.6),
        "without the proxy",
    );
    let id = sleeper["id"].as_str().unwrap();
    client.send("DELETE", &format!("/v1/processes/{id}"), 0, b"");
    client.reply();
}

/// A connection to a port of this machine by way of a gate.
fn tunnel(gate: u16, port: u16) -> TcpStream {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, gate)).unwrap();
    stream.set_nodelay(true).unwrap();
    let request = format!("CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let answer = b"HTTP/1.1 200 Connection established\r\n\r\n";
    let mut received = vec![0; answer.len()];
    stream.read_exact(&mut received).unwrap();
    assert_eq!(received, answer);
    stream
}
