//! Code that attacks the bridge, the server and its neighbours. The worst that it gets is `died`.

use std::thread;
use std::time::Duration;

use serde_json::json;

use super::{Place, Ran, everywhere, in_parallel, needs, on_a_machine, on_a_machine_with};
use crate::fixture::{
    Mark, PATIENCE, Random, count_entries, descriptors_of, is_alive, memory_of, pid_of, reset,
    status_of, wait_until,
};

/// Functions that speak with the server on the bridge's socket, as code can that looks for it.
const FORGE: &str = "import os, struct, json, time\n\
    def raw(data): os.write(4, struct.pack('<I', len(data)) + data)\n\
    def send(**frame): raw(json.dumps(frame).encode())\n";

/// Frames that no bridge sends, and a socket that is broken.
const FORGERIES: [(&str, &str); 28] = [
    ("done", "send(type='done')\ntime.sleep(0.3); print('late')"),
    (
        "error",
        "send(type='done', error={'name': 'X', 'value': 'y', 'traceback': ['z']})",
    ),
    ("status", "send(type='done', exit_code=256)\ntime.sleep(5)"),
    ("begun", "for _ in range(100): send(type='begun')"),
    ("ready", "send(type='ready', backend='x', version='y')"),
    ("failed", "send(type='failed', error='no')"),
    ("adopted", "send(type='adopted', error='no')"),
    (
        "results",
        "for i in range(5): send(type='result', data={'text/plain': 'forged'}, metadata={})",
    ),
    (
        "input",
        "for i in range(100): send(type='input', k=i, prompt='p' * 1000, password=False)",
    ),
    (
        "garbage",
        "os.write(4, b'garbage-garbage-garbage' * 10)\ntime.sleep(5)",
    ),
    (
        "half",
        "os.write(4, struct.pack('<I', 1000) + b'{')\ntime.sleep(0.1); os._exit(0)",
    ),
    (
        "too long",
        "os.write(4, b'\\xff\\xff\\xff\\xff')\ntime.sleep(5)",
    ),
    ("zero", "raw(b'')\ntime.sleep(5)"),
    ("no object", "raw(b'[1]')\ntime.sleep(5)"),
    (
        "not UTF-8",
        "raw(b'{\"type\":\"display\",\"data\":{\"a\":\"\\xff\"}}')\ntime.sleep(5)",
    ),
    ("unknown", "send(type='dance')\ntime.sleep(5)"),
    ("no type", "send(data={})\ntime.sleep(5)"),
    ("wrong type", "send(type='display', data=5)\ntime.sleep(5)"),
    (
        "no string",
        "send(type='display', data={'text/html': 5})\ntime.sleep(5)",
    ),
    (
        "deep",
        "raw(b'{\"type\":\"display\",\"data\":{\"application/json\":' + b'[' * 10**6 + b']' * 10**6 + b'}}')\ntime.sleep(5)",
    ),
    (
        "deep type",
        "raw(b'{\"type\":' + b'[' * 10**6 + b']' * 10**6 + b'}')\ntime.sleep(5)",
    ),
    (
        "large",
        "raw(b'{\"type\":\"display\",\"data\":{\"text/plain\":\"' + b'x' * (12 << 20) + b'\"}}')",
    ),
    (
        "many names",
        "raw(b'{\"type\":\"display\",\"data\":{' + b','.join(b'\"%d\":\"\"' % i for i in range(10**6)) + b'}}')",
    ),
    (
        "syncs",
        "d = json.dumps({'type': 'sync'}).encode(); d = struct.pack('<I', len(d)) + d\nfor i in range(20_000): os.write(4, d)",
    ),
    ("closed", "os.close(4)\ntime.sleep(5)"),
    (
        "shut",
        "import socket; socket.socket(fileno=os.dup(4)).shutdown(2)\ntime.sleep(5)",
    ),
    (
        "replaced",
        "os.dup2(os.open('/dev/null', os.O_RDWR), 4)\ntime.sleep(5)",
    ),
    (
        "read",
        "import threading\ndef f():\n  while True: os.read(4, 1)\nthreading.Thread(target=f, daemon=True).start()\ntime.sleep(0.2)\ndisplay(1)",
    ),
];

#[test]
fn forged_frames_harm_nobody_else() {
    everywhere(|place| {
        needs!(place, "python");
        place.python("victim");
        place.run("victim", "x = 5");
        let server = server_of(place);
        for (name, code) in FORGERIES {
            place.python("a");
            let body = json!({ "code": format!("{FORGE}{code}"), "timeout": 1, "kill_after": 0.2 });
            let ran = place.execute("a", &body);
            let reason = ran.end()["reason"].as_str().unwrap();
            assert!(
                ["completed", "error", "died", "timeout"].contains(&reason),
                "{name}: {ran:?}"
            );
            // It goes on, or is dead and says so.
            if place.context("a")["state"] == "dead" {
                assert_eq!(ran.end()["state"], "lost", "{name}: {ran:?}");
            } else {
                assert_eq!(ran.end()["state"], "kept", "{name}: {ran:?}");
                let next = json!({ "code": "1 + 1", "timeout": 1, "kill_after": 0.2 });
                place.execute("a", &next);
            }
            place.remove("a");
            assert_eq!(place.value("victim", "x"), "5", "{name}");
        }
        assert!(
            memory_of(server, "VmHWM") < 400 << 20,
            "{}",
            memory_of(server, "VmHWM")
        );
        assert!(is_alive(server));
    });
}

fn server_of(place: Place<'_>) -> i32 {
    match place.sandbox {
        Some(_) => place.server.inner_pid(),
        None => place.server.pid(),
    }
}

#[test]
fn what_is_passed_on_is_one_line_of_json() {
    on_a_machine(|place| {
        needs!(place, "python");
        place.python("a");
        let frame = r#"{"type":"display",\n"data":\n{"text/plain":\r\n"a\\u2028\u2028\\ud800\\udc00\\udfff\u0085b",\t"application/json": [1,\n 2]},"metadata":{"a":\n"b"}}"#;
        let code = format!("{FORGE}raw('''{frame}'''.encode())\ntime.sleep(0.2)");
        let ran = place.run("a", &code);
        let data = &ran.one("display")["data"];
        assert_eq!(
            data["text/plain"],
            "a\u{2028}\u{2028}\u{10000}\\udfff\u{85}b"
        );
        assert_eq!(data["application/json"], json!([1, 2]));
        let target = place.target("contexts/a/executions/e-1/events");
        let body = place.connect().request("GET", &target, &[], b"").text();
        assert!(!body.contains(['\u{2028}', '\u{85}', '\r']), "{body}");
        assert_eq!(body.lines().count(), ran.events.len());
    });
}

#[test]
fn code_that_breaks_its_own_interpreter_breaks_nothing_else() {
    everywhere(|place| {
        needs!(place, "python");
        for code in [
            "import os; os.close(1); os.close(2)",
            "import os; os.closerange(0, 100)",
            "import os; os.dup2(os.open('/dev/null', 1), 1); print('x')",
            "import sys; sys.stdout.close(); sys.stderr = None; sys.stdin = 5; sys.displayhook = None; sys.excepthook = None",
            "import json, builtins; json.dumps = None; builtins.print = None; builtins.len = None; builtins.isinstance = None; 7",
            "import sys; sys.modules.clear()",
            "import signal\nfor n in range(1, 65):\n  try: signal.signal(n, signal.SIG_IGN)\n  except (OSError, ValueError): pass",
            "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))",
            "import sys; sys.settrace(lambda *a: 1/0); sys.setprofile(lambda *a: 1/0)",
            "import sys; sys.setrecursionlimit(50)",
            "def f(): f()\nf()",
            "import gc, os; [os.close(n) for n in range(3, 50)] if False else None; gc.set_threshold(0)",
            "import threading; threading.Thread(target=lambda: 1/0).start()",
            "import atexit, os; atexit.register(os.abort)",
            "globals().clear()",
            "import os; os.chdir('/'); os.environ.clear(); os.umask(0o777)",
            "import os; os.kill(os.getpid(), 19 if False else 18)",
            "class X:\n  def __repr__(self): raise SystemExit(3)\nX()",
            "class X:\n  def __del__(self): print('x' * 10**6)\nx = X(); del x",
            "raise type('E', (BaseException,), {'__str__': lambda s: 1/0})()",
        ] {
            place.python("a");
            let ran = place.execute(
                "a",
                &json!({ "code": code, "timeout": 5, "kill_after": 0.5 }),
            );
            let state = ran.end()["state"].clone();
            let next = json!({ "code": "6 * 7", "timeout": 5, "kill_after": 0.5 });
            if state == "kept" {
                let next = place.execute("a", &next);
                // Functions of the language may be gone; the context is there and ends what it is given.
                assert!(
                    ["kept", "lost"].contains(&next.end()["state"].as_str().unwrap()),
                    "{code}: {next:?}"
                );
            } else {
                assert_eq!(place.context("a")["state"], "dead", "{code}");
            }
            let reply = place.post("contexts/a/restart", &json!({}));
            assert_eq!(reply.status, 200, "{code}: {}", reply.text());
            assert_eq!(place.value("a", "6 * 7"), "42", "{code}");
            place.remove("a");
        }
    });
}

#[test]
fn an_interpreter_that_stops_itself_is_killed_in_time() {
    everywhere(|place| {
        needs!(place, "python");
        place.python("a");
        let body = json!({ "code": "import os; os.kill(os.getpid(), 19)", "timeout": 0.2, "kill_after": 0.2 });
        place.execute("a", &body).expect("timeout", "lost");
        place.post("contexts/a/restart", &json!({}));
        let (running, start) = place.begin_running(
            "a",
            &json!({ "code": "import os; os.kill(os.getpid(), 19)" }),
        );
        wait_until("it has stopped", PATIENCE, || {
            crate::fixture::stat_of(pid_of(&start)).is_some_and(|process| process.state == 'T')
        });
        place.remove("a");
        assert!(!is_alive(pid_of(&start)));
        assert_eq!(running.last().unwrap()["reason"], "deleted");
    });
}

#[test]
fn a_forked_child_that_holds_the_socket_holds_up_nothing() {
    everywhere(|place| {
        needs!(place, "python");
        for (fork, death) in [
            ("os.fork()", "os._exit(9)"),
            ("ctypes.CDLL(None).fork()", "os._exit(9)"),
            ("ctypes.CDLL(None).fork()", "os.kill(os.getpid(), 9)"),
        ] {
            let mark = Mark::new();
            place.python("a");
            let code = format!(
                "import os, ctypes\nif {fork} == 0:\n  os.set_inheritable(4, True) if os.path.exists('/proc/self/fd/4') else None\n  \
                 os.execvp('sleep', ['sleep', '{mark}'])\nprint('on')"
            );
            let ran = place.run("a", &code);
            ran.expect("completed", "kept");
            assert_eq!(ran.text("stdout"), "on\n");
            mark.wait_for(1);
            assert_eq!(place.value("a", "1 + 1"), "2");
            let ran = place.run("a", death);
            ran.expect("died", "lost");
            mark.wait_gone(PATIENCE);
            place.remove("a");
        }
    });
}

#[test]
fn floods_are_bounded() {
    on_a_machine(|place| {
        needs!(place, "python");
        place.python("a");
        let server = place.server.pid();
        // All of it reaches the client that takes it, and none of it stays.
        let mut received = 0;
        for event in place.begin("a", &json!({ "code": "print('x' * 99_999_999)" })) {
            if event["event"] == "stdout" {
                received += event["bytes"].as_u64().unwrap();
            }
        }
        assert_eq!(received, 100_000_000);
        let ran = place.run("a", "for i in range(5000): display(i)");
        assert_eq!(ran.all("display").count(), 5000);
        assert_eq!(
            ran.all("display").last().unwrap()["data"]["text/plain"],
            "4999"
        );
        // Displays that nobody takes.
        let stream = place.begin(
            "a",
            &json!({ "code": "while True: display('x' * 1_000_000)" }),
        );
        wait_until("it waits", PATIENCE, || {
            place.document("contexts/a/executions/e-3")["events"].as_u64() > Some(1)
        });
        assert_eq!(
            place.post("contexts/a/interrupt", &json!({})).json()["ended"],
            true
        );
        drop(stream);
        // A bundle beyond the limit is cut, and says so.
        let ran = place.run(
            "a",
            "display({'text/plain': 'small', 'text/html': 'x' * (17 << 20)}, raw=True)",
        );
        let shown = ran.one("display");
        assert_eq!(shown["data"], json!({ "text/plain": "small" }));
        assert!(shown["dropped"]["text/html"].as_u64() > Some(17 << 20));
        assert!(
            memory_of(server, "VmHWM") < 120 << 20,
            "{}",
            memory_of(server, "VmHWM")
        );
    });
}

#[test]
fn executions_that_have_ended_hold_no_more_than_the_log_may() {
    on_a_machine_with(&[("SBX_LOG_BYTES", "262144")], |place| {
        needs!(place, "python");
        place.python("a");
        let server = place.server.pid();
        let before = memory_of(server, "VmRSS");
        for _ in 0..10 {
            let ran = place.run("a", "display({'text/plain': 'x' * (8 << 20)}, raw=True)");
            assert_eq!(ran.all("display").count(), 1);
        }
        let error =
            "send(type='done', error={'name': 'E', 'value': 'v' * (3 << 20), 'traceback': ['t']})";
        for _ in 0..3 {
            let body = json!({ "code": format!("{FORGE}{error}"), "max_output_bytes": 0 });
            let ran = place.execute("a", &body);
            ran.expect("error", "kept");
        }
        let more = format!("{FORGE}{}", error.replace("3 <<", "5 <<"));
        place.run("a", &more).expect("died", "lost");
        let grown = memory_of(server, "VmRSS").saturating_sub(before);
        assert!(grown < 64 << 20, "{grown}");
    });
}

#[test]
fn a_client_may_leave_at_every_moment() {
    everywhere(|place| {
        needs!(place, "python");
        place.python("a");
        place.run("a", "x = 5");
        let mut random = Random(7);
        for round in 0..60 {
            let body = json!({ "code": "import time\nfor i in range(20): print(i); display(i); time.sleep(0.002)" });
            let mut connection = place.connect();
            let target = place.target("contexts/a/execute");
            connection.send_request("POST", &target, &[], body.to_string().as_bytes());
            thread::sleep(Duration::from_micros(random.below(30_000) as u64));
            if round % 2 == 0 {
                drop(connection);
            } else {
                reset(connection);
            }
        }
        wait_until("all have left", PATIENCE, || {
            let context = place.context("a");
            context["queued"] == 0 && context["state"] == "idle"
        });
        assert_eq!(place.value("a", "x"), "5");
    });
}

#[test]
fn contexts_are_deleted_and_restarted_while_they_are_used() {
    everywhere(|place| {
        needs!(place, "bash");
        let server = server_of(place);
        let before = (
            descriptors_of(server),
            count_entries(&format!("/proc/{server}/task")),
        );
        let contexts = place.ids();
        in_parallel(6, |client| {
            for round in 0..15 {
                let id = format!("c{}", (client + round) % 3);
                let body = json!({ "language": "bash", "id": id }).to_string();
                let code = json!({ "code": "echo on; for i in {1..200}; do :; done" }).to_string();
                let route = format!("contexts/{id}");
                let (method, route, body) = match (client + round * 7) % 6 {
                    0 | 1 => ("POST", "contexts".to_owned(), &*body),
                    2 | 3 => ("POST", format!("{route}/execute"), &*code),
                    4 => ("POST", format!("{route}/restart"), "{}"),
                    _ => ("DELETE", route, ""),
                };
                let reply = place.request(method, &route, body);
                assert!(
                    [200, 404, 409].contains(&reply.status),
                    "{route}: {}",
                    reply.text()
                );
                if route.ends_with("/execute") && reply.status == 200 {
                    Ran::of(crate::fixture::events_of(&reply.body));
                }
            }
        });
        for id in place.ids() {
            place.remove(&id);
        }
        assert_eq!(place.ids(), contexts);
        wait_until("nothing of them is left", PATIENCE, || {
            descriptors_of(server) <= before.0 + 2
                && count_entries(&format!("/proc/{server}/task")) <= before.1 + 2
                && crate::fixture::descendants_of(server)
                    .iter()
                    .all(|process| !is_alive(process.pid) || process.pid == server)
        });
    });
}

#[test]
fn whoever_waits_for_an_interrupt_leaves_no_thread_when_it_goes() {
    on_a_machine(|place| {
        needs!(place, "python");
        place.python("a");
        let code = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n\
            print('here', flush=True)\ntime.sleep(1000)";
        let mut events = place.begin("a", &json!({ "code": code }));
        assert!(events.any(|event| event["event"] == "stdout"));
        let pid = place.server.pid();
        let threads = || status_of(pid, "Threads");
        let before = threads();
        let clients: Vec<_> = (0..30)
            .map(|_| {
                let mut client = place.connect();
                let target = place.target("contexts/a/interrupt");
                client.send_request("POST", &target, &[], br#"{"kill_after":100000}"#);
                client
            })
            .collect();
        let mut most = 0;
        wait_until("they wait", PATIENCE, || {
            most = threads();
            most > before + 15
        });
        drop(clients);
        // Some are kept for connections to come.
        wait_until("the threads end", PATIENCE, || threads() < most - 8);
        place.remove("a");
    });
}
