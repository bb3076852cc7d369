//! The server where it lives: PID 1 of a container.
//!
//! Every test runs twice, in a plain container and in a `job` container, whose user ids are
//! remapped so that it sees uids 0..65535 only and holds no capability of the machine. The image
//! holds busybox and the program, nothing else, and the server starts as it does in a job: by
//! `exec` from a shell, without arguments.
//!
//! The tests of `bootstrap.sh` have further images: this machine's system directories on an empty root,
//! and one with a shell and little else.
//!
//! `scripts/docker-test` starts the engines, makes the image and runs these tests; elsewhere they
//! are ignored. They connect by entering the container's network namespace.

use std::fs;
use std::net::TcpListener;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::bootstrap::SCRIPT;
use crate::fixture::{
    BINARY, Bucket, Network, OUTSIDE, PATIENCE, Sandbox, Server, TempDir, assert_error, join_hosts,
    serve_pages, sha256, wait_until,
};
use crate::roots::Template;
use crate::walls::probe::{Plan, command, outcomes};

/// A container engine, by the address of its socket.
struct Engine {
    address: String,
    /// What a job's containers are started with besides.
    options: &'static [&'static str],
}

impl Engine {
    fn plain() -> Self {
        Self::of("SBX_TEST_DOCKER_PLAIN", &[])
    }

    fn job() -> Self {
        Self::of("SBX_TEST_DOCKER_JOB", &["--cap-drop", "NET_RAW"])
    }

    fn of(variable: &str, options: &'static [&'static str]) -> Self {
        let address = std::env::var(variable)
            .unwrap_or_else(|_| panic!("{variable} is not set: run scripts/docker-test"));
        Self { address, options }
    }

    /// Runs one command of the engine's client to its end.
    fn docker(&self, words: &[&str]) -> Output {
        Command::new("docker")
            .arg("-H")
            .arg(&self.address)
            .args(words)
            .output()
            .unwrap()
    }

    /// The same, where it must succeed; returns what it printed.
    #[track_caller]
    fn ask(&self, words: &[&str]) -> String {
        let output = self.docker(words);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "docker {words:?}: {errors}");
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }

    /// Starts a server with these options for the container and these variables.
    fn start(&self, options: &[&str], variables: &[(&str, &str)]) -> Container<'_> {
        let options = [&["--network", "none"], options].concat();
        self.start_in(IMAGE, "exec /sbx-server", &options, variables)
    }

    /// The same in any image and by any script.
    fn start_in(
        &self,
        image: &str,
        script: &str,
        options: &[&str],
        variables: &[(&str, &str)],
    ) -> Container<'_> {
        // From here on, so that it is removed even if the server does not start.
        let place = Place {
            name: new_name(),
            engine: self,
        };
        let name = &place.name;
        let mut words = vec!["docker", "-H", &self.address, "run", "--name", name];
        words.extend(self.options);
        words.extend(options);
        // Without a value: docker takes it from its own environment, which the builder sets.
        words.extend(["--env", "SBX_PORT", "--env", "SBX_TOKEN"]);
        words.extend(variables.iter().flat_map(|(name, _)| ["--env", name]));
        words.extend([image, "/bin/sh", "-c", script]);

        let mut builder = Server::builder()
            .wrapped_in(&words)
            .env("SBX_PORT", "49983");
        for (name, value) in variables {
            builder = builder.env(name, value);
        }
        let mut server = builder.start();
        assert_eq!(
            server.address.to_string(),
            "0.0.0.0:49983",
            "a job is reached on all interfaces"
        );
        server.address = "127.0.0.1:49983".parse().unwrap();
        let pid = self.ask(&["inspect", "--format", "{{.State.Pid}}", name]);
        server.network = Some(format!("/proc/{pid}/ns/net").into());
        Container { server, place }
    }

    /// Runs a program of the image in a container of its own, to its end.
    fn run(&self, variables: &[&str], command: &[&str]) -> Output {
        let mut words = vec!["run", "--rm", "--network", "none"];
        words.extend(self.options);
        words.extend(variables.iter().flat_map(|variable| ["--env", variable]));
        words.push(IMAGE);
        words.extend(command);
        self.docker(&words)
    }
}

/// The image that `scripts/docker-test` makes.
const IMAGE: &str = "sbx-test:small";

/// A name that no other container of any run has.
fn new_name() -> String {
    let uuid = std::fs::read_to_string("/proc/sys/kernel/random/uuid").unwrap();
    format!("sbx-test-{}", uuid.trim())
}

/// A container's name; the container is removed with the value.
struct Place<'engine> {
    name: String,
    engine: &'engine Engine,
}

impl Place<'_> {
    fn exit_code(&self) -> String {
        self.engine
            .ask(&["inspect", "--format", "{{.State.ExitCode}}", &self.name])
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.engine.docker(&["rm", "--force", &self.name]);
    }
}

/// A container with a server in it.
struct Container<'engine> {
    /// `docker run`, which ends with the container and with its exit code.
    server: Server,
    place: Place<'engine>,
}

impl Container<'_> {
    /// Runs a shell command that must succeed inside; returns what it printed.
    #[track_caller]
    fn shell(&self, command: &str) -> String {
        let outcome = self.server.exec(&json!({"cmd": command}));
        assert_eq!(outcome.code(), Some(0), "{command}: {outcome:?}");
        outcome.stdout
    }

    /// Stops the container as an operator would. Returns how long that took and the exit code.
    fn stop(&self) -> (Duration, String) {
        let start = Instant::now();
        self.place
            .engine
            .ask(&["stop", "--time", "30", &self.place.name]);
        (start.elapsed(), self.place.exit_code())
    }
}

/// Makes of each function two tests, one an engine.
macro_rules! in_both {
    ($($name:ident),* $(,)?) => {
        mod plain {
            $(#[test]
            #[ignore = "needs a container engine: scripts/docker-test"]
            fn $name() {
                super::$name(&super::Engine::plain());
            })*
        }
        mod job {
            $(#[test]
            #[ignore = "needs a container engine: scripts/docker-test"]
            fn $name() {
                super::$name(&super::Engine::job());
            })*
        }
    };
}

in_both!(
    output_is_live_and_the_server_is_pid_1,
    the_outside_is_what_it_should_be,
    environments_of_commands_hold_nothing_of_the_server,
    memory_and_environment_of_the_server_are_out_of_reach,
    files_come_back_as_they_were_sent,
    a_file_of_the_image_can_be_replaced,
    a_moved_directory_is_never_half_moved,
    processes_take_input_and_signals,
    orphans_are_reaped,
    a_timeout_leaves_nothing_of_the_tree,
    a_fork_bomb_ends_with_its_timeout,
    the_hog_dies_and_not_the_server,
    a_full_process_table_is_an_error_that_passes,
    stop_is_prompt_and_clean,
    stop_kills_what_ignores_the_first_signal,
    an_interrupt_is_a_clean_stop,
    an_idle_server_exits_with_zero,
    a_bad_value_is_exit_2_with_a_sentence,
    health_answers_inside_an_image_without_curl,
    a_host_holds_sandboxes_and_is_stopped_cleanly,
    a_list_is_all_that_a_sandbox_reaches,
    namespaces_are_refused_without_the_rights_and_made_with_them,
    roots_are_refused_without_the_rights_and_made_with_them_on_a_volume,
    a_host_where_landlock_is_hidden_is_refused_or_says_so,
    bootstrap_works_in_an_image_of_busybox_alone,
    bootstrap_works_in_debian,
    bootstrap_works_with_python_alone,
    bootstrap_works_from_a_mount_where_nothing_can_download,
    bootstrap_says_that_nothing_can_download,
    bootstrap_works_on_a_read_only_root_with_one_place,
    bootstrap_names_the_places_of_a_read_only_root,
);

fn output_is_live_and_the_server_is_pid_1(engine: &Engine) {
    let container = engine.start(&[], &[]);
    let mut events = container.server.exec_stream(&json!({
        "cmd": "echo ready; until [ -e /tmp/go ]; do sleep 0.02; done; cat /proc/1/comm"
    }));
    assert_eq!(events.next_output().unwrap()["event"], "start");
    // The command goes on only after its first line was seen here.
    assert_eq!(events.next_output().unwrap()["data"], "ready\n");
    assert_eq!(
        container
            .server
            .put("/v1/files/write?path=/tmp/go", b"")
            .status,
        200
    );
    assert_eq!(events.next_output().unwrap()["data"], "sbx-server\n");
    let exit = events.next_output().unwrap();
    assert_eq!(
        (&exit["event"], &exit["exit_code"]),
        (&json!("exit"), &json!(0))
    );
}

/// Without this the other tests might prove nothing about a job.
fn the_outside_is_what_it_should_be(engine: &Engine) {
    let container = engine.start(&[], &[]);
    let is_job = !engine.options.is_empty();
    let map = container.shell("cat /proc/self/uid_map");
    let count = map.split_whitespace().nth(2).unwrap().to_owned();
    assert_eq!(count == "65536", is_job, "{map}");
    let capabilities = container.shell("grep CapEff /proc/self/status");
    let capabilities = u64::from_str_radix(capabilities.split_whitespace().nth(1).unwrap(), 16);
    let has = |bit: u32| capabilities.as_ref().unwrap() & (1 << bit) != 0;
    assert!(!has(21), "CAP_SYS_ADMIN");
    assert!(!has(19), "CAP_SYS_PTRACE");
    assert_eq!(has(13), !is_job, "CAP_NET_RAW");
    assert_eq!(container.shell("id -u"), "0\n");
}

fn environments_of_commands_hold_nothing_of_the_server(engine: &Engine) {
    let container = engine.start(&[], &[("SBX_LOG", "debug"), ("GREETING", "hello")]);
    let environment = container.shell("env");
    assert!(environment.contains("GREETING=hello"), "{environment}");
    assert!(!environment.contains("SBX_"), "{environment}");
}

fn memory_and_environment_of_the_server_are_out_of_reach(engine: &Engine) {
    let container = engine.start(&[], &[]);
    let canary = json!({"cmd": ["sleep", "1000"], "env": {"CANARY": "here"}});
    container.server.spawn(&canary);
    let environments =
        container.shell("cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'; true");
    // Root inside sees what other processes were given, but not what the server was.
    assert!(environments.contains("CANARY=here"), "{environments}");
    assert!(!environments.contains("SBX_TOKEN"), "{environments}");

    let opened = container.shell(
        "for p in /proc/[0-9]*; do
            [ \"$(cat $p/comm)\" = sbx-server ] || continue
            echo seen
            for file in environ mem maps; do
                ( exec 3<$p/$file && dd bs=1 count=1 <&3 >/dev/null ) 2>/dev/null && echo $p/$file
            done
        done; true",
    );
    assert!(
        opened.contains("seen"),
        "no process of the server was found"
    );
    assert!(!opened.contains("/proc"), "{opened}");
}

fn files_come_back_as_they_were_sent(engine: &Engine) {
    let container = engine.start(&[], &[]);
    let server = &container.server;
    let bytes: Vec<u8> = (0..8_u32 << 20)
        .map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8)
        .collect();
    assert_eq!(
        server
            .put("/v1/files/write?path=/root/a/b/big&mode=640", &bytes)
            .status,
        200
    );
    assert!(server.get("/v1/files/read?path=/root/a/b/big").body == bytes);
    let length = bytes.len().to_string();
    assert_eq!(
        container.shell("stat -c %s:%a:%u /root/a/b/big").trim(),
        format!("{length}:640:0")
    );
    let entries = server.get("/v1/files/list?path=/root/a").json();
    assert_eq!(entries["entries"][0]["name"], "b");
    assert_eq!(server.delete("/v1/files/delete?path=/root/a").status, 409);
    assert_eq!(
        server
            .delete("/v1/files/delete?path=/root/a&recursive=1")
            .status,
        200
    );
    assert_eq!(server.get("/v1/files/stat?path=/root/a").status, 404);
}

/// Files of the image lie in a lower layer of the container's file system, which is read only: what
/// replaces them is another file.
fn a_file_of_the_image_can_be_replaced(engine: &Engine) {
    let container = engine.start(&[], &[]);
    let before = container.shell("stat -c %a:%u /etc/passwd");
    let text = b"root:x:0:0::/root:/bin/sh\nnew:x:7:7::/:/bin/sh\n";
    assert_eq!(
        container
            .server
            .put("/v1/files/write?path=/etc/passwd", text)
            .status,
        200
    );
    assert_eq!(container.shell("cat /etc/passwd").as_bytes(), text);
    assert_eq!(container.shell("stat -c %a:%u /etc/passwd"), before);
    assert_eq!(
        container.shell("ls -A /etc | grep -c passwd"),
        "1\n",
        "no litter"
    );
}

/// A directory of a lower layer may not be renamed on such a file system.
fn a_moved_directory_is_never_half_moved(engine: &Engine) {
    let container = engine.start(&[], &[]);
    let tree = container.shell("cd /etc; find . | sort");
    let reply = container
        .server
        .request("POST", "/v1/files/move?from=/etc&to=/moved", b"");
    let (there, gone) = match reply.status {
        200 => ("/moved", "/etc"),
        409 => {
            assert_eq!(reply.code(), "cross_device");
            ("/etc", "/moved")
        }
        _ => panic!("{} {}", reply.status, reply.text()),
    };
    assert_eq!(container.shell(&format!("cd {there}; find . | sort")), tree);
    container.shell(&format!("[ ! -e {gone} ]"));
}

fn processes_take_input_and_signals(engine: &Engine) {
    let container = engine.start(&[], &[]);
    let server = &container.server;
    let cat = server.spawn(&json!({"cmd": ["cat"]}));
    let cat = cat["id"].as_str().unwrap();
    let target = format!("/v1/processes/{cat}/stdin?eof=1");
    assert_eq!(
        server.request("POST", &target, "käse\n".as_bytes()).status,
        200
    );
    let logs: Vec<_> = server
        .stream("GET", &format!("/v1/processes/{cat}/logs?follow=1"), b"")
        .collect();
    assert_eq!(logs[0]["data"], "käse\n");
    assert_eq!(logs.last().unwrap()["exit_code"], 0);

    let sleeper = server.spawn(&json!({"cmd": ["sleep", "1000"]}));
    let id = sleeper["id"].as_str().unwrap();
    let killed = server.post(
        &format!("/v1/processes/{id}/kill"),
        &json!({"signal": "TERM"}),
    );
    assert_eq!(killed.json()["signaled"], true, "{}", killed.text());
    let ended = server
        .get(&format!("/v1/processes/{id}/wait?timeout=20"))
        .json();
    assert_eq!(
        (&ended["running"], &ended["signal"]),
        (&json!(false), &json!(15))
    );
    assert_eq!(
        server.delete(&format!("/v1/processes/{id}")).json()["killed"],
        false
    );
}

fn orphans_are_reaped(engine: &Engine) {
    let container = engine.start(&[], &[]);
    // An orphan that lives: its new parent is the server.
    let parent = container.shell(
        "p=$(sh -c 'sleep 1000 >/dev/null 2>&1 & echo $!')
        cat /proc/$(sed -n 's/^PPid:.//p' /proc/$p/status)/comm",
    );
    assert_eq!(parent, "sbx-server\n");
    // Orphans that die, from a foreground command and from one in the background.
    let make = "i=0; while [ $i -lt 100 ]; do sh -c 'sleep 0.02 &'; i=$((i+1)); done";
    container.shell(make);
    let process = container.server.spawn(&json!({"cmd": make}));
    let wait = format!(
        "/v1/processes/{}/wait?timeout=20",
        process["id"].as_str().unwrap()
    );
    assert_eq!(container.server.get(&wait).json()["exit_code"], 0);
    wait_until("no orphan is left", PATIENCE, || {
        // States in the fourth field; the shell and its pipe are the only others.
        let states = container.shell("ps -o stat,comm | grep -E '^Z|sleep' || true");
        states.lines().count() == 1
    });
}

fn a_timeout_leaves_nothing_of_the_tree(engine: &Engine) {
    let container = engine.start(&[], &[]);
    let outcome = container.server.exec(&json!({
        "cmd": "setsid sleep 1111 & (setsid sh -c 'sleep 1111; true') & sleep 1111",
        "timeout": 0.5,
    }));
    assert_eq!(outcome.exit["timed_out"], true);
    assert_eq!(outcome.exit["reason"], "timeout");
    // They were killed before the answer; each ends when it next gets a processor.
    wait_until("nothing of it is left", PATIENCE, || {
        container
            .shell("ps | grep '[s]leep 1111' || true")
            .is_empty()
    });
}

fn a_fork_bomb_ends_with_its_timeout(engine: &Engine) {
    let container = engine.start(&["--pids-limit", "150"], &[]);
    let outcome = container.server.exec(&json!({
        // The shell forks once, before the table is full: a fork that fails would end it, and the command.
        "cmd": "bomb() { bomb | bomb & }; bomb & exec sleep 1000",
        "timeout": 1,
    }));
    assert_eq!(outcome.exit["timed_out"], true);
    wait_until("the container is usable and empty", PATIENCE, || {
        let reply = container
            .server
            .post("/v1/exec", &json!({"cmd": "ps | grep -c '[b]omb'; true"}));
        reply.status == 200 && reply.text().contains(r#""data":"0\n""#)
    });
}

fn the_hog_dies_and_not_the_server(engine: &Engine) {
    let container = engine.start(&["--memory", "64m"], &[]);
    let hog = json!({"cmd": ["dd", "if=/dev/zero", "of=/dev/null", "bs=512M", "count=1"]});
    for _ in 0..3 {
        let outcome = container.server.exec(&hog);
        assert_eq!(outcome.exit["signal"], 9, "{outcome:?}");
        assert_eq!(outcome.exit["reason"], "oom", "{outcome:?}");
    }
    assert_eq!(container.shell("echo well"), "well\n");
    let killed = container.server.exec(&json!({"cmd": "kill -9 $$"}));
    assert_eq!(
        killed.exit["reason"], "signaled",
        "not every SIGKILL is the kernel's"
    );
}

fn a_full_process_table_is_an_error_that_passes(engine: &Engine) {
    let container = engine.start(&["--pids-limit", "40"], &[]);
    let server = &container.server;
    // With a token: a connection without one would make room for the next.
    let mut first = server.connect();
    assert_eq!(first.request("GET", "/v1/processes", &[], b"").status, 200);

    let ask = |_| {
        let mut connection = server.connect();
        let reply = connection.request("GET", "/v1/processes", &[], b"");
        (connection, reply)
    };
    let (others, replies): (Vec<_>, Vec<_>) = (0..80).map(ask).unzip();
    let count = |status| {
        replies
            .iter()
            .filter(|reply| reply.status == status)
            .count()
    };
    assert!(
        count(200) > 10 && count(503) > 10,
        "{} served, {} refused",
        count(200),
        count(503)
    );
    assert_eq!(count(200) + count(503), replies.len());

    let command = br#"{"cmd": ["true"]}"#;
    let reply = first.request("POST", "/v1/exec", &[], command);
    assert_eq!((reply.status, reply.code().as_str()), (400, "no_resources"));

    drop(others);
    wait_until("commands start again", PATIENCE, || {
        first.request("POST", "/v1/exec", &[], command).status == 200
    });
    assert_eq!(server.get("/health").status, 200);
}

fn stop_is_prompt_and_clean(engine: &Engine) {
    let mut container = engine.start(&[], &[]);
    container
        .server
        .spawn(&json!({"cmd": "sleep 1000 & setsid sleep 1000 & sleep 1000"}));
    let mut stream = container
        .server
        .exec_stream(&json!({"cmd": "echo on; sleep 1000"}));
    while stream.next().unwrap()["event"] != "stdout" {}
    let (duration, code) = container.stop();
    assert_eq!(code, "0", "{}", container.server.log());
    assert!(duration < Duration::from_secs(4), "{duration:?}");
    assert!(container.server.wait_for_exit(PATIENCE).success());
}

fn stop_kills_what_ignores_the_first_signal(engine: &Engine) {
    let container = engine.start(&[], &[]);
    let mut stream = container.server.exec_stream(&json!({
        "cmd": "trap '' TERM; echo deaf; while :; do sleep 1; done"
    }));
    while stream.next().unwrap()["event"] != "stdout" {}
    let (duration, code) = container.stop();
    assert_eq!(code, "0", "{}", container.server.log());
    let allowed = Duration::from_millis(4500)..Duration::from_secs(8);
    assert!(
        allowed.contains(&duration),
        "{duration:?}: 5 s of grace, then KILL"
    );
}

fn an_interrupt_is_a_clean_stop(engine: &Engine) {
    let mut container = engine.start(&[], &[]);
    container.server.spawn(&json!({"cmd": ["sleep", "1000"]}));
    engine.ask(&["kill", "--signal", "INT", &container.place.name]);
    assert!(container.server.wait_for_exit(PATIENCE).success());
    assert_eq!(container.place.exit_code(), "0");
}

fn an_idle_server_exits_with_zero(engine: &Engine) {
    let mut container = engine.start(&[], &[("SBX_IDLE_TIMEOUT", "1")]);
    assert!(container.server.wait_for_exit(PATIENCE).success());
}

fn a_bad_value_is_exit_2_with_a_sentence(engine: &Engine) {
    let output = engine.run(
        &["SBX_PORT=harbour", "SBX_TOKEN=secret"],
        &["/bin/sh", "-c", "exec /sbx-server"],
    );
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(
        text.contains("SBX_PORT") && text.contains("harbour"),
        "{text}"
    );
    assert!(!text.contains("secret"), "{text}");
}

fn health_answers_inside_an_image_without_curl(engine: &Engine) {
    let container = engine.start(&[], &[]);
    engine.ask(&["exec", &container.place.name, "/sbx-server", "health"]);
    let alone = engine.run(&[], &["/sbx-server", "health"]);
    assert_eq!(alone.status.code(), Some(1));
}

fn a_host_holds_sandboxes_and_is_stopped_cleanly(engine: &Engine) {
    let container = engine.start(&[], &[("SBX_HOST_MODE", "1"), ("SBX_CAPACITY", "3")]);
    let made = container
        .server
        .post("/v1/sandboxes", &json!({"count": 5}))
        .json();
    assert_eq!(made["rejected"], 2, "{made}");
    let made: Vec<_> = (0..3)
        .map(|index| Sandbox::of(&container.server, &made["sandboxes"][index]))
        .collect();
    for sandbox in &made {
        let expected = format!("{}\n/sbx/homes/{}\n", sandbox.uid, sandbox.id);
        assert_eq!(sandbox.sh("id -u; pwd"), expected);
        sandbox
            .spawn(&json!({"cmd": "trap '' TERM; setsid sleep 1000 & while :; do sleep 1; done"}));
    }
    assert_eq!(made[0].get("processes").json().as_array().unwrap().len(), 2);
    let target = format!("/v1/sandboxes/{}", made[0].id);
    assert_eq!(container.server.delete(&target).json()["deleted"], true);
    let (again, rejected) = {
        let answer = container.server.post("/v1/sandboxes", &json!({"count": 2}));
        let answer = answer.json();
        (
            answer["sandboxes"].as_array().unwrap().len(),
            answer["rejected"].clone(),
        )
    };
    assert_eq!((again, rejected), (1, json!(1)));
    let (duration, code) = container.stop();
    assert_eq!(code, "0", "{}", container.server.log());
    assert!(duration < Duration::from_secs(10), "{duration:?}");
}

/// With a host outside that waits at the port of the gate, too.
fn a_list_is_all_that_a_sandbox_reaches(engine: &Engine) {
    let suite = std::env::current_exe().unwrap();
    let mount = format!("{}:/bin/probe:ro", suite.display());
    let container = engine.start(&["-v", &mount], &[("SBX_HOST_MODE", "1")]);
    let place = &container.place;
    let pid = place
        .engine
        .ask(&["inspect", "--format", "{{.State.Pid}}", &place.name]);
    let outside = Network::with_ports(32_768, 60_999).unwrap();
    join_hosts(pid.parse().unwrap(), &outside).unwrap();
    let listen = |port: u16| outside.run(|| TcpListener::bind((OUTSIDE, port)).unwrap());
    let web = listen(0);
    let allowed = web.local_addr().unwrap();
    serve_pages(web, "the web");
    let network = json!({"mode": "allowlist", "allow": [allowed.to_string()]});
    let sandbox = container.server.sandbox_with(&json!({"network": network}));
    let page = sandbox.sh(&format!("wget -qO- http://{allowed}/"));
    assert!(page.starts_with("the web\n"), "{page}");
    let other = format!("{OUTSIDE}:{}", allowed.port() ^ 1);
    let refused = sandbox.exec(&json!({"cmd": format!("wget -qO- http://{other}/ 2>&1")}));
    assert!(refused.stdout.contains("403"), "{refused:?}");
    let gate = sandbox.sh("echo ${HTTP_PROXY##*:}");
    let at_gate = listen(gate.trim().parse().unwrap());
    let target = format!("{OUTSIDE}:{}", gate.trim());
    let mut plan = Plan::default();
    for steps in [
        &[][..],
        &["unspecified"],
        &["gate", "unspecified"],
        &["listen", "shutdown", "unspecified"],
        &["bind:0.0.0.0:0"],
        &["device:far"],
        &["interface:2"],
        &["source-route"],
        &["fast-open-connect"],
    ] {
        plan.add(&[&["leave", &target], steps].concat(), "EINVAL|EISCONN");
        plan.add(
            &[&["leave", &allowed.to_string()], steps].concat(),
            "EACCES|EISCONN",
        );
    }
    let own = format!("127.0.0.1:{}", gate.trim());
    plan.add(&["race-address", "400", &own, &target], "ok");
    for kind in ["2", "3", "5"] {
        plan.add(
            &["syscall", &libc::SYS_socket.to_string(), "2", kind, "0"],
            "ENETUNREACH",
        );
    }
    let outcome = sandbox.exec(&command("/bin/probe", &json!(plan.acts())));
    plan.compare(&outcomes(&outcome.stdout));
    at_gate.set_nonblocking(true).unwrap();
    assert!(at_gate.accept().is_err());

    // A program without proxy support: the server reads where it wants to go from its memory, even here.
    let network = json!({"mode": "allowlist", "allow": [allowed.to_string()], "transparent": true});
    let sandbox = container.server.sandbox_with(&json!({"network": network}));
    let untold = "unset HTTP_PROXY http_proxy;";
    let page = sandbox.sh(&format!("{untold} wget -qO- http://{allowed}/"));
    assert!(page.starts_with("the web\n"), "{page}");
    let refused = format!("{untold} wget -qO- http://{other}/ 2>&1");
    let refused = sandbox.exec(&json!({ "cmd": refused }));
    assert!(refused.stdout.contains("Permission denied"), "{refused:?}");
    let plan = |address: &str, expected| {
        let mut plan = Plan::default();
        plan.add(&["tcp-connect", address], expected);
        let outcome = sandbox.exec(&command("/bin/probe", &json!(plan.acts())));
        plan.compare(&outcomes(&outcome.stdout));
    };
    plan(&allowed.to_string(), "ok");
    plan(&other, "EACCES");
}

fn namespaces_are_refused_without_the_rights_and_made_with_them(engine: &Engine) {
    let asked = json!({"isolation": "namespaces", "network": "blocked"});
    let isolations = |container: &Container<'_>| {
        container.server.get("/health").json()["isolation"]["isolations"].clone()
    };
    let usual = engine.start(&[], &[("SBX_HOST_MODE", "1")]);
    assert_eq!(isolations(&usual), json!(["landlock"]));
    let reply = usual.server.post("/v1/sandboxes", &asked);
    assert_error(&reply, 400, "unavailable");
    assert_eq!(usual.server.get("/health").json()["sandboxes"], 0);
    drop(usual);

    let mut words = vec!["run", "--rm", "--network", "none"];
    words.extend(engine.options);
    words.extend(["--env", "SBX_TOKEN=secret", "--env", "SBX_HOST_MODE=1"]);
    words.extend(["--env", "SBX_ISOLATION=namespaces"]);
    words.extend([IMAGE, "/bin/sh", "-c", "exec /sbx-server"]);
    let output = engine.docker(&words);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("namespaces is unavailable"), "{text}");

    let capabilities = ["--cap-add", "SYS_ADMIN", "--cap-add", "NET_ADMIN"];
    let no_filter = [
        "--security-opt",
        "seccomp=unconfined",
        "--security-opt",
        "systempaths=unconfined",
    ];
    for (options, has_users) in [(&capabilities[..], false), (&no_filter, true)] {
        let container = engine.start(options, &[("SBX_HOST_MODE", "1")]);
        let made = container.server.post("/v1/sandboxes", &asked);
        assert_eq!(made.status, 200, "{options:?}: {}", made.text());
        let made = made.json();
        let layers = made["sandboxes"][0]["isolation"]["layers"].as_array();
        let users = json!("user_namespace");
        assert_eq!(layers.unwrap().contains(&users), has_users, "{made}");
        let sandbox = Sandbox::of(&container.server, &made["sandboxes"][0]);
        let shown = sandbox.sh("echo here > /tmp/file; cat /tmp/file; ls -d /proc/[0-9]* | wc -l");
        let (text, processes) = shown.trim().split_once('\n').unwrap();
        assert_eq!(text, "here");
        assert!(processes.trim().parse::<usize>().unwrap() <= 5, "{shown}");
        let target = format!("/v1/sandboxes/{}", sandbox.id);
        assert_eq!(container.server.delete(&target).json()["deleted"], true);
    }
}

/// In a job the rights are those of a user namespace, which may map no ids of the machine's file systems.
fn roots_are_refused_without_the_rights_and_made_with_them_on_a_volume(engine: &Engine) {
    let template = Template::new().expect("busybox is there");
    let volume = TempDir::new();
    let mounted = format!("{}:/template:ro", template.path("").display());
    let homes = format!("{}:/volume", volume.path().display());
    let rights = ["--cap-add", "SYS_ADMIN", "--cap-add", "NET_ADMIN"];
    let mounts = ["-v", &*mounted, "-v", &*homes];
    let variables = [("SBX_HOST_MODE", "1"), ("SBX_TEMPLATES", "box=/template")];
    let on_volume = [&variables[..], &[("SBX_HOMES_DIR", "/volume/homes")]].concat();
    let asked = json!({"root": "private"});
    let expect_refusal = |container: &Container<'_>| {
        let isolation = container.server.get("/health").json()["isolation"].clone();
        assert!(isolation["no_private_root"].is_string(), "{isolation}");
        let reply = container.server.post("/v1/sandboxes", &asked);
        assert_error(&reply, 400, "unavailable");
    };
    expect_refusal(&engine.start(&mounts, &variables));
    let options = [&mounts[..], &rights].concat();
    // Its homes are on the container's own root.
    expect_refusal(&engine.start(&options, &variables));
    let is_job = !engine.options.is_empty();
    if is_job {
        return;
    }
    let container = engine.start(&options, &on_volume);
    let made = container.server.post("/v1/sandboxes", &asked);
    assert_eq!(made.status, 200, "{}", made.text());
    let made = made.json();
    let sandbox = Sandbox::of(&container.server, &made["sandboxes"][0]);
    let shown = sandbox.sh("mkdir /workspace && id -u > /workspace/id && chown user /workspace/id && su user -c 'id -un'");
    assert_eq!(shown, "user\n");
    sandbox.spawn(&json!({"cmd": "exec busybox httpd -f -p 80 -h /workspace"}));
    let waited = sandbox.get("ports/80/wait?timeout=20");
    assert_eq!(waited.json()["listening"], true, "{}", waited.text());
    assert_eq!(sandbox.get("proxy/80/id").text(), "0\n");
    for closed in ["mount -t tmpfs x /tmp", "unshare -r true", "mknod /x c 1 3"] {
        assert_ne!(
            sandbox.exec(&json!({"cmd": closed})).code(),
            Some(0),
            "{closed}"
        );
    }
    let target = format!("/v1/sandboxes/{}", sandbox.id);
    for (change, body) in [("pause", json!({"keep": "files"})), ("resume", json!({}))] {
        let reply = container.server.post(&format!("{target}/{change}"), &body);
        assert_eq!(reply.status, 200, "{}", reply.text());
    }
    assert_eq!(
        sandbox.sh("stat -c %U:%u /workspace/id; cat /workspace/id"),
        "user:1000\n0\n"
    );
    assert_eq!(container.server.delete(&target).json()["deleted"], true);
    let left = std::fs::read_dir(volume.path().join("homes")).unwrap();
    let left = left.filter(|entry| entry.as_ref().unwrap().file_name() == *sandbox.id);
    assert_eq!(left.count(), 0);
}

fn a_host_where_landlock_is_hidden_is_refused_or_says_so(engine: &Engine) {
    let dir = TempDir::new();
    let profile = json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{
        "names": ["landlock_create_ruleset", "landlock_add_rule", "landlock_restrict_self"],
        "action": "SCMP_ACT_ERRNO", "errnoRet": libc::ENOSYS,
    }]});
    std::fs::write(dir.join("profile.json"), profile.to_string()).unwrap();
    let profile = format!("seccomp={}", dir.join("profile.json"));
    let hidden = ["--security-opt", &*profile];

    let mut words = vec!["run", "--rm", "--network", "none"];
    words.extend(engine.options);
    words.extend(hidden);
    words.extend(["--env", "SBX_TOKEN=secret", "--env", "SBX_HOST_MODE=1"]);
    words.extend([IMAGE, "/bin/sh", "-c", "exec /sbx-server"]);
    let output = engine.docker(&words);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("Landlock ABI 0"), "{text}");

    let insisted = [("SBX_HOST_MODE", "1"), ("SBX_ALLOW_UNCONFINED", "1")];
    let container = engine.start(&hidden, &insisted);
    let isolation = container.server.get("/health").json()["isolation"].clone();
    assert_eq!(isolation["landlock_abi"], 0);
    assert!(
        !isolation.to_string().contains("landlock_files"),
        "{isolation}"
    );
    assert!(isolation.to_string().contains("seccomp"), "{isolation}");
    let made = container.server.post("/v1/sandboxes", &json!({})).json();
    assert_eq!(
        made["sandboxes"][0]["isolation"]["layers"],
        isolation["layers"]
    );
    assert_eq!(isolation["postures"], json!(["open"]));
    let log = container.server.log();
    assert!(
        log.contains("landlock_abi=0") && !log.contains("landlock_files"),
        "{log}"
    );
    let sandbox = Sandbox::of(&container.server, &made["sandboxes"][0]);
    assert_eq!(sandbox.sh("id -u").trim(), sandbox.uid.to_string());
}

/// The image that scripts/package makes without an engine. It is loaded only into the engine that belongs to the tests.
#[test]
#[ignore = "needs a container engine: scripts/docker-test"]
fn the_image_of_a_release_holds_the_program_alone() {
    let engine = &Engine::job();
    let image = format!("sbx-server:{}", env!("CARGO_PKG_VERSION"));
    let mut words = vec!["run", "--rm", "--network", "none"];
    words.extend(engine.options);
    let shown = engine.ask(&[&words[..], &[&image, "--version"]].concat());
    let version = format!("sbx-server {}", env!("CARGO_PKG_VERSION"));
    assert!(shown.starts_with(&version), "{shown}");
    let place = Place {
        name: new_name(),
        engine,
    };
    let options = [
        "--detach",
        "--name",
        &place.name,
        "--env",
        "SBX_TOKEN=secret",
    ];
    words.retain(|word| *word != "--rm");
    engine.ask(&[&words[..], &options, &[&image]].concat());
    wait_until("it answers", PATIENCE, || {
        let asked = engine.docker(&["exec", &place.name, "/sbx-server", "health"]);
        asked.status.success()
    });
    let files = TempDir::new();
    let copied = files.join("NOTICES");
    engine.ask(&[
        "cp",
        &format!("{}:/usr/share/doc/NOTICES", place.name),
        &copied,
    ]);
    let notices = std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/NOTICES")).unwrap();
    assert!(std::fs::read(copied).unwrap() == notices);
    engine.ask(&["stop", "--time", "30", &place.name]);
    assert_eq!(place.exit_code(), "0");
}

/// What engines and programs for registries write is what sandboxes are made of: the server runs on the machine.
#[test]
#[ignore = "needs a container engine: scripts/docker-test"]
fn archives_of_images_and_containers_are_templates() {
    let engine = &Engine::plain();
    let place = Place {
        name: new_name(),
        engine,
    };
    // Layers that change one another.
    let change = "rm /bin/vi && mkdir -p /srv && echo made > /srv/made && echo 'www:x:33:33::/:/bin/sh' >> /etc/passwd";
    let run = ["run", "--network", "none", "--name", &place.name, IMAGE];
    engine.ask(&[&run[..], &["/bin/sh", "-c", change]].concat());
    let image = "sbx-test:changed";
    let mut commit = vec!["commit"];
    for setting in ["ENV KIND=image", "WORKDIR /srv", "USER www"] {
        commit.extend(["--change", setting]);
    }
    engine.ask(&[&commit[..], &[&place.name, image]].concat());
    let files = TempDir::new();
    let save = |name: &str, words: &[&str]| {
        let output = engine.docker(words);
        assert!(output.status.success(), "docker {words:?}");
        fs::write(files.path().join(name), output.stdout).unwrap();
    };
    save("saved", &["save", image]);
    save("exported", &["export", &place.name]);
    engine.ask(&["rmi", image]);
    let copied = Command::new("skopeo")
        .arg("copy")
        .arg(format!("docker-archive:{}", files.join("saved")))
        .arg(format!("oci-archive:{}", files.join("copied")))
        .output()
        .expect("skopeo is there");
    assert!(copied.status.success(), "{copied:?}");
    let server = Server::host().start();
    let shown = "id -un; pwd; echo $KIND; cat /srv/made; ls /bin/vi 2>&1";
    let gone = "ls: /bin/vi: No such file or directory\n";
    let of_image = format!("www\n/srv\nimage\nmade\n{gone}");
    for (name, expected) in [
        ("saved", &of_image),
        ("copied", &of_image),
        ("exported", &format!("root\n/root\n\nmade\n{gone}")),
    ] {
        let archive = fs::read(files.path().join(name)).unwrap();
        let reply = server.put(&format!("/v1/snapshots?name={name}"), &archive);
        assert_eq!(reply.status, 201, "{name}: {}", reply.text());
        let asked = json!({ "root": "private", "template": name });
        let made = server.post("/v1/sandboxes", &asked);
        assert_eq!(made.status, 200, "{name}: {}", made.text());
        let sandbox = Sandbox::of(&server, &made.json()["sandboxes"][0]);
        let outcome = sandbox.exec(&json!({ "cmd": shown }));
        assert_eq!(&outcome.stdout, expected, "{name}");
    }
}

// ------------------------------------------------------------------------------------- bootstrap

/// An image with nothing but a few directories; system directories are mounted into it.
const EMPTY_IMAGE: &str = "sbx-test:empty";

/// An image with dash, a few tools of the coreutils, and no downloader.
const BARE_IMAGE: &str = "sbx-test:bare";

/// Where a job downloads from: a bucket on the loopback of a network that containers share.
struct Site<'engine> {
    engine: &'engine Engine,
    /// A container that does nothing but hold the network.
    anchor: Place<'engine>,
    bucket: Bucket,
    digest: String,
    url: String,
}

impl<'engine> Site<'engine> {
    fn new(engine: &'engine Engine) -> Self {
        let anchor = Place {
            name: new_name(),
            engine,
        };
        let name = &anchor.name;
        let mut words = vec!["run", "--detach", "--name", name, "--network", "none"];
        words.extend(engine.options);
        words.extend([IMAGE, "/bin/sleep", "100000"]);
        engine.ask(&words);
        let pid = engine.ask(&["inspect", "--format", "{{.State.Pid}}", name]);
        let network = format!("/proc/{pid}/ns/net");
        let bucket = Bucket::start_in(network.as_ref());
        let program = fs::read(BINARY).unwrap();
        let digest = sha256(&program);
        let path = format!("/sbx-server-{digest}");
        bucket.put(&path, &program);
        Self {
            engine,
            anchor,
            url: bucket.url(&path),
            bucket,
            digest,
        }
    }

    fn network(&self) -> String {
        format!("container:{}", self.anchor.name)
    }

    /// Starts the server as a job does: the shell gets the whole script as an argument.
    fn start(&self, image: &str, options: &[&str], more: &[(&str, &str)]) -> Container<'engine> {
        let network = self.network();
        let options = [&["--network", &network], options].concat();
        let variables = [
            &[
                ("SBX_SERVER_URL", self.url.as_str()),
                ("SBX_SERVER_SHA256", self.digest.as_str()),
            ],
            more,
        ]
        .concat();
        let script = fs::read_to_string(SCRIPT).unwrap();
        self.engine.start_in(image, &script, &options, &variables)
    }

    /// Runs the script where it must end without a server; what it says.
    #[track_caller]
    fn is_refused(&self, image: &str, options: &[&str]) -> String {
        let network = self.network();
        let url = format!("SBX_SERVER_URL={}", self.url);
        let digest = format!("SBX_SERVER_SHA256={}", self.digest);
        let script = fs::read_to_string(SCRIPT).unwrap();
        let mut words = vec!["run", "--rm", "--network", &network];
        words.extend(self.engine.options);
        words.extend(options);
        words.extend([
            "--env", &url, "--env", &digest, image, "/bin/sh", "-c", &script,
        ]);
        let output = self.engine.docker(&words);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        said
    }
}

/// The options that give a container this machine's system directories.
fn system_directories() -> Vec<String> {
    let mut options = vec!["-v".to_owned(), "/usr:/usr:ro".to_owned()];
    for name in ["bin", "sbin", "lib", "lib32", "lib64"] {
        // A link into /usr is in the image already.
        if fs::symlink_metadata(format!("/{name}")).is_ok_and(|data| data.is_dir()) {
            options.extend(["-v".to_owned(), format!("/{name}:/{name}:ro")]);
        }
    }
    options
}

/// What every started server must show, whatever the image.
fn is_what_a_job_gets(container: &Container) {
    assert_eq!(container.shell("cat /proc/1/comm"), ".sbx-server\n");
    let environment = container.shell("env");
    assert!(!environment.contains("SBX_"), "{environment}");
    let (duration, code) = container.stop();
    assert_eq!(code, "0", "{}", container.server.log());
    assert!(duration < PATIENCE, "{duration:?}");
}

fn bootstrap_works_in_an_image_of_busybox_alone(engine: &Engine) {
    let site = Site::new(engine);
    let container = site.start(IMAGE, &[], &[]);
    assert_eq!(site.bucket.requests().len(), 1);
    is_what_a_job_gets(&container);
}

fn bootstrap_works_in_debian(engine: &Engine) {
    let site = Site::new(engine);
    let system = system_directories();
    let system: Vec<&str> = system.iter().map(String::as_str).collect();
    let container = site.start(EMPTY_IMAGE, &system, &[]);
    assert_eq!(site.bucket.requests().len(), 1);
    is_what_a_job_gets(&container);
}

fn bootstrap_works_with_python_alone(engine: &Engine) {
    let site = Site::new(engine);
    let system = system_directories();
    let mut options: Vec<&str> = system.iter().map(String::as_str).collect();
    // A device that is not executable hides the program.
    let hidden: Vec<String> = ["wget", "curl", "sha256sum", "openssl"]
        .iter()
        .filter(|name| fs::exists(format!("/usr/bin/{name}")).unwrap())
        .map(|name| format!("/dev/null:/usr/bin/{name}:ro"))
        .collect();
    options.extend(hidden.iter().flat_map(|mount| ["-v", mount]));
    let container = site.start(EMPTY_IMAGE, &options, &[]);
    assert_eq!(site.bucket.requests().len(), 1);
    is_what_a_job_gets(&container);
}

fn bootstrap_works_from_a_mount_where_nothing_can_download(engine: &Engine) {
    let site = Site::new(engine);
    let mount = format!("{BINARY}:/mount/sbx-server-{}:ro", site.digest);
    let variables = [("SBX_SERVER_MOUNT", "/mount")];
    let container = site.start(BARE_IMAGE, &["-v", &mount], &variables);
    assert_eq!(site.bucket.requests().len(), 0);
    assert_eq!(container.shell("cat /proc/1/comm"), ".sbx-server\n");
}

fn bootstrap_says_that_nothing_can_download(engine: &Engine) {
    let said = Site::new(engine).is_refused(BARE_IMAGE, &[]);
    assert!(said.contains("none of wget, curl and python3"), "{said}");
}

fn bootstrap_works_on_a_read_only_root_with_one_place(engine: &Engine) {
    let site = Site::new(engine);
    let options = ["--read-only", "--tmpfs", "/run:exec"];
    let container = site.start(IMAGE, &options, &[]);
    let said = container.server.log();
    assert!(
        said.contains("using /run; unusable: /tmp (read-only)"),
        "{said}"
    );
    assert_eq!(container.shell("ls -A /run"), ".sbx-server\n");
}

fn bootstrap_names_the_places_of_a_read_only_root(engine: &Engine) {
    let site = Site::new(engine);
    let said = site.is_refused(IMAGE, &["--read-only"]);
    assert!(said.contains("no place to run the server from"), "{said}");
    assert!(said.contains("/tmp (read-only)"), "{said}");
    assert!(said.contains("/dev/shm (noexec)"), "{said}");
    // A temporary file system of the engine's own making cannot execute either.
    let said = site.is_refused(IMAGE, &["--read-only", "--tmpfs", "/tmp"]);
    assert!(said.contains("/tmp (noexec)"), "{said}");
}
