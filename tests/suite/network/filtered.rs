//! Filtered networks: what the rules name is reached, and nothing else, by no kind of socket and in no way round.
//!
//! The server runs on a host of its own, and everybody whom commands want to reach is on another one (see `Lan`).

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use serde_json::{Value, json};

use super::{PROXY_VARIABLES, Place, allow, lan, sh, transparent, visitors, ways_to_leave, with};
use crate::fixture::{
    INSIDE, Lan, Names, OTHERS, OUTSIDE, PATIENCE, Sandbox, Server, Wiretap, assert_error,
    in_network, is_root, serve_pages, wait_until,
};
use crate::skip;
use crate::walls::probe::Plan;

/// Runs a test on a dedicated machine whose commands have a network, and in a sandbox that has it.
pub fn in_both_modes(lan: &Lan, network: &Value, test: impl Fn(&Place<'_>, &Value)) {
    test(&Place::dedicated(&lan.start(Server::builder())), network);
    let server = lan.start(Server::host());
    test(&Place::sandbox(&server, network), &json!({}));
}

/// The port of the gate that commands have.
#[track_caller]
pub fn gate_of(place: &Place<'_>, more: &Value) -> u16 {
    let proxy = sh(place, more, "echo $HTTP_PROXY");
    let port = proxy.trim().rsplit_once(':').unwrap().1.parse().unwrap();
    for name in PROXY_VARIABLES {
        assert_eq!(sh(place, more, &format!("echo ${name}")), proxy);
    }
    port
}

#[test]
fn what_is_allowed_is_reached_in_every_way_that_a_proxy_has() {
    let lan = lan!();
    let web = lan.serve(OUTSIDE, "the web");
    let other = lan.serve(OUTSIDE, "another");
    let network = allow(&[&web.to_string()]);
    in_both_modes(&lan, &network, |place, more| {
        for options in [
            "",
            "--proxytunnel",
            "--proxy socks5://$GATE",
            "--proxy socks5h://$GATE",
        ] {
            let curl =
                format!("GATE=${{HTTP_PROXY#http://}}; curl -sS {options} http://{web}/path?query");
            let page = sh(place, more, &curl);
            assert!(
                page.starts_with("the web\nGET /path?query HTTP/1.1\n"),
                "{options}: {page}"
            );
            assert!(page.contains(&format!("Host: {web}")), "{page}");
            assert!(!page.contains("Proxy-"), "{page}");
        }
        // Requests on one connection, each judged by itself.
        let both = format!("curl -sS http://{web}/1 http://{other}/ http://{web}/2");
        let pages = sh(place, more, &both);
        let lines = pages
            .lines()
            .filter(|line| line.starts_with("GET") || line.starts_with('{'));
        let lines: Vec<&str> = lines.collect();
        assert_eq!(lines[0], "GET /1 HTTP/1.1");
        assert!(lines[1].contains("not_allowed"), "{pages}");
        assert_eq!(lines[2], "GET /2 HTTP/1.1");
        let refused = sh(place, more, &format!("curl -sS http://{other}/"));
        let refused: Value = serde_json::from_str(&refused).unwrap();
        assert_eq!(refused["code"], "not_allowed");
        let text = refused["error"].as_str().unwrap();
        assert!(
            text.contains(&other.to_string()) && text.contains("not in allow"),
            "{text}"
        );
        let code = "-o /dev/null -w '%{http_connect}' --proxytunnel";
        let tunnel = place.exec(&json!(format!("curl -s {code} http://{other}/")), more);
        assert_eq!(tunnel.stdout, "403");
        // SOCKS: not allowed by the rules (RFC 1928 section 6).
        let socks =
            format!("curl -sS --proxy socks5h://${{HTTP_PROXY#http://}} http://{other}/ 2>&1");
        let said = sh(place, more, &socks);
        assert!(said.contains("(2)"), "{said}");
    });
}

#[test]
fn verdicts_are_counted_and_listed() {
    let lan = lan!();
    let web = lan.serve(OUTSIDE, "the web");
    let network = allow(&[&web.to_string()]);
    in_both_modes(&lan, &network, |place, more| {
        let get = || place.server.get(&place.target("network")).json();
        let before = get();
        assert_eq!(
            (&before["allowed"], &before["refused"]),
            (&json!(0), &json!(0))
        );
        sh(
            place,
            more,
            &format!("curl -sS http://{web}/ http://evil.example:81/"),
        );
        let report = get();
        assert_eq!(
            (&report["allowed"], &report["refused"]),
            (&json!(1), &json!(1))
        );
        let recent = report["recent"].as_array().unwrap();
        assert_eq!(recent.len(), 2);
        assert_eq!(
            (&recent[0]["host"], &recent[0]["verdict"]),
            (&json!(OUTSIDE), &json!("allowed"))
        );
        assert_eq!(recent[0]["rule"], json!(web.to_string()));
        assert_eq!(
            (&recent[1]["host"], &recent[1]["port"]),
            (&json!("evil.example"), &json!(81))
        );
        assert_eq!(
            (&recent[1]["verdict"], &recent[1]["rule"]),
            (&json!("refused"), &json!("not in allow"))
        );
        let expected = if place.sandbox.is_some() {
            &network["network"]
        } else {
            &json!("open")
        };
        assert_eq!(report["posture"]["allow"], expected["allow"]);
        let metrics = place.server.get("/v1/metrics").text();
        assert!(
            metrics.contains("sbx_egress_allowed_total 1\n"),
            "{metrics}"
        );
        assert!(
            metrics.contains("sbx_egress_refused_total 1\n"),
            "{metrics}"
        );
        assert!(!metrics.contains("sbx_egress_bytes_total 0\n"), "{metrics}");
    });
}

/// Whatever is done to a socket first, and wherever it is to lead.
#[test]
fn no_socket_leads_past_the_proxy() {
    let lan = lan!();
    let web = lan.serve(OUTSIDE, "the web");
    let tap = Wiretap::start(&lan);
    let allowed = web.to_string();
    for (network, is_transparent) in [
        (allow(&[&allowed]), false),
        // What is allowed would be reached here.
        (transparent(&["nobody.example"]), true),
    ] {
        check_ways_out(&lan, &network, web, is_transparent);
    }
    assert_eq!(tap.finish(), Vec::<String>::new());
}

fn check_ways_out(lan: &Lan, network: &Value, web: SocketAddr, is_transparent: bool) {
    in_both_modes(lan, network, |place, more| {
        let gate = gate_of(place, more);
        // Somebody who waits at the port of the gate elsewhere, and at others.
        let at_gate = lan.listen(OUTSIDE, gate);
        let outside = lan.listen(OUTSIDE, 0);
        let inside = lan.inside.run(|| TcpListener::bind("0.0.0.0:0").unwrap());
        let port = |server: &TcpListener| server.local_addr().unwrap().port();
        // Refused by the proxy before the kernel is asked.
        let outside_gate = if is_transparent { "EACCES" } else { "EINVAL" };
        let targets = [
            (format!("{OUTSIDE}:{gate}"), outside_gate),
            (format!("{OUTSIDE}:{}", port(&outside)), "EACCES"),
            (web.to_string(), "EACCES"),
            (format!("127.0.0.1:{}", port(&inside)), "EACCES"),
            (format!("{INSIDE}:{}", port(&inside)), "EACCES"),
            // The port is the gate's at every address; nobody listens there.
            (format!("127.0.0.2:{gate}"), "ECONNREFUSED"),
            (format!("{OUTSIDE}:53"), "EACCES"),
        ];
        let targets = &targets[..targets.len() - usize::from(is_transparent)];
        let mut plan = Plan::default();
        for (target, expected) in targets {
            for steps in ways_to_leave() {
                let steps: Vec<&str> = steps.iter().map(String::as_str).collect();
                let act = [&["leave", target.as_str()], &steps[..]].concat();
                // A dedicated machine's commands may have root's rights, and find other reasons.
                let mut expected = format!(
                    "{expected}|ENETUNREACH|EHOSTUNREACH|EISCONN|EINVAL|EACCES|EADDRNOTAVAIL|ENODEV"
                );
                // The packet goes round the loopback and finds nobody.
                if steps.contains(&"device:lo") || steps.contains(&"source-route") {
                    expected += "|EINPROGRESS";
                }
                plan.add(&act, &expected);
            }
            for call in [libc::SYS_sendto, libc::SYS_sendmsg, libc::SYS_sendmmsg] {
                plan.add(&["fast-open", &call.to_string(), target], "EOPNOTSUPP");
            }
        }
        place.check(&plan, more);
        for server in [&at_gate, &outside, &inside] {
            assert_eq!(visitors(server), 0);
        }
    });
}

#[test]
fn there_are_no_other_sockets() {
    let lan = lan!();
    in_both_modes(&lan, &allow(&[]), |place, more| {
        let mut plan = Plan::default();
        let socket = libc::SYS_socket.to_string();
        let pair = libc::SYS_socketpair.to_string();
        for family in 0..=46 {
            for kind in 0..=10 {
                for protocol in [0, 1, 6, 9, 16, 17, 132, 136, 255, 256, 262] {
                    let expected = match (family, kind, protocol) {
                        (libc::AF_UNIX, ..) => "ok|EPROTONOSUPPORT|ESOCKTNOSUPPORT",
                        (libc::AF_NETLINK, _, 0) => "ok|ESOCKTNOSUPPORT",
                        (libc::AF_NETLINK, ..) => "EPROTONOSUPPORT",
                        (libc::AF_INET, libc::SOCK_STREAM, 0 | 6) => "ok",
                        (libc::AF_INET, ..) => "ENETUNREACH",
                        _ => "EAFNOSUPPORT",
                    };
                    let words = [family, kind, protocol].map(|word| word.to_string());
                    let [family, kind, protocol] = words.each_ref().map(String::as_str);
                    plan.add(&["syscall", &socket, family, kind, protocol], expected);
                }
            }
        }
        plan.add(&["syscall", &pair, "2", "1", "0", "buffer"], "EOPNOTSUPP");
        let option = libc::SYS_setsockopt.to_string();
        let ulp = libc::TCP_ULP.to_string();
        let act = ["syscall", &option, "0", "6", &ulp, "text:tls", "4"];
        plan.add(&act, "ENOENT");
        // Flags that the kernel does not know.
        plan.add(&["syscall", &socket, "2", "65537", "0"], "EINVAL");
        let queue = libc::SYS_io_uring_setup.to_string();
        plan.add(&["syscall", &queue, "8", "buffer"], "ENOSYS");
        place.check(&plan, more);
    });
}

#[test]
fn a_race_for_the_address_of_a_connection_is_lost() {
    let lan = lan!();
    let web = lan.serve(OUTSIDE, "the web").to_string();
    for network in [allow(&[]), transparent(&[&web])] {
        in_both_modes(&lan, &network, |place, more| {
            let gate = gate_of(place, more);
            let at_gate = lan.listen(OUTSIDE, gate);
            let other = lan.listen(OUTSIDE, 0);
            let at_other = other.local_addr().unwrap().to_string();
            let (own, wanted) = (format!("127.0.0.1:{gate}"), format!("{OUTSIDE}:{gate}"));
            let mut plan = Plan::default();
            plan.add(&["race-address", "400", &own, &wanted], "ok");
            plan.add(&["race-address", "400", &own, &at_other], "ok");
            plan.add(&["race-address", "400", &web, &at_other], "ok");
            place.check(&plan, more);
            for server in [&at_gate, &other] {
                assert_eq!(visitors(server), 0);
            }
        });
    }
}

#[test]
fn an_accepted_socket_leads_nowhere_either() {
    let lan = lan!();
    in_both_modes(&lan, &allow(&[]), |place, more| {
        let gate = gate_of(place, more);
        let at_gate = lan.listen(OUTSIDE, gate);
        let path = place.path("port");
        let act = ["leave-accepted", &path, &format!("{OUTSIDE}:{gate}")];
        let act = act.map(str::to_owned).to_vec();
        let body = with(place.acts(&[act], more), &json!({ "id": "accepted" }));
        let reply = place.post("processes", &body);
        assert_eq!(reply.status, 200, "{}", reply.text());
        wait_until("it listens", PATIENCE, || std::fs::exists(&path).unwrap());
        let port: u16 = std::fs::read_to_string(&path).unwrap().parse().unwrap();
        let _client = lan
            .inside
            .run(|| TcpStream::connect(("127.0.0.1", port)).unwrap());
        let logs = place.target("processes/accepted/logs?follow=1");
        let logs = place.server.get(&logs).text();
        assert!(logs.contains("EINVAL"), "{logs}");
        assert_eq!(visitors(&at_gate), 0);
    });
}

/// Before and while commands have the gate.
#[test]
fn nobody_else_has_the_port_of_a_gate() {
    let lan = lan!();
    in_both_modes(&lan, &allow(&[]), |place, more| {
        let gate = gate_of(place, more);
        for address in [
            "127.0.0.1",
            "127.0.0.2",
            "0.0.0.0",
            INSIDE,
            "::",
            "::1",
            "::ffff:127.0.0.1",
        ] {
            let address = SocketAddr::new(address.parse().unwrap(), gate);
            let error = lan.inside.run(|| TcpListener::bind(address)).unwrap_err();
            let kind = error.kind();
            // There may be no IPv6.
            let is_taken = kind == std::io::ErrorKind::AddrInUse
                || kind == std::io::ErrorKind::AddrNotAvailable && address.is_ipv6();
            assert!(is_taken, "{address}: {error}");
        }
    });
}

#[test]
fn the_gate_of_a_sandbox_serves_that_sandbox_only() {
    let lan = lan!();
    let web = lan.serve(OUTSIDE, "the web");
    let server = lan.start(Server::host());
    let owner = Place::sandbox(&server, &allow(&[&web.to_string()]));
    let gate = gate_of(&owner, &json!({}));
    // While a command runs, the gate is served.
    assert_eq!(
        owner
            .post("processes", &json!({ "cmd": "sleep 1000" }))
            .status,
        200
    );
    let stranger = Place::sandbox(&server, &json!({}));
    let curl = format!("curl -sS -m 60 -x http://127.0.0.1:{gate} http://{web}/ 2>&1 >/dev/null");
    // What it opens itself it reaches; by the gate of the other it does not.
    let outcome = stranger.exec(
        &json!(format!("curl -sS http://{web}/ >/dev/null && {curl}")),
        &json!({}),
    );
    assert_ne!(outcome.code(), Some(0), "{outcome:?}");
    // Closed, and not left waiting.
    assert!(!outcome.stdout.contains("timed out"), "{outcome:?}");
    // Nor does root of the machine.
    let mut client = lan
        .inside
        .run(|| TcpStream::connect(("127.0.0.1", gate)).unwrap());
    client.set_read_timeout(Some(PATIENCE)).unwrap();
    let _ = std::io::Write::write_all(
        &mut client,
        format!("CONNECT {web} HTTP/1.1\r\n\r\n").as_bytes(),
    );
    let mut answer = Vec::new();
    let _ = std::io::Read::read_to_end(&mut client, &mut answer);
    assert_eq!(String::from_utf8_lossy(&answer), "");
    assert_eq!(
        owner.server.get(&owner.target("network")).json()["allowed"],
        0
    );
    // Two sandboxes with the same rules have gates of their own.
    let twin = Place::sandbox(&server, &allow(&[&web.to_string()]));
    assert_ne!(gate_of(&twin, &json!({})), gate);
}

#[test]
fn names_are_looked_up_once_and_what_they_lead_to_is_judged() {
    let lan = lan!();
    let names = Names::serve(&lan);
    let port = 8080;
    let page = |address, name| serve_pages(lan.listen(address, port), name);
    page(OUTSIDE, "public");
    page(OTHERS[0], "other");
    page(OTHERS[1], "private");
    page(OTHERS[2], "metadata");
    let local = lan
        .inside
        .run(|| TcpListener::bind(("0.0.0.0", port)).unwrap());
    for (name, address) in [
        ("good.example", OUTSIDE),
        ("private.example", OTHERS[1]),
        ("metadata.example", OTHERS[2]),
        ("loopback.example", "127.0.0.1"),
        ("own.example", INSIDE),
        ("nobody.example", OUTSIDE),
        ("sub.wild.example", OTHERS[0]),
        ("wild.example", OTHERS[0]),
    ] {
        names.set(name, &[address]);
    }
    // Somebody who answers first with an address that may be reached, then with others.
    names.set(
        "rebinding.example",
        &[OUTSIDE, OTHERS[2], "127.0.0.1", OTHERS[1]],
    );
    let network = json!({ "network": {
        "mode": "allowlist",
        "allow": ["good.example", "private.example", "metadata.example", "loopback.example", "own.example",
            "*.wild.example:8080", "rebinding.example", "missing.example"],
        "deny": ["denied.wild.example"],
    }});
    let server = lan.start(Server::host());
    let place = Place::sandbox(&server, &network);
    let get = |host: &str| {
        let page = sh(
            &place,
            &json!({}),
            &format!("curl -sS http://{host}:{port}/"),
        );
        match serde_json::from_str::<Value>(&page) {
            Ok(refused) => refused["error"].as_str().unwrap().to_owned(),
            Err(_) => page,
        }
    };
    for (host, part) in [
        ("good.example", "public"),
        ("GOOD.example.", "public"),
        ("sub.wild.example", "other"),
        ("private.example", "@private"),
        ("metadata.example", "@cloud-metadata"),
        ("loopback.example", "localhost"),
        ("own.example", "localhost"),
        ("wild.example", "not in allow"),
        ("denied.wild.example", "denied.wild.example"),
        ("nobody.example", "not in allow"),
        (OUTSIDE, "not in allow"),
        (OTHERS[2], "@cloud-metadata"),
        ("127.0.0.1", "localhost"),
        // curl takes these for what they mean.
        ("127.1", "localhost"),
        ("2130706433", "localhost"),
        ("[::ffff:127.0.0.1]", "localhost"),
        ("[64:ff9b::a9fe:a9fe]", "@cloud-metadata"),
        ("missing.example", "is not known"),
        ("rebinding.example", "public"),
        ("rebinding.example", "@cloud-metadata"),
        ("rebinding.example", "localhost"),
        ("rebinding.example", "@private"),
    ] {
        let said = get(host);
        assert!(said.contains(part), "{host}: {said}");
    }
    // Nobody was asked about a name that is not allowed: that would carry data out.
    let asked = names.asked();
    assert!(asked.contains(&"good.example".to_owned()), "{asked:?}");
    for name in [
        "nobody.example",
        "wild.example",
        "denied.wild.example",
        "127.1",
        "2130706433",
    ] {
        assert!(
            !asked.iter().any(|asked| asked == name),
            "{name}: {asked:?}"
        );
    }
    assert_eq!(visitors(&local), 0);
}

#[test]
fn everything_but_what_is_denied_is_reached() {
    let lan = lan!();
    let names = Names::serve(&lan);
    names.set("metadata.example", &[OTHERS[2]]);
    names.set("good.example", &[OUTSIDE]);
    let web = lan.serve(OUTSIDE, "the web");
    let private = lan.serve(OTHERS[1], "private");
    let metadata = lan.serve(OTHERS[2], "metadata");
    let network = json!({ "network": { "mode": "open", "deny": ["@cloud-metadata", "10.9.0.0/16", "bad.example"] } });
    in_both_modes(&lan, &network, |place, more| {
        let get = |url: String| sh(place, more, &format!("curl -sS http://{url}/"));
        assert!(get(format!("good.example:{}", web.port())).starts_with("the web"));
        assert!(get(web.to_string()).starts_with("the web"));
        for url in [
            private.to_string(),
            metadata.to_string(),
            format!("metadata.example:{}", metadata.port()),
            "bad.example".to_owned(),
            // The server's own port, which no rule names.
            place.server.address.to_string(),
        ] {
            assert!(get(url.clone()).contains("not_allowed"), "{url}");
        }
    });
}

#[test]
fn a_command_tightens_and_never_widens() {
    let lan = lan!();
    let (one, two) = (lan.serve(OUTSIDE, "one"), lan.serve(OUTSIDE, "two"));
    let (one, two) = (one.to_string(), two.to_string());
    let server = lan.start(Server::host());
    let network =
        json!({ "network": { "mode": "allowlist", "allow": [one, two], "deny": ["bad.example"] } });
    let place = Place::sandbox(&server, &network);
    let curl = format!("curl -sS http://{one}/ | head -n 1; curl -sS http://{two}/ | head -n 1");
    assert_eq!(sh(&place, &json!({}), &curl), "one\ntwo\n");
    let said = sh(&place, &allow(&[&two]), &curl);
    assert!(
        said.contains("not_allowed") && said.ends_with("two\n"),
        "{said}"
    );
    for wider in [
        json!("open"),
        json!({ "mode": "open", "deny": ["x.example"] }),
        json!({ "mode": "allowlist", "allow": [one, "other.example"] }),
        json!({ "mode": "allowlist", "allow": ["203.0.113.0/24"] }),
        json!({ "mode": "allowlist", "allow": [one], "proxy": "http://203.0.113.2:3128" }),
    ] {
        for route in ["exec", "processes", "contexts"] {
            let reply = place.post(route, &json!({ "cmd": "true", "network": wider }));
            assert_error(&reply, 400, "too_wide");
        }
    }
    // A context keeps what it was made with.
    let made = place.post(
        "contexts",
        &with(
            allow(&[&two]),
            &json!({ "id": "tight", "language": "bash" }),
        ),
    );
    assert_eq!(made.status, 200, "{}", made.text());
    let run = json!({ "code": curl, "format": "simple", "language": "bash", "context": "tight" });
    let said = place.post("execute", &run).text();
    assert!(
        said.contains("not_allowed") && said.contains("two"),
        "{said}"
    );
}

/// A dedicated machine's gate answers whoever connects, so the test can be the client.
#[test]
fn what_is_no_request_for_a_proxy_is_refused() {
    let lan = lan!();
    let web = lan.serve(OUTSIDE, "the web");
    let server = lan.start(Server::builder());
    let place = Place::dedicated(&server);
    let more = allow(&[&web.to_string()]);
    let sleeper = with(
        with(json!({ "cmd": "echo $HTTP_PROXY; sleep 1000" }), &more),
        &json!({ "id": "gate" }),
    );
    assert_eq!(place.post("processes", &sleeper).status, 200);
    let gate = gate_of(&place, &more);
    let say = |bytes: &[u8]| {
        let network = lan.inside.path();
        in_network(&network, || {
            let mut client = TcpStream::connect(("127.0.0.1", gate)).unwrap();
            client.set_read_timeout(Some(PATIENCE)).unwrap();
            let _ = std::io::Write::write_all(&mut client, bytes);
            client.shutdown(std::net::Shutdown::Write).unwrap();
            let mut answer = Vec::new();
            let _ = std::io::Read::read_to_end(&mut client, &mut answer);
            String::from_utf8_lossy(&answer).into_owned()
        })
    };
    for request in [
        format!("GET / HTTP/1.1\r\nHost: {web}\r\n\r\n"),
        format!("GET https://{web}/ HTTP/1.1\r\n\r\n"),
        format!("GET http://user@{web}/ HTTP/1.1\r\n\r\n"),
        "GET http:///x HTTP/1.1\r\n\r\n".to_owned(),
        format!("CONNECT {web}/ HTTP/1.1\r\n\r\n"),
        format!("CONNECT {OUTSIDE} HTTP/1.1\r\n\r\n"),
        format!("CONNECT {OUTSIDE}:0 HTTP/1.1\r\n\r\n"),
        format!("CONNECT {OUTSIDE}:99999 HTTP/1.1\r\n\r\n"),
        format!("CONNECT {web} HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello"),
        format!("GET http://{web}/ HTTP/1.1\r\nA : b\r\n\r\n"),
        format!(
            "POST http://{web}/ HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
        ),
        format!("GET http://{web}/ HTTP/1.1\nHost: x\r\n\r\n"),
        "hello\r\n\r\n".to_owned(),
        "\u{4}\u{1}\0P".to_owned() + "\u{1}\u{2}\u{3}\u{4}me\0\r\n\r\n",
    ] {
        let answer = say(request.as_bytes());
        assert!(answer.starts_with("HTTP/1.1 400 "), "{request:?}: {answer}");
    }
    // Another host in the head does not change where the request goes.
    let answer = say(format!(
        "GET http://{web}/ HTTP/1.1\r\nHost: evil.example\r\nProxy-Authorization: x\r\n\r\n"
    )
    .as_bytes());
    assert!(
        answer.contains(&format!("Host: {web}")) && !answer.contains("evil"),
        "{answer}"
    );
    assert!(!answer.contains("Proxy-Authorization"), "{answer}");
    // SOCKS with a password only, an unknown command, and half a request.
    assert_eq!(say(b"\x05\x01\x02").as_bytes(), "\u{5}\u{fffd}".as_bytes());
    assert!(
        say(b"\x05\x01\x00\x05\x02\x00\x01\x01\x02\x03\x04\x00\x50")
            .starts_with("\u{5}\0\u{5}\u{7}")
    );
    assert_eq!(say(b"\x05\x01\x00\x05\x01\x00\x03\xff"), "\u{5}\0");
    // It serves on.
    assert!(say(format!("GET http://{web}/ HTTP/1.1\r\n\r\n").as_bytes()).contains("the web"));
}

#[test]
fn a_proxy_of_ones_own_gets_credentials_that_no_command_sees() {
    let lan = lan!();
    let names = Names::serve(&lan);
    let http = lan.serve(OUTSIDE, "proxy");
    let server = lan.start(Server::host());
    let network = json!({ "network": {
        "mode": "allowlist", "allow": ["only.example"], "proxy": format!("http://me:s3cr3t@{http}"),
    }});
    let place = Place::sandbox(&server, &network);
    let none = json!({});
    let page = sh(&place, &none, "curl -sS http://only.example/path");
    // The stand-in answers every request, so it shows what it got.
    assert!(
        page.starts_with("proxy\nGET http://only.example/path HTTP/1.1\n"),
        "{page}"
    );
    assert!(
        page.contains("Proxy-Authorization: Basic bWU6czNjcjN0"),
        "{page}"
    );
    assert!(sh(&place, &none, "curl -sS http://other.example/").contains("not_allowed"));
    // It takes any CONNECT for a request, and what follows too.
    let tunnelled = place.exec(
        &json!("curl -sS --http0.9 --proxytunnel --max-time 5 http://only.example/x"),
        &none,
    );
    assert!(
        tunnelled
            .stdout
            .contains("CONNECT only.example:80 HTTP/1.1"),
        "{tunnelled:?}"
    );
    // Names are the proxy's to look up.
    assert_eq!(names.asked(), Vec::<String>::new());
    let sandbox = place.sandbox.as_ref().unwrap();
    let id = sandbox.target("").replace("/v1/sandboxes/", "");
    let shown = server
        .get(&format!("/v1/sandboxes/{}", id.trim_end_matches('/')))
        .text();
    let listed = server.get("/v1/sandboxes").text();
    let report = server.get(&place.target("network")).text();
    let environment = sh(&place, &none, "env");
    for text in [&shown, &listed, &report, &environment, &server.log()] {
        assert!(!text.contains("s3cr3t"), "{text}");
    }
    assert!(shown.contains(&format!("http://{http}")), "{shown}");
}

/// Its start ends before there is anything to serve.
#[test]
fn a_command_whose_time_is_over_at_once_is_timed_out() {
    let lan = lan!();
    in_both_modes(&lan, &allow(&[]), |place, more| {
        for _ in 0..50 {
            let body = with(json!({ "cmd": ["sleep", "1000"], "timeout": 1e-9 }), more);
            let outcome = place.run(&body);
            assert_eq!(outcome.exit["timed_out"], true, "{outcome:?}");
        }
    });
}

/// Nothing leaves while it is found out whether anything could.
#[test]
fn the_check_sends_nothing_where_the_kernel_keeps_sockets_in() {
    let lan = lan!();
    let tap = Wiretap::start(&lan);
    in_both_modes(&lan, &allow(&[]), |place, more| {
        assert_eq!(sh(place, more, "echo ran"), "ran\n");
        let policies = &place.server.get("/health").json()["isolation"]["postures"];
        assert_eq!(policies, &json!(["open", "allowlist", "blocked"]));
    });
    assert_eq!(tap.finish(), Vec::<String>::new());
}

#[test]
fn a_machine_that_lets_loopback_out_does_not_offer_it() {
    let lan = lan!();
    let tap = Wiretap::start(&lan);
    lan.inside.run(|| {
        let words = [
            "-c",
            "mount -t proc proc /proc && echo 1 > /proc/sys/net/ipv4/conf/far/route_localnet",
        ];
        let status = std::process::Command::new("unshare")
            .args(["--mount", "sh"])
            .args(words)
            .status();
        assert!(status.unwrap().success());
    });
    for builder in [Server::builder(), Server::host()] {
        let server = lan.start(builder);
        let policies = &server.get("/health").json()["isolation"]["postures"];
        assert_eq!(policies, &json!(["open", "blocked"]));
        let is_host = server.place.is_some();
        let (route, body) = if is_host {
            ("/v1/sandboxes", allow(&[]))
        } else {
            ("/v1/exec", with(json!({ "cmd": "true" }), &allow(&[])))
        };
        let reply = server.post(route, &body);
        assert_error(&reply, 400, "unavailable");
        assert!(reply.text().contains("route_localnet"), "{}", reply.text());
    }
    assert_eq!(tap.finish(), Vec::<String>::new());
}

/// Closed, not open.
#[test]
fn sockets_of_a_command_that_outlives_the_server_fail() {
    let lan = lan!();
    let mut server = lan.start(Server::builder());
    let place = Place::dedicated(&server);
    let (go, told) = (place.path("go"), place.path("told"));
    let inner = json!([["syscall", libc::SYS_socket.to_string(), "2", "1", "0"]]).to_string();
    let program = crate::walls::probe::words(&place.program).join(" ");
    let script = format!(
        "trap '' TERM HUP; echo started > {told}.started; while [ ! -e {go} ]; do sleep 0.05; done; \
         echo '{inner}' | {program} > {told}.part; mv {told}.part {told}"
    );
    let body = with(
        json!({ "cmd": ["setsid", "sh", "-c", script] }),
        &allow(&[]),
    );
    let reply = place.post("processes", &body);
    assert_eq!(reply.status, 200, "{}", reply.text());
    wait_until("it runs", PATIENCE, || {
        std::fs::exists(format!("{told}.started")).unwrap()
    });
    server.signal(libc::SIGKILL);
    server.wait_for_exit(PATIENCE);
    std::fs::write(&go, "").unwrap();
    wait_until("it has tried", PATIENCE, || std::fs::exists(&told).unwrap());
    let outcomes = crate::walls::probe::outcomes(&std::fs::read_to_string(&told).unwrap());
    assert_eq!(outcomes, ["ENOSYS"]);
}

#[test]
fn nothing_is_left_of_commands_that_ended() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let place = Place::sandbox(&server, &allow(&[]));
    let pid = server.inner_pid();
    let open = || crate::fixture::descriptors_of(pid);
    let threads = || {
        std::fs::read_dir(format!("/proc/{pid}/task"))
            .unwrap()
            .count()
    };
    let run = |number: usize| {
        let network = allow(&[&format!("host{number}.example")]);
        let ceiling = Place::sandbox(&server, &json!({}));
        assert_eq!(
            sh(&ceiling, &network, "curl -sS http://x.example/ | wc -l"),
            "1\n"
        );
        assert_eq!(sh(&place, &json!({}), "true"), "");
        ceiling.sandbox.unwrap().delete();
    };
    run(0);
    // The thread of a workspace lingers for some seconds.
    let settled = Duration::from_secs(30);
    let (mut before, mut busy) = (open(), threads());
    wait_until("what the first run took is given back", settled, || {
        let now = (open(), threads());
        let is_settled = now == (before, busy) && now.1 < 12;
        (before, busy) = now;
        std::thread::sleep(Duration::from_millis(500));
        is_settled
    });
    for number in 1..=20 {
        run(number);
    }
    wait_until("nothing is left", Duration::from_secs(60), || {
        open() <= before + 1 && threads() <= busy + 1
    });
}

#[test]
fn a_thousand_sandboxes_have_a_posture_each() {
    let lan = lan!();
    let (one, two) = (lan.serve(OUTSIDE, "one"), lan.serve(OUTSIDE, "two"));
    // Users of whom no other test has any (see `spare_uid`).
    let server = lan.start(Server::host().env("SBX_UID_RANGE", "55000-55999"));
    let policies = [
        (json!({ "network": "open" }), "one two"),
        (json!({ "network": "blocked" }), "- -"),
        (allow(&[&one.to_string()]), "one not_allowed"),
        (
            json!({ "network": { "mode": "open", "deny": [one.to_string()] } }),
            "not_allowed two",
        ),
    ];
    let made: Vec<(Sandbox<'_>, &str)> = policies
        .iter()
        .flat_map(|(policy, expected)| {
            let body = with(json!({ "count": 250 }), policy);
            let reply = server.post("/v1/sandboxes", &body).json();
            let all = reply["sandboxes"].as_array().unwrap().iter();
            let all: Vec<_> = all
                .map(|one| (Sandbox::of(&server, one), *expected))
                .collect();
            all
        })
        .collect();
    assert_eq!(made.len(), 1000);
    // Each tenth has a command that goes on meanwhile.
    for (sandbox, _) in made.iter().step_by(10) {
        sandbox.spawn(&json!({ "cmd": "sleep 1000" }));
    }
    let get = |url| format!("curl -s http://{url}/ | grep -oE '^(one|two)$|not_allowed' || echo -");
    let script = format!("echo $({}) $({})", get(one), get(two));
    let parts: Vec<_> = made.chunks(made.len() / 4).collect();
    std::thread::scope(|scope| {
        for part in parts {
            scope.spawn(|| {
                for (sandbox, expected) in part.iter().step_by(5) {
                    assert_eq!(sandbox.sh(&script).trim(), *expected);
                }
            });
        }
    });
    let reply = server.delete("/v1/sandboxes");
    assert_eq!(reply.status, 200, "{}", reply.text());
    assert_eq!(server.get("/health").json()["sandboxes"], 0);
}

#[test]
fn a_flood_of_sockets_keeps_no_other_sandbox_waiting() {
    let lan = lan!();
    let web = lan.serve(OUTSIDE, "the web");
    let server = lan.start(Server::host());
    let network = allow(&[&web.to_string()]);
    let (flooding, quiet) = (
        Place::sandbox(&server, &network),
        Place::sandbox(&server, &network),
    );
    let flood = "import socket\nwhile True: socket.socket().close()";
    for _ in 0..4 {
        let reply = flooding.post("processes", &json!({ "cmd": ["python3", "-c", flood] }));
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    for _ in 0..5 {
        let page = sh(
            &quiet,
            &json!({}),
            &format!("curl -sS --max-time 60 http://{web}/"),
        );
        assert!(page.starts_with("the web"), "{page}");
    }
    flooding.sandbox.unwrap().delete();
}

#[test]
fn a_sandbox_with_open_connections_is_deleted() {
    let lan = lan!();
    let silent = lan.listen(OUTSIDE, 0);
    let at = silent.local_addr().unwrap();
    let server = lan.start(Server::host());
    let place = Place::sandbox(&server, &allow(&[&at.to_string()]));
    let curl = json!({ "cmd": format!("curl -sS --proxytunnel http://{at}/") });
    for _ in 0..3 {
        assert_eq!(place.post("processes", &curl).status, 200);
    }
    let _accepted: Vec<_> = silent.incoming().take(3).collect();
    // With the one that asks.
    let are_open = |count: usize| {
        let metrics = server.get("/v1/metrics").text();
        metrics.contains(&format!("sbx_connections {count}\n"))
    };
    wait_until("they count", PATIENCE, || are_open(4));
    place.sandbox.unwrap().delete();
    wait_until("its connections have ended", PATIENCE, || are_open(1));
}

/// Whoever connects to it would wait for nobody, with what it has sent in the machine's memory.
#[test]
fn a_gate_that_no_command_needs_is_closed_whoever_connects_to_it() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let place = Place::sandbox(&server, &allow(&["localhost"]));
    let port = gate_of(&place, &json!({}));
    // As fast as it can, so that somebody connects all the time.
    wait_until("nobody listens", 2 * PATIENCE, || {
        let stranger = TcpStream::connect(SocketAddr::from(([127, 0, 0, 1], port)));
        stranger.is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused)
    });
    // The next command has another one.
    let page = sh(
        &place,
        &json!({}),
        "curl -s -o /dev/null -w '%{http_code}' http://example.invalid/",
    );
    assert_eq!(page, "403");
}

#[test]
fn a_command_that_cannot_be_started_leaves_no_gate() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let own = server.sandbox_with(&allow(&["localhost"]));
    let before = listeners_of(server.inner_pid());
    for command in [
        json!({ "cmd": ["/there/is/none"] }),
        json!({ "cmd": ["/etc/passwd"] }),
        json!({ "cmd": "true", "cwd": "/there/is/none" }),
    ] {
        let reply = own.post("exec", &command);
        assert!((400..500).contains(&reply.status), "{}", reply.text());
        wait_until("its gate is closed", PATIENCE, || {
            listeners_of(server.inner_pid()) == before
        });
    }
}

/// How many sockets a process has that listen on the machine.
fn listeners_of(pid: i32) -> usize {
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    let listening: Vec<String> = table
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .filter(|fields| fields[3] == "0A")
        .map(|fields| format!("socket:[{}]", fields[9]))
        .collect();
    std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok())
        .filter(|link| listening.iter().any(|socket| *link == *socket))
        .count()
}
