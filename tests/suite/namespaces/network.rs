//! A sandbox with a network of its own: its loopback interface is nobody else's, and the server reaches it.

use std::net::TcpListener;

use serde_json::{Value, json};

use super::{Way, described, needs_namespaces, sandbox, sandbox_with};
use crate::fixture::{
    INSIDE, Lan, OUTSIDE, PATIENCE, Sandbox, Server, Wiretap, assert_error, wait_until,
};
use crate::network::{MOVE_FILES, MOVED, Place, allow, sh, visitors, ways_to_leave, with};
use crate::skip;
use crate::walls::probe::{Plan, Probe};

/// Listens in a sandbox until it ends, and answers everybody.
fn listen(sandbox: &Sandbox<'_>, address: &str, port: u16, text: &str) {
    let script = format!(
        "import socket\n\
         family = socket.AF_INET6 if ':' in '{address}' else socket.AF_INET\n\
         s = socket.socket(family); s.bind(('{address}', {port})); s.listen()\n\
         while True:\n \
         c = s.accept()[0]; c.recv(65536)\n \
         c.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Length: {}\\r\\nConnection: close\\r\\n\\r\\n{text}'); c.close()",
        text.len()
    );
    sandbox.spawn(&json!({ "cmd": ["python3", "-c", script] }));
    let reply = sandbox.get(&format!("ports/{port}/wait?timeout=20"));
    assert_eq!(reply.status, 200, "{}", reply.text());
}

#[test]
fn two_sandboxes_have_a_port_each_of_the_same_number() {
    needs_namespaces!();
    for way in Way::BOTH {
        let server = way.builder().start();
        let (one, other) = (sandbox(&server), sandbox(&server));
        listen(&one, "127.0.0.1", 8000, "one");
        listen(&other, "0.0.0.0", 8000, "other");
        listen(&other, "::1", 8001, "six");
        for (sandbox, port, text) in [
            (&one, 8000, "one"),
            (&other, 8000, "other"),
            (&other, 8001, "six"),
        ] {
            let reply = sandbox.get(&format!("proxy/{port}/"));
            assert_eq!((reply.status, reply.text().as_str()), (200, text));
        }
        let ports = |sandbox: &Sandbox<'_>| -> Vec<Value> {
            let listed = sandbox.get("ports").json();
            let ports = listed.as_array().or_else(|| listed["ports"].as_array());
            ports
                .unwrap()
                .iter()
                .map(|found| found["port"].clone())
                .collect()
        };
        assert_eq!(ports(&one), [json!(8000)]);
        assert_eq!(ports(&other), [json!(8000), json!(8001)]);
        // Nothing listens there.
        assert_error(&one.get("proxy/8001/"), 502, "unreachable");
        let reply = one.get("ports/8001/wait?timeout=0.1");
        assert_eq!(reply.json()["listening"], false, "{}", reply.text());
        // A socket in the home is reached as ever, by any name.
        one.spawn(&json!({ "cmd": ["python3", "-c",
            "import os, socketserver, http.server as h\n\
             class S(socketserver.UnixStreamServer):\n def get_request(self):\n  return self.socket.accept()[0], ('', 0)\n\
             S(os.environ['SBX_PROXY_DIR'] + '/9000.sock', h.SimpleHTTPRequestHandler).serve_forever()"] }));
        let reply = one.get("ports/9000/wait?timeout=20");
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(one.get("proxy/9000/").status, 200);
    }
}

#[test]
fn nothing_outside_is_reached_and_nothing_outside_reaches_in() {
    needs_namespaces!();
    let outside = TcpListener::bind("127.0.0.1:0").unwrap();
    let outside = outside.local_addr().unwrap().to_string();
    for way in Way::BOTH {
        let server = way.builder().start();
        let (one, other) = (sandbox(&server), sandbox(&server));
        let probe = Probe::new(&one);
        listen(&other, "0.0.0.0", 8000, "other");
        // A process that holds a name that has no path.
        Probe::new(&other).hold(&[&["abstract-listen", "sbx-test-inside"]]);
        let mut plan = Plan::default();
        let own = server.address.to_string();
        for address in [own.as_str(), outside.as_str(), "127.0.0.1:8000"] {
            plan.add(&["tcp-connect", address], "ECONNREFUSED");
        }
        for address in ["192.0.2.1:80", "10.0.0.1:80", "169.254.169.254:80"] {
            plan.add(&["tcp-connect", address], "ENETUNREACH");
            plan.add(&["udp-send", "0.0.0.0:0", address], "ENETUNREACH");
        }
        plan.add(
            &["abstract-connect", "sbx-test-inside"],
            "ECONNREFUSED|EPERM",
        );
        // What is its own works.
        for address in ["127.0.0.1:8000", "0.0.0.0:9000", own.as_str()] {
            plan.add(&["tcp-bind", address], "ok");
        }
        plan.add(&["udp-echo"], "ok");
        probe.check(&plan);
        assert!(std::net::TcpStream::connect("127.0.0.1:8000").is_err());
        // The server still answers who comes from outside.
        assert_eq!(server.get("/health").status, 200);
    }
}

#[test]
fn an_open_network_is_the_machines_with_its_rules() {
    needs_namespaces!();
    let outside = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = outside.local_addr().unwrap().to_string();
    for way in Way::BOTH {
        let server = way.builder().start();
        let open = sandbox_with(&server, json!({ "network": "open" }));
        let probe = Probe::new(&open);
        let mut plan = Plan::default();
        plan.add(&["tcp-connect", &address], "ok");
        plan.add(&["tcp-bind", "127.0.0.1:0"], "EACCES");
        plan.add(&["udp-echo"], "ok");
        probe.check(&plan);
        // A command can have less.
        let mut command = probe.command(&[&["tcp-connect", &address]]);
        command["network"] = json!("blocked");
        let outcome = open.exec(&command);
        assert!(outcome.stdout.contains("ENETUNREACH"), "{outcome:?}");
        let blocked = sandbox(&server);
        let reply = blocked.post("exec", &json!({ "cmd": "true", "network": "open" }));
        assert_error(&reply, 400, "too_wide");
    }
}

#[test]
fn it_is_given_ports_of_its_own() {
    needs_namespaces!();
    let server = Server::host().start();
    let sandbox = sandbox_with(&server, json!({ "tcp_ports": 2 }));
    assert_eq!(described(&sandbox)["tcp_ports"], json!([8000, 8001]));
    assert_eq!(
        sandbox.sh("echo $PORT $SBX_TCP_PORTS").trim(),
        "8000 8000,8001"
    );
    listen(&sandbox, "127.0.0.1", 8001, "given");
    assert_eq!(sandbox.get("proxy/8001/").text(), "given");
    let open = json!({ "isolation": "namespaces", "tcp_ports": 1 });
    assert_error(&server.post("/v1/sandboxes", &open), 400, "unavailable");
}

#[test]
fn a_wait_ends_with_the_sandbox() {
    needs_namespaces!();
    let server = Server::host().start();
    let sandbox = sandbox(&server);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| sandbox.get("ports/8000/wait?timeout=60").text());
        let target = format!("/v1/sandboxes/{}", sandbox.id);
        assert_eq!(server.delete(&target).status, 200);
        let answer = waiting.join().unwrap();
        assert!(!answer.contains("\"listening\":true"), "{answer}");
    });
}

/// What lets through the rules and is the sandbox's own network.
fn list(rules: &[&str]) -> Value {
    with(allow(rules), &json!({ "isolation": "namespaces" }))
}

#[test]
fn a_list_is_a_network_of_its_own_with_one_way_out() {
    needs_namespaces!();
    let Some(lan) = Lan::new() else {
        skip!("needs ip of iproute2, to make hosts");
    };
    let (web, other) = (lan.serve(OUTSIDE, "the web"), lan.serve(OUTSIDE, "another"));
    for way in Way::BOTH {
        let server = lan.start(way.builder());
        let place = Place::sandbox(&server, &list(&[&web.to_string()]));
        let sandbox = place.sandbox.as_ref().unwrap();
        let shown = described(sandbox);
        assert_eq!(shown["restrictions"], json!([]));
        assert_eq!(shown["network"]["mode"], "allowlist");
        let none = json!({});
        for options in [
            "",
            "--proxytunnel",
            "--proxy socks5://$GATE",
            "--proxy socks5h://$GATE",
        ] {
            let gate = "GATE=${HTTP_PROXY#http://}";
            let curl = |url| format!("{gate}; curl -s {options} http://{url}/; true");
            let page = sh(&place, &none, &curl(&web));
            assert!(page.starts_with("the web\n"), "{options}: {page}");
            let page = sh(&place, &none, &curl(&other));
            assert!(!page.contains("another"), "{options}: {page}");
        }
        let report = server.get(&place.target("network")).json();
        assert_eq!(
            (&report["allowed"], &report["refused"]),
            (&json!(4), &json!(4))
        );
        // Its own servers are reached without the proxy, inside and from outside.
        listen(sandbox, "127.0.0.1", 8000, "own");
        for host in ["localhost", "127.0.0.1"] {
            assert_eq!(
                sh(&place, &none, &format!("curl -sS http://{host}:8000/")),
                "own"
            );
        }
        assert_eq!(sandbox.get("proxy/8000/").text(), "own");
        // Another sandbox has another network.
        let twin = Place::sandbox(&server, &list(&[&web.to_string()]));
        let curl = "curl -sS http://127.0.0.1:8000/ 2>&1; true";
        assert!(!sh(&twin, &none, curl).contains("own"));
        assert!(sh(&twin, &none, &format!("curl -sS http://{web}/")).starts_with("the web\n"));
    }
}

#[test]
fn a_command_has_less_than_the_list_of_its_sandbox() {
    needs_namespaces!();
    let Some(lan) = Lan::new() else {
        skip!("needs ip of iproute2, to make hosts");
    };
    let (one, two) = (lan.serve(OUTSIDE, "one"), lan.serve(OUTSIDE, "two"));
    let (one, two) = (one.to_string(), two.to_string());
    for way in Way::BOTH {
        let server = lan.start(way.builder());
        let place = Place::sandbox(&server, &list(&[&one, &two]));
        let gate = sh(&place, &json!({}), "echo ${HTTP_PROXY#http://}");
        let both = format!(
            "curl -sS http://{one}/ | head -n 1; curl -sS http://{two}/ | head -n 1;
            curl -s -x {} http://{one}/ || true",
            gate.trim()
        );
        let said = sh(&place, &allow(&[&two]), &both);
        assert!(
            said.contains("not_allowed") && said.ends_with("two\n"),
            "{said}"
        );
        let blocked = json!({ "network": "blocked" });
        let said = sh(
            &place,
            &blocked,
            &format!("curl -sS http://{one}/ 2>&1 || true"),
        );
        assert!(!said.contains("one\n"), "{said}");
        let wider = with(json!({ "cmd": "true" }), &allow(&["other.example"]));
        assert_error(&place.post("exec", &wider), 400, "too_wide");
    }
}

/// Landlock's rules for the network concern directories, and the root is another one here.
#[test]
fn files_are_moved_between_directories_under_every_network() {
    needs_namespaces!();
    let networks = ["open", "blocked"].map(|word| json!({ "network": word }));
    let [open, blocked] = &networks;
    let (none, narrow) = (allow(&[]), allow(&["one.example"]));
    for way in Way::BOTH {
        let server = way.builder().start();
        for (whole, commands) in [
            (open, &[open, &none, blocked][..]),
            (&narrow, &[&narrow, &none, blocked]),
            (blocked, &[blocked]),
        ] {
            let own = json!({ "isolation": "namespaces" });
            let place = Place::sandbox(&server, &with(whole.clone(), &own));
            for directory in ["$HOME", "/tmp", "/dev/shm"] {
                let script = format!("cd {directory} && python3 -c \"{MOVE_FILES}\"");
                for network in commands {
                    let outcome = place.exec(&json!(script), network);
                    assert_eq!(
                        outcome.stdout, MOVED,
                        "{whole} {network} {directory}: {outcome:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn no_socket_of_its_own_network_leads_out() {
    needs_namespaces!();
    let Some(lan) = Lan::new() else {
        skip!("needs ip of iproute2, to make hosts");
    };
    let web = lan.serve(OUTSIDE, "the web");
    let tap = Wiretap::start(&lan);
    for way in Way::BOTH {
        let server = lan.start(way.builder());
        let place = Place::sandbox(&server, &list(&[&web.to_string()]));
        let gate = sh(&place, &json!({}), "echo ${HTTP_PROXY##*:}");
        let gate: u16 = gate.trim().parse().unwrap();
        let (at_gate, outside) = (lan.listen(OUTSIDE, gate), lan.listen(OUTSIDE, 0));
        let inside = lan.inside.run(|| TcpListener::bind("0.0.0.0:0").unwrap());
        let port = |server: &TcpListener| server.local_addr().unwrap().port();
        let targets = [
            format!("{OUTSIDE}:{gate}"),
            format!("{OUTSIDE}:{}", port(&outside)),
            format!("127.0.0.1:{}", port(&inside)),
            format!("127.0.0.2:{gate}"),
            format!("{INSIDE}:{}", port(&inside)),
            server.address.to_string(),
        ];
        let mut plan = Plan::default();
        for target in &targets {
            for steps in ways_to_leave() {
                let steps: Vec<&str> = steps.iter().map(String::as_str).collect();
                let act = [&["leave", target.as_str()], &steps[..]].concat();
                plan.add(
                    &act,
                    "ENETUNREACH|ECONNREFUSED|EHOSTUNREACH|EISCONN|EINVAL|EADDRNOTAVAIL|ENODEV|EINPROGRESS",
                );
            }
            plan.add(&["udp-send", "0.0.0.0:0", target], "ENETUNREACH|ok");
        }
        place.check(&plan, &json!({}));
        for server in [&at_gate, &outside, &inside] {
            assert_eq!(visitors(server), 0);
        }
    }
    assert_eq!(tap.finish(), Vec::<String>::new());
}

#[test]
fn the_way_out_ends_with_the_sandbox() {
    needs_namespaces!();
    for way in Way::BOTH {
        let server = way.builder().start();
        let pid = server.inner_pid();
        let threads = || -> usize {
            let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
            let names = tasks
                .flatten()
                .map(|task| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default());
            names.filter(|name| name.trim() == "network").count()
        };
        for _ in 0..3 {
            let sandbox = server.sandbox_with(&list(&["one.example"]));
            sandbox.sh("true");
            // A thread has its name when it first runs.
            wait_until("it has a thread", PATIENCE, || threads() == 1);
            sandbox.delete();
            wait_until("its thread ends", PATIENCE, || threads() == 0);
        }
    }
}

/// A socket that a command with a narrower list has made, and passed to one with the list of the sandbox.
#[test]
fn a_socket_of_a_narrower_command_leads_nowhere_else() {
    needs_namespaces!();
    let Some(lan) = Lan::new() else {
        skip!("needs ip of iproute2, to make hosts");
    };
    let inside = lan.inside.run(|| TcpListener::bind("0.0.0.0:0").unwrap());
    let port = inside.local_addr().unwrap().port();
    let take = "import os, socket, sys
s = socket.socket(socket.AF_UNIX); s.bind('u'); s.listen()
_, passed, _, _ = socket.recv_fds(s.accept()[0], 1, 8)
for fd in passed:
    for port in sys.argv[1:]:
        try: socket.socket(fileno=os.dup(fd)).connect(('127.0.0.1', int(port))); print('connected to', port)
        except OSError as error: print(error)
try: socket.socket(fileno=passed[0]).listen(); print(socket.socket(fileno=os.dup(passed[0])).getsockname()[0])
except OSError as error: print(error)";
    let give = "import socket, time
u = socket.socket(socket.AF_UNIX)
while True:
    try: u.connect('u'); break
    except OSError: time.sleep(0.01)
made = [socket.socket(*kind) for kind in ((socket.AF_INET, socket.SOCK_STREAM), (socket.AF_INET, socket.SOCK_STREAM))]
socket.send_fds(u, [b'x'], [s.fileno() for s in made])";
    for way in Way::BOTH {
        let server = lan.start(way.builder());
        let place = Place::sandbox(&server, &list(&["one.example", "two.example"]));
        let ports = [port, server.address.port()].map(|port| port.to_string());
        let words = ["python3", "-c", take, &ports[0], &ports[1]];
        let taker = place.post("processes", &json!({ "cmd": words, "id": "taker" }));
        assert_eq!(taker.status, 200, "{}", taker.text());
        let narrow = allow(&["one.example"]);
        let given = place.exec(&json!(["python3", "-c", give]), &narrow);
        assert_eq!(given.code(), Some(0), "{given:?}");
        let logs = place.target("processes/taker/logs?follow=1");
        let logs = server.get(&logs).text();
        assert!(logs.contains("refused"), "{logs}");
        assert!(!logs.contains("connected"), "{logs}");
        assert_eq!(visitors(&inside), 0);
        // The gates are the server's, and no servers of the sandbox.
        let sandbox = place.sandbox.as_ref().unwrap();
        let ports = sandbox.get("ports").json();
        let listed = ports.as_array().or_else(|| ports["ports"].as_array());
        assert_eq!(listed.map(Vec::len), Some(0), "{ports}");
    }
}
