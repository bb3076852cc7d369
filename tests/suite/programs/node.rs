//! JavaScript: files, children, workers, servers, packages.

use serde_json::json;

use super::{place, put, run};

#[test]
fn files_children_workers_and_servers_on_unix_sockets_work() {
    place!(server, sandbox, "node");
    put(
        &sandbox,
        "child.js",
        "process.on('message', (n) => { process.send(n * 2); process.disconnect(); });",
    );
    put(
        &sandbox,
        "program.js",
        "const fs = require('fs'), os = require('os'), http = require('http'), path = require('path');
const { execSync, fork, spawn } = require('child_process');
const { Worker } = require('worker_threads');
const said = (name, value) => console.log(name, value);

async function main() {
  fs.writeFileSync('zwölf.txt', 'content');
  said('file', fs.readFileSync('zwölf.txt', 'utf8'));
  said('home', os.homedir() === process.env.HOME && os.tmpdir() === process.env.TMPDIR);
  said('shell', execSync('echo from a shell').toString().trim());
  const child = fork(path.join(__dirname, 'child.js'));
  child.send(21);
  said('fork', await new Promise((done) => child.on('message', done)));
  const worker = new Worker(\"require('worker_threads').parentPort.postMessage(42)\", { eval: true });
  said('worker', await new Promise((done) => worker.on('message', done)));
  said('wasm', new WebAssembly.Memory({ initial: 10, maximum: 65536 }).buffer.byteLength);
  const socketPath = path.join(process.env.SBX_PROXY_DIR, '3000.sock');
  const server = http.createServer((request, response) => response.end('asked for ' + request.url));
  await new Promise((done) => server.listen(socketPath, done));
  const text = await new Promise((done) => http.get({ socketPath, path: '/x' }, (response) => {
    let text = '';
    response.on('data', (piece) => text += piece).on('end', () => done(text));
  }));
  said('http', text);
  server.close();
}
main();
",
    );
    let seen = run(&sandbox, &json!({ "cmd": ["node", "program.js"] }));
    assert_eq!(
        seen,
        "file content\nhome true\nshell from a shell\nfork 42\nworker 42\nwasm 655360\nhttp asked for /x\n"
    );
}

#[test]
fn a_package_is_installed_into_a_project_and_globally_below_the_home() {
    place!(server, sandbox, "npm");
    sandbox.sh("mkdir package");
    put(
        &sandbox,
        "package/package.json",
        r#"{"name":"sbx-greeting","version":"1.0.0","bin":{"sbx-greeting":"main.js"}}"#,
    );
    put(
        &sandbox,
        "package/main.js",
        "#!/usr/bin/env node\nconsole.log('hello from a package');\n",
    );
    sandbox.sh("cd package && npm pack --silent --pack-destination ..");
    sandbox.sh("mkdir project && cd project && npm init -y >/dev/null && npm install --offline --silent ../sbx-greeting-1.0.0.tgz");
    assert_eq!(
        sandbox.sh("project/node_modules/.bin/sbx-greeting"),
        "hello from a package\n"
    );
    // The machine's own prefix cannot be written; this one has its programs in the sandbox's PATH.
    sandbox.sh("npm config set prefix $HOME/.local && npm install -g --offline --silent ./sbx-greeting-1.0.0.tgz");
    assert_eq!(sandbox.sh("sbx-greeting"), "hello from a package\n");
}

/// A limit on data leaves address space alone, which runtimes reserve far more of than they use.
#[test]
fn it_starts_under_a_limit_of_memory_and_is_held_to_it() {
    place!(server, sandbox, "node");
    let small = server.sandbox_with(&json!({ "max_mem_mb": 512 }));
    let program = "new WebAssembly.Memory({ initial: 10, maximum: 65536 }); console.log('started')";
    assert_eq!(
        run(&small, &json!({ "cmd": ["node", "-e", program] })),
        "started\n"
    );
    let hog = "const all = []; for (;;) all.push(Buffer.alloc(16 << 20, 1));";
    let outcome = small.exec(&json!({ "cmd": ["node", "-e", hog], "timeout": 60 }));
    assert_eq!(outcome.exit["timed_out"], false, "{:?}", outcome.exit);
    assert_ne!(outcome.code(), Some(0), "{:?}", outcome.exit);
    drop(sandbox);
}
