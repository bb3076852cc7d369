//! No request without its token, and no token for anybody else.
//!
//! The first half: without the token, or with anything that is nearly it, every route is 403 and
//! has no side effect; the oracles are files, a process that must live on, and the idle clock. The
//! second half: a command that the server runs, as the same user, finds the token nowhere - not in
//! its environment, not in that of the server, not in the server's memory, not in its log.

use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::fixture::{
    Ask, Connection, PATIENCE, Reply, Server, Subjects, TOKEN, TempDir, can_change_user, find,
    parse_replies, public_copy, routes, secret_server, spare_uid, wait_until,
};
use crate::skip;

// ---------------------------------------------------------------------------------------------
// Refused requests.

/// A server with something to lose: files, a process that reads its stdin, a finished process.
struct Estate {
    server: Server,
    dir: TempDir,
    process: String,
}

impl Estate {
    fn new() -> Self {
        let server = Server::start();
        let dir = TempDir::new();
        std::fs::write(dir.join("kept"), b"kept").unwrap();
        std::fs::create_dir(dir.join("dir")).unwrap();
        let body = json!({"cmd": ["sh", "-c", format!("cat > {}", dir.join("typed"))]});
        let process = server.spawn(&body)["id"].as_str().unwrap().to_owned();
        wait_until("the process runs", PATIENCE, || {
            Path::new(&dir.join("typed")).exists()
        });
        Self {
            server,
            dir,
            process,
        }
    }

    /// Every route with a request that would leave a trace or tell something, and paths that are nearly a route.
    fn requests(&self) -> Vec<Ask> {
        let directory = self.dir.path().display().to_string();
        let names = Subjects::below(&directory).with("process", &self.process);
        let missing = names.clone().with("process", "p-999");
        let mut requests = Vec::new();
        for route in routes() {
            for names in [&names, &missing] {
                let ask = route.ask("/v1", names);
                requests.extend(ask.by_alias());
                requests.push(ask);
            }
        }
        let read = format!("/v1/files/read?path={directory}/kept");
        for (method, target, body) in [
            ("HEAD", read.as_str(), ""),
            ("GET", "/v1/processes/p-1/logs?follow=1", ""),
            ("OPTIONS", "/v1/exec", ""),
            ("OPTIONS", "/v1/nope", ""),
            ("BREW", "/v1/exec", ""),
            ("GET", "/v1", ""),
            ("GET", "/v1/nope", ""),
            ("GET", "/health/", ""),
            ("GET", "//health", ""),
            ("GET", "http://sandbox/v1/processes", ""),
            ("GET", "https://sandbox/v1/processes", ""),
            ("GET", "/v1/processes?/health", ""),
            ("OPTIONS", "*", ""),
            ("GET", "/%68ealth", ""),
            ("GET", "/health/../v1/processes", ""),
            ("GET", "/v1/sandboxes", ""),
            ("POST", "/v1/sandboxes", "{}"),
            // What would be refused for other reasons is not told the reason.
            ("POST", "/v1/exec", "{"),
            ("PUT", "/v1/files/write", "text"),
            ("GET", "/v1/files/read?path=/missing", ""),
        ] {
            requests.push(Ask::new(method, target, body));
        }
        requests
    }

    /// All is as it was made.
    #[track_caller]
    fn check_untouched(&self, what: &str) {
        let mut names: Vec<_> = std::fs::read_dir(self.dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(names, ["dir", "kept", "typed"], "{what}");
        assert_eq!(
            std::fs::read(self.dir.join("kept")).unwrap(),
            b"kept",
            "{what}"
        );
        assert_eq!(
            std::fs::read(self.dir.join("typed")).unwrap(),
            b"",
            "{what}"
        );
        let processes = self.server.get("/v1/processes").json();
        let processes = processes.as_array().unwrap();
        assert_eq!(processes.len(), 1, "{what}: {processes:?}");
        assert_eq!(processes[0]["running"], true, "{what}");
    }
}

#[track_caller]
fn assert_forbidden(reply: &Reply, what: &str) {
    assert_eq!(reply.status, 403, "{what}: {}", reply.text());
    if !reply.body.is_empty() {
        assert_eq!(reply.code(), "forbidden", "{what}");
        assert!(!reply.text().contains(TOKEN), "{what}: {}", reply.text());
    }
    assert!(
        reply.header("allow").is_none(),
        "{what}: what is allowed is not told either"
    );
}

/// What is not the token. All but the first are header lines.
fn wrong_credentials() -> Vec<Vec<u8>> {
    let mut lines: Vec<String> = vec![
        "X-Other: x".to_owned(),
        "X-Sandbox-Token:".to_owned(),
        "X-Sandbox-Token: wrong".to_owned(),
        format!("X-Sandbox-Token: {TOKEN}x"),
        format!("X-Sandbox-Token: x{TOKEN}"),
        format!("X-Sandbox-Token: {TOKEN}{TOKEN}"),
        format!("X-Sandbox-Token: {TOKEN}, {TOKEN}"),
        format!("X-Sandbox-Token: {TOKEN} x"),
        format!("X-Sandbox-Token: \"{TOKEN}\""),
        format!("X-Sandbox-Token: Bearer {TOKEN}"),
        format!("X-Sandbox-Token: {}", TOKEN.to_uppercase()),
        format!("X-Sandbox-Token: {}", &TOKEN[1..]),
        format!("X-Sandbox-Token: {}", "x".repeat(TOKEN.len())),
        format!("X-Sandbox-Token: {}", "x".repeat(50_000)),
        format!("X-Sandbox-Token: {}\u{e9}", &TOKEN[..TOKEN.len() - 1]),
        // The right secret in the wrong place.
        format!("Authorization: {TOKEN}"),
        format!("Authorization: Basic {TOKEN}"),
        format!("Authorization: Bearer {TOKEN}x"),
        format!("Authorization: Bearer{TOKEN}"),
        format!("Proxy-Authorization: Bearer {TOKEN}"),
        format!("X-Sandbox-Token: wrong\r\nAuthorization: Bearer {TOKEN}"),
        format!("Authorization: Bearer {TOKEN}\r\nX-Sandbox-Token: wrong"),
        format!("Authorization: Bearer wrong\r\nAuthorization: Bearer {TOKEN}"),
        format!("Cookie: X-Sandbox-Token={TOKEN}"),
        format!("X-Sandbox-Token-: {TOKEN}"),
        format!("X_Sandbox_Token: {TOKEN}"),
        format!("Sandbox-Token: {TOKEN}"),
    ];
    for length in 1..TOKEN.len() {
        lines.push(format!("X-Sandbox-Token: {}", &TOKEN[..length]));
    }
    lines.into_iter().map(String::into_bytes).collect()
}

fn send_with(connection: &mut Connection, method: &str, target: &str, line: &[u8], body: &[u8]) {
    let length = format!("Content-Length: {}\r\n", body.len());
    let framing = if body.is_empty() && method != "POST" {
        ""
    } else {
        &length
    };
    connection.send(
        &[
            format!("{method} {target} HTTP/1.1\r\nHost: sandbox\r\n{framing}").as_bytes(),
            line,
            b"\r\n\r\n",
            body,
        ]
        .concat(),
    );
}

#[test]
fn every_route_is_403_without_the_token_and_nothing_happens() {
    let estate = Estate::new();
    for line in [
        &b"X-Other: x"[..],
        b"X-Sandbox-Token: wrong",
        &format!("X-Sandbox-Token: {}", &TOKEN[..5]).into_bytes(),
    ] {
        let mut connection = estate.server.connect();
        for Ask {
            method,
            target,
            body,
        } in estate.requests()
        {
            send_with(&mut connection, method, &target, line, body.as_bytes());
            let reply = connection.read_reply_to(method);
            assert_forbidden(&reply, &format!("{method} {target}"));
        }
        estate.check_untouched(&String::from_utf8_lossy(line));
    }
    // The same requests with the token do what they say, so the oracles above can see.
    let server = &estate.server;
    let dir = estate.dir.path().display();
    assert_eq!(
        server
            .put(&format!("/v1/files/write?path={dir}/new"), b"x")
            .status,
        200
    );
    assert!(Path::new(&estate.dir.join("new")).exists());
    let reply = server.delete(&format!("/v1/processes/{}", estate.process));
    assert_eq!(reply.json()["killed"], true);
}

#[test]
fn nothing_that_is_nearly_the_token_opens_anything() {
    let estate = Estate::new();
    let dir = estate.dir.path().display();
    let run = json!({"cmd": format!("touch {dir}/ran")}).to_string();
    let write = format!("/v1/files/write?path={dir}/new");
    let mut connection = estate.server.connect();
    for line in wrong_credentials() {
        let shown = String::from_utf8_lossy(&line[..line.len().min(80)]).into_owned();
        send_with(&mut connection, "POST", "/v1/exec", &line, run.as_bytes());
        assert_forbidden(&connection.read_reply(), &shown);
        send_with(&mut connection, "PUT", &write, &line, b"text");
        assert_forbidden(&connection.read_reply(), &shown);
        send_with(&mut connection, "GET", "/v1/processes", &line, b"");
        assert_forbidden(&connection.read_reply(), &shown);
    }
    let secret = format!("token={TOKEN}&X-Sandbox-Token={TOKEN}&x-sandbox-token={TOKEN}");
    send_with(
        &mut connection,
        "GET",
        &format!("/v1/processes?{secret}"),
        b"X: y",
        b"",
    );
    assert_forbidden(&connection.read_reply(), "in the query");
    estate.check_untouched("nearly the token");
    // The header's name is as every header's: its case does not matter.
    for name in ["X-Sandbox-Token", "x-sandbox-token", "X-SANDBOX-TOKEN"] {
        let line = format!("{name}: {TOKEN}");
        send_with(
            &mut connection,
            "GET",
            "/v1/processes",
            line.as_bytes(),
            b"",
        );
        assert_eq!(connection.read_reply().status, 200, "{name}");
    }
    let line = format!("X-Sandbox-Token: \t{TOKEN} \t");
    send_with(
        &mut connection,
        "GET",
        "/v1/processes",
        line.as_bytes(),
        b"",
    );
    assert_eq!(
        connection.read_reply().status,
        200,
        "white space around a value is not part of it"
    );
}

#[test]
fn a_request_with_two_tokens_is_never_let_in_by_the_second() {
    // Whoever stands in front may have checked the first one only.
    let server = Server::start();
    let mut connection = server.connect();
    for (first, second) in [("wrong", TOKEN), ("", TOKEN)] {
        let line = format!("X-Sandbox-Token: {first}\r\nX-Sandbox-Token: {second}");
        send_with(
            &mut connection,
            "GET",
            "/v1/processes",
            line.as_bytes(),
            b"",
        );
        let reply = connection.read_reply();
        assert!(
            [400, 403].contains(&reply.status),
            "{first:?}, {second:?}: {}",
            reply.status
        );
        if reply.header("connection") == Some("close") {
            connection = server.connect();
        }
    }
}

#[test]
fn a_token_that_comes_after_the_body_is_none() {
    // A trailer is a header field that has not been looked at by anybody in front.
    let estate = Estate::new();
    let dir = estate.dir.path().display();
    let mut connection = estate.server.connect();
    connection.send(
        format!(
            "PUT /v1/files/write?path={dir}/new HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n\
             5\r\nhello\r\n0\r\nX-Sandbox-Token: {TOKEN}\r\n\r\n"
        )
        .as_bytes(),
    );
    assert_forbidden(&connection.read_reply(), "the token in a trailer");
    estate.check_untouched("the token in a trailer");
}

#[test]
fn one_request_with_the_token_does_not_open_the_connection_for_the_next() {
    let server = Server::start();
    let mut connection = server.connect();
    for _ in 0..3 {
        assert_eq!(
            connection.request("GET", "/v1/processes", &[], b"").status,
            200
        );
        send_with(&mut connection, "GET", "/v1/processes", b"X: y", b"");
        assert_forbidden(&connection.read_reply(), "after one with the token");
    }
    // Pipelined in one segment as well.
    let with = format!(
        "GET /v1/processes HTTP/1.1\r\nHost: localhost\r\nX-Sandbox-Token: {TOKEN}\r\n\r\n"
    );
    let without = "GET /v1/processes HTTP/1.1\r\nHost: localhost\r\n\r\n";
    let mut connection = server.connect();
    connection.send(format!("{with}{without}{with}").as_bytes());
    connection
        .stream
        .shutdown(std::net::Shutdown::Write)
        .unwrap();
    let replies = parse_replies(&connection.read_to_close()).unwrap();
    let statuses: Vec<u16> = replies.iter().map(|reply| reply.status).collect();
    assert_eq!(statuses, [200, 403, 200]);
}

#[test]
fn health_is_open_to_everybody() {
    let server = Server::start();
    let mut connection = server.connect();
    for line in wrong_credentials() {
        for method in ["GET", "HEAD", "OPTIONS"] {
            send_with(&mut connection, method, "/health", &line, b"");
            let reply = connection.read_reply_to(method);
            assert!(
                [200, 204].contains(&reply.status),
                "{method}: {}",
                reply.status
            );
            assert!(!String::from_utf8_lossy(&reply.body).contains(TOKEN));
        }
    }
    let reply = connection.request("GET", "/health", &[], b"");
    assert_eq!(reply.json()["protocol"], 3);
}

/// Whether a path is one of those that a table lists, where `...` stands for any rest.
fn is_listed(listed: &[String], path: &str) -> bool {
    listed.iter().any(|one| match one.strip_suffix("...") {
        Some(beginning) => path.starts_with(beginning),
        None => path == one,
    })
}

/// The paths of the rows that are about a path whatever else a request has.
fn listed_paths() -> Vec<String> {
    let page = std::fs::read_to_string(crate::examples::repository("docs/security.md")).unwrap();
    let (_, table) = page
        .split_once("### What answers without a token")
        .expect("the page has the table");
    let rows = table.lines().filter(|line| line.starts_with("| `/"));
    let requests = rows.map(|row| row.split('|').nth(1).unwrap().trim());
    let plain = requests.filter(|request| request.ends_with('`'));
    let paths = plain.flat_map(|request| request.split(", "));
    paths
        .map(|path| path.trim_matches('`').to_owned())
        .collect()
}

#[test]
fn what_answers_without_a_token_is_listed() {
    let listed = listed_paths();
    assert!(listed.len() > 6, "{listed:?}");
    let server = Server::start();
    let stranger = |method: &str, target: &str, headers: &[(&str, &str)]| {
        let mut connection = server.connect();
        connection.token = None;
        connection.request(method, target, headers, b"").status
    };
    for path in &listed {
        let path = path.replace("...", "x");
        assert_ne!(stranger("GET", &path, &[]), 403, "{path}");
    }
    let contract = server.get("/openapi.json").json();
    let mut paths: Vec<String> = Vec::new();
    for path in contract["paths"].as_object().unwrap().keys() {
        let filled: Vec<&str> = path
            .split('/')
            .map(|part| if part.starts_with('{') { "x" } else { part })
            .collect();
        paths.push(filled.join("/"));
        for prefix in ["/v1", "/v1/sandboxes/x"] {
            paths.push(format!("{prefix}{}", filled.join("/")));
        }
    }
    for more in [
        "*",
        "/v1",
        "/v2",
        "/nope",
        "/mcp",
        "/console",
        "/console/app.js",
        "/console/x",
        "/consoles",
        "/t",
        "/t/",
        "/t/x",
        "/.well-known/oauth-protected-resource",
        "/favicon.ico",
        "/metrics",
        "/execute",
        "/sandboxes",
        "/sandboxes/x",
        "/v2/sandboxes",
        "/v3/templates",
        "/templates/x",
        "/snapshots",
        "/volumes/x",
        "/secrets/x",
        "/envs",
        "/init",
        "/files?path=x&signature=v1_x",
        "/process.Process/Start",
        "/process.Process/Nope",
        "/filesystem.Filesystem/Stat",
    ] {
        paths.push(more.to_owned());
    }
    // Only E2B's clients use what is below these.
    let of_e2b = [
        "/files",
        "/contexts",
        "/v2",
        "/v3",
        "/templates",
        "/snapshots",
        "/volumes",
        "/secrets",
        "/envs",
        "/init",
        "/process.Process/",
        "/filesystem.Filesystem/",
        "/execute",
        "/sandboxes",
        "/metrics",
    ];
    for path in &paths {
        for method in [
            "GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW",
        ] {
            for headers in [&[][..], &[("X-API-KEY", "x")], &[("E2b-Sandbox-Id", "x")]] {
                let status = stranger(method, path, headers);
                let is_of_e2b = of_e2b.iter().any(|beginning| path.starts_with(beginning));
                // On a machine that is the only sandbox, another sandbox is gone.
                let names_another = headers.contains(&("E2b-Sandbox-Id", "x")) && status == 502;
                assert!(
                    matches!(status, 401 | 403)
                        || is_listed(&listed, path)
                        || (is_of_e2b && (matches!(status, 404 | 405) || names_another)),
                    "{method} {path} {headers:?}: {status}"
                );
            }
        }
    }
}

#[test]
fn a_server_without_a_token_is_open_and_ignores_tokens() {
    let server = Server::builder().no_token().start();
    let mut connection = server.connect();
    assert_eq!(
        connection.request("GET", "/v1/processes", &[], b"").status,
        200
    );
    connection.token = Some("whatever".to_owned());
    let headers = [("host", "localhost")];
    assert_eq!(
        connection
            .request("GET", "/v1/processes", &headers, b"")
            .status,
        200
    );
    assert_eq!(server.exec(&json!({"cmd": "echo open"})).stdout, "open\n");
}

#[test]
fn long_and_odd_tokens_are_compared_whole() {
    for token in [
        "x",
        "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef",
        "a,\"c\";=%41~",
    ]
    .map(str::to_owned)
    .into_iter()
    .chain(["y".repeat(10_000)])
    {
        let server = Server::builder()
            .env("SBX_TOKEN", &token)
            .no_token()
            .start();
        let mut connection = Connection::open(server.address, Some(token.clone()));
        assert_eq!(
            connection.request("GET", "/v1/processes", &[], b"").status,
            200
        );
        connection.token = Some(format!("{}z", &token[..token.len() - 1]));
        assert_eq!(
            connection.request("GET", "/v1/processes", &[], b"").status,
            403
        );
    }
}

#[test]
fn a_refused_request_does_not_touch_the_idle_clock() {
    let mut server = Server::builder().env("SBX_IDLE_TIMEOUT", 2).start();
    let address = server.address;
    let started = Instant::now();
    let mut count = 0;
    wait_until(
        "the server ends although it is being talked to",
        PATIENCE,
        || {
            for (target, token) in [
                ("/v1/exec", None),
                ("/v1/processes", Some("wrong")),
                ("/nope", None),
                ("/health", None),
            ] {
                // Raw, because the server may go at any of these moments.
                let Ok(mut stream) = std::net::TcpStream::connect(address) else {
                    break;
                };
                let token =
                    token.map_or_else(String::new, |token| format!("X-Sandbox-Token: {token}\r\n"));
                let _ = stream.write_all(
                    format!("GET {target} HTTP/1.1\r\nHost: localhost\r\n{token}Connection: close\r\n\r\n").as_bytes(),
                );
                let mut received = Vec::new();
                let _ = stream.read_to_end(&mut received);
                count += usize::from(find(&received, b" 403 ").is_some());
            }
            !server.is_running()
        },
    );
    assert!(count > 20, "refused requests came throughout: {count}");
    assert!(
        started.elapsed() > Duration::from_millis(1500),
        "{:?}",
        started.elapsed()
    );
    assert!(server.wait_for_exit(PATIENCE).success());
}

#[test]
fn a_refused_request_is_answered_before_its_body_and_its_body_is_not_kept() {
    let server = Server::start();
    let mut connection = server.connect();
    connection.token = None;
    let length = (1u64 << 40).to_string();
    connection.send_request("POST", "/v1/exec", &[("Content-Length", &length)], b"{");
    let reply = connection.read_reply();
    assert_forbidden(&reply, "a body that is not even sent");
    assert_eq!(reply.header("connection"), Some("close"));
}

// ---------------------------------------------------------------------------------------------
// Where the token must not be.

#[test]
fn no_variable_of_the_server_reaches_a_child() {
    let (server, secret) = secret_server(
        Server::builder()
            .env("SBX_LOG", "debug")
            .env("SBX_MAX_HOSTS", 3)
            .env("SBX_ANYTHING", "anything")
            .env("HF_TOKEN", "hf_forwarded")
            .env("ORDINARY", "yes"),
    );
    let bodies = [
        json!({"cmd": "env"}),
        json!({"cmd": ["env"]}),
        json!({"cmd": "cat /proc/self/environ | tr '\\0' '\\n'"}),
        json!({"cmd": "env", "env": {"MORE": "x"}}),
        json!({"cmd": "exec sh -c 'exec env'"}),
    ];
    for body in &bodies {
        let environment = server.exec(body).stdout;
        assert!(!environment.contains("SBX_"), "{body}: {environment}");
        assert!(!environment.contains(&secret), "{body}: {environment}");
        assert!(
            environment.contains("HF_TOKEN=hf_forwarded\n"),
            "{body}: {environment}"
        );
        assert!(
            environment.contains("ORDINARY=yes\n"),
            "{body}: {environment}"
        );
    }
    // A background process has the same environment.
    let dir = TempDir::new();
    let path = dir.join("env");
    let id = server.spawn(&json!({"cmd": format!("env > {path}.new && mv {path}.new {path}")}));
    wait_until(&format!("{id} has written"), PATIENCE, || {
        Path::new(&path).exists()
    });
    let environment = std::fs::read_to_string(&path).unwrap();
    assert!(environment.contains("ORDINARY=yes\n"), "{environment}");
    assert!(
        !environment.contains("SBX_") && !environment.contains(&secret),
        "{environment}"
    );
}

/// Looks for the token in what /proc says of every process. It comes on stdin, so that the
/// command line of the one who looks does not hold it.
const LOOK: &str = "grep -alF -f - /proc/[0-9]*/environ /proc/[0-9]*/task/*/environ \
    /proc/[0-9]*/cmdline /proc/[0-9]*/comm /proc/[0-9]*/status 2>/dev/null; echo looked";

#[test]
fn the_token_is_in_no_environ_and_no_command_line() {
    // Who looks here may look everywhere (as root, with every capability): it is not there.
    let (server, secret) = secret_server(Server::builder());
    if let Ok(environ) = std::fs::read(format!("/proc/{}/environ", server.pid())) {
        assert!(
            find(&environ, secret.as_bytes()).is_none(),
            "the server's own environ"
        );
    }
    let look = |secret: &str| {
        server.exec(&json!({"cmd": LOOK, "stdin": format!("{secret}\n"), "timeout": 60}))
    };
    assert_eq!(look(&secret).stdout, "looked\n");
    let control = format!("{secret}-control");
    let process = server.spawn(&json!({"cmd": ["sleep", "60"], "env": {"OWN": control}}));
    let expected = format!("/proc/{}/environ", process["pid"]);
    assert!(
        look(&control).stdout.contains(&expected),
        "the control of that"
    );
    // Directly, the way a curious command would.
    let outcome = server.exec(&json!({"cmd": "cat /proc/$PPID/environ"}));
    assert!(!outcome.stdout.contains(&secret));
}

/// Tries to read the memory of process `$1` and looks for the token (on stdin) in what it gets.
/// `opened` says that the kernel let it, `found` that the token was there.
const SCAN: &str = r#"
    read -r token
    pid=$1
    if ! true < "/proc/$pid/mem"; then echo refused; exit 0; fi 2> /dev/null
    echo opened
    while read -r range mode rest; do
        case $mode in r*) ;; *) continue ;; esac
        case $rest in *vsyscall*|*vvar*) continue ;; esac
        start=$((0x${range%-*} / 4096)); end=$((0x${range#*-} / 4096))
        if dd if="/proc/$pid/mem" bs=4096 skip=$start count=$((end - start)) 2> /dev/null |
            grep -aqF -e "$token"; then found=yes; fi
    done < "/proc/$pid/maps"
    echo "${found:+found}"
"#;

fn scan(server: &Server, pid: &str, secret: &str) -> String {
    let command = json!(["sh", "-c", SCAN, "scan", pid]);
    let outcome = server.exec(&json!({"cmd": command, "stdin": format!("{secret}\n")}));
    outcome.stdout
}

/// Everything else that /proc would tell of process `$1` to one who may look into it.
const PRY: &str = r#"
    for name in environ auxv syscall stack maps smaps pagemap; do
        size=$(head -c 1 "/proc/$1/$name" 2> /dev/null | wc -c)
        [ "$size" -eq 0 ] || echo "leaked $name"
    done
    for name in exe cwd root fd/0 fd/1 fd/2 fd/3 fd/4 fd/5; do
        ! readlink "/proc/$1/$name" || echo "leaked $name"
    done
    echo pried
"#;

/// Starts a program without the capabilities that a Job's root does not have either. With
/// `CAP_SYS_PTRACE` one may look into every process, and with `CAP_SYS_ADMIN` or `CAP_PERFMON` into
/// the addresses and environments of all.
const LIKE_A_JOB: [&str; 3] = [
    "setpriv",
    "--bounding-set=-sys_ptrace,-sys_admin,-perfmon",
    "--inh-caps=-sys_ptrace,-sys_admin,-perfmon",
];

fn runs_true(words: &[&str]) -> bool {
    std::process::Command::new(words[0])
        .args(&words[1..])
        .arg("true")
        .stderr(std::process::Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// The words to put before a program to run it like a Job's, if that is possible here.
fn like_a_job() -> Option<&'static [&'static str]> {
    if !nix::unistd::geteuid().is_root() {
        // The capabilities are not there to begin with.
        return Some(&["env"]);
    }
    runs_true(&LIKE_A_JOB).then_some(&LIKE_A_JOB)
}

#[test]
fn the_memory_of_the_server_is_closed_to_commands_of_the_same_user() {
    let Some(words) = like_a_job() else {
        skip!("as root this needs setpriv, to give up capabilities");
    };
    let (server, secret) = secret_server(Server::builder().wrapped_in(words));
    // Control: another process of the same user, which has the same secret, is an open book.
    let control = json!({"cmd": ["sleep", "60"], "env": {"OWN": secret}});
    let control = server.spawn(&control)["pid"].to_string();
    assert_eq!(scan(&server, &control, &secret), "opened\nfound\n");
    let pid = server.pid().to_string();
    assert_eq!(scan(&server, &pid, &secret), "refused\n");
    // Every thread is a name of the same memory. One that has ended since is refused too.
    for task in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let task = task.unwrap().file_name().into_string().unwrap();
        assert_eq!(
            scan(&server, &format!("{pid}/task/{task}"), &secret),
            "refused\n",
            "{task}"
        );
    }
    // Nor is there another way in: addresses, descriptors, links.
    let pry = |pid: &str| {
        server
            .exec(&json!({"cmd": ["sh", "-c", PRY, "pry", pid]}))
            .stdout
    };
    assert_eq!(pry(&pid), "pried\n");
    assert!(
        pry(&control).contains("leaked environ"),
        "the control of that"
    );
    // Nor does a root that keeps all its capabilities pass them on to its commands.
    let (server, secret) = secret_server(Server::builder());
    let pid = server.pid().to_string();
    assert_eq!(scan(&server, &pid, &secret), "refused\n");
}

#[test]
fn a_command_of_another_process_id_space_finds_the_token_in_no_process() {
    // As PID 1 the program is more than one process; each has to keep the secret.
    let mut words = vec!["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];
    words.extend(LIKE_A_JOB);
    if !runs_true(&words) {
        skip!("needs root, setpriv, and unshare to make a process id namespace");
    }
    let (server, secret) = secret_server(Server::builder().wrapped_in(&words));
    let outcome = server.exec(&json!({"cmd": LOOK, "stdin": format!("{secret}\n"), "timeout": 60}));
    assert_eq!(outcome.stdout, "looked\n", "{}", outcome.stderr);
    // Every process here is the server's own, or the command that looks at them.
    let listed = server
        .exec(&json!({"cmd": "cd /proc && echo [0-9]*; echo $$"}))
        .stdout;
    let mut lines = listed.lines();
    let all: Vec<&str> = lines.next().unwrap().split(' ').collect();
    let own = lines.next().unwrap();
    assert!(all.contains(&"1") && all.contains(&own), "{listed}");
    for pid in all.into_iter().filter(|pid| *pid != own) {
        assert_eq!(
            scan(&server, pid, &secret),
            "refused\n",
            "process {pid} of {listed}"
        );
    }
}

#[test]
fn with_the_init_option_every_process_of_the_server_keeps_the_secret() {
    let Some(words) = like_a_job() else {
        skip!("as root this needs setpriv, to give up capabilities");
    };
    let script = format!("exec {} \"$0\" --init", words.join(" "));
    let builder = Server::builder().wrapped_in(&["sh", "-c", &script]);
    let (server, secret) = secret_server(builder);
    let parent = server
        .exec(&json!({"cmd": "echo $PPID"}))
        .stdout
        .trim()
        .to_owned();
    for pid in [server.pid().to_string(), parent] {
        assert_eq!(scan(&server, &pid, &secret), "refused\n", "process {pid}");
        let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        assert!(
            find(&environ, secret.as_bytes()).is_none(),
            "the environ of {pid}"
        );
    }
}

#[test]
fn the_log_holds_no_secret_even_when_it_tells_everything() {
    let (server, token) = secret_server(Server::builder().env("SBX_LOG", "debug"));
    let (quiet, quiet_token) = secret_server(Server::builder());
    let dir = TempDir::new();
    let secrets = [
        token.as_str(),
        quiet_token.as_str(),
        "wr0ng-t0ken-sent",
        "hf_bearer_secret",
        "env-v4lue-secret",
        "stdin-secret-1",
        "file-secret-2",
        "output-secret-3",
    ];
    for (server, token) in [(&server, &token), (&quiet, &quiet_token)] {
        let mut connection = server.connect();
        let headers = [
            ("Authorization", "Bearer hf_bearer_secret"),
            ("Cookie", "a=hf_bearer_secret"),
        ];
        let body = json!({"cmd": "cat; printf 'output-%s-3\\n' secret", "env": {"A": "env-v4lue-secret"}, "stdin": "stdin-secret-1"});
        let body = body.to_string();
        let reply = connection.request("POST", "/v1/exec", &headers, body.as_bytes());
        assert!(reply.text().contains("output-secret-3"));
        let target = format!("/v1/files/write?path={}", dir.join("file"));
        assert_eq!(
            connection
                .request("PUT", &target, &headers, b"file-secret-2")
                .status,
            200
        );
        // Failures are what logs are most talkative about.
        let bad = r#"{"cmd":["/none"],"env":{"A":"env-v4lue-secret"},"stdin":"stdin-secret-1"}"#;
        assert_eq!(
            connection
                .request("POST", "/v1/exec", &headers, bad.as_bytes())
                .status,
            400
        );
        let bad = r#"{"cmd":5,"env":{"A":"env-v4lue-secret"},"stdin":"stdin-secret-1"}"#;
        assert_eq!(
            connection
                .request("POST", "/v1/exec", &headers, bad.as_bytes())
                .status,
            400
        );
        assert_eq!(
            connection
                .request("POST", "/v1/exec", &headers, b"stdin-secret-1")
                .status,
            400
        );
        connection.token = Some("wr0ng-t0ken-sent".to_owned());
        assert_eq!(
            connection
                .request("GET", "/v1/processes", &headers, b"")
                .status,
            403
        );
        for line in [
            format!("X-Sandbox-Token : {token}"),
            format!("X-Sandbox-Token: {token}\0"),
            token.clone(),
        ] {
            let mut connection = server.connect();
            connection.send(
                format!("GET /v1/processes HTTP/1.1\r\nHost: localhost\r\n{line}\r\n\r\n")
                    .as_bytes(),
            );
            let received = connection.read_to_close();
            assert!(find(&received, b" 400 ").is_some());
            assert!(
                find(&received, token.as_bytes()).is_none(),
                "an answer repeats the token"
            );
        }
    }
    wait_until("the requests are logged", PATIENCE, || {
        server.log().lines().count() >= 5
    });
    assert!(
        quiet.log().lines().count() < server.log().lines().count(),
        "debug says more"
    );
    for log in [server.log(), quiet.log()] {
        for secret in secrets {
            assert!(!log.contains(secret), "{secret} in the log:\n{log}");
        }
    }
}

#[test]
fn no_answer_shows_a_token_or_the_environment_of_a_process() {
    let (server, secret) = secret_server(Server::builder());
    let body = json!({"cmd": "sleep 60", "env": {"A": "env-v4lue-secret"}, "tag": "t"});
    let started = server.spawn(&body);
    let id = started["id"].as_str().unwrap().to_owned();
    let one = server.get(&format!("/v1/processes/{id}")).json();
    let all = server.get("/v1/processes").json();
    let health = server.get("/health").json();
    for value in [&started, &one, &all, &health] {
        let text = Value::to_string(value);
        assert!(
            !text.contains(&secret) && !text.contains("env-v4lue-secret"),
            "{text}"
        );
    }
    assert_eq!(
        server.delete(&format!("/v1/processes/{id}")).json()["killed"],
        true
    );
}

#[test]
fn the_server_is_not_dumpable() {
    // So no signal that a command sends it writes the token into a core file. What shows this is
    // the owner of its files in /proc: the user's own while dumpable, root's otherwise.
    if !can_change_user() {
        skip!("needs root and setpriv: root's files are root's in both cases");
    }
    let dir = TempDir::new();
    let uid = spare_uid(0);
    let words = format!(
        "cd / && exec setpriv --reuid={uid} --regid={uid} --clear-groups {}",
        public_copy(&dir)
    );
    let server = Server::builder().wrapped_in(&["sh", "-c", &words]).start();
    let owner = |pid: &str| {
        std::fs::metadata(format!("/proc/{pid}/environ"))
            .unwrap()
            .uid()
    };
    assert_eq!(owner(&server.pid().to_string()), 0);
    let control = server.spawn(&json!({"cmd": ["sleep", "60"]}))["pid"].to_string();
    assert_eq!(
        owner(&control),
        uid,
        "what it starts is an ordinary process again"
    );
}
