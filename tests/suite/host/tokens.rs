//! Which token opens what, and that the two modes have no route in common.

use std::path::Path;

use serde_json::{Value, json};

use super::{SANDBOXES, list, needs_root, target};
use crate::fixture::{
    Answer, Ask, OUTER_ROUTES, OpenedBy, PATIENCE, Sandbox, Server, Subjects, TOKEN, TempDir,
    assert_error, is_alive, routes, wait_until,
};

/// Everything that can be asked in a workspace under `prefix`; most of it would leave a trace.
fn inside(prefix: &str, process: &str) -> Vec<Ask> {
    // No environment is made: that takes seconds.
    let names = Subjects::below(".")
        .with("process", process)
        .with("venv", "a:b");
    let mut asks = Vec::new();
    for route in routes().filter(|route| route.answer != Answer::Endless) {
        let ask = route.ask(prefix, &names);
        asks.extend(ask.by_alias());
        asks.push(ask);
    }
    asks.push(Ask::new(
        "HEAD",
        format!("{prefix}/files/read?path=kept"),
        "",
    ));
    asks
}

/// The routes outside of the workspaces that these tokens open, about these sandboxes.
fn outside(opened_by: OpenedBy, ids: &[&str]) -> Vec<Ask> {
    let mut asks = Vec::new();
    for route in OUTER_ROUTES {
        if route.opened_by == opened_by {
            let ids = if route.is_of_sandbox() { ids } else { &[""] };
            asks.extend(ids.iter().flat_map(|id| route.ask(id).and_its_head()));
        }
    }
    asks
}

/// What the host token manages.
fn management(ids: &[&str]) -> Vec<Ask> {
    let mut asks = vec![
        Ask::new("OPTIONS", SANDBOXES.to_owned(), ""),
        Ask::new("GET", "/v1/unknown".to_owned(), ""),
        Ask::new("POST", "/v1/exec".to_owned(), r#"{"cmd": "true"}"#),
    ];
    asks.extend(outside(OpenedBy::Host, ids));
    asks
}

/// Two sandboxes with something to lose, and one that is gone.
struct Estate<'a> {
    server: &'a Server,
    a: Sandbox<'a>,
    b: Sandbox<'a>,
    gone: Sandbox<'a>,
    processes: Vec<Value>,
}

const NEVER: &str = "0123456789abcdef01234567";

impl<'a> Estate<'a> {
    fn new(server: &'a Server) -> Self {
        let [a, b, gone] = [(); 3].map(|()| server.sandbox());
        assert!(super::delete(server, &gone.id));
        let processes = [&a, &b].map(|sandbox| {
            sandbox.sh("echo kept > kept");
            let process =
                sandbox.spawn(&json!({"cmd": "touch typed; cat >> typed", "id": "clerk"}));
            wait_until("the clerk is there", PATIENCE, || {
                sandbox.home.join("typed").exists()
            });
            process
        });
        let processes = processes.into();
        Self {
            server,
            a,
            b,
            gone,
            processes,
        }
    }

    /// Asserts that nothing has happened to it.
    #[track_caller]
    fn assert_untouched(&self, what: &str) {
        assert_eq!(list(self.server).len(), 2, "{what}");
        for (sandbox, process) in [&self.a, &self.b].into_iter().zip(&self.processes) {
            let mut names = super::names_in(&sandbox.home);
            names.retain(|name| !name.starts_with('.'));
            assert_eq!(names, ["kept", "typed"], "{what}");
            let read = |name| std::fs::read_to_string(sandbox.home.join(name)).unwrap();
            assert_eq!(
                (read("kept"), read("typed")),
                ("kept\n".to_owned(), String::new()),
                "{what}"
            );
            let pid = i32::try_from(process["pid"].as_i64().unwrap()).unwrap();
            assert!(is_alive(pid), "{what}");
        }
    }

    /// Everything that can be asked, each with whose token opens it: none for the host's alone.
    fn everything(&self) -> Vec<(Ask, Option<&str>)> {
        let ids = [&*self.a.id, &*self.b.id, &*self.gone.id, NEVER];
        let mut all: Vec<_> = management(&ids)
            .into_iter()
            .map(|ask| (ask, None))
            .collect();
        for id in ids {
            all.extend(
                inside(&target(id, ""), "clerk")
                    .into_iter()
                    .map(|ask| (ask, Some(id))),
            );
            let outside = outside(OpenedBy::Both, &[id]);
            all.extend(outside.into_iter().map(|ask| (ask, Some(id))));
            all.push((Ask::new("GET", target(id, "/unknown"), ""), Some(id)));
        }
        all
    }
}

/// The whole matrix of tokens and routes: what is refused, is refused and leaves no trace; and what
/// is not refused is not refused for its token.
fn check_matrix(is_strict: bool) {
    let builder = Server::host().env("SBX_STRICT_SCOPES", u8::from(is_strict));
    let server = builder.start();
    let estate = Estate::new(&server);
    let Estate { a, b, gone, .. } = &estate;
    let (most, last) = a.token.split_at(a.token.len() - 1);
    let wrong = format!("{most}{}", if last == "0" { "1" } else { "0" });
    let callers: [(&str, &str); 8] = [
        ("", ""),
        ("empty", ""),
        ("wrong", &wrong),
        ("prefix", &a.token[..32]),
        ("host", TOKEN),
        (&a.id, &a.token),
        (&b.id, &b.token),
        (&gone.id, &gone.token),
    ];
    let mut opened = Vec::new();
    for (ask, owner) in estate.everything() {
        // Both tokens open a sandbox as a whole, and both get 404 for a missing route.
        let is_for_both = owner.is_some_and(|id| {
            ["", "/pause", "/resume", "/metrics", "/unknown"]
                .iter()
                .any(|path| target(id, path) == ask.target)
        });
        for (caller, token) in callers {
            let may = match owner {
                None => caller == "host",
                Some(_) if caller == "host" => !is_strict || is_for_both,
                Some(owner) => caller == owner,
            };
            if may {
                opened.push((ask.method, ask.target.clone(), token.to_owned()));
                continue;
            }
            let tokens = [token];
            let reply = ask.by(&server, if caller.is_empty() { &[] } else { &tokens });
            let what = format!("{} {} by {caller:?}", ask.method, ask.target);
            assert_eq!(reply.status, 403, "{what}: {}", reply.text());
            if ask.method != "HEAD" {
                assert_eq!(reply.code(), "forbidden", "{what}");
            }
        }
    }
    estate.assert_untouched("after all that was refused");

    // Now what is not refused, the ends last and that of all at the very end.
    let rank = |method: &str, target: &str| match (method, target.matches('/').count()) {
        ("DELETE", 2) => 2,
        ("DELETE", 3) => 1,
        _ => 0,
    };
    opened.sort_by_key(|(method, target, _)| rank(method, target));
    let all = estate.everything();
    for (method, target, token) in &opened {
        let (ask, _) = all
            .iter()
            .find(|(ask, _)| ask.method == *method && ask.target == *target)
            .unwrap();
        let reply = ask.by(&server, &[token]);
        assert_ne!(reply.status, 403, "{method} {target}: {}", reply.text());
        let nowhere = target.contains(NEVER)
            || target.contains(&gone.id) && *method != "DELETE"
            || target.contains("unknown")
            || target == "/v1/exec";
        if nowhere {
            assert_eq!(reply.status, 404, "{method} {target}: {}", reply.text());
        }
    }
    assert_eq!(list(&server).len(), 0);
}

#[test]
fn every_token_opens_its_own_and_nothing_else() {
    needs_root!();
    check_matrix(false);
}

#[test]
fn strict_scopes_keep_the_host_token_out_of_what_is_inside() {
    needs_root!();
    check_matrix(true);
}

#[test]
fn two_tokens_in_one_request_open_nothing() {
    needs_root!();
    let server = Server::host().start();
    let estate = Estate::new(&server);
    let (a, b) = (&estate.a, &estate.b);
    let pairs = [
        [&*a.token, &*b.token],
        [&*b.token, &*a.token],
        [TOKEN, &*a.token],
        [&*a.token, TOKEN],
        [TOKEN, ""],
        ["wrong", TOKEN],
    ];
    for (ask, _) in estate.everything() {
        for pair in &pairs {
            assert_eq!(
                ask.by(&server, pair).status,
                403,
                "{} {}",
                ask.method,
                ask.target
            );
        }
    }
    let joined = format!("{},{TOKEN}", a.token);
    let run = Ask::new("POST", a.target("exec"), r#"{"cmd": "touch ran"}"#);
    assert_eq!(run.by(&server, &[&joined]).status, 403);
    estate.assert_untouched("after requests with two tokens");
}

#[test]
fn the_token_of_a_deleted_sandbox_opens_nothing_of_its_successors() {
    needs_root!();
    // One user, so that the next sandbox has everything of the last but the id.
    let server = super::with_users(1).start();
    let first = server.sandbox();
    assert!(super::delete(&server, &first.id));
    let second = server.sandbox();
    assert_eq!(first.uid, second.uid);
    for (ask, id) in inside(&target(&second.id, ""), "p-1")
        .into_iter()
        .map(|ask| (ask, &second.id))
        .chain(
            inside(&target(&first.id, ""), "p-1")
                .into_iter()
                .map(|ask| (ask, &first.id)),
        )
    {
        let reply = ask.by(&server, &[&first.token]);
        let expected = if *id == first.id { 404 } else { 403 };
        assert_eq!(reply.status, expected, "{} {}", ask.method, ask.target);
    }
    assert_eq!(
        super::names_in(&second.home).len(),
        2,
        "only what every home has"
    );
}

#[test]
fn a_token_is_the_same_whoever_asks_and_differs_from_server_to_server() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    for _ in 0..3 {
        let told = server.get(&target(&sandbox.id, "/token"));
        assert_eq!(told.json()["token"], sandbox.token.as_str());
    }
    let other = Server::host()
        .wrapped_in(&["env", "SBX_TOKEN=another-token"])
        .start();
    let mut connection = other.connect();
    connection.token = Some(sandbox.token.clone());
    assert_eq!(
        connection
            .request("GET", &sandbox.target("processes"), &[], b"")
            .status,
        403
    );
}

#[test]
fn a_sandbox_is_described_to_its_own_token_and_to_no_other() {
    needs_root!();
    for is_strict in [0, 1] {
        let server = Server::host().env("SBX_STRICT_SCOPES", is_strict).start();
        let (a, b) = (server.sandbox(), server.sandbox());
        let ask = |method, of: &Sandbox<'_>, token: &str| {
            Ask::new(method, target(&of.id, ""), "").by(&server, &[token])
        };
        let own = ask("GET", &a, &a.token);
        assert_eq!(own.status, 200, "{}", own.text());
        assert_eq!(own.json(), ask("GET", &a, TOKEN).json());
        assert_eq!(own.json()["id"], *a.id);
        assert!(!own.text().contains(&a.token), "{}", own.text());
        assert_eq!(ask("HEAD", &a, &a.token).status, 200);
        assert_eq!(ask("OPTIONS", &a, &a.token).status, 204);
        for method in ["GET", "HEAD", "OPTIONS"] {
            assert_eq!(ask(method, &b, &a.token).status, 403, "{method}");
            for what in [SANDBOXES.to_owned(), target(&a.id, "/token")] {
                let reply = Ask::new(method, what.clone(), "").by(&server, &[&a.token]);
                assert_eq!(reply.status, 403, "{method} {what}");
            }
        }
        assert!(super::delete(&server, &a.id));
        assert_error(&ask("GET", &a, &a.token), 404, "not_found");
    }
}

#[test]
fn a_sandbox_ends_itself_with_its_own_token() {
    needs_root!();
    let server = Server::host().env("SBX_STRICT_SCOPES", 1).start();
    let (a, b) = (server.sandbox(), server.sandbox());
    let end = |of: &Sandbox<'_>, token: &str| {
        let ask = Ask::new("DELETE", target(&of.id, ""), "");
        ask.by(&server, &[token])
    };
    assert_eq!(end(&b, &a.token).status, 403);
    assert_eq!(list(&server).len(), 2);
    assert_eq!(end(&a, &a.token).json()["deleted"], true);
    assert_eq!(
        end(&a, &a.token).json()["deleted"],
        false,
        "and again, which is no error"
    );
    assert_eq!(end(&b, TOKEN).json()["deleted"], true);
}

#[test]
fn a_host_has_no_machine_to_be_used() {
    needs_root!();
    let dir = TempDir::new();
    std::fs::write(dir.join("kept"), "kept").unwrap();
    let server = Server::host().start();
    server.sandbox();
    for ask in inside("/v1", "p-1") {
        let reply = ask.by(&server, &[TOKEN]);
        assert_eq!(reply.status, 404, "{} {}", ask.method, ask.target);
        if ask.method != "HEAD" {
            assert_error(&reply, 404, "not_found");
            let text = reply.text();
            assert!(
                text.contains("host mode") && text.contains(SANDBOXES),
                "{text}"
            );
        }
    }
    let run = json!({"cmd": format!("touch {}", dir.join("ran"))});
    for route in ["/v1/exec", "/v1/processes", "/v1/procs"] {
        assert_eq!(server.post(route, &run).status, 404);
    }
    let write = format!("/v1/files/write?path={}", dir.join("written"));
    assert_eq!(server.put(&write, b"x").status, 404);
    let remove = format!("/v1/files/delete?path={}", dir.join("kept"));
    assert_eq!(server.delete(&remove).status, 404);
    assert_eq!(super::names_in(dir.path()), ["kept"]);
}

#[test]
fn a_dedicated_machine_has_no_sandboxes() {
    let homes = TempDir::new();
    let server = Server::builder()
        .env("SBX_HOMES_DIR", homes.path().display())
        .start();
    let mut asks = management(&[NEVER]);
    asks.retain(|ask| ask.target.starts_with(SANDBOXES));
    asks.extend(inside(&target(NEVER, ""), "p-1"));
    asks.push(Ask::new("DELETE", target(NEVER, ""), ""));
    for ask in asks {
        let reply = ask.by(&server, &[TOKEN]);
        assert_eq!(reply.status, 404, "{} {}", ask.method, ask.target);
        if ask.method != "HEAD" {
            let text = reply.text();
            assert!(
                text.contains("dedicated mode") && text.contains("/v1/exec"),
                "{text}"
            );
        }
        assert_eq!(ask.by(&server, &["wrong"]).status, 403);
    }
    assert!(
        Path::new(&homes.join(""))
            .read_dir()
            .unwrap()
            .next()
            .is_none()
    );
    assert_eq!(server.get("/health").json()["mode"], "dedicated");
}

/// What a sandbox asks of a server that has no token, with the answers' statuses. `OUTSIDE` has the routes outside of the
/// workspaces.
const NEIGHBOUR: &str = r#"
import http.client, json, os, sys
port, other = int(sys.argv[1]), sys.argv[2]
inside = f"/v1/sandboxes/{other}"
outside = [(method, path, body, {}) for method, path, body in json.loads(os.environ["OUTSIDE"])]
for method, path, body, headers in outside + [
    ("POST", inside + "/exec", json.dumps({"cmd": "echo ran > ran"}), {}),
    ("GET", inside + "/files/read?path=secret", None, {"X-Sandbox-Token": "any"}),
    ("GET", inside + "/proxy/80/health", None, {}),
    ("OPTIONS", inside + "/exec", None, {"Origin": "http://a.example", "Access-Control-Request-Method": "POST"}),
    ("GET", "/v2/sandboxes", None, {"X-API-KEY": "any"}),
    ("GET", "/health", None, {"Host": f"80-{other}.localhost"}),
    ("POST", "/mcp", "{}", {}),
    ("GET", "/console", None, {}),
    ("GET", "/nothing", None, {}),
]:
    for address in sys.argv[3:]:
        connection = http.client.HTTPConnection(address, port)
        # The second request of a connection is as the first.
        for turn in range(2):
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            answer.read()
            print(answer.status, method, path, headers.get("Host", ""), address)
"#;

/// Asks for a command in another sandbox and closes the connection at once.
const HASTY: &str = r#"
import socket, sys
body = '{"cmd":"echo ran > hasty","on_disconnect":"keep"}'
head = f"POST /v1/sandboxes/{sys.argv[2]}/exec HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
for n in range(200):
    connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    connection.sendall((head + body).encode())
    connection.close()
"#;

#[test]
fn without_a_token_no_sandbox_manages_the_host_or_another() {
    needs_root!();
    let server = Server::host()
        .no_token()
        .env("SBX_INSECURE", 1)
        .env("SBX_BIND", "0.0.0.0")
        .start();
    let victim = server.sandbox();
    victim.sh("echo mine > secret");
    let port = server.address.port();
    let isolations = server.get("/health").json()["isolation"]["isolations"].clone();
    let all = [OpenedBy::Anybody, OpenedBy::Both, OpenedBy::Host];
    let outside: Vec<_> = (all.into_iter())
        .flat_map(|opened_by| outside(opened_by, &[&victim.id]))
        .map(|ask| json!([ask.method, ask.target, ask.body]))
        .collect();
    let environment = json!({ "OUTSIDE": json!(outside).to_string() });
    for isolation in isolations.as_array().unwrap() {
        let sandbox = server.sandbox_with(&json!({ "isolation": isolation }));
        // Every address that leads to the machine, if it has another than loopback.
        let addresses = "127.0.0.1 127.0.0.2 $(hostname -I 2>/dev/null | cut -d' ' -f1)";
        let id = &victim.id;
        let outcome = sandbox.exec(&json!({
            "cmd": format!("exec python3 - {port} {id} {addresses}"), "stdin": NEIGHBOUR, "env": environment
        }));
        assert_eq!(outcome.code(), Some(0), "{outcome:?}");
        assert!(outcome.stdout.lines().count() >= 80, "{outcome:?}");
        for line in outcome.stdout.lines() {
            // At the name of a port all paths are the server's behind it, in a build with E2B's door.
            let end = if cfg!(feature = "e2b") { "  " } else { " " };
            let is_health = ["GET", "HEAD"]
                .iter()
                .any(|method| line.contains(&format!(" {method} /health{end}")));
            let expected = if is_health { "200 " } else { "403 " };
            assert!(line.starts_with(expected), "{isolation}: {line}");
        }
        // Nor if nobody waits for the answer: the kernel no longer knows who has asked.
        let outcome = sandbox.exec(&json!({
            "cmd": format!("exec python3 - {port} {id}"), "stdin": HASTY
        }));
        assert_eq!(outcome.code(), Some(0), "{outcome:?}");
    }
    wait_until("all is answered", PATIENCE, || {
        let metrics = server.get("/v1/metrics").text();
        metrics.lines().any(|line| line == "sbx_connections 1")
    });
    // The operator of the machine is served, and all is as it was.
    assert_eq!(victim.sh("cat secret; ls"), "mine\nsecret\n");
    assert_eq!(
        list(&server).len(),
        isolations.as_array().unwrap().len() + 1
    );
    // With a token, it decides.
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let (port, token) = (server.address.port(), &sandbox.token);
    let target = target(&sandbox.id, "");
    let cmd = format!(
        "exec python3 -c 'import http.client; c = http.client.HTTPConnection(\"127.0.0.1\", {port}); \
         c.request(\"GET\", \"{target}\", headers={{\"X-Sandbox-Token\": \"{token}\"}}); print(c.getresponse().status)'"
    );
    assert_eq!(sandbox.sh(&cmd), "200\n");
}
