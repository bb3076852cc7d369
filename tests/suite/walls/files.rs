//! No file outside a sandbox's home is changed from inside, and none read but what the machine's
//! programs consist of.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use serde_json::json;

use super::probe::{Plan, Probe};
use super::{Neighbour, Vault};
use crate::fixture::{
    Ask, BINARY, Outcome, PATIENCE, Server, Subjects, events_of, homes_in, is_root, routes,
    threads_of, wait_until,
};
use crate::skip;

/// Every act on a directory like [`Vault`]'s or a neighbour's home; links and renames in and out.
fn attack(plan: &mut Plan, home: &str, directory: &str, inner: &str) {
    let directory = directory.trim_end_matches('/');
    let below = |name: &str| format!("{directory}/{name}");
    let marker = below("marker");
    let new = below("new");
    let refused = "EACCES";
    // Landlock says EXDEV where a right is missing for moving a file between directories.
    let moved = "EACCES|EXDEV|EPERM";
    plan.add(&["list", directory], refused);
    plan.add(&["read", &marker], refused);
    plan.add(&["write", &marker], refused);
    plan.add(&["truncate", &marker], refused);
    plan.add(&["truncate-path", &marker], refused);
    plan.add(&["chmod", &marker], "EACCES|EPERM");
    plan.add(&["touch", &marker], "ok|EACCES|EPERM");
    plan.add(&["create", &new], refused);
    plan.add(&["mkdir", &new], refused);
    plan.add(&["symlink", "/etc/passwd", &new], refused);
    plan.add(&["unix-listen", &new], refused);
    plan.add(&["unix-bind", &new], refused);
    plan.add(&["exec", &marker], refused);
    for kind in [libc::S_IFREG, libc::S_IFIFO, libc::S_IFSOCK, libc::S_IFCHR] {
        let (call, mode) = (libc::SYS_mknodat.to_string(), (kind | 0o666).to_string());
        let path = format!("text:{new}");
        plan.add(
            &["syscall", &call, "-100", &path, &mode, "0"],
            "EACCES|EPERM",
        );
    }
    plan.add(&["unlink", &marker], refused);
    plan.add(&["rmdir", &below(inner)], refused);
    plan.add(&["rename", &marker, &new], moved);
    plan.add(&["rename", &marker, "stolen"], moved);
    plan.add(&["rename", "own", &new], moved);
    plan.add(&["rename", "own", &marker], moved);
    plan.add(&["rename", &below(inner), "stolen"], moved);
    plan.add(&["exchange", "own", &marker], moved);
    plan.add(&["link", &marker, "stolen"], moved);
    plan.add(&["link", &marker, &new], moved);
    plan.add(&["link", "own", &new], moved);
    plan.add(&["list", &below(inner)], refused);
    plan.add(&["create", &below(&format!("{inner}/new"))], refused);
    plan.add(&["read", &below(&format!("{inner}/inner"))], refused);
    // By a link of one's own the way is the same.
    plan.add(&["symlink", directory, "way"], "ok");
    plan.add(&["list", "way/."], refused);
    plan.add(&["read", "way/marker"], refused);
    plan.add(&["write", "way/marker"], refused);
    plan.add(&["create", "way/new"], refused);
    plan.add(&["unlink", "way"], "ok");
    // To be there is no way in either. Last, because it is where names begin from then on.
    plan.add(&["chdir", directory], "EACCES|ok");
    plan.add(&["read", "marker"], "EACCES|ENOENT");
    plan.add(&["chdir", home], "ok");
}

#[test]
fn what_everybody_may_use_by_its_permissions_is_closed_to_a_sandbox() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let probe = Probe::new(&sandbox);
    sandbox.sh("echo mine > own");
    for parent in [
        "/tmp", "/var/tmp", "/dev/shm", "/run", "/root", "/mnt", "/srv", "/",
    ] {
        let Some(vault) = Vault::below(parent) else {
            eprintln!("{parent} is not there, or read-only");
            continue;
        };
        let mut plan = Plan::default();
        attack(
            &mut plan,
            sandbox.home.to_str().unwrap(),
            vault.directory.path().to_str().unwrap(),
            &vault.marker.text,
        );
        plan.add(&["list", parent], "EACCES");
        let new = format!("{parent}/{}", vault.marker.text);
        plan.add(&["create", &new], "EACCES");
        probe.check(&plan);
        vault.check();
        assert_eq!(sandbox.sh("cat own"), "mine\n");
        assert_eq!(sandbox.sh("ls"), "own\nprobe\n");
    }
}

#[test]
fn what_a_neighbour_lets_everybody_use_is_closed_to_a_sandbox() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let neighbour = Neighbour::new(&server);
    let sandbox = server.sandbox();
    let probe = Probe::new(&sandbox);
    sandbox.sh("echo mine > own");
    let mut plan = Plan::default();
    let home = sandbox.home.to_str().unwrap();
    attack(&mut plan, home, &neighbour.path(""), &neighbour.marker.text);
    let homes = server.place.as_ref().unwrap().homes();
    let homes = homes.to_str().unwrap();
    plan.add(&["list", homes], "EACCES");
    plan.add(&["create", &format!("{homes}/new")], "EACCES");
    plan.add(
        &["mkdir", &format!("{homes}/0123456789abcdef01234567")],
        "EACCES",
    );
    plan.add(
        &["symlink", "/", &format!("{homes}/0123456789abcdef01234567")],
        "EACCES",
    );
    plan.add(&["chmod", homes], "EPERM|EACCES");
    plan.add(
        &["rename", home, &format!("{homes}/other")],
        "EACCES|EXDEV|EPERM|EBUSY",
    );
    plan.add(&["rmdir", home], "EACCES|EBUSY|ENOTEMPTY");
    plan.add(
        &["rename", neighbour.sandbox.home.to_str().unwrap(), "stolen"],
        "EACCES|EXDEV",
    );
    plan.add(&["exchange", home, &neighbour.path("")], "EACCES|EXDEV");
    probe.check(&plan);
    neighbour.check();
    assert!(sandbox.home.exists());
    assert_eq!(
        server.get("/v1/sandboxes").json().as_array().unwrap().len(),
        2
    );
}

#[test]
fn what_a_neighbour_lets_nobody_use_is_not_even_seen_by_a_sandbox() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let neighbour = Neighbour::new(&server);
    let other = &neighbour.sandbox.home;
    fs::set_permissions(other, fs::Permissions::from_mode(0o700)).unwrap();
    let sandbox = server.sandbox();
    let probe = Probe::new(&sandbox);
    sandbox.sh("echo mine > own");
    let mut plan = Plan::default();
    // What needs no right that Landlock knows of.
    let marker = neighbour.path("marker");
    for path in [&marker, &neighbour.path("nothing"), &neighbour.path(".tmp")] {
        plan.add(&["stat", path], "EACCES");
        plan.add(&["readlink", path], "EACCES");
        plan.add(&["open-path", path], "EACCES");
        plan.add(&["touch", path], "EACCES");
        plan.add(&["chmod", path], "EACCES");
        plan.add(&["chown", path, &sandbox.uid.to_string()], "EACCES");
        plan.add(&["watch", path], "EACCES");
        plan.add(&["chdir", path], "EACCES");
    }
    let homes = server.place.as_ref().unwrap().homes();
    for path in [other.to_str().unwrap(), homes.to_str().unwrap()] {
        plan.add(&["watch", path], "EACCES");
        plan.add(&["touch", path], "EACCES|EPERM");
        plan.add(&["chmod", path], "EPERM");
        plan.add(&["chown", path, &sandbox.uid.to_string()], "EPERM");
    }
    plan.add(&["chdir", other.to_str().unwrap()], "EACCES");
    attack(
        &mut plan,
        sandbox.home.to_str().unwrap(),
        &neighbour.path(""),
        &neighbour.marker.text,
    );
    probe.check(&plan);
    fs::set_permissions(other, fs::Permissions::from_mode(0o777)).unwrap();
    neighbour.check();
}

#[test]
fn a_neighbours_home_is_closed_by_its_permissions_as_well() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let (one, other) = (server.sandbox(), server.sandbox());
    fs::write(other.home.join("marker"), "secret").unwrap();
    // Without Landlock: only as the user.
    let marker = other.home.join("marker");
    for command in ["cat", "ls", "rm -f", "chmod 777"] {
        let script = format!("{command} {}", marker.display());
        let output = std::os::unix::process::CommandExt::uid(
            &mut std::process::Command::new("/bin/sh"),
            one.uid,
        )
        .args(["-c", &script])
        .output()
        .unwrap();
        assert!(!output.status.success(), "{script}: {output:?}");
    }
    assert_eq!(fs::read_to_string(&marker).unwrap(), "secret");
}

#[test]
fn nothing_is_written_where_programs_are_read_from() {
    if !is_root() {
        skip!("needs root");
    }
    // One that everybody may write to by its permissions, there before the server starts.
    let _ = fs::create_dir("/opt");
    let vault = Vault::below("/opt").or_else(|| Vault::below("/usr/local"));
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let probe = Probe::new(&sandbox);
    sandbox.sh("echo mine > own");
    let mut plan = Plan::default();
    for directory in [
        "/bin",
        "/sbin",
        "/lib",
        "/lib64",
        "/usr",
        "/usr/bin",
        "/usr/local",
        "/etc",
        "/opt",
        "/proc",
        "/proc/self",
        "/sys",
        "/sys/kernel",
        "/dev",
        "/dev/pts",
        "/etc/resolv.conf",
    ] {
        if !fs::metadata(directory).is_ok_and(|found| found.is_dir()) {
            continue;
        }
        let new = format!("{directory}/sbx-new");
        // /proc and /sys have no way to make anything, for nobody.
        let refused = "EACCES|EROFS|EPERM|ENOENT";
        plan.add(&["create", &new], refused);
        plan.add(&["mkdir", &new], refused);
        plan.add(&["symlink", "/", &new], refused);
        plan.add(&["unix-bind", &new], refused);
        plan.add(&["rename", "own", &new], "EACCES|EXDEV|EPERM");
        plan.add(&["chmod", directory], refused);
        plan.add(&["chown", directory, &sandbox.uid.to_string()], refused);
    }
    plan.add(&["write", "/etc/passwd"], "EACCES|EROFS");
    plan.add(&["truncate-path", "/etc/passwd"], "EACCES|EROFS");
    plan.add(&["link", "/etc/passwd", "stolen"], "EACCES|EXDEV|EPERM");
    plan.add(&["link", "/bin/sh", "stolen"], "EACCES|EXDEV|EPERM");
    if let Some(vault) = &vault {
        let refused = "EACCES|EXDEV";
        let (marker, new) = (vault.path("marker"), vault.path("new"));
        for act in [
            &["write", &marker][..],
            &["truncate", &marker],
            &["truncate-path", &marker],
            &["create", &new],
            &["mkdir", &new],
            &["unlink", &marker],
            &["rmdir", &vault.path(&vault.marker.text)],
            &["rename", &marker, &new],
            &["rename", "own", &marker],
            &["link", "own", &new],
            &["link", &marker, &new],
            &["exchange", "own", &marker],
            &["unix-listen", &new],
        ] {
            plan.add(act, refused);
        }
        // The test means something only if programs there can be used.
        plan.add(&["read", &marker], "ok");
    } else {
        eprintln!("there is no place for a directory that everybody may write to");
    }
    probe.check(&plan);
    if let Some(vault) = &vault {
        vault.check();
    }
}

/// What a machine has that is not for everybody, or for nobody.
const SECRETS: &[&str] = &[
    "/etc/shadow",
    "/etc/gshadow",
    "/root",
    "/root/.bashrc",
    "/home",
    "/tmp",
    "/var",
    "/var/log",
    "/run",
    "/run/secrets",
    "/var/run/secrets/kubernetes.io",
    "/run/docker.sock",
    "/.dockerenv",
    "/dev",
    "/dev/mem",
    "/dev/kmem",
    "/dev/kmsg",
    "/dev/port",
    "/dev/sda",
    "/dev/vda",
    "/dev/nvme0n1",
    "/dev/loop0",
    "/dev/fuse",
    "/dev/kvm",
    "/dev/net/tun",
    "/dev/console",
    "/dev/tty0",
    "/dev/tty1",
    "/dev/shm",
    "/dev/mqueue",
    "/dev/hugepages",
    "/dev/userfaultfd",
    "/dev/vhost-net",
    "/proc/kcore",
    "/proc/kallsyms.",
    "/proc/1/environ",
    "/proc/kpageflags",
    "/proc/kmsg",
    "/sys/kernel/debug/tracing",
    "/sys/kernel/tracing/trace",
    "/sys/firmware/efi/efivars/x",
];

/// What of the kernel can be changed by writing.
const KNOBS: &[&str] = &[
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/hostname",
    "/proc/sys/vm/overcommit_memory",
    "/proc/sysrq-trigger",
    "/proc/self/uid_map",
    "/proc/self/gid_map",
    "/proc/self/setgroups",
    "/proc/self/oom_score_adj",
    "/proc/self/mem",
    "/proc/self/comm",
    "/proc/self/attr/current",
    "/proc/self/loginuid",
    "/proc/self/timerslack_ns",
    "/proc/self/coredump_filter",
    "/proc/sys/kernel/ns_last_pid",
    "/sys/power/state",
    "/sys/kernel/uevent_helper",
    "/sys/fs/cgroup/cgroup.procs",
];

#[test]
fn what_is_secret_on_a_machine_cannot_be_opened() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let probe = Probe::new(&sandbox);
    let mut plan = Plan::default();
    let refused = "EACCES|EPERM|ENOENT|ENXIO";
    for path in SECRETS {
        plan.add(&["read", path], &format!("{refused}|EISDIR"));
        plan.add(&["write", path], &format!("{refused}|EISDIR|EROFS"));
        plan.add(&["list", path], &format!("{refused}|ENOTDIR"));
    }
    for path in KNOBS {
        plan.add(&["put", path, "1"], "EACCES|ENOENT|EROFS|EPERM");
    }
    // Directories that can be read have no file that is read although only root may.
    let log = server.log();
    for path in [
        BINARY,
        env!("CARGO_MANIFEST_DIR"),
        &std::env::current_exe().unwrap().display().to_string(),
    ] {
        plan.add(&["read", path], "EACCES|ENOENT");
        plan.add(&["list", path], "EACCES|ENOENT|ENOTDIR");
        plan.add(&["exec", path], "EACCES|ENOENT");
    }
    let beside = std::path::Path::new(BINARY).with_file_name("new");
    plan.add(&["create", beside.to_str().unwrap()], "EACCES|ENOENT");
    probe.check(&plan);
    assert!(!log.contains(&sandbox.token), "the log has no token");
    // What it needs, it can use.
    let mut plan = Plan::default();
    for device in [
        "/dev/null",
        "/dev/zero",
        "/dev/full",
        "/dev/urandom",
        "/dev/random",
    ] {
        plan.add(&["read", device], "ok");
    }
    for device in ["/dev/null", "/dev/zero"] {
        plan.add(&["write", device], "ok");
    }
    plan.add(&["write", "/dev/full"], "ENOSPC");
    plan.add(&["open-path", "/etc/passwd"], "ok");
    plan.add(&["read", "/etc/passwd"], "ok");
    plan.add(&["list", "/usr/bin"], "ok");
    plan.add(&["read", "/proc/meminfo"], "ok");
    probe.check(&plan);
}

#[test]
fn paths_that_name_what_is_not_a_sandboxs_own_name_nothing_to_its_file_routes() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let neighbour = Neighbour::new(&server);
    let sandbox = server.sandbox();
    sandbox.sh("echo own > own");
    let (other, id) = (neighbour.path("marker"), &neighbour.sandbox.id);
    let (prefix, names) = (sandbox.prefix(), Subjects::below("."));
    let paths = [
        format!("../{id}/marker"),
        format!("/../{id}/marker"),
        format!("%2e%2e/{id}/marker"),
        format!("..%2f{id}%2fmarker"),
        format!("own/../../{id}/marker"),
        format!(".//.//../{id}/./marker"),
        other,
        "/etc/passwd".to_owned(),
        "../../../../../../../../etc/passwd".to_owned(),
        "/proc/self/environ".to_owned(),
        "/proc/self/root/etc/passwd".to_owned(),
        "/dev/stdin".to_owned(),
    ];
    for path in &paths {
        let reads = routes().filter(|route| route.method == "GET");
        let reads = reads.flat_map(|route| route.asks_at_files(&prefix, &names, [path, "new"]));
        let variants = [
            ("GET", "files/stat?hash=sha256&path="),
            ("GET", "files/read?lines=1&path="),
            ("DELETE", "files/delete?recursive=1&path="),
            ("POST", "files/move?to=taken&from="),
            ("POST", "files/copy?recursive=1&to=copied&from="),
            ("POST", "files/chmod?recursive=1&mode=777&path="),
            ("GET", "files/watch?recursive=1&path="),
        ]
        .map(|(method, route)| Ask::new(method, sandbox.target(&format!("{route}{path}")), ""));
        for ask in reads.chain(variants) {
            let reply = ask.send(&mut sandbox.connect());
            // 409 where the way leads through a file.
            assert!(
                matches!(reply.status, 403 | 404 | 409),
                "{ask:?}: {} {}",
                reply.status,
                reply.text()
            );
        }
    }
    // Others may make a file of that name in the home.
    for path in &paths {
        for route in routes().filter(|route| route.method != "GET") {
            for ask in route.asks_at_files(&prefix, &names, [path, "new"]) {
                let reply = ask.send(&mut sandbox.connect());
                let text = reply.text();
                assert!(reply.status != 500, "{ask:?}: {text}");
                for secret in [&neighbour.marker.text, "root:x:"] {
                    assert!(!text.contains(secret), "{ask:?}: {text}");
                }
            }
        }
    }
    sandbox.sh("rm -rf own; echo own > own");
    for path in [format!("../{id}/new"), "../new".to_owned(), "..".to_owned()] {
        let ways = [
            ("PUT", "files/write?offset=1&path="),
            ("POST", "files/copy?overwrite=1&from=own&to="),
            ("PUT", "files/archive?atomic=1&path="),
        ];
        let more = ways.map(|(method, route)| {
            Ask::new(method, sandbox.target(&format!("{route}{path}")), "harm")
        });
        let made = routes().flat_map(|route| route.asks_at_files(&prefix, &names, ["own", &path]));
        for ask in made.chain(more) {
            let reply = ask.send(&mut sandbox.connect());
            assert_ne!(reply.status, 500, "{ask:?}: {}", reply.text());
            sandbox.sh("echo own > own");
        }
    }
    neighbour.check();
    let homes = homes_in(server.place.as_ref().unwrap().homes());
    assert_eq!(homes.len(), 2, "nothing was made beside the homes");
}

#[test]
#[allow(clippy::too_many_lines, reason = "it is a list")]
fn links_in_a_home_to_what_is_not_its_own_are_followed_by_no_file_route() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let neighbour = Neighbour::new(&server);
    let vault = Vault::new();
    let sandbox = server.sandbox();
    let (prefix, names) = (sandbox.prefix(), Subjects::below("."));
    let vault_path = vault.directory.path().to_str().unwrap().to_owned();
    for (name, target, marker) in [
        ("vault", vault_path, &vault.marker),
        ("neighbour", neighbour.path(""), &neighbour.marker),
        ("own-link", ".".to_owned(), &vault.marker),
    ] {
        let target = target.trim_end_matches('/');
        sandbox.sh(&format!(
            "ln -s {target} {name}; ln -s {target}/marker {name}-file"
        ));
        sandbox.sh(&format!(
            "ln -s {target}/new {name}-new; mkdir -p dir; ln -s {target} dir/{name}"
        ));
        sandbox.sh("echo mine > own; echo mine > marker");
        for path in [
            format!("{name}/marker"),
            format!("{name}-file"),
            format!("{name}-new"),
            format!("dir/{name}/marker"),
            format!("dir/../{name}/marker"),
            format!("{name}/{}/inner", marker.text),
            format!("{name}/new"),
            format!("{name}/new/deeper"),
        ] {
            let variants = [
                ("GET", "files/read?offset=0&length=5&path="),
                ("GET", "files/read?lines=1&path="),
                ("PUT", "files/write?if_absent=1&path="),
                ("PUT", "files/write?mode=777&path="),
                ("PUT", "files/write?offset=2&path="),
                ("PUT", "files/write?offset=0&truncate_to=0&path="),
                ("POST", "files/mkdir?path="),
                ("POST", "files/chmod?mode=777&path="),
                ("PUT", "files/archive?path="),
                ("PUT", "files/archive?atomic=1&path="),
                ("POST", "files/move?from=own&to="),
                ("POST", "files/copy?overwrite=1&from=own&to="),
            ]
            .map(|(method, route)| {
                Ask::new(method, sandbox.target(&format!("{route}{path}")), "changed")
            });
            // All that read a file or a directory, but the one that tells of a link itself.
            let reads =
                routes().filter(|route| route.method == "GET" && route.pattern != "files/stat");
            let reads =
                reads.flat_map(|route| route.asks_at_files(&prefix, &names, [&path, "new"]));
            for ask in reads.chain(variants) {
                // A link itself may be replaced: it is the sandbox's own.
                let replaces = ["move", "copy", "write"];
                let is_replaced = replaces.iter().any(|name| ask.target.contains(name));
                if !path.contains('/') && is_replaced {
                    continue;
                }
                let reply = ask.send(&mut sandbox.connect());
                assert!(
                    matches!(reply.status, 403 | 409),
                    "{ask:?}: {} {}",
                    reply.status,
                    reply.text()
                );
                // The path that was asked for is the only thing that it may be in.
                let told = reply.text().replace(&path, "");
                assert!(!told.contains(&marker.text), "{told}");
            }
        }
        for path in [
            format!("{name}/marker"),
            format!("dir/{name}/marker"),
            format!("{name}/{}", marker.text),
        ] {
            for (method, route) in [
                ("GET", "files/stat?path="),
                ("DELETE", "files/delete?recursive=1&path="),
                ("DELETE", "files/delete?path="),
                ("POST", "files/move?to=taken&from="),
                ("POST", "files/copy?recursive=1&to=copied&from="),
            ] {
                let reply = sandbox.request(method, &format!("{route}{path}"), b"");
                assert_eq!(
                    reply.status,
                    403,
                    "{method} {route}{path}: {}",
                    reply.text()
                );
            }
        }
        // A write to a link may replace the link, or refuse; it never goes through.
        for route in ["files/write?path=", "files/write?offset=0&path="] {
            let reply = sandbox.request("PUT", &format!("{route}{name}-file"), b"changed");
            assert!(matches!(reply.status, 200 | 403), "{}", reply.text());
        }
        // Deleting takes the links, never what they lead to.
        let reply = sandbox.request("DELETE", "files/delete?recursive=1&path=dir", b"");
        assert_eq!(reply.status, 200, "{}", reply.text());
        vault.check();
        neighbour.check();
    }
    // A command may start there as it may go there, and has nothing of it.
    for (cwd, file) in [("neighbour", "marker"), ("vault", "marker")] {
        let reply = sandbox.post("exec", &json!({ "cmd": ["cat", file], "cwd": cwd }));
        if reply.status != 400 {
            let outcome = Outcome::of(events_of(&reply.body));
            assert_eq!(
                (outcome.code(), outcome.stdout.as_str()),
                (Some(1), ""),
                "{outcome:?}"
            );
        }
    }
    sandbox.delete();
    vault.check();
    neighbour.check();
}

/// Makes a directory deep down, with many names that an ignore file leaves out; to find that out, each is compared with
/// patterns that go through thousands of states for each byte of its path.
const COSTLY: &str = r"
import os
deep = 'deep/' + '/'.join(['a' * 250] * 14)
os.makedirs('deep/.git')
os.makedirs(deep)
os.chdir(deep)
for number in range(300): open(f'zz{number}', 'w').close()
os.chdir(os.environ['HOME'])
with open('deep/.gitignore', 'w') as file:
    file.write('zz*\n')
    for number in range(60): file.write('**/' * 1360 + f'q{number}\n')
print(deep)
";

#[test]
fn a_walk_past_costly_patterns_ends_with_its_client_and_its_sandbox() {
    if !is_root() {
        skip!("needs root");
    }
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let deep = sandbox.exec(&json!({ "cmd": ["python3", "-c", COSTLY] }));
    let deep = deep.stdout.trim();
    assert_eq!(deep.len(), 4 + 14 * 251);
    let pid = server.inner_pid();
    for route in [
        format!("files/glob?path={deep}&pattern=zzz"),
        format!("files/archive?path={deep}&gitignore=1"),
    ] {
        let mut clients: Vec<_> = (0..4).map(|_| sandbox.connect()).collect();
        for client in &mut clients {
            client.send_request("GET", &sandbox.target(&route), &[], b"");
            crate::fixture::wait_until_received(&client.stream);
        }
        // Others are served meanwhile, also those of the same sandbox.
        assert_eq!(sandbox.sh("echo here"), "here\n");
        drop(clients);
        wait_until("the walks end", PATIENCE, || {
            threads_of(pid, "background").is_empty()
        });
    }
    let mut client = sandbox.connect();
    let target = sandbox.target(&format!("files/glob?path={deep}&pattern=zzz"));
    client.send_request("GET", &target, &[], b"");
    crate::fixture::wait_until_received(&client.stream);
    // Its home is gone then, so nobody is in it.
    sandbox.delete();
}
