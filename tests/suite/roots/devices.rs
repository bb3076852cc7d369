//! Devices of the machine in a root of the sandbox's own.

use std::fs;
use std::os::unix::fs::symlink;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::json;

use super::{Root, Template, lack, root, root_with};
use crate::fixture::{PATIENCE, assert_error, is_root};
use crate::host::devices::{Machine, check_use, needs_machine};
use crate::host::lasting::end;
use crate::skip;

const DEVICES: &str = "test.dev/box=one";

/// A device with nodes, and files at paths that the template has, has not, and has links on the way to.
fn describe(machine: &Machine) {
    let library = machine.path("library");
    let mount =
        |path: &str| json!({ "hostPath": library, "containerPath": path, "options": ["rw"] });
    machine.describe(
        "one",
        &json!({
            "deviceNodes": [
                { "path": "/dev/box", "hostPath": machine.path("node") },
                { "path": "/dev/sub/shut", "hostPath": machine.path("shut") },
            ],
            "mounts": [
                mount("/usr/lib/deep/library"),
                mount("/lib64/linked"),
                mount("/etc/group"),
                { "hostPath": machine.path("lib"), "containerPath": "/opt/driver" },
            ],
            "env": ["OF_DEVICE=yes"],
        }),
    );
}

macro_rules! needs_device {
    ($machine:ident, $template:ident, $server:ident) => {
        if !is_root() {
            skip!("needs root");
        }
        needs_machine!($machine);
        let Some($template) = Template::new() else {
            skip!("there is no {}", super::BUSYBOX);
        };
        symlink("usr/lib", $template.path("lib64")).unwrap();
        fs::create_dir_all($template.path("usr/lib")).unwrap();
        describe(&$machine);
        let $server = $machine.with($template.builder()).start();
        if let Some(why) = lack(&$server) {
            skip!("{why}");
        }
    };
}

#[track_caller]
fn check(sandbox: &Root<'_>) {
    check_use(sandbox, "/dev/box");
    assert_eq!(
        sandbox.sh("cat /usr/lib/deep/library /lib64/linked /usr/lib/linked /etc/group /opt/driver/driver.so; echo $OF_DEVICE"),
        "librarylibrarylibrarylibrarydriveryes\n"
    );
}

#[test]
fn root_uses_the_devices_and_changes_nothing_of_them() {
    needs_device!(machine, template, server);
    let sandbox = root_with(&server, json!({ "devices": [DEVICES] }));
    assert_eq!(sandbox.described()["devices"], json!([DEVICES]));
    check(&sandbox);
    assert_eq!(sandbox.sh_as("user", "head -c 1 /dev/box | wc -c"), "1\n");
    // Modes for others count, as the machine has them: its root is nobody here.
    for command in [
        "cat /dev/sub/shut",
        "chmod 666 /dev/sub/shut",
        "chown 0:0 /dev/box",
        "rm /dev/box",
        "mv /dev/box /dev/other",
        "cp -a /dev/box /root/box",
        "echo x > /usr/lib/deep/library",
        "chmod 777 /usr/lib/deep/library",
        "rm /usr/lib/deep/library",
        "echo x > /opt/driver/driver.so",
        "touch /opt/driver/new",
        "rm /opt/driver/driver.so",
        "mount -o remount,rw /opt/driver",
        "umount /opt/driver",
    ] {
        for user in ["root", "user"] {
            let outcome = sandbox.exec_as(user, command);
            assert_ne!(outcome.code(), Some(0), "{user}: {command}: {outcome:?}");
        }
    }
    assert_eq!(
        fs::read_to_string(machine.path("library")).unwrap(),
        "library"
    );
    assert_eq!(fs::read_dir(machine.path("lib")).unwrap().count(), 1);
    assert!(!template.path("usr/lib/deep").exists());
    let ioctl = libc::SYS_ioctl.to_string();
    let outcome =
        sandbox
            .probe()
            .run_one(&["syscall", &ioctl, "open:/dev/box", "0x1234", "buffer"]);
    assert_eq!(outcome, "ENOTTY");

    let without = root(&server);
    let listed = without.sh("ls /dev /opt /usr/lib || true; echo $OF_DEVICE");
    assert!(
        !listed.contains("box") && !listed.contains("driver") && !listed.contains("deep"),
        "{listed}"
    );
    // What is made for them belongs to the sandbox's root, and stays without them.
    let owner = sandbox.sh("stat -c %u:%g /usr/lib/deep");
    assert_eq!(owner, "0:0\n");
    let reply = sandbox.get("files/read?path=/usr/lib/deep/library");
    assert_eq!((reply.status, &*reply.text()), (200, ""));
    let reply = sandbox.get("files/read?path=/etc/group");
    assert!(reply.text().starts_with("root:"), "{}", reply.text());
    sandbox.delete();
    without.delete();
}

/// Root of a sandbox lays links where the next start mounts files.
#[test]
fn mount_points_that_became_links_lead_nowhere_else() {
    needs_device!(machine, template, server);
    let sandbox = root_with(&server, json!({ "devices": [DEVICES] }));
    let outside = machine.path("lib");
    // Without mounts they can be exchanged.
    machine.describe("one", &json!({}));
    for (plant, is_kept) in [
        (
            "rm /usr/lib/deep/library && ln -s /etc/passwd /usr/lib/deep/library",
            true,
        ),
        (
            "rm /usr/lib/deep/library && ln -s ../../../../../../../etc/passwd /usr/lib/deep/library",
            true,
        ),
        (
            "rm /usr/lib/deep/library && ln -s /proc/self/root/etc/passwd /usr/lib/deep/library",
            true,
        ),
        (
            "rm /usr/lib/deep/library && ln -s library /usr/lib/deep/library",
            true,
        ),
        (
            "rm /usr/lib/deep/library && mkfifo /usr/lib/deep/library",
            true,
        ),
        ("rm -r /usr/lib/deep && ln -s OUTSIDE /usr/lib/deep", true),
        (
            "rm -r /usr/lib/deep && ln -s ../../../../../../..OUTSIDE /usr/lib/deep",
            true,
        ),
        ("rm -r /usr/lib/deep && echo x > /usr/lib/deep", true),
        ("rm -r /opt/driver && ln -s OUTSIDE /opt/driver", true),
        ("rm -r /opt && ln -s /etc /opt", true),
        ("rm -r /opt && ln -s /proc /opt", false),
        ("rm /opt; rm -r /usr/lib && ln -s /dev /usr/lib", false),
    ] {
        sandbox.stop();
        sandbox.start();
        sandbox.sh(&plant.replace("OUTSIDE", &outside));
        sandbox.stop();
        describe(&machine);
        sandbox.start();
        if is_kept {
            check(&sandbox);
        }
        // The kernel's own are where they belong.
        check_use(&sandbox, "/dev/full");
        let own =
            sandbox.sh("head -n 1 /etc/passwd; cat /proc/sys/kernel/ostype; ls -d /sys/kernel");
        assert_eq!(
            own, "root:x:0:0:root:/root:/bin/sh\nLinux\n/sys/kernel\n",
            "{plant}"
        );
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 1, "{plant}");
        machine.describe("one", &json!({}));
    }
    assert!(template.path("usr/lib").exists());
}

#[test]
fn a_stopped_root_starts_only_with_its_devices() {
    needs_device!(machine, template, server);
    let sandbox = root_with(&server, json!({ "devices": [DEVICES] }));
    check(&sandbox);
    sandbox.stop();
    machine.remove("one");
    let target = format!("/v1/sandboxes/{}", sandbox.id);
    let resume = format!("{target}/resume");
    let reply = server.post(&resume, &json!({}));
    assert_error(&reply, 409, "changed");
    assert!(reply.text().contains(DEVICES), "{}", reply.text());
    let place = end(server, Signal::SIGKILL);
    let next = machine.with(template.next(&place)).start();
    let reply = next.post(&resume, &json!({}));
    assert_error(&reply, 409, "changed");
    describe(&machine);
    let reply = next.post(&resume, &json!({}));
    assert_eq!(reply.status, 200, "{}", reply.text());
    let mut made = next.get(&target).json();
    let token = next.get(&format!("{target}/token")).json();
    made["token"] = token["token"].clone();
    check(&Root::of(&next, &made));
}

/// Each look-up along the longest links that the kernel follows takes milliseconds, and there are many.
#[test]
fn links_to_mount_points_hold_up_no_other_start() {
    if !is_root() {
        skip!("needs root");
    }
    needs_machine!(machine);
    let Some(template) = Template::new() else {
        skip!("there is no {}", super::BUSYBOX);
    };
    fs::create_dir(template.path("d")).unwrap();
    fs::create_dir(template.path("real")).unwrap();
    let way = "d/../".repeat(800);
    for number in 0..38 {
        let next = format!("{way}link{}", number + 1);
        symlink(next, template.path(&format!("link{number}"))).unwrap();
    }
    symlink("real", template.path("link38")).unwrap();
    let library = machine.path("library");
    let mounts = (0..400).map(
        |number| json!({ "hostPath": library, "containerPath": format!("/link0/{number}/file") }),
    );
    machine.describe("one", &json!({ "mounts": mounts.collect::<Vec<_>>() }));
    let server = machine.with(template.builder()).start();
    if let Some(why) = lack(&server) {
        skip!("{why}");
    }
    let ask = || {
        server.post(
            "/v1/sandboxes",
            &json!({ "root": "private", "devices": [DEVICES] }),
        )
    };
    let begun = Instant::now();
    thread::scope(|scope| {
        let asked = scope.spawn(ask);
        let mut slowest = Duration::ZERO;
        while !asked.is_finished() {
            let begun = Instant::now();
            root(&server).delete();
            slowest = slowest.max(begun.elapsed());
        }
        assert!(slowest < Duration::from_secs(4), "{slowest:?}");
        let reply = asked.join().unwrap();
        assert!(reply.text().contains("ELOOP"), "{}", reply.text());
    });
    assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
}
