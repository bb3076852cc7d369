//! Namespaces are chosen, shown and refused; a sandbox is never weaker than it was asked for.

use std::process::Stdio;

use serde_json::{Value, json};

use super::{Way, described, needs_namespaces, sandbox, sandbox_with};
use crate::fixture::{Builder, Sandbox, Server, assert_error, homes_in, is_root};
use crate::skip;

#[test]
fn a_sandbox_says_what_surrounds_it() {
    needs_namespaces!();
    for way in Way::BOTH {
        let server = way.builder().start();
        let isolations = server.get("/health").json()["isolation"]["isolations"].clone();
        assert_eq!(isolations, json!(["landlock", "namespaces"]));
        let alone = described(&sandbox(&server));
        let open = described(&sandbox_with(&server, json!({ "network": "open" })));
        let usual = described(&server.sandbox());
        let has = |sandbox: &Value, layer: &str| {
            let layers = sandbox["isolation"]["layers"].as_array().unwrap();
            layers.contains(&json!(layer))
        };
        for sandbox in [&alone, &open] {
            assert_eq!(sandbox["isolation"]["mode"], "namespaces");
            assert!(has(sandbox, "namespaces") && has(sandbox, "landlock_files"));
            assert_eq!(has(sandbox, "user_namespace"), way == Way::Users);
            let paths = sandbox["filesystem"]["read_write"].as_array().unwrap();
            assert!(paths.contains(&json!("/tmp")) && paths.contains(&json!("/dev/shm")));
        }
        assert_eq!(alone["restrictions"], json!([]));
        assert!(!has(&alone, "landlock_tcp_bind"));
        assert_eq!(open["restrictions"], json!(["tcp_bind"]));
        assert!(has(&open, "landlock_tcp_bind"));
        assert_eq!(usual["isolation"]["mode"], "landlock");
        assert!(!has(&usual, "namespaces") && !has(&usual, "user_namespace"));
        assert_eq!(usual["restrictions"], json!(["tmp", "shm", "tcp_bind"]));
    }
}

#[test]
fn the_host_chooses_for_those_who_do_not() {
    needs_namespaces!();
    let server = Server::host().env("SBX_ISOLATION", "namespaces").start();
    let mode = |sandbox: &Sandbox<'_>| described(sandbox)["isolation"]["mode"].clone();
    assert_eq!(mode(&server.sandbox()), "namespaces");
    let asked = json!({ "isolation": "landlock" });
    assert_eq!(mode(&server.sandbox_with(&asked)), "landlock");
    let many = server.post("/v1/sandboxes", &json!({ "count": 3 })).json();
    for made in many["sandboxes"].as_array().unwrap() {
        assert_eq!(made["isolation"]["mode"], "namespaces");
    }
}

/// A server in a namespace of users that lets no others be made, without the capabilities that namespaces take.
fn without_rights() -> Builder {
    const IN_OWN_USERS: &str = r#"
        ( while [ "$(readlink /proc/$$/ns/user)" = "$(readlink /proc/self/ns/user)" ]; do sleep 0.01; done
          echo "0 0 65536" > /proc/$$/uid_map; echo "0 0 65536" > /proc/$$/gid_map ) &
        exec unshare -U sh -c '
            until grep -q . /proc/self/uid_map && grep -q . /proc/self/gid_map; do sleep 0.01; done
            exec sh -c "echo 0 > /proc/sys/user/max_user_namespaces && exec \"\$@\"" sh "$@"
        ' sh setpriv --bounding-set=-sys_admin,-net_admin "$@""#;
    Server::host().wrapped_in(&["sh", "-c", IN_OWN_USERS, "sh"])
}

#[test]
fn where_they_cannot_be_made_they_are_refused_and_nothing_is_made() {
    needs_namespaces!();
    let server = without_rights().start();
    for body in [json!({}), json!({ "network": "blocked", "count": 3 })] {
        let mut body = body;
        body["isolation"] = json!("namespaces");
        let reply = server.post("/v1/sandboxes", &body);
        assert_error(&reply, 400, "unavailable");
        let text = reply.json()["error"].as_str().unwrap().to_owned();
        assert!(text.contains("EPERM") && text.contains("ENOSPC"), "{text}");
    }
    let health = server.get("/health").json();
    assert_eq!(health["sandboxes"], 0);
    assert_eq!(health["isolation"]["isolations"], json!(["landlock"]));
    let homes = server.place.as_ref().unwrap().homes();
    assert_eq!(homes_in(&homes), Vec::<String>::new());
    // Others can be had as ever.
    assert_eq!(server.sandbox().sh("echo here").trim(), "here");

    let builder = without_rights().env("SBX_ISOLATION", "namespaces");
    let output = builder.command().stdin(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        said.contains("isolation namespaces is unavailable"),
        "{said}"
    );
    assert!(!said.contains("listening"), "{said}");
}

/// The operator chooses, and the server reports what it enforces: nothing is weaker in silence.
#[test]
fn auto_is_the_strongest_that_the_machine_allows() {
    needs_namespaces!();
    for (builder, strongest, says) in [
        (Server::host(), "namespaces", ""),
        (
            without_rights(),
            "landlock",
            "SBX_ISOLATION=auto means landlock",
        ),
    ] {
        let server = builder.env("SBX_ISOLATION", "auto").start();
        let sandbox = server.sandbox();
        assert_eq!(described(&sandbox)["isolation"]["mode"], strongest);
        assert_eq!(sandbox.sh("echo here"), "here\n");
        let health = server.get("/health").json();
        assert_eq!(health["isolation"]["default"], strongest);
        let log = server.log();
        let ready = format!("default_isolation={strongest}\n");
        assert!(log.contains(&ready) && log.contains(says), "{log}");
    }
    let dedicated = Server::start().get("/health").json();
    assert!(
        dedicated["isolation"].get("default").is_none(),
        "{dedicated}"
    );
}

#[test]
fn an_unknown_choice_is_refused() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    for value in [json!("none"), json!(true), json!(["namespaces"])] {
        let reply = server.post("/v1/sandboxes", &json!({ "isolation": value }));
        assert_error(&reply, 400, "bad_request");
    }
    assert_eq!(server.get("/health").json()["sandboxes"], 0);
}
