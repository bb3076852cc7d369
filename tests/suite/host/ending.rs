//! The end of a host, orderly or not, and the next server's beginning where it was.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use nix::fcntl::{FcntlArg, Flock, FlockArg, fcntl};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use super::{
    SANDBOXES, create, create_for_trouble, first_user, homes_of, needs_root, target, try_request,
    with_users,
};
use crate::fixture::{
    Builder, HostPlace, NAMESPACE, PATIENCE, Server, all_processes, assert_error, has_namespaces,
    in_session, is_alive, open_terminal, send_harmless_signals, uid_of, wait_until,
};

/// What every process gets after the TERM, and time for the rest of the work on a busy machine.
const LAST_WORD: Duration = Duration::from_secs(12);

/// A host whose sandboxes end with it.
fn host() -> Builder {
    Server::host().env("SBX_KEEP", 0)
}

/// Starts where another one was.
fn in_place_of(place: &HostPlace) -> Builder {
    super::in_place_of(place).env("SBX_KEEP", 0)
}

#[test]
fn a_signal_ends_twenty_busy_sandboxes_with_all_they_have() {
    needs_root!();
    // One of each kind of trouble is enough to see that all signals do the same.
    for (signal, count) in [
        (Signal::SIGTERM, 20),
        (Signal::SIGINT, 4),
        (Signal::SIGQUIT, 4),
    ] {
        let mut server = host().start();
        let made = create_for_trouble(&server, count);
        let mut streams = Vec::new();
        for (number, sandbox) in made.iter().enumerate() {
            let cmd = match number % 4 {
                0 => "trap '' TERM; setsid sleep 3600 & while :; do sleep 1; done",
                1 => "setsid sh -c 'kill -STOP $$' & seq 100000 > big; yes > /dev/null",
                2 => "f() { f | f & }; f; while :; do sleep 0.01; done",
                _ => "(setsid sleep 3600 &); exec sleep 3600",
            };
            sandbox.spawn(&json!({ "cmd": cmd }));
            let mut stream = sandbox.exec_stream(&json!({"cmd": "echo on; exec sleep 3600"}));
            while stream.next().unwrap()["event"] != "stdout" {}
            streams.push(stream);
        }
        drop(made);
        server.signal(signal as i32);
        for stream in streams {
            let events: Vec<_> = stream.collect();
            let exit = events.last().unwrap();
            assert_eq!(exit["event"], "exit", "{events:?}");
        }
        let status = server.wait_for_exit(LAST_WORD);
        assert_eq!(status.code(), Some(0), "{status}\n{}", server.log());
        assert_eq!(server.place.as_ref().unwrap().processes(), []);
        assert_eq!(homes_of(&server), Vec::<String>::new());
    }
}

#[test]
fn an_end_that_nobody_resists_is_prompt_and_may_be_used_for_last_words() {
    needs_root!();
    let mut server = host().start();
    let (made, _) = create(&server, 5);
    let outside = crate::fixture::TempDir::new();
    let mut streams = Vec::new();
    for sandbox in &made {
        let mut stream = sandbox.exec_stream(&json!({
            "cmd": "trap 'echo last words; exit 5' TERM; echo on; while :; do sleep 0.05; done"
        }));
        while stream.next().unwrap()["event"] != "stdout" {}
        streams.push(stream);
    }
    drop(made);
    server.signal(Signal::SIGTERM as i32);
    for stream in streams {
        let events: Vec<_> = stream.collect();
        let text: String = events
            .iter()
            .filter_map(|event| event["data"].as_str())
            .collect();
        assert!(text.contains("last words"), "{events:?}");
        assert_eq!(events.last().unwrap()["exit_code"], 5, "{events:?}");
    }
    // Well before what kills those that do not listen.
    let status = server.wait_for_exit(Duration::from_secs(4));
    assert_eq!(status.code(), Some(0), "{}", server.log());
    assert_eq!(homes_of(&server), Vec::<String>::new());
    drop(outside);
}

#[test]
fn a_host_that_is_ending_makes_no_more() {
    needs_root!();
    let mut server = host().start();
    let sandbox = server.sandbox();
    let mut stream = sandbox.exec_stream(&json!({
        "cmd": "trap 'echo told' TERM; echo on; while :; do sleep 0.05; done"
    }));
    while stream.next().unwrap()["event"] != "stdout" {}
    let mut connection = server.connect();
    assert_eq!(connection.request("GET", "/health", &[], b"").status, 200);
    server.signal(Signal::SIGTERM as i32);
    loop {
        let event = stream.next_output().unwrap();
        if event["data"]
            .as_str()
            .is_some_and(|data| data.contains("told"))
        {
            break;
        }
    }
    let reply = connection.request("POST", super::SANDBOXES, &[], b"{}");
    assert_error(&reply, 503, "shutting_down");
    drop((stream, sandbox));
    assert_eq!(server.wait_for_exit(LAST_WORD).code(), Some(0));
    assert_eq!(homes_of(&server), Vec::<String>::new());
}

#[test]
fn what_is_being_made_when_the_signal_comes_is_gone_too() {
    needs_root!();
    for _ in 0..5 {
        let mut server = host().start();
        let address = server.address;
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(move || {
                    while try_request(address, "POST", SANDBOXES, "{\"count\":3}") == Some(200) {
                        let _ = try_request(address, "DELETE", SANDBOXES, "");
                    }
                });
            }
            wait_until("they have begun", PATIENCE, || {
                server.log().contains("deleted")
            });
            server.signal(Signal::SIGTERM as i32);
            let status = server.wait_for_exit(LAST_WORD);
            assert_eq!(status.code(), Some(0), "{}", server.log());
        });
        assert_eq!(homes_of(&server), Vec::<String>::new());
        assert_eq!(server.place.as_ref().unwrap().processes(), []);
    }
}

#[test]
fn what_is_being_deleted_when_the_signal_comes_is_gone_too() {
    needs_root!();
    let mut server = host().start();
    let sandbox = server.sandbox();
    sandbox.sh("seq 20000 | xargs touch");
    let (address, target) = (server.address, target(&sandbox.id, ""));
    drop(sandbox);
    thread::scope(|scope| {
        scope.spawn(|| try_request(address, "DELETE", &target, ""));
        wait_until("it has begun", PATIENCE, || {
            server.get(&target).status == 404
        });
        server.signal(Signal::SIGTERM as i32);
        let status = server.wait_for_exit(LAST_WORD);
        assert_eq!(status.code(), Some(0), "{}", server.log());
    });
    assert_eq!(homes_of(&server), Vec::<String>::new());
}

/// Leaves sandboxes with homes and processes behind by a kill, and returns their pids.
fn die(server: &mut Server, victim: i32) -> Vec<i32> {
    let (made, _) = create(server, 6);
    let pids = made
        .iter()
        .map(|sandbox| {
            let process = sandbox.spawn(&json!({
                "cmd": "mkdir -p a/b; chmod 000 a; ln -s / root; trap '' TERM; touch ready; while :; do sleep 1; done"
            }));
            wait_until("it has begun", PATIENCE, || sandbox.home.join("ready").exists());
            i32::try_from(process["pid"].as_i64().unwrap()).unwrap()
        })
        .collect();
    drop(made);
    kill(Pid::from_raw(victim), Signal::SIGKILL).unwrap();
    let status = server.wait_for_exit(LAST_WORD);
    assert_ne!(status.code(), Some(0), "it did not end by itself");
    assert_eq!(homes_of(server).len(), 6, "nobody was there to remove them");
    pids
}

/// Asserts that a server starts where another was killed, without its homes, and works.
#[track_caller]
fn starts_again(place: &HostPlace) {
    let foreign = [
        ("readme", false),
        ("backup", true),
        ("0123456789abcdef0123456", true),
        ("0123456789ABCDEF01234567", true),
        ("0123456789abcdef01234567.old", true),
        ("0123456789abcdef0123456g", false),
    ];
    for (name, is_directory) in foreign {
        let path = place.homes().join(name);
        if is_directory {
            std::fs::create_dir_all(path.join("inside")).unwrap();
        } else {
            std::fs::write(path, "kept").unwrap();
        }
    }
    let next = in_place_of(place).start();
    let mut names: Vec<_> = foreign.iter().map(|(name, _)| (*name).to_owned()).collect();
    names.push(".snapshots".to_owned());
    names.sort();
    assert_eq!(
        super::names_in(place.homes()),
        names,
        "only what is not a home"
    );
    assert!(place.homes().join("backup/inside").exists());
    let sandbox = next.sandbox();
    assert_eq!(
        sandbox.processes(),
        Vec::<i32>::new(),
        "a user that still has processes is not given"
    );
    assert_eq!(sandbox.sh("ls -A | wc -l").trim(), "2");
    sandbox.delete();
    assert_eq!(super::names_in(place.homes()), names);
    for (name, is_directory) in foreign {
        let path = place.homes().join(name);
        if is_directory {
            std::fs::remove_dir_all(path).unwrap();
        } else {
            std::fs::remove_file(path).unwrap();
        }
    }
}

#[test]
fn after_the_server_was_killed_its_processes_end_and_the_next_removes_its_homes() {
    needs_root!();
    let mut server = host().start();
    let inner = server.inner_pid();
    let pids = die(&mut server, inner);
    // The init that it had ends what it left.
    wait_until("its processes end", LAST_WORD, || {
        pids.iter().all(|pid| !is_alive(*pid))
    });
    let place = server.place.take().unwrap();
    wait_until("and what they started", PATIENCE, || {
        place.processes().is_empty()
    });
    starts_again(&place);
}

#[test]
fn after_its_init_was_killed_the_server_is_gone_and_the_next_removes_its_homes() {
    needs_root!();
    let mut server = host().start();
    let (init, inner) = (server.pid(), server.inner_pid());
    die(&mut server, init);
    wait_until("the server ends with its init", PATIENCE, || {
        !is_alive(inner)
    });
    let place = server.place.take().unwrap();
    starts_again(&place);
}

#[test]
fn a_hangup_ends_a_host_on_a_terminal_with_all_it_has() {
    needs_root!();
    for has_closed in [false, true] {
        let (terminal, other_end) = open_terminal();
        let builder = host();
        let mut command = builder.command();
        in_session(&mut command, Some(&terminal));
        let mut server = builder.start_as(command);
        drop(terminal);
        let sandbox = server.sandbox();
        sandbox.sh("(setsid sleep 3600 &)");
        drop(sandbox);
        if has_closed {
            drop(other_end);
        } else {
            server.signal(Signal::SIGHUP as i32);
        }
        let status = server.wait_for_exit(LAST_WORD);
        assert_eq!(status.code(), Some(0), "{status}\n{}", server.log());
        assert_eq!(server.place.as_ref().unwrap().processes(), []);
        assert_eq!(homes_of(&server), Vec::<String>::new());
    }
}

#[test]
fn no_other_signal_ends_a_host_its_init_or_a_sandbox() {
    needs_root!();
    let builder = host();
    let mut command = builder.command();
    in_session(&mut command, None);
    let server = builder.start_as(command);
    let sandbox = server.sandbox();
    let mut stream = sandbox.exec_stream(&json!({"cmd": "echo on; read line; echo $line"}));
    for pid in [server.pid(), server.inner_pid()] {
        send_harmless_signals(pid);
    }
    let outcome = sandbox.exec(&json!({"cmd": "cat /proc/self/status"}));
    for field in ["SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt"] {
        let expected = format!("{field}:\t0000000000000000\n");
        assert!(outcome.stdout.contains(&expected), "{}", outcome.stdout);
    }
    while stream.next().unwrap()["event"] != "exit" {}
}

/// What ends only with its sandbox: each says when it has begun.
const STUBBORN: [&str; 5] = [
    "touch ready; exec sleep 3600",
    "(setsid sleep 3600 &); touch ready; kill -STOP $$",
    // Each process starts the next one, in a session of its own, and ends.
    "exec python3 -c '
import os, time
open(\"ready\", \"w\")
while True:
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        time.sleep(0.01)
        continue
    os.setsid()
    time.sleep(0.0003)
'",
    // Without the mark: RLIMIT_RTTIME is 15.
    "exec python3 -c '
import resource, time
resource.setrlimit(15, (1000, 1000))
open(\"ready\", \"w\")
time.sleep(3600)
'",
    "for i in 1 2 3 4 5 6 7 8 9; do (trap '' TERM HUP; setsid sleep 3600 &) ; done; touch ready; exec sleep 3600",
];

/// Starts these commands in sandboxes and kills the server. Returns the users.
fn leave(server: &mut Server, commands: &[&str]) -> Vec<u32> {
    let (made, _) = create(server, commands.len() as u64);
    for (sandbox, command) in made.iter().zip(commands) {
        sandbox.spawn(&json!({ "cmd": command }));
        wait_until("it has begun", PATIENCE, || {
            sandbox.home.join("ready").exists()
        });
    }
    let users = made.iter().map(|sandbox| sandbox.uid).collect();
    drop(made);
    server.signal(Signal::SIGKILL as i32);
    server.wait_for_exit(LAST_WORD);
    users
}

/// Whether something of a user is alive, even if no single look ever finds it.
fn has_living(place: &HostPlace, uid: u32) -> bool {
    (0..50).any(|_| {
        let mut all = place.processes().into_iter();
        all.any(|(pid, user)| user == uid && is_alive(pid))
    })
}

#[test]
fn what_a_killed_host_left_running_is_ended_by_the_next() {
    needs_root!();
    let mut server = host().start();
    let users = leave(&mut server, &STUBBORN);
    let place = server.place.take().unwrap();
    for uid in &users {
        // One of them consists of processes that end before a second look at any of them.
        let control = format!("the control: {uid} of {users:?}");
        wait_until(&control, PATIENCE, || {
            place.processes().iter().any(|(_, user)| user == uid)
        });
    }
    let next = in_place_of(&place).start();
    for uid in &users {
        assert!(!has_living(&place, *uid), "{uid}\n{}", next.log());
    }
    let log = next.log();
    let lines: Vec<_> = log.lines().filter(|line| line.contains("killed")).collect();
    assert_eq!(lines.len(), 1, "{log}");
    assert!(lines[0].contains("of 5 uids"), "{log}");
    assert_eq!(next.sandbox().sh("echo on"), "on\n");
}

#[test]
fn what_others_run_is_left_alone_and_their_uids_are_named_and_not_given() {
    needs_root!();
    let builder = with_users(4);
    let first = first_user(&builder);
    let range = format!("{first}-{}", first + 3);
    let mut server = builder.start();
    // Something is left of two of them.
    let [left, cleaned]: [u32; 2] = leave(&mut server, &STUBBORN[..2]).try_into().unwrap();
    let mut others = (first..first + 4).filter(|uid| ![left, cleaned].contains(uid));
    let [inner, outer] = [others.next().unwrap(), others.next().unwrap()];
    let place = server.place.take().unwrap();
    let sleep = |uid: u32| {
        let mut command = Command::new("sleep");
        command.arg("3600").uid(uid).gid(uid).current_dir("/");
        command.stdin(Stdio::null()).spawn().unwrap()
    };
    // One with a user of whom the killed host left something.
    let mut strangers = vec![sleep(left)];
    // Commands of other servers have marks, and are no sandbox's of this machine.
    let mut container = None;
    if has_namespaces() {
        let server = Server::builder().wrapped_in(&NAMESPACE).start();
        let cmd = format!("exec setpriv --reuid={inner} --clear-groups --no-new-privs sleep 3600");
        server.spawn(&json!({ "cmd": cmd }));
        wait_until("it has the user", PATIENCE, || has_living(&place, inner));
        container = Some(server);
    } else {
        strangers.push(sleep(inner));
    }
    let dedicated = Server::start();
    let cmd = format!("exec setpriv --reuid={outer} --clear-groups sleep 3600");
    let marked = dedicated.spawn(&json!({ "cmd": cmd }));
    let marked = i32::try_from(marked["pid"].as_i64().unwrap()).unwrap();
    wait_until("it has the user", PATIENCE, || {
        uid_of(marked) == Some(outer)
    });

    let next = in_place_of(&place).env("SBX_UID_RANGE", &range).start();
    let log = next.log();
    let named: Vec<_> = log
        .lines()
        .filter(|line| line.contains("belong to"))
        .collect();
    assert_eq!(named.len(), 1, "{log}");
    for uid in [left, inner, outer] {
        assert!(named[0].contains(&uid.to_string()), "{uid}: {log}");
    }
    assert!(!named[0].contains(&cleaned.to_string()), "{log}");
    assert!(has_living(&place, left), "also what is left there");
    assert!(!has_living(&place, cleaned));
    wait_until("all is reaped", PATIENCE, || {
        let mut all = place.processes().into_iter();
        all.all(|(_, uid)| uid != cleaned)
    });
    let made = next.post(SANDBOXES, &json!({ "count": 4 })).json();
    assert_eq!(made["sandboxes"][0]["uid"], cleaned, "{made}");
    assert_eq!(
        (&made["rejected"], &made["rejected_code"]),
        (&json!(3), &json!("no_uid"))
    );
    let reason = made["rejected_reason"].as_str().unwrap();
    assert!(reason.contains("3 of them are put aside"), "{reason}");
    assert_eq!(next.delete(SANDBOXES).json()["deleted"], 1);
    assert!(is_alive(marked) && has_living(&place, inner));
    drop(container);
    wait_until("the container ends", PATIENCE, || {
        strangers.len() > 1 || !has_living(&place, inner)
    });
    for stranger in &mut strangers {
        assert!(stranger.try_wait().unwrap().is_none());
        stranger.kill().unwrap();
        stranger.wait().unwrap();
    }
    // Free again as soon as nothing runs there.
    let (made, rejected) = create(&next, 4);
    let mut users: Vec<_> = made.iter().map(|sandbox| sandbox.uid).collect();
    users.sort_unstable();
    let mut free = vec![cleaned, inner];
    free.sort_unstable();
    assert_eq!((users, rejected), (free, 2));
}

#[test]
fn a_lock_that_is_about_to_be_given_up_is_waited_for() {
    needs_root!();
    let mut server = host().start();
    let first = server.sandbox().uid;
    server.signal(Signal::SIGTERM as i32);
    assert_eq!(server.wait_for_exit(LAST_WORD).code(), Some(0));
    let place = server.place.take().unwrap();
    let homes = File::open(place.homes()).unwrap();
    let homes = Flock::lock(homes, FlockArg::LockExclusive).unwrap();
    let uids = File::options()
        .read(true)
        .write(true)
        .open("/run/sbx-server/uids");
    let uids = uids.unwrap();
    let lock = libc::flock {
        l_type: libc::F_WRLCK.try_into().unwrap(),
        l_whence: libc::SEEK_SET.try_into().unwrap(),
        l_start: first.into(),
        l_len: 1,
        l_pid: 0,
    };
    fcntl(&uids, FcntlArg::F_OFD_SETLK(&lock)).unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            thread::sleep(Duration::from_millis(500));
            drop(homes);
            thread::sleep(Duration::from_millis(500));
            drop(uids);
        });
        assert_eq!(in_place_of(&place).start().sandbox().sh("echo on"), "on\n");
    });
}

#[test]
fn two_servers_do_not_share_a_directory_of_homes() {
    needs_root!();
    let server = host().start();
    let sandbox = server.sandbox();
    let place = server.place.as_ref().unwrap();
    // With other users, so that nothing else keeps them apart; also by another name.
    let alias = crate::fixture::TempDir::new();
    std::os::unix::fs::symlink(place.homes(), alias.join("alias")).unwrap();
    std::fs::set_permissions(
        alias.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .unwrap();
    for homes in [place.homes().display().to_string(), alias.join("alias")] {
        let output = host()
            .env("SBX_HOMES_DIR", &homes)
            .command()
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(
            text.contains("SBX_HOMES_DIR") && text.contains("another server"),
            "{text}"
        );
    }
    assert_eq!(
        sandbox.sh("echo on"),
        "on\n",
        "and the first one's sandboxes are not swept"
    );
    drop(sandbox);
    let mut server = server;
    server.signal(Signal::SIGTERM as i32);
    assert_eq!(server.wait_for_exit(LAST_WORD).code(), Some(0));
    let place = server.place.take().unwrap();
    let next = in_place_of(&place).start();
    assert_eq!(
        next.sandbox().sh("echo on"),
        "on\n",
        "the directory is free again"
    );
}

#[test]
fn what_a_sandbox_left_is_init_s_to_reap_at_once() {
    needs_root!();
    let server = host().start();
    let sandbox = server.sandbox();
    sandbox.sh("for i in 1 2 3 4 5 6 7 8 9; do (setsid sleep 0.1 &) ; done");
    let init = server.pid();
    wait_until("no zombie is left", PATIENCE, || {
        let children = all_processes();
        let mut children = children.iter().filter(|process| process.parent == init);
        children.all(|process| process.state != 'Z') && sandbox.processes().is_empty()
    });
}

/// The next server has them, so none of them is unknown.
#[test]
fn a_host_that_ends_says_so_of_sandboxes_that_last() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let command = json!({ "cmd": "trap '' TERM; echo on; while :; do sleep 1; done" });
    let mut stream = sandbox.exec_stream(&command);
    while stream.next().unwrap()["event"] != "stdout" {}
    let requests = [
        ("GET", "files/list?path=.", ""),
        ("POST", "exec", r#"{"cmd":"true"}"#),
        ("POST", "pause", "{}"),
    ];
    let mut clients = requests.map(|_| sandbox.connect());
    let mut ask = |client: usize, (method, rest, body): (&str, &str, &str)| {
        clients[client].request(method, &sandbox.target(rest), &[], body.as_bytes())
    };
    // It accepts no connection from then on, and serves those that it has.
    for client in 0..requests.len() {
        assert_eq!(ask(client, requests[0]).status, 200);
    }
    server.signal(Signal::SIGTERM as i32);
    wait_until("it is ending", PATIENCE, || {
        ask(0, requests[0]).status != 200
    });
    for (client, request) in requests.into_iter().enumerate() {
        assert_error(&ask(client, request), 503, "shutting_down");
    }
}
