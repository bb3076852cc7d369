//! The file routes of a sandbox lead nowhere else while its code gives names other files under them,
//! as fast as it can.
//!
//! Everything outside that the names lead to is open to everybody by its permissions, so that only
//! how paths are resolved keeps the server out; or it is a neighbour's. Both ways of resolving are
//! tried: openat2(2), and the walk of a kernel that does not have it.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use super::probe::{Probe, hide_call};
use super::{Neighbour, Vault, race_length};
use crate::fixture::{Answer, Ask, Sandbox, Server, Stop, Subjects, is_root, random_bytes, routes};
use crate::skip;

/// What is asked for beside the requests of all routes; `{}` is a name under which things change.
const VARIANTS: &[(&str, &str)] = &[
    ("GET", "files/read?offset=0&length=100&path={}"),
    ("GET", "files/read?path={}/inner"),
    ("GET", "files/read?lines=1&path={}"),
    ("GET", "files/stat?hash=sha256&path={}"),
    ("PUT", "files/write?if_absent=1&path={}/new"),
    ("PUT", "files/write?mode=600&path={}"),
    ("PUT", "files/write?offset=0&path={}"),
    ("PUT", "files/write?offset=1&truncate_to=2&path={}"),
    ("PUT", "files/write?path={}/deep/new"),
    ("PUT", "files/write?offset=3&mode=644&path={}/marker"),
    ("GET", "files/list?detail=full&path={}"),
    ("GET", "files/glob?all=1&path={}"),
    ("POST", "files/grep {\"pattern\":\".\",\"all\":true}"),
    (
        "POST",
        "files/grep {\"pattern\":\".\",\"all\":true,\"path\":\"{}\"}",
    ),
    ("GET", "files/glob?all=1&sort=mtime&path=."),
    ("GET", "files/archive?path=.&include=*-*"),
    ("GET", "files/archive?format=tar.gz&path={}/marker"),
    ("PUT", "files/archive?atomic=1&path={}/deep"),
    (
        "POST",
        "files/compare {\"path\":\"{}\",\"entries\":[{\"path\":\"inner\",\"size\":1}]}",
    ),
    ("GET", "files/stat?detail=full&path={}"),
    ("POST", "files/mkdir?path={}/made/deeper"),
    ("POST", "files/mkdir?mode=777&path={}"),
    ("DELETE", "files/delete?recursive=1&path={}"),
    ("DELETE", "files/delete?recursive=1&path={}/MARKER"),
    ("POST", "files/move?from=gift&to={}/marker"),
    ("POST", "files/move?from=gift&to={}/new"),
    ("POST", "files/move?from=taken&to={}"),
    (
        "POST",
        "files/patch?path={} --- a/marker\n+++ b/marker\n@@ -0,0 +1 @@\n+harm\n",
    ),
    (
        "POST",
        "files/copy?recursive=1&overwrite=1&from={}&to=taken",
    ),
    ("POST", "files/copy?overwrite=1&from={}/marker&to=taken"),
    ("POST", "files/copy?recursive=1&overwrite=1&from=dir&to={}"),
    ("POST", "files/copy?overwrite=1&from=gift&to={}/new"),
    ("POST", "files/chmod?recursive=1&mode=755&path={}"),
];

/// Everything that is asked for, with `{}` in the place of such a name. It gives nobody's time away, so no stream without
/// end is among it.
fn requests() -> Vec<Ask> {
    let names = Subjects::below(".").with("watch", "watch");
    let mut requests = Vec::new();
    for route in routes().filter(|route| route.answer != Answer::Endless) {
        for paths in [["{}", "{}"], ["{}/marker", "{}/new"]] {
            requests.extend(route.asks_at_files("", &names, paths));
        }
    }
    for (method, route) in VARIANTS {
        let (path, body) = route.split_once(' ').unwrap_or((route, "harm"));
        requests.push(Ask::new(method, format!("/{path}"), body));
    }
    requests.extend(["GET", "DELETE"].map(|method| {
        let events = if method == "GET" { "/events" } else { "" };
        Ask::new(method, format!("/files/watches/watch{events}"), "")
    }));
    requests
}

/// Each of these has to succeed and to be refused in a race.
const KINDS: [&str; 7] = ["read", "write", "list", "stat", "mkdir", "delete", "move"];

/// How long a race goes on until they have, on a machine that has little time for it.
const PATIENCE: Duration = Duration::from_secs(60);

/// What requests came to, by kind: how many succeeded, and how many were refused.
pub type Counts = BTreeMap<&'static str, [u32; 2]>;

pub fn tells_enough(counts: &Counts) -> bool {
    let mut kinds = KINDS.iter();
    kinds.all(|kind| {
        counts
            .get(kind)
            .is_some_and(|of_kind| !of_kind.contains(&0))
    })
}

/// Asks for everything under every name for as long as a race lasts; what each request came to.
pub fn hammer(sandbox: &Sandbox<'_>, names: &[&str], markers: &[&str]) -> Counts {
    let begun = Instant::now();
    let stop = Stop::default();
    let counts = Mutex::new(Counts::new());
    let requests = requests();
    thread::scope(|scope| {
        let _guard = stop.guard();
        let workers: Vec<_> = (0..3)
            .map(|worker| {
                let (counts, requests) = (&counts, &requests);
                scope.spawn(move || {
                    let mut connection = sandbox.connect();
                    let order = random_bytes(4096, worker + 77);
                    for choice in order
                        .chunks_exact(3)
                        .cycle()
                        .step_by(usize::try_from(worker).unwrap() + 1)
                    {
                        let passed = begun.elapsed();
                        let is_over =
                            || passed >= PATIENCE || tells_enough(&counts.lock().unwrap());
                        if passed >= race_length() && is_over() {
                            return;
                        }
                        let ask = &requests[usize::from(choice[0]) % requests.len()];
                        let name = names[usize::from(choice[1]) % names.len()];
                        let marker = markers[usize::from(choice[2]) % markers.len()];
                        let fill = |text: &str| text.replace("{}", name).replace("MARKER", marker);
                        let (method, path, body) = (ask.method, fill(&ask.target), fill(&ask.body));
                        let target = sandbox.target(&path[1..]);
                        let reply = connection.request(method, &target, &[], body.as_bytes());
                        let route = format!("{path} {body}");
                        let text = reply.text();
                        assert!(
                            reply.status != 500 && reply.status < 600,
                            "{method} {route}: {text}"
                        );
                        // The path that was asked for is the only thing a marker may be in.
                        if !route.contains(marker) {
                            for marker in markers {
                                assert!(!text.contains(marker), "{method} {route}: {text}");
                            }
                        }
                        if reply.header("connection") == Some("close") {
                            connection = sandbox.connect();
                        }
                        let kind = route_name(method, &route);
                        let mut counts = counts.lock().unwrap();
                        let entry = counts.entry(kind).or_default();
                        entry[usize::from(reply.status >= 300)] += 1;
                    }
                })
            })
            .collect();
        for worker in workers {
            worker.join().unwrap();
        }
    });
    counts.into_inner().unwrap()
}

fn route_name(method: &'static str, route: &str) -> &'static str {
    KINDS
        .into_iter()
        .find(|name| route.starts_with(&format!("/files/{name}")))
        .unwrap_or(method)
}

fn race(server: &Server) {
    let neighbour = Neighbour::new(server);
    let vault = Vault::new();
    let root_only = Vault::below("/root");
    let sandbox = server.sandbox();
    let probe = Probe::new(&sandbox);
    let vault_path = vault.directory.path().display().to_string();
    let secret = root_only
        .as_ref()
        .map_or_else(|| "/etc/shadow".to_owned(), |vault| vault.path("marker"));
    let mut pairs = Vec::new();
    let mut names = Vec::new();
    for (name, other) in [
        ("dir-vault", vault_path.clone()),
        ("dir-neighbour", neighbour.path("")),
        ("dir-up", "../../..".to_owned()),
        ("file-vault", vault.path("marker")),
        ("file-neighbour", neighbour.path("marker")),
        ("file-root", secret),
        ("file-fifo", "fifo".to_owned()),
        ("file-hard", "hard:own".to_owned()),
        ("file-dir", "dir".to_owned()),
        ("file-proc", "/proc/self/environ".to_owned()),
        ("file-device", "/dev/zero".to_owned()),
        ("dir-file", "file".to_owned()),
    ] {
        pairs.push(format!("{name}={other}"));
        names.push(name);
    }
    sandbox.sh("echo own > own; echo gift > gift");
    let mut act = vec!["swap"];
    act.extend(pairs.iter().map(String::as_str));
    let swapper = sandbox.spawn(&probe.command(&[&act]));
    let markers = [vault.marker.text.as_str(), neighbour.marker.text.as_str()];
    let counts = hammer(&sandbox, &names, &markers);
    let running = sandbox.get(&format!("processes/{}", swapper["id"].as_str().unwrap()));
    assert_eq!(running.json()["running"], true, "{}", running.text());
    eprintln!("done and refused: {counts:?}");
    assert!(tells_enough(&counts), "{counts:?}");
    vault.check();
    neighbour.check();
    if let Some(vault) = &root_only {
        vault.check();
    }
    // What was made by the file routes is the sandbox's own.
    sandbox.delete();
    vault.check();
    neighbour.check();
}

#[test]
fn no_route_leaves_a_home_in_which_names_change_under_it() {
    if !is_root() {
        skip!("needs root");
    }
    race(&Server::host().start());
}

#[test]
fn no_route_leaves_a_home_in_which_names_change_under_it_on_a_kernel_without_openat2() {
    if !is_root() {
        skip!("needs root");
    }
    let builder = Server::host();
    let mut command = builder.command();
    hide_call(&mut command, libc::SYS_openat2);
    let server = builder.start_as(command);
    let sandbox = server.sandbox();
    let call = libc::SYS_openat2.to_string();
    let outcome =
        Probe::new(&sandbox).run_one(&["syscall", &call, "-100", "text:.", "buffer", "24"]);
    assert_eq!(
        outcome, "ENOSYS",
        "it is hidden from the server and all it starts"
    );
    sandbox.delete();
    race(&server);
}

#[test]
fn deleting_a_home_in_which_names_change_takes_nothing_else() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let neighbour = Neighbour::new(&server);
    let vault = Vault::new();
    let deadline = Instant::now() + race_length();
    while Instant::now() < deadline {
        let sandbox = server.sandbox();
        let probe = Probe::new(&sandbox);
        let pairs = [
            format!("dir-vault={}", vault.directory.path().display()),
            format!("dir-neighbour={}", neighbour.path("")),
            format!("file-vault={}", vault.path("marker")),
        ];
        let mut act = vec!["swap"];
        act.extend(pairs.iter().map(String::as_str));
        sandbox.spawn(&probe.command(&[&act]));
        sandbox.delete();
        vault.check();
        neighbour.check();
    }
}
