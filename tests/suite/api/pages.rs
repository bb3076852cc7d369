//! What pages of other sites can do with the server from somebody's browser, as the browser says (Fetch Metadata).

use serde_json::json;

use crate::fixture::{Connection, Reply, Server, TOKEN, TempDir, assert_error, is_root};
use crate::proxy::Backend;
use crate::skip;

const PAGE: &str = "https://app.example";

fn ask(server: &Server, method: &str, target: &str, headers: &[(&str, &str)]) -> Reply {
    let mut connection: Connection = server.connect();
    connection.token = None;
    // A server without a token answers to no other name.
    let headers = [&[("Host", "localhost")], headers].concat();
    connection.request(method, target, &headers, br#"{"cmd":["true"]}"#)
}

/// Ways in which a browser lets the page of another site, or of another origin of this one, ask.
const FOREIGN: &[&[(&str, &str)]] = &[
    &[
        ("Sec-Fetch-Site", "cross-site"),
        ("Sec-Fetch-Mode", "no-cors"),
    ],
    &[
        ("Sec-Fetch-Site", "cross-site"),
        ("Sec-Fetch-Mode", "no-cors"),
        ("Sec-Fetch-Dest", "script"),
    ],
    &[
        ("Sec-Fetch-Site", "same-site"),
        ("Sec-Fetch-Mode", "no-cors"),
        ("Sec-Fetch-Dest", "image"),
    ],
    &[
        ("Sec-Fetch-Site", "cross-site"),
        ("Sec-Fetch-Mode", "cors"),
        ("Origin", "https://evil.example"),
    ],
    &[
        ("Sec-Fetch-Site", "cross-site"),
        ("Sec-Fetch-Mode", "cors"),
        ("Origin", "null"),
    ],
    &[
        ("Sec-Fetch-Site", "same-site"),
        ("Sec-Fetch-Mode", "websocket"),
    ],
    &[("sec-fetch-site", "cross-site")],
    &[
        ("Sec-Fetch-Site", "same-origin"),
        ("Sec-Fetch-Site", "cross-site"),
    ],
    &[("Sec-Fetch-Site", "of-a-later-standard")],
    &[("Sec-Fetch-Site", "")],
];

#[test]
fn other_sites_get_nothing_without_a_token() {
    let backend = Backend::saying("hello");
    let proxied = backend.path("/");
    let named = format!("{}-machine.localhost", backend.port);
    for server in [
        Server::start(),
        Server::builder().no_token().start(),
        Server::builder().no_token().env("SBX_INSECURE", 1).start(),
    ] {
        for headers in FOREIGN {
            for (method, target) in [
                ("GET", "/"),
                ("GET", "/health"),
                ("GET", "/openapi.json"),
                ("GET", "/v1/access"),
                ("GET", "/v1/processes"),
                ("POST", "/v1/exec"),
                ("GET", "/v1/files/read?path=/etc/hostname"),
                ("GET", "/v1/nope"),
                ("GET", "/console"),
                ("GET", "/console/app.js"),
                ("POST", "/mcp"),
                ("GET", "/files?path=/etc/hostname&signature=x"),
                ("POST", "/process.Process/List"),
                ("GET", "/v2/sandboxes"),
                ("GET", &*proxied),
                ("POST", &*proxied),
                ("OPTIONS", "/v1/exec"),
            ] {
                let reply = ask(&server, method, target, headers);
                let is_e2b = reply.status == 401 && server.token.is_some();
                assert!(
                    reply.status == 403 || is_e2b,
                    "{method} {target} {headers:?}: {}",
                    reply.text()
                );
            }
            let headers = [&[("Host", &*named)], *headers].concat();
            let mut connection = server.connect();
            connection.token = None;
            let reply = connection.request("GET", "/", &headers, b"");
            assert_eq!(reply.status, 403, "{headers:?}: {}", reply.text());
        }
        assert_eq!(server.get("/v1/processes").json(), json!([]));
    }
    backend.expect_nothing();
}

#[test]
fn links_lead_to_what_people_open() {
    let link = |site| {
        [
            ("Sec-Fetch-Site", site),
            ("Sec-Fetch-Mode", "navigate"),
            ("Sec-Fetch-Dest", "document"),
        ]
    };
    let backend = Backend::saying("hello");
    let proxied = backend.path("/");
    for server in [Server::start(), Server::builder().no_token().start()] {
        let is_open = server.token.is_none();
        for site in ["cross-site", "same-site"] {
            for target in [
                "/",
                "/health",
                "/openapi.json",
                "/console",
                "/console/icon.svg",
            ] {
                for method in ["GET", "HEAD"] {
                    let reply = ask(&server, method, target, &link(site));
                    assert_eq!(reply.status, 200, "{target}: {}", reply.text());
                }
            }
            let reply = ask(&server, "GET", &proxied, &link(site));
            assert_eq!(
                reply.text().starts_with("<!doctype html>"),
                is_open,
                "{}",
                reply.text()
            );
            for (method, target) in [
                ("POST", "/"),
                ("POST", "/health"),
                ("GET", "/v1/processes"),
                ("POST", "/v1/exec"),
                ("GET", "/v1/files/read?path=/etc/hostname"),
            ] {
                assert_error(&ask(&server, method, target, &link(site)), 403, "forbidden");
            }
        }
        // By the address bar, and from the server's own pages.
        for site in ["none", "same-origin"] {
            let reply = ask(&server, "GET", "/v1/processes", &link(site));
            assert_eq!(reply.status, if is_open { 200 } else { 403 });
        }
        let made = server
            .post("/v1/tickets", &json!({ "port": backend.port }))
            .json();
        let ticket = made["path"].as_str().unwrap();
        // A ticket is a token, and its page is of another site to everything.
        for headers in FOREIGN.iter().copied().chain([&link("cross-site")[..]]) {
            assert_eq!(
                ask(&server, "GET", ticket, headers).text(),
                "hello",
                "{headers:?}"
            );
            backend.next();
        }
        backend.expect_nothing();
    }
}

/// A proxy before the server may add it to whatever comes. A page of another site adds one only after a preflight.
#[test]
fn a_token_opens_nothing_to_pages_of_other_sites() {
    let server = Server::start();
    let bearer = format!("Bearer {TOKEN}");
    let tokens = [("X-Sandbox-Token", TOKEN), ("Authorization", &bearer)];
    for (site, token) in [("cross-site", tokens[0]), ("same-site", tokens[1])] {
        let site = ("Sec-Fetch-Site", site);
        for mode in ["cors", "same-origin", "no-cors", "websocket", ""] {
            let headers = [token, site, ("Sec-Fetch-Mode", mode)];
            for (method, target) in [("GET", "/v1/processes"), ("POST", "/v1/exec")] {
                let reply = ask(&server, method, target, &headers);
                assert_error(&reply, 403, "forbidden");
            }
        }
        // A link may be followed, and a form is not sent.
        let headers = [token, site, ("Sec-Fetch-Mode", "navigate")];
        assert_eq!(ask(&server, "GET", "/v1/processes", &headers).status, 200);
        let reply = ask(&server, "POST", "/v1/exec", &headers);
        assert_error(&reply, 403, "forbidden");
    }
    // Over plain HTTP browsers tell the origin only.
    let exec = |headers: &[(&str, &str)]| {
        let mut headers = headers.to_vec();
        headers.push(("Host", "sandbox.example:8443"));
        let mut connection = server.connect();
        connection.request("POST", "/v1/exec", &headers, br#"{"cmd":["true"]}"#)
    };
    for origin in ["http://evil.example", "null", "http://sandbox.example"] {
        assert_error(&exec(&[("Origin", origin)]), 403, "forbidden");
    }
    let own = ("Origin", "http://sandbox.example:8443");
    assert_eq!(exec(&[own]).status, 200);
    // A proxy has changed the host: it says so, or the browser does.
    let public = ("Origin", "https://public.example");
    assert_error(&exec(&[public]), 403, "forbidden");
    let forwarded = ("X-Forwarded-Host", "public.example");
    assert_eq!(exec(&[public, forwarded]).status, 200);
    let metadata = ("Sec-Fetch-Site", "same-origin");
    assert_eq!(exec(&[public, metadata]).status, 200);
}

#[test]
fn pages_of_allowed_origins_are_no_others() {
    for server in [
        Server::builder().env("SBX_ALLOWED_ORIGINS", PAGE).start(),
        Server::builder()
            .no_token()
            .env("SBX_ALLOWED_ORIGINS", PAGE)
            .start(),
    ] {
        let metadata = [("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Mode", "cors")];
        let page = [metadata[0], metadata[1], ("Origin", PAGE)];
        assert_eq!(ask(&server, "GET", "/health", &page).status, 200);
        let preflight = [
            page[0],
            page[1],
            page[2],
            ("Access-Control-Request-Method", "POST"),
        ];
        assert_eq!(ask(&server, "OPTIONS", "/v1/exec", &preflight).status, 204);
        let mut headers = page.to_vec();
        headers.extend(server.token.is_some().then_some(("X-Sandbox-Token", TOKEN)));
        let reply = ask(&server, "POST", "/v1/exec", &headers);
        assert_eq!(reply.status, 200, "{}", reply.text());
        assert_eq!(reply.header("access-control-allow-origin"), Some(PAGE));
        assert_eq!(reply.header("x-content-type-options"), Some("nosniff"));
        assert_error(&ask(&server, "GET", "/health", &metadata), 403, "forbidden");
    }
}

/// A server that answers to every name still asks which page it is that wants something.
#[test]
fn a_server_that_is_open_to_all_is_not_open_to_their_pages() {
    let server = Server::builder().no_token().env("SBX_INSECURE", 1).start();
    let post = |headers: &[(&str, &str)]| {
        let mut connection = server.connect();
        connection.request("POST", "/v1/exec", headers, br#"{"cmd":["true"]}"#)
    };
    let name = ("Host", "sandbox.example:8443");
    for origin in [
        "https://evil.example",
        "null",
        "https://sandbox.example",
        "https://sandbox.example:8443.evil",
    ] {
        assert_error(&post(&[name, ("Origin", origin)]), 403, "forbidden");
    }
    assert_eq!(post(&[name]).status, 200);
    assert_eq!(
        post(&[name, ("Origin", "https://sandbox.example:8443")]).status,
        200
    );
    if !is_root() {
        skip!("host mode needs root");
    }
    let server = Server::host().no_token().env("SBX_INSECURE", 1).start();
    let origin = [name, ("Origin", "https://evil.example")];
    let reply = server
        .connect()
        .request("POST", "/v1/sandboxes", &origin, b"{}");
    assert_error(&reply, 403, "forbidden");
}

/// As a script, a style or an image, a file would tell a page of another site what is in it.
#[test]
fn no_answer_is_a_part_of_another_page() {
    let dir = TempDir::new();
    std::fs::write(dir.join("secret.js"), "var secret = 1").unwrap();
    let server = Server::builder().no_token().start();
    let path = dir.join("secret.js");
    let dir = dir.path().display();
    for (method, target, status) in [
        ("GET", format!("/v1/files/read?path={path}"), 200),
        ("HEAD", format!("/v1/files/read?path={path}"), 200),
        ("GET", format!("/v1/files/read?path={path}&lines=1"), 200),
        ("GET", format!("/v1/files/read?path={path}.no"), 404),
        ("GET", format!("/v1/files/archive?path={dir}"), 200),
        (
            "GET",
            format!("/v1/files/archive?path={dir}&format=tar.gz"),
            200,
        ),
        ("GET", format!("/v1/files/list?path={dir}"), 200),
        ("GET", format!("/files?path={path}"), 200),
        ("GET", format!("/files?path={path}.no"), 404),
        ("GET", "/v1/processes".to_owned(), 200),
        ("POST", "/v1/exec".to_owned(), 200),
        ("GET", "/v1/metrics".to_owned(), 200),
        ("GET", "/console".to_owned(), 200),
        ("GET", "/v1/nope".to_owned(), 404),
    ] {
        let reply = ask(&server, method, &target, &[]);
        assert_eq!(reply.status, status, "{target}: {}", reply.text());
        assert_eq!(
            reply.header("x-content-type-options"),
            Some("nosniff"),
            "{target}"
        );
        assert_eq!(
            reply.header("cross-origin-resource-policy"),
            Some("same-origin"),
            "{target}"
        );
        let cached = reply.header("cache-control");
        assert!(matches!(cached, Some("no-store" | "no-cache")), "{target}");
    }
    let ranged = ask(
        &server,
        "GET",
        &format!("/v1/files/read?path={path}"),
        &[("Range", "bytes=0-2")],
    );
    assert_eq!(
        (ranged.status, ranged.header("x-content-type-options")),
        (206, Some("nosniff"))
    );
}
