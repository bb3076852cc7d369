//! Python: the standard library, environments, packages, and which parts of multiprocessing work.

use serde_json::json;

use super::{find, place, put, python, run, server};
use crate::fixture::{PATIENCE, is_root, wait_until};
use crate::skip;

#[test]
fn a_script_finds_a_home_a_place_for_temporary_files_and_a_name() {
    place!(server, sandbox, "python3");
    let seen = python(
        &sandbox,
        "import getpass, os, sys, tempfile
print(os.path.expanduser('~'), tempfile.gettempdir(), getpass.getuser(), os.getcwd())
with tempfile.TemporaryDirectory() as name:
    assert os.stat(name).st_uid == os.getuid()
print(sys.getfilesystemencoding(), 'zwölf ☃')
",
    );
    let home = sandbox.home.display();
    assert_eq!(
        seen,
        format!("{home} {home}/.tmp sandbox {home}\nutf-8 zwölf ☃\n")
    );
}

#[test]
fn threads_subprocesses_and_databases_work() {
    place!(server, sandbox, "python3");
    let seen = python(
        &sandbox,
        "import asyncio, sqlite3, subprocess, threading
from concurrent.futures import ThreadPoolExecutor

with ThreadPoolExecutor(8) as pool:
    print(sum(pool.map(lambda n: n * n, range(100))))
results = []
threads = [threading.Thread(target=results.append, args=(n,)) for n in range(20)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(sorted(results) == list(range(20)))

async def shout(text):
    process = await asyncio.create_subprocess_exec(
        'tr', 'a-z', 'A-Z', stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    return (await process.communicate(text.encode()))[0].decode()

async def main():
    return await asyncio.gather(*(shout(f'number {n}') for n in range(5)))

print(asyncio.run(main()))
print(subprocess.run('cat | wc -c', shell=True, input=b'x' * 1_000_000, capture_output=True).stdout)

for mode in ('delete', 'wal'):
    base = sqlite3.connect(f'{mode}.db')
    print(base.execute(f'pragma journal_mode={mode}').fetchone()[0])
    base.execute('create table numbers(n)')
    base.executemany('insert into numbers values (?)', [(n,) for n in range(1000)])
    base.commit()
    print(base.execute('select sum(n) from numbers').fetchone()[0])
",
    );
    assert_eq!(
        seen,
        "328350\nTrue\n['NUMBER 0', 'NUMBER 1', 'NUMBER 2', 'NUMBER 3', 'NUMBER 4']\nb'1000000\\n'\n\
         delete\n499500\nwal\n499500\n"
    );
}

/// What works of multiprocessing, in every way that it starts processes. What does not, and why, is
/// in [`super::refused`].
#[test]
fn processes_with_pipes_and_with_a_manager_work() {
    place!(server, sandbox, "python3");
    let seen = python(
        &sandbox,
        "import mmap, multiprocessing, os

def double(pipe, queue, lock):
    with lock:
        pipe.send(pipe.recv() * 2)
        queue.put('seen')

if __name__ == '__main__':
    with multiprocessing.Manager() as manager:
        for method in ('fork', 'spawn', 'forkserver'):
            context = multiprocessing.get_context(method)
            here, there = context.Pipe()
            queue, lock = manager.Queue(), manager.Lock()
            process = context.Process(target=double, args=(there, queue, lock))
            process.start()
            here.send(21)
            print(method, here.recv(), queue.get())
            process.join()
    shared = mmap.mmap(-1, 4096)
    if os.fork() == 0:
        shared[:5] = b'hello'
        os._exit(0)
    os.wait()
    print(shared[:5])
",
    );
    assert_eq!(
        seen,
        "fork 42 seen\nspawn 42 seen\nforkserver 42 seen\nb'hello'\n"
    );
}

#[test]
fn a_client_in_a_sandbox_reaches_a_server_of_the_machine() {
    place!(server, sandbox, "python3");
    let url = format!("http://{}/health", server.address);
    let seen = run(
        &sandbox,
        &json!({ "cmd": ["python3", "-c", "import sys, urllib.request\nprint(urllib.request.urlopen(sys.argv[1]).status)", url] }),
    );
    assert_eq!(seen, "200\n");
}

/// Makes a wheel with a program, `greeting`, and a module.
///
/// Programs are installed where the sandbox finds them: ~/.local/bin is first in its PATH.
pub const WHEEL: &str = "import zipfile
with zipfile.ZipFile('greeting-1.0-py3-none-any.whl', 'w') as wheel:
    def write(name, text): wheel.writestr(name, text)
    write('greeting.py', 'def main():\\n    print(\"hello from\", __file__)\\n')
    info = 'greeting-1.0.dist-info'
    write(f'{info}/METADATA', 'Metadata-Version: 2.1\\nName: greeting\\nVersion: 1.0\\n')
    write(f'{info}/WHEEL', 'Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n')
    write(f'{info}/entry_points.txt', '[console_scripts]\\ngreeting = greeting:main\\n')
    write(f'{info}/RECORD', 'greeting.py,,\\n' + ''.join(
        f'{info}/{name},,\\n' for name in ('METADATA', 'WHEEL', 'entry_points.txt', 'RECORD')))
";

#[test]
fn a_virtual_environment_is_made_and_a_wheel_installed_into_it() {
    place!(server, sandbox, "python3");
    let probe = json!({ "cmd": "python3 -c 'import venv, ensurepip'" });
    if sandbox.exec(&probe).code() != Some(0) {
        skip!("python3 has no venv with pip");
    }
    python(&sandbox, WHEEL);
    sandbox.sh("python3 -m venv env && env/bin/pip install --quiet --disable-pip-version-check --no-index ./greeting-1.0-py3-none-any.whl");
    let seen = sandbox.sh("env/bin/greeting");
    let home = sandbox.home.to_str().unwrap();
    assert!(
        seen.starts_with(&format!("hello from {home}/env/lib/python3")),
        "{seen}"
    );
    // The same as a user's package, by the pip of the environment: the machine's Python may have none.
    sandbox.sh("PYTHONPATH=$(echo env/lib/python3*/site-packages) python3 -m pip install --user --break-system-packages \
         --quiet --disable-pip-version-check --no-warn-script-location --no-index --ignore-installed ./greeting-1.0-py3-none-any.whl");
    let seen = sandbox.sh("greeting");
    assert!(
        seen.starts_with(&format!("hello from {home}/.local/lib/python3")),
        "{seen}"
    );
}

/// One with compiled code, so that shared libraries are loaded from a home.
#[test]
fn a_compiled_wheel_of_the_package_index_works() {
    if !is_root() {
        skip!("host mode needs root");
    }
    let server = server();
    // How the machine reaches the index is not known to a sandbox unless it is told.
    let known = [
        "HTTPS_PROXY",
        "https_proxy",
        "PIP_INDEX_URL",
        "PIP_CERT",
        "SSL_CERT_FILE",
    ];
    let environment: serde_json::Map<_, _> = known
        .into_iter()
        .filter_map(|name| Some((name.to_owned(), std::env::var(name).ok()?.into())))
        .collect();
    let sandbox = server.sandbox_with(&json!({ "env": environment }));
    if let Err(reason) = find(&sandbox, "python3") {
        skip!("{reason}");
    }
    let install = "python3 -m venv env && env/bin/pip install --quiet --disable-pip-version-check --retries 1 --only-binary :all: markupsafe";
    let outcome = sandbox.exec(&json!({ "cmd": install }));
    if outcome.code() != Some(0) {
        skip!("the package index cannot be reached: {}", outcome.stderr);
    }
    let program = "import markupsafe._speedups as s; print(s.__file__)";
    let seen = run(
        &sandbox,
        &json!({ "cmd": ["env/bin/python", "-c", program] }),
    );
    assert!(
        seen.starts_with(sandbox.home.to_str().unwrap()) && seen.ends_with(".so\n"),
        "{seen}"
    );
}

/// How servers are written in a sandbox: on a unix socket where the port proxy looks for it, which is
/// also how commands of the sandbox reach it.
#[test]
fn a_server_on_a_unix_socket_is_reached_by_other_commands() {
    place!(server, sandbox, "python3", "curl");
    put(
        &sandbox,
        "server.py",
        "import http.server, os, socketserver
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'path ' + self.path.encode())
    def address_string(self):
        return 'local'
socketserver.ThreadingUnixStreamServer(os.environ['SBX_PROXY_DIR'] + '/8000.sock', Handler).serve_forever()
",
    );
    let process = sandbox.spawn(&json!({ "cmd": ["python3", "server.py"] }));
    let socket = sandbox.home.join(".sbx/proxy/8000.sock");
    wait_until("the server listens", PATIENCE, || socket.exists());
    let seen = run(
        &sandbox,
        &json!({ "cmd": "curl -sS --retry 5 --retry-connrefused --unix-socket $SBX_PROXY_DIR/8000.sock http://sandbox/a/b" }),
    );
    assert_eq!(seen, "path /a/b");
    // And it is ended by another command, by its number.
    sandbox.sh(&format!("kill {}", process["pid"]));
    let ended = sandbox.get(&format!(
        "processes/{}/wait?timeout=20",
        process["id"].as_str().unwrap()
    ));
    assert_eq!(ended.json()["signal"], 15, "{}", ended.text());
}
