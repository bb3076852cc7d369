//! The promise of the published contract: the server does what `/openapi.json` says, and says all that
//! it does.
//!
//! schemathesis makes requests from the contract, sensible ones and nonsense, and compares every answer
//! with it: status, content type, headers, fields, events. It also uses what one answer holds for the
//! next request. What it is told and what it may not do is in `tests/client/contract.py`.
//!
//! The paths that it makes up are random, and in dedicated mode they are the machine's: there the
//! machine is a directory with a shell in it, and the server has no privileges.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::client::environment;
use crate::fixture::{
    BINARY, OUTER_ROUTES, Server, TempDir, has_namespaces, is_root, routes, spare_uid,
};
use crate::skip;

/// What the suite was written against; another one may find more, and fail for it.
const SCHEMATHESIS: &str = "schemathesis==4.32.5";

#[test]
fn the_contract_is_for_everybody() {
    let server = Server::start();
    let with_token = server.get("/openapi.json");
    let mut stranger = server.connect();
    stranger.token = None;
    let without_token = stranger.request("GET", "/openapi.json", &[], b"");
    assert_eq!(without_token.status, 200, "{}", without_token.text());
    assert_eq!(without_token.body, with_token.body);
    assert_eq!(
        without_token.header("content-type"),
        Some("application/json")
    );
    assert_eq!(without_token.json()["openapi"], "3.1.0");
    assert_eq!(server.post("/openapi.json", &Value::Null).status, 405);
}

/// Methods with the paths of a workspace that the contract has.
fn promised(contract: &Value) -> BTreeSet<(String, String)> {
    let mut promised = BTreeSet::new();
    for (path, item) in contract["paths"].as_object().unwrap() {
        let reference = item["$ref"]
            .as_str()
            .map(|text| text.trim_start_matches('#'));
        let item = reference
            .map_or(Some(item), |at| contract.pointer(at))
            .unwrap();
        let methods = item.as_object().unwrap().keys();
        for method in methods.filter(|key| ["get", "put", "post", "delete"].contains(&key.as_str()))
        {
            let path = path[1..].replace("_id}", "}");
            promised.insert((method.to_uppercase(), path));
        }
    }
    promised
}

#[test]
fn the_tests_of_all_routes_know_every_route_of_the_contract() {
    let contract = Server::start().get("/openapi.json").json();
    let mut promised = promised(&contract);
    // The other name of processes, and the proxy, which is one row for all methods.
    promised.retain(|(method, path)| {
        let is_known = path.starts_with("procs")
            || path.starts_with("proxy/") && (method != "GET" || path == "proxy/{port}");
        !is_known
    });
    let inside = routes()
        // That path is E2B's, outside of the contract.
        .filter(|route| route.pattern != "/execute")
        .map(|route| (route.method, route.pattern));
    let outside = OUTER_ROUTES
        .iter()
        .map(|route| (route.method, &route.pattern[1..]));
    let tried: BTreeSet<_> = inside
        .chain(outside)
        .map(|(method, path)| (method.to_owned(), path.to_owned()))
        .collect();
    assert_eq!(tried, promised);
}

#[test]
#[ignore = "takes a while: .ci/run runs it"]
fn a_dedicated_server_does_what_the_contract_says() {
    if !is_root() {
        skip!("only root can give a server another root directory");
    }
    if !has_namespaces() {
        skip!("a machine needs namespaces of its own, and unshare does not work here");
    }
    let machine = TempDir::new();
    if let Err(reason) = populate(machine.path()) {
        skip!("no machine for the server: {reason}");
    }
    // Not exec: what has changed its user is not killed with its parent (prctl(2)), but dies with the
    // first process of its namespace, which is the shell.
    let start = format!(
        "mount --bind /dev/null '{root}/dev/null' && \
         mount -t devpts -o mode=620,ptmxmode=666 devpts '{root}/dev/pts' && \
         chroot --userspec={user}:{user} '{root}' /bin/sh -c 'cd /work && exec /sbx-server'; exit",
        root = machine.path().display(),
        user = spare_uid(4),
    );
    let proc = format!("--mount-proc={}", machine.join("proc"));
    let server = Server::builder()
        .env("PATH", std::env::var("PATH").unwrap() + ":/bin")
        .wrapped_in(&[
            "unshare",
            "--mount",
            "--pid",
            "--ipc",
            "--fork",
            "--kill-child",
            &proc,
            "sh",
            "-c",
            &start,
        ])
        .start();
    compare_with_contract(&server);
}

#[test]
#[ignore = "takes a while: .ci/run runs it"]
fn a_host_does_what_the_contract_says() {
    if !is_root() {
        skip!("only root can be a host");
    }
    let host = Server::host().env("SBX_CAPACITY", 16);
    compare_with_contract(&host.env("SBX_TCP_PORT_RANGE", "10000-11999").start());
}

/// Makes a directory into a machine: the program, a shell with its usual commands, interpreters that do
/// nothing, and somewhere to work that everybody may write to.
fn populate(root: &Path) -> Result<(), String> {
    let make = format!(
        "set -e; cd '{}'; chmod 755 .; mkdir -p bin dev/pts proc work; chmod 777 work; : > dev/null; \
         ln -s pts/ptmx dev/ptmx; cp '{BINARY}' sbx-server; \
         cp \"$(command -v busybox)\" bin/busybox; for name in $(bin/busybox --list); do [ -e bin/$name ] || ln -s busybox bin/$name; done; \
         for name in python3 node bash; do echo '#!/bin/sh' > bin/$name; chmod 755 bin/$name; done; \
         chroot . /bin/sh -c true",
        root.display()
    );
    let output = Command::new("sh")
        .args(["-c", &make])
        .stdin(Stdio::null())
        .output()
        .map_err(|error| error.to_string())?;
    if output.status.success() {
        Ok(())
    } else {
        let text = String::from_utf8_lossy(&output.stderr);
        Err(format!("a static busybox is needed: {}", text.trim()))
    }
}

#[track_caller]
fn compare_with_contract(server: &Server) {
    let python = match environment("schemathesis", &[SCHEMATHESIS]) {
        Ok(python) => python,
        Err(reason) => skip!("{SCHEMATHESIS}: {reason}"),
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/client/contract.py");
    // It ends by itself; but a server that does not answer is to fail the test and not to hang it.
    let output = Command::new("timeout")
        .args(["--kill-after=5", "300"])
        .arg(python)
        .arg("-B")
        .arg(script)
        .env("SBX_URL", format!("http://{}", server.address))
        .env("SBX_TOKEN", server.token.as_deref().unwrap())
        .output()
        .unwrap();
    let report = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{}: {report}\n{}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr),
        server.log()
    );
    println!("{report}");
    assert_eq!(server.get("/health").status, 200);
    assert!(!server.log().contains("panicked"), "{}", server.log());
}
