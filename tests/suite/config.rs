//! Configuration: total, validated once, never a silent default.
//!
//! Every variable of the table is given values that it cannot have: the server must end with status
//! 2 and a sentence that names the variable and the value. What the command line offers is here too,
//! and who may listen where.

use std::ffi::{OsStr, OsString};
use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener};
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::fixture::{BINARY, PATIENCE, Server, TOKEN};

/// The variables of the table, with their defaults as `--help` shows them.
const VARIABLES: &[(&str, &str)] = &[
    ("SBX_PORT", "49983"),
    ("SBX_BIND", "127.0.0.1"),
    ("SBX_TOKEN", ""),
    ("SBX_IDLE_TIMEOUT", ""),
    ("SBX_HOST_MODE", "0"),
    ("SBX_CAPACITY", "unlimited"),
    ("SBX_HOMES_DIR", "/sbx/homes"),
    ("SBX_UID_RANGE", "20000-64999"),
    ("SBX_MIN_LANDLOCK_ABI", "6"),
    ("SBX_ALLOW_UNCONFINED", "0"),
    ("SBX_LOG_BYTES", "4194304"),
    ("SBX_LOG_TOTAL_BYTES", "268435456"),
    ("SBX_PING_SECS", "15"),
    ("SBX_MAX_CONNECTIONS", "4096"),
];

struct Finished {
    status: ExitStatus,
    stdout: String,
    stderr: String,
}

/// Reads a pipe to its end in the background.
fn collect(mut from: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Runs the program to its end; one that goes on is killed and fails the test.
#[track_caller]
fn run(command: &mut Command) -> Finished {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let stdout = collect(child.stdout.take().unwrap());
    let stderr = collect(child.stderr.take().unwrap());
    let deadline = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break Some(status);
        }
        if Instant::now() > deadline {
            break None;
        }
        thread::sleep(Duration::from_millis(5));
    };
    if status.is_none() {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let (stdout, stderr) = (stdout.join().unwrap(), stderr.join().unwrap());
    let Some(status) = status else {
        panic!("still running: {command:?}\n{stdout}\n{stderr}");
    };
    Finished {
        status,
        stdout,
        stderr,
    }
}

/// The program without arguments, with nothing set but what the test sets.
fn bare() -> Command {
    let mut command = Server::builder().no_token().command();
    command.env_remove("SBX_PORT").env_remove("SBX_BIND");
    command
}

/// A command that would start a server, for one more variable to spoil.
fn startable() -> Command {
    Server::builder().command()
}

#[track_caller]
fn expect_refusal(name: &str, value: &OsStr) {
    let finished = run(startable().env(name, value));
    let shown = format!("{name}={}: {}", value.display(), finished.stderr);
    assert_eq!(finished.status.code(), Some(2), "{shown}");
    assert_eq!(finished.stdout, "", "{shown}");
    let line = finished
        .stderr
        .lines()
        .find(|line| line.contains(name))
        .unwrap_or_else(|| panic!("the variable is named: {shown}"));
    if let Some(text) = value.to_str() {
        let escaped = text.escape_debug().to_string();
        assert!(
            line.contains(text) || line.contains(&escaped),
            "the value is named: {shown}"
        );
    }
    // Variable and value alone would not say what to do.
    assert!(
        line.len() > name.len() + value.len() + 15,
        "what is accepted is said: {shown}"
    );
    assert!(!finished.stderr.contains("panicked"), "{shown}");
    assert!(!finished.stderr.contains("listening"), "{shown}");
    assert!(
        !finished.stderr.contains(TOKEN),
        "no secret in the message: {shown}"
    );
}

#[test]
fn every_bad_value_is_named_and_ends_the_start_with_status_2() {
    // What no number is.
    let no_number = [
        "", " ", "abc", "-1", "1 2", "10s", "0x10", "1e3", "1,000", "\u{663}", "5\n",
    ];
    let too_large = "99999999999999999999999999";
    for name in [
        "SBX_PORT",
        "SBX_IDLE_TIMEOUT",
        "SBX_CAPACITY",
        "SBX_MIN_LANDLOCK_ABI",
        "SBX_LOG_BYTES",
        "SBX_LOG_TOTAL_BYTES",
        "SBX_PING_SECS",
        "SBX_MAX_CONNECTIONS",
    ] {
        for value in no_number.iter().chain(&[too_large]) {
            expect_refusal(name, OsStr::new(value));
        }
    }
    for value in ["65536", "70000", "49983 ", "127.0.0.1:80", "http"] {
        expect_refusal("SBX_PORT", OsStr::new(value));
    }
    for value in ["4MiB", "4194304.5"] {
        expect_refusal("SBX_LOG_BYTES", OsStr::new(value));
    }
    for name in [
        "SBX_HOST_MODE",
        "SBX_ALLOW_UNCONFINED",
        "SBX_INSECURE",
        "SBX_STRICT_SCOPES",
    ] {
        for value in ["", " ", "2", "-1", "maybe", "11", "0 "] {
            expect_refusal(name, OsStr::new(value));
        }
    }
    for value in [
        "",
        "nonsense",
        "999.1.1.1",
        "127.0.0.1:80",
        "127.0.0",
        "*",
        "127.0.0.1 ",
        ":::",
    ] {
        expect_refusal("SBX_BIND", OsStr::new(value));
    }
    for value in [
        "",
        "abc",
        "20000",
        "5-",
        "-5",
        "30000-20000",
        "1-2-3",
        "a-b",
        "20000-99999999999",
        "20000:30000",
    ] {
        expect_refusal("SBX_UID_RANGE", OsStr::new(value));
    }
    expect_refusal("SBX_HOMES_DIR", OsStr::new(""));
    for value in ["", "nonsense"] {
        expect_refusal("SBX_LOG", OsStr::new(value));
    }
}

#[test]
fn a_value_that_is_not_utf_8_is_a_bad_value_and_no_panic() {
    for (name, _) in VARIABLES {
        if matches!(*name, "SBX_TOKEN" | "SBX_HOMES_DIR") {
            continue;
        }
        expect_refusal(name, OsStr::from_bytes(b"\xff\xfe"));
    }
}

#[test]
fn an_empty_token_is_an_error_and_not_no_token() {
    let finished = run(startable().env("SBX_TOKEN", ""));
    assert_eq!(finished.status.code(), Some(2), "{}", finished.stderr);
    assert!(finished.stderr.contains("SBX_TOKEN"), "{}", finished.stderr);
    // Also where no token at all would do.
    let finished = run(bare()
        .env("SBX_PORT", "0")
        .env("SBX_TOKEN", "")
        .env("SBX_INSECURE", "1"));
    assert_eq!(finished.status.code(), Some(2), "{}", finished.stderr);
}

#[test]
fn a_token_that_no_header_can_carry_is_refused_and_not_shown() {
    // A server that started with it could never be used.
    for token in [
        &b"hidden-a\nb"[..],
        b"hidden-a\rb",
        b"hidden-a ",
        b" hidden-a",
        b"hidden-\x01",
    ] {
        let finished = run(startable().env("SBX_TOKEN", OsStr::from_bytes(token)));
        assert_eq!(
            finished.status.code(),
            Some(2),
            "{token:?}: {}",
            finished.stderr
        );
        assert!(finished.stderr.contains("SBX_TOKEN"), "{}", finished.stderr);
        assert!(!finished.stderr.contains("hidden"), "{}", finished.stderr);
    }
}

#[test]
fn variables_of_others_and_lawful_values_are_accepted() {
    let server = Server::builder()
        .env("SBX_MAX_HOSTS", 5)
        .env("SBX_WHATEVER", "x y z")
        .env("SBX_IDLE_TIMEOUT", 600)
        .env("SBX_HOST_MODE", 0)
        .env("SBX_CAPACITY", 50)
        .env("SBX_HOMES_DIR", "/tmp/homes")
        .env("SBX_UID_RANGE", "30000-40000")
        .env("SBX_MIN_LANDLOCK_ABI", 1)
        .env("SBX_ALLOW_UNCONFINED", 1)
        .env("SBX_INSECURE", 0)
        .env("SBX_LOG_BYTES", 65536)
        .env("SBX_LOG_TOTAL_BYTES", 1_048_576)
        .env("SBX_PING_SECS", 1)
        .env("SBX_MAX_CONNECTIONS", 10)
        .env("SBX_LOG", "debug")
        .start();
    assert_eq!(server.get("/health").status, 200);
}

#[test]
fn the_ping_interval_is_honoured() {
    let server = Server::builder().env("SBX_PING_SECS", 1).start();
    let mut stream = server.exec_stream(&json!({"cmd": "sleep 30"}));
    let started = Instant::now();
    assert_eq!(stream.next().unwrap()["event"], "start");
    assert_eq!(stream.next().unwrap()["event"], "ping");
    assert_eq!(stream.next().unwrap()["event"], "ping");
    let took = started.elapsed();
    assert!(
        took > Duration::from_millis(1500) && took < Duration::from_secs(8),
        "{took:?}"
    );
}

// ---------------------------------------------------------------------------------------------
// The command line.

#[test]
fn help_shows_every_variable_with_its_default() {
    let finished = run(bare().arg("--help"));
    assert_eq!(finished.status.code(), Some(0), "{}", finished.stderr);
    for (name, default) in VARIABLES {
        let at = finished
            .stdout
            .find(name)
            .unwrap_or_else(|| panic!("no {name}: {}", finished.stdout));
        // The default stands before the next variable begins.
        let rest = &finished.stdout[at + name.len()..];
        let entry = &rest[..rest.find("SBX_").unwrap_or(rest.len())];
        let whole_line = rest.lines().next().unwrap_or_default();
        assert!(
            entry.contains(default) || whole_line.contains(default),
            "{name} without its default {default}: {entry}"
        );
    }
    for word in ["health", "--version", "SBX_INSECURE"] {
        assert!(
            finished.stdout.contains(word),
            "no {word}: {}",
            finished.stdout
        );
    }
    assert_eq!(finished.stderr, "");
    // Help is what one needs when the configuration is wrong.
    let finished = run(bare()
        .arg("--help")
        .env("SBX_PORT", "abc")
        .env("SBX_TOKEN", ""));
    assert_eq!(finished.status.code(), Some(0), "{}", finished.stderr);
    assert!(finished.stdout.contains("SBX_PORT"));
}

#[test]
fn version_is_the_version_of_the_package() {
    let finished = run(bare().arg("--version").env("SBX_PORT", "abc"));
    assert_eq!(finished.status.code(), Some(0), "{}", finished.stderr);
    assert_eq!(
        finished.stdout.trim(),
        format!("sbx-server {}", env!("CARGO_PKG_VERSION"))
    );
    assert_eq!(finished.stderr, "");
}

#[test]
fn an_unknown_argument_is_refused_with_a_hint() {
    for arguments in [
        &["--halp"][..],
        &["serve"],
        &[""],
        &["-x"],
        &["health", "--loud"],
        &["--version=1"],
    ] {
        let finished = run(bare().env("SBX_PORT", "0").args(arguments));
        assert_eq!(
            finished.status.code(),
            Some(2),
            "{arguments:?}: {}",
            finished.stderr
        );
        assert!(
            finished.stderr.contains("--help"),
            "{arguments:?}: {}",
            finished.stderr
        );
        assert_eq!(finished.stdout, "", "{arguments:?}");
    }
    let finished = run(bare().arg(OsString::from(OsStr::from_bytes(b"\xff"))));
    assert_eq!(finished.status.code(), Some(2), "{}", finished.stderr);
}

// ---------------------------------------------------------------------------------------------
// `sbx-server health`.

fn health(port: u16) -> Finished {
    run(bare().arg("health").env("SBX_PORT", port.to_string()))
}

#[test]
fn health_tells_by_its_status_whether_the_local_server_answers() {
    let server = Server::start();
    let finished = health(server.address.port());
    assert_eq!(finished.status.code(), Some(0), "{}", finished.stderr);
    let open = Server::builder().no_token().start();
    assert_eq!(health(open.address.port()).status.code(), Some(0));
    // What a container's health check has around it is the server's own environment.
    let port = server.address.port().to_string();
    let finished = run(startable().arg("health").env("SBX_PORT", &port));
    assert_eq!(finished.status.code(), Some(0), "{}", finished.stderr);
    drop(server);
    let finished = run(bare().arg("health").env("SBX_PORT", &port));
    assert_eq!(
        finished.status.code(),
        Some(1),
        "nobody listens: {}",
        finished.stderr
    );
    assert!(finished.stderr.contains(&port), "{}", finished.stderr);
    let finished = run(bare().arg("health").env("SBX_PORT", "abc"));
    assert_eq!(finished.status.code(), Some(2), "{}", finished.stderr);
}

#[test]
fn health_is_not_fooled_by_another_server_and_does_not_wait_for_ever() {
    let answers = [
        "",
        "HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
        "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 2000 OK\r\nContent-Length: 0\r\n\r\n",
        "SSH-2.0-OpenSSH_9.9\r\n",
        "\0\0\0\0",
    ];
    // Its patience is waited for, so all at once.
    let asking = answers.map(|answer| {
        thread::spawn(move || {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let port = listener.local_addr().unwrap().port();
            let other = thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                stream.write_all(answer.as_bytes()).unwrap();
                // Neither more nor an end: only the other side's patience ends this.
                let mut rest = Vec::new();
                let _ = stream.read_to_end(&mut rest);
            });
            let finished = health(port);
            assert_eq!(
                finished.status.code(),
                Some(1),
                "{answer:?}: {}",
                finished.stderr
            );
            other.join().unwrap();
        })
    });
    // A queue that nobody accepts from.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    assert_eq!(
        health(listener.local_addr().unwrap().port()).status.code(),
        Some(1)
    );
    for thread in asking {
        thread.join().unwrap();
    }
}

#[test]
fn variables_of_other_programs_may_hold_anything() {
    let odd = OsStr::from_bytes(b"\xff\xfe");
    let mut command = startable();
    command.env("ODD", odd).env(odd, "x");
    let (mut child, address) = ready_address(command);
    let finished = run(bare()
        .arg("health")
        .env("SBX_PORT", address.port().to_string())
        .env("ODD", odd));
    // It goes through to the commands as it is.
    let mut connection = crate::fixture::Connection::open(address, Some(TOKEN.to_owned()));
    let body = json!({"cmd": "printenv ODD", "encoding": "base64"}).to_string();
    let reply = connection.request("POST", "/v1/exec", &[], body.as_bytes());
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(finished.status.code(), Some(0), "{}", finished.stderr);
    assert!(reply.text().contains("//4K"), "{}", reply.text());
}

// ---------------------------------------------------------------------------------------------
// The ready line, ports and addresses.

#[test]
fn the_ready_line_is_one_line_that_says_it_all() {
    let server = Server::start();
    let expected = format!(
        "sbx-server {} listening on {} mode=dedicated isolation=none\n",
        env!("CARGO_PKG_VERSION"),
        server.address
    );
    assert_eq!(server.get("/health").status, 200);
    let log = server.log();
    let line = log
        .lines()
        .find(|line| line.contains("listening on"))
        .unwrap();
    assert!(
        format!("{line}\n").ends_with(&expected),
        "{line:?} for {expected:?}"
    );
    assert_eq!(log.matches("listening on").count(), 1, "{log}");
    assert_ne!(server.address.port(), 0, "the port is the real one");
}

#[test]
fn port_0_is_any_free_port_and_another_is_that_one() {
    let (first, second) = (Server::start(), Server::start());
    assert_ne!(first.address, second.address);
    drop(first);
    // A port that was free a moment ago; whoever took it since is seen by the failure of `start`.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let server = Server::builder().env("SBX_PORT", port).start();
    assert_eq!(server.address.port(), port);
    assert_eq!(server.get("/health").status, 200);

    // Taken: an error that names the address and what is wrong, and no second server.
    let finished = run(startable().env("SBX_PORT", port.to_string()));
    assert!(
        !finished.status.success() && finished.status.code().is_some(),
        "{}",
        finished.stderr
    );
    assert!(
        finished.stderr.contains(&port.to_string()),
        "{}",
        finished.stderr
    );
    assert!(
        finished.stderr.contains("EADDRINUSE") || finished.stderr.contains("in use"),
        "{}",
        finished.stderr
    );
}

#[test]
fn a_port_is_free_again_at_once_after_a_restart() {
    // Connections that the server closed linger in the kernel; a restart must not wait for them.
    let mut server = Server::start();
    let port = server.address.port();
    for _ in 0..20 {
        let mut connection = server.connect();
        connection.send(b"GET /health HTTP/1.0\r\n\r\n");
        assert!(!connection.read_to_close().is_empty());
    }
    server.signal(libc::SIGTERM);
    assert!(server.wait_for_exit(PATIENCE).success());
    let server = Server::builder().env("SBX_PORT", port).start();
    assert_eq!(server.get("/health").status, 200);
}

/// Starts what `command` describes (the caller ends it) and returns the address of its ready line.
#[allow(clippy::zombie_processes)]
fn ready_address(mut command: Command) -> (std::process::Child, std::net::SocketAddr) {
    use std::io::BufRead;
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut log = String::new();
    let mut lines = std::io::BufReader::new(child.stderr.take().unwrap());
    loop {
        let mut line = String::new();
        assert!(
            lines.read_line(&mut line).unwrap() > 0,
            "ended before it was ready: {log}"
        );
        log.push_str(&line);
        let address = line
            .split_once("listening on ")
            .and_then(|(_, rest)| rest.split_whitespace().next())
            .and_then(|text| text.parse().ok());
        if let Some(address) = address {
            // Keeps the pipe open, so that later lines do not fail.
            thread::spawn(move || std::io::copy(&mut lines, &mut std::io::sink()));
            return (child, address);
        }
    }
}

#[track_caller]
fn expect_address(command: Command, expected: &str) {
    let (mut child, address) = ready_address(command);
    let expected: IpAddr = expected.parse().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(address.ip(), expected);
}

#[test]
fn a_server_with_a_token_listens_everywhere_and_one_without_only_here() {
    let mut with_token = bare();
    with_token.env("SBX_PORT", "0").env("SBX_TOKEN", TOKEN);
    expect_address(with_token, "0.0.0.0");
    let mut without = bare();
    without.env("SBX_PORT", "0");
    expect_address(without, "127.0.0.1");
    // Permission to listen elsewhere is not a wish to.
    let mut insecure = bare();
    insecure.env("SBX_PORT", "0").env("SBX_INSECURE", "1");
    expect_address(insecure, "127.0.0.1");
}

#[test]
fn without_a_token_no_other_address_than_loopback_is_bound() {
    for address in ["0.0.0.0", "::", "192.0.2.1", "::ffff:0.0.0.0"] {
        for insecure in [None, Some("0")] {
            let mut command = bare();
            command.env("SBX_PORT", "0").env("SBX_BIND", address);
            if let Some(value) = insecure {
                command.env("SBX_INSECURE", value);
            }
            let finished = run(&mut command);
            assert_eq!(
                finished.status.code(),
                Some(2),
                "{address}: {}",
                finished.stderr
            );
            for word in ["SBX_TOKEN", "SBX_INSECURE", address] {
                assert!(
                    finished.stderr.contains(word),
                    "{address}: {}",
                    finished.stderr
                );
            }
        }
    }
    let mut command = bare();
    command
        .env("SBX_PORT", "0")
        .env("SBX_BIND", "0.0.0.0")
        .env("SBX_INSECURE", "1");
    expect_address(command, "0.0.0.0");
    let mut command = bare();
    command.env("SBX_PORT", "0").env("SBX_BIND", "127.0.0.2");
    expect_address(command, "127.0.0.2");
}

#[test]
fn ipv6_addresses_work_where_there_are_any() {
    if TcpListener::bind("[::1]:0").is_err() {
        crate::skip!("no IPv6 on this machine");
    }
    let server = Server::builder().no_token().env("SBX_BIND", "::1").start();
    assert_eq!(server.get("/health").status, 200);
    let mut command = bare();
    command
        .env("SBX_PORT", "0")
        .env("SBX_BIND", "::")
        .env("SBX_TOKEN", TOKEN);
    expect_address(command, "::");
}

#[test]
fn an_address_that_is_not_of_this_machine_is_an_error_not_a_panic() {
    let finished = run(startable().env("SBX_BIND", "192.0.2.1"));
    assert!(!finished.status.success() && finished.status.code().is_some());
    assert!(finished.stderr.contains("192.0.2.1"), "{}", finished.stderr);
    assert!(!finished.stderr.contains("panicked"), "{}", finished.stderr);
}

#[test]
fn the_server_starts_in_an_empty_environment_with_closed_streams() {
    // As PID 1 of a bare image, or under a supervisor that gives it nothing.
    let mut command = Command::new("/bin/sh");
    command
        .args(["-c", "exec \"$0\" <&- >&-", BINARY])
        .env_clear()
        .env("SBX_PORT", "0")
        .env("SBX_TOKEN", TOKEN);
    let (mut child, address) = ready_address(command);
    let address = std::net::SocketAddr::new("127.0.0.1".parse().unwrap(), address.port());
    let mut connection = crate::fixture::Connection::open(address, Some(TOKEN.to_owned()));
    let body = json!({"cmd": ["/bin/sh", "-c", "cat; echo out; echo err >&2"]}).to_string();
    let reply = connection.request("POST", "/v1/exec", &[], body.as_bytes());
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(reply.text().contains("out\\n"), "{}", reply.text());
    assert!(reply.text().contains("err\\n"), "{}", reply.text());
}

#[test]
fn a_log_that_nobody_reads_any_more_does_not_end_the_server() {
    // stderr is a pipe whose reader goes away after the ready line: a write to it fails.
    use std::io::BufRead;
    let mut child = startable()
        .env("SBX_LOG", "debug")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.contains("listening on ") {
        line.clear();
        assert!(
            lines.read_line(&mut line).unwrap() > 0,
            "ended before it was ready"
        );
    }
    drop(lines);
    let address = line
        .split_once("listening on ")
        .unwrap()
        .1
        .split_whitespace()
        .next()
        .unwrap();
    let address = address.parse().unwrap();
    for _ in 0..50 {
        let mut connection = crate::fixture::Connection::open(address, Some(TOKEN.to_owned()));
        assert_eq!(
            connection.request("GET", "/v1/processes", &[], b"").status,
            200
        );
        assert_eq!(connection.request("GET", "/nope", &[], b"").status, 404);
    }
    let alive = child.try_wait().unwrap().is_none();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(alive, "the server ended");
}
