// Hostile pages in a real browser: what servers in sandboxes and other sites show never works with the server in the name
// of whoever looks at it. Debian's Chromium, driven by Playwright.
//
// The proof of an attack is a command: every page tries to run `touch`, by each way that a browser offers.
//
// usage: CONSOLE_NODE_MODULES=DIR node hostile_pages.mjs BINARY [WORD...]
//
// The last line is "N passed, M failed". Exit status 77 means that it cannot run here.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { chmodSync, existsSync, mkdtempSync, rmSync } from "node:fs";
import http from "node:http";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";

const binary = resolve(process.argv[2]);
const words = process.argv.slice(3);
const CHROMIUM = "/usr/bin/chromium";
const TOKEN = "operator-token";
/** Most milliseconds until something appears. */
const PATIENCE = 20_000;

const require = createRequire(join(process.env.CONSOLE_NODE_MODULES, "x.cjs"));
if (!existsSync(CHROMIUM)) {
  console.log(`cannot run here: there is no ${CHROMIUM}`);
  process.exit(77);
}
const { chromium } = require("playwright-core");

// --- servers

/** Starts the program; without a token unless the environment has one. */
async function startServer(closers, environment = {}) {
  const scratch = mkdtempSync(join(tmpdir(), "sbx-pages-"));
  chmodSync(scratch, 0o711);
  const env = { PATH: process.env.PATH, SBX_PORT: "0", SBX_HOMES_DIR: `${scratch}/homes`, SBX_UID_RANGE: "64860-64879", ...environment };
  const child = spawn(binary, { cwd: scratch, env, stdio: ["ignore", "ignore", "pipe"] });
  closers.push(async () => {
    if (child.exitCode === null && child.signalCode === null) {
      child.kill();
      await once(child, "exit");
    }
    rmSync(scratch, { recursive: true, force: true });
  });
  let said = "";
  for await (const part of child.stderr) {
    said += part;
    if (said.includes("listening on ")) break;
  }
  child.stderr.resume?.();
  const port = Number(/listening on [\d.]+:(\d+)/.exec(said)[1]);
  const headers = environment.SBX_TOKEN ? { "X-Sandbox-Token": environment.SBX_TOKEN } : {};
  return {
    port, url: `http://127.0.0.1:${port}`, mark: join(scratch, "mark"),
    async api(method, path, body) {
      const answer = await fetch(`http://127.0.0.1:${port}${path}`, { method, headers, body: typeof body === "object" ? JSON.stringify(body) : body });
      assert.ok(answer.ok, `${method} ${path}: ${answer.status} ${await answer.clone().text()}`);
      return answer.json();
    },
  };
}

/** Starts a web server: paths to [type, text, more headers]. */
async function serve(closers, pages) {
  const server = http.createServer((request, response) => {
    const [type, text, more] = pages[request.url.split("?")[0]] ?? ["text/plain", ""];
    response.writeHead(200, { "Content-Type": type, ...more });
    response.end(text);
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  closers.push(() => {
    server.closeAllConnections();
    server.close();
  });
  return server.address().port;
}

/** A proxy that adds the server's token to what it passes on, as operators put one before it. */
async function addToken(closers, port) {
  const server = http.createServer((request, response) => {
    const headers = { ...request.headers, "x-sandbox-token": TOKEN };
    const passed = http.request({ port, host: "127.0.0.1", method: request.method, path: request.url, headers }, (answer) => {
      response.writeHead(answer.statusCode, answer.headers);
      answer.pipe(response);
    });
    passed.on("error", () => response.destroy());
    request.pipe(passed);
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  closers.push(() => {
    server.closeAllConnections();
    server.close();
  });
  return `http://127.0.0.1:${server.address().port}`;
}

/** A page that runs commands at `url` by each way that a browser offers, and then says so in its title. */
const attack = (url, mark, more = "") => `<!doctype html><title>waiting</title><iframe name=hidden></iframe><script>
const command = JSON.stringify({ cmd: ["touch", ${JSON.stringify(mark)}] });
(async () => {
  document.title = "running";
  const told = [];
  for (const mode of ["cors", "no-cors", "same-origin"]) {
    for (const type of ["application/json", "text/plain"]) {
      await fetch(${JSON.stringify(url)} + "/v1/exec", { method: "POST", mode, headers: { "Content-Type": type }, body: command }).then((answer) => told.push(answer.type + answer.status), () => told.push("failed"));
    }
  }
  navigator.sendBeacon?.(${JSON.stringify(url)} + "/v1/exec", command);
  const form = document.createElement("form");
  Object.assign(form, { method: "post", enctype: "text/plain", target: "hidden", action: ${JSON.stringify(url)} + "/v1/exec" });
  const field = document.createElement("input");
  // A body {"cmd":[...],"x":"="} in the form of text/plain.
  Object.assign(field, { name: command.slice(0, -1) + ',"x":"', value: '"}' });
  form.append(field);
  document.body.append(form);
  form.submit();
  let worker = "none";
  try { worker = (await navigator.serviceWorker.register("sw.js", { scope: "/" })).scope; } catch (error) { worker = error.name; }
  ${more}
  await new Promise((done) => setTimeout(done, 500));
  document.title = "done at " + self.origin + ", worker " + worker + ", told " + told;
})();
</script>`;

const WORKER = ["text/javascript", "self.addEventListener('install', () => self.skipWaiting())", { "Service-Worker-Allowed": "/" }];

const finished = (page) => page.waitForFunction(() => document.title.startsWith("done"), null, { timeout: PATIENCE }).then(() => page.title());

/** Whether a page of the console's address is under somebody else's control. */
async function assertNoWorker(context, url) {
  const page = await context.newPage();
  await page.goto(`${url}/console`);
  const workers = await page.evaluate(async () => (await navigator.serviceWorker.getRegistrations()).map((found) => found.scope));
  assert.deepEqual(workers, []);
  await page.close();
}

// --- what is checked

const checks = {
  async a_server_inside_that_is_opened_by_its_address({ closers, context }) {
    const server = await startServer(closers);
    const port = await serve(closers, { "/": ["text/html", attack(server.url, server.mark)], "/sw.js": WORKER });
    const page = await context.newPage();
    await page.goto(`${server.url}/v1/proxy/${port}/?a=b`);
    // The page of the server, and nothing of the one inside.
    assert.equal(await page.title(), "Open a port");
    await page.getByRole("button", { name: "Open" }).click();
    const said = await finished(page);
    assert.match(page.url(), /\/t\/[0-9a-f]{64}\/\?a=b$/);
    assert.match(said, /^done at null, worker \w*Error/);
    assert.ok(!existsSync(server.mark), said);
    await assertNoWorker(context, server.url);
  },

  async a_server_inside_in_a_frame_and_as_a_script({ closers, context }) {
    const server = await startServer(closers);
    const inside = await serve(closers, { "/": ["text/html", attack(server.url, server.mark)], "/sw.js": WORKER, "/x.js": ["text/javascript", "parent.document.title = 'loaded'"] });
    const tags = `<!doctype html><title>outer</title><iframe src="${server.url}/v1/proxy/${inside}/"></iframe><object data="${server.url}/v1/proxy/${inside}/"></object>
      <embed src="${server.url}/v1/proxy/${inside}/"><script src="${server.url}/v1/proxy/${inside}/x.js"></script>`;
    const outer = await serve(closers, { "/": ["text/html", tags] });
    const page = await context.newPage();
    await page.goto(`http://127.0.0.1:${outer}/`, { waitUntil: "load" });
    await page.goto(`http://localhost:${outer}/`, { waitUntil: "load" });
    assert.equal(await page.title(), "outer");
    for (const frame of page.frames().slice(1)) assert.ok(!(await frame.content().catch(() => "")).includes(server.mark), frame.url());
    assert.ok(!existsSync(server.mark));
  },

  async a_page_behind_a_ticket_that_goes_to_the_port({ closers, context }) {
    const server = await startServer(closers);
    const pages = { "/sw.js": WORKER };
    const port = await serve(closers, pages);
    pages["/"] = ["text/html", `<!doctype html><title>at a ticket</title><script>location.href = "/v1/proxy/${port}/attack"</script>`];
    pages["/attack"] = ["text/html", attack(server.url, server.mark)];
    const { path } = await server.api("POST", "/v1/tickets", { port });
    const page = await context.newPage();
    await page.goto(server.url + path);
    await page.waitForURL(`${server.url}/v1/proxy/${port}/attack`);
    assert.equal(await page.title(), "Open a port");
    // It cannot press the button either: a form of its own says where it comes from.
    pages["/"] = ["text/html", `<!doctype html><form method=post action="/v1/proxy/${port}/attack"></form><script>document.forms[0].submit()</script>`];
    const answered = page.waitForResponse((answer) => answer.request().method() === "POST");
    await page.goto(server.url + path).catch(() => {});
    assert.equal((await answered).status(), 403);
    assert.ok(!existsSync(server.mark));
    await assertNoWorker(context, server.url);
  },

  /** A page of the sandbox that answers a fetch is cached, and is no page of the server for that. */
  async an_answer_that_a_browser_has_kept({ closers, context }) {
    const server = await startServer(closers);
    const text = attack(server.url, server.mark);
    const port = await serve(closers, { "/": ["text/html", text, { "Cache-Control": "max-age=1000" }], "/sw.js": WORKER });
    const page = await context.newPage();
    await page.goto(`${server.url}/console`);
    const target = `/v1/proxy/${port}/`;
    assert.equal(await page.evaluate(async (at) => (await (await fetch(at, { cache: "force-cache" })).text()).length, target), text.length);
    await page.evaluate((at) => { location.href = at; }, target);
    await page.waitForURL(server.url + target);
    await until("a page", async () => (await page.title()) === "Open a port" || (await page.title()).startsWith("done"));
    const title = await page.title();
    assert.ok(title === "Open a port" || title.startsWith("done at null"), title);
    assert.ok(!existsSync(server.mark));
  },

  async pages_of_other_sites_at_a_server_without_a_token({ closers, context }) {
    for (const environment of [{}, { SBX_INSECURE: "1" }]) {
      const server = await startServer(closers, environment);
      const port = await serve(closers, { "/": ["text/html", attack(server.url, server.mark)], "/sw.js": ["text/plain", ""] });
      for (const host of ["localhost", "127.0.0.1", "evil.localhost"]) {
        const page = await context.newPage();
        await page.goto(`http://${host}:${port}/`);
        const said = await finished(page);
        assert.ok(!existsSync(server.mark), `${host}: ${said}`);
      }
    }
  },

  async pages_of_other_sites_behind_a_proxy_that_adds_the_token({ closers, context }) {
    const server = await startServer(closers, { SBX_TOKEN: TOKEN });
    const url = await addToken(closers, server.port);
    const port = await serve(closers, { "/": ["text/html", attack(url, server.mark)], "/sw.js": WORKER });
    const page = await context.newPage();
    await page.goto(`${url}/v1/proxy/${port}/`);
    assert.equal(await page.title(), "Open a port");
    await page.getByRole("button", { name: "Open" }).click();
    const said = await finished(page);
    assert.match(said, /^done at null/);
    await assertNoWorker(context, url);
    const other = await context.newPage();
    await other.goto(`http://127.0.0.1:${port}/`);
    await finished(other);
    assert.ok(!existsSync(server.mark), said);
  },

  async a_file_as_a_script_and_an_image({ closers, context }) {
    const server = await startServer(closers);
    await server.api("PUT", `/v1/files/write?path=${server.mark}.js`, "window.SECRET = 1");
    const read = `${server.url}/v1/files/read?path=${server.mark}.js`;
    const tags = `<!doctype html><script src="${read}"></script><link rel=stylesheet href="${read}"><img src="${read}">`;
    const port = await serve(closers, { "/": ["text/html", tags] });
    for (const host of ["localhost", "127.0.0.1"]) {
      const page = await context.newPage();
      await page.goto(`http://${host}:${port}/`, { waitUntil: "load" });
      assert.equal(await page.evaluate(() => window.SECRET), undefined, host);
    }
  },

  async a_page_of_a_sandbox_that_is_gone({ closers, context }) {
    const server = await startServer(closers, { SBX_HOST_MODE: "1", SBX_INSECURE: "1" });
    const [gone, other] = (await server.api("POST", "/v1/sandboxes", { count: 2 })).sandboxes;
    const script = `setInterval(async () => { try {
      const answer = await fetch("/v1/sandboxes/${other.id}/exec", { method: "POST", body: '{"cmd":["touch","mark"]}' });
      document.title = answer.status + " " + await answer.text();
    } catch {} }, 100)`;
    const answer = `HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n<!doctype html><title>first</title><script>${script}</script>`;
    const program = `import os, socket
s = socket.socket(socket.AF_UNIX); s.bind(os.environ["SBX_PROXY_DIR"] + "/8000.sock"); s.listen(8)
while True:
    c, _ = s.accept(); d = c.recv(65536)
    c.sendall(${JSON.stringify(answer)}.encode() if d.startswith(b"GET / ") else b"HTTP/1.1 404 No\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n"); c.close()`;
    await server.api("POST", `/v1/sandboxes/${gone.id}/processes`, { cmd: ["python3", "-c", program] });
    await server.api("GET", `/v1/sandboxes/${gone.id}/ports/8000/wait?timeout=20`);
    const page = await context.newPage();
    await page.goto(`http://8000-${gone.id}.localhost:${server.port}/`);
    await until("an answer of its own server", async () => (await page.title()).startsWith("404"));
    await server.api("DELETE", `/v1/sandboxes/${gone.id}`);
    await until("an answer of this server", async () => !(await page.title()).startsWith("404"));
    await sleep(500);
    assert.match(await page.title(), /^502 .*was not found/);
    const { entries } = await server.api("GET", `/v1/sandboxes/${other.id}/files/list?path=.`);
    assert.ok(!entries.some((entry) => entry.name === "mark"), JSON.stringify(entries));
  },

  async cookies_of_one_port_at_another({ closers, context }) {
    const server = await startServer(closers);
    const seen = [];
    const servers = [];
    for (const name of ["one", "two"]) {
      const inside = http.createServer((request, response) => {
        seen.push([name, request.headers.cookie ?? ""]);
        response.writeHead(200, { "Set-Cookie": [`${name}=1; Path=/`, `${name}-plain=1`, `${name}-wide=1; Path=/v1; Domain=127.0.0.1`] });
        response.end();
      });
      inside.listen(0, "127.0.0.1");
      await once(inside, "listening");
      closers.push(() => {
        inside.closeAllConnections();
        inside.close();
      });
      servers.push(inside.address().port);
    }
    const page = await context.newPage();
    await page.goto(`${server.url}/console`);
    const ask = (port, rest) => page.evaluate((target) => fetch(target).then((answer) => answer.text()), `/v1/proxy/${port}${rest}`);
    for (const rest of ["", "/", "/deep/page"]) for (const port of servers) await ask(port, rest);
    seen.length = 0;
    for (const port of servers) await ask(port, "/deep/page");
    for (const [name, cookies] of seen) {
      const other = name === "one" ? "two" : "one";
      assert.ok(cookies.includes(`${name}=1`) && cookies.includes(`${name}-plain=1`), `${name}: ${cookies}`);
      assert.ok(!cookies.includes(other), `${name}: ${cookies}`);
    }
    assert.equal(await page.evaluate(() => document.cookie), "");
  },
};

async function until(what, condition) {
  const end = Date.now() + PATIENCE;
  while (!(await condition())) {
    if (Date.now() > end) assert.fail(`${what} did not happen`);
    await sleep(50);
  }
}

// --- the runner

const FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"];
const browser = await chromium.launch({ executablePath: CHROMIUM, args: FLAGS });
let passed = 0;
let failed = 0;
for (const [name, action] of Object.entries(checks)) {
  if (words.length && !words.some((word) => name.includes(word))) continue;
  const context = await browser.newContext();
  context.setDefaultTimeout(PATIENCE);
  const closers = [];
  const begun = Date.now();
  let failure = null;
  try {
    await action({ closers, context });
  } catch (error) {
    failure = error;
  }
  await context.close();
  for (const close of closers.reverse()) await close();
  console.log(`${failure ? "FAILED" : "ok"} ${name} (${((Date.now() - begun) / 1000).toFixed(1)} s)`);
  if (failure) {
    console.log(failure.stack);
    failed += 1;
  } else passed += 1;
}
await browser.close();
console.log(`${passed} passed, ${failed} failed`);
process.exit(failed ? 1 : 0);
