//! The files of the console as a browser gets them.

use std::time::Duration;

use crate::fixture::{Reply, Server, assert_error, filtered, is_root, wait_until};
use crate::skip;

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src 'self'; \
                      img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// Asks without a token.
#[track_caller]
fn ask(server: &Server, method: &str, target: &str, headers: &[(&str, &str)]) -> Reply {
    let mut stranger = server.connect();
    stranger.token = None;
    stranger.request(method, target, headers, b"")
}

/// Whether an answer has what keeps a browser from running anything else on this page.
#[track_caller]
fn assert_guarded(reply: &Reply) {
    for (name, value) in [
        ("content-security-policy", POLICY),
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
        ("cross-origin-opener-policy", "same-origin"),
        ("cache-control", "no-cache"),
    ] {
        assert_eq!(reply.header(name), Some(value), "{name}");
    }
    assert_eq!(reply.header("access-control-allow-origin"), None);
}

fn unpacked(bytes: &[u8]) -> Vec<u8> {
    filtered("gzip", &["-dc"], bytes)
}

#[test]
fn every_file_is_served_to_everybody_in_both_codings() {
    let server = Server::start();
    for (name, kind) in [
        ("", "text/html; charset=utf-8"),
        ("/", "text/html; charset=utf-8"),
        ("/index.html", "text/html; charset=utf-8"),
        ("/style.css", "text/css; charset=utf-8"),
        ("/app.js", "text/javascript; charset=utf-8"),
        ("/xterm.mjs", "text/javascript; charset=utf-8"),
        ("/icon.svg", "image/svg+xml"),
    ] {
        let target = format!("/console{name}?ignored=1&x");
        let plain = ask(&server, "GET", &target, &[]);
        let packed = ask(&server, "GET", &target, &[("Accept-Encoding", "br, gzip")]);
        for reply in [&plain, &packed] {
            assert_eq!(reply.status, 200, "{target}");
            assert_eq!(reply.header("content-type"), Some(kind), "{target}");
            assert_eq!(reply.header("vary"), Some("Accept-Encoding"));
            assert_guarded(reply);
        }
        assert_eq!(plain.header("content-encoding"), None);
        assert_eq!(packed.header("content-encoding"), Some("gzip"));
        assert!(packed.body.len() < plain.body.len(), "{target}");
        assert!(unpacked(&packed.body) == plain.body, "{target}");
        assert_ne!(plain.header("etag"), packed.header("etag"));
        let head = ask(&server, "HEAD", &target, &[("Accept-Encoding", "gzip")]);
        assert_eq!((head.status, head.body.len()), (200, 0));
        assert_eq!(head.header("etag"), packed.header("etag"));
        assert_guarded(&head);
    }
    let page = ask(&server, "GET", "/console", &[]).text();
    assert!(page.contains("src=\"/console/app.js\""), "{page}");
}

#[test]
fn gzip_is_sent_to_those_who_take_it() {
    let server = Server::start();
    for (accepted, is_gzip) in [
        ("gzip", true),
        ("GZIP;q=0.1", true),
        ("deflate, gzip;q=1.0, *;q=0.5", true),
        ("*", true),
        ("*;q=0", false),
        ("gzip;q=0", false),
        ("gzip; q=0.000, *", false),
        ("identity", false),
        ("br", false),
        ("", false),
    ] {
        let reply = ask(
            &server,
            "GET",
            "/console/app.js",
            &[("Accept-Encoding", accepted)],
        );
        assert_eq!(
            reply.header("content-encoding") == Some("gzip"),
            is_gzip,
            "{accepted}"
        );
    }
}

#[test]
fn a_file_that_a_browser_has_is_not_sent_again() {
    let server = Server::start();
    let gzip = ("Accept-Encoding", "gzip");
    let first = ask(&server, "GET", "/console/app.js", &[gzip]);
    let tag = first.header("etag").unwrap();
    assert!(
        tag.starts_with('"') && tag.ends_with('"') && tag.len() > 10,
        "{tag}"
    );
    for known in [
        tag.to_owned(),
        format!("W/{tag}"),
        format!("\"other\", {tag}"),
        "*".to_owned(),
    ] {
        let again = ask(
            &server,
            "GET",
            "/console/app.js",
            &[gzip, ("If-None-Match", &known)],
        );
        assert_eq!((again.status, again.body.len()), (304, 0), "{known}");
        assert_eq!(again.header("etag"), Some(tag));
        assert_guarded(&again);
    }
    for other in ["\"other\"", &tag[1..], ""] {
        let again = ask(
            &server,
            "GET",
            "/console/app.js",
            &[gzip, ("If-None-Match", other)],
        );
        assert_eq!(again.status, 200, "{other}");
    }
}

#[test]
fn there_is_nothing_else_below_it() {
    let server = Server::start();
    for target in [
        "/console/nothing.js",
        "/console/app.js/",
        "/console//app.js",
        "/console/../console/app.js",
        "/console/..%2fapp.js",
        "/console/%61pp.js",
        "/console/page/app.js",
        "/console/xterm.mjs.gz",
        "/console/README.md",
    ] {
        let reply = ask(&server, "GET", target, &[]);
        assert_error(&reply, 404, "not_found");
        assert_guarded(&reply);
    }
    // What only begins alike belongs to the other routes.
    assert_error(&ask(&server, "GET", "/consoles", &[]), 403, "forbidden");
    assert_error(&server.get("/consoles"), 404, "not_found");
    for method in ["POST", "PUT", "DELETE", "PATCH"] {
        let reply = ask(&server, method, "/console", &[]);
        assert_error(&reply, 405, "method_not_allowed");
        assert_eq!(reply.header("allow"), Some("GET, HEAD, OPTIONS"));
        assert_guarded(&reply);
    }
    let options = ask(&server, "OPTIONS", "/console", &[]);
    assert_eq!(
        (options.status, options.header("allow")),
        (204, Some("GET, HEAD, OPTIONS"))
    );
}

#[test]
fn pages_of_allowed_origins_get_no_access_to_it() {
    let server = Server::builder()
        .env("SBX_ALLOWED_ORIGINS", "https://app.example.org")
        .start();
    let reply = ask(
        &server,
        "GET",
        "/console",
        &[("Origin", "https://app.example.org")],
    );
    assert_eq!(reply.status, 200);
    assert_guarded(&reply);
}

#[test]
fn it_can_be_turned_off() {
    let server = Server::builder().env("SBX_CONSOLE", 0).start();
    for target in ["/console", "/console/", "/console/app.js"] {
        assert_error(&server.get(target), 404, "not_found");
    }
    assert!(!server.get("/").text().contains("/console"));
    let server = Server::start();
    assert!(
        server
            .get("/")
            .text()
            .contains("Open /console in a browser.")
    );
}

#[test]
fn a_server_without_a_token_serves_it_to_this_machine_only() {
    let server = Server::builder().no_token().start();
    assert_eq!(ask(&server, "GET", "/console", &[]).status, 200);
    let reply = ask(&server, "GET", "/console", &[("Host", "evil.example")]);
    assert_error(&reply, 403, "forbidden");
}

#[test]
fn the_metrics_count_what_was_served() {
    let server = Server::start();
    ask(&server, "GET", "/console", &[]);
    ask(&server, "GET", "/t/unknown/", &[]);
    let metrics = server.get("/v1/metrics").text();
    for line in [
        "sbx_requests_total{route=\"console\",status=\"200\"} 1",
        "sbx_requests_total{route=\"ticket\",status=\"404\"} 1",
    ] {
        assert!(metrics.contains(line), "{metrics}");
    }
}

#[test]
fn a_token_learns_what_it_opens() {
    let server = Server::start();
    let access = |token: Option<&str>| {
        let mut connection = server.connect();
        connection.token = token.map(str::to_owned);
        connection.request("GET", "/v1/access", &[], b"")
    };
    let document =
        |opens: &str| serde_json::json!({ "mode": "dedicated", "opens": opens, "sandbox": null });
    assert_eq!(access(server.token.as_deref()).json(), document("server"));
    assert_eq!(access(None).json(), document("nothing"));
    assert_error(&access(Some("wrong")), 403, "forbidden");
    assert_error(&server.get("/v1/access?token=x"), 400, "bad_request");

    let open = Server::builder().no_token().start();
    assert_eq!(open.get("/v1/access").json(), document("server"));
}

#[test]
fn the_token_of_a_sandbox_learns_its_id_and_what_it_uses() {
    if !is_root() {
        skip!("host mode needs root");
    }
    let server = Server::host().start();
    let (sandbox, other) = (server.sandbox(), server.sandbox());
    let mut connection = server.connect();
    connection.token = Some(sandbox.token.clone());
    let access = connection.request("GET", "/v1/access", &[], b"").json();
    let expected = serde_json::json!({ "mode": "host", "opens": "sandbox", "sandbox": sandbox.id });
    assert_eq!(access, expected);

    sandbox.spawn(&serde_json::json!({ "cmd": ["sleep", "1000"] }));
    let json = [("Accept", "application/json")];
    // The kernel counts the pages of a process that has just started a moment late.
    wait_until("its memory", Duration::from_secs(10), || {
        let metrics = connection
            .request("GET", &sandbox.target("metrics"), &json, b"")
            .json();
        assert_eq!(metrics["id"], sandbox.id);
        assert_eq!(metrics["processes"], 1, "{metrics}");
        metrics["memory_bytes"].as_u64().unwrap() > 0
    });
    let text = sandbox.get("metrics?disk=1").text();
    assert!(
        text.contains(&format!(
            "sbx_sandbox_processes{{sandbox=\"{}\"}} 1\n",
            sandbox.id
        )),
        "{text}"
    );
    assert!(text.contains("sbx_sandbox_disk_bytes"), "{text}");
    assert!(
        !text.contains(&other.id) && !text.contains("sbx_requests_total"),
        "{text}"
    );
    let reply = connection.request("GET", &other.target("metrics"), &json, b"");
    assert_error(&reply, 403, "forbidden");
    let reply = connection.request("GET", &sandbox.target("metrics?diks=1"), &json, b"");
    assert_error(&reply, 400, "bad_request");
    let gone = sandbox.target("metrics");
    let id = sandbox.id.clone();
    sandbox.delete();
    assert_error(&server.get(&gone), 404, "not_found");
    let access = connection.request("GET", "/v1/access", &[], b"");
    assert_error(&access, 403, "forbidden");
    assert!(!server.get("/v1/metrics").text().contains(&id));
}

/// A browser sends requests of any page to this machine, and only hides the answers.
#[test]
fn a_server_without_a_token_does_nothing_for_pages_of_others() {
    let server = Server::builder().no_token().start();
    let command = br#"{"cmd":["true"]}"#;
    let post = |target: &str, origin: &str| {
        let host = server.address.to_string();
        let headers = [
            ("Host", &*host),
            ("Origin", origin),
            ("Content-Type", "text/plain"),
        ];
        server.connect().request("POST", target, &headers, command)
    };
    let own = format!("http://{}", server.address);
    for target in ["/v1/exec", "/v1/processes", "/sandboxes", "/mcp"] {
        for origin in ["https://evil.example", "null", "http://127.0.0.1:1"] {
            assert_error(&post(target, origin), 403, "forbidden");
        }
    }
    assert_eq!(server.get("/v1/processes").json(), serde_json::json!([]));
    assert_eq!(post("/v1/exec", &own).status, 200);
}
