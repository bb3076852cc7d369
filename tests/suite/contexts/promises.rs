//! The promises of docs/interpreter.md, in their order.

use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::{PATH, Place, Ran, everywhere, in_parallel, joined, needs, on_a_machine_with};
use crate::fixture::{
    Mark, PATIENCE, Server, Stop, is_alive, is_root, memory_of, pid_of, wait_until,
};
use crate::skip;

fn told(story: &[(&str, &str)]) -> Vec<(String, String)> {
    let story = story.iter();
    story
        .map(|(name, text)| ((*name).to_owned(), (*text).to_owned()))
        .collect()
}

#[test]
fn order_is_that_of_the_code_across_streams_and_children() {
    everywhere(|place| {
        needs!(place, "python");
        place.python("p");
        let code = "import sys, subprocess, os\n\
            for i in range(3):\n  \
              print('o', i)\n  \
              print('e', i, file=sys.stderr)\n  \
              subprocess.run(['sh', '-c', f'echo c {i}; echo d {i} >&2'])\n  \
              display(i)\n  \
              os.write(1, b'w\\n')\n  \
              os.system('echo s')\n\
            print('last', end='')\n\
            'result'";
        let one = |i: u8| {
            [
                ("stdout".to_owned(), format!("o {i}\n")),
                ("stderr".to_owned(), format!("e {i}\n")),
                ("stdout".to_owned(), format!("c {i}\n")),
                ("stderr".to_owned(), format!("d {i}\n")),
                ("display".to_owned(), i.to_string()),
                ("stdout".to_owned(), "w\ns\n".to_owned()),
            ]
        };
        let last = [
            ("stdout".to_owned(), "last".to_owned()),
            ("result".to_owned(), "'result'".to_owned()),
        ];
        let expected = joined((0..3).flat_map(one).chain(last));
        // What a child writes to both is ordered per stream only, so it may come in either order.
        let in_order = |story: Vec<(String, String)>| {
            let lines = |(name, text): (String, String)| {
                let lines = text.split_inclusive('\n').map(str::to_owned);
                lines.map(|line| (name.clone(), line)).collect::<Vec<_>>()
            };
            let mut story: Vec<_> = story.into_iter().flat_map(lines).collect();
            for index in 1..story.len() {
                if story[index - 1].1.starts_with('d') && story[index].1.starts_with('c') {
                    story.swap(index - 1, index);
                }
            }
            joined(story)
        };
        for _ in 0..5 {
            let ran = place.run("p", code);
            ran.expect("completed", "kept");
            assert_eq!(in_order(ran.story()), expected);
        }
        let ran = place.run(
            "p",
            "print('out')\nprint('err', file=sys.stderr)\ndisplay('d')\nprint('more')\n1/0",
        );
        let expected = told(&[
            ("stdout", "out\n"),
            ("stderr", "err\n"),
            ("display", "'d'"),
            ("stdout", "more\n"),
            ("error", "ZeroDivisionError"),
        ]);
        assert_eq!(ran.story(), expected);

        needs!(place, "javascript");
        place.make(&json!({ "language": "javascript", "id": "j" }));
        let code = "const { execSync, spawnSync } = require('child_process');\n\
            for (let i = 0; i < 3; i++) {\n\
              console.log('o', i); console.error('e', i);\n\
              spawnSync('sh', ['-c', `echo c ${i}`], { stdio: 'inherit' });\n\
              display(i);\n\
            }\n'result'";
        let mut expected = Vec::new();
        for i in 0..3 {
            expected.push(("stdout".to_owned(), format!("o {i}\n")));
            expected.push(("stderr".to_owned(), format!("e {i}\n")));
            expected.push(("stdout".to_owned(), format!("c {i}\n")));
            expected.push(("display".to_owned(), i.to_string()));
        }
        expected.push(("result".to_owned(), "'result'".to_owned()));
        let ran = place.run("j", code);
        assert_eq!(ran.story(), expected, "{ran:?}");
    });
}

#[test]
fn what_threads_print_is_whole_lines_of_their_execution() {
    everywhere(|place| {
        needs!(place, "python");
        place.python("a");
        let code = "import threading, sys\n\
            def work(n):\n  \
              for i in range(200):\n    print(f'{n} {i}\\n', end=''); print(f'{n} {i}\\n', end='', file=sys.stderr)\n\
            threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]\n\
            [t.start() for t in threads]; [t.join() for t in threads]; print('all')";
        let ran = place.run("a", code);
        ran.expect("completed", "kept");
        let (out, err) = (ran.text("stdout"), ran.text("stderr"));
        assert!(
            out.ends_with("all\n"),
            "the main thread waited for the others"
        );
        for text in [out.trim_end_matches("all\n"), &err] {
            for thread in 0..8 {
                let own: Vec<_> = text
                    .lines()
                    .filter(|line| line.starts_with(&format!("{thread} ")))
                    .collect();
                let expected: Vec<_> = (0..200).map(|i| format!("{thread} {i}")).collect();
                assert_eq!(own, expected);
            }
        }
    });
}

#[test]
fn an_execution_has_what_is_written_between_its_start_and_its_end() {
    everywhere(|place| {
        needs!(place, "python");
        place.python("a");
        let code = "import threading, sys\ngo, gone = threading.Event(), threading.Event()\n\
            def later():\n  go.wait(); print('late'); print('late', file=sys.stderr); gone.set()\n\
            threading.Thread(target=later).start()\nprint('early')";
        assert_eq!(place.run("a", code).text("stdout"), "early\n");
        let ran = place.run("a", "go.set(); gone.wait(); print('own')");
        let text = ran.text("stdout");
        assert_eq!(text, "late\nown\n", "written between its start and its end");
        // Between two executions: in nobody's stream, in the logs, and a step in the offsets.
        let fifo = place.directory.join("gate");
        let gate = fifo.display();
        let code = format!(
            "import os; os.mkfifo('{gate}')\n\
             def idle():\n  open('{gate}').read(); print('between')\n\
             threading.Thread(target=idle).start()"
        );
        place.run("a", &code).expect("completed", "kept");
        let opened = place.post("exec", &json!({ "cmd": format!("echo > {gate}") }));
        assert_eq!(opened.status, 200);
        wait_until("it is logged", PATIENCE, || {
            place.logged("a", "stdout").ends_with("between\n")
        });
        let ran = place.run("a", "print('next')");
        assert_eq!(ran.text("stdout"), "next\n");
        assert_eq!(
            ran.one("start")["stdout_offset"],
            "early\nlate\nown\nbetween\n".len()
        );
        assert_eq!(
            place.logged("a", "stdout"),
            "early\nlate\nown\nbetween\nnext\n"
        );
    });
}

#[test]
fn complete_lines_before_a_death_are_delivered() {
    everywhere(|place| {
        needs!(place, "python");
        for (id, death, exit_code, signal) in [
            ("exit", "os._exit(7)", json!(7), Value::Null),
            ("kill", "os.kill(os.getpid(), 9)", Value::Null, json!(9)),
            (
                "segfault",
                "import ctypes; ctypes.string_at(0)",
                Value::Null,
                json!(11),
            ),
            ("abort", "os.abort()", Value::Null, json!(6)),
            ("group", "os.killpg(0, 9)", Value::Null, json!(9)),
            (
                "exec",
                "os.execvp('sh', ['sh', '-c', 'exit 5'])",
                json!(5),
                Value::Null,
            ),
            (
                "child",
                "import subprocess; subprocess.run(['sh', '-c', 'echo child; kill -9 $PPID'])",
                Value::Null,
                json!(9),
            ),
        ] {
            place.python(id);
            let code = format!(
                "import os, sys\nfor i in range(3000): print('line', i)\nprint('err', file=sys.stderr)\n{death}"
            );
            let ran = place.run(id, &code);
            ran.expect("died", "lost");
            assert_eq!(
                (&ran.end()["exit_code"], &ran.end()["signal"]),
                (&exit_code, &signal),
                "{id}"
            );
            let out = ran.text("stdout");
            let lines: Vec<_> = (0..3000).map(|i| format!("line {i}\n")).collect();
            let lines = lines.concat();
            assert!(
                out.starts_with(&lines),
                "{id}: {} of {}",
                out.len(),
                lines.len()
            );
            assert!(ran.text("stderr").starts_with("err\n"), "{id}");
            assert_eq!(out.ends_with("child\n"), id == "child");
            assert_eq!(place.context(id)["state"], "dead");
            place.remove(id);
        }
    });
}

#[test]
fn the_end_does_not_wait_for_a_child_that_floods() {
    everywhere(|place| {
        for (language, code) in [
            (
                "python",
                "import subprocess; p = subprocess.Popen(['yes']); print('end')",
            ),
            (
                "javascript",
                "var p = require('child_process').spawn('yes', { stdio: 'inherit' }); console.log('end')",
            ),
            ("bash", "yes & echo end"),
        ] {
            needs!(place, language);
            place.make(&json!({ "language": language, "id": language }));
            for _ in 0..3 {
                let ran = place.run(language, code);
                ran.expect("completed", "kept");
                assert!(ran.text("stdout").contains("end\n"));
            }
            let before = place.document(&format!("contexts/{language}"))["pid"].clone();
            let ran = place.run(language, if language == "bash" { "echo on" } else { "1" });
            ran.expect("completed", "kept");
            assert_eq!(ran.one("start")["pid"], before);
            place.remove(language);
        }
    });
}

#[test]
fn an_interrupt_never_hits_the_next_execution() {
    everywhere(|place| {
        for (language, short, next) in [
            (
                "python",
                "for _ in range(2000): pass",
                "import time; time.sleep(0.002); 'ok'",
            ),
            (
                "javascript",
                "for (let i = 0; i < 20000; i++);",
                "await new Promise(r => setTimeout(r, 2)); 'ok'",
            ),
            (
                "bash",
                "for i in {1..50}; do :; done",
                "for i in {1..50}; do :; done; echo ok",
            ),
        ] {
            needs!(place, language);
            place.make(&json!({ "language": language, "id": language }));
            let mut interrupted = 0;
            for round in 0..60 {
                // An interrupt that races with the end of the one that it names, while another waits.
                let id = format!("r-{round}");
                let first = place.begin(language, &json!({ "code": short, "id": id }));
                let second = place.begin(language, &json!({ "code": next }));
                thread::sleep(Duration::from_micros(round * 100));
                place.post(
                    &format!("contexts/{language}/interrupt"),
                    &json!({ "execution": id }),
                );
                let first = Ran::of(first.collect());
                assert_eq!(first.end()["state"], "kept", "{first:?}");
                let reason = first.end()["reason"].as_str().unwrap();
                assert!(
                    ["completed", "interrupted", "cancelled"].contains(&reason),
                    "{first:?}"
                );
                interrupted += i32::from(reason == "interrupted");
                let second = Ran::of(second.collect());
                second.expect("completed", "kept");
                assert!(format!("{:?}", second.events).contains("ok"), "{second:?}");
            }
            // Whoever interrupts without a name means what runs.
            assert!(interrupted < 60, "{language}: {interrupted}");
        }
    });
}

#[test]
fn state_is_never_guessed() {
    everywhere(|place| {
        needs!(place, "python");
        place.python("a");
        // A storm of interrupts while executions come and go: the count says which of them ran.
        let stop = Stop::default();
        thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.is_set() {
                    place.post("contexts/a/interrupt", &json!({}));
                }
            });
            let _guard = stop.guard();
            place.run("a", "pass");
            let mut generation = 1;
            let mut known = None;
            for number in 0..150 {
                let ran = place.run(
                    "a",
                    &format!(
                        "{}x = {number}\nfor _ in range(500): pass",
                        known.map_or(String::new(), |x: i32| format!("assert x >= {x}\n"))
                    ),
                );
                let (reason, state) = (&ran.end()["reason"], &ran.end()["state"]);
                assert_eq!(state, "kept", "{ran:?}");
                assert_eq!(ran.one("start")["generation"], generation);
                if reason == "completed" {
                    known = Some(number);
                } else {
                    assert_eq!(reason, "interrupted", "{ran:?}");
                }
                generation = ran.one("start")["generation"].as_i64().unwrap();
            }
            assert!(known.is_some());
        });
        assert_eq!(place.context("a")["generation"], 1);
    });
}

/// More than pipes, logs and what is held for a client take together.
const LINES: usize = 400_000;

#[test]
fn a_slow_reader_slows_its_own_execution_alone() {
    on_a_machine_with(&[("SBX_LOG_BYTES", "1048576")], |place| {
        needs!(place, "python");
        place.python("slow");
        place.python("quick");
        let server = place.server.pid();
        let before = memory_of(server, "VmRSS");
        let code = format!("for i in range({LINES}): print(f'{{i:099}}')\nopen('written', 'w')");
        let stream = place.begin("slow", &json!({ "code": code }));
        // The code stops when what it has written is not taken.
        let mut last = 0;
        wait_until("it waits", PATIENCE, || {
            thread::sleep(Duration::from_millis(100));
            let events = place.document("contexts/slow/executions/e-1")["events"]
                .as_u64()
                .unwrap();
            std::mem::replace(&mut last, events) == events && events > 1
        });
        assert_eq!(place.context("slow")["state"], "busy");
        assert!(!place.directory.join("written").exists());
        for _ in 0..50 {
            assert_eq!(place.value("quick", "1 + 1"), "2");
        }
        let grown = memory_of(server, "VmRSS").saturating_sub(before);
        assert!(grown < 16 << 20, "{grown}");
        // It is taken at last, and nothing is missing.
        let mut next = 0_usize;
        let mut rest = String::new();
        let mut ends = 0;
        for event in stream {
            match event["event"].as_str().unwrap() {
                "stdout" => {
                    rest.push_str(event["data"].as_str().unwrap());
                    while let Some(at) = rest.find('\n') {
                        assert_eq!(rest[..at].parse(), Ok(next));
                        next += 1;
                        rest.drain(..=at);
                    }
                }
                "end" => {
                    assert_eq!(event["reason"], "completed");
                    ends += 1;
                }
                "dropped" => panic!("{event}"),
                _ => {}
            }
        }
        assert_eq!((next, ends), (LINES, 1));
        // Who watches slowly holds up nobody.
        let (asking, _) = place.begin_running(
            "slow",
            &json!({ "code": "input()", "allow_input": true, "id": "seen" }),
        );
        let target = place.target("contexts/slow/executions/seen/events?follow=1");
        let watching = place.connect().stream("GET", &target, b"");
        drop(asking);
        place.wait_idle("slow");
        let ran = place.run("slow", "for i in range(100_000): print(f'{i:099}')");
        ran.expect("completed", "kept");
        drop(watching);
    });
}

#[test]
fn a_memory_error_keeps_the_state() {
    if !is_root() {
        skip!("host mode needs root");
    }
    let server = Server::host().env("PATH", PATH).start();
    let sandbox = server.sandbox_with(&json!({ "max_mem_mb": 400 }));
    let place = Place::of(&sandbox);
    needs!(place, "python");
    place.python("a");
    place.run("a", "x = 5");
    for _ in 0..3 {
        let ran = place.run(
            "a",
            "hoard = []\nwhile True: hoard.append(bytearray(10 << 20))",
        );
        ran.expect("error", "kept");
        assert_eq!(ran.one("error")["name"], "MemoryError");
        place.run("a", "del hoard").expect("completed", "kept");
    }
    assert_eq!(place.value("a", "x"), "5");
    // And more processes than it may have.
    let sandbox = server.sandbox_with(&json!({ "max_procs": 20 }));
    let place = Place::of(&sandbox);
    let mark = Mark::new();
    place.python("a");
    let code = format!(
        "import subprocess\nchildren = []\n\
         while True: children.append(subprocess.Popen(['sleep', '{mark}']))"
    );
    let ran = place.run("a", &code);
    ran.expect("error", "kept");
    assert_eq!(ran.one("error")["name"], "BlockingIOError");
    assert_eq!(place.value("a", "len(children) > 5"), "True");
    place.remove("a");
    mark.wait_gone(PATIENCE);
}

#[test]
fn nothing_of_the_server_reaches_the_code() {
    everywhere(|place| {
        let python = "import os\nprint(sorted(int(n) for n in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}')))";
        needs!(place, "python");
        place.python("p");
        let show =
            "ls -l /proc/self/fd | sed -n 's/.* \\([0-9]*\\) -> .*/\\1/p' | tr '\\n' ' '; env";
        let children = [
            (
                "p",
                format!(
                    "import subprocess; print(subprocess.run({show:?}, shell=True, capture_output=True, text=True).stdout)"
                ),
            ),
            (
                "j",
                format!("console.log(require('child_process').execSync({show:?}).toString())"),
            ),
            ("b", show.to_owned()),
        ];
        place.run("p", python).expect("completed", "kept");
        for (id, code) in children {
            let language = ["python", "javascript", "bash"]["pjb".find(id).unwrap()];
            needs!(place, language);
            place.make(&json!({ "id": id, "language": language }));
            let ran = place.run(id, &code);
            ran.expect("completed", "kept");
            let out = ran.text("stdout");
            let (descriptors, environment) = out.split_once("  ").or(out.split_once('\n')).unwrap();
            // 3 is the directory that ls reads.
            let numbers: Vec<_> = descriptors
                .split_whitespace()
                .filter_map(|number| number.parse::<u32>().ok())
                .collect();
            assert_eq!(numbers, [0, 1, 2, 3], "{language}: {out}");
            let token = place.server.token.as_deref().unwrap();
            let own = place
                .sandbox
                .map(|sandbox| sandbox.token.clone())
                .unwrap_or_default();
            assert!(!out.contains(token), "{out}");
            assert!(own.is_empty() || !out.contains(&own), "{out}");
            let variables = environment.lines().filter(|line| line.starts_with("SBX_"));
            let variables: Vec<_> = variables
                .map(|line| line.split('=').next().unwrap())
                .collect();
            let command = place
                .post(
                    "exec",
                    &json!({ "cmd": "env | grep ^SBX_ | sed 's/=.*//' | sort" }),
                )
                .text();
            assert!(
                variables.iter().all(|name| command.contains(name)),
                "{variables:?} {command}"
            );
        }
    });
}

#[test]
fn with_a_context_everything_of_it_ends() {
    everywhere(|place| {
        needs!(place, "python");
        let marks = [Mark::new(), Mark::new(), Mark::new()];
        let made = place.python("a");
        // One that left the session, one whose parent has gone, one that holds the socket.
        let code = format!(
            "import subprocess, os, time\n\
             subprocess.Popen(['setsid', 'sleep', '{}'])\n\
             subprocess.run(['sh', '-c', 'setsid sleep {} > /dev/null 2>&1 & exit'])\n\
             import ctypes\n\
             if ctypes.CDLL(None).fork() == 0:\n  os.execvp('sleep', ['sleep', '{}'])",
            marks[0], marks[1], marks[2]
        );
        place.run("a", &code).expect("completed", "kept");
        for mark in &marks {
            mark.wait_for(1);
        }
        place.remove("a");
        assert!(!is_alive(pid_of(&made)));
        for mark in &marks {
            mark.wait_gone(PATIENCE);
        }
        // And when it dies by itself.
        place.python("b");
        let mark = Mark::new();
        let code = format!(
            "import subprocess, os; subprocess.Popen(['setsid', 'sleep', '{mark}']); os._exit(0)"
        );
        place.run("b", &code).expect("died", "lost");
        mark.wait_gone(PATIENCE);
    });
}

#[test]
fn two_contexts_at_once_share_nothing() {
    everywhere(|place| {
        needs!(place, "python");
        in_parallel(4, |number| {
            let id = format!("c{number}");
            place.python(&id);
            place.run(&id, &format!("x = {number}"));
            for round in 0..10 {
                let ran = place.run(&id, &format!("print(x, {round})\nx"));
                assert_eq!(ran.text("stdout"), format!("{number} {round}\n"));
                assert_eq!(ran.result(), number.to_string());
            }
        });
    });
}
