// The unmodified E2B SDKs for JavaScript, `e2b` and `@e2b/code-interpreter`, work against real servers.
//
//     node e2b_client.mjs <sbx-server binary> [word ...]
//
// The packages are those of ./node_modules, or of the directory in E2B_NODE_MODULES. A check runs in each of its
// places: `host` is a sandbox of its own on a server in host mode, which needs root; `machine` a dedicated server of its
// own with a token; `debug` one without, as the SDK's debug mode wants it. A word that names a place chooses it; another
// one chooses the checks that have it in their names, where it may have `_` for a space. What an older SDK lacks is
// skipped: such a line begins with SKIPPED. What the two languages share on the wire is checked in more depth by
// e2b_client.py.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { createHash, randomBytes } from "node:crypto";
import { once } from "node:events";
import fs from "node:fs";
import { createRequire } from "node:module";
import os from "node:os";
import path from "node:path";
import readline from "node:readline";

const [binary, ...words] = process.argv.slice(2);
const modules = process.env.E2B_NODE_MODULES ?? path.resolve("node_modules");
// A caller's settings must not come between.
for (const name of Object.keys(process.env)) if (name.startsWith("E2B_")) delete process.env[name];

let e2b, interpreter, version, sources;
try {
  const require = createRequire(modules + "/");
  e2b = require("e2b");
  interpreter = require("@e2b/code-interpreter");
  const source = (name) => fs.readFileSync(require.resolve(name), "utf8");
  version = JSON.parse(fs.readFileSync(path.join(path.dirname(require.resolve("e2b")), "../package.json"))).version;
  sources = { e2b: source("e2b"), interpreter: source("@e2b/code-interpreter") };
} catch (error) {
  console.log(`cannot run here: ${error.message.split("\n")[0]}`);
  process.exit(77);
}

// Older releases, of spring 2026, have some faults of their own.
const OF_AUTUMN = Number(version.split(".")[1]) >= 40;
const PATIENCE_PER_CHECK = 180_000;
const MIB = 1 << 20;
// Where programs are on every machine; the test's own PATH may lead into root's home.
const PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const SCRATCH = fs.mkdtempSync(path.join(os.tmpdir(), "sbx-e2b-"));
// Sandboxes pass through it to their homes.
fs.chmodSync(SCRATCH, 0o711);

const pause = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
const digest = (data) => createHash("sha256").update(data).digest("hex");

class Skipped extends Error {}

function need(condition, reason) {
  if (!condition) throw new Skipped(reason);
}

/** Polls until the condition holds, and gives its value. */
async function eventually(what, condition, limit = 20_000) {
  for (const deadline = Date.now() + limit; ; await pause(20)) {
    const value = await condition();
    if (value) return value;
    assert.ok(Date.now() < deadline, `not within ${limit} ms: ${what}`);
  }
}

/** Whether a process runs (a zombie does not). */
function alive(pid) {
  try {
    return !"ZX".includes(fs.readFileSync(`/proc/${pid}/stat`, "utf8").split(") ").at(-1)[0]);
  } catch {
    return false;
  }
}

/** The error of a call that must fail with it. */
async function raises(kind, call, says = "") {
  let result;
  try {
    result = await call();
  } catch (error) {
    if (!(error instanceof kind)) throw error;
    assert.ok(error.message.toLowerCase().includes(says.toLowerCase()), `no ${says} in ${error}`);
    return error;
  }
  assert.fail(`did not fail, but gave ${JSON.stringify(result)}`);
}

// ---------------------------------------------------------------------------------- servers

const running = new Set();

// Two hosts may run at a time.
const [FIRST_UID, LAST_UID] = (process.env.SBX_UID_RANGE ?? "57000-57999").split("-").map(Number);
const MIDDLE_UID = (FIRST_UID + LAST_UID + 1) >> 1;

class Server {
  static async start(mode, more = {}) {
    const server = new Server();
    server.mode = mode;
    server.directory = fs.mkdtempSync(path.join(SCRATCH, "server-"));
    fs.chmodSync(server.directory, 0o711);
    server.homes = path.join(server.directory, "homes");
    const home = path.join(server.directory, "home");
    fs.mkdirSync(home);
    const env = { PATH, HOME: home, SBX_PORT: "0", SBX_BIND: "127.0.0.1" };
    if (mode === "host") {
      Object.assign(env, { SBX_HOST_MODE: "1", SBX_KEEP: "0", SBX_HOMES_DIR: server.homes });
      env.SBX_UID_RANGE = `${FIRST_UID}-${MIDDLE_UID - 1}`;
    }
    Object.assign(env, more);
    if (mode !== "debug") server.token = env.SBX_TOKEN = randomBytes(16).toString("hex");
    server.process = spawn(path.resolve(binary), { env, cwd: home, stdio: ["ignore", "ignore", "pipe"] });
    running.add(server.process);
    server.log = [];
    server.ended = once(server.process, "exit");
    const lines = readline.createInterface(server.process.stderr);
    server.url = await new Promise((resolve, reject) => {
      lines.on("line", (line) => {
        server.log.push(line);
        const ready = /listening on (127\.0\.0\.1:\d+)/.exec(line);
        if (ready) resolve(`http://${ready[1]}`);
      });
      lines.on("close", () => reject(new Error(`the server did not start: ${server.log}`)));
    });
    return server;
  }

  pointTheSdkHere() {
    for (const name of ["E2B_API_URL", "E2B_API_KEY", "E2B_DEBUG"]) delete process.env[name];
    process.env.E2B_SANDBOX_URL = this.url;
    if (this.token) Object.assign(process.env, { E2B_API_URL: this.url, E2B_API_KEY: `e2b_${this.token}` });
    else process.env.E2B_DEBUG = "true";
  }

  /** Ends it as a scheduler does; it must end well and leave nothing. */
  async end() {
    this.process.kill("SIGTERM");
    const [status, signal] = await this.ended;
    running.delete(this.process);
    const log = this.log.join("\n");
    assert.ok(status === 0 && !log.includes("panicked"), `the server ended with ${status ?? signal}:\n${log}`);
    const left = fs.existsSync(this.homes) ? fs.readdirSync(this.homes) : [];
    // Snapshots outlive sandboxes.
    assert.deepEqual(left.filter((name) => name !== ".snapshots"), [], "homes are left");
    fs.rmSync(this.directory, { recursive: true });
  }
}

/** Where a check works: a server, and a sandbox on it. */
class Place {
  made = [];

  constructor(server, forCode) {
    this.server = server;
    this.mode = server.mode;
    this.Sandbox = forCode ? interpreter.Sandbox : e2b.Sandbox;
  }

  /** One more sandbox, which ends with the check. */
  async create(options = {}) {
    this.made.push(await this.Sandbox.create(options));
    return this.made.at(-1);
  }

  get home() {
    return this.homeOf(this.sbx);
  }

  /** Where its files are on this machine. */
  homeOf(sbx) {
    return this.mode === "host" ? path.join(this.server.homes, sbx.sandboxId) : path.join(this.server.directory, "home");
  }

  on(file) {
    return path.join(this.home, file);
  }

  /** The process that wrote its number into a file. */
  async pid(name = "pid") {
    const read = () => fs.existsSync(this.on(name)) && fs.readFileSync(this.on(name), "utf8").trim();
    return Number(await eventually(`${name} is written`, read));
  }

  /** Lets commands go on that wait with `WAIT`. */
  go() {
    fs.writeFileSync(this.on("go"), "");
  }
}

// For a command that waits for the check. It gives up in the end, so that no check leaves one.
const WAIT = "for n in $(seq 3000); do [ -e go ] && break; sleep 0.02; done";
const CHECKS = [];
const HOST = ["host"];
const WITH_TOKEN = ["host", "machine"];
const EVERYWHERE = ["host", "machine", "debug"];

function check(places, name, run) {
  CHECKS.push({ places, name, run });
}

// ---------------------------------------------------------------------------------- commands

check(EVERYWHERE, "commands run", async (at) => {
  fs.mkdirSync(at.on("sub dir"));
  fs.chmodSync(at.on("sub dir"), 0o777);
  const options = { envs: { TEXT: "x ☃ y" }, cwd: "sub dir" };
  const result = await at.sbx.commands.run('echo "$TEXT"; echo err >&2; pwd', options);
  assert.deepEqual([result.stdout, result.stderr, result.exitCode], [`x ☃ y\n${at.on("sub dir")}\n`, "err\n", 0]);
  const error = await raises(e2b.CommandExitError, () => at.sbx.commands.run("echo out; echo err >&2; exit 3"));
  assert.deepEqual([error.exitCode, error.stdout, error.stderr], [3, "out\n", "err\n"]);
  await raises(e2b.InvalidArgumentError, () => at.sbx.commands.run("pwd", { cwd: "missing" }), "missing");
  await raises(e2b.AuthenticationError, () => at.sbx.commands.run("pwd", { user: "no-such-user" }));
  const odd = await at.sbx.commands.run("printf '\\342\\230'; sleep 0.3; printf '\\203'; printf 'a\\377b' >&2");
  assert.equal(odd.stderr, "a\ufffdb");
  // Old SDKs decode each piece of output alone.
  if (OF_AUTUMN) assert.equal(odd.stdout, "☃");
});

check(EVERYWHERE, "commands output comes as it is made", async (at) => {
  const [out, err] = [[], []];
  const onStdout = (text) => {
    out.push(text);
    at.go();
  };
  // The command goes on only when its first line has arrived.
  const script = `echo first; echo oops >&2; ${WAIT}; [ -e go ] && echo last`;
  const result = await at.sbx.commands.run(script, { onStdout, onStderr: (text) => err.push(text), timeoutMs: 30_000 });
  assert.deepEqual([out.join(""), err.join("")], ["first\nlast\n", "oops\n"]);
  assert.deepEqual([result.stdout, result.stderr], ["first\nlast\n", "oops\n"]);
  const text = randomBytes(6_000_000).toString("base64");
  fs.writeFileSync(at.on("big"), text);
  assert.equal(digest((await at.sbx.commands.run("cat big")).stdout), digest(text));
});

check(EVERYWHERE, "commands in the background", async (at) => {
  const { commands } = at.sbx;
  const handle = await commands.run(`echo before; echo $$ > pid; ${WAIT}; echo after; exit 4`, { background: true });
  const pid = await at.pid();
  const listed = (await commands.list()).find((entry) => entry.pid === handle.pid);
  assert.deepEqual([path.basename(listed.cmd), listed.args.length], ["bash", 3]);
  await handle.disconnect();
  const again = await commands.connect(handle.pid);
  assert.ok(again.pid === handle.pid && alive(pid));
  at.go();
  const error = await raises(e2b.CommandExitError, () => again.wait());
  assert.deepEqual([error.exitCode, error.stdout], [4, "after\n"]);
  await raises(e2b.NotFoundError, () => commands.connect(4_000_000));

  const sleeper = await commands.run("sleep 1000 & echo $! > child; echo $$ > parent; wait", { background: true });
  const pids = [await at.pid("child"), await at.pid("parent")];
  assert.equal(await sleeper.kill(), true);
  await eventually("its processes end", () => !pids.some(alive));
  await raises(e2b.CommandExitError, () => sleeper.wait(), "killed");
  assert.equal(await commands.kill(4_000_000), false);
  await raises(e2b.TimeoutError, () => commands.run("echo $$ > late; exec sleep 1000", { timeoutMs: 1500 }));
  const late = await at.pid("late");
  await eventually("the timeout ends it", () => !alive(late));
});

check(EVERYWHERE, "commands read input", async (at) => {
  const { commands } = at.sbx;
  const handle = await commands.run("read one; read two; echo $one-$two", { background: true, stdin: true });
  await commands.sendStdin(handle.pid, "one ☃\n");
  await commands.sendStdin(handle.pid, "two\n");
  assert.equal((await handle.wait()).stdout, "one ☃-two\n");
  await raises(e2b.NotFoundError, () => commands.sendStdin(4_000_000, "x"));
  need(commands.closeStdin, "this SDK closes no input");
  const summing = await commands.run("sha256sum", { background: true, stdin: true });
  const data = randomBytes(200_000);
  await commands.sendStdin(summing.pid, data);
  await commands.closeStdin(summing.pid);
  assert.equal((await summing.wait()).stdout.split(" ")[0], digest(data));
});

check(EVERYWHERE, "terminals work", async (at) => {
  const { pty } = at.sbx;
  let shown = "";
  const decoder = new TextDecoder();
  const onData = (data) => void (shown += decoder.decode(data, { stream: true }));
  const handle = await pty.create({ cols: 80, rows: 24, onData });
  // What is typed is shown too, so that it must differ from what is waited for.
  const type = async (text, expected) => {
    await pty.sendInput(handle.pid, new TextEncoder().encode(text));
    await eventually(`${expected} is shown in ${shown}`, () => shown.includes(expected));
  };
  await type("stty size; echo $TERM-$((40+2))\n", "xterm-256color-42");
  assert.ok(shown.includes("24 80"), shown);
  await pty.resize(handle.pid, { cols: 132, rows: 50 });
  await type("stty size\n", "50 132");
  if (pty.connect) {
    let seen = "";
    const second = await pty.connect(handle.pid, { onData: (data) => void (seen += new TextDecoder().decode(data)) });
    await type("echo both-$((2+2))\n", "both-4");
    await eventually("the second reader sees it too", () => seen.includes("both-4"));
    await second.disconnect();
  }
  assert.equal(await pty.kill(handle.pid), true);
  await raises(e2b.CommandExitError, () => handle.wait());
  await eventually("the second kill finds nothing", async () => (await pty.kill(handle.pid)) === false);
});

// ---------------------------------------------------------------------------------- files

check(EVERYWHERE, "files of every content go up and down", async (at) => {
  const { files } = at.sbx;
  for (const text of ["", "plain\n", "\r\n☃ 😀\ttext"]) {
    const info = await files.write("dir/text", text);
    assert.deepEqual([info.name, info.path], ["text", at.on("dir/text")]);
    assert.equal(await files.read("dir/text"), text);
  }
  for (const data of [Buffer.alloc(0), Buffer.from([...Array(256).keys()]), randomBytes(3 * MIB + 1)]) {
    await files.write("data", new Uint8Array(data).buffer);
    assert.ok(data.equals(fs.readFileSync(at.on("data"))));
    assert.ok(data.equals(Buffer.from(await files.read("data", { format: "bytes" }))));
    if (!OF_AUTUMN) continue;
    await files.write("blob", new Blob([data]));
    assert.ok(data.equals(Buffer.from(await (await files.read("blob", { format: "blob" })).arrayBuffer())));
  }
  for (const name of ["missing", "dir/missing"]) await raises(e2b.NotFoundError, () => files.read(name));
  await raises(e2b.SandboxError, () => files.read("dir"));
});

check(WITH_TOKEN, "files of 64 MiB go up and down as streams", async (at) => {
  const { files } = at.sbx;
  const block = randomBytes(MIB);
  const whole = createHash("sha256");
  let left = 64;
  const source = new ReadableStream({
    pull(controller) {
      if (left-- === 0) return controller.close();
      whole.update(block);
      controller.enqueue(new Uint8Array(block));
    },
  });
  await files.write("big", source, { requestTimeoutMs: 0 });
  const expected = whole.digest("hex");
  assert.equal((await at.sbx.commands.run("sha256sum < big")).stdout.split(" ")[0], expected);
  const back = createHash("sha256");
  for await (const piece of await files.read("big", { format: "stream", requestTimeoutMs: 120_000 })) back.update(piece);
  assert.equal(back.digest("hex"), expected);
});

check(EVERYWHERE, "files go up in batches", async (at) => {
  const { files } = at.sbx;
  const names = ["plain", "a space", "ünï ☃ 😀", "plus+and&", "100%25 #x?y=z;", "it's", 'say "so"', "back\\slash"];
  const entries = names.map((name) => ({ path: `batch/${name}/${name}.txt`, data: `${name}\r\n` }));
  const infos = await files.write(entries);
  assert.deepEqual(infos.map((info) => info.path), entries.map((entry) => at.on(entry.path)));
  for (const { path: name, data } of entries) {
    assert.equal(fs.readFileSync(at.on(name), "utf8"), data);
    assert.equal(await files.read(name), data);
    await files.write(name, "alone");
    assert.equal(await files.read(name), "alone");
  }
  const many = Array.from({ length: 100 }, (_, number) => ({ path: `many/${number}`, data: new Blob([String(number)]) }));
  assert.equal((await files.write(many)).length, 100);
  assert.equal((await at.sbx.commands.run("cat many/* | wc -c")).stdout.trim(), "190");
});

check(EVERYWHERE, "files go compressed", async (at) => {
  need(sources.e2b.includes("useOctetStream"), "this SDK compresses nothing");
  const { files } = at.sbx;
  const text = "the same line\n".repeat(100_000);
  await files.write("packed", text, { gzip: true });
  assert.equal(fs.readFileSync(at.on("packed"), "utf8"), text);
  assert.equal(await files.read("packed", { gzip: true }), text);
  await files.write([{ path: "one", data: "1" }, { path: "two", data: "2" }], { gzip: true });
  await files.write("octets", "plain", { useOctetStream: true });
  assert.equal((await at.sbx.commands.run("cat one two octets")).stdout, "12plain");
});

check(EVERYWHERE, "files are described, moved and removed", async (at) => {
  const { files } = at.sbx;
  assert.deepEqual([await files.makeDir("a/b/c"), await files.makeDir("a/b/c")], [true, false]);
  await at.sbx.commands.run("printf 12345 > a/file; chmod 640 a/file; ln -s file a/link");
  // The type of a link may be that of its target.
  const kind = (entry) => (entry.symlinkTarget ? "symlink" : entry.type);
  const list = async (depth) => {
    // Old SDKs leave links out.
    const entries = (await files.list("a", { depth })).filter((entry) => OF_AUTUMN || entry.name !== "link");
    return entries.map((entry) => `${kind(entry)} ${path.relative(at.on("a"), entry.path)}`).sort();
  };
  const link = OF_AUTUMN ? ["symlink link"] : [];
  assert.deepEqual(await list(1), ["dir b", "file file", ...link]);
  assert.deepEqual(await list(2), ["dir b", "dir b/c", "file file", ...link]);
  const info = await files.getInfo("a/file");
  assert.deepEqual([info.name, info.path, info.type, info.size], ["file", at.on("a/file"), "file", 5]);
  assert.equal(info.mode & 0o777, 0o640);
  assert.ok(info.owner && info.group && info.permissions.endsWith("rw-r-----"), JSON.stringify(info));
  assert.ok(Math.abs(info.modifiedTime - fs.statSync(at.on("a/file")).mtime) < 1000);
  assert.equal((await files.rename("a/file", "new/name")).path, at.on("new/name"));
  assert.deepEqual([await files.exists("a/file"), await files.exists("~/new/name")], [false, true]);
  await files.remove("a");
  await files.remove("new/name");
  assert.ok(!fs.existsSync(at.on("a")) && !(await files.exists("new/name")));
  for (const call of [() => files.list("missing"), () => files.getInfo("missing"), () => files.rename("missing", "x")]) {
    await raises(e2b.NotFoundError, call);
  }
  if (at.mode === "host") {
    for (const [name, says] of [["/etc/passwd", at.home], [`${"../".repeat(20)}etc/passwd`, "outside"]]) {
      await raises(e2b.SandboxError, () => files.read(name), says);
      await raises(e2b.SandboxError, () => files.list(path.dirname(name)), says);
    }
  }
});

check(EVERYWHERE, "files keep metadata", async (at) => {
  need(sources.e2b.includes("X-Metadata-"), "this SDK keeps no metadata");
  const { files } = at.sbx;
  const info = await files.write("file", "text", { metadata: { Kind: "a report" } });
  assert.deepEqual(info.metadata, { kind: "a report" });
  assert.deepEqual((await files.getInfo("file")).metadata, { kind: "a report" });
});

check(EVERYWHERE, "watches see changes", async (at) => {
  const { files, commands } = at.sbx;
  await files.makeDir("w/deep");
  const events = [];
  const exits = [];
  const includeEntry = sources.e2b.includes("includeEntry");
  const options = { recursive: true, includeEntry, onExit: (error) => exits.push(error) };
  const watch = await files.watchDir("w", (event) => void events.push(event), options);
  const sees = (...expected) => {
    const seen = () => events.map((event) => `${event.type} ${event.name}`);
    return eventually(`${expected} among ${seen()}`, () => expected.every((event) => seen().includes(event)));
  };
  await commands.run("echo one > w/a; echo two > w/deep/b");
  await sees("create a", "write a", "create deep/b");
  await commands.run("mv w/a 'w/c ☃'");
  await sees("rename a", "create c ☃");
  await commands.run("rm 'w/c ☃'");
  await sees("remove c ☃");
  if (includeEntry) assert.ok(events.some((event) => event.entry?.path === at.on("w/deep/b")));
  await watch.stop();
  await eventually("the exit is told", () => exits.length === 1);
  await raises(e2b.NotFoundError, () => files.watchDir("missing", () => {}));
});

// ---------------------------------------------------------------------------------- lifecycle and access

check(HOST, "life begins and ends", async (at) => {
  const sbx = await at.create({ envs: { NAME: "value" } });
  assert.equal((await sbx.commands.run("echo $NAME")).stdout, "value\n");
  assert.equal(await sbx.isRunning(), true);
  const again = await at.Sandbox.connect(sbx.sandboxId);
  assert.equal((await again.commands.run("echo $NAME")).stdout, "value\n");
  const home = at.homeOf(sbx);
  const sleeper = await sbx.commands.run("sleep 1000", { background: true });
  const raised = raises(e2b.TimeoutError, () => sleeper.wait(), "killed or reached its end of life");
  assert.equal(await at.Sandbox.kill(sbx.sandboxId), true);
  await raised;
  assert.ok(!fs.existsSync(home));
  assert.deepEqual([await sbx.isRunning(), await at.Sandbox.kill(sbx.sandboxId)], [false, false]);
  await raises(e2b.SandboxError, () => sbx.commands.run("true"));
  await raises(e2b.SandboxError, () => sbx.files.read("x"));
  await raises(e2b.NotFoundError, () => at.Sandbox.connect(sbx.sandboxId));
  await raises(e2b.SandboxError, () => sbx.getInfo());
  const short = await at.create({ timeoutMs: 2000 });
  const running = short.commands.run("sleep 1000").then(() => "ran", (error) => error);
  await eventually("its end comes while a command runs", () => !fs.existsSync(at.homeOf(short)), 12_000);
  assert.ok((await running) instanceof Error);
});

check(HOST, "life is described and listed", async (at) => {
  const tag = randomBytes(4).toString("hex");
  const metadata = { tag, "k=&+% ☃": "a=b&c=d+e%20%2520 ü/?#" };
  const one = await at.create({ metadata, timeoutMs: 60_000 });
  for (let n = 0; n < 2; n++) await at.create({ metadata: { tag } });
  const info = await one.getInfo();
  assert.deepEqual([info.sandboxId, info.metadata, info.state], [one.sandboxId, metadata, "running"]);
  assert.ok(Math.abs(info.startedAt - Date.now()) < 10_000 && Math.abs(info.endAt - info.startedAt - 60_000) < 5000);
  await one.setTimeout(1_000_000);
  assert.ok((await one.getInfo()).endAt - Date.now() > 900_000);
  const pages = async (options) => {
    const paginator = at.Sandbox.list(options);
    const found = [];
    while (paginator.hasNext) found.push((await paginator.nextItems()).map((entry) => entry.sandboxId));
    return found;
  };
  assert.deepEqual((await pages({ query: { metadata } })).flat(), [one.sandboxId]);
  const paged = await pages({ query: { metadata: { tag }, state: ["running"] }, limit: 2 });
  assert.deepEqual([paged.map((page) => page.length), new Set(paged.flat()).size], [[2, 1], 3]);
  assert.deepEqual((await pages({ query: { metadata: { tag: "none" } } })).flat(), []);
  const metrics = await eventually("there are metrics", async () => (await one.getMetrics())[0], 30_000);
  assert.ok(metrics.cpuCount >= 1 && metrics.memTotal >= metrics.memUsed && metrics.diskTotal > 0, JSON.stringify(metrics));
});

check(HOST, "life pauses and goes on", async (at) => {
  const sbx = await at.create({});
  const pause = (options) => (sbx.pause ?? sbx.betaPause).call(sbx, options);
  await sbx.files.write("file", "kept");
  assert.deepEqual([await pause(), await pause()], [true, false]);
  assert.deepEqual([await sbx.isRunning(), (await sbx.getInfo()).state], [false, "paused"]);
  await raises(e2b.NotFoundError, () => sbx.commands.run("true"));
  const again = await at.Sandbox.connect(sbx.sandboxId, { timeoutMs: 60_000 });
  assert.equal(await again.files.read("file"), "kept");
  assert.equal((await sbx.getInfo()).state, "running");
  await pause();
  // Older releases say nothing here.
  assert.notEqual(await sbx.kill(), false);
  assert.equal(await at.Sandbox.kill(sbx.sandboxId), false);
  if (!sources.e2b.includes("onTimeout")) return;
  const short = await at.create({ timeoutMs: 2000, lifecycle: { onTimeout: "pause", autoResume: true } });
  await eventually("its timeout pauses it", async () => (await short.getInfo()).state === "paused", 12_000);
  assert.equal((await short.commands.run("echo again")).stdout, "again\n");
});

/** A root with the programs of busybox. */
function smallRoot() {
  const busybox = ["/bin/busybox", "/usr/bin/busybox"].find((name) => fs.existsSync(name));
  need(busybox, "no busybox");
  const root = path.join(SCRATCH, "small");
  for (const name of ["bin", "etc", "tmp", "proc"]) fs.mkdirSync(path.join(root, name), { recursive: true });
  fs.chmodSync(path.join(root, "tmp"), 0o1777);
  fs.copyFileSync(busybox, path.join(root, "bin/busybox"));
  for (const name of "cat chmod chown cp dirname id ls mkdir rm sh stat".split(" ")) {
    fs.symlinkSync("busybox", path.join(root, "bin", name));
  }
  return root;
}

check(HOST, "roots are built by steps", async () => {
  const { Template, Sandbox } = e2b;
  need(Template, "this SDK builds no templates");
  const more = { SBX_TEMPLATES: `small=${smallRoot()}`, SBX_UID_RANGE: `${MIDDLE_UID}-${LAST_UID}` };
  const server = await Server.start("host", more);
  try {
    server.pointTheSdkHere();
    const health = await (await fetch(`${server.url}/health`)).json();
    need(!health.isolation?.no_private_root, health.isolation?.no_private_root);
    const context = path.join(SCRATCH, "context");
    fs.mkdirSync(path.join(context, "app"), { recursive: true });
    fs.writeFileSync(path.join(context, "app/main"), "main\n");
    const template = Template({ fileContextPath: context })
      .fromImage("small:latest")
      .setEnvs({ WORD: "text" })
      .runCmd("id -un; echo $WORD; echo problem >&2")
      .setWorkdir("/work")
      .copy("app", "app")
      .runCmd("echo own > /etc/own", { user: "root" });
    const texts = [];
    await Template.build(template, "built", { onBuildLogs: (entry) => texts.push(entry.message) });
    for (const text of ["user", "text", "problem"]) assert.ok(texts.includes(text), texts.join("\n"));
    assert.equal(await Template.exists("built"), true);
    assert.equal(await Template.exists("never-built"), false);
    const sbx = await Sandbox.create("built");
    const ran = await sbx.commands.run("id -un; pwd; cat app/main /etc/own; echo $WORD");
    assert.equal(ran.stdout, "user\n/work\nmain\nown\ntext\n");
    await sbx.kill();
    const failing = Template().fromTemplate("built").runCmd("echo reason >&2; exit 4");
    await raises(Error, () => Template.build(failing, "failing"), "exit status 4: reason");
    const missing = Template().fromImage("node:22");
    await raises(Error, () => Template.build(missing, "failing"), "name=node-22");
  } finally {
    await server.end();
  }
});

check(["machine"], "life of a machine", async (at) => {
  assert.equal((await at.Sandbox.connect(at.sbx.sandboxId)).sandboxId, at.sbx.sandboxId);
  assert.deepEqual((await at.Sandbox.list().nextItems()).map((entry) => entry.sandboxId), [at.sbx.sandboxId]);
  assert.equal(await at.Sandbox.kill(at.sbx.sandboxId), false);
  await raises(e2b.SandboxError, () => at.sbx.setTimeout(5000));
  assert.equal((await at.sbx.commands.run("echo lives")).stdout, "lives\n");
});

check(EVERYWHERE, "access by host names", async (at) => {
  const host = at.sbx.getHost(3000);
  if (at.mode === "debug") assert.equal(host, "localhost:3000");
  else assert.match(host, new RegExp(`^3000-${at.sbx.sandboxId}\\.[a-z0-9.:-]+$`));
});

check(WITH_TOKEN, "access by signed URLs", async (at) => {
  const name = "a dir/☃+&.txt";
  await at.sbx.files.write(name, "signed");
  for (const options of [{}, { useSignatureExpiration: 600 }]) {
    const answer = await fetch(await at.sbx.downloadUrl(name, options));
    assert.deepEqual([answer.status, await answer.text()], [200, "signed"]);
  }
  const form = new FormData();
  form.append("file", new Blob(["up"]), "ignored");
  const target = await at.sbx.uploadUrl("up ☃", { useSignatureExpiration: 600 });
  const upload = await fetch(target, { method: "POST", body: form });
  assert.equal(upload.status, 200);
  assert.equal(await at.sbx.files.read("up ☃"), "up");
  const url = new URL(await at.sbx.downloadUrl(name, { useSignatureExpiration: 600 }));
  url.searchParams.set("path", "up ☃");
  assert.equal((await fetch(url)).status, 401);
  assert.equal((await fetch(await at.sbx.downloadUrl(name, { useSignatureExpiration: -10 }))).status, 401);
  assert.equal((await fetch(`${at.server.url}/files?path=x`)).status, 401);
});

check(WITH_TOKEN, "access needs the right key", async (at) => {
  const apiKey = `e2b_${"0".repeat(32)}`;
  await raises(e2b.AuthenticationError, () => at.Sandbox.create({ apiKey }));
  await raises(e2b.AuthenticationError, () => at.Sandbox.list({ apiKey }).nextItems());
  await raises(e2b.AuthenticationError, () => at.Sandbox.connect(at.sbx.sandboxId, { apiKey }));
  const options = { sandboxId: at.sbx.sandboxId, envdVersion: "0.6.13", envdAccessToken: "0".repeat(64) };
  const imposter = new at.Sandbox(options);
  await raises(e2b.AuthenticationError, () => imposter.commands.run("true"));
  await raises(e2b.AuthenticationError, () => imposter.files.read("x"));
  await raises(e2b.AuthenticationError, () => imposter.files.list("."));
});

check(WITH_TOKEN, "refused is what there is not", async (at) => {
  const calls = {
    createSnapshot: () => at.sbx.createSnapshot(),
    fork: () => at.sbx.fork(),
    updateNetwork: () => at.sbx.updateNetwork({ denyOut: ["10.0.0.0/8"] }),
    template: () => at.create({ template: "my-own-template" }),
    volume: () => e2b.Volume.create("name"),
    secret: () => e2b.Secret.create("name", "value"),
    network: () => at.create({ network: { maskRequestHost: "x.example", denyOut: ["0.0.0.0/0"] } }),
  };
  const lacking = ["createSnapshot", "fork", "updateNetwork"].filter((name) => !at.sbx[name]);
  lacking.push(...["Volume", "Secret"].filter((name) => !e2b[name]).map((name) => name.toLowerCase()));
  for (const [name, call] of Object.entries(calls)) {
    if (lacking.includes(name)) continue;
    const started = Date.now();
    const error = await raises(Error, call).catch((problem) => assert.fail(`${name}: ${problem.message}`));
    assert.ok(!(error instanceof TypeError), `${name}: ${error.stack}`);
    const { message } = error;
    assert.ok(message.split(" ").length >= 4 && !message.includes("{"), `${name}: no sentence: ${message}`);
    assert.ok(Date.now() - started < 3000, `${name}: it was tried again and again`);
  }
  assert.equal((await at.sbx.commands.run("echo unharmed")).stdout, "unharmed\n");
});

// ---------------------------------------------------------------------------------- code

check(EVERYWHERE, "code has results, output and errors", async (at) => {
  const run = (code, options) => at.sbx.runCode(code, options);
  await run("x = 20");
  const [out, err, results] = [[], [], []];
  const execution = await run("import sys; print('out ☃'); print('err', file=sys.stderr); x * 2 + 2", {
    onStdout: (message) => out.push(message.line),
    onStderr: (message) => err.push(message.line),
    onResult: (result) => results.push(result.text),
  });
  assert.deepEqual([execution.text, execution.results[0].isMainResult], ["42", true]);
  assert.deepEqual([out.join(""), err.join(""), results], ["out ☃\n", "err\n", ["42"]]);
  assert.deepEqual([execution.logs.stdout.join(""), execution.logs.stderr.join("")], ["out ☃\n", "err\n"]);
  assert.deepEqual((await run("{'a': [1, None]}")).results[0].json, { a: [1, null] });
  const html = (await run("class H:\n    def _repr_html_(self): return '<b>'\nH()")).results[0];
  assert.deepEqual([html.html, html.formats().includes("html")], ["<b>", true]);
  const errors = [];
  const { error } = await run("raise ValueError('no ☃')", { onError: (error) => errors.push(error.name) });
  assert.deepEqual([error.name, error.value, errors], ["ValueError", "no ☃", ["ValueError"]]);
  assert.ok(error.traceback.includes("ValueError: no ☃") && !error.traceback.includes("\x1b"));
  assert.equal((await run("import os; os.environ['NAME']", { envs: { NAME: "one" } })).text, "one");
  assert.equal((await run("os.environ.get('NAME', 'unset')")).text, "unset");
  await raises(e2b.TimeoutError, () => run("import time\nfor _ in range(1000): time.sleep(0.1)", { timeoutMs: 2000 }));
  assert.equal((await run("x", { timeoutMs: 15_000 })).text, "20");
});

check(EVERYWHERE, "code output keeps its characters", async (at) => {
  // What ends a line for some readers is not the end of an event, and this SDK decodes each piece of the answer alone.
  for (const text of ["a\u2028b\u2029c\u0085d\ff", "☃é😀"]) {
    const execution = await at.sbx.runCode(`print(${JSON.stringify(text)} * 100_000, end='')`);
    const shown = execution.logs.stdout.join("");
    const replaced = shown.split("\ufffd").length - 1;
    assert.ok(shown === text.repeat(100_000), `${shown.length} characters came, of which ${replaced} are replaced`);
  }
});

check(EVERYWHERE, "code keeps state in contexts", async (at) => {
  const { sbx } = at;
  await sbx.files.makeDir("work");
  const context = await sbx.createCodeContext({ cwd: at.on("work") });
  assert.deepEqual([context.language, context.cwd], ["python", at.on("work")]);
  await sbx.runCode("x = 1", { context });
  assert.equal((await sbx.runCode("import os; os.getcwd(), x", { context })).text, `('${at.on("work")}', 1)`);
  assert.equal((await sbx.runCode("x")).error.name, "NameError");
  const ids = async () => (await sbx.listCodeContexts()).map((one) => one.id);
  assert.ok((await ids()).includes(context.id));
  await sbx.restartCodeContext(context);
  assert.equal((await sbx.runCode("x", { context })).error.name, "NameError");
  await sbx.removeCodeContext(context.id);
  assert.ok(!(await ids()).includes(context.id));
  await raises(e2b.SandboxError, () => sbx.runCode("1", { context }));
});

check(EVERYWHERE, "code of other languages", async (at) => {
  const { sbx } = at;
  await sbx.runCode("n=41", { language: "bash" });
  assert.equal((await sbx.runCode("echo $((n+1))", { language: "bash" })).logs.stdout.join(""), "42\n");
  for (const language of ["r", "java"]) await raises(e2b.SandboxError, () => sbx.runCode("1", { language }));
  need(PATH.split(":").some((directory) => fs.existsSync(`${directory}/node`)), "there is no node");
  const execution = await sbx.runCode("const x = 20; console.log('out'); x * 2 + 2", { language: "javascript" });
  assert.deepEqual([execution.text, execution.logs.stdout], ["42", ["out\n"]]);
  assert.equal((await sbx.runCode("await Promise.resolve(x)", { language: "js" })).text, "20");
});

check(HOST, "code whose sandbox is killed raises", async (at) => {
  const sbx = await at.create();
  const printed = [];
  const code = "import time; print('begun', flush=True); time.sleep(1000)";
  const raised = raises(Error, () => sbx.runCode(code, { onStdout: (message) => printed.push(message.line) }));
  await eventually("it runs", () => printed.length > 0);
  assert.equal(await at.Sandbox.kill(sbx.sandboxId), true);
  const error = await raised;
  // Older releases do not ask whether the sandbox runs.
  if (sources.interpreter.includes("was killed")) assert.ok(error instanceof e2b.TimeoutError, error);
});

// ---------------------------------------------------------------------------------- running

async function runCheck({ name, run }, server) {
  const forCode = name.startsWith("code ");
  need(!forCode || sources.interpreter.includes("getSandboxDirectUrl"), "this SDK sends its code elsewhere");
  server.pointTheSdkHere();
  const at = new Place(server, forCode);
  at.sbx = await at.create();
  try {
    await run(at);
  } finally {
    for (const sbx of at.made) await sbx.kill();
  }
}

async function main() {
  const modes = words.filter((word) => EVERYWHERE.includes(word));
  const names = words.filter((word) => !EVERYWHERE.includes(word)).map((word) => word.replaceAll("_", " "));
  const wanted = CHECKS.flatMap((check) => check.places.map((mode) => ({ ...check, mode })))
    .filter(({ mode }) => modes.length === 0 || modes.includes(mode))
    .filter(({ name }) => names.length === 0 || names.some((word) => name.includes(word)));
  if (process.getuid() !== 0 && wanted.some(({ mode }) => mode === "host")) {
    console.log("cannot run here: host mode needs root");
    return 77;
  }
  let host;
  let passed = 0;
  const failures = [];
  for (const check of wanted) {
    const name = `${check.name} (${check.mode})`;
    const guard = setTimeout(() => {
      console.log(`FAIL ${name}: not over after ${PATIENCE_PER_CHECK} ms`);
      leave(1);
    }, PATIENCE_PER_CHECK);
    const started = Date.now();
    try {
      if (check.mode === "host") {
        host ??= await Server.start("host");
        await runCheck(check, host);
      } else {
        const server = await Server.start(check.mode);
        try {
          await runCheck(check, server);
        } finally {
          await server.end();
        }
      }
      passed += 1;
      console.log(`ok   ${name} (${((Date.now() - started) / 1000).toFixed(2)} s)`);
    } catch (error) {
      if (error instanceof Skipped) console.log(`SKIPPED ${name}: ${error.message}`);
      else {
        failures.push(name);
        console.log(`FAIL ${name}\n${error.stack}`);
      }
    }
    clearTimeout(guard);
  }
  await host?.end().catch((error) => failures.push(`the host ends well: ${error.message}`));
  for (const name of failures) console.log(`failed: ${name}`);
  console.log(`e2b-${version}: ${passed} passed, ${failures.length} failed`);
  return failures.length || !passed ? 1 : 0;
}

function leave(status) {
  for (const server of running) server.kill("SIGKILL");
  fs.rmSync(SCRATCH, { recursive: true, force: true });
  process.exit(status);
}

// A stream that a failed check has left may fail later; that check has been reported.
process.on("unhandledRejection", (error) => console.log(`later: ${error?.message}`));
leave(await main());
