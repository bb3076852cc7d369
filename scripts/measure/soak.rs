//! Whether anything is left of ten thousand sandboxes.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use super::host::{Host, children_of, create, delete, prefix, spawn_sleep};
use super::program::Scratch;

/// Users of the soak's server: few, so that each is given very often.
const SOAK_USERS: usize = 40;

/// Makes and deletes so many sandboxes in one life of a server, and fails if anything is left of them.
pub fn soak(cycles: usize) {
    assert!(
        nix::unistd::geteuid().is_root(),
        "sandboxes need a server that runs as root"
    );
    let scratch = Scratch::new();
    let first = 18_000;
    let host = Host::start(
        &scratch,
        "homes",
        &format!("{first}-{}", first + SOAK_USERS - 1),
    );
    let mut client = host.program.connect();
    let mut cycle = |number: usize| {
        let id = create(&mut client, 1).remove(0);
        if number.is_multiple_of(100) {
            client.run_true_in(&prefix(&id));
            spawn_sleep(&mut client, &prefix(&id));
        }
        assert!(delete(&mut client, &id));
    };
    // What is made once and kept: stacks of threads, rooms of tables, ids that are remembered.
    let warm_up = 4_500.min(cycles);
    (0..warm_up).for_each(&mut cycle);
    let before = Remains::of(&host);
    println!("after {warm_up} cycles: {before:?}");
    let begun = Instant::now();
    for number in 0..cycles {
        cycle(number);
        if (number + 1).is_multiple_of(cycles.div_ceil(10)) || number + 1 == cycles {
            let each = begun.elapsed().as_micros() / (number as u128 + 1);
            println!(
                "{} cycles more, {each} µs each: {:?}",
                number + 1,
                Remains::of(&host)
            );
        }
    }
    let after = Remains::of(&host);
    assert!(
        after.resident <= before.resident + 2048,
        "memory grows: {before:?}, {after:?}"
    );
    let but_memory = |remains: Remains| Remains {
        resident: 0,
        ..remains
    };
    assert_eq!(but_memory(before), but_memory(after));
    assert_eq!((after.homes, after.processes), (0, 0));
    let all = create(&mut client, SOAK_USERS);
    assert_eq!(all.len(), SOAK_USERS, "every user can be given");
    for id in all {
        assert!(delete(&mut client, &id));
    }
    println!(
        "nothing is left of {} sandboxes",
        warm_up + cycles + SOAK_USERS
    );
}

/// What could be left of sandboxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Remains {
    descriptors: usize,
    threads: usize,
    /// Children of the server and of its init, zombies included.
    processes: usize,
    homes: usize,
    /// KiB.
    resident: u64,
}

impl Remains {
    fn of(host: &Host) -> Self {
        let count = |path: String| fs::read_dir(path).unwrap().count();
        let init = host.program.child.id();
        let server = host.server();
        let children = |pid: u32| children_of(pid).len();
        // What a deleted sandbox's orphans leave is init's to reap, a moment later.
        let limit = Instant::now() + Duration::from_secs(5);
        while children(init) > 1 && Instant::now() < limit {
            thread::sleep(Duration::from_millis(1));
        }
        Self {
            descriptors: count(format!("/proc/{server}/fd")),
            threads: count(format!("/proc/{server}/task")),
            processes: children(server) + children(init) - 1,
            // A host keeps directories of its own beside them.
            homes: fs::read_dir(&host.homes)
                .unwrap()
                .filter(|entry| {
                    !entry
                        .as_ref()
                        .unwrap()
                        .file_name()
                        .to_string_lossy()
                        .starts_with('.')
                })
                .count(),
            resident: host.memory(),
        }
    }
}
