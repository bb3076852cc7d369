//! The promise of `bootstrap.sh`: in any image with a POSIX shell it becomes the server that was
//! asked for, or says in one line why not.
//!
//! Both shells of small images run it, dash and busybox's ash. An image that lacks a tool is a
//! `PATH` with links to the others; a local HTTP server plays the bucket. Most tests have a script
//! in place of the server, which shows what it was given. Images of containers are in `docker.rs`.

use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::json;

use crate::fixture::{
    BINARY, Bucket, PATIENCE, Server, TempDir, processes_with, sha256, wait_until,
};
use crate::skip;

/// The script under test.
pub const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/bootstrap.sh");

/// In place of the server: says who and with what it is.
const DOUBLE: &str = r#"#!/bin/sh
if [ "${1:-}" = --version ]; then exit 0; fi
echo "pid=$$"
for word; do echo "word=$word"; done
export -p
"#;

const SYSTEM_PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

/// The tools that every image has.
const ALWAYS: &[&str] = &["chmod", "cp", "mv", "rm", "uname"];

/// What must not be left of the script in the server's environment.
const OWN_VARIABLES: &[&str] = &[
    "SBX_SERVER_URL",
    "SBX_SERVER_URL_AARCH64",
    "SBX_SERVER_SHA256",
    "SBX_SERVER_SHA256_AARCH64",
    "SBX_SERVER_MOUNT",
    "SBX_SERVER_FILE",
    "SBX_DL_TOKEN",
    "SBX_ALLOW_UNVERIFIED_SERVER",
];

// ------------------------------------------------------------------------------------- helpers

/// Where a program of this machine is.
pub fn find(program: &str) -> Option<PathBuf> {
    // Not the PATH of whoever runs the tests: version managers put scripts there.
    ["/usr/bin", "/bin", "/usr/sbin", "/sbin", "/usr/local/bin"]
        .iter()
        .map(|directory| Path::new(directory).join(program))
        .find(|path| path.exists())
}

/// The shells that must be able to run the script, as the words before its name.
fn shells() -> Result<[Vec<PathBuf>; 2], &'static str> {
    let dash = find("dash").ok_or("dash is missing")?;
    let busybox = find("busybox").ok_or("busybox is missing")?;
    Ok([vec![dash], vec![busybox, "ash".into()]])
}

macro_rules! shells {
    () => {
        match shells() {
            Ok(shells) => shells,
            Err(reason) => skip!("{reason}"),
        }
    };
}

/// One run of the script, before it starts.
struct Run {
    shell: Vec<PathBuf>,
    /// A directory of programs, which is its PATH.
    tools: TempDir,
    /// Its TMPDIR, the first place that it tries.
    place: TempDir,
    variables: Vec<(String, String)>,
    /// Shell commands for a mount namespace of its own, run before it.
    before: Option<String>,
}

impl Run {
    /// In dash, with [`ALWAYS`] and these tools; `busybox:wget` is busybox's.
    #[track_caller]
    fn with(tools: &[&str]) -> Self {
        let run = Self {
            shell: vec![find("dash").expect("dash is missing (Debian: apt-get install dash)")],
            tools: TempDir::new(),
            place: TempDir::new(),
            variables: Vec::new(),
            before: None,
        };
        for tool in ALWAYS.iter().chain(tools) {
            let (name, program) = match tool.split_once(':') {
                Some((program, name)) => (name, program),
                None => (*tool, *tool),
            };
            let program =
                find(program).unwrap_or_else(|| panic!("{program} is missing on this machine"));
            symlink(program, run.tools.join(name)).unwrap();
        }
        // Between two attempts: nobody here needs the time.
        run.tool("sleep", "exit 0")
    }

    fn shell(mut self, shell: &[PathBuf]) -> Self {
        self.shell = shell.to_vec();
        self
    }

    fn set(mut self, name: &str, value: &str) -> Self {
        self.variables.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Puts a script of the test's own among the tools.
    fn tool(self, name: &str, text: &str) -> Self {
        let path = self.tools.path().join(name);
        let _ = fs::remove_file(&path);
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        self
    }

    /// Asks for what the bucket has under `/server`, the [`DOUBLE`] unless the test put another
    /// thing there.
    fn from(self, bucket: &Bucket) -> Self {
        let digest = sha256(DOUBLE.as_bytes());
        self.set("SBX_SERVER_URL", &bucket.url("/server"))
            .set("SBX_SERVER_SHA256", &digest)
    }

    fn before(mut self, commands: &str) -> Self {
        self.before = Some(commands.to_owned());
        self
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut words: Vec<&std::ffi::OsStr> = Vec::new();
        // The mounts hide what is in /tmp: the script and its tools move to /mnt.
        let commands = self.before.as_ref().map(|commands| {
            format!(
                "set -e; mount -t tmpfs tmpfs /mnt; mkdir /mnt/tools
                mount --bind \"$0\" /mnt/tools; cp {SCRIPT} /mnt/bootstrap.sh
                {commands}
                exec env PATH=/mnt/tools \"$@\""
            )
        });
        let tools = self.tools.path();
        if let Some(commands) = &commands {
            for word in ["unshare", "--mount", "/bin/sh", "-c", commands] {
                words.push(word.as_ref());
            }
            words.push(tools.as_ref());
        }
        words.extend(self.shell.iter().map(|word| word.as_os_str()));
        words.push(
            if commands.is_some() {
                "/mnt/bootstrap.sh"
            } else {
                SCRIPT
            }
            .as_ref(),
        );
        words.extend(arguments.iter().map(std::ffi::OsStr::new));
        let mut command = Command::new(words[0]);
        command
            .args(&words[1..])
            .env_clear()
            .env(
                "PATH",
                if commands.is_some() {
                    Path::new(SYSTEM_PATH)
                } else {
                    tools
                },
            )
            .env("TMPDIR", self.place.path())
            .envs(self.variables.iter().map(|(name, value)| (name, value)))
            // The last place that it tries; nothing can be made there.
            .current_dir("/proc")
            .stdin(Stdio::null());
        command
    }

    fn output(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Runs it to its end, which must be success; what the server printed.
    #[track_caller]
    fn succeeds(&self, arguments: &[&str]) -> String {
        let output = self.output(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {said}", output.status);
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs it to its end, which must be a refusal in one line that holds all of `parts`; nothing
    /// is left behind, and no server was started.
    #[track_caller]
    fn is_refused(&self, parts: &[&str]) -> String {
        let output = self.output(&[]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "", "{said}");
        assert_eq!(said.lines().count(), 1, "one line: {said}");
        assert!(said.starts_with("sbx-bootstrap: "), "{said}");
        for part in parts {
            assert!(said.contains(part), "{part:?} is not in: {said}");
        }
        let left: Vec<_> = fs::read_dir(self.place.path()).unwrap().collect();
        assert!(left.is_empty(), "{left:?} after: {said}");
        said
    }
}

/// A bucket with the double in it.
fn bucket() -> Bucket {
    let bucket = Bucket::start();
    bucket.put("/server", DOUBLE.as_bytes());
    bucket
}

/// What an ELF program of another machine begins with.
fn program_for(machine: u8) -> Vec<u8> {
    let mut bytes = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x03\0".to_vec();
    bytes.extend([machine, 0, 1, 0, 0, 0]);
    bytes.extend([0; 4096]);
    bytes
}

const X86_64: u8 = 62;
const AARCH64: u8 = 183;

// ---------------------------------------------------------------------------- becoming the server

#[test]
fn the_server_has_the_pid_the_arguments_and_the_environment_of_the_script() {
    for shell in shells!() {
        let bucket = bucket();
        // Names that a script is likely to use are the caller's all the same.
        let theirs = [
            "url", "file", "place", "tool", "arch", "LC_ALL", "sha256", "why",
        ];
        let mut run = Run::with(&["wget", "sha256sum"])
            .shell(&shell)
            .from(&bucket)
            .set("SBX_SERVER_MOUNT", "/nowhere")
            .set("SBX_SERVER_URL_AARCH64", "http://nowhere.invalid/")
            .set("SBX_ALLOW_UNVERIFIED_SERVER", "1")
            .set("SBX_DL_TOKEN", "token")
            .set("SBX_TOKEN", "the-server's");
        for name in theirs {
            run = run.set(name, "theirs");
        }
        let mut command = run.command(&["one", "two words", ""]);
        let child = command.stdout(Stdio::piped()).spawn().unwrap();
        let pid = child.id();
        let text = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
        assert!(text.contains(&format!("pid={pid}\n")), "{text}");
        assert!(
            text.contains("word=one\nword=two words\nword=\nexport"),
            "{text}"
        );
        assert!(text.contains("SBX_TOKEN="), "{text}");
        for name in theirs {
            assert!(text.contains(&format!("export {name}='theirs'")), "{text}");
        }
        for name in OWN_VARIABLES {
            assert!(!text.contains(&format!("{name}=")), "{name}: {text}");
        }
    }
}

#[test]
fn the_real_server_answers_and_its_environment_is_clean() {
    for shell in shells!() {
        let bucket = Bucket::start();
        let program = fs::read(BINARY).unwrap();
        bucket.put("/real", &program);
        let tools = Run::with(&["wget", "sha256sum"]);
        let mut words: Vec<&str> = shell.iter().map(|word| word.to_str().unwrap()).collect();
        // The builder puts a program's name at the end, which is not meant for the server.
        let start = format!("exec {} {SCRIPT} --init", words.join(" "));
        words = vec!["/bin/sh", "-c", &start];
        // Twice in the same place: the file there is in use the second time.
        for _ in 0..2 {
            let mut server = Server::builder()
                .wrapped_in(&words)
                .env("PATH", tools.tools.path().display())
                .env("TMPDIR", tools.place.path().display())
                .env("SBX_SERVER_URL", bucket.url("/real"))
                .env("SBX_SERVER_SHA256", sha256(&program))
                .start();
            let pid = server.pid();
            // Nobody without CAP_SYS_PTRACE may look into the server, root of a container neither.
            match fs::read_link(format!("/proc/{pid}/exe")) {
                Ok(program) => {
                    assert!(program.starts_with(tools.place.path()), "{program:?}");
                    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap();
                    let environment = String::from_utf8_lossy(&environment);
                    assert!(environment.contains("SBX_PORT="), "{environment:?}");
                    assert!(!environment.contains("SBX_SERVER"), "{environment:?}");
                }
                Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied),
            }
            let outcome = server.exec(&json!({"cmd": "echo works"}));
            assert_eq!(outcome.stdout, "works\n");
            assert!(server.is_running());
            server.signal(libc::SIGTERM);
            assert!(server.wait_for_exit(PATIENCE).success());
        }
    }
}

#[test]
fn it_also_works_from_standard_input() {
    let bucket = bucket();
    let run = Run::with(&["wget", "sha256sum"]).from(&bucket);
    let output = Command::new(&run.shell[0])
        .args(["-s", "--", "word"])
        .env_clear()
        .env("PATH", run.tools.path())
        .env("TMPDIR", run.place.path())
        .envs(run.variables.iter().map(|(name, value)| (name, value)))
        .stdin(fs::File::open(SCRIPT).unwrap())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("word=word\n"), "{output:?}");
}

#[test]
fn half_of_the_script_does_nothing() {
    let bucket = bucket();
    let run = Run::with(&["wget", "sha256sum"]).from(&bucket);
    let script = fs::read_to_string(SCRIPT).unwrap();
    // Up to, and not with, the call in the last line.
    let end = script.trim_end().rfind('\n').unwrap();
    for length in [script.len() / 3, script.len() / 2, end] {
        let half = run.tools.join("half.sh");
        fs::write(&half, &script[..length]).unwrap();
        let mut command = Command::new(&run.shell[0]);
        command.arg(&half).env_clear().env("PATH", run.tools.path());
        command.envs(run.variables.iter().map(|(name, value)| (name, value)));
        assert_eq!(command.output().unwrap().stdout, b"");
        assert!(bucket.requests().is_empty());
    }
}

// ------------------------------------------------------------------------------------ downloading

#[test]
fn any_one_downloader_is_enough() {
    for tool in ["wget", "busybox:wget", "curl", "python3"] {
        let bucket = bucket();
        let run = Run::with(&[tool, "sha256sum"]).from(&bucket);
        assert!(run.succeeds(&[]).contains("pid="), "{tool}");
        assert_eq!(bucket.requests().len(), 1, "{tool}");
    }
}

#[test]
fn a_downloader_that_does_not_work_is_passed_over() {
    let bucket = bucket();
    let run = Run::with(&["curl", "sha256sum"]).from(&bucket).tool(
        "wget",
        "echo half of it >\"$3\"; echo wget: no TLS here >&2; exit 1",
    );
    assert!(run.succeeds(&[]).contains("pid="));
}

#[test]
fn without_a_downloader_the_mount_is_used() {
    let mount = TempDir::new();
    let digest = sha256(DOUBLE.as_bytes());
    for name in [format!("sbx-server-{digest}"), "sbx-server".to_owned()] {
        fs::write(mount.join(&name), DOUBLE).unwrap();
        for url in ["http://127.0.0.1:1/server", ""] {
            let run = Run::with(&["sha256sum"])
                .set("SBX_SERVER_URL", url)
                .set("SBX_SERVER_SHA256", &digest)
                .set("SBX_SERVER_MOUNT", mount.path().to_str().unwrap());
            assert!(run.succeeds(&[]).contains("pid="), "{name} {url}");
        }
        fs::remove_file(mount.join(&name)).unwrap();
    }
    let empty = Run::with(&["sha256sum"])
        .set("SBX_SERVER_SHA256", &digest)
        .set("SBX_SERVER_MOUNT", mount.path().to_str().unwrap());
    empty.is_refused(&["there is no sbx-server-", mount.path().to_str().unwrap()]);
}

#[test]
fn what_cannot_be_downloaded_is_taken_from_the_mount_and_said() {
    let bucket = bucket();
    let mount = TempDir::new();
    fs::write(mount.join("sbx-server"), DOUBLE).unwrap();
    let run = Run::with(&["curl", "sha256sum"])
        .from(&bucket)
        .set("SBX_SERVER_URL", &bucket.url("/gone"))
        .set("SBX_SERVER_MOUNT", mount.path().to_str().unwrap());
    let output = run.output(&[]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("pid="));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        said.contains("taking ") && said.contains("HTTP 404"),
        "{said}"
    );
}

#[test]
fn no_downloader_is_said() {
    let bucket = bucket();
    let run = Run::with(&["sha256sum"]).from(&bucket);
    run.is_refused(&["none of wget, curl and python3"]);
    Run::with(&["sha256sum"]).is_refused(&["SBX_SERVER_URL is not set"]);
}

#[test]
fn an_answer_other_than_200_is_said_and_no_secret_of_the_url() {
    for tool in ["wget", "busybox:wget", "curl", "python3"] {
        let bucket = bucket();
        bucket.refuse("/private", 403);
        for (path, number) in [("/gone", "HTTP 404"), ("/private", "HTTP 403")] {
            let url = bucket.url(path);
            let run = Run::with(&[tool, "sha256sum"])
                .from(&bucket)
                .set("SBX_SERVER_URL", &format!("{url}?signature=s3cret"));
            let said = run.is_refused(&[number, &url]);
            assert!(!said.contains("s3cret"), "{said}");
        }
        assert_eq!(bucket.requests().len(), 2, "{tool}: once each");
    }
}

#[test]
fn a_server_that_is_busy_is_asked_again() {
    for tool in ["wget", "busybox:wget", "curl", "python3"] {
        let bucket = bucket();
        bucket.refuse_once("/server", 503);
        let run = Run::with(&[tool, "sha256sum"]).from(&bucket);
        assert!(run.succeeds(&[]).contains("pid="), "{tool}");
        assert_eq!(bucket.requests().len(), 2, "{tool}");
    }
}

#[test]
fn no_network_is_said() {
    for tool in ["wget", "busybox:wget", "curl", "python3"] {
        let bucket = bucket();
        let run = Run::with(&[tool, "sha256sum"]).from(&bucket);
        let nobody = run.set("SBX_SERVER_URL", "http://127.0.0.1:1/server");
        nobody.is_refused(&["no connection; is there a network?"]);
        let nowhere = nobody.set("SBX_SERVER_URL", "http://host.invalid/server");
        nowhere.is_refused(&["cannot be resolved; is there a network?"]);
    }
}

#[test]
fn a_url_of_another_kind_is_refused() {
    for url in ["ftp://127.0.0.1/server", "file:///bin/sh", "--version"] {
        let run = Run::with(&["curl", "sha256sum"]).set("SBX_SERVER_URL", url);
        run.is_refused(&["must begin with https:// or http://"]);
    }
}

// ----------------------------------------------------------------------------------------- token

#[test]
fn the_download_token_goes_to_the_host_of_the_url_only() {
    for tool in ["curl", "python3"] {
        let bucket = bucket();
        // Another host by name: the same machine, so that the request arrives.
        let other = bucket.url("/server").replace("127.0.0.1", "localhost");
        bucket.redirect("/private", &other);
        let run = Run::with(&[tool, "sha256sum"])
            .from(&bucket)
            .set("SBX_SERVER_URL", &bucket.url("/private"))
            .set("SBX_DL_TOKEN", "hf_s3cret");
        assert!(run.succeeds(&[]).contains("pid="), "{tool}");
        let requests = bucket.requests();
        assert_eq!(requests.len(), 2, "{tool}");
        assert_eq!(
            requests[0].token.as_deref(),
            Some("Bearer hf_s3cret"),
            "{tool}"
        );
        assert_eq!(requests[1].token, None, "{tool}");
    }
}

#[test]
fn the_download_token_is_in_no_process_list() {
    for tool in ["curl", "python3"] {
        let bucket = bucket();
        let seen = Arc::new(AtomicBool::new(false));
        let asked = Arc::new(AtomicBool::new(false));
        let (saw, was_asked) = (Arc::clone(&seen), Arc::clone(&asked));
        // Looked for while the downloader waits for its answer.
        bucket.when_asked(move || {
            saw.store(!processes_with("hf_n0where").is_empty(), Ordering::SeqCst);
            was_asked.store(!processes_with("/server").is_empty(), Ordering::SeqCst);
        });
        let run = Run::with(&[tool, "sha256sum"])
            .from(&bucket)
            .set("SBX_DL_TOKEN", "hf_n0where");
        assert!(run.succeeds(&[]).contains("pid="), "{tool}");
        assert!(
            asked.load(Ordering::SeqCst),
            "{tool}: the URL is in the list"
        );
        assert!(
            !seen.load(Ordering::SeqCst),
            "{tool}: the token is in the list"
        );
    }
}

#[test]
fn wget_never_gets_the_download_token() {
    let bucket = bucket();
    bucket.refuse("/private", 401);
    let run = Run::with(&["wget", "sha256sum"])
        .from(&bucket)
        .set("SBX_DL_TOKEN", "hf_s3cret");
    assert!(
        run.succeeds(&[]).contains("pid="),
        "what is public needs none"
    );
    let private = Run::with(&["busybox:wget", "sha256sum"])
        .from(&bucket)
        .set("SBX_SERVER_URL", &bucket.url("/private"))
        .set("SBX_DL_TOKEN", "hf_s3cret");
    private.is_refused(&["HTTP 401", "curl or python3"]);
    assert!(
        bucket
            .requests()
            .iter()
            .all(|request| request.token.is_none())
    );
}

#[test]
fn a_token_that_could_forge_a_header_is_refused_and_not_shown() {
    let bucket = bucket();
    for token in ["s3cret\r\nX: y", "s3cret\" -o x", "s3 cret"] {
        let run = Run::with(&["curl", "sha256sum"])
            .from(&bucket)
            .set("SBX_DL_TOKEN", token);
        let said = run.is_refused(&["SBX_DL_TOKEN"]);
        assert!(!said.contains("s3"), "{said}");
    }
    assert!(bucket.requests().is_empty());
}

// ------------------------------------------------------------------------------------- verifying

#[test]
fn any_one_digest_tool_is_enough() {
    for shell in shells!() {
        for tool in ["sha256sum", "busybox:sha256sum", "openssl", "python3"] {
            let bucket = bucket();
            let run = Run::with(&["wget", tool]).shell(&shell).from(&bucket);
            assert!(run.succeeds(&[]).contains("pid="), "{tool}");
            let wrong = Run::with(&["wget", tool])
                .shell(&shell)
                .from(&bucket)
                .set("SBX_SERVER_SHA256", &"0".repeat(64));
            wrong.is_refused(&["wrong digest"]);
        }
    }
}

#[test]
fn a_wrong_digest_is_refused_whatever_is_allowed() {
    for shell in shells!() {
        let bucket = bucket();
        let wrong = sha256(b"something else");
        let run = Run::with(&["wget", "sha256sum"])
            .shell(&shell)
            .from(&bucket)
            .set("SBX_SERVER_SHA256", &wrong)
            .set("SBX_ALLOW_UNVERIFIED_SERVER", "1");
        run.is_refused(&["wrong digest", &wrong, &sha256(DOUBLE.as_bytes())]);
    }
}

#[test]
fn a_file_of_the_mount_is_verified_too() {
    let mount = TempDir::new();
    let digest = sha256(DOUBLE.as_bytes());
    let name = format!("sbx-server-{digest}");
    fs::write(mount.join(&name), format!("{DOUBLE}echo more\n")).unwrap();
    let run = Run::with(&["sha256sum"])
        .set("SBX_SERVER_SHA256", &digest)
        .set("SBX_SERVER_MOUNT", mount.path().to_str().unwrap());
    run.is_refused(&["wrong digest", &name]);
}

#[test]
fn without_a_digest_tool_it_runs_only_when_that_is_allowed() {
    let bucket = bucket();
    // A tool that prints nonsense is none.
    let run = Run::with(&["wget"])
        .from(&bucket)
        .tool("sha256sum", "echo broken; exit 1");
    run.is_refused(&[
        "none of sha256sum, openssl and python3",
        "SBX_ALLOW_UNVERIFIED_SERVER",
    ]);
    run.set("SBX_ALLOW_UNVERIFIED_SERVER", "yes")
        .is_refused(&["cannot verify"]);
    let allowed = Run::with(&["wget"])
        .from(&bucket)
        .set("SBX_ALLOW_UNVERIFIED_SERVER", "1");
    let output = allowed.output(&[]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("pid="));
    assert!(String::from_utf8_lossy(&output.stderr).contains("unverified"));
}

#[test]
fn without_a_digest_it_runs_only_when_that_is_allowed() {
    let bucket = bucket();
    let run = Run::with(&["wget", "sha256sum"]).set("SBX_SERVER_URL", &bucket.url("/server"));
    run.is_refused(&["no digest is given in SBX_SERVER_SHA256"]);
    let allowed = run.set("SBX_ALLOW_UNVERIFIED_SERVER", "1");
    assert!(allowed.succeeds(&[]).contains("pid="));
}

#[test]
fn a_digest_that_is_none_is_refused() {
    let bucket = bucket();
    for digest in ["0", &"g".repeat(64), &"A".repeat(64), &"0".repeat(65)] {
        let run = Run::with(&["wget", "sha256sum"])
            .from(&bucket)
            .set("SBX_SERVER_SHA256", digest)
            .set("SBX_ALLOW_UNVERIFIED_SERVER", "1");
        run.is_refused(&["SBX_SERVER_SHA256 must be 64 lower-case hex digits"]);
    }
}

#[test]
fn half_a_download_is_never_executed() {
    for tool in ["wget", "busybox:wget", "curl", "python3"] {
        let bucket = bucket();
        // Everything but the last line arrives, which alone would run well.
        bucket.break_off("/server", DOUBLE.len() - "export -p\n".len());
        let run = Run::with(&[tool, "sha256sum"]).from(&bucket);
        let verified = run.is_refused(&[]);
        assert!(!verified.contains("does not run"), "{tool}: {verified}");
        // Where nothing is verified, the downloader's word is all there is.
        let unverified = Run::with(&[tool])
            .set("SBX_SERVER_URL", &bucket.url("/server"))
            .set("SBX_ALLOW_UNVERIFIED_SERVER", "1");
        unverified.is_refused(&["cannot download"]);
    }
}

#[test]
fn what_is_no_program_is_not_run_as_a_script() {
    for shell in shells!() {
        let bucket = Bucket::start();
        bucket.put("/server", b"<html>\necho executed\n</html>\n");
        let run = Run::with(&["wget"])
            .shell(&shell)
            .set("SBX_SERVER_URL", &bucket.url("/server"))
            .set("SBX_ALLOW_UNVERIFIED_SERVER", "1");
        let run = run.tool("sha256sum", "exit 1").tool("openssl", "exit 1");
        let output = run.output(&[]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("is not a program"), "{said}");
        assert_eq!(output.stdout, b"");
    }
}

// ---------------------------------------------------------------------------------- architectures

#[test]
fn another_architectures_program_is_refused() {
    for shell in shells!() {
        for (machine, name, file) in [
            ("x86_64", "aarch64", AARCH64),
            ("aarch64", "x86_64", X86_64),
        ] {
            let bucket = Bucket::start();
            let bytes = program_for(file);
            bucket.put("/server", &bytes);
            let run = Run::with(&["curl", "sha256sum"])
                .shell(&shell)
                .tool("uname", &format!("echo {machine}"))
                .set("SBX_SERVER_URL", &bucket.url("/server"))
                .set("SBX_SERVER_URL_AARCH64", &bucket.url("/server"))
                .set("SBX_SERVER_SHA256", &sha256(&bytes))
                .set("SBX_SERVER_SHA256_AARCH64", &sha256(&bytes));
            if shell.len() > 1 && machine == "aarch64" {
                // This shell may have a `uname` of its own, which tells the truth.
                continue;
            }
            run.is_refused(&["wrong architecture", &format!("is for {name}"), machine]);
        }
    }
}

#[test]
fn a_program_of_this_machine_is_taken_for_one() {
    // Of every kind that is about: position independent or not, with and without an ABI number.
    let programs = [Some(PathBuf::from(BINARY)), find("busybox"), find("dash")];
    for program in programs.into_iter().flatten() {
        let bucket = Bucket::start();
        let bytes = fs::read(&program).unwrap();
        bucket.put("/server", &bytes);
        let run = Run::with(&["curl", "sha256sum"])
            .set("SBX_SERVER_URL", &bucket.url("/server"))
            .set("SBX_SERVER_SHA256", &sha256(&bytes));
        let output = run.output(&["--version"]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!said.contains("architecture"), "{program:?}: {said}");
        assert!(!said.contains("not a program"), "{program:?}: {said}");
    }
}

#[test]
fn an_architecture_without_a_build_is_said() {
    let bucket = bucket();
    let run = Run::with(&["curl", "sha256sum"])
        .from(&bucket)
        .tool("uname", "echo riscv64");
    run.is_refused(&["wrong architecture", "riscv64", "x86_64 and aarch64"]);
    assert!(bucket.requests().is_empty());
}

#[test]
fn each_architecture_gets_its_own_url_and_digest() {
    let digest = sha256(DOUBLE.as_bytes());
    let arm = |url: &str| {
        Run::with(&["curl", "sha256sum"])
            .tool("uname", "echo aarch64")
            .set("SBX_SERVER_URL", url)
            .set("SBX_SERVER_SHA256", &"0".repeat(64))
            .set("SBX_SERVER_SHA256_AARCH64", &digest)
    };
    let bucket = bucket();
    let paths = [
        "/builds/aarch64/sbx-server".to_owned(),
        format!("/builds/sbx-server-{digest}"),
        "/arm".to_owned(),
    ];
    for path in &paths {
        bucket.put(path, DOUBLE.as_bytes());
    }
    let by_name = arm(&bucket.url("/builds/{arch}/sbx-server"));
    assert!(by_name.succeeds(&[]).contains("pid="));
    let by_digest = arm(&bucket.url("/builds/sbx-server-{sha256}"));
    assert!(by_digest.succeeds(&[]).contains("pid="));
    let by_itself = arm("http://127.0.0.1:1/").set("SBX_SERVER_URL_AARCH64", &bucket.url("/arm"));
    assert!(by_itself.succeeds(&[]).contains("pid="));
    let asked: Vec<_> = bucket
        .requests()
        .into_iter()
        .map(|request| request.path)
        .collect();
    assert_eq!(asked, paths);

    // The same script on the usual machine.
    let run = Run::with(&["curl", "sha256sum"])
        .tool("uname", "echo x86_64")
        .from(&bucket)
        .set("SBX_SERVER_URL", &bucket.url("/builds/sbx-server-{sha256}"));
    assert!(run.succeeds(&[]).contains("pid="));
}

#[test]
fn a_url_for_one_architecture_is_not_used_on_the_other() {
    let bucket = bucket();
    let run = Run::with(&["curl", "sha256sum"])
        .from(&bucket)
        .tool("uname", "echo arm64")
        .set("SBX_SERVER_SHA256_AARCH64", &"0".repeat(64));
    run.is_refused(&["wrong architecture", "SBX_SERVER_URL_AARCH64"]);
    let no_digest = run.set("SBX_SERVER_URL_AARCH64", &bucket.url("/{sha256}"));
    no_digest
        .set("SBX_SERVER_SHA256_AARCH64", "")
        .is_refused(&["SBX_SERVER_SHA256_AARCH64 is not set"]);
    assert!(bucket.requests().is_empty());
}

#[test]
fn a_program_that_does_not_run_here_is_said() {
    let bucket = Bucket::start();
    let bytes = b"#!/bin/sh\nexit 3\n";
    bucket.put("/server", bytes);
    let run = Run::with(&["curl", "sha256sum"])
        .from(&bucket)
        .set("SBX_SERVER_SHA256", &sha256(bytes));
    run.is_refused(&["does not run here", "status 3"]);
}

// ----------------------------------------------------------------------------------------- places

fn can_mount() -> bool {
    Command::new("unshare")
        .args(["--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Larger than a file system of one page.
fn large_double() -> Vec<u8> {
    let mut text = DOUBLE.to_owned();
    for line in 0..10_000 {
        writeln!(text, "# {line}").unwrap();
    }
    text.into_bytes()
}

#[test]
fn a_place_without_execution_is_passed_over_and_said() {
    if !can_mount() {
        skip!("needs a mount namespace");
    }
    for shell in shells!() {
        let bucket = bucket();
        let run = Run::with(&["wget", "sha256sum"])
            .shell(&shell)
            .from(&bucket)
            .set("TMPDIR", "/tmp")
            .before("mount -t tmpfs -o noexec tmpfs /tmp; mount -t tmpfs -o exec tmpfs /dev/shm");
        let output = run.output(&[]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            String::from_utf8_lossy(&output.stdout).contains("pid="),
            "{said}"
        );
        let expected = "sbx-bootstrap: using /dev/shm; unusable: /tmp (noexec)\n";
        assert_eq!(said, expected);
        assert_eq!(bucket.requests().len(), 1, "downloaded once");
    }
}

#[test]
fn a_full_place_is_passed_over_and_said() {
    if !can_mount() {
        skip!("needs a mount namespace");
    }
    for tool in ["wget", "busybox:wget", "curl", "python3"] {
        let bucket = Bucket::start();
        let bytes = large_double();
        bucket.put("/server", &bytes);
        let run = Run::with(&[tool, "sha256sum"])
            .from(&bucket)
            .set("SBX_SERVER_SHA256", &sha256(&bytes))
            .set("TMPDIR", "/mnt/full")
            .before("mkdir /mnt/full; mount -t tmpfs -o size=4k tmpfs /mnt/full; mount -t tmpfs tmpfs /tmp");
        let output = run.output(&[]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            String::from_utf8_lossy(&output.stdout).contains("pid="),
            "{said}"
        );
        let expected = "sbx-bootstrap: using /tmp; unusable: /mnt/full (no space)\n";
        assert_eq!(said, expected, "{tool}");
    }
}

#[test]
fn without_any_place_all_are_named_with_their_reasons() {
    if !can_mount() {
        skip!("needs a mount namespace");
    }
    for shell in shells!() {
        let bucket = Bucket::start();
        let bytes = large_double();
        bucket.put("/server", &bytes);
        let run = Run::with(&["wget", "sha256sum"])
            .shell(&shell)
            .from(&bucket)
            .set("SBX_SERVER_SHA256", &sha256(&bytes))
            .set("HOME", "/mnt/home")
            .before(
                "mount -t tmpfs -o ro tmpfs /tmp; mount -t tmpfs -o noexec tmpfs /dev/shm
                mount -t tmpfs -o noexec tmpfs /run; mount -t tmpfs -o size=4k tmpfs /var/tmp
                mkdir -p /mnt/home/.sbx-server",
            );
        run.is_refused(&[
            "no place to run the server from: /tmp (read-only) /dev/shm (noexec) /run (noexec) \
             /var/tmp (no space) /mnt/home (/mnt/home/.sbx-server is a directory) . (not writable);",
            "name it in TMPDIR",
        ]);
    }
}

#[test]
fn a_link_that_somebody_left_is_not_followed() {
    let bucket = bucket();
    let run = Run::with(&["wget", "sha256sum"]).from(&bucket);
    let victim = TempDir::new();
    let file = victim.join("victim");
    fs::write(&file, "untouched").unwrap();
    symlink(&file, run.place.join(".sbx-server")).unwrap();
    assert!(run.succeeds(&[]).contains("pid="));
    assert_eq!(fs::read_to_string(&file).unwrap(), "untouched");
    let placed = fs::symlink_metadata(run.place.join(".sbx-server")).unwrap();
    assert!(placed.is_file());
    assert_eq!(
        fs::read_dir(run.place.path()).unwrap().count(),
        1,
        "no litter"
    );
}

#[test]
fn an_end_while_it_downloads_leaves_nothing() {
    let bucket = bucket();
    let asked = Arc::new(AtomicBool::new(false));
    let was_asked = Arc::clone(&asked);
    bucket.when_asked(move || was_asked.store(true, Ordering::SeqCst));
    bucket.stall("/server");
    let run = Run::with(&["wget", "sha256sum"]).from(&bucket);
    let mut command = run.command(&[]);
    // A group of its own, which is ended as a whole. Not by SIGINT: a suite that runs in the background of a shell
    // ignores it, and so does what it starts.
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut child = command
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("it downloads", PATIENCE, || asked.load(Ordering::SeqCst));
    let group = nix::unistd::Pid::from_raw(child.id().cast_signed());
    nix::sys::signal::killpg(group, nix::sys::signal::Signal::SIGTERM).unwrap();
    let ended = std::os::unix::process::ExitStatusExt::signal(&child.wait().unwrap());
    assert_eq!(ended, Some(libc::SIGTERM));
    wait_until("nothing is left", PATIENCE, || {
        fs::read_dir(run.place.path()).unwrap().count() == 0
    });
}
