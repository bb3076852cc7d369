//! Who chooses a policy, and what can be chosen.

use serde_json::{Value, json};

use super::{MOVE_FILES, MOVED, Place, in_both_modes, in_both_modes_with};
use crate::fixture::{Reply, Server, assert_error, is_root};
use crate::skip;

/// Says whether a socket of the internet can be made.
const TRY: &str = "import socket\ntry: socket.socket(); print('open')\nexcept OSError as error: print(error.errno)";

const OPEN: &str = "open\n";

/// `ENETUNREACH`.
const BLOCKED: &str = "101\n";

/// What a command finds that asks for a policy, or for none.
#[track_caller]
fn found(place: &Place<'_>, network: &Value) -> String {
    let outcome = place.exec(
        &json!(["python3", "-c", TRY]),
        &json!({ "network": network }),
    );
    assert_eq!(outcome.code(), Some(0), "{outcome:?}");
    outcome.stdout
}

/// The same of code in a context that was made with a policy.
#[track_caller]
fn found_in_context(place: &Place<'_>, id: &str) -> String {
    let body = json!({ "code": TRY, "format": "simple", "context": id });
    let reply = place.post("execute", &body);
    assert_eq!(reply.status, 200, "{}", reply.text());
    let lines = reply.text();
    let lines = lines
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap());
    let texts = lines.filter_map(|line| line["text"].as_str().map(str::to_owned));
    texts.collect()
}

#[track_caller]
fn too_wide(reply: &Reply) {
    assert_error(reply, 400, "too_wide");
    // The ceiling.
    assert!(reply.text().contains("blocked"), "{}", reply.text());
}

#[test]
fn a_command_can_tighten_its_own_network() {
    in_both_modes(|place| {
        assert_eq!(found(place, &json!(null)), OPEN);
        assert_eq!(found(place, &json!("blocked")), BLOCKED);
        assert_eq!(found(place, &json!("open")), OPEN);
        // In the background, and code in place of a command.
        let body = json!({ "code": TRY, "network": "blocked" });
        let reply = place.post("processes", &body).json();
        let logs = format!("processes/{}/logs?follow=1", reply["id"].as_str().unwrap());
        let logs = place.server.get(&place.target(&logs)).text();
        assert!(logs.contains("\"data\":\"101"), "{logs}");
    });
}

#[test]
fn a_context_can_tighten_its_own_network() {
    in_both_modes(|place| {
        let make = |body: &Value| place.post("contexts", body);
        assert_eq!(make(&json!({ "id": "free" })).status, 200);
        let reply = make(&json!({ "id": "shut", "network": "blocked" }));
        assert_eq!(reply.status, 200, "{}", reply.text());
        // A spare was started with the network of the workspace.
        assert_eq!(reply.json()["warm"], false);
        assert_eq!(found_in_context(place, "free"), OPEN);
        assert_eq!(found_in_context(place, "shut"), BLOCKED);
        // It stays so when its interpreter is another one.
        let reply = place.post("contexts/shut/restart", &json!({}));
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(found_in_context(place, "shut"), BLOCKED);

        // An id stands for the context that was asked for, and not for a freer one.
        for (id, network) in [("free", "blocked"), ("shut", "open")] {
            let reply = make(&json!({ "id": id, "network": network }));
            assert_error(&reply, 409, "id_in_use");
        }
        for (id, network) in [("free", "open"), ("shut", "blocked")] {
            assert_eq!(make(&json!({ "id": id, "network": network })).status, 200);
        }
        // An existing context keeps its network; one for a single execution can choose.
        for context in [json!(null), json!("free")] {
            let body = json!({ "code": TRY, "network": "blocked", "context": context });
            assert_error(&place.post("execute", &body), 400, "bad_request");
        }
        let body = json!({ "code": TRY, "network": "blocked", "stateless": true });
        let events = place.post("execute", &body).text();
        assert!(events.contains("\"data\":\"101"), "{events}");
    });
}

#[test]
fn nothing_in_a_blocked_workspace_can_be_wider() {
    let blocked = |builder: crate::fixture::Builder| builder.env("SBX_NETWORK", "blocked");
    in_both_modes_with(blocked, |place| {
        assert_eq!(found(place, &json!(null)), BLOCKED);
        assert_eq!(found(place, &json!("blocked")), BLOCKED);
        let body =
            json!({ "cmd": "touch ran", "code": null, "network": "open", "cwd": place.path("") });
        too_wide(&place.post("exec", &body));
        too_wide(&place.post("processes", &body));
        too_wide(&place.post("contexts", &json!({ "network": "open" })));
        let body = json!({ "code": "1", "stateless": true, "network": "open" });
        too_wide(&place.post("execute", &body));
        assert!(!std::fs::exists(place.path("ran")).unwrap());
        // Contexts have it too, the spares among them.
        for id in ["first", "second"] {
            assert_eq!(place.post("contexts", &json!({ "id": id })).status, 200);
            assert_eq!(found_in_context(place, id), BLOCKED);
        }
    });
}

#[test]
fn each_sandbox_chooses_and_shows_its_network() {
    if !is_root() {
        skip!("needs root");
    }
    for (default, usual) in [("open", OPEN), ("blocked", BLOCKED)] {
        let server = Server::host().env("SBX_NETWORK", default).start();
        for (chosen, expected) in [
            (json!({}), (default, usual)),
            (json!({ "network": null }), (default, usual)),
            (json!({ "network": "open" }), ("open", OPEN)),
            (json!({ "network": "blocked" }), ("blocked", BLOCKED)),
        ] {
            let place = Place::sandbox(&server, &chosen);
            let shown = server.get(place.target("").trim_end_matches('/'));
            assert_eq!(shown.json()["network"], expected.0);
            assert_eq!(found(&place, &json!(null)), expected.1);
        }
        let listed = server.get("/v1/sandboxes").json();
        let listed: Vec<&Value> = listed
            .as_array()
            .unwrap()
            .iter()
            .map(|one| &one["network"])
            .collect();
        assert_eq!(listed, [default, default, "open", "blocked"]);
        let policies = &server.get("/health").json()["isolation"]["postures"];
        assert_eq!(policies, &json!(["open", "allowlist", "blocked"]));
    }
}

/// The rules for the network are rules of Landlock, which concern directories too.
#[test]
fn files_are_moved_and_linked_between_directories_under_every_network() {
    in_both_modes(|place| {
        for network in [
            json!("open"),
            json!("blocked"),
            json!({ "mode": "allowlist", "allow": [] }),
        ] {
            let more = json!({ "network": network, "cwd": place.path("") });
            let outcome = place.exec(&json!(["python3", "-c", MOVE_FILES]), &more);
            assert_eq!(outcome.stdout, MOVED, "{network}: {outcome:?}");
        }
    });
}

#[test]
fn what_is_no_posture_is_refused_before_anything_happens() {
    in_both_modes(|place| {
        for network in [
            json!("closed"),
            json!("Open"),
            json!(""),
            json!(true),
            json!(0),
            json!([]),
            json!({}),
            json!({ "mode": "closed" }),
            json!({ "mode": "allowlist" }),
            json!({ "mode": "allowlist", "allow": ["http://a.example"] }),
            json!({ "mode": "allowlist", "allow": ["a.example"], "denny": ["b.example"] }),
            json!({ "mode": "open", "allow": ["a.example"] }),
            json!({ "mode": "open", "proxy": "https://proxy.example" }),
        ] {
            let body = json!({ "cmd": "touch ran", "network": network, "cwd": place.path("") });
            assert_error(&place.post("exec", &body), 400, "bad_request");
            assert_error(&place.post("processes", &body), 400, "bad_request");
            let body = json!({ "network": network });
            assert_error(&place.post("contexts", &body), 400, "bad_request");
            if place.sandbox.is_some() {
                let reply = place.server.post("/v1/sandboxes", &body);
                assert_error(&reply, 400, "bad_request");
            }
        }
        assert!(!std::fs::exists(place.path("ran")).unwrap());
    });
}

#[test]
fn the_network_of_a_process_is_part_of_what_its_id_stands_for() {
    in_both_modes(|place| {
        let body = |network: Value| json!({ "id": "job", "cmd": "sleep 60", "network": network });
        assert_eq!(place.post("processes", &body(json!(null))).status, 200);
        let reply = place.post("processes", &body(json!("blocked")));
        assert_error(&reply, 409, "id_in_use");
        assert_eq!(place.post("processes", &body(json!(null))).status, 200);
    });
}
