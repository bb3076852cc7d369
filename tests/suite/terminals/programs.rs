//! What people run at a terminal, run by people: a shell with jobs, editors, pagers, monitors.

use std::path::Path;
use std::process::Command;

use serde_json::json;

use super::{Place, SYSTEM_PATH, Screen, everywhere};
use crate::fixture::{PATIENCE, may_look_into_processes, wait_until};
use crate::skip;

/// Ends the test if a program is not installed.
macro_rules! need {
    ($program:literal) => {
        if !is_installed($program) {
            skip!("{} is not installed", $program);
        }
    };
}

fn is_installed(program: &str) -> bool {
    let mut directories = SYSTEM_PATH.split(':');
    directories.any(|directory| Path::new(directory).join(program).exists())
}

/// Starts a program as in a terminal of this size, in an environment that is the same everywhere.
#[track_caller]
fn run<'a>(place: &'a Place<'_>, cmd: &str, rows: u16, columns: u16) -> Screen<'a> {
    place.open(&json!({
        "cmd": cmd,
        "pty": { "rows": rows, "cols": columns },
        "env": { "LC_ALL": "C.UTF-8", "PATH": SYSTEM_PATH },
    }))
}

#[test]
fn a_shell_controls_its_jobs() {
    everywhere(|place| {
        let shell = place.shell();
        shell.press("sleep 1000\n");
        shell.expect("sleep 1000\r\n");
        wait_for_foreground(&shell, "sleep");
        shell.press("\u{1a}");
        shell.expect("Stopped");
        shell.expect("$ ");
        shell.press("fg\n");
        shell.expect("sleep 1000\r\n");
        wait_for_foreground(&shell, "sleep");
        shell.press("\u{3}");
        shell.expect("^C");
        shell.expect("$ ");
        shell.press("echo status=$?\n");
        shell.expect("status=130\r\n");
        shell.expect("$ ");
        shell.press("exit 6\n");
        assert_eq!(shell.end()["exit_code"], 6);
    });
}

/// Waits until the program in the foreground of a process's terminal has this name. Before execve its signals
/// are the shell's.
#[track_caller]
fn wait_for_foreground(screen: &Screen<'_>, name: &str) {
    let pid = &screen.process["pid"];
    let foreground = || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let group = stat.rsplit(") ").next()?.split(' ').nth(5)?.to_owned();
        std::fs::read_to_string(format!("/proc/{group}/comm")).ok()
    };
    wait_until("the program is in the foreground", PATIENCE, || {
        foreground().is_some_and(|comm| comm.trim_end() == name)
    });
}

#[test]
fn signals_reach_the_foreground_and_not_the_shell() {
    everywhere(|place| {
        let shell = place.shell();
        // The terminal itself sends INT, QUIT and TSTP; the server sends the others.
        for (signal, number, said) in [
            ("INT", 2, "\r\n"),
            ("QUIT", 3, "Quit"),
            ("TERM", 15, "Terminated"),
            ("KILL", 9, "Killed"),
            ("USR1", 10, "User defined signal 1"),
        ] {
            shell.press("sleep 1000\n");
            shell.expect("sleep 1000\r\n");
            wait_for_foreground(&shell, "sleep");
            let answer = shell.interrupt(signal);
            assert_eq!(answer["signaled"], true);
            assert_eq!(answer["signal"], number);
            shell.expect(said);
            shell.expect("$ ");
            shell.press("echo status=$?\n");
            shell.expect(&format!("status={}\r\n", 128 + number));
            shell.expect("$ ");
        }
        // The main process itself is in the foreground of a shell without jobs.
        let screen = place.open(&json!({ "cmd": ["sleep", "1000"], "pty": true }));
        assert_eq!(screen.interrupt("INT")["signaled"], true);
        let ended = screen.end();
        assert_eq!(
            (&ended["signal"], &ended["reason"]),
            (&json!(2), &json!("killed"))
        );
        // Without a group the signal is for the process's own.
        let reply = shell.post("/kill", &json!({ "signal": "HUP" }));
        assert_eq!(reply.json()["signaled"], true);
        assert_eq!(shell.end()["signal"], 1);
    });
}

#[test]
fn a_resize_reaches_the_program() {
    everywhere(|place| {
        let script = "trap 'stty size' WINCH; echo ready; while :; do sleep 0.05; done";
        let screen = place.open(&json!({ "cmd": script, "pty": true }));
        screen.expect("ready\r\n");
        for (rows, columns) in [(50, 132), (1, 1), (4096, 4096), (24, 80)] {
            screen.resize(rows, columns);
            screen.expect(&format!("{rows} {columns}\r\n"));
        }
        place.request("DELETE", &screen.route(""), b"");
    });
}

#[test]
fn a_program_asks_at_the_terminal_whatever_its_descriptors_are() {
    everywhere(|place| {
        // As ssh, sudo and git ask for passwords.
        let script = "exec < /dev/null > /dev/null 2>&1; \
                      stty -echo < /dev/tty; printf 'Password: ' > /dev/tty; \
                      read word < /dev/tty; stty echo < /dev/tty; echo \"<$word>\" > /dev/tty";
        let screen = place.open(&json!({ "cmd": script, "pty": true }));
        screen.expect("Password: ");
        screen.press("secret\n");
        assert_eq!(screen.expect("<secret>\r\n"), "", "it was typed unseen");
        assert_eq!(screen.end()["exit_code"], 0);
    });
}

/// A passphrase is asked for at the terminal, although the program's input is another, and typed unseen. In a
/// sandbox ssh finds no name for its user, so openssl asks there.
#[test]
fn keys_ask_for_their_passphrases() {
    need!("ssh-keygen");
    need!("openssl");
    if !may_look_into_processes() {
        skip!("a sandbox's terminal cannot be found without CAP_SYS_PTRACE");
    }
    everywhere(|place| {
        let key = format!("key-{}", std::process::id());
        let (make, ask, prompt, shown) = match place {
            Place::Machine(_) => (
                format!("ssh -V; ssh-keygen -q -t ed25519 -N sesame -f {key}"),
                format!("ssh-keygen -y -f {key}"),
                "Enter passphrase",
                "ssh-ed25519 ",
            ),
            Place::Sandbox(_) => (
                format!("openssl genpkey -algorithm ed25519 -aes128 -pass pass:sesame -out {key}"),
                format!("openssl pkey -pubout -in {key}"),
                "pass phrase",
                "BEGIN PUBLIC KEY",
            ),
        };
        let script =
            format!("cd ${{TMPDIR:-/tmp}}; {make}; {ask} < /dev/null; echo status=$?; rm {key}*");
        let screen = run(place, &script, 24, 80);
        screen.expect(prompt);
        wait_for_no_echo(&screen);
        screen.press("sesame\n");
        let before = screen.expect(shown);
        assert!(!before.contains("sesame"), "{before}");
        screen.expect("status=0\r\n");
        assert_eq!(screen.end()["exit_code"], 0);
    });
}

/// Waits until what is typed is not shown. Programs ask first.
#[track_caller]
fn wait_for_no_echo(screen: &Screen<'_>) {
    let terminal = format!("/proc/{}/fd/1", screen.process["pid"]);
    let node = std::fs::read_link(terminal).unwrap();
    wait_until("the echo is off", PATIENCE, || {
        let output = Command::new("stty")
            .args(["-a", "-F"])
            .arg(&node)
            .output()
            .unwrap();
        String::from_utf8_lossy(&output.stdout).contains(" -echo ")
    });
}

#[test]
fn vim_edits_a_file() {
    need!("vim");
    everywhere(|place| {
        let name = format!("edited-{}.txt", std::process::id());
        let path = match place {
            Place::Machine(_) => format!("/tmp/{name}"),
            Place::Sandbox(_) => name,
        };
        let vim = run(place, &format!("exec vim -u NONE -N -n {path}"), 24, 80);
        vim.expect("\u{1b}[?1049h");
        vim.expect("~");
        vim.press("ihello from vim\u{1b}");
        vim.expect("hello from vim");
        vim.resize(30, 100);
        vim.press("yyp:wq\r");
        assert_eq!(vim.end()["exit_code"], 0);
        vim.expect("\u{1b}[?1049l");
        let reply = place.get(&format!("files/read?path={path}"));
        assert_eq!(reply.text(), "hello from vim\nhello from vim\n");
        place.request("DELETE", &format!("files/delete?path={path}"), b"");
    });
}

#[test]
fn top_draws_itself_anew_in_a_new_size() {
    need!("top");
    everywhere(|place| {
        let top = run(place, "exec top -d 1", 60, 200);
        top.expect("load average");
        top.expect("PID");
        top.resize(20, 70);
        top.expect("load average");
        top.press("q");
        assert_eq!(top.end()["exit_code"], 0);
    });
}

#[test]
fn htop_draws_itself_anew_in_a_new_size() {
    need!("htop");
    everywhere(|place| {
        let htop = run(place, "exec htop -C", 60, 200);
        htop.expect("\u{1b}[?1049h");
        htop.expect("Load average");
        htop.expect("PID");
        htop.resize(20, 100);
        htop.expect("Load average");
        htop.press("q");
        assert_eq!(htop.end()["exit_code"], 0);
        htop.expect("\u{1b}[?1049l");
    });
}

#[test]
fn less_pages_and_searches() {
    need!("less");
    everywhere(|place| {
        let less = run(place, "seq 1 5000 | less", 24, 80);
        less.expect("23\r\n");
        less.press(" ");
        less.expect("46\r\n");
        less.press("/^4321$\r");
        less.expect("4321");
        less.press("q");
        assert_eq!(less.end()["exit_code"], 0);
    });
}

#[test]
fn python_is_interactive_and_makes_terminals_of_its_own() {
    need!("python3");
    everywhere(|place| {
        let python = run(place, "exec python3 -q", 24, 80);
        python.expect(">>> ");
        python.press("print(6 * 7)\r");
        python.expect("42\r\n");
        python.expect(">>> ");
        python.press("import pty; pty.spawn(['stty', 'size'])\r");
        python.expect("0 0\r\n");
        python.expect(">>> ");
        python.press("import time; print('bu' + 'sy', flush=True); time.sleep(1000)\r");
        python.expect("busy\r\n");
        assert_eq!(python.interrupt("INT")["signaled"], true);
        python.expect("KeyboardInterrupt");
        python.expect(">>> ");
        python.press("raise SystemExit(3)\r");
        assert_eq!(python.end()["exit_code"], 3);
    });
}

#[test]
fn tmux_keeps_a_session() {
    need!("tmux");
    everywhere(|place| {
        let socket = format!("./tmux-{}", std::process::id());
        let cmd = format!("cd ${{TMPDIR:-/tmp}} && exec tmux -S {socket} -f /dev/null new 'sh'");
        let tmux = run(place, &cmd, 40, 120);
        tmux.expect("[0] 0:");
        tmux.press("echo in$((3*3))side\r");
        tmux.expect("in9side");
        // Keys that arrive at once count as a paste, in which tmux obeys no prefix.
        tmux.press("tmux split-window -h 'echo other$((5*5))pane; exec sh'\r");
        tmux.expect("other25pane");
        tmux.press("tmux kill-server\r");
        tmux.end();
        tmux.expect("exited]");
    });
}

#[test]
fn a_full_screen_is_drawn_again_and_again_without_a_byte_lost() {
    everywhere(|place| {
        // 200 columns and 60 rows, a hundred times, as fast as the server reads.
        let script = r#"BEGIN { for (frame = 0; frame < 100; frame++) { printf("\033[H");
            for (row = 0; row < 60; row++) { printf("\033[%d;1H", row + 1);
            for (column = 0; column < 200; column++) printf("%c", 33 + (frame + row + column) % 90) } } }"#;
        let body = json!({ "cmd": ["awk", script], "pty": { "rows": 60, "cols": 200 } });
        let screen = place.open(&body);
        assert_eq!(screen.end()["exit_code"], 0);
        screen.fetch();
        let mut expected = Vec::new();
        for frame in 0..100_u32 {
            expected.extend_from_slice(b"\x1b[H");
            for row in 0..60 {
                expected.extend_from_slice(format!("\x1b[{};1H", row + 1).as_bytes());
                expected.extend(
                    (0..200).map(|column| u8::try_from(33 + (frame + row + column) % 90).unwrap()),
                );
            }
        }
        assert!(screen.seen.borrow().1 == expected);
    });
}
