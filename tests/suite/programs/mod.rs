//! People's programs work inside a sandbox, and what the wall refuses is refused as docs/host-mode.md says.
//!
//! Each test is what somebody would do: a script that runs in a sandbox, and its output. In
//! [`refused`] stands what programs may expect and do not get, with what to do instead; that page's
//! table of what does not work has a row for each of its tests.

mod node;
pub mod python;
mod refused;
mod shell;
mod tools;

use std::path::Path;

use serde_json::{Value, json};

use crate::fixture::{Sandbox, Server};

/// Where programs are on every machine; the test's own PATH may lead into root's home.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A host-mode server and a sandbox in which these programs are found, or the end of the test.
macro_rules! place {
    ($server:ident, $sandbox:ident $(, $program:literal)*) => {
        if !crate::fixture::is_root() {
            crate::skip!("host mode needs root");
        }
        let $server = crate::programs::server();
        let $sandbox = $server.sandbox();
        $(
            if let Err(reason) = crate::programs::find(&$sandbox, $program) {
                crate::skip!("{reason}");
            }
        )*
    };
}
use place;

fn server() -> Server {
    Server::host().env("PATH", PATH).start()
}

/// Whether commands of the sandbox have this program.
fn find(sandbox: &Sandbox<'_>, program: &str) -> Result<(), String> {
    let probe = json!({ "cmd": format!("command -v {program}") });
    if sandbox.exec(&probe).code() == Some(0) {
        return Ok(());
    }
    // What is installed must be found; only what is not may be missing.
    let installed = PATH
        .split(':')
        .find(|directory| Path::new(directory).join(program).exists());
    assert!(
        installed.is_none(),
        "{program} is in {installed:?}, and sandboxes do not find it"
    );
    Err(format!("{program} is not installed"))
}

/// Puts a text into the home.
#[track_caller]
fn put(sandbox: &Sandbox<'_>, name: &str, text: &str) {
    let reply = sandbox.put(&format!("files/write?path={name}"), text.as_bytes());
    assert_eq!(reply.status, 200, "{}", reply.text());
}

/// What a command writes on stdout; it must succeed.
#[track_caller]
fn run(sandbox: &Sandbox<'_>, body: &Value) -> String {
    let outcome = sandbox.exec(body);
    assert_eq!(outcome.code(), Some(0), "{body}: {outcome:?}");
    outcome.stdout
}

/// What a Python program writes on stdout; it must succeed.
#[track_caller]
fn python(sandbox: &Sandbox<'_>, program: &str) -> String {
    put(sandbox, "program.py", program);
    run(sandbox, &json!({ "cmd": ["python3", "program.py"] }))
}

/// What a shell script that fails says on stderr.
#[track_caller]
fn complaint(sandbox: &Sandbox<'_>, script: &str) -> String {
    let outcome = sandbox.exec(&json!({ "cmd": script }));
    assert_ne!(outcome.code(), Some(0), "{script}: {outcome:?}");
    outcome.stderr
}
