//! The control plane.

use std::time::Duration;

use serde_json::{Value, json};

use super::{Door, api, machine, on_a_host};
use crate::fixture::{Mark, PATIENCE, Reply, Server, has_namespaces, is_root, wait_until};
use crate::skip;

fn expect(reply: &Reply, status: u16) {
    assert_eq!(reply.status, status, "{}", reply.text());
    let document = reply.json();
    assert_eq!(document["code"], status, "{document}");
    assert!(document["message"].is_string(), "{document}");
}

#[test]
fn a_sandbox_is_made_described_and_killed() {
    on_a_host(|server| {
        let body = json!({
            "templateID": "base", "timeout": 60, "metadata": { "a b": "c&d=%+" },
            "envVars": { "A": "b" }, "autoPause": false, "secure": true, "unknown": [1],
        });
        let reply = api(server, "POST", "/v2/sandboxes", &body);
        assert_eq!(reply.status, 201, "{}", reply.text());
        let made = reply.json();
        for name in [
            "templateID",
            "sandboxID",
            "clientID",
            "envdVersion",
            "envdAccessToken",
            "trafficAccessToken",
        ] {
            assert!(made[name].is_string(), "{name}: {made}");
        }
        assert_eq!(made["envdAccessToken"], made["trafficAccessToken"]);
        assert_eq!(made["domain"], "localhost");
        let id = made["sandboxID"].as_str().unwrap();
        assert!(id.len() <= 63 && id.bytes().all(|byte| byte.is_ascii_alphanumeric()));
        let door = Door {
            server,
            id: id.to_owned(),
            token: made["envdAccessToken"].as_str().unwrap().to_owned(),
        };
        assert_eq!(door.sh("echo $A").text(), "b\n");
        let target = format!("/sandboxes/{id}");
        let shown = api(server, "GET", &target, &Value::Null).json();
        for name in [
            "templateID",
            "clientID",
            "startedAt",
            "endAt",
            "envdVersion",
        ] {
            assert!(shown[name].is_string(), "{name}: {shown}");
        }
        for name in ["cpuCount", "memoryMB", "diskSizeMB"] {
            assert!(shown[name].is_u64(), "{name}: {shown}");
        }
        assert_eq!(
            (&shown["state"], &shown["metadata"]),
            (&"running".into(), &json!({ "a b": "c&d=%+" }))
        );
        assert_eq!(door.request("GET", "/health", &[], b"").status, 204);
        assert_eq!(api(server, "DELETE", &target, &Value::Null).status, 204);
        for (method, more) in [
            ("DELETE", ""),
            ("GET", ""),
            ("POST", "/connect"),
            ("POST", "/timeout"),
        ] {
            let reply = api(
                server,
                method,
                &format!("{target}{more}"),
                &json!({ "timeout": 5 }),
            );
            expect(&reply, 404);
        }
        // Every door to it says that it is gone, in the words that clients look for.
        let gone = json!({ "code": 502, "message": "The sandbox ID was not found" });
        for (method, target) in [
            ("GET", "/health"),
            ("GET", "/files?path=x"),
            ("GET", "/contexts"),
            ("POST", "/process.Process/List"),
        ] {
            let headers = [("content-type", "application/json")];
            let reply = door.request(method, target, &headers, b"{}");
            assert_eq!(reply.status, 502, "{target}");
            if target == "/contexts" {
                assert_eq!(reply.text(), "The sandbox ID was not found");
            } else {
                assert_eq!(reply.json(), gone, "{target}");
            }
        }
    });
}

#[test]
fn a_sandbox_ends_in_time_whatever_runs_in_it() {
    on_a_host(|server| {
        let door = Door::with(server, &json!({ "templateID": "base", "timeout": 1 }));
        let lasting = Door::with(server, &json!({ "templateID": "base", "timeout": 1 }));
        let target = format!("/sandboxes/{}", lasting.id);
        let end = || {
            api(server, "GET", &target, &Value::Null).json()["endAt"]
                .as_str()
                .unwrap()
                .to_owned()
        };
        let connect = |timeout: u64| {
            let reply = api(
                server,
                "POST",
                &format!("/v2{target}/connect"),
                &json!({ "timeout": timeout }),
            );
            assert_eq!(reply.status, 200, "{}", reply.text());
            assert_eq!(reply.json()["sandboxID"], lasting.id);
            assert_eq!(reply.json()["envdAccessToken"], lasting.token);
            end()
        };
        let first = end();
        let second = connect(3000);
        assert!(second > first, "{first} {second}");
        // It extends, and never shortens.
        assert_eq!(connect(10), second);
        let set = |timeout: Value| {
            api(
                server,
                "POST",
                &format!("{target}/timeout"),
                &json!({ "timeout": timeout }),
            )
        };
        assert_eq!(set(json!(4000)).status, 204);
        let third = end();
        assert!(third > second);
        assert_eq!(set(json!(100)).status, 204);
        assert!(end() < second, "it may be shortened");
        for timeout in [
            json!(-1),
            json!("5"),
            json!(1.5),
            Value::Null,
            json!(1_u64 << 40),
        ] {
            expect(&set(timeout), 400);
        }
        assert_eq!(
            api(server, "POST", &format!("{target}/refreshes"), &Value::Null).status,
            204
        );

        let mark = Mark::new();
        let mut stream = door.begin(
            "/process.Process/Start",
            &json!({ "process": { "cmd": "sleep", "args": [mark.to_string()] } }),
            &[],
        );
        stream.next().unwrap();
        let messages = stream.rest();
        assert_eq!(
            messages[0].1["error"]["code"], "unavailable",
            "{messages:?}"
        );
        mark.wait_gone(Duration::from_secs(10));
        let of_it = format!("/sandboxes/{}", door.id);
        wait_until("it is gone", PATIENCE, || {
            api(server, "GET", &of_it, &Value::Null).status == 404
        });
        assert_eq!(lasting.sh("echo hi").text(), "hi\n");
    });
}

#[test]
fn sandboxes_of_other_doors_have_no_end_until_one_is_set() {
    on_a_host(|server| {
        let other = server.sandbox();
        let target = format!("/sandboxes/{}", other.id);
        let end = || api(server, "GET", &target, &Value::Null).json()["endAt"].clone();
        assert_eq!(end(), "9999-12-31T23:59:59.000Z");
        let reply = api(
            server,
            "POST",
            &format!("{target}/connect"),
            &json!({ "timeout": 5 }),
        );
        assert_eq!(reply.status, 200);
        assert_eq!(reply.json()["templateID"], "base");
        assert_eq!(end(), "9999-12-31T23:59:59.000Z");
        assert_eq!(
            api(
                server,
                "POST",
                &format!("{target}/timeout"),
                &json!({ "timeout": 500 })
            )
            .status,
            204
        );
        assert_ne!(end(), "9999-12-31T23:59:59.000Z");
        // One token opens it at both doors.
        let door = Door {
            server,
            id: other.id.clone(),
            token: other.token.clone(),
        };
        assert_eq!(door.sh("pwd").text().trim(), other.home.to_str().unwrap());
    });
}

#[test]
fn lists_come_in_pages_and_by_metadata() {
    on_a_host(|server| {
        let make = |metadata: Value| {
            Door::with(
                server,
                &json!({ "templateID": "base", "metadata": metadata }),
            )
            .id
        };
        let ids: Vec<String> = (0..5)
            .map(|number| make(json!({ "number": number.to_string(), "all": "x y" })))
            .collect();
        make(json!({ "all": "x+y" }));
        let list = |query: &str| {
            api(
                server,
                "GET",
                &format!("/v2/sandboxes{query}"),
                &Value::Null,
            )
        };
        let found = |reply: &Reply| -> Vec<String> {
            assert_eq!(reply.status, 200, "{}", reply.text());
            let all = reply.json();
            let all = all.as_array().unwrap().iter();
            all.map(|one| one["sandboxID"].as_str().unwrap().to_owned())
                .collect()
        };
        assert_eq!(found(&list("")).len(), 6);
        assert!(list("").json()[0]["envdAccessToken"].is_null());
        // A form in a parameter, whose names and values clients have escaped once more.
        assert_eq!(found(&list("?metadata=all%3Dx%252520y&order=asc")), ids);
        assert_eq!(
            found(&list("?metadata=number%3D3%26all%3Dx%252520y")),
            ids[3..4]
        );
        assert_eq!(found(&list("?metadata=number%3D3%26all%3Dz")).len(), 0);
        assert_eq!(found(&list("?state=paused")).len(), 0);
        assert_eq!(found(&list("?state=paused,running")).len(), 6);
        assert_eq!(found(&list("?template=code-interpreter-v1")).len(), 0);
        assert_eq!(found(&list("?startedAfter=2099-01-01T00:00:00Z")).len(), 0);
        assert_eq!(found(&list("?startedAfter=2020-01-01T00:00:00Z")).len(), 6);
        // The moment itself is part of both.
        let of_one = format!("/sandboxes/{}", ids[2]);
        let at = api(server, "GET", &of_one, &Value::Null).json()["startedAt"].clone();
        let at = at.as_str().unwrap();
        for name in ["startedAfter", "startedBefore"] {
            let shown = found(&list(&format!("?{name}={at}")));
            assert!(shown.contains(&ids[2]), "{name}: {shown:?}");
        }
        let shown = found(&list(&format!("?startedAfter={at}&startedBefore={at}")));
        assert!(shown.contains(&ids[2]) && shown.len() < 6, "{shown:?}");
        let mut seen = Vec::new();
        let mut next = String::new();
        loop {
            let reply = list(&format!(
                "?metadata=all%3Dx%252520y&order=asc&limit=2{next}"
            ));
            seen.extend(found(&reply));
            match reply.header("x-next-token") {
                Some(token) => next = format!("&nextToken={token}"),
                None => break,
            }
        }
        assert_eq!(seen, ids);
        let newest_first: Vec<_> = ids.iter().rev().cloned().collect();
        assert_eq!(found(&list("?metadata=all%3Dx%252520y")), newest_first);
        for query in [
            "?limit=0",
            "?limit=x",
            "?order=up",
            "?nextToken=x",
            "?startedAfter=x",
            "?startedBefore=x",
            "?metadata=%25zz",
        ] {
            expect(&list(query), 400);
        }
    });
}

#[test]
fn the_image_has_the_names_that_the_operator_gives_it() {
    if !is_root() {
        skip!("host mode needs root");
    }
    let usual = ["base", "code-interpreter-v1"];
    for (setting, expected, known, unknown) in [
        ("", &[][..], "base:v1", "mine"),
        ("mine,team/x", &["mine", "team/x"], "team%2Fx", "others"),
        ("*", &[], "anything", ":"),
    ] {
        let mut server = Server::host();
        if !setting.is_empty() {
            server = server.env("SBX_E2B_TEMPLATES", setting);
        }
        let server = &server.start();
        let listed = api(server, "GET", "/templates", &Value::Null);
        assert_eq!(listed.status, 200, "{}", listed.text());
        let listed = listed.json();
        let all = listed.as_array().unwrap();
        let names: Vec<_> = all
            .iter()
            .map(|one| one["templateID"].as_str().unwrap())
            .collect();
        assert_eq!(names, [&usual, expected].concat());
        // The same in pages.
        let (mut paged, mut next) = (Vec::new(), String::new());
        loop {
            let target = format!("/v2/templates?limit=1{next}");
            let page = api(server, "GET", &target, &Value::Null);
            assert_eq!(page.status, 200, "{}", page.text());
            let one = page.json();
            assert_eq!(one.as_array().unwrap().len(), 1, "{one}");
            paged.push(one[0].clone());
            match page.header("x-next-token") {
                Some(token) => next = format!("&nextToken={token}"),
                None => break,
            }
        }
        let ids = paged.iter().map(|one| one["templateID"].as_str().unwrap());
        assert_eq!(ids.collect::<Vec<_>>(), names);
        let whole = api(server, "GET", "/v2/templates", &Value::Null);
        assert_eq!(whole.json().as_array().unwrap().len(), names.len());
        assert_eq!(whole.header("x-next-token"), None);
        let behind = api(server, "GET", "/v2/templates?nextToken=99", &Value::Null);
        assert_eq!(behind.json(), json!([]));
        expect(
            &api(server, "GET", "/v2/templates?limit=0", &Value::Null),
            400,
        );
        for (template, exists) in names
            .iter()
            .map(|name| (*name, true))
            .chain([(known, true), (unknown, false)])
        {
            let status = if exists { 200 } else { 404 };
            let alias = format!("/templates/aliases/{}", template.replace('/', "%2F"));
            let reply = api(server, "GET", &alias, &Value::Null);
            assert_eq!(reply.status, status, "{alias}: {}", reply.text());
            let body = json!({ "templateID": template.replace("%2F", "/") });
            let made = api(server, "POST", "/v2/sandboxes", &body);
            assert_eq!(made.status == 201, exists, "{template}: {}", made.text());
        }
    }
}

#[test]
fn the_same_request_again_makes_no_second_sandbox() {
    on_a_host(|server| {
        let create = |key: &'static str| {
            let mut connection = server.connect();
            let token = connection.token.take().unwrap();
            let headers = [("x-api-key", &*token), ("idempotency-key", key)];
            let reply = connection.request(
                "POST",
                "/v2/sandboxes",
                &headers,
                b"{\"templateID\":\"base\"}",
            );
            assert_eq!(reply.status, 201);
            reply.json()["sandboxID"].as_str().unwrap().to_owned()
        };
        let at_once: Vec<String> = std::thread::scope(|scope| {
            let all: Vec<_> = (0..8).map(|_| scope.spawn(|| create("one"))).collect();
            all.into_iter()
                .map(|thread| thread.join().unwrap())
                .collect()
        });
        assert!(at_once.iter().all(|id| *id == at_once[0]), "{at_once:?}");
        assert_ne!(create("two"), at_once[0]);
        assert_eq!(
            api(
                server,
                "DELETE",
                &format!("/sandboxes/{}", at_once[0]),
                &Value::Null
            )
            .status,
            204
        );
        assert_ne!(create("one"), at_once[0]);
    });
}

#[test]
fn what_cannot_be_had_is_said_in_a_sentence() {
    on_a_host(|server| {
        let id = Door::open(server).id;
        let builds = cfg!(feature = "file-tools");
        for (method, target, status) in [
            ("POST", format!("/sandboxes/{id}/snapshots"), 501),
            ("POST", format!("/sandboxes/{id}/fork"), 501),
            ("PUT", format!("/sandboxes/{id}/network"), 501),
            ("POST", "/templates".to_owned(), 501),
            ("PATCH", "/v2/templates/base".to_owned(), 501),
            ("POST", "/templates/tags".to_owned(), 501),
            ("GET", "/templates/base/tags".to_owned(), 404),
            (
                "POST",
                "/v3/templates".to_owned(),
                if builds { 400 } else { 501 },
            ),
            (
                "POST",
                "/v2/templates/x/builds/y".to_owned(),
                if builds { 404 } else { 501 },
            ),
            ("GET", "/volumes".to_owned(), 501),
            ("POST", "/secrets".to_owned(), 501),
            ("POST", "/init".to_owned(), 404),
            ("GET", "/v2/nothing".to_owned(), 404),
            ("PATCH", "/v2/sandboxes".to_owned(), 405),
        ] {
            let reply = api(server, method, &target, &json!({}));
            expect(&reply, status);
            assert!(
                reply.json()["message"].as_str().unwrap().contains(' '),
                "{target}"
            );
        }
        assert_eq!(
            api(server, "GET", "/snapshots", &Value::Null).json(),
            json!([])
        );
        for (more, status) in [
            (json!({ "templateID": "mine" }), 404),
            (json!({ "templateID": "base", "autoPause": 1 }), 400),
            (json!({ "templateID": "base", "mcp": { "x": {} } }), 501),
            (
                json!({ "templateID": "base", "volumeMounts": [{ "name": "v", "path": "/v" }] }),
                501,
            ),
            (
                json!({ "templateID": "base", "network": { "rules": { "a": [] } } }),
                501,
            ),
            (
                json!({ "templateID": "base", "metadata": { "a": "x".repeat(20_000) } }),
                400,
            ),
            (
                json!({ "templateID": "base", "envVars": { "a": "x".repeat(70_000) } }),
                400,
            ),
            (json!([]), 400),
        ] {
            expect(&api(server, "POST", "/v2/sandboxes", &more), status);
        }
        let reply = api(
            server,
            "GET",
            &format!("/sandboxes/{id}/metrics"),
            &Value::Null,
        );
        let metrics = reply.json();
        for name in [
            "timestampUnix",
            "cpuCount",
            "cpuUsedPct",
            "memUsed",
            "memTotal",
            "memCache",
            "diskUsed",
            "diskTotal",
        ] {
            assert!(metrics[0][name].is_number(), "{name}: {metrics}");
        }
        assert_eq!(
            api(
                server,
                "GET",
                &format!("/sandboxes/{id}/metrics?end=5"),
                &Value::Null
            )
            .json(),
            json!([])
        );
    });
}

/// A client has read its clock before it asks for the points until then.
#[test]
fn the_metrics_go_up_to_now() {
    on_a_host(|server| {
        let id = Door::open(server).id;
        let points = |query: &str| {
            let target = format!("/sandboxes/{id}/metrics{query}");
            let points = api(server, "GET", &target, &Value::Null).json();
            let times = points.as_array().unwrap().iter();
            let times = times.map(|point| point["timestampUnix"].as_u64().unwrap());
            times.collect::<Vec<_>>()
        };
        let now = points("")[0];
        for end in [now, now - 2, now + 60] {
            let times = points(&format!("?start={}&end={end}", now - 60));
            assert_eq!(times.len(), 1, "{end}");
            assert!(times[0] >= now - 2 && times[0] <= end, "{end}: {times:?}");
        }
        assert!(points(&format!("?end={}", now - 60)).is_empty());
        assert!(points(&format!("?start={}", now + 60)).is_empty());
    });
}

#[test]
fn a_full_host_says_so_and_takes_sandboxes_again() {
    if !is_root() {
        skip!("host mode needs root");
    }
    let server = Server::host().env("SBX_CAPACITY", 1).start();
    let door = Door::open(&server);
    let create = || {
        api(
            &server,
            "POST",
            "/v2/sandboxes",
            &json!({ "templateID": "base" }),
        )
    };
    expect(&create(), 429);
    assert_eq!(
        api(
            &server,
            "DELETE",
            &format!("/sandboxes/{}", door.id),
            &Value::Null
        )
        .status,
        204
    );
    assert_eq!(create().status, 201);
}

#[test]
fn a_sandbox_without_internet_is_blocked() {
    on_a_host(|server| {
        let body = json!({ "templateID": "base", "allow_internet_access": false });
        let reply = api(server, "POST", "/v2/sandboxes", &body);
        if reply.status == 501 {
            skip!("{}", reply.text());
        }
        let id = reply.json()["sandboxID"].as_str().unwrap().to_owned();
        let shown = server.get(&format!("/v1/sandboxes/{id}")).json();
        assert_eq!(shown["network"], "blocked");
        let network = json!({ "allowOut": ["example.org"], "denyOut": ["0.0.0.0/0"] });
        let body = json!({ "templateID": "base", "network": network });
        let id = api(server, "POST", "/v2/sandboxes", &body).json()["sandboxID"]
            .as_str()
            .unwrap()
            .to_owned();
        let shown = server.get(&format!("/v1/sandboxes/{id}")).json();
        assert_eq!(shown["network"]["allow"], json!(["example.org"]));
    });
}

#[test]
fn in_namespaces_the_home_is_that_of_the_examples() {
    if !is_root() {
        skip!("host mode needs root");
    }
    if !has_namespaces() {
        skip!("this machine makes no namespaces");
    }
    let server = Server::host().env("SBX_ISOLATION", "namespaces").start();
    let door = Door::open(&server);
    let headers = [("content-type", "application/octet-stream")];
    let reply = door.request("POST", "/files?path=/home/user/dir/f", &headers, b"hello");
    assert_eq!(reply.json()[0]["path"], "/home/user/dir/f");
    let ran = door.sh("cat /home/user/dir/f; pwd; echo $HOME; cd; pwd; whoami; echo x > /home/user/g; mv g ~/dir/");
    assert_eq!(
        ran.text(),
        "hello/home/user\n/home/user\n/home/user\nsandbox\n",
        "{ran:?}"
    );
    assert_eq!(
        door.request("GET", "/files?path=dir/g", &[], b"").text(),
        "x\n"
    );
    let entry = door.ok(
        "/filesystem.Filesystem/Stat",
        &json!({ "path": "/home/user/dir" }),
    );
    assert_eq!(entry["entry"]["path"], "/home/user/dir");
    door.fails(
        "/filesystem.Filesystem/Stat",
        &json!({ "path": "/etc/x" }),
        403,
        "permission_denied",
    );
    // What other doors make keeps its own.
    let other = server.sandbox();
    assert_eq!(other.sh("pwd").trim(), other.home.to_str().unwrap());
    assert_eq!(
        other
            .exec(&json!({ "cmd": "ls /home/user" }))
            .code()
            .unwrap_or(1)
            .min(1),
        1
    );
}

#[test]
fn a_machine_is_the_one_sandbox() {
    let (_home, server) = machine();
    let body = json!({ "templateID": "base", "timeout": 60 });
    let made = api(&server, "POST", "/sandboxes", &body).json();
    assert_eq!(made["sandboxID"], "machine");
    let listed = api(&server, "GET", "/v2/sandboxes", &Value::Null).json();
    assert_eq!(listed.as_array().unwrap().len(), 1);
    assert_eq!(
        (&listed[0]["sandboxID"], &listed[0]["state"]),
        (&"machine".into(), &"running".into())
    );
    assert_eq!(
        api(&server, "GET", "/sandboxes/machine", &Value::Null).json()["sandboxID"],
        "machine"
    );
    let reply = api(
        &server,
        "POST",
        "/v2/sandboxes/machine/connect",
        &json!({ "timeout": 9 }),
    );
    assert_eq!(
        (reply.status, &reply.json()["envdAccessToken"]),
        (200, &made["envdAccessToken"])
    );
    expect(
        &api(&server, "DELETE", "/sandboxes/machine", &Value::Null),
        404,
    );
    expect(
        &api(
            &server,
            "POST",
            "/sandboxes/machine/timeout",
            &json!({ "timeout": 9 }),
        ),
        501,
    );
    expect(&api(&server, "GET", "/sandboxes/other", &Value::Null), 404);
    let body = json!({ "templateID": "base", "allow_internet_access": false });
    expect(&api(&server, "POST", "/v2/sandboxes", &body), 501);
    let metrics = api(&server, "GET", "/sandboxes/machine/metrics", &Value::Null).json();
    assert!(metrics[0]["memTotal"].as_u64().unwrap() > 0, "{metrics}");
}
