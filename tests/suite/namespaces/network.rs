//! A sandbox with a network of its own: its loopback interface is nobody else's, and the server reaches it.

use std::net::TcpListener;

use serde_json::{Value, json};

use super::{Way, described, needs_namespaces, sandbox, sandbox_with};
use crate::fixture::{Sandbox, Server, assert_error};
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
