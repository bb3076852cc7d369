//! Settings and the command line, tested by starting the real program.
//!
//! Each variable gets values that it does not accept: the server must exit with status 2 and one
//! line that names the variable and the value. Further tests cover where the token comes from, warnings
//! for unknown variables, `health`, and which addresses the server listens on.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{Read, Write};
use std::net::{IpAddr, TcpListener};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::fixture::{BINARY, Builder, PATIENCE, Server, TOKEN, TempDir, is_root};
use crate::skip;

/// All variables, with a part of the default that `--help` shows.
const VARIABLES: &[(&str, &str)] = &[
    ("SBX_PORT", "49983"),
    ("SBX_BIND", "127.0.0.1"),
    ("SBX_TOKEN", "unset"),
    ("SBX_TOKEN_FILE", "unset"),
    ("SBX_ALLOWED_ORIGINS", "unset"),
    ("SBX_INSECURE", "0"),
    ("SBX_IDLE_TIMEOUT", "never"),
    ("SBX_HOST_MODE", "0"),
    ("SBX_CAPACITY", "unlimited"),
    ("SBX_HOMES_DIR", "/sbx/homes"),
    ("SBX_UID_RANGE", "20000-59999"),
    ("SBX_MIN_LANDLOCK_ABI", "6"),
    ("SBX_ALLOW_UNCONFINED", "0"),
    ("SBX_SNAPSHOTS_DIR", ".snapshots in SBX_HOMES_DIR"),
    ("SBX_SNAPSHOTS_BYTES", "unlimited"),
    ("SBX_SNAPSHOTS_MAX", "unlimited"),
    ("SBX_CDI_DIRS", "/etc/cdi,/var/run/cdi"),
    ("SBX_TCP_PORT_RANGE", "none"),
    ("SBX_ISOLATION", "landlock"),
    ("SBX_NETWORK", "open"),
    ("SBX_STRICT_SCOPES", "0"),
    ("SBX_LOG_BYTES", "4194304"),
    ("SBX_CONTEXTS", "64"),
    ("SBX_MCP", "1"),
    ("SBX_E2B_TEMPLATES", "none"),
    ("SBX_LOG_TOTAL_BYTES", "268435456"),
    ("SBX_PING_SECS", "15"),
    ("SBX_MAX_CONNECTIONS", "4096"),
    ("SBX_LOG", "info"),
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

/// Runs the program until it exits. Kills it and fails the test if it does not.
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

/// The program without arguments, and without any variable of the server.
fn bare() -> Command {
    let mut command = Server::builder().no_token().command();
    command.env_remove("SBX_PORT").env_remove("SBX_BIND");
    command
}

/// A command that starts a server, unless the test adds a bad value.
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
    // Besides variable and value, the line says what the variable accepts.
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
#[expect(clippy::too_many_lines, reason = "it is a table")]
fn every_bad_value_is_named_and_ends_the_start_with_status_2() {
    // Not numbers.
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
    for value in [
        "",
        "8000",
        "8000-",
        "80-90",
        "9000-8000",
        "8000-70000",
        "8000-9000 ",
    ] {
        expect_refusal("SBX_TCP_PORT_RANGE", OsStr::new(value));
    }
    for value in ["", "closed", "Blocked", "allowlist", "open "] {
        expect_refusal("SBX_NETWORK", OsStr::new(value));
    }
    for value in ["", "none", "Namespaces", "namespace", "namespaces "] {
        expect_refusal("SBX_ISOLATION", OsStr::new(value));
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
    for name in ["SBX_HOMES_DIR", "SBX_TOKEN_FILE", "SBX_SNAPSHOTS_DIR"] {
        expect_refusal(name, OsStr::new(""));
    }
    expect_refusal("SBX_SNAPSHOTS_DIR", OsStr::new("snapshots"));
    for name in ["SBX_SNAPSHOTS_BYTES", "SBX_SNAPSHOTS_MAX"] {
        for value in ["", "-1", "1.5", "1k", "unlimited"] {
            expect_refusal(name, OsStr::new(value));
        }
    }
    for value in [
        "",
        "cdi",
        "/etc/cdi,",
        ",/etc/cdi",
        "/etc/cdi,run/cdi",
        "/etc/cdi, /run/cdi",
    ] {
        expect_refusal("SBX_CDI_DIRS", OsStr::new(value));
    }
    for value in [
        "",
        "*",
        "https://a.example/",
        "app.example.com",
        "https://a,https://B",
    ] {
        expect_refusal("SBX_ALLOWED_ORIGINS", OsStr::new(value));
    }
    for value in ["", "nonsense"] {
        expect_refusal("SBX_LOG", OsStr::new(value));
    }
}

#[test]
fn a_value_that_is_not_utf_8_is_a_bad_value_and_no_panic() {
    for (name, _) in VARIABLES {
        // A path may hold any bytes, and a token is not shown.
        if matches!(*name, "SBX_TOKEN" | "SBX_TOKEN_FILE" | "SBX_HOMES_DIR") {
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
    // Also where the server could start without a token.
    let finished = run(bare()
        .env("SBX_PORT", "0")
        .env("SBX_TOKEN", "")
        .env("SBX_INSECURE", "1"));
    assert_eq!(finished.status.code(), Some(2), "{}", finished.stderr);
}

#[test]
fn a_token_that_no_header_can_carry_is_refused_and_not_shown() {
    // No request could be authorized by such a token.
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
        .env(
            "SBX_ALLOWED_ORIGINS",
            "https://a.example,http://localhost:5173",
        )
        .start();
    assert_eq!(server.get("/health").status, 200);
}

// ---------------------------------------------------------------------------------------------
// Unknown variables.

#[test]
fn an_unknown_variable_is_one_warning_that_names_the_nearest_one() {
    let server = Server::builder()
        .env("SBX_PROT", "hidden-1")
        .env("SBX_WHATEVER", "hidden-2")
        .env("SBX_FORGED\nsbx-server: forged\u{1b}[2J", "hidden-3")
        .env("OTHER", "hidden-4")
        .start();
    let log = server.log();
    let warnings: Vec<&str> = log
        .lines()
        .filter(|line| line.contains("not known"))
        .collect();
    assert_eq!(warnings.len(), 3, "{log}");
    for warning in [
        "sbx-server: SBX_PROT is not known; did you mean SBX_PORT?",
        "sbx-server: SBX_WHATEVER is not known; it is ignored",
        "sbx-server: SBX_FORGED\\nsbx-server: forged\\u{1b}[2J is not known; it is ignored",
    ] {
        assert!(warnings.contains(&warning), "no {warning}: {log}");
    }
    assert!(!log.contains("hidden"), "{log}");

    // The warning also helps when another setting ends the start.
    let finished = run(startable().env("SBX_PROT", "1").env("SBX_LOG", "loud"));
    assert_eq!(finished.status.code(), Some(2));
    assert!(finished.stderr.contains("SBX_PORT?"), "{}", finished.stderr);
}

#[test]
fn variables_of_clients_and_start_scripts_are_no_warnings() {
    let mut builder = Server::builder();
    for name in [
        "SBX_MAX_HOSTS",
        "SBX_DL_TOKEN",
        "SBX_COMPAT_HOST_TOKEN",
        "SBX_SERVER_URL",
        "SBX_SERVER_MOUNT",
        "SBX_SERVER_SHA256",
        "SBX_ALLOW_UNVERIFIED_SERVER",
    ] {
        builder = builder.env(name, "x");
    }
    let log = builder.start().log();
    assert_eq!(log.lines().count(), 1, "{log}");
}

// ---------------------------------------------------------------------------------------------
// The token's origin.

/// Starts a server that makes its token, and takes the token from its log.
#[track_caller]
fn start_with_made_token(builder: Builder) -> (Server, String) {
    let mut server = builder.no_token().env("SBX_TOKEN", "auto").start();
    let log = server.log();
    let lines: Vec<&str> = log.lines().collect();
    let (token, ready) = match lines.as_slice() {
        [token, ready] => (token.strip_prefix("SBX_TOKEN=").expect(token), ready),
        _ => panic!("a line with the token and the ready line: {log}"),
    };
    assert!(ready.contains("listening on"), "{log}");
    assert_eq!(token.len(), 64, "{log}");
    let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    assert!(token.bytes().all(is_digit), "{log}");
    server.token = Some(token.to_owned());
    let token = token.to_owned();
    (server, token)
}

/// Starts a server that reads its token from a file.
fn start_with_file(file: &str, token: &str) -> Server {
    let mut server = Server::builder()
        .no_token()
        .env("SBX_TOKEN_FILE", file)
        .start();
    server.token = Some(token.to_owned());
    server
}

/// Checks that the server accepts its token and no other, and that neither the log nor a command's
/// environment shows the token.
#[track_caller]
fn expect_guarded(server: &mut Server, token: &str) {
    let printed = server.log().matches(token).count();
    let outcome =
        server.exec(&json!({"cmd": "env | grep SBX_; cat /proc/$PPID/environ; echo done"}));
    assert!(outcome.stdout.ends_with("done\n"), "{}", outcome.stdout);
    assert!(!outcome.stdout.contains(token), "{}", outcome.stdout);
    assert!(!outcome.stdout.starts_with("SBX_"), "{}", outcome.stdout);
    for wrong in [None, Some("auto".to_owned()), Some(token[1..].to_owned())] {
        server.token = wrong;
        assert_eq!(server.get("/v1/processes").status, 403);
    }
    assert_eq!(server.log().matches(token).count(), printed);
}

#[test]
fn auto_makes_a_token_that_is_printed_once() {
    let (mut server, token) = start_with_made_token(Server::builder().env("SBX_LOG", "debug"));
    expect_guarded(&mut server, &token);
    let (_other, other_token) = start_with_made_token(Server::builder());
    assert_ne!(token, other_token);
}

#[test]
fn a_made_token_is_written_to_a_file_for_its_owner_alone() {
    let directory = TempDir::new();
    let (file, target) = (directory.join("token"), directory.join("target"));
    // What is there before: nothing, a file that everybody can read, and links to another file.
    let plant: [&dyn Fn(); 4] = [
        &|| (),
        &|| fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap(),
        &|| {
            fs::write(&target, "target").unwrap();
            fs::remove_file(&file).unwrap();
            symlink(&target, &file).unwrap();
        },
        &|| {
            fs::remove_file(&file).unwrap();
            fs::hard_link(&target, &file).unwrap();
        },
    ];
    for plant in plant {
        plant();
        // The umask takes nothing away.
        let builder = Server::builder()
            .wrapped_in(&["sh", "-c", r#"umask 0; exec "$0""#])
            .env("SBX_TOKEN_FILE", &file);
        let (mut server, token) = start_with_made_token(builder);
        assert_eq!(fs::read_to_string(&file).unwrap(), token.clone() + "\n");
        let metadata = fs::symlink_metadata(&file).unwrap();
        assert!(metadata.is_file());
        assert_eq!(metadata.mode() & 0o7777, 0o600);
        expect_guarded(&mut server, &token);
        // The file can start the next server.
        let mut next = start_with_file(&file, &token);
        expect_guarded(&mut next, &token);
    }
    assert_eq!(fs::read_to_string(&target).unwrap(), "target");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 2);
}

#[test]
fn a_server_that_cannot_start_leaves_the_token_file_of_the_first() {
    let directory = TempDir::new();
    let file = directory.join("token");
    let (server, token) = start_with_made_token(Server::builder().env("SBX_TOKEN_FILE", &file));
    let port = server.address.port().to_string();
    for (name, value) in [("SBX_PORT", port.as_str()), ("SBX_LOG", "loud")] {
        let finished = run(startable()
            .env("SBX_TOKEN", "auto")
            .env("SBX_TOKEN_FILE", &file)
            .env(name, value));
        assert!(!finished.status.success(), "{}", finished.stderr);
        assert!(
            !finished.stderr.contains("SBX_TOKEN="),
            "{}",
            finished.stderr
        );
        assert_eq!(fs::read_to_string(&file).unwrap(), token.clone() + "\n");
    }
}

#[test]
fn a_token_file_that_cannot_be_written_ends_the_start() {
    let directory = TempDir::new();
    for file in [directory.join("missing/token"), directory.join("")] {
        let finished = run(startable()
            .env("SBX_TOKEN", "auto")
            .env("SBX_TOKEN_FILE", &file));
        assert_eq!(finished.status.code(), Some(1), "{}", finished.stderr);
        let expected = format!("cannot write SBX_TOKEN_FILE {file}");
        assert!(finished.stderr.contains(&expected), "{}", finished.stderr);
        assert_eq!(finished.stderr.lines().count(), 1, "{}", finished.stderr);
    }
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn a_token_is_read_from_a_file() {
    let directory = TempDir::new();
    let file = directory.join("token");
    for end in ["", "\n", "\r\n"] {
        fs::write(&file, format!("s3cr3t-from-a-file{end}")).unwrap();
        let mut server = start_with_file(&file, "s3cr3t-from-a-file");
        assert_eq!(server.log().lines().count(), 1, "{}", server.log());
        expect_guarded(&mut server, "s3cr3t-from-a-file");
    }
    // Like any token, it opens all interfaces.
    let mut command = bare();
    command.env("SBX_PORT", "0").env("SBX_TOKEN_FILE", &file);
    expect_address(command, "0.0.0.0");
}

#[test]
fn a_token_file_without_a_token_is_named_and_not_shown() {
    let directory = TempDir::new();
    let file = directory.join("token");
    let refuse = |file: &str| {
        let finished = run(bare().env("SBX_PORT", "0").env("SBX_TOKEN_FILE", file));
        assert_eq!(finished.status.code(), Some(2), "{}", finished.stderr);
        assert!(
            finished
                .stderr
                .contains(&format!("SBX_TOKEN_FILE={file}: ")),
            "{}",
            finished.stderr
        );
        assert!(!finished.stderr.contains("hidden"), "{}", finished.stderr);
        assert_eq!(finished.stderr.lines().count(), 1, "{}", finished.stderr);
    };
    refuse(&file);
    refuse(directory.path().to_str().unwrap());
    let long = "hidden".repeat(100_000);
    for content in [
        "",
        "\n",
        "hidden hidden",
        "hidden\n\n",
        "hidden\u{e9}",
        "hidden\0",
        &long,
    ] {
        fs::write(&file, content).unwrap();
        refuse(&file);
    }
    refuse("/dev/zero");
}

#[test]
fn a_token_and_a_token_file_are_not_both_accepted() {
    let directory = TempDir::new();
    let file = directory.join("token");
    fs::write(&file, "hidden").unwrap();
    let finished = run(startable().env("SBX_TOKEN_FILE", &file));
    assert_eq!(finished.status.code(), Some(2), "{}", finished.stderr);
    assert!(
        finished.stderr.contains("SBX_TOKEN_FILE"),
        "{}",
        finished.stderr
    );
    for secret in ["hidden", TOKEN] {
        assert!(!finished.stderr.contains(secret), "{}", finished.stderr);
    }
    // An empty token remains an error of its own.
    let finished = run(startable()
        .env("SBX_TOKEN", "")
        .env("SBX_TOKEN_FILE", &file));
    assert_eq!(finished.status.code(), Some(2), "{}", finished.stderr);
}

#[test]
fn no_sandbox_reads_the_token_file() {
    if !is_root() {
        skip!("host mode needs root");
    }
    // In a directory that sandboxes can list and whose files they can read.
    let Ok(directory) = TempDir::below("/etc") else {
        skip!("/etc cannot be written to");
    };
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let (file, open) = (directory.join("token"), directory.join("open"));
    fs::write(&open, "readable").unwrap();
    // Few enough to be served under any limit of descriptors, so that the log has no line about them.
    let host = Server::host()
        .env("SBX_TOKEN_FILE", &file)
        .env("SBX_MAX_CONNECTIONS", 64);
    let (server, token) = start_with_made_token(host);
    let sandbox = server.sandbox();
    let seen = sandbox.sh(&format!("cat {open}; cat {file} 2>&1; env; true"));
    assert!(seen.contains("readable"), "the control: {seen}");
    assert!(seen.contains("denied"), "{seen}");
    assert!(
        !seen.contains(&token) && !seen.contains("SBX_TOKEN"),
        "{seen}"
    );
}

#[test]
fn a_token_file_that_sandboxes_could_read_is_refused() {
    if !is_root() {
        skip!("host mode needs root");
    }
    let Ok(directory) = TempDir::below("/etc") else {
        skip!("/etc cannot be written to");
    };
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let file = directory.join("token");
    fs::write(&file, "a-token-of-a-test").unwrap();
    for (mode, is_accepted) in [(0o644, false), (0o604, false), (0o640, true), (0o400, true)] {
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
        // Loopback and a free port, so that an accepted one starts; it gets SIGTERM at once.
        let builder = Server::host().no_token().env("SBX_TOKEN_FILE", &file);
        if is_accepted {
            drop(builder.start());
            continue;
        }
        let finished = run(&mut builder.command());
        assert_eq!(
            finished.status.code(),
            Some(1),
            "{mode:o}: {}",
            finished.stderr
        );
        assert!(finished.stderr.contains("chmod o-r"), "{}", finished.stderr);
        assert!(
            !finished.stderr.contains("a-token-of"),
            "{}",
            finished.stderr
        );
    }
}

#[test]
fn a_made_token_replaces_no_device_and_no_pipe() {
    let directory = TempDir::new();
    let pipe = directory.join("pipe");
    nix::unistd::mkfifo(pipe.as_str(), nix::sys::stat::Mode::S_IRWXU).unwrap();
    for file in ["/dev/null", &pipe] {
        let finished = run(bare()
            .env("SBX_PORT", "0")
            .env("SBX_TOKEN", "auto")
            .env("SBX_TOKEN_FILE", file));
        assert_eq!(finished.status.code(), Some(1), "{}", finished.stderr);
        assert!(
            finished.stderr.contains("not a regular file"),
            "{}",
            finished.stderr
        );
        assert!(!fs::metadata(file).unwrap().is_file(), "{file}");
    }
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
        let entry = format!("\n  {name} [");
        let (_, rest) = finished
            .stdout
            .split_once(&entry)
            .unwrap_or_else(|| panic!("no {name}: {}", finished.stdout));
        let shown = rest.split(']').next().unwrap();
        assert!(shown.contains(default), "{name} [{shown}]");
    }
    for word in ["health", "--version", "SBX_INSECURE"] {
        assert!(
            finished.stdout.contains(word),
            "no {word}: {}",
            finished.stdout
        );
    }
    assert_eq!(finished.stderr, "");
    // Bad settings do not prevent help.
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
    // A container's health check runs with the server's environment.
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
    // Each waits for the timeout of `health`, so they run in parallel.
    let asking = answers.map(|answer| {
        thread::spawn(move || {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let port = listener.local_addr().unwrap().port();
            let other = thread::spawn(move || {
                let (mut stream, _) = listener.accept().unwrap();
                stream.write_all(answer.as_bytes()).unwrap();
                // Sends nothing more and keeps the connection open until the client gives up.
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
    // A listener that never accepts.
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
    // Commands inherit it unchanged.
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
    // If another process takes the port in between, `start` fails.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let server = Server::builder().env("SBX_PORT", port).start();
    assert_eq!(server.address.port(), port);
    assert_eq!(server.get("/health").status, 200);

    // A port in use is an error that names the address and the cause.
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
    // Connections that the server closed stay in TIME_WAIT; a restart must not wait for them.
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

/// Runs `command` until its ready line, and returns the child and the address. The caller ends it.
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
            // Keeps the pipe open for later lines.
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
    // SBX_INSECURE permits other addresses and does not change the default.
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
        skip!("no IPv6 on this machine");
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
    // As PID 1 of a minimal image, or under a supervisor that passes nothing on.
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
    // The reader of stderr, a pipe, exits after the ready line, so writes fail.
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
