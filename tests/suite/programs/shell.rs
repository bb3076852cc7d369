//! Shells, terminals, and the small programs that scripts are made of.

use serde_json::json;

use super::{find, place, put, run};
use crate::fixture::{PATIENCE, wait_until};
use crate::skip;

#[test]
fn standard_streams_can_be_opened_by_name() {
    place!(server, sandbox);
    let script = "cat /dev/stdin; echo on stdout > /dev/stdout; echo on stderr > /dev/stderr; \
                  echo twice | tee /dev/stderr; echo fd | cat /dev/fd/0; : > /dev/null; head -c 2 /dev/zero | od -An -c; \
                  head -c 4 /dev/urandom | wc -c; echo lost 2>/dev/null > /dev/full || echo full";
    let outcome = sandbox.exec(&json!({ "cmd": script, "stdin": "input\n" }));
    assert_eq!(
        outcome.stdout,
        "input\non stdout\ntwice\nfd\n  \\0  \\0\n4\nfull\n"
    );
    assert_eq!(outcome.stderr, "on stderr\ntwice\n");
}

#[test]
fn bash_has_substitution_here_documents_and_jobs() {
    place!(server, sandbox, "bash");
    let script = "
diff <(printf 'a\\nb\\n') <(printf 'a\\nc\\n') | tail -1
tee >(tr a-z A-Z) <<< 'here string' > /dev/null | cat
cat <<END
home is $HOME
END
set -m
sleep 1000 & sleep 1000 &
jobs | wc -l
kill %1; wait %1; echo \"status $?\"
kill -STOP %2; until jobs -s | grep -q Stopped; do :; done; echo stopped
bg %2 > /dev/null; kill -KILL %2; wait %2; echo \"status $?\"
trap 'echo trapped' USR1; kill -USR1 $$
coproc cat; echo through >&\"${COPROC[1]}\"; read -r line <&\"${COPROC[0]}\"; echo \"$line\"
";
    let home = sandbox.home.display();
    assert_eq!(
        run(&sandbox, &json!({ "cmd": ["bash", "-c", script] })),
        format!(
            "> c\nHERE STRING\nhome is {home}\n2\nstatus 143\nstopped\nstatus 137\ntrapped\nthrough\n"
        )
    );
}

#[test]
fn temporary_files_go_to_the_home() {
    place!(server, sandbox);
    let home = sandbox.home.to_str().unwrap();
    for program in ["mktemp", "mktemp -d"] {
        let seen = sandbox.sh(program);
        assert!(seen.starts_with(&format!("{home}/.tmp/")), "{seen}");
    }
    // More than sort keeps in memory that small.
    assert_eq!(
        sandbox.sh("seq 200000 | sort -S 100k -n -r | head -1"),
        "200000\n"
    );
}

#[test]
fn archives_are_packed_and_unpacked() {
    place!(server, sandbox, "tar", "gzip");
    let script = "mkdir -p d/e && echo content > d/e/f && ln -s f d/e/link && chmod 750 d/e/f && \
                  tar czf d.tgz d && mkdir out && tar xzf d.tgz -C out && cat out/d/e/link && stat -c %a out/d/e/f";
    assert_eq!(sandbox.sh(script), "content\n750\n");
    // An archive of somebody else's files: owners cannot be restored, so they are not.
    if find(&sandbox, "zip").is_err() || find(&sandbox, "unzip").is_err() {
        skip!("zip and unzip are not installed");
    }
    assert_eq!(
        sandbox
            .sh("zip -qr d.zip d && mkdir zipped && unzip -q d.zip -d zipped && cat zipped/d/e/f"),
        "content\n"
    );
}

#[test]
fn busybox_runs_scripts() {
    place!(server, sandbox, "busybox");
    let url = format!("http://{}/health", server.address);
    put(
        &sandbox,
        "script",
        "#!/bin/busybox sh\nset -e\nmkdir -p a/b\necho 3 > a/b/c\nawk '{ print $1 * 2 }' a/b/c\n\
         find a -type f | sed s/b/x/\nwget -q -O - \"$1\" | cut -c 1-14\n",
    );
    sandbox.sh("chmod +x script");
    let program = sandbox.sh("readlink -f $(command -v busybox)");
    let seen = run(
        &sandbox,
        &json!({ "cmd": [program.trim(), "sh", "./script", url] }),
    );
    assert_eq!(seen, "6\na/x/c\n{\"status\":\"ok\"\n");
}

#[test]
fn curl_reaches_a_server_of_the_machine() {
    place!(server, sandbox, "curl");
    let url = format!("http://{}/health", server.address);
    let seen = run(
        &sandbox,
        &json!({ "cmd": ["curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", url] }),
    );
    assert_eq!(seen, "200");
}

#[test]
fn a_terminal_can_be_had() {
    place!(server, sandbox, "script");
    let seen = sandbox.sh(
        "script -qec 'stty rows 20 cols 60; stty size; tty; echo on the terminal > /dev/tty' /dev/null",
    );
    let lines: Vec<_> = seen.split("\r\n").collect();
    assert_eq!(lines[0], "20 60", "{seen:?}");
    assert!(lines[1].starts_with("/dev/pts/"), "{seen:?}");
    assert_eq!(lines[2], "on the terminal", "{seen:?}");
}

#[test]
fn tmux_sessions_outlive_the_command_that_began_them() {
    place!(server, sandbox, "tmux");
    // tmux does not know TMPDIR, and /tmp is closed.
    sandbox.sh("export TMUX_TMPDIR=$TMPDIR; tmux -u new-session -d -s work; tmux send-keys -t work 'echo $((6 * 7)) > answer' Enter");
    wait_until("the session answers", PATIENCE, || {
        std::fs::read_to_string(sandbox.home.join("answer")).is_ok_and(|text| text == "42\n")
    });
    let seen =
        sandbox.sh("export TMUX_TMPDIR=$TMPDIR; tmux list-sessions -F '#S'; tmux kill-server");
    assert_eq!(seen, "work\n");
}

#[test]
fn commands_of_a_sandbox_see_and_signal_each_other() {
    place!(server, sandbox, "ps", "pkill");
    let neighbour = server.sandbox();
    let first = sandbox.spawn(&json!({ "cmd": ["sleep", "7654321"] }));
    let second = sandbox.spawn(&json!({ "cmd": ["sleep", "7654322"] }));
    neighbour.spawn(&json!({ "cmd": ["sleep", "7654321"] }));
    let mine = sandbox.sh("ps -u $(id -u) -o pid=,args= | grep '[s]leep' | sort");
    assert_eq!(
        mine.split_whitespace().collect::<Vec<_>>(),
        [
            first["pid"].to_string().as_str(),
            "sleep",
            "7654321",
            second["pid"].to_string().as_str(),
            "sleep",
            "7654322",
        ]
    );
    sandbox.sh("pkill -u $(id -u) -f 'sleep 765432[2]'");
    let wait = |id: &serde_json::Value| {
        let route = format!("processes/{}/wait?timeout=20", id.as_str().unwrap());
        sandbox.get(&route).json()
    };
    assert_eq!(wait(&second["id"])["signal"], 15);
    sandbox.sh(&format!("kill -KILL {}", first["pid"]));
    assert_eq!(wait(&first["id"])["signal"], 9);
    assert_eq!(neighbour.processes().len(), 1, "nothing next door was hit");
}

#[test]
fn limits_can_be_lowered_and_priorities_too() {
    place!(server, sandbox);
    assert_eq!(
        sandbox.sh(
            "ulimit -n 100; ulimit -n; ulimit -c; echo $(($(nice -n 5 nice) - $(nice))); timeout 0.1 sleep 100; echo $?"
        ),
        "100\n0\n5\n124\n"
    );
}
