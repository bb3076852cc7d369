//! Devices of the machine in namespaces: nodes and files at paths of the sandbox's own.

use std::fs;

use serde_json::json;

use super::{Way, needs_namespaces, sandbox, sandbox_with};
use crate::fixture::assert_error;
use crate::host::devices::{check_use, needs_machine};

#[test]
fn nodes_and_files_are_where_the_device_has_them() {
    needs_namespaces!();
    for way in Way::BOTH {
        needs_machine!(machine);
        let (node, library) = (machine.path("node"), machine.path("library"));
        let mount =
            |path: &str| json!({ "hostPath": library, "containerPath": path, "options": ["rw"] });
        machine.describe(
            "one",
            &json!({
                "deviceNodes": [
                    { "path": "/dev/box", "hostPath": node },
                    { "path": "/dev/sub/box", "hostPath": node },
                ],
                "mounts": [
                    mount("/srv/driver/library"),
                    // The machine has it.
                    mount("/etc/passwd"),
                    { "hostPath": "/bin/sh", "containerPath": "/bin/sh" },
                    { "hostPath": machine.path("lib"), "containerPath": "/srv/lib" },
                ],
                "env": ["OF_DEVICE=yes"],
            }),
        );
        let server = machine.with(way.builder()).start();
        let sandbox = sandbox_with(&server, json!({ "devices": ["test.dev/box=one"] }));
        for node in ["/dev/box", "/dev/sub/box"] {
            check_use(&sandbox, node);
        }
        assert_eq!(
            sandbox.sh("cat /srv/driver/library /srv/lib/driver.so; echo $OF_DEVICE"),
            "librarydriveryes\n"
        );
        for command in [
            "echo x > /srv/driver/library",
            "echo x > /srv/lib/driver.so",
            "echo x > /srv/lib/new",
            "rm /srv/lib/driver.so",
            "rm /dev/box",
            "mknod /dev/other c 1 7",
            "echo x > /bin/sh",
        ] {
            let outcome = sandbox.exec(&json!({ "cmd": command }));
            assert_ne!(outcome.code(), Some(0), "{command}: {outcome:?}");
        }
        assert_eq!(fs::read_to_string(&library).unwrap(), "library");
        let without = self::sandbox(&server);
        let listed = without.sh("ls /dev; ls /srv || true");
        assert!(
            !listed.contains("box") && !listed.contains("driver"),
            "{listed}"
        );
    }
}

#[test]
fn what_a_sandbox_has_of_its_own_is_not_covered() {
    needs_namespaces!();
    needs_machine!(machine);
    let (node, library) = (machine.path("node"), machine.path("library"));
    let server = machine.with(Way::Capabilities.builder()).start();
    let neighbour = sandbox(&server);
    let home = neighbour.home.to_str().unwrap();
    let homes = neighbour.home.parent().unwrap().to_str().unwrap();
    let given = machine.path("lib");
    let mounts = [
        "/",
        "relative",
        "/opt/../x",
        "/proc",
        "/proc/1",
        "/sys/kernel",
        "/dev",
        "/dev/pts/0",
        "/dev/box",
        "/tmp",
        "/tmp/x",
        "/home",
        "/home/user",
        "/root/x",
        "/usr/lib/no-such-library.so",
        "/no\0pe",
        home,
        homes,
        &given,
    ];
    let own =
        mounts.map(|path| json!({ "mounts": [{ "hostPath": library, "containerPath": path }] }));
    let nodes = [
        "/dev",
        "/dev/null",
        "/dev/pts",
        "/dev/pts/ptmx",
        "/dev/pts/7",
        "/dev/ptmx",
        "/dev/shm/x",
        "/dev/fd",
        "/dev/stdin/x",
        "/dev/tty",
        "/x",
        "/tmp/x",
        "box",
        "/dev/../x",
        "/dev/a/../b",
    ];
    let nodes = nodes.map(|path| json!({ "deviceNodes": [{ "path": path, "hostPath": node }] }));
    let beneath = json!({ "deviceNodes": [
        { "path": "/dev/a", "hostPath": node }, { "path": "/dev/a/b", "hostPath": node },
    ]});
    let within = json!({ "mounts": [
        { "hostPath": given, "containerPath": "/srv/lib" }, { "hostPath": library, "containerPath": "/srv/lib/driver.so" },
    ]});
    for edits in own.into_iter().chain(nodes).chain([beneath, within]) {
        machine.describe("bad", &edits);
        let body = json!({
            "devices": ["test.dev/box=bad"], "isolation": "namespaces", "network": "blocked", "read_write_paths": [given],
        });
        let reply = server.post("/v1/sandboxes", &body);
        assert_error(&reply, 400, "bad_request");
    }
    assert_eq!(
        server.get("/v1/sandboxes").json().as_array().unwrap().len(),
        1
    );
    assert!(!fs::exists("/usr/lib/no-such-library.so").unwrap());
    // The same file at the same place, once by the directory and once by itself.
    machine.describe(
        "good",
        &json!({ "mounts": [
            { "hostPath": given, "containerPath": "/srv/lib" },
            { "hostPath": machine.path("lib/driver.so"), "containerPath": "/srv/lib/driver.so" },
        ]}),
    );
    let sandbox = sandbox_with(&server, json!({ "devices": ["test.dev/box=good"] }));
    assert_eq!(sandbox.sh("cat /srv/lib/driver.so"), "driver");
}
