//! Ending a sandbox ends every process of it, whatever they do about it, and answers only then.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use super::{SANDBOXES, create, create_for_trouble, delete, homes_of, list, needs_root, target};
use crate::fixture::{
    Held, PATIENCE, Sandbox, Server, Stop, assert_error, descendants_of, has_namespaces, is_alive,
    stat_of, uid_of, wait_until,
};
use crate::skip;

/// What a sandbox may be full of when it ends, as shell commands that go on for ever.
const TROUBLE: [(&str, &str); 13] = [
    ("sleepers", "sleep 3600 & sleep 3600 & exec sleep 3600"),
    (
        "daemons",
        "setsid sh -c 'setsid sleep 3600 & setsid sleep 3600 & sleep 3600' & \
         (setsid sleep 3600 >/dev/null 2>&1 </dev/null &) & wait",
    ),
    (
        "the deaf",
        "trap '' HUP INT QUIT TERM USR1 USR2 TSTP TTIN TTOU PIPE ALRM; sleep 3600 & while :; do sleep 1; done",
    ),
    (
        "the stopped",
        "sleep 3600 & kill -STOP $!; setsid sh -c 'kill -STOP $$'; kill -STOP $$",
    ),
    (
        "those that wait in the kernel",
        "mkfifo gate; cat gate & : > gate2; cat < gate & exec cat > gate < gate",
    ),
    (
        "parents of zombies",
        "sh -c 'true & true & exec sleep 3600' & (sh -c 'true & exec sleep 3600' &) & wait",
    ),
    (
        "two that start each other",
        "echo '[ -e stop ] || { sleep 0.01; setsid sh $0 & }' > phoenix; \
         setsid sh phoenix & setsid sh phoenix & while :; do sleep 0.02 & wait; done",
    ),
    ("a bomb", "f() { f | f & }; f; while :; do sleep 0.01; done"),
    (
        "a bomb of daemons",
        "echo 'setsid sh ./bomb & setsid sh ./bomb & sleep 60' > bomb; sh ./bomb; sleep 3600",
    ),
    (
        "those that stop everybody",
        "for i in 1 2 3; do (setsid sh -c 'while :; do kill -STOP -1; kill -CONT -1; done' &); done; \
         while :; do kill -STOP -1; kill -CONT -1; done",
    ),
    (
        "those that kill everybody",
        "trap '' TERM; for i in 1 2 3; do (setsid sh -c 'while :; do kill -KILL -1; done' &) done; \
         while :; do sleep 0.01; done",
    ),
    (
        "the busy",
        "for i in 1 2 3; do (setsid sh -c 'while :; do :; done' &); done; while :; do :; done",
    ),
    (
        "writers",
        "(setsid sh -c 'i=0; while :; do mkdir -p d$i/e; echo x > d$i/e/f; i=$((i+1)); done' &); yes; sleep 3600",
    ),
];

/// Starts it, and waits until it has done its worst for a moment.
fn make_trouble(sandbox: &Sandbox<'_>, trouble: &str) {
    sandbox.spawn(&json!({ "cmd": trouble }));
    // Also what ends by itself at once has run by then.
    let reply = sandbox.get("processes/p-1/wait?timeout=0.3");
    assert_eq!(reply.status, 200, "{}", reply.text());
}

#[test]
fn whatever_runs_in_it_is_gone_when_delete_answers() {
    needs_root!();
    let server = Server::host().start();
    let inner = server.inner_pid();
    let quiet = Held::after_one(&server, &json!({}));
    for (name, trouble) in TROUBLE {
        eprintln!("{name}");
        let sandbox = create_for_trouble(&server, 1).remove(0);
        make_trouble(&sandbox, trouble);
        sandbox.delete();
    }
    assert_eq!(server.place.as_ref().unwrap().processes(), []);
    assert_eq!(homes_of(&server), Vec::<String>::new());
    wait_until("the server has nothing left to reap", PATIENCE, || {
        let processes = crate::fixture::descendants_of(inner);
        processes.is_empty()
    });
    quiet.await_of(&server);
}

#[test]
fn a_sandbox_with_terminals_is_ended_like_any_other() {
    needs_root!();
    let has_script = Command::new("script").arg("--version").output();
    if !has_script.is_ok_and(|output| output.status.success()) {
        skip!("needs script(1), for a terminal");
    }
    let server = Server::host().start();
    let quiet = Held::after_one(&server, &json!({}));
    let sandbox = server.sandbox();
    for number in 0..5 {
        let cmd = format!(
            "script -qc 'echo on > tty{number}; setsid sleep 3600 & sleep 3600' log{number}"
        );
        sandbox.spawn(&json!({ "cmd": cmd }));
    }
    wait_until("the terminals are open", PATIENCE, || {
        (0..5).all(|number| sandbox.home.join(format!("tty{number}")).exists())
    });
    sandbox.delete();
    quiet.await_of(&server);
}

#[test]
fn all_trouble_at_once_ends_and_others_are_served_meanwhile() {
    needs_root!();
    let server = Server::host().start();
    let calm = server.sandbox();
    let troubled = create_for_trouble(&server, TROUBLE.len() as u64);
    for (sandbox, (_, trouble)) in troubled.iter().zip(TROUBLE) {
        // Not waited for: the machine is busy enough by now.
        sandbox.spawn(&json!({ "cmd": trouble }));
    }
    let stop = Stop::default();
    let slowest = Mutex::new(Duration::ZERO);
    let mut answered = 0;
    thread::scope(|scope| {
        let asker = scope.spawn(|| {
            let mut answered = 0;
            let mut connection = calm.connect();
            while !stop.is_set() {
                let begun = Instant::now();
                let reply = connection.request("GET", &calm.target("processes"), &[], b"");
                assert_eq!(reply.status, 200);
                // The users of the test are few.
                if answered < 30 {
                    assert_eq!(create(&server, 1).1, 0, "and others are made");
                }
                let mut slowest = slowest.lock().unwrap();
                *slowest = begun.elapsed().max(*slowest);
                answered += 1;
            }
            answered
        });
        let guard = stop.guard();
        let enders: Vec<_> = troubled
            .into_iter()
            .map(|sandbox| scope.spawn(|| sandbox.delete()))
            .collect();
        for ender in enders {
            ender.join().unwrap();
        }
        drop(guard);
        answered = asker.join().unwrap();
    });
    assert!(answered > 0);
    // Nothing of what it waits for takes turns with the ending of others.
    let slowest = slowest.into_inner().unwrap();
    assert!(slowest < PATIENCE / 2, "{slowest:?}");
    assert_eq!(calm.sh("echo calm"), "calm\n");
}

#[test]
fn of_many_deletes_of_one_sandbox_exactly_one_did_it() {
    needs_root!();
    let server = Server::host().start();
    for _ in 0..10 {
        let sandbox = server.sandbox();
        sandbox
            .spawn(&json!({"cmd": "trap '' TERM; setsid sleep 3600 & while :; do sleep 1; done"}));
        let did = thread::scope(|scope| {
            let enders: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| {
                        let did = delete(&server, &sandbox.id);
                        // Whoever did it, it is done for everybody who was answered.
                        assert_eq!(sandbox.processes(), Vec::<i32>::new());
                        assert!(!sandbox.home.exists());
                        did
                    })
                })
                .collect();
            let did = enders.into_iter().map(|ender| ender.join().unwrap());
            did.filter(|did| *did).count()
        });
        assert_eq!(did, 1);
    }
}

#[test]
fn after_it_every_route_is_gone_and_another_delete_is_no_error() {
    needs_root!();
    let server = Server::host().start();
    let sandbox = server.sandbox();
    let process = sandbox.spawn(&json!({"cmd": "exec sleep 3600"}));
    assert!(delete(&server, &sandbox.id));
    for token in [&sandbox.token, crate::fixture::TOKEN] {
        for (method, route) in [
            ("GET", "/processes".to_owned()),
            (
                "GET",
                format!("/processes/{}", process["id"].as_str().unwrap()),
            ),
            ("GET", format!("/processes/{}", process["pid"])),
            ("POST", "/exec".to_owned()),
            ("GET", "/files/list?path=/".to_owned()),
            ("PUT", "/files/write?path=x".to_owned()),
        ] {
            let mut connection = server.connect();
            connection.token = Some(token.to_owned());
            let body = json!({"cmd": "true"}).to_string();
            let reply =
                connection.request(method, &target(&sandbox.id, &route), &[], body.as_bytes());
            assert_error(&reply, 404, "not_found");
        }
    }
    for route in ["", "/token"] {
        assert_error(&server.get(&target(&sandbox.id, route)), 404, "not_found");
    }
    assert_eq!(list(&server).len(), 0);
    for _ in 0..2 {
        assert!(!delete(&server, &sandbox.id));
    }
}

#[test]
fn deleting_all_ends_all_and_the_host_stays() {
    needs_root!();
    let server = Server::host().start();
    assert_eq!(server.delete(SANDBOXES).json()["deleted"], 0);
    let quiet = Held::after_one(&server, &json!({}));
    let made = create_for_trouble(&server, 20);
    for (sandbox, (_, trouble)) in made.iter().zip(TROUBLE) {
        sandbox.spawn(&json!({ "cmd": trouble }));
    }
    assert!(delete(&server, &made[3].id));
    let reply = server.delete(SANDBOXES);
    assert_eq!((reply.status, &reply.json()["deleted"]), (200, &json!(19)));
    assert_eq!(server.place.as_ref().unwrap().processes(), []);
    assert_eq!(homes_of(&server), Vec::<String>::new());
    assert_eq!(list(&server).len(), 0);
    quiet.await_of(&server);
    assert_eq!(server.sandbox().sh("echo on"), "on\n");
}

#[test]
fn deletes_of_all_beside_deletes_of_each_count_every_sandbox_once() {
    needs_root!();
    let server = Server::host().start();
    let (made, _) = create(&server, 40);
    let counted: u64 = thread::scope(|scope| {
        let all: Vec<_> = (0..3)
            .map(|_| scope.spawn(|| server.delete(SANDBOXES).json()["deleted"].as_u64().unwrap()))
            .collect();
        let each: Vec<_> = made
            .chunks(10)
            .map(|part| {
                let server = &server;
                scope.spawn(move || {
                    part.iter()
                        .map(|sandbox| u64::from(delete(server, &sandbox.id)))
                        .sum()
                })
            })
            .collect();
        all.into_iter()
            .chain(each)
            .map(|ender| ender.join().unwrap())
            .sum()
    });
    assert_eq!(counted, 40);
    assert_eq!(homes_of(&server), Vec::<String>::new());
}

#[test]
fn ending_one_leaves_the_others_alone() {
    needs_root!();
    let server = Server::host().start();
    let (made, _) = create(&server, 8);
    let pids: Vec<_> = made
        .iter()
        .map(|sandbox| {
            let process = sandbox.spawn(&json!({"cmd": "echo x > mine; exec sleep 3600"}));
            wait_until("it has begun", PATIENCE, || {
                sandbox.home.join("mine").exists()
            });
            i32::try_from(process["pid"].as_i64().unwrap()).unwrap()
        })
        .collect();
    for sandbox in made.iter().step_by(2) {
        assert!(delete(&server, &sandbox.id));
    }
    for (index, (sandbox, pid)) in made.iter().zip(pids).enumerate() {
        let lives = is_alive(pid);
        assert_eq!(lives, index % 2 == 1);
        assert_eq!(sandbox.home.join("mine").exists(), index % 2 == 1);
    }
}

/// Starts something as a sandbox's user that is not the server's to reap.
fn stranger(sandbox: &Sandbox<'_>) -> Child {
    Command::new("sleep")
        .arg("3600")
        .uid(sandbox.uid)
        .gid(sandbox.uid)
        .current_dir("/")
        .stdin(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn what_came_from_elsewhere_as_its_user_is_killed_and_keeps_only_that_from_others() {
    needs_root!();
    let server = super::with_users(1).start();
    let sandbox = server.sandbox();
    let mut stranger = stranger(&sandbox);
    // It stays a zombie, as which it still has the user and can do nothing.
    assert!(delete(&server, &sandbox.id));
    assert_eq!(
        stat_of(stranger.id().cast_signed()).unwrap().state,
        'Z',
        "it was killed"
    );
    assert_eq!(homes_of(&server), Vec::<String>::new());
    assert_eq!(create(&server, 1).1, 1, "nobody else gets the user");
    stranger.wait().unwrap();
    assert_eq!(create(&server, 1).0[0].uid, sandbox.uid);
}

/// A process of a sandbox that SIGKILL does not end: the first of a pid namespace, which waits there for
/// another one that its own parent, this process, does not reap.
struct Unkillable {
    first: Child,
    other: Child,
}

impl Unkillable {
    fn new(sandbox: &Sandbox<'_>) -> Self {
        let mut sleeper = Command::new("unshare");
        let uid = sandbox.uid.to_string();
        sleeper.args([
            "--pid", "--fork", "setpriv", "--reuid", &uid, "--regid", &uid,
        ]);
        sleeper.args(["--clear-groups", "sleep", "3600"]);
        let first = sleeper
            .current_dir("/")
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let mut inner = 0;
        wait_until("it runs in its namespace", PATIENCE, || {
            let below = descendants_of(first.id().cast_signed());
            inner = below.first().map_or(0, |process| process.pid);
            uid_of(inner) == Some(sandbox.uid)
        });
        let namespace = std::fs::File::open(format!("/proc/{inner}/ns/pid")).unwrap();
        let enter = || {
            nix::sched::setns(&namespace, nix::sched::CloneFlags::CLONE_NEWPID).unwrap();
            stranger(sandbox)
        };
        let other = thread::scope(|scope| scope.spawn(enter).join().unwrap());
        Self { first, other }
    }

    /// Lets it end after it was killed.
    fn release(&mut self) {
        self.other.wait().unwrap();
        self.first.wait().unwrap();
    }
}

impl Drop for Unkillable {
    fn drop(&mut self) {
        let _ = (self.other.kill(), self.other.wait());
        let _ = (self.first.kill(), self.first.wait());
    }
}

#[test]
fn a_sandbox_that_cannot_be_emptied_is_reported_and_keeps_its_user_until_it_is() {
    needs_root!();
    if !has_namespaces() {
        skip!("needs namespaces");
    }
    let server = super::with_users(2).env("SBX_CAPACITY", 2).start();
    let sandbox = server.sandbox();
    let mut unkillable = Unkillable::new(&sandbox);
    let reply = server.delete(&target(&sandbox.id, ""));
    assert_eq!(reply.status, 500, "{}", reply.text());
    assert!(reply.text().contains(&sandbox.id), "{}", reply.text());
    let report = format!("uid {} stays taken", sandbox.uid);
    wait_until("it is reported", PATIENCE, || {
        server.log().contains(&report)
    });
    assert_eq!(
        server.get(&target(&sandbox.id, "")).status,
        404,
        "it is no sandbox any more"
    );
    let (made, rejected) = create(&server, 2);
    assert_eq!((made.len(), rejected), (1, 1));
    assert_ne!(made[0].uid, sandbox.uid);
    unkillable.release();
    // It is tried again in any case; whoever asks need not wait for that. What was tried just now may
    // be done already, or not be yet.
    let reply = server.delete(&target(&sandbox.id, ""));
    assert_eq!(reply.status, 200, "{}", reply.text());
    let (made, _) = create(&server, 1);
    assert_eq!(made[0].uid, sandbox.uid, "empty at last, it is given again");
    assert_eq!(made[0].sh("echo on"), "on\n");
}

#[test]
fn one_that_cannot_be_emptied_holds_up_no_other() {
    needs_root!();
    if !has_namespaces() {
        skip!("needs namespaces");
    }
    let mut server = Server::host().env("SBX_KEEP", 0).start();
    let sandboxes: Vec<_> = (0..8).map(|_| server.sandbox()).collect();
    for sandbox in &sandboxes {
        sandbox.spawn(&json!({"cmd": "sleep 3600"}));
    }
    let _unkillable = Unkillable::new(&sandboxes[3]);
    let homes: Vec<_> = sandboxes
        .iter()
        .map(|sandbox| sandbox.home.clone())
        .collect();
    let id = sandboxes[3].id.clone();
    thread::scope(|scope| {
        let all = scope.spawn(|| server.delete(SANDBOXES));
        wait_until("all others are gone", Duration::from_secs(10), || {
            homes.iter().filter(|home| home.exists()).count() == 1
        });
        assert!(!all.is_finished(), "it still tries");
        let reply = all.join().unwrap();
        assert_eq!(reply.status, 500, "{}", reply.text());
        assert!(reply.text().contains(&id), "{}", reply.text());
    });
    let later = server.sandbox().home;
    assert!(homes[3].exists() && later.exists());
    server.signal(nix::libc::SIGTERM);
    server.wait_for_exit(Duration::from_secs(20));
    assert_eq!(homes_of(&server), Vec::<String>::new(), "no home is left");
}
