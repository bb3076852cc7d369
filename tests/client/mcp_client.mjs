// Has the official MCP clients for TypeScript do real work with a server: the client of both eras, in each of them,
// and that of the former one.
//
// usage: MCP_NODE_MODULES=DIR node mcp_client.mjs BINARY [WORD...]
//
// The last line is "N passed, M failed". Exit status 77 means that it cannot run here.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync, rmSync, chmodSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { pathToFileURL } from "node:url";

const binary = resolve(process.argv[2]);
const words = process.argv.slice(3);
const TOKEN = "mcp-client-token";
const require = createRequire(join(process.env.MCP_NODE_MODULES, "x.cjs"));
const load = (name) => import(pathToFileURL(require.resolve(name)).href);

let present, former, formerTransport;
try {
  present = await load("@modelcontextprotocol/client");
  former = await load("@modelcontextprotocol/sdk/client/index.js");
  formerTransport = await load("@modelcontextprotocol/sdk/client/streamableHttp.js");
} catch (error) {
  console.log(`cannot run here: ${error}`);
  process.exit(77);
}

const NAMES = ["run", "start", "output", "input", "stop", "processes", "read_file", "write_file", "edit_file",
  "list_files", "glob", "grep", "ports"];

async function startServer(isHost) {
  const scratch = mkdtempSync(join(tmpdir(), "sbx-mcp-"));
  chmodSync(scratch, 0o711);
  const env = { PATH: process.env.PATH, SBX_PORT: "0", SBX_BIND: "127.0.0.1", SBX_TOKEN: TOKEN };
  if (isHost) Object.assign(env, { SBX_HOST_MODE: "1", SBX_HOMES_DIR: `${scratch}/homes`, SBX_UID_RANGE: process.env.SBX_UID_RANGE });
  const child = spawn(binary, { cwd: scratch, env, stdio: ["ignore", "ignore", "pipe"] });
  const [line] = await once(child.stderr, "data");
  const url = `http://${String(line).split("listening on ")[1].split(" ")[0]}`;
  child.stderr.resume();
  let token = TOKEN;
  if (isHost) {
    const reply = await fetch(`${url}/v1/sandboxes`, { method: "POST", headers: { "X-Sandbox-Token": TOKEN } });
    token = (await reply.json()).sandboxes[0].token;
  }
  const close = async () => {
    child.kill();
    await once(child, "exit");
    rmSync(scratch, { recursive: true, force: true });
  };
  return { url, token, close };
}

async function connect(server, era) {
  const url = new URL(`${server.url}/mcp`);
  const options = { requestInit: { headers: { Authorization: `Bearer ${server.token}` } } };
  const info = { name: "test", version: "1.0.0" };
  if (era === "1.x") {
    const client = new former.Client(info);
    await client.connect(new formerTransport.StreamableHTTPClientTransport(url, options));
    return client;
  }
  const client = new present.Client(info, era === "present" ? { versionNegotiation: { mode: "auto" } } : {});
  await client.connect(new present.StreamableHTTPClientTransport(url, options));
  const version = client.getNegotiatedProtocolVersion();
  assert.equal(version, era === "present" ? "2026-07-28" : "2025-11-25");
  return client;
}

const checks = {
  async tools_are_listed(client) {
    const { tools } = await client.listTools();
    assert.deepEqual(tools.map((tool) => tool.name), NAMES);
  },
  // Both clients compare structured content with the schema of the tool.
  async commands_run(client, call) {
    const ran = await call("run", { cmd: "echo out; echo err >&2; exit 3" });
    assert.deepEqual([ran.stdout, ran.stderr, ran.exit_code], ["out\n", "err\n", 3]);
    const long = await call("run", { cmd: "seq 100000" });
    assert.ok(long.truncated && [...long.stdout].length <= 30000);
  },
  async errors_are_results(client) {
    const result = await client.callTool({ name: "read_file", arguments: { path: "none" } });
    assert.ok(result.isError);
    assert.equal(result.structuredContent.code, "not_found");
    await assert.rejects(client.callTool({ name: "no_such_tool", arguments: {} }), /no_such_tool/);
  },
  async every_result_fits_its_schema(client, call) {
    await call("write_file", { path: "a.py", content: "x = 1\n" });
    await call("read_file", { path: "a.py" });
    await call("edit_file", { path: "a.py", edits: [{ old: "1", new: "2" }] });
    await call("list_files", { path: "." });
    await call("glob", { pattern: "*.py" });
    await call("grep", { pattern: "x" });
    await call("ports", {});
    const { id } = await call("start", { cmd: "cat", tag: "t" });
    await call("input", { id, text: "typed\n" });
    assert.equal((await call("output", { id, wait: 20 })).stdout, "typed\n");
    await call("stop", { id });
    await call("processes", {});
  },
  async progress_is_told(client) {
    const told = [];
    const onprogress = (progress) => told.push(progress);
    const request = { name: "run", arguments: { cmd: "for n in 1 2 3; do echo $n; sleep 0.2; done" } };
    const result = await (isFormer(client) ? client.callTool(request, undefined, { onprogress }) : client.callTool(request, { onprogress }));
    assert.equal(result.structuredContent.stdout, "1\n2\n3\n");
    assert.equal(told.map(({ message }) => message).join(""), "1\n2\n3\n");
  },
  async cancelling_kills_the_command(client, call) {
    const controller = new AbortController();
    const request = { name: "run", arguments: { cmd: "sleep 600", env: {} } };
    const options = { signal: controller.signal };
    const running = isFormer(client) ? client.callTool(request, undefined, options) : client.callTool(request, options);
    const sleeping = async () => (await call("processes", {})).processes.filter((entry) => entry.running && entry.cmd === "sleep 600");
    while ((await sleeping()).length === 0) await new Promise((done) => setTimeout(done, 50));
    controller.abort(new Error("enough"));
    await assert.rejects(running);
    if (!isPresent(client)) {
      // In that era clients tell of it by a notification and leave the connection open: stop ends the command.
      for (const { id } of await sleeping()) await call("stop", { id });
    }
    for (const until = Date.now() + 20000; (await sleeping()).length > 0;) {
      assert.ok(Date.now() < until, "the command is not killed");
      await new Promise((done) => setTimeout(done, 50));
    }
  },
  async calls_run_side_by_side(client, call) {
    const ran = await Promise.all([...Array(20).keys()].map((n) => call("run", { cmd: `sleep 0.5; echo ${n}` })));
    assert.deepEqual(ran.map(({ stdout }) => stdout), [...Array(20).keys()].map((n) => `${n}\n`));
  },
};

const isFormer = (client) => client instanceof former.Client;
const isPresent = (client) => !isFormer(client) && client.getNegotiatedProtocolVersion() === "2026-07-28";

let passed = 0, failed = 0;
for (const isHost of process.getuid() === 0 ? [false, true] : [false]) {
  const server = await startServer(isHost);
  for (const era of ["present", "former", "1.x"]) {
    for (const [name, check] of Object.entries(checks)) {
      const title = `${name} (${era}${isHost ? ", host" : ""})`;
      if (words.length && !words.some((word) => title.includes(word))) continue;
      const client = await connect(server, era);
      const call = async (tool, args) => {
        const result = await client.callTool({ name: tool, arguments: args });
        assert.ok(!result.isError, JSON.stringify(result));
        return result.structuredContent;
      };
      try {
        await check(client, call);
        passed += 1;
        console.log(`ok      ${title}`);
      } catch (error) {
        failed += 1;
        console.log(`FAILED  ${title}\n${error.stack}`);
      }
      await client.close();
    }
  }
  await server.close();
}
console.log(`${passed} passed, ${failed} failed`);
process.exit(failed ? 1 : 0);
