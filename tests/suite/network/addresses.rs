//! Addresses in all spellings, at every door of a filtered network: what the rules say about a destination holds however
//! a program writes it.

use std::collections::BTreeMap;
use std::process::Command;

use serde_json::{Value, json};

use super::filtered::in_both_modes;
use super::transparent::{in_all_modes, python, verdicts};
use super::{Place, allow, lan, sh, transparent};
use crate::fixture::{INSIDE, Names, OUTSIDE, Server, assert_error, serve_pages};

/// Ways to write addresses that the kernel delivers to 127.0.0.1.
const LOOPBACK: [&str; 9] = [
    "127.0.0.1",
    "0.0.0.0",
    "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]",
    "[::FFFF:7F00:0001]",
    "[::ffff:0.0.0.0]",
    "[::ffff:0:0]",
    "[0:0:0:0:0:ffff:0:0]",
    "[0000::ffff:0:0]",
];

/// The same for `::1`.
const WIDE_LOOPBACK: [&str; 4] = ["[::1]", "[::]", "[0::0]", "[0:0:0:0:0:0:0:1]"];

/// Addresses that translators and tunnels lead to 127.0.0.1.
const EMBEDDED: [&str; 4] = [
    "[64:ff9b::7f00:1]",
    "[64:ff9b::0.0.0.0]",
    "[::127.0.0.1]",
    "[2002:7f00:1::]",
];

/// What some programs take for an address and others for a name, or for another address.
const ODD: [&str; 23] = [
    "0",
    "0.",
    "00",
    "0x0",
    "0X0",
    "0x",
    "127.1",
    "127.0.1",
    "2130706433",
    "0x7f000001",
    "0X7F000001",
    "0x7F.1",
    "0177.0.0.1",
    "017700000001",
    "127.0.0.01",
    "127.0.0.1.",
    "0.0.0.0.",
    "300.1.1.1",
    "1.2.3.4.5",
    "name.0x7f",
    "%31%32%37.0.0.1",
    "[::1%25lo]",
    "[::ffff:127.1]",
];

/// Asks for hosts at every door of the gate, and prints `{host: {door: outcome}}`: `open`, `refused`, `bad`, or something
/// else. Expects the hosts, a port, and whether the gate is transparent.
const DOORS: &str = r"
import json, os, socket, struct
gate = ('127.0.0.1', int(os.environ['HTTP_PROXY'].rsplit(':', 1)[1]))
def talk(*messages):
    client = socket.create_connection(gate, timeout=60)
    client.sendall(messages[0])
    answer = b''
    for message in messages[1:]:
        answer += client.recv(2)
        client.sendall(message)
    try:
        answer += client.recv(4096)
    except ConnectionResetError:
        return answer or b'reset'
    return answer
named = {200: 'open', 400: 'bad', 403: 'refused', 0: 'open', 1: 'bad', 2: 'refused'}
def http(line, host):
    answer = talk(f'{line} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n'.encode())
    status = int(answer.split()[1])
    return named.get(status, status)
def socks(address):
    answer = talk(b'\5\1\0', b'\5\1\0' + address + struct.pack('>H', port))
    return named.get(answer[3], answer[3])
def redirected(host):
    answer = talk(f'\0{host}:{port}\nGET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n'.encode())
    return 'refused' if answer in (b'', b'reset') else 'open'
def connected(address):
    client = socket.socket()
    try: client.connect((address, port))
    except PermissionError: return 'refused'
    return 'open'
outcomes = {}
for host in hosts:
    doors = outcomes[host] = {}
    doors['CONNECT'] = http(f'CONNECT {host}:{port}', host)
    doors['GET'] = http(f'GET http://{host}:{port}/', host)
    name = host.encode()
    doors['socks name'] = socks(b'\3' + bytes([len(name)]) + name)
    for kind, family in [(b'\1', socket.AF_INET), (b'\4', socket.AF_INET6)]:
        try: address = socket.inet_pton(family, host.strip('[]'))
        except OSError: continue
        doors[f'socks {family.name}'] = socks(kind + address)
        # Where the network is the sandbox's own, so is its loopback interface.
        if kind == b'\1' and is_transparent and not is_own: doors['connect'] = connected(host)
    if is_transparent:
        doors['line'] = redirected(host)
print(json.dumps(outcomes))
";

/// What each host is answered with at each door.
#[track_caller]
fn outcomes(
    place: &Place<'_>,
    more: &Value,
    hosts: &[&str],
    port: u16,
) -> BTreeMap<String, BTreeMap<String, Value>> {
    let policy = match more.get("network") {
        Some(network) => network.clone(),
        None => place.server.get(&place.target("network")).json()["posture"].clone(),
    };
    let truth = |is: bool| if is { "True" } else { "False" };
    let is_own = match &place.sandbox {
        Some(_) => {
            let shown = place.server.get(place.target("").trim_end_matches('/'));
            shown.json()["isolation"]["mode"] == "namespaces"
        }
        None => false,
    };
    let code = format!(
        "hosts, port, is_transparent, is_own = {hosts:?}, {port}, {}, {}\n{DOORS}",
        truth(policy["transparent"] == true),
        truth(is_own),
    );
    serde_json::from_str(&sh(place, more, &python(&code))).unwrap()
}

/// Expects the same answer about each host at every door. A line of the transparent kind has no way to say that it is bad.
#[track_caller]
fn expect(place: &Place<'_>, more: &Value, hosts: &[&str], port: u16, expected: &str) {
    let outcomes = outcomes(place, more, hosts, port);
    assert_eq!(outcomes.len(), hosts.len());
    let is_expected = |door: &str, outcome: &Value| match door {
        "line" if expected == "bad" => outcome == "refused",
        _ => outcome == expected,
    };
    let wrong: Vec<String> = outcomes
        .iter()
        .flat_map(|(host, doors)| {
            doors
                .iter()
                .map(move |(door, outcome)| (host, door, outcome))
        })
        .filter(|(_, door, outcome)| !is_expected(door, outcome))
        .map(|(host, door, outcome)| format!("{host} by {door}: {outcome}"))
        .collect();
    assert!(wrong.is_empty(), "expected {expected}: {wrong:#?}");
}

/// A network of everything but what is denied, for programs without proxy support too.
fn open_but(deny: &[&str]) -> Value {
    json!({ "network": { "mode": "open", "deny": deny, "transparent": true } })
}

/// What the machine's `/etc/hosts` says.
fn hosts_file_has(name: &str) -> bool {
    let hosts = std::fs::read_to_string("/etc/hosts").unwrap_or_default();
    hosts.split_whitespace().any(|word| word == name)
}

#[test]
fn the_servers_own_port_is_reached_in_no_spelling() {
    let lan = lan!();
    let names = Names::serve(&lan);
    names.set("zero.example", &["0.0.0.0"]);
    names.set("wide-zero.example", &["::"]);
    names.set("mapped.example", &["::ffff:0.0.0.0"]);
    let mut hosts = [&LOOPBACK[..], &WIDE_LOOPBACK, &EMBEDDED].concat();
    hosts.extend([
        "127.8.9.1",
        INSIDE,
        "[::ffff:203.0.113.1]",
        "[64:ff9b::203.0.113.1]",
    ]);
    let looked_up = ["zero.example", "wide-zero.example", "mapped.example"];
    hosts.extend(looked_up);
    hosts.extend(["localhost", "localhost.", "LOCALHOST"]);
    hosts.extend(["ip6-localhost"].iter().filter(|name| hosts_file_has(name)));
    // Everything is opened that a rule can open.
    let every = [
        "localhost",
        "127.0.0.0/8",
        "0.0.0.0/8",
        "0.0.0.0",
        "0.0.0.0/0",
        "::1",
        "::",
        "::/0",
        "@private",
        "64:ff9b::/96",
        "::/96",
        "2002::/16",
        INSIDE,
        "ip6-localhost",
    ];
    let all_rules = transparent(&[&every[..], &looked_up].concat());
    for network in [all_rules, open_but(&["nobody.example"])] {
        in_all_modes(&lan, &network, |place, more| {
            let own = place.server.address.port();
            expect(place, more, &hosts, own, "refused");
            expect(place, more, &ODD, own, "bad");
            let refused = verdicts(place, "refused");
            assert!(!refused.is_empty());
            for (host, port, rule) in refused {
                assert_eq!(
                    (port, rule.as_str()),
                    (own.into(), "the server's own port"),
                    "{host}"
                );
            }
            assert_eq!(verdicts(place, "allowed"), []);
        });
    }
}

#[test]
fn what_is_denied_is_denied_in_every_spelling() {
    let lan = lan!();
    let names = Names::serve(&lan);
    names.set("zero.example", &["0.0.0.0"]);
    names.set("wide-zero.example", &["::"]);
    names.set("mapped.example", &["::ffff:0.0.0.0"]);
    let port = 8080;
    for address in ["127.0.0.1", "::1"] {
        let listen = || std::net::TcpListener::bind((address, port)).unwrap();
        serve_pages(lan.inside.run(listen), "loopback");
    }
    let looked_up = [
        "zero.example",
        "mapped.example",
        "localhost",
        "localhost.",
        "LOCALHOST",
    ];
    let narrow = [&LOOPBACK[..], &EMBEDDED, &looked_up].concat();
    let wide = [&WIDE_LOOPBACK[..], &["wide-zero.example"]].concat();
    let all = [&narrow[..], &wide].concat();
    in_all_modes(&lan, &open_but(&["127.0.0.0/8", "::1"]), |place, more| {
        expect(place, more, &all, port, "refused");
        expect(place, more, &ODD, port, "bad");
    });
    // A rule is about the same destination in any spelling.
    let server = lan.start(Server::builder());
    let place = Place::dedicated(&server);
    for deny in [
        &["localhost"][..],
        &["127.0.0.1", "::/128"],
        &["0.0.0.0/8", "::/96"],
    ] {
        expect(&place, &open_but(deny), &all, port, "refused");
    }
    for rule in [
        "127.0.0.1",
        "0.0.0.0",
        "::ffff:127.0.0.1",
        "0.0.0.0/8",
        "::ffff:127.0.0.0/104",
        "[::ffff:0:0]:8080",
    ] {
        let denied = open_but(&[rule]);
        expect(&place, &denied, &LOOPBACK, port, "refused");
        expect(&place, &denied, &WIDE_LOOPBACK, port, "open");
        let allowed = transparent(&[rule]);
        expect(&place, &allowed, &LOOPBACK, port, "open");
        expect(&place, &allowed, &WIDE_LOOPBACK, port, "refused");
        expect(&place, &allowed, &ODD, port, "bad");
    }
}

/// The names are that proxy's to look up, so it must not be told a name that it would take for an address.
#[test]
fn a_proxy_of_ones_own_is_asked_for_no_address_in_disguise() {
    let lan = lan!();
    let proxy = lan.serve(OUTSIDE, "proxy");
    let mut network = open_but(&["127.0.0.0/8", "::1", "localhost"]);
    network["network"]["proxy"] = json!(format!("http://{proxy}"));
    let names = [
        "localhost",
        "localhost.",
        "LOCALHOST",
        "ip6-localhost",
        "ip6-loopback",
        "localhost.localdomain",
    ];
    let all = [&LOOPBACK[..], &WIDE_LOOPBACK, &EMBEDDED, &names].concat();
    in_both_modes(&lan, &network, |place, more| {
        expect(place, more, &all, 8080, "refused");
        expect(place, more, &ODD, 8080, "bad");
        // It takes any request.
        let good = [
            "0.example",
            "a1",
            "7f000001",
            "x.0x7g",
            OUTSIDE,
            "[2001:db8::1]",
        ];
        expect(place, more, &good, 8080, "open");
    });
    // It is asked for what was judged.
    let server = lan.start(Server::builder());
    let place = Place::dedicated(&server);
    network["network"]["deny"] = json!([]);
    let page = sh(
        &place,
        &network,
        "curl -sS http://[::ffff:0.0.0.0]:8080/path",
    );
    assert!(
        page.starts_with("proxy\nGET http://127.0.0.1:8080/path HTTP/1.1\n"),
        "{page}"
    );
}

/// Addresses beside the first one of a network, and what the machine only receives.
#[test]
fn all_addresses_of_the_machine_are_its_own() {
    let lan = lan!();
    let script = format!(
        "ip addr add 203.0.113.77/24 dev far && ip addr add fd00:55::5/64 dev far nodad &&
         ip route add local 198.51.100.128/25 dev lo src {INSIDE} && ip route add local 100.64.0.0/24 dev lo"
    );
    let [program, network] = lan.inside.words();
    let made = Command::new(program)
        .args([&network, "sh", "-c", &script])
        .status();
    assert!(made.unwrap().success());
    let own = [
        INSIDE,
        "203.0.113.77",
        "[::ffff:203.0.113.77]",
        "198.51.100.200",
        "100.64.0.9",
        "[fd00:55::5]",
    ];
    let port = 8080;
    let listen = || std::net::TcpListener::bind(("::", port)).unwrap();
    serve_pages(lan.inside.run(listen), "inside");
    serve_pages(lan.listen(OUTSIDE, port), "outside");
    let ranges = allow(&[
        "203.0.113.0/24",
        "198.51.100.128/25",
        "100.64.0.0/24",
        "fd00:55::/64",
    ]);
    let everything = json!({ "network": { "mode": "open", "deny": ["nobody.example"] } });
    for builder in [Server::builder(), Server::host()] {
        let server = lan.start(builder.env("SBX_BIND", "0.0.0.0"));
        for network in [&ranges, &everything] {
            let (place, more) = match server.place {
                Some(_) => (Place::sandbox(&server, network), json!({})),
                None => (Place::dedicated(&server), network.clone()),
            };
            expect(&place, &more, &own, server.address.port(), "refused");
            expect(&place, &more, &[OUTSIDE], port, "open");
            // A range that happens to hold them does not name them.
            let expected = if network == &ranges {
                "refused"
            } else {
                "open"
            };
            expect(&place, &more, &own, port, expected);
        }
    }
}

#[test]
fn the_server_is_nobodys_proxy() {
    let lan = lan!();
    let server = lan.start(Server::builder());
    let place = Place::dedicated(&server);
    let own = server.address.port();
    for host in ["127.0.0.1", "0.0.0.0", "[::ffff:0:0]", "localhost", INSIDE] {
        let network =
            json!({ "network": { "mode": "open", "proxy": format!("http://{host}:{own}") } });
        let page = sh(&place, &network, "curl -sS http://localhost/health");
        let refused: Value = serde_json::from_str(&page).unwrap();
        assert_eq!(refused["code"], "bad_proxy", "{host}: {page}");
        let text = refused["error"].as_str().unwrap();
        assert!(text.contains("the server's own port"), "{host}: {text}");
    }
}

#[test]
fn rules_take_addresses_in_one_spelling() {
    let server = Server::start();
    let refused = |field: &str, rules: &Value| {
        let mut network = json!({ "mode": "allowlist", "allow": [], "deny": [] });
        network[field] = rules.clone();
        let reply = server.post("/v1/exec", &json!({ "cmd": "true", "network": network }));
        assert_error(&reply, 400, "bad_request");
    };
    for text in ODD.iter().chain(&["*.1", "*.0x7f", "*.1.2.3.4"]) {
        for rule in [
            (*text).to_owned(),
            format!("{text}:80"),
            format!("{text}/8"),
        ] {
            refused("allow", &json!([rule]));
            refused("deny", &json!([rule]));
        }
        refused("proxy", &json!(format!("http://{text}:3128")));
        refused("socks", &json!(format!("socks5h://{text}:1080")));
    }
}
