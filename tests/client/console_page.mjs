// The console in a real browser: Debian's Chromium, driven by Playwright. Each check has a page of its own, and fails
// besides its own assertions if the page makes a request to anywhere else, or anything is wrong in the browser's
// console.
//
// usage: CONSOLE_NODE_MODULES=DIR node console_page.mjs BINARY [WORD...]
//
// With SBX_PICTURES=DIR the check `pictures` writes those of docs/console.md there. The last line is "N passed, M
// failed". Exit status 77 means that it cannot run here.

import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import { createCipheriv, pbkdf2Sync } from "node:crypto";
import { once } from "node:events";
import { chmodSync, copyFileSync, existsSync, mkdirSync, mkdtempSync, readFileSync, rmSync, statSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import net from "node:net";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { crc32, deflateSync } from "node:zlib";

const binary = resolve(process.argv[2]);
const words = process.argv.slice(3);
const TOKEN = "console-token";
const CHROMIUM = "/usr/bin/chromium";
/** Most milliseconds until something appears. */
const PATIENCE = 20_000;

const require = createRequire(join(process.env.CONSOLE_NODE_MODULES, "x.cjs"));
if (!existsSync(CHROMIUM)) {
  console.log(`cannot run here: there is no ${CHROMIUM}`);
  process.exit(77);
}
const { chromium } = require("playwright-core");

// --- the server, and a way to it that can break

class Server {
  static async start({ isHost = false, port = 0, scratch = null, environment = {} } = {}) {
    const server = new Server();
    server.scratch = scratch ?? mkdtempSync(join(tmpdir(), "sbx-console-"));
    chmodSync(server.scratch, 0o711);
    server.files = join(server.scratch, "files");
    mkdirSync(server.files, { recursive: true });
    const env = { PATH: process.env.PATH, SBX_PORT: String(port), SBX_BIND: "127.0.0.1", SBX_TOKEN: TOKEN, PS1: "$ ", LANG: "C.UTF-8", ...environment };
    if (isHost) Object.assign(env, { SBX_HOST_MODE: "1", SBX_HOMES_DIR: `${server.scratch}/homes`, SBX_UID_RANGE: process.env.SBX_UID_RANGE });
    server.child = spawn(binary, { cwd: server.files, env, stdio: ["ignore", "ignore", "pipe"] });
    let said = "";
    for await (const part of server.child.stderr) {
      said += part;
      if (said.includes("listening on ")) break;
    }
    server.child.stderr.resume?.();
    server.port = Number(/listening on 127\.0\.0\.1:(\d+)/.exec(said)[1]);
    server.url = `http://127.0.0.1:${server.port}`;
    return server;
  }

  async api(method, path, body, token = TOKEN) {
    const headers = { "X-Sandbox-Token": token };
    const answer = await fetch(this.url + path, { method, headers, body: typeof body === "string" || body === undefined ? body : JSON.stringify(body) });
    const text = await answer.text();
    assert.ok(answer.ok, `${method} ${path}: ${answer.status} ${text}`);
    try {
      return JSON.parse(text);
    } catch {
      return text;
    }
  }

  async kill(signal = "SIGTERM") {
    if (this.child.exitCode !== null || this.child.signalCode !== null) return;
    this.child.kill(signal);
    await once(this.child, "exit");
  }

  async close() {
    await this.kill();
    rmSync(this.scratch, { recursive: true, force: true });
  }
}

/** Forwards connections to a server until it is cut. */
class Line {
  #sockets = new Set();
  #isCut = false;

  static async to(port) {
    const line = new Line();
    line.server = net.createServer((client) => {
      if (line.#isCut) return client.destroy();
      const upstream = net.connect(port, "127.0.0.1");
      for (const socket of [client, upstream]) {
        line.#sockets.add(socket);
        socket.on("error", () => {});
        socket.on("close", () => {
          line.#sockets.delete(socket);
          client.destroy();
          upstream.destroy();
        });
      }
      client.pipe(upstream);
      upstream.pipe(client);
    });
    line.server.listen(0, "127.0.0.1");
    await once(line.server, "listening");
    line.url = `http://127.0.0.1:${line.server.address().port}`;
    return line;
  }

  cut() {
    this.#isCut = true;
    for (const socket of this.#sockets) socket.destroy();
  }

  mend() {
    this.#isCut = false;
  }

  close() {
    this.cut();
    this.server.close();
  }
}

async function until(what, condition, patience = PATIENCE) {
  const end = Date.now() + patience;
  for (;;) {
    const value = await condition();
    if (value) return value;
    if (Date.now() > end) assert.fail(`${what} did not happen`);
    await sleep(50);
  }
}

// --- the browser

const FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--font-render-hinting=none"];
let browser;

/**
 * Opens the console of a server at an address in it, signed in. `expected` are parts of messages in the browser's
 * console that belong to the check, such as the 409 that it provokes.
 */
async function visit(checking, server, address = "#/", { expected = [], token = TOKEN, base = server.url, ...options } = {}) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 800 }, colorScheme: "dark", acceptDownloads: true, ...options });
  context.setDefaultTimeout(PATIENCE);
  // That of a page that hangs is closed with the browser.
  checking.closers.push(() => Promise.race([context.close(), sleep(5000)]));
  const page = await context.newPage();
  const wrong = checking.wrong;
  const watch = (watched) => {
    watched.on("request", (request) => {
      if (!request.url().startsWith(base) && !/^(data|blob):/.test(request.url())) wrong.push(`a request to ${request.url()}`);
    });
    watched.on("pageerror", (error) => wrong.push(`an error in the page: ${error.stack ?? error}`));
    watched.on("dialog", (dialog) => {
      wrong.push(`a dialog: ${dialog.message()}`);
      dialog.dismiss();
    });
  };
  watch(page);
  page.on("console", (message) => {
    if (!["error", "warning"].includes(message.type())) return;
    // A page may be left before its terminal is there.
    const usual = [...expected, "WebSocket is closed before the connection is established"];
    if (!usual.some((part) => message.text().includes(part))) wrong.push(`in the browser's console: ${message.text()} (${message.location().url})`);
  });
  if (token !== null) {
    // As a tab that was here before, and then to where the check begins.
    await page.goto(`${base}/console`);
    await page.evaluate((given) => sessionStorage.setItem("sbx-token", given), token);
    await page.reload();
    await page.waitForSelector(".sections");
    await go(page, address);
  } else await page.goto(`${base}/console${address}`);
  return page;
}

/** Opens Chromium as somebody who has let it save the token in the form that signs in, perhaps beside a `user`. */
async function withSavedToken(checking, server, user) {
  const profile = join(server.scratch, `profile-${user}`);
  const launch = () => chromium.launchPersistentContext(profile, { executablePath: CHROMIUM, args: FLAGS });
  const saved = join(profile, "Default", "Login Data");
  const fresh = await launch();
  await until("a place for passwords", () => existsSync(saved));
  await fresh.close();
  // As Chromium seals it where the system keeps no key for it.
  const seal = createCipheriv("aes-128-cbc", pbkdf2Sync("peanuts", "saltysalt", 1, 16, "sha1"), " ".repeat(16));
  const sealed = Buffer.concat([Buffer.from("v10"), seal.update(TOKEN), seal.final()]).toString("hex");
  const insert = `
import sqlite3, sys
database = sqlite3.connect(sys.argv[1])
known = {"origin_url": sys.argv[2] + "/console", "signon_realm": sys.argv[2] + "/", "username_value": sys.argv[3], "password_element": "token", "password_value": bytes.fromhex(sys.argv[4])}
columns = [(name, kind) for _, name, kind, *_ in database.execute("pragma table_info(logins)") if name != "id"]
values = [known.get(name, {"INTEGER": 0, "BLOB": b""}.get(kind, "")) for name, kind in columns]
database.execute(f"insert into logins({','.join(name for name, _ in columns)}) values({','.join('?' * len(values))})", values)
database.commit()`;
  execFileSync("python3", ["-c", insert, saved, server.url, user, sealed]);
  const context = await launch();
  context.setDefaultTimeout(PATIENCE);
  checking.closers.push(() => context.close());
  return context.pages()[0];
}

const go = (page, address) => page.evaluate((hash) => { location.hash = hash; }, address);
const text = (page, selector) => page.locator(selector).first().innerText();
const sees = (page, selector, part) => page.locator(selector, { hasText: part }).first().waitFor();

/** Waits until an SVG is drawn that is as wide as `width`. */
const seesDrawing = (page, width) => until("the drawing", () => page.frameLocator(".picture iframe").last().locator("img").evaluate((image, wide) => image.naturalWidth === wide, width));

/** The screen of the terminal as text. */
const screen = (page) => page.evaluate(() => [...document.querySelectorAll(".xterm-rows > div")].map((row) => row.textContent.trimEnd()).join("\n"));

/** Notes the longest time between two frames of the page from now on, in milliseconds, in `longestGap`. */
const watchFrames = (page) => page.evaluate(() => {
  globalThis.longestGap = 0;
  let last = performance.now();
  const frame = (now) => {
    globalThis.longestGap = Math.max(globalThis.longestGap, now - last);
    last = now;
    requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
});

/** Fails unless the page goes on: its thread answers, and it draws. */
async function goesOn(page, what) {
  const answer = page.evaluate(() => new Promise((done) => requestAnimationFrame(() => setTimeout(() => done("drawn"), 0))));
  const outcome = await Promise.race([answer.catch((error) => error.message), sleep(PATIENCE).then(() => "the page stands still")]);
  assert.equal(outcome, "drawn", what);
}

/** Runs Python in the last cell of the notebook, and returns the element of its output when it has ended and is drawn. */
async function runCell(page, code) {
  const cell = page.locator(".cell").nth(await page.locator(".cell").count() - 1);
  await cell.getByLabel("Code").fill(code);
  await page.keyboard.press("Shift+Enter");
  const what = code.slice(0, 200);
  await Promise.race([cell.locator(".foot [role=status]", { hasText: / m?s/ }).waitFor({ timeout: 3 * PATIENCE }), sleep(3 * PATIENCE)]);
  await goesOn(page, what);
  await cell.locator(".foot [role=status]", { hasText: / m?s/ }).waitFor();
  return cell.locator(".output");
}

/** Something that shows itself as `value`, an expression of Python, in a form such as `html`. */
const shows = (form, value) => `type("Shown", (), {"_repr_${form}_": lambda self: ${value}, "__repr__": lambda self: "plain"})()`;

/** A PNG of this size, all of it one colour. */
function png(width, height) {
  const chunk = (kind, data) => {
    const body = Buffer.concat([Buffer.from(kind), data]);
    const part = Buffer.alloc(body.length + 8);
    part.writeUInt32BE(data.length);
    body.copy(part, 4);
    part.writeUInt32BE(crc32(body), body.length + 4);
    return part;
  };
  const head = Buffer.alloc(13);
  head.writeUInt32BE(width);
  head.writeUInt32BE(height, 4);
  head[8] = 1;
  return Buffer.concat([Buffer.from("\x89PNG\r\n\x1a\n", "latin1"), chunk("IHDR", head), chunk("IDAT", deflateSync(Buffer.alloc((Math.ceil(width / 8) + 1) * height))), chunk("IEND", Buffer.alloc(0))]);
}

/** What `make` returns for each number below `count`, joined. */
const times = (count, make) => Array.from({ length: count }, (_, at) => make(at)).join("");
const svgOf = (inside, rest = "") => `<svg xmlns="http://www.w3.org/2000/svg" width="70" height="70"${rest}>${inside}</svg>`;

async function openTerminal(page) {
  await go(page, "#/t");
  await page.getByRole("button", { name: "New terminal" }).first().click();
  await sees(page, ".terminal .badge", "live");
  await until("a prompt", async () => /[$#] ?$/m.test(await screen(page)));
}

async function run(page, command) {
  await page.getByLabel("Command").fill(command);
  await page.keyboard.press("Enter");
}

// --- what is checked

const checks = {
  async signing_in(checking) {
    const server = await checking.server();
    const page = await visit(checking, server, "", { token: null, expected: ["403"] });
    await page.getByLabel("Token").fill("wrong");
    await page.keyboard.press("Enter");
    await sees(page, ".problem", "does not open");
    await page.getByLabel("Token").fill(TOKEN);
    await page.getByRole("button", { name: "Sign in" }).click();
    await page.waitForSelector(".sections");
    await page.reload();
    await page.waitForSelector(".sections");
    const places = await page.evaluate(() => ({ address: location.href, cookie: document.cookie, local: JSON.stringify(localStorage), session: JSON.stringify(sessionStorage) }));
    assert.ok(places.session.includes(TOKEN));
    assert.ok(![places.address, places.cookie, places.local].some((place) => place.includes(TOKEN)), JSON.stringify(places));
    await page.getByRole("button", { name: "Forget the token" }).click();
    await page.getByLabel("Token").waitFor();
    assert.equal(await page.evaluate(() => JSON.stringify(sessionStorage)), "{}");
  },

  async a_link_with_a_token_is_asked_about(checking) {
    const server = await checking.server();
    const address = `${server.url}/console#token=${TOKEN}`;
    // Also in a tab that has none: the link may be that of a page that wants somebody to work in its own sandbox.
    for (const isTaken of [false, true]) {
      const context = await browser.newContext();
      checking.closers.push(() => context.close());
      const page = await context.newPage();
      const asked = [];
      page.on("dialog", (dialog) => {
        asked.push(dialog.message());
        return isTaken ? dialog.accept() : dialog.dismiss();
      });
      await page.goto(address);
      await page.waitForSelector(isTaken ? ".sections" : ".sign-in");
      assert.deepEqual(asked, ["This link has a token. Sign in with it?"]);
      assert.equal(await page.evaluate(() => sessionStorage.getItem("sbx-token")), isTaken ? TOKEN : null);
      assert.ok(!page.url().includes(TOKEN));
      if (!isTaken) continue;
      // Once is enough.
      await page.goto("about:blank");
      await page.goto(address);
      await page.waitForSelector(".sections");
      assert.equal(asked.length, 1);
    }
  },

  async a_link_with_another_token(checking) {
    const server = await checking.server();
    const page = await visit(checking, server);
    assert.ok(!(await page.evaluate(() => location.href)).includes(TOKEN));
    // A link with another one is asked about, and not followed here: the dialog is dismissed.
    await page.evaluate(() => { location.hash = "#token=other%"; });
    await until("the question", () => checking.wrong.pop()?.startsWith("a dialog: This link has another token"));
    await page.waitForSelector(".sections");
    assert.equal(await page.evaluate(() => sessionStorage.getItem("sbx-token")), TOKEN);
    // Not in the history either.
    const earlier = await page.evaluate(() => new Promise((done) => {
      addEventListener("hashchange", () => done(location.href), { once: true });
      history.back();
      setTimeout(() => done(location.href), 500);
    }));
    assert.ok(!earlier.includes(TOKEN), earlier);
  },

  async a_server_without_a_token_needs_none(checking) {
    const server = await checking.server({ environment: { SBX_TOKEN: undefined } });
    const page = await visit(checking, server, "", { token: null });
    await page.waitForSelector(".sections");
    await sees(page, "h1", "Overview");
  },

  async running_a_command(checking) {
    const server = await checking.server();
    const page = await visit(checking, server, "#/p");
    await run(page, "printf '\\033[31mred\\033[0m plain\\n'; echo problem >&2; read line; echo \"got $line\"; exit 3");
    await sees(page, ".log-line .c1", "red");
    await sees(page, ".log-line.stderr", "problem");
    await sees(page, ".state .badge", "running");
    await page.getByLabel("Input", { exact: true }).fill("this line");
    await page.keyboard.press("Enter");
    await sees(page, ".log-line.stdout", "got this line");
    await sees(page, ".log-line.note", "exited with 3");
    await sees(page, ".state .badge", "exit 3");
    assert.match(await page.evaluate(() => location.hash), /^#\/p\/p-\d+$/);
    await page.getByRole("button", { name: "Remove" }).click();
    await sees(page, ".notice", "is removed");
    assert.deepEqual(await server.api("GET", "/v1/processes"), []);
  },

  async killing_a_process(checking) {
    const server = await checking.server();
    const page = await visit(checking, server, "#/p");
    await run(page, "sleep 1000");
    await page.getByRole("button", { name: "Kill" }).click();
    await sees(page, ".log-line.note", "ended: killed, signal 9");
    await sees(page, ".list a[aria-current]", "sleep 1000");
  },

  async a_process_that_has_ended_tells_when(checking) {
    const server = await checking.server();
    const { id } = await server.api("POST", "/v1/processes", { cmd: "true" });
    await server.api("GET", `/v1/processes/${id}/wait`);
    const { started_at_ms: started, duration_ms: took } = await server.api("GET", `/v1/processes/${id}`);
    const page = await visit(checking, server);
    const told = (ms) => page.evaluate(async (at) => (await import("/console/dom.js")).clock(at), ms);
    const ended = await told(started + took);
    await until("another second", async () => await told(Date.now()) !== ended);
    await go(page, `#/p/${id}`);
    await sees(page, ".log-line.note", `(${ended})`);
  },

  async a_wrong_address_of_a_file(checking) {
    const server = await checking.server();
    writeFileSync(join(server.files, "there.txt"), "there\n");
    const page = await visit(checking, server, `#/f${server.files}/missing.txt`, { expected: ["404"] });
    await sees(page, ".detail .empty", "missing.txt");
    await sees(page, "table", "there.txt");
    assert.ok(await page.evaluate(() => location.hash.endsWith("missing.txt")));
    await go(page, `#/f${server.files}/there.txt`);
    await until("the file", async () => (await page.getByLabel("Content of there.txt").inputValue()) === "there\n");
    await go(page, `#/f${server.files}/nor/this.txt`);
    await sees(page, ".detail .empty", "this.txt");
  },

  async a_log_of_100000_lines(checking) {
    const server = await checking.server();
    const page = await visit(checking, server, "#/p");
    await watchFrames(page);
    await run(page, "awk 'BEGIN { for (i = 1; i <= 100000; i++) { print \"line \" i \" of a long log\"; if (i % 1000 == 0) system(\"\") } }'");
    await page.locator(".log-view [data-lines='100001']").waitFor();
    await sees(page, ".log-line", "line 100000 of a long log");
    assert.ok(await page.locator(".log-line").count() < 250, "only what can be seen is drawn");
    const log = page.getByRole("log");
    await log.evaluate((element) => { element.scrollTop = element.scrollHeight / 2; });
    await sees(page, ".log-line", /line (49|50)\d\d\d of/);
    await page.getByLabel("Find in the log").fill("line 77777 of");
    await sees(page, ".log-line.chosen mark", "line 77777 of");
    await sees(page, ".bar .figures", "1 of 1");
    const gap = await page.evaluate(() => globalThis.longestGap);
    console.log(`      the longest pause between two frames was ${Math.round(gap)} ms`);
    assert.ok(gap < 2000, `the page stood still for ${gap} ms`);
  },

  async a_log_is_followed_while_its_box_shrinks(checking) {
    const server = await checking.server();
    const page = await visit(checking, server, "#/p");
    await run(page, "for i in $(seq 400); do seq 100; sleep 0.01; done; echo the end");
    await sees(page, ".log-line", "100");
    // As the row for input does, which appears when it is known that the process runs: between two frames.
    await page.evaluate(() => {
      const log = document.querySelector(".log");
      let count = 0;
      const frame = () => setTimeout(() => {
        count += 1;
        log.style.marginBottom = `${5 * count}px`;
        if (count < 50) requestAnimationFrame(frame);
      });
      requestAnimationFrame(frame);
    });
    await page.locator(".log-view [data-lines='40002']").waitFor();
    assert.equal(await page.getByRole("button", { name: "Follow" }).getAttribute("aria-pressed"), "true");
    await sees(page, ".log-line", "the end");
    // Whoever scrolls up stays there.
    await page.getByRole("log").evaluate((element) => { element.scrollTop -= 5000; });
    await page.locator("[aria-pressed='false']", { hasText: "Follow" }).waitFor();
  },

  async pausing_and_searching_a_log(checking) {
    const server = await checking.server();
    const page = await visit(checking, server, "#/p");
    await run(page, "echo first; read x; echo needle one; echo NEEDLE two; read x; echo last");
    await sees(page, ".log-line", "first");
    await page.getByRole("button", { name: "Pause" }).click();
    await page.getByLabel("Input", { exact: true }).fill("go");
    await page.keyboard.press("Enter");
    await sees(page, ".bar .figures", "held back");
    assert.equal(await page.locator(".log-line", { hasText: "needle" }).count(), 0);
    await page.getByRole("button", { name: "Pause" }).click();
    await sees(page, ".log-line", "needle one");
    await page.getByLabel("Find in the log").fill("needle");
    await sees(page, ".bar .figures", "1 of 2");
    await page.keyboard.press("Enter");
    await sees(page, ".bar .figures", "2 of 2");
    await sees(page, ".log-line.chosen", "NEEDLE two");
    await page.keyboard.press("Shift+Enter");
    await sees(page, ".log-line.chosen", "needle one");
  },

  async a_log_that_has_lost_its_beginning(checking) {
    const server = await checking.server({ environment: { SBX_LOG_BYTES: "65536" } });
    await server.api("POST", "/v1/processes", { cmd: "seq 1 100000", id: "many" });
    await server.api("GET", "/v1/processes/many/wait");
    const page = await visit(checking, server, "#/p/many");
    await sees(page, ".log-line", "100000");
    await page.getByRole("log").evaluate((element) => { element.scrollTop = 0; });
    await sees(page, ".log-line.note", "of stdout are no longer kept");
  },

  async a_log_goes_on_after_the_connection_broke(checking) {
    const server = await checking.server();
    const line = await checking.line(server);
    await server.api("POST", "/v1/processes", { cmd: "echo before; read x; echo between; read x; echo after", id: "broken" });
    const page = await visit(checking, server, "#/p/broken", { base: line.url, expected: ["net::ERR"] });
    await sees(page, ".log-line", "before");
    line.cut();
    await sees(page, ".banner", "does not answer");
    await server.api("POST", "/v1/processes/broken/stdin", "x\n");
    line.mend();
    await sees(page, ".log-line", "between");
    await page.locator(".banner").waitFor({ state: "hidden" });
    await server.api("POST", "/v1/processes/broken/stdin", "x\n");
    await sees(page, ".log-line", "after");
    const lines = await page.locator(".log-line.stdout").allInnerTexts();
    assert.deepEqual(lines, ["before", "between", "after"]);
  },

  async typing_in_a_terminal(checking) {
    const server = await checking.server();
    const page = await visit(checking, server);
    await openTerminal(page);
    await page.keyboard.type("echo $((6*7)) h\u00e9llo\n");
    await until("the answer", async () => (await screen(page)).includes("42 h\u00e9llo"));
    // Control keys reach the program.
    await page.keyboard.type("sh -c 'echo star\"\"ted; exec sleep 1000'\n");
    await until("the command that is interrupted", async () => /^started$/m.test(await screen(page)));
    await page.keyboard.press("Control+c");
    await page.keyboard.type("echo status $?\n");
    await until("the status of an interrupted command", async () => (await screen(page)).includes("status 130"));
    await page.keyboard.press("Shift+Escape");
    assert.equal(await page.evaluate(() => document.activeElement.textContent), "Log");
    await page.locator(".xterm-helper-textarea").focus();
    await page.keyboard.type("exit 4\n");
    await sees(page, ".terminal .badge", "exit 4");
  },

  async resizing_a_terminal(checking) {
    const server = await checking.server();
    const page = await visit(checking, server);
    await openTerminal(page);
    const [id] = (await server.api("GET", "/v1/processes")).map((process) => process.id);
    const sizeOf = async () => (await server.api("GET", `/v1/processes/${id}`)).pty;
    const before = await sizeOf();
    await page.setViewportSize({ width: 900, height: 500 });
    const after = await until("a smaller terminal", async () => {
      const size = await sizeOf();
      return size.cols < before.cols && size.rows < before.rows && size;
    });
    await page.keyboard.type("stty size\n");
    await until("the size that programs see", async () => (await screen(page)).includes(`${after.rows} ${after.cols}`));
  },

  async a_terminal_comes_back(checking) {
    const server = await checking.server();
    const line = await checking.line(server);
    const page = await visit(checking, server, "#/", { base: line.url, expected: ["net::ERR", "WebSocket"] });
    await openTerminal(page);
    const [id] = (await server.api("GET", "/v1/processes")).map((process) => process.id);
    await page.keyboard.type("echo one-$((1))\n");
    await until("output", async () => (await screen(page)).includes("one-1"));
    line.cut();
    await sees(page, ".terminal .badge", "trying again");
    await server.api("POST", `/v1/processes/${id}/stdin`, "echo two-$((2))\n");
    line.mend();
    await sees(page, ".terminal .badge", "live");
    await until("what was printed meanwhile", async () => (await screen(page)).includes("two-2"));
    await page.locator(".xterm-helper-textarea").focus();
    await page.keyboard.type("echo three-$((3))\n");
    await until("what is typed now", async () => (await screen(page)).includes("three-3"));
    const shown = await screen(page);
    for (const once_ of ["one-1", "two-2", "three-3"]) assert.equal(shown.split(once_).length, 2, `${once_} once:\n${shown}`);
    // The whole of it is there again after the page was left.
    await page.reload();
    await until("the terminal again", async () => /one-1[^]*two-2[^]*three-3/.test(await screen(page)));
  },

  async a_restarted_server(checking) {
    const server = await checking.server();
    const page = await visit(checking, server, "#/p", { expected: ["net::ERR", "404"] });
    await run(page, "echo here; sleep 20");
    await sees(page, ".log-line", "here");
    await server.kill("SIGKILL");
    await sees(page, ".banner", "does not answer");
    const again = await Server.start({ port: server.port, scratch: server.scratch });
    checking.closers.push(() => again.close());
    await page.locator(".banner").waitFor({ state: "hidden" });
    await sees(page, ".log-line.note", "the server was restarted");
    await sees(page, ".state .badge", "no longer known");
    await run(page, "echo works again");
    await sees(page, ".log-line", "works again");
  },

  async editing_a_file(checking) {
    const server = await checking.server();
    const path = join(server.files, "notes.txt");
    writeFileSync(path, "one\r\ntwo\r\n", { mode: 0o640 });
    const page = await visit(checking, server, `#/f${path}`);
    const editor = page.getByLabel("Content of notes.txt");
    assert.equal(await editor.inputValue(), "one\ntwo\n");
    await editor.focus();
    await page.keyboard.press("Control+End");
    await page.keyboard.type("\tthree\n");
    await page.keyboard.insertText("four");
    await page.keyboard.press("Control+s");
    await sees(page, ".notice", "Saved notes.txt");
    assert.equal(readFileSync(path, "utf8"), "one\r\ntwo\r\n\tthree\r\nfour");
    assert.equal(statSync(path).mode & 0o777, 0o640);
  },

  async editing_a_file_that_changed_meanwhile(checking) {
    const server = await checking.server();
    const path = join(server.files, "shared.txt");
    writeFileSync(path, "ours\n");
    const page = await visit(checking, server, `#/f${path}`, { expected: ["409"] });
    const editor = page.getByLabel("Content of shared.txt");
    await editor.fill("mine\n");
    writeFileSync(path, "theirs\n");
    await editor.press("Control+s");
    await sees(page, "dialog h2", "changed meanwhile");
    await page.keyboard.press("Enter");
    await page.locator("dialog").waitFor({ state: "detached" });
    assert.equal(await editor.inputValue(), "mine\n");
    assert.equal(readFileSync(path, "utf8"), "theirs\n");
    await page.getByRole("button", { name: "Save" }).click();
    await page.getByRole("button", { name: "Load theirs" }).click();
    await until("their text", async () => (await editor.inputValue()) === "theirs\n");
    await editor.fill("mine again\n");
    writeFileSync(path, "theirs again\n");
    await page.getByRole("button", { name: "Save" }).click();
    await page.getByRole("button", { name: "Load theirs" }).click();
    await until("their text again", async () => (await editor.inputValue()) === "theirs again\n");
    await editor.fill("mine at last\n");
    writeFileSync(path, "theirs for ever\n");
    await page.getByRole("button", { name: "Save" }).click();
    await page.getByRole("button", { name: "Overwrite" }).click();
    await sees(page, ".notice", "Saved");
    assert.equal(readFileSync(path, "utf8"), "mine at last\n");
  },

  async leaving_changes(checking) {
    const server = await checking.server();
    writeFileSync(join(server.files, "a.txt"), "a");
    const page = await visit(checking, server, `#/f${server.files}/a.txt`);
    await page.getByLabel("Content of a.txt").fill("changed");
    await go(page, `#/f${server.files}`);
    await sees(page, "dialog h2", "Leave the changes?");
    await page.keyboard.press("Escape");
    assert.equal(await page.getByLabel("Content of a.txt").inputValue(), "changed");
    await until("the address of before", () => page.evaluate(() => location.hash.endsWith("a.txt")));
    await page.getByRole("link", { name: "Processes" }).click();
    await sees(page, "dialog h2", "Leave the changes?");
    await page.keyboard.press("Escape");
    await until("the address of before", () => page.evaluate(() => location.hash.endsWith("a.txt")));
    await page.getByLabel("Search in files").fill("a");
    await page.keyboard.press("Enter");
    await sees(page, "dialog h2", "Leave the changes?");
    await page.keyboard.press("Escape");
    assert.equal(await page.getByLabel("Content of a.txt").inputValue(), "changed");
    await page.getByRole("link", { name: "Processes" }).click();
    await page.getByRole("button", { name: "Leave them" }).click();
    await sees(page, ".empty h2", "Nothing has run yet");
  },

  async managing_files(checking) {
    const server = await checking.server();
    const page = await visit(checking, server, `#/f${server.files}`);
    await page.getByRole("button", { name: "New folder" }).click();
    await page.getByLabel("Name").fill("deep");
    await page.keyboard.press("Enter");
    await page.getByRole("link", { name: "deep" }).click();
    await sees(page, ".crumbs", "deep");
    await page.getByRole("button", { name: "New file" }).click();
    await page.getByLabel("Name").fill("plan.md");
    await page.keyboard.press("Enter");
    await page.getByLabel("Content of plan.md").fill("# needle in the plan\n");
    await page.keyboard.press("Control+s");
    await sees(page, ".notice", "Saved plan.md");
    await page.getByRole("button", { name: "Rename plan.md" }).click();
    await page.getByRole("textbox", { name: "Name" }).fill("renamed.md");
    await page.keyboard.press("Enter");
    await page.getByRole("link", { name: "renamed.md" }).waitFor();
    await page.getByLabel("Search in files").fill("needle");
    await page.keyboard.press("Enter");
    await sees(page, ".matches mark", "needle");
    await sees(page, ".detail [role=status]", "1 in 1 of 1 files");
    await page.getByRole("link", { name: "Close" }).click();
    await page.getByRole("button", { name: "Delete renamed.md" }).click();
    await page.getByRole("button", { name: "Delete", exact: true }).click();
    await page.getByRole("link", { name: "renamed.md" }).waitFor({ state: "detached" });
    assert.ok(!existsSync(join(server.files, "deep/renamed.md")));
    // A file that appears on its own is listed.
    writeFileSync(join(server.files, "deep/new.txt"), "");
    await page.getByRole("link", { name: "new.txt" }).waitFor();
  },

  async a_folder_up_by_drop_and_down_again(checking) {
    const server = await checking.server();
    const source = mkdtempSync(join(tmpdir(), "sbx-dropped-"));
    checking.closers.push(() => rmSync(source, { recursive: true, force: true }));
    const tree = join(source, "project");
    const long = `${"a long name ".repeat(12)}\u00e9.txt`;
    mkdirSync(join(tree, "src/deep"), { recursive: true });
    mkdirSync(join(tree, "empty"));
    writeFileSync(join(tree, "src/deep/main.py"), "print(1)\n");
    writeFileSync(join(tree, "src", long), "long");
    writeFileSync(join(tree, "binary"), Buffer.from(Array.from({ length: 100_000 }, (_, at) => (at * 7) % 256)));
    for (let at = 0; at < 150; at += 1) writeFileSync(join(tree, `src/${at}.txt`), String(at));
    const page = await visit(checking, server, `#/f${server.files}`);
    await page.locator(".files tbody tr").first().waitFor();
    const session = await page.context().newCDPSession(page);
    const { x, y, width, height } = await page.locator(".listing").boundingBox();
    const data = { items: [], files: [tree], dragOperationsMask: 1 };
    for (const type of ["dragEnter", "dragOver", "drop"]) await session.send("Input.dispatchDragEvent", { type, x: x + width / 2, y: y + height / 2, data });
    await sees(page, ".notice", "Uploaded 153 files");
    execFileSync("diff", ["-r", tree, join(server.files, "project")]);

    await page.getByRole("link", { name: "project" }).click();
    await sees(page, ".crumbs", "project");
    const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Archive" }).click()]);
    assert.equal(download.suggestedFilename(), "project.tar.gz");
    const archive = join(source, "down.tar.gz");
    await download.saveAs(archive);
    mkdirSync(join(source, "down"));
    execFileSync("tar", ["-xzf", archive, "-C", join(source, "down")]);
    execFileSync("diff", ["-r", tree, join(source, "down")]);
  },

  async what_cannot_be_edited(checking) {
    const server = await checking.server();
    writeFileSync(join(server.files, "data.bin"), Buffer.from([0, 1, 2, 255, 65]));
    writeFileSync(join(server.files, "mixed.txt"), "a\r\nb\nc\r");
    const pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg==";
    writeFileSync(join(server.files, "dot.png"), Buffer.from(pixel, "base64"));
    const page = await visit(checking, server, `#/f${server.files}/data.bin`);
    await sees(page, ".dump", "00 01 02 ff 41");
    await go(page, `#/f${server.files}/mixed.txt`);
    await sees(page, ".badge", "read only");
    await go(page, `#/f${server.files}/dot.png`);
    await until("the picture", () => page.locator(".picture img").evaluate((image) => image.naturalWidth === 1));
  },

  async a_notebook(checking) {
    const server = await checking.server();
    const page = await visit(checking, server, "#/n");
    await page.getByRole("button", { name: "New context" }).first().click();
    await page.locator("dialog select").selectOption({ index: 0 });
    await page.getByLabel("Name").fill("work");
    await page.getByRole("button", { name: "Start" }).click();
    await sees(page, ".notebook .badge", "idle");
    const cell = async (code) => {
      await page.locator(".cell").last().getByLabel("Code").fill(code);
      await page.keyboard.press("Shift+Enter");
    };
    await cell("x = 20\nprint('printed')\nx + 1");
    await sees(page, ".output .stdout", "printed");
    await sees(page, ".output .result", "21");
    await cell("class T:\n  def _repr_html_(self): return '<table><tr><th>name</th></tr><tr><td>Ada</td></tr></table>'\nT()");
    await sees(page, ".output table td", "Ada");
    await cell("import base64, zlib, struct\ndef chunk(kind, data):\n  return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))\nclass P:\n  def _repr_png_(self):\n    return b'\\x89PNG\\r\\n\\x1a\\n' + chunk(b'IHDR', struct.pack('>IIBBBBB', 4, 3, 8, 2, 0, 0, 0)) + chunk(b'IDAT', zlib.compress(b'\\0' + b'\\x10\\x80\\x70' * 4 + b'\\0' + b'\\x10\\x80\\x70' * 4 + b'\\0' + b'\\x10\\x80\\x70' * 4)) + chunk(b'IEND', b'')\nP()");
    await until("the plot", () => page.locator(".output .picture img").evaluateAll((images) => images.some((image) => image.naturalWidth === 4)));
    await cell("raise ValueError(f'{x} is too small')");
    await sees(page, ".output .error", "ValueError: 20 is too small");
    await cell("name = input('who? ')\nprint('hello', name)");
    await until("the field that asks", () => page.getByLabel("who?").evaluate((field) => field === document.activeElement));
    await page.keyboard.type("Ada");
    await page.keyboard.press("Enter");
    await sees(page, ".output .stdout", "hello Ada");
    // Cells that wait for their turn keep no connection from the answer.
    await cell("again = input('and? ')");
    for (let at = 0; at < 7; at += 1) await cell(`print('cell', ${at})`);
    await page.getByLabel("and?").fill("yes");
    await page.keyboard.press("Enter");
    await sees(page, ".output .stdout", "cell 6");
    assert.equal(await page.locator(".output form").count(), 0);
    await cell("while True: pass");
    await sees(page, ".notebook .badge", "busy");
    await page.getByRole("button", { name: "Interrupt" }).click();
    await sees(page, ".output .error", "KeyboardInterrupt");
    // What was shown is there again after the page was left.
    await page.reload();
    await sees(page, ".output table td", "Ada");
    await sees(page, ".output .error", "KeyboardInterrupt");
    await page.getByRole("button", { name: "Restart" }).click();
    await sees(page, ".notice", "work is restarted");
    await cell("x");
    await sees(page, ".output .error", "NameError");
  },

  async keyboard_only(checking) {
    const server = await checking.server();
    const page = await visit(checking, server, "", { token: null });
    const press = (key) => page.keyboard.press(key);
    /** Moves on with Tab until the focus is on what is looked for. */
    const reach = async (name) => {
      for (let at = 0; at < 60; at += 1) {
        const focused = await page.evaluate(() => {
          const element = document.activeElement;
          const style = getComputedStyle(element);
          return { name: element.getAttribute("aria-label") ?? element.textContent.trim(), isSeen: element === document.body || style.outlineStyle !== "none" || element.matches(".code, .xterm-helper-textarea") };
        });
        assert.ok(focused.isSeen, `the focus on ${focused.name} cannot be seen`);
        if (focused.name.startsWith(name)) return;
        await press("Tab");
      }
      assert.fail(`${name} cannot be reached with Tab`);
    };
    await page.getByLabel("Token").waitFor();
    await page.keyboard.type(TOKEN);
    await press("Enter");
    await page.waitForSelector(".sections");
    await reach("Skip to the content");
    await reach("Processes");
    await press("Enter");
    await sees(page, ".empty h2", "Nothing has run yet");
    await reach("Command");
    await page.keyboard.type("echo by keyboard");
    await press("Enter");
    await sees(page, ".log-line", "by keyboard");
    await reach("Output");
    await press("/");
    assert.equal(await page.evaluate(() => document.activeElement.getAttribute("aria-label")), "Find in the log");
    await page.locator(".brand").first().focus();
    await reach("Files");
    await press("Enter");
    await page.locator(".files tbody tr").first().waitFor();
    await reach("New folder");
    await press("Enter");
    assert.equal(await page.evaluate(() => document.activeElement.name), "name");
    await press("Escape");
    await page.locator("dialog").waitFor({ state: "detached" });
    await page.locator(".brand").first().focus();
    await reach("Terminals");
    await press("Enter");
    await reach("New terminal");
    await press("Enter");
    await sees(page, ".terminal .badge", "live");
    await until("a prompt", async () => /[$#] ?$/m.test(await screen(page)));
    await page.keyboard.type("exit\n");
    await sees(page, ".terminal .badge", "exit 0");
    await press("Shift+Escape");
    await reach("Log");
  },

  async three_hundred_and_twenty_pixels(checking) {
    const server = await checking.server();
    await server.api("POST", "/v1/processes", { cmd: "echo a line that is far longer than a narrow page can show at once; sleep 1000", id: "narrow" });
    await server.api("POST", "/v1/processes", { pty: true, id: "shell" });
    await server.api("POST", "/v1/contexts", { language: "python", id: "book" });
    writeFileSync(join(server.files, `${"long".repeat(30)}.txt`), "text\n");
    const page = await visit(checking, server, "#/", { viewport: { width: 320, height: 568 } });
    const places = {
      "#/": ".curve", "#/p": ".list a", "#/p/narrow": ".log-line", "#/t": ".tabs a", "#/t/shell": ".xterm-rows",
      [`#/f${server.files}`]: ".files .name", [`#/f${server.files}/${"long".repeat(30)}.txt`]: ".editor", "#/n/book": ".code", "#/ports": ".page", "#/network": ".page",
    };
    for (const [address, seen] of Object.entries(places)) {
      await go(page, address);
      await page.locator(seen).first().waitFor();
      const { wide, boxes } = await page.evaluate(() => ({
        wide: document.documentElement.scrollWidth,
        boxes: [...document.querySelectorAll("main .button, main input")].filter((element) => element.checkVisibility() && !element.closest(".table, .tabs, .files, .crumbs, .frames")).map((element) => ({ name: element.textContent || element.title || element.ariaLabel, right: element.getBoundingClientRect().right })),
      }));
      assert.ok(wide <= 320, `${address} is ${wide} wide`);
      for (const { name, right } of boxes) assert.ok(right <= 321, `${address}: ${name} ends at ${right}`);
    }
    await go(page, "#/p/narrow");
    await page.getByRole("link", { name: "All processes" }).click();
    await page.locator(".list a").first().waitFor();
  },

  async dark_and_light(checking) {
    const server = await checking.server();
    await server.api("POST", "/v1/processes", { cmd: "echo text; echo wrong >&2; exit 1", id: "both" });
    const page = await visit(checking, server, "#/p/both", { colorScheme: "light", reducedMotion: "reduce" });
    await sees(page, ".log-line", "wrong");
    /** The contrast (WCAG 2.2, 1.4.3) of texts with what is behind them. */
    const contrasts = () => page.evaluate(() => {
      const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
      const rgb = (color) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
      };
      const light = ([r, g, b]) => {
        const [x, y, z] = [r, g, b].map((part) => (part / 255 <= 0.03928 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4));
        return 0.2126 * x + 0.7152 * y + 0.0722 * z;
      };
      const behind = (element) => {
        for (let at = element; at; at = at.parentElement) {
          const color = rgb(getComputedStyle(at).backgroundColor);
          if (color[3] === 255) return color;
        }
        return [255, 255, 255];
      };
      const texts = [...document.querySelectorAll("h1, h2, .quiet, .badge, .sections a, .button, dt, dd, .log-line, .list bdi")];
      return texts.filter((element) => element.textContent.trim() && element.checkVisibility() && !element.closest(".unseen")).map((element) => {
        const [one, other] = [light(rgb(getComputedStyle(element).color)), light(behind(element))].sort((a, b) => b - a);
        return { name: `${element.className} ${element.textContent.slice(0, 20)}`, ratio: (one + 0.05) / (other + 0.05) };
      });
    });
    const ground = () => page.evaluate(() => getComputedStyle(document.querySelector(".body")).backgroundColor);
    const seen = [];
    for (const scheme of ["light", "dark"]) {
      await page.emulateMedia({ colorScheme: scheme });
      seen.push(await ground());
      for (const { name, ratio } of await contrasts()) assert.ok(ratio >= 4.5, `${scheme}: ${name} has a contrast of ${ratio.toFixed(2)}`);
    }
    assert.notEqual(seen[0], seen[1]);
    // A choice of one's own wins over the system's, and stays.
    await page.emulateMedia({ colorScheme: "light" });
    await page.getByRole("button", { name: "Colours" }).click();
    assert.equal(await ground(), seen[1]);
    await page.reload();
    await page.waitForSelector(".sections");
    assert.equal(await ground(), seen[1]);
  },

  async no_field_but_that_of_the_sign_in_gets_the_saved_token(checking) {
    const server = await checking.server();
    await server.api("POST", "/v1/processes", { cmd: "cat", id: "cat" });
    await server.api("POST", "/v1/processes", { cmd: "cat", pty: true, id: "screen" });
    for (const user of ["", "ada"]) {
      const page = await withSavedToken(checking, server, user);
      await page.goto(`${server.url}/console`);
      await page.getByLabel("Token").waitFor();
      if (!user) {
        await until("the saved token in the form that signs in", async () => (await page.getByLabel("Token").inputValue()) === TOKEN);
        await page.getByRole("button", { name: "Sign in" }).click();
      } else {
        await page.getByLabel("Token").fill(TOKEN);
        await page.keyboard.press("Enter");
      }
      await page.waitForSelector(".sections");
      /** Fails if a field is filled when the browser has looked at all of them: it then fills one that is meant to be. */
      const nothingIsFilled = async (what) => {
        await page.evaluate(() => {
          const form = document.createElement("form");
          form.id = "meant";
          form.innerHTML = "<input autocomplete=username><input type=password autocomplete=current-password>";
          // A dialog leaves the rest of the page inert.
          (document.querySelector("dialog") ?? document.body).append(form);
        });
        await until(`a field filled, ${what}`, () => page.locator("#meant :nth-child(2)").evaluate((field) => field.matches(":autofill")));
        await page.locator("#meant").evaluate((form) => form.remove());
        const fields = await page.evaluate(() => [...document.querySelectorAll("input, textarea")].map((field) => [field.type, field.ariaLabel, field.matches(":autofill"), field.value]));
        assert.ok(fields.length, what);
        assert.deepEqual(fields.filter(([type, , isFilled, value]) => type === "password" || isFilled || [TOKEN, "ada"].includes(value)), [], what);
      };
      const context = `work${user}`;
      await server.api("POST", "/v1/contexts", { language: "python", id: context });
      await go(page, `#/n/${context}`);
      const cell = async (code) => {
        await page.locator(".cell").last().getByLabel("Code").fill(code);
        await page.keyboard.press("Shift+Enter");
      };
      await cell("import getpass\nprint('got', repr(getpass.getpass('Press Enter')))");
      const asked = page.locator(".output .command input");
      await asked.waitFor();
      await page.mouse.click(700, 700);
      await nothingIsFilled("a password");
      assert.equal(await asked.evaluate((field) => getComputedStyle(field).webkitTextSecurity), "disc");
      await asked.press("Enter");
      await sees(page, ".output .stdout", "got ''");
      await cell("print('got', repr(getpass.getpass('Again')))");
      await page.getByLabel("Again").fill("typed");
      await page.keyboard.press("Enter");
      await sees(page, ".output .stdout", "got 'typed'");
      assert.ok(!(await page.locator(".output .stdout").allInnerTexts()).some((shown) => shown.includes("Againtyped")));
      await cell("input('Password')");
      await asked.waitFor();
      await nothingIsFilled("a text");
      for (const [address, field] of [["#/p/cat", "[aria-label=Input]"], ["#/f/", ".search input"], ["#/t/screen", ".xterm-helper-textarea"]]) {
        await go(page, address);
        await page.locator(`main ${field}`).waitFor({ state: "attached" });
        await nothingIsFilled(address);
      }
      await go(page, "#/n");
      await page.getByRole("button", { name: "New context" }).first().click();
      await page.locator("dialog").waitFor();
      await nothingIsFilled("a new context");
      await page.keyboard.press("Escape");
      await go(page, "#/f/");
      await page.getByRole("button", { name: "New folder" }).click();
      await nothingIsFilled("a new folder");
    }
  },

  async hostile_output_and_names(checking) {
    const server = await checking.server();
    const names = ["<img src=x onerror=globalThis.hacked=1>.txt", "<script>hacked=1<\u2044script>", "gnp.\u202etxt.exe", "line\nbreak", "tab\there", "\u001b[31mred", "\u05d0\u05d1\u05d2.txt", "quote\"'&amp;", "%2e%2e", "#hash?query", "constructor", "x.toString"];
    for (const name of names) writeFileSync(join(server.files, name), "<script>globalThis.hacked = 1</script><img src=x onerror=globalThis.hacked=1>\n");
    const output = "<script>globalThis.hacked=1</script><img src=x onerror=globalThis.hacked=1>\u202eevil\u202c \u001b]0;title\u0007\u001b]8;;javascript:globalThis.hacked=1\u0007link\u001b]8;;\u0007\u001b[2J\u001b[?1049h\u001bP+q\u001b\\end\n";
    writeFileSync(join(server.files, "output"), output);
    await server.api("POST", "/v1/processes", { cmd: `cat ${server.files}/output`, id: "hostile", tag: "<b>tag</b>" });
    await server.api("POST", "/v1/processes", { cmd: `cat ${server.files}/output; sleep 1000`, id: "screen", pty: true });
    await server.api("POST", "/v1/contexts", { language: "python", id: "book" });
    const page = await visit(checking, server, "#/p/hostile");
    await sees(page, ".log-line", "<script>globalThis.hacked=1</script>");
    await sees(page, ".log-line", "\u2039202E\u203aevil");
    await go(page, "#/t/screen");
    await until("the terminal's output", async () => (await screen(page)).includes("end"));
    await go(page, `#/f${server.files}`);
    await sees(page, ".files .name", "gnp.\u2039202E\u203atxt.exe");
    assert.equal(await page.locator(".files tbody tr").count(), names.length + 1);
    for (const name of names) {
      await go(page, `#/f${server.files}/${encodeURIComponent(name)}`);
      const shown = await page.evaluate((raw) => raw, name);
      await until(`the file ${JSON.stringify(shown)}`, async () => (await page.locator(".editor").count()) === 1 && (await page.locator(".editor").inputValue()).includes("hacked"));
      await page.getByRole("link", { name: "Close" }).click();
      await page.locator(".editor").waitFor({ state: "detached" });
    }
    await go(page, "#/n/book");
    await page.getByLabel("Code").last().fill("class H:\n  def _repr_html_(self): return '<table><tr><td><img src=x onerror=globalThis.hacked=1>cell<script>globalThis.hacked=1</script></td></tr></table>'\n  def _repr_svg_(self): return None\nclass S:\n  def _repr_svg_(self): return '<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"7\" height=\"7\" onload=\"globalThis.hacked=1\"><script>parent.hacked=1</script><image href=\"http://127.0.0.1:1/x.png\"/></svg>'\ndisplay(S())\nH()");
    await page.keyboard.press("Shift+Enter");
    await sees(page, ".output td", "cell");
    await seesDrawing(page, 7);
    const state = await page.evaluate(() => ({ hacked: globalThis.hacked, planted: document.querySelectorAll("[onerror], [onload], main script").length, title: document.title }));
    assert.deepEqual(state, { hacked: undefined, planted: 0, title: "Notebook \u00b7 sbx" });
  },

  async hostile_amounts(checking) {
    const server = await checking.server();
    await server.api("POST", "/v1/contexts", { language: "python", id: "book" });
    const page = await visit(checking, server, "#/n/book");
    await watchFrames(page);
    const cell = async (code, number) => {
      await page.locator(".cell").last().getByLabel("Code").fill(code);
      await page.keyboard.press("Shift+Enter");
      await page.locator(".cell .count", { hasText: `[${number}]` }).waitFor();
      await page.locator(".cell").nth(number - 1).locator(".foot [role=status]", { hasText: / m?s/ }).waitFor();
    };
    await cell("class H:\n  def __init__(self, html): self.html = html\n  def _repr_html_(self): return '<table><tr><td>cell</td></tr></table>' + self.html\nH('<a \"' * 400000)", 1);
    await cell("H('<script' * 200000)", 2);
    await cell("H('<table><tr><td>' * 20000)", 3);
    await cell("for n in range(2000): print('x' * 500, end='')", 4);
    await cell("import sys\nfor n in range(20000): print(n, end='\\r')\nprint('done')", 5);
    await cell("for n in range(3000): display(n)", 6);
    await cell("H('<table><tr>' + '<td>x' * 100000)\ndisplay(H('<table><tr>' + '<td>x' * 100000)); print('behind it')", 7);
    await sees(page, ".output .stdout", "behind it");
    assert.ok(await page.locator(".cell").nth(5).locator(".output > *").count() <= 500);
    assert.ok((await page.locator(".cell").nth(4).locator(".stdout").innerText()).length < 100);
    await go(page, "#/p");
    await run(page, "awk 'BEGIN { for (i = 0; i < 300000; i++) printf \"%d of 300000\\r\", i; print \"\\nend\" }'");
    await sees(page, ".log-line", "end");
    await run(page, "awk 'BEGIN { for (i = 0; i < 140000; i++) printf \"\\033[32mab\"; for (i = 0; i < 200; i++) { printf \"x\"; fflush(); system(\"sleep 0.005\") } print \"\\nafter colours\" }'");
    await sees(page, ".log-line", "after colours");
    await run(page, "head -c 3000000 /dev/zero | tr '\\0' x; echo; echo behind");
    await sees(page, ".log-line", "behind");
    const gap = await page.evaluate(() => globalThis.longestGap);
    console.log(`      the longest pause between two frames was ${Math.round(gap)} ms`);
    assert.ok(gap < 3000, `the page stood still for ${gap} ms`);
  },

  async html_that_takes_for_ever(checking) {
    const server = await checking.server();
    await server.api("POST", "/v1/contexts", { language: "python", id: "book" });
    const page = await visit(checking, server, "#/n/book");
    for (const html of [`"<" + "a" * 1000000`, `"<a" * 500000`, `"<a " * 400000`, `"<" * 1900000`, `"<td colspan" + " " * 1000000`, `"<table><td colspan" + " " * 1000000 + "x>"`, `"<table><td " + "colspan " * 100000 + ">"`, `"<table><tr><td>&" + "a" * 1000000`, `"<table><td>" + " " * 1000000 + "x"`]) {
      const output = await runCell(page, shows("html", html));
      await output.locator("pre, table, .offer").first().waitFor();
    }
    const output = await runCell(page, shows("html", `"<table><tr><td>a<b>1 < 2 & 3</b></td><td title='x'>y</td></tr></table>"`));
    assert.deepEqual(await output.locator("td").allTextContents(), ["a1 < 2 & 3", "y"]);
  },

  async tables_without_end(checking) {
    const server = await checking.server();
    await server.api("POST", "/v1/contexts", { language: "python", id: "book" });
    const page = await visit(checking, server, "#/n/book", { viewport: { width: 1280, height: 3000 } });
    for (const rows of [`"<tr><td rowspan=999>x" * 5000`, `"<tr>" + "<td colspan=999 rowspan=999>x" * 4000`, `("<tr>" + "<td colspan=99 rowspan=99>" * 100) * 40`, `("<tr>" + "<td>x" * 200) * 1500`, `"<tr><td>x" * 190000`, `"</table><table><td>" * 90000`, `"<tr><td>" + "a\u05d0" * 900000`, `("<tr><td>" + "a\u05d0" * 50) * 10000`, `("<tr><td>" + "".join(chr(0x10000 + 7 * n) for n in range(9000))) * 20`]) {
      const output = await runCell(page, shows("html", `"<table>" + ${rows}`));
      await output.locator("td").first().waitFor({ state: "attached" });
      await output.getByRole("button", { name: "Show as text" }).waitFor();
      assert.ok(await output.locator("td").count() <= 20_000, rows);
    }
    // What is not shown can be read, and kept.
    const offered = page.locator(".output .offer").nth(3);
    const [download] = await Promise.all([page.waitForEvent("download"), offered.getByRole("button", { name: "Download" }).click()]);
    assert.equal(readFileSync(await download.path(), "utf8").length, "<table>".length + 1500 * ("<tr>".length + 200 * "<td>x".length));
    await offered.getByRole("button", { name: "Show as text" }).click();
    await sees(page, ".output .log-line", "<table><tr><td>x<td>x");
    await goesOn(page, "its text");
    // A table of an ordinary size is as it was.
    const output = await runCell(page, shows("html", `"<table><tr><th colspan=2>head</th><th rowspan='2'>side</th></tr>" + "".join(f"<tr><td>{n}</td><td>value {n}</td><td>{n * n}</td></tr>" for n in range(3000)) + "</table>"`));
    assert.equal(await output.locator("td").count(), 9000);
    assert.equal(await output.locator("td").nth(8998).textContent(), "value 2999");
    assert.equal(await output.locator("th[colspan='2']").textContent(), "head");
    assert.equal(await output.locator("th[rowspan='2']").textContent(), "side");
    assert.equal(await output.locator(".offer").count(), 0);
  },

  async drawings_without_end(checking) {
    const server = await checking.server();
    await server.api("POST", "/v1/contexts", { language: "python", id: "book" });
    const page = await visit(checking, server, "#/n/book");
    /** Ten times what the one before draws, in `deep` steps; `call` makes an element that draws the one with an id. */
    const chain = (call, wrap = (inside, id) => `<g id="${id}">${inside}</g>`, deep = 9) => wrap("<rect width=\"9\" height=\"9\"/>", "a0") + times(deep, (at) => wrap(times(10, () => call(`a${at}`)), `a${at + 1}`)) + call(`a${deep}`);
    const bombs = {
      use: svgOf(chain((id) => `<use href="#${id}"/>`)),
      xlink: svgOf(chain((id) => `<use xlink:href="#${id}"/>`), ` xmlns:xlink="http://www.w3.org/1999/xlink"`),
      symbol: svgOf(chain((id) => `<use href="#${id}"/>`, (inside, id) => `<symbol id="${id}">${inside}</symbol>`)),
      hidden: svgOf(chain((id) => `<use href="#${id}"/>`).replace("<g", "<metadata><g id=\"a9\"/></metadata><g")),
      pattern: svgOf(chain((id) => `<rect width="70" height="70" fill="url(#${id})"/>`, (inside, id) => `<pattern id="${id}" width="1" height="1">${inside}</pattern>`)),
      mask: svgOf(chain((id) => `<rect width="70" height="70" style="mask: url( '#${id}' )"/>`, (inside, id) => `<mask id="${id}">${inside}</mask>`)),
      cycle: svgOf(`<g id="a"><use href="#b"/><use href="#b"/></g><g id="b"><use href="#a"/><use href="#a"/></g>`),
      elements: svgOf(`<rect width="1" height="1"/>`.repeat(200_000)),
      filter: svgOf(`<filter id="f">${"<feGaussianBlur stdDeviation=\"90\"/>".repeat(200)}</filter><rect filter="url(#f)" width="70" height="70"/>`),
      marker: svgOf(`<marker id="m">${"<path d=\"M0 0h9\"/>".repeat(1000)}</marker><path marker-mid="url(#m)" d="M0 0${"h1v1".repeat(50_000)}"/>`),
      entities: `<!DOCTYPE svg [<!ENTITY a "<g/><g/><g/><g/><g/><g/><g/><g/><g/><g/>">${times(6, (at) => `<!ENTITY ${"bcdefg"[at]} "${`&${"abcdef"[at]};`.repeat(10)}">`)}]>${svgOf("&g;")}`,
      namespaces: svgOf(`<g ${times(20_000, (at) => `xmlns:n${at}="n${at}" `)}>${"<n1:x/>".repeat(20_000)}</g>`),
      text: svgOf(`<text y="9">${"a\u05d0".repeat(300_000)}</text>`),
      attributes: svgOf(`<g ${times(40_000, (at) => `a${at}="" `)}/>`.repeat(5)),
      comments: svgOf("<!---->".repeat(1_000_000)),
      depth: svgOf(`<metadata>${"<g>".repeat(4000)}${"<g/>".repeat(1_000_000)}${"</g>".repeat(4000)}</metadata>`),
      // What looks like an end of an element, and is none.
      closed: svgOf(`${`<g a="/>" b='">'><!--</g>--><?x </g>?><![CDATA[</g>]]>/>`.repeat(400)}${"</g>".repeat(400)}`),
      unclosed: svgOf(`<!--></g>-->${"<g>".repeat(400)}<rect width="9" height="9"/>${"</g>".repeat(400)}`).replace("<svg", "<?x?><svg"),
    };
    for (const [name, svg] of Object.entries(bombs)) {
      const path = join(server.files, `${name}.svg`);
      writeFileSync(path, svg);
      const output = await runCell(page, shows("svg", `open(${JSON.stringify(path)}).read()`));
      await output.locator(".offer", { hasText: "too large to show" }).waitFor();
      assert.equal(await output.locator("img, iframe").count(), 0, name);
    }
    const offered = page.locator(".offer").first();
    await offered.getByRole("button", { name: "Show as text" }).click();
    await sees(page, ".log-line", "<svg xmlns=");
    // A document type in which a comment does not begin.
    writeFileSync(join(server.files, "type.svg"), `<!DOCTYPE svg SYSTEM "'' ><!--">${bombs.depth}`);
    const typed = await runCell(page, shows("svg", `open("type.svg").read()`));
    await typed.locator(".offer", { hasText: "cannot be shown" }).waitFor();
    // What is left out of a drawing: what would draw more later, or in another way, and what reports to the console.
    const parts = {
      later: svgOf(`<defs>${chain((id) => `<use href="#${id}"/>`, undefined, 3)}</defs><use href="#a0"><set attributeName="href" to="#a3"/></use>`),
      styles: svgOf(`<style>@import url("data:text/css,*{fill:url(%23a9)}"); rect { fill: \\75 rl(#a9) }</style><rect width="9" height="9"/>`),
      nested: svgOf(`<image width="70" height="70" href="data:image/svg+xml,${encodeURIComponent(bombs.use)}"/><rect width="9" height="9" style="background: url(data:image/svg+xml,x)"/>`),
      handlers: svgOf(`<g a=">" onload="alert(1)"/>`.repeat(20_000)),
    };
    for (const [name, svg] of Object.entries(parts)) {
      const path = join(server.files, `${name}.svg`);
      writeFileSync(path, svg);
      await runCell(page, shows("svg", `open(${JSON.stringify(path)}).read()`));
      await seesDrawing(page, 70);
      const drawn = decodeURIComponent(/svg\+xml,([^"]*)/.exec(await page.locator(".picture iframe").last().getAttribute("srcdoc"))[1]);
      assert.ok(!/<set|@import|75 rl|image\/svg|\sonload/.test(drawn), `${name}: ${drawn.slice(0, 500)}`);
    }
    // A plot as matplotlib draws it, of some thousand points and with a line of 100,000.
    const plot = svgOf(`<metadata><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#"/></metadata><defs><style type="text/css">*{stroke-linejoin: round; stroke-linecap: butt}</style></defs><g id="figure_1"><path d="M 0 0${times(100_000, (at) => `L ${at / 100} ${(at * 7919) % 600} `)}" clip-path="url(#p0)" style="fill: none; stroke: #1f77b4; stroke-dasharray: 3.7,1.6"/><defs><path id="m0" d="M0 3C0.7 3 1.5 2.6 2.1 2.1C2.6 1.5 3 0.7 3 0z" style="stroke: rgb(31, 119, 180)"/></defs><g clip-path="url(#p0)">${times(8000, (at) => `<use xlink:href="#m0" x="${at % 340}" y="${at % 200}" style="fill: #1f77b4"/>`)}</g></g><defs><clipPath id="p0"><rect x="0" y="0" width="340" height="200"/></clipPath></defs>`, ` xmlns:xlink="http://www.w3.org/1999/xlink"`).replace("width=\"70\" height=\"70\"", "width=\"340pt\" height=\"200pt\" viewBox=\"0 0 340 200\"");
    assert.ok(plot.length > 1_500_000);
    writeFileSync(join(server.files, "plot.svg"), `<?xml version="1.0" encoding="utf-8" standalone="no"?>\n<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "http://www.w3.org/Graphics/SVG/1.1/DTD/svg11.dtd">\n${plot}`);
    await runCell(page, shows("svg", `open("plot.svg").read()`));
    await seesDrawing(page, 453);
    const drawn = await page.locator(".picture iframe").last().boundingBox();
    assert.deepEqual([drawn.width, drawn.height].map(Math.round), [453, 267]);
    // The same in files.
    for (const [file, seen] of [["use", ".offer"], ["plot", ".picture iframe"]]) {
      await go(page, `#/f${server.files}/${file}.svg`);
      await page.locator(seen).waitFor();
      await goesOn(page, file);
    }
  },

  async drawings_that_take_for_ever(checking) {
    const server = await checking.server();
    const page = await visit(checking, server, "#/");
    // Nothing that can be counted is much of these: they are drawn, and not by what draws the page.
    const slow = {
      dashes: svgOf(times(300, (at) => `<path fill="none" stroke="red" stroke-dasharray=".001" d="M0 ${at}C300 0 600 0 400 9"/>`)),
      curves: svgOf(`<path fill="none" stroke="red" stroke-width="3" d="M0 0${times(50_000, (at) => `C0 0 600 0 ${at % 600} ${(at * 7919) % 600}`)}"/>`).replaceAll("\"70\"", "\"600\""),
    };
    for (const [name, svg] of Object.entries(slow)) {
      writeFileSync(join(server.files, `${name}.svg`), svg);
      await go(page, `#/f${server.files}/${name}.svg`);
      await page.locator(`[aria-label="File ${name}.svg"] :is(.picture iframe, .picture img, .offer)`).first().waitFor({ state: "attached" });
      await sleep(500);
      await goesOn(page, name);
    }
  },

  async texts_without_end(checking) {
    const server = await checking.server();
    await server.api("POST", "/v1/contexts", { language: "python", id: "book" });
    const page = await visit(checking, server, "#/n/book");
    const long = [`"\\n" * 4000000`, `"a\u05d0" * 500000`, `("a\u05d0" * 20 + "\\n") * 10000`, `"\u0628\u0644" * 500000`, `"a" * 4000000`, `"\\x01" * 1000000`, `"".join(chr(0x10000 + n % 60000) for n in range(300000))`];
    for (const text of long) {
      const output = await runCell(page, `type("Long", (), {"__repr__": lambda self: ${text}})()`);
      await output.getByRole("button", { name: "Download" }).waitFor();
      await runCell(page, `print(${text})`);
    }
    await runCell(page, `raise ValueError("a\u05d0\\n" * 30000)`);
    // The plain text is also the name of a picture.
    await runCell(page, `type("Named", (), {"__repr__": lambda self: "a\u05d0" * 500000, "_repr_svg_": lambda self: "<svg xmlns='http://www.w3.org/2000/svg'/>"})()`);
    // Lists in lists: with indents the text of these is a hundred times as long.
    await runCell(page, `from IPython.display import display\ndisplay({"application/json": eval("[" * 90 + "1," * 200000 + "]" * 90)}, raw=True)`);
    // Many results, each within what is shown of one.
    await runCell(page, `for n in range(40): display(type("T", (), {"__repr__": lambda self: "\\n" * 50000})())`);
    await runCell(page, `for n in range(40): display(${shows("html", `"<table>" + "<tr><td>x" * 5000`)})`);
    const output = await runCell(page, `for n in range(3): print("line", n)\n${shows("json", "{}")}\nprint("\u05d0\u05d1\u05d2 and \u4e2d\u6587")`);
    assert.equal(await output.locator(".stdout").textContent(), "line 0\nline 1\nline 2\n\u05d0\u05d1\u05d2 and \u4e2d\u6587\n");
  },

  async files_without_end(checking) {
    const server = await checking.server();
    const size = 4 * 1024 * 1024;
    const files = {
      "newlines.txt": "\n".repeat(size),
      "directions.txt": "a\u05d0".repeat(size / 4),
      "lines.txt": `${"a\u05d0".repeat(30)}\n`.repeat(40_000),
      "rare.txt": times(1_000_000, (at) => String.fromCodePoint(0x10000 + ((at * 7919) % 60_000))),
      "bomb.png": png(16_000, 16_000),
      "strip.png": png(1, 65_000),
    };
    for (const [name, content] of Object.entries(files)) writeFileSync(join(server.files, name), content);
    const page = await visit(checking, server, `#/f${server.files}`);
    for (const [name, content] of Object.entries(files)) {
      await go(page, `#/f${server.files}/${name}`);
      const file = page.locator(`[aria-label="File ${name}"]`);
      await file.locator(".offer, .editor, img").first().waitFor({ state: "attached", timeout: 2 * PATIENCE }).catch(() => {});
      await goesOn(page, name);
      await file.locator(".offer", { hasText: "too large" }).waitFor();
      await file.getByRole("button", { name: "Show as text" }).click();
      await file.locator(".log-line").first().waitFor();
      await goesOn(page, `${name} as text`);
      const [download] = await Promise.all([page.waitForEvent("download"), file.getByRole("button", { name: `Download ${name}` }).click()]);
      assert.equal(readFileSync(await download.path()).length, Buffer.byteLength(content));
    }
    // What is larger than can be edited can be read too.
    writeFileSync(join(server.files, "large.log"), times(100_000, (at) => `${at} of a log that is longer than what is edited here\n`));
    await go(page, `#/f${server.files}/large.log`);
    await page.getByRole("button", { name: "as text" }).click();
    await sees(page, ".log-line", "0 of a log");
    // Honest ones: a long source, one long line, other writing, and a picture of the size of a photograph.
    const honest = { "source.py": times(60_000, (at) => `    value_${at} = compute(${at})\n`), "bundle.js": "f(x);".repeat(90_000), "text.txt": "\u4e2d\u6587\u5b57 \u05d0\u05d1\u05d2\u05d3 \u043f\u0440\u0438\u0432\u0435\u0442\n".repeat(10_000) };
    for (const [name, content] of Object.entries(honest)) {
      writeFileSync(join(server.files, name), content);
      await go(page, `#/f${server.files}/${name}`);
      const editor = page.getByLabel(`Content of ${name}`);
      await editor.waitFor();
      assert.ok(await editor.evaluate((area, length) => area.value.length === length && !area.readOnly, content.length), name);
    }
    writeFileSync(join(server.files, "photo.png"), png(7000, 5000));
    await go(page, `#/f${server.files}/photo.png`);
    await until("the photograph", () => page.locator(".picture img").evaluate((image) => image.naturalWidth === 7000));
  },

  async files_of_times_without_end(checking) {
    const server = await checking.server();
    // A file system of disks has times until 2446; this one has those of 64 bits.
    const folder = mkdtempSync("/dev/shm/sbx-console-");
    checking.closers.push(() => rmSync(folder, { recursive: true }));
    writeFileSync(join(folder, "usual"), "");
    for (const [name, seconds] of [["future", "100000000000000"], ["past", "-100000000000000"], ["last", "8640000000000"]]) {
      execFileSync("touch", ["-d", `@${seconds}`, join(folder, name)]);
    }
    const page = await visit(checking, server, `#/f${folder}`);
    for (const [name, isShown] of [["usual", true], ["last", true], ["future", false], ["past", false]]) {
      const row = page.locator("tr", { has: page.locator(".name", { hasText: name }) });
      assert.equal(await row.locator("[title]").first().getAttribute("title") !== "\u2013", isShown, name);
    }
    assert.deepEqual(await page.evaluate(async () => {
      const { clock, moment } = await import("/console/dom.js");
      return [clock, moment].map((shown) => [8.64e15 + 1, -8.64e15 - 1, 2 ** 63].map(shown));
    }), [["\u2013", "\u2013", "\u2013"], ["\u2013", "\u2013", "\u2013"]]);
  },

  async names_without_end(checking) {
    const server = await checking.server();
    const word = "a\u05d0".repeat(400_000);
    for (let at = 0; at < 60; at += 1) await server.api("POST", "/v1/processes", { cmd: `: ${word.slice(0, 60_000)}`, id: `more-${at}` });
    await server.api("POST", "/v1/processes", { code: `import time; time.sleep(1000) # ${word}`, id: "one" });
    await server.api("POST", "/v1/processes", { cmd: ["sh", "-c", "sleep 1000", ...Array(60_000).fill("a\u05d0")], id: "many" });
    await server.api("POST", "/v1/processes", { cmd: `sleep 1000 # ${word.slice(0, 60_000)}`, id: "shell", pty: true });
    mkdirSync(join(server.files, "folder"));
    for (let at = 0; at < 3000; at += 1) writeFileSync(join(server.files, "folder", `${"a\u05d0".repeat(80)}${at}`), "");
    for (let at = 0; at < 12; at += 1) writeFileSync(join(server.files, `${at}.txt`), `${"needle a\u05d0".repeat(150)}\n`.repeat(100));
    const page = await visit(checking, server, "#/p");
    const places = { "#/p": ".list a", "#/p/one": ".facts", "#/p/many": ".facts", "#/t": ".tabs a", "#/t/shell": ".xterm-rows", [`#/f${server.files}/folder`]: ".files .name", [`#/f${server.files}`]: ".files .name" };
    for (const [address, seen] of Object.entries(places)) {
      await go(page, address);
      await page.locator(seen).first().waitFor({ timeout: 2 * PATIENCE }).catch(() => {});
      await goesOn(page, address);
      await page.locator(seen).first().waitFor();
    }
    await page.getByLabel("Search in files").fill("needle");
    await page.keyboard.press("Enter");
    await sees(page, ".matches mark", "needle");
    await sees(page, ".detail [role=status]", "there are more");
    await goesOn(page, "matches");
  },

  async logs_without_end(checking) {
    const server = await checking.server();
    const logs = {
      directions: `for n in range(1000): w("a\u05d0" * 2000 + "\\n")`,
      rare: `for n in range(300): w("".join(chr(0x10000 + (n * 2000 + m) % 60000) for m in range(2000)) + "\\n")`,
      colours: `for n in range(400): w("".join(f"\\x1b[3{m % 8}ma" for m in range(1500)) + "\\n")`,
      parameters: `w("\\x1b[" + ";" * 3000000); w("\\x1b[" + "1" * 900000 + "\\n")`,
      sequences: `w("\\x1b]" * 500000 + "\\n"); w("\\x1b[ " * 500000)`,
    };
    for (const [id, code] of Object.entries(logs)) await server.api("POST", "/v1/processes", { code: `import sys\nw = sys.stdout.write\n${code}\nw("\\x1b\\\\\\x1b[0m\\nthe end\\n")`, id, env: { PYTHONIOENCODING: "utf-8" } });
    const page = await visit(checking, server, "#/p", { viewport: { width: 1280, height: 4000 } });
    for (const id of Object.keys(logs)) {
      await go(page, `#/p/${id}`);
      await page.locator(".log-line.note", { hasText: "exited with 0" }).waitFor({ timeout: 2 * PATIENCE }).catch(() => {});
      await goesOn(page, id);
      await sees(page, ".log-line", "the end");
      await page.getByLabel("Find in the log").fill("a");
      await goesOn(page, `a search in ${id}`);
      await page.getByRole("log").evaluate((element) => { element.scrollTop = 0; });
      await goesOn(page, `the beginning of ${id}`);
    }
  },

  async terminals_without_end(checking) {
    const server = await checking.server();
    const page = await visit(checking, server);
    const most = 2147483647;
    const ends = ["I", "L", "M", "S", "T", "Z", "@", "P", "X", "E", "F", "A", "B", "C", "D", "G", "d", "a", "e", "'}", "'~", " @", " A"];
    const sequences = [...ends.map((end) => `x\\033[${most}${end}`), "x\\033[300000000b", `\\033[1;${most}r`, `\\033[?${most}h`];
    await server.api("POST", "/v1/processes", { cmd: `printf '${sequences.join("")}\\033[r\\033[0m\\ngoes on\\n'; sleep 1000`, pty: true, id: "counts" });
    await go(page, "#/t/counts");
    await Promise.race([until("what follows", async () => (await screen(page)).includes("goes on")), sleep(PATIENCE)]);
    await goesOn(page, "counts");
    await until("what follows", async () => (await screen(page)).includes("goes on"));
    const titles = "import sys, time\nw = sys.stdout.write\nw('\\x1b]2;' + 'a\u05d0' * 1000000 + '\\x07')\nfor n in range(3000): w('\\x1b]2;' + 'a\u05d0' * 500 + '\\x07')\nprint('shown')\nfor mark in '\\u0301', '\\u1160', '\\u200d':\n  w('a' + mark * 300000 + '\\n')\nfor n in range(3000):\n  w('\\u0301' * 15)\n  sys.stdout.flush()\nprint('behind')\nsys.stdout.flush()\ntime.sleep(1000)";
    await server.api("POST", "/v1/processes", { code: titles, env: { PYTHONIOENCODING: "utf-8" }, pty: true, id: "titles" });
    await go(page, "#/t/titles");
    await until("what follows", async () => {
      await goesOn(page, "titles");
      return (await screen(page)).includes("behind");
    }, 3 * PATIENCE);
    await server.api("POST", "/v1/processes", { cmd: "yes flood", pty: true, id: "flood" });
    await go(page, "#/t/flood");
    await until("the flood", async () => (await screen(page)).includes("flood"));
    await sleep(2000);
    await goesOn(page, "a flood");
    await server.api("DELETE", "/v1/processes/flood");
    // Each of these is allowed, and there are many.
    const many = "import sys, time\nw = sys.stdout.write\nw('\\x1b[1;1H' + '\\x1b[5000L' * 300000)\nfor part in '\\x1b[1000L', '\\x1b[1000b', '\\x1bc':\n  w('x' + part * 150000)\ntime.sleep(1000)";
    await server.api("POST", "/v1/processes", { code: many, pty: true, id: "sums" });
    await go(page, "#/t/sums");
    for (let round = 0; round < 5; round += 1) {
      await goesOn(page, "sums");
      await sleep(500);
    }
    await server.api("DELETE", "/v1/processes/sums");
    // As often as is asked for, these take minutes.
    const scrolls = "import sys, time\nw = sys.stdout.write\nfor end in 'STLM':\n  w('x' + ('\\x1b[1000' + end) * 6000)\nw('\\x1b[Hbehind')\nsys.stdout.flush()\ntime.sleep(1000)";
    await server.api("POST", "/v1/processes", { code: scrolls, pty: true, id: "scrolls" });
    await go(page, "#/t/scrolls");
    await until("what follows", async () => (await screen(page)).startsWith("behind"), 2 * PATIENCE);
    await server.api("DELETE", "/v1/processes/scrolls");
    // What the library keeps or draws anew for each of these makes minutes of them.
    const costly = { links: "'\\x1b]8;;http://a\\x07x\\n' * 200000", line: "'\\x1b]8;id=a;http://a\\x07x\\n' * 150000", colours: "''.join('\\x1b]%d;%s#%03x\\x07' % (*((4, '1;'), (11, ''))[n % 2], n % 4096) for n in range(300000))", questions: "'\\x1b[6n\\x1bP$qm\\x1b\\\\\\x1b[c\\x1b]10;?\\x07' * 200000", blinks: "'\\x1b[?12h\\x1b[?12l' * 400000", errors: "'\\x7f' * 4000000" };
    for (const [id, output] of Object.entries(costly)) {
      const code = `import sys, time, tty\ntty.setraw(0)\nprint('ready', flush=True)\nsys.stdin.read(1)\nsys.stdout.write(${output} + '\\x1b[H\\x1b[Jbehind')\nsys.stdout.flush()\ntime.sleep(1000)`;
      await server.api("POST", "/v1/processes", { code, pty: true, id });
      await go(page, `#/t/${id}`);
      await sees(page, ".terminal .badge", "live");
      await until("a terminal that listens", async () => (await screen(page)).includes("ready"));
      await page.keyboard.press("a");
      await Promise.race([until(id, async () => (await screen(page)).startsWith("behind")), sleep(2 * PATIENCE).then(() => assert.fail(id))]);
      await goesOn(page, id);
      await server.api("DELETE", `/v1/processes/${id}`);
    }
    // Marks for one cell, in runs that are short because something that shows nothing stands between them.
    const between = { delete: "\\x7f", start: "\\x1bX\\x9c", privacy: "\\x1b^\\x9c", program: "\\x1b_\\x9c", malformed: "\\x1b[1<\\x9c", nothing: "" };
    for (const [id, control] of Object.entries(between)) {
      const mark = control ? "\\u0301" : "\\u06de";
      await server.api("POST", "/v1/processes", { code: `import sys, time\nsys.stdout.write('a' + ('${mark}' * 15 + '${control}') * 20000 + '\\nbehind')\nsys.stdout.flush()\ntime.sleep(1000)`, env: { PYTHONIOENCODING: "utf-8" }, pty: true, id });
      await go(page, `#/t/${id}`);
      await Promise.race([until(id, async () => (await screen(page)).includes("behind")), sleep(PATIENCE).then(() => assert.fail(id))]);
      await goesOn(page, id);
      assert.equal((await screen(page)).split("\n")[0], "a" + (control ? "\u0301" : "\u06de").repeat(15), id);
      await server.api("DELETE", `/v1/processes/${id}`);
    }
    // A program that asks is answered, and the text of a link is shown.
    const asks = "import sys, time, tty\ntty.setraw(0)\nprint('ready', flush=True)\nsys.stdin.read(1)\nsys.stdout.write('\\x1b]11;?\\x07\\x1b[H\\x1b[6n')\nsys.stdout.flush()\nanswer = ''\nwhile not answer.endswith('R'): answer += sys.stdin.read(1)\nprint('\\x1b[J\\x1b]8;;http://a\\x07behind\\x1b]8;;\\x07', repr(answer), flush=True)\ntime.sleep(1000)";
    await server.api("POST", "/v1/processes", { code: asks, pty: true, id: "asks" });
    await go(page, "#/t/asks");
    await sees(page, ".terminal .badge", "live");
    await until("a terminal that listens", async () => (await screen(page)).includes("ready"));
    await page.keyboard.press("a");
    await until("the answers", async () => (await screen(page)).startsWith(String.raw`behind '\x1b]11;rgb:0b0b/0d0d/1010\x1b\\\x1b[1;1R'`));
    // Further than the screen is as far as the screen.
    await server.api("POST", "/v1/processes", { cmd: "printf 'one\\ntwo\\033[H\\033[2000Lnew\\033[2000I|'; sleep 1000", pty: true, id: "far" });
    await go(page, "#/t/far");
    await until("nothing but what follows", async () => /^new +\|\s*$/.test(await screen(page)));
    // Programs that use these as they are meant.
    await server.api("POST", "/v1/processes", { cmd: "printf 'a\\033[5bz\\none\\ntwo\\033[1A\\033[1L\\rnew\\033[3B\\n'; sleep 1000", pty: true, id: "honest" });
    await go(page, "#/t/honest");
    await until("a repeated letter and an inserted line", async () => /^aaaaaaz\nnew\none\ntwo/.test(await screen(page)));
  },

  async cells_of_many_texts(checking) {
    const server = await checking.server();
    const page = await visit(checking, server);
    await page.addInitScript(() => {
      const { set } = Map.prototype;
      globalThis.most = 0;
      Map.prototype.set = function (...entry) {
        set.apply(this, entry);
        globalThis.most = Math.max(globalThis.most, this.size);
        return this;
      };
    });
    await page.reload();
    const code = "import sys, tty\ntty.setraw(0)\nfor part in range(8):\n  print('\\x1b[H\\x1b[J' + ''.join(chr(0x4e00 + part * 2000 + n) + '\\u0301' for n in range(2000)), 'part', part, flush=True)\n  sys.stdin.read(1)";
    await server.api("POST", "/v1/processes", { code, env: { PYTHONIOENCODING: "utf-8" }, pty: true, id: "texts" });
    await go(page, "#/t/texts");
    for (let part = 0; part < 8; part += 1) {
      await sees(page, ".terminal .badge", "live");
      await until(`part ${part}`, async () => (await screen(page)).replaceAll("\n", "").includes(`part ${part}`));
      await page.keyboard.press("a");
    }
    // Some of the widths are kept, and by a layout of the page only that was measured with which the library begins.
    const kept = await page.evaluate(() => globalThis.most);
    assert.ok(kept > 5_000 && kept <= 10_000, `${kept} widths are kept`);
    const measured = await page.evaluate(() => [...document.querySelectorAll(".xterm-width-cache-measure-container > span")].map((element) => element.textContent));
    assert.deepEqual(measured, ["W".repeat(32), "", "", ""]);
    // Marks that are meant stay, and each row of letters is as wide as one without marks.
    const flag = "\u{1f3f4}\u{e0067}\u{e0062}\u{e0065}\u{e006e}\u{e0067}\u{e007f}";
    await server.api("POST", "/v1/processes", { cmd: `printf 'eeee.\\ne\u0301e\u0323\u0302ee\u0301.\\n${flag}'; sleep 1000`, pty: true, id: "marks" });
    await go(page, "#/t/marks");
    await until("the flag", async () => (await screen(page)).includes(`eeee.\ne\u0301e\u0323\u0302ee\u0301.\n${flag}`));
    const [plain, marked] = await page.evaluate(() => [...document.querySelectorAll(".xterm-rows > div")].slice(0, 2).map((row) => {
      const range = document.createRange();
      range.selectNodeContents(row);
      return range.getBoundingClientRect().width;
    }));
    assert.ok(Math.abs(plain - marked) < 0.5, `${plain} and ${marked}`);
  },

  async a_sandbox_that_goes(checking) {
    const server = await checking.server({ isHost: true });
    const [sandbox] = (await server.api("POST", "/v1/sandboxes", {})).sandboxes;
    const page = await visit(checking, server, `#/s/${sandbox.id}/p`, { expected: ["404"] });
    await sees(page, ".empty h2", "Nothing has run yet");
    await server.api("DELETE", `/v1/sandboxes/${sandbox.id}`);
    await sees(page, ".notice", "This sandbox is gone");
    await sees(page, ".empty h2", "No sandbox yet");
    const [other] = (await server.api("POST", "/v1/sandboxes", {})).sandboxes;
    const own = await visit(checking, server, "#/p", { token: other.token, expected: ["404", "403"] });
    await sees(own, ".empty h2", "Nothing has run yet");
    await server.api("DELETE", `/v1/sandboxes/${other.id}`);
    await own.getByLabel("Token").waitFor();
  },

  async a_server_behind_a_port(checking) {
    const server = await checking.server();
    const site = join(server.files, "site");
    mkdirSync(site);
    writeFileSync(join(site, "index.html"), `<!doctype html><title>Inside</title><p id=out>waiting</p><script type=module src=module.js></script>`);
    writeFileSync(join(site, "data.json"), "{\"value\":42}");
    writeFileSync(join(site, "module.js"), `
      const found = {};
      const attempt = async (name, action) => { try { found[name] = String(await action()); } catch (error) { found[name] = "refused"; } };
      await attempt("own", async () => (await (await fetch("data.json")).json()).value);
      await attempt("storage", () => sessionStorage.length);
      await attempt("cookie", () => document.cookie);
      await attempt("opener", () => (opener ? "there" : "none"));
      await attempt("origin", () => self.origin);
      await attempt("worker", () => navigator.serviceWorker.register("module.js"));
      await attempt("api", async () => (await fetch("/v1/processes")).status);
      await attempt("console", async () => (await fetch("/console")).status);
      out.textContent = JSON.stringify(found);`);
    await server.api("POST", "/v1/processes", { cmd: ["python3", "-m", "http.server", "0", "--bind", "127.0.0.1"], cwd: site, env: { PYTHONUNBUFFERED: "1" }, id: "web" });
    const port = await until("the port", async () => (await server.api("GET", "/v1/ports")).find((one) => one.command?.includes("http.server"))?.port);
    const page = await visit(checking, server, "#/ports");
    const [tab] = await Promise.all([page.context().waitForEvent("page"), page.getByRole("button", { name: `Open port ${port} in a new tab` }).click()]);
    await until("the page inside", async () => (await tab.locator("#out").textContent()) !== "waiting");
    const found = JSON.parse(await tab.locator("#out").textContent());
    assert.match(new URL(tab.url()).pathname, /^\/t\/[0-9a-f]{64}\/$/);
    assert.deepEqual(found, { own: "42", storage: "refused", cookie: "refused", opener: "none", origin: "null", worker: "refused", api: "refused", console: "refused" });
  },

  async ports_that_are_there_twice(checking) {
    const server = await checking.server();
    const page = await visit(checking, server, "#/ports");
    const script = "import socket, time\ns = []\nport = 0\nfor _ in range(3):\n  one = socket.socket(); one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1); one.bind(('127.0.0.1', port)); one.listen(); port = one.getsockname()[1]; s.append(one)\nprint(port, flush=True)\ntime.sleep(1000)";
    await server.api("POST", "/v1/processes", { code: script, id: "twice" });
    const port = await until("the port", async () => /data":"(\d+)/.exec(JSON.stringify(await server.api("GET", "/v1/processes/twice/logs")).replaceAll("\\", ""))?.[1]);
    const rows = page.locator("tr", { hasText: port });
    await rows.first().waitFor();
    await page.waitForResponse((answer) => answer.url().endsWith("/v1/ports"));
    await page.waitForResponse((answer) => answer.url().endsWith("/v1/ports"));
    const listed = (await server.api("GET", "/v1/ports")).filter((one) => String(one.port) === port).length;
    await until("as many rows as ports", async () => (await rows.count()) === listed);
    await server.api("DELETE", "/v1/processes/twice");
    await until("no row", async () => (await rows.count()) === 0);
  },

  async network_verdicts(checking) {
    const server = await checking.server();
    await server.api("POST", "/v1/exec", { cmd: "curl -s http://refused.example/", network: { mode: "allowlist", allow: ["127.0.0.1"] } });
    const page = await visit(checking, server, "#/network");
    await sees(page, "tr", "refused.example");
    await sees(page, "tr .badge", "refused");
  },

  async curves(checking) {
    const server = await checking.server();
    const page = await visit(checking, server, "#/");
    await until("a curve", () => page.locator(".curve .line").first().evaluate((line) => (line.getAttribute("d") ?? "").split("L").length > 2));
    await sees(page, ".card .big", /MiB|GiB/);
    await sees(page, ".gauge", "Memory");
  },

  async sandboxes_with_a_root_of_their_own(checking) {
    const template = mkdtempSync(join(tmpdir(), "sbx-template-"));
    try {
      for (const name of ["bin", "dev", "etc", "proc", "root", "run", "sys", "tmp"]) mkdirSync(join(template, name));
      copyFileSync("/bin/busybox", join(template, "bin/sh"));
      writeFileSync(join(template, "etc/passwd"), "root:x:0:0::/root:/bin/sh\n");
      const server = await checking.server({ isHost: true, environment: { SBX_TEMPLATES: `bare=${template}` } });
      const page = await visit(checking, server, "#/");
      await page.getByRole("button", { name: "New sandbox" }).click();
      await page.getByLabel("A root of its own, made of").selectOption("bare");
      await page.getByRole("button", { name: "Create" }).click();
      await sees(page, ".facts", "its own, made of bare; commands run as root");
      await page.getByRole("link", { name: "Processes" }).click();
      await run(page, "echo > /here && echo \"$USER at $PWD\"");
      await sees(page, ".log-line", "root at /root");
      await page.getByRole("link", { name: "Files" }).click();
      await sees(page, "table", "here");
    } finally {
      rmSync(template, { recursive: true, force: true });
    }
  },

  async sandboxes_of_a_host(checking) {
    const server = await checking.server({ isHost: true });
    const page = await visit(checking, server, "#/");
    await page.getByRole("button", { name: "New sandbox" }).click();
    await page.getByRole("button", { name: "Create" }).click();
    await sees(page, "h1", "Overview");
    const [sandbox] = await server.api("GET", "/v1/sandboxes").then((list) => list.sandboxes ?? list);
    assert.equal(await page.evaluate(() => location.hash), `#/s/${sandbox.id}`);
    await sees(page, ".facts", "landlock");
    await page.getByRole("link", { name: "Processes" }).click();
    await run(page, "echo at home; pwd");
    await sees(page, ".log-line", "at home");
    assert.match(await page.evaluate(() => location.hash), new RegExp(`^#/s/${sandbox.id}/p/p-\\d+$`));
    await page.getByRole("link", { name: "Terminals" }).click();
    await page.getByRole("button", { name: "New terminal" }).first().click();
    await sees(page, ".terminal .badge", "live");
    await page.getByRole("link", { name: "Files" }).click();
    await sees(page, ".crumbs", "home");
    await page.getByRole("link", { name: "all sandboxes" }).click();
    await sees(page, "table a", sandbox.id);
    await page.getByRole("button", { name: `Delete sandbox ${sandbox.id}` }).click();
    await page.getByRole("button", { name: "Delete", exact: true }).click();
    await sees(page, ".empty h2", "No sandbox yet");
  },

  async a_sandbox_rests_and_runs_again(checking) {
    const server = await checking.server({ isHost: true });
    const made = await server.api("POST", "/v1/sandboxes", { name: "<b>mine</b>", labels: { team: "a" }, idle_timeout_secs: 600, on_idle: "pause" });
    const { id } = made.sandboxes[0];
    const page = await visit(checking, server, `#/s/${id}`);
    await sees(page, ".facts", "<b>mine</b>");
    await sees(page, ".facts .badge", "team: a");
    await sees(page, ".facts", "paused after 10 min 0 s without a request");
    await sees(page, ".facts .badge", "running");
    await page.getByRole("button", { name: "Pause", exact: true }).click();
    await sees(page, ".facts .badge", "paused");
    await page.getByRole("button", { name: "Resume", exact: true }).click();
    await sees(page, ".facts .badge", "running");
    await server.api("POST", `/v1/sandboxes/${id}/pause`, { keep: "files" });
    await page.getByRole("link", { name: "all sandboxes" }).click();
    await sees(page, "table .badge", "stopped: asked");
    await sees(page, "table", "<b>mine</b>");
  },

  async the_token_of_a_sandbox(checking) {
    const server = await checking.server({ isHost: true });
    const made = (await server.api("POST", "/v1/sandboxes", { count: 2 })).sandboxes;
    const page = await visit(checking, server, "#/", { token: made[0].token });
    await sees(page, ".where", made[0].id);
    await sees(page, "h1", "Overview");
    await until("a curve", () => page.locator(".curve .line").first().evaluate((line) => (line.getAttribute("d") ?? "").split("L").length > 2));
    assert.ok(!(await page.content()).includes(made[1].id));
    await go(page, "#/p");
    await run(page, "id -u");
    await sees(page, ".log-line", String(made[0].uid));
    await go(page, "#/f/");
    await sees(page, ".crumbs", "home");
    await go(page, "#/ports");
    await sees(page, ".empty h2", "Nothing listens");
  },

  async pictures(checking) {
    const folder = process.env.SBX_PICTURES;
    const server = await checking.server({ environment: { PS1: "\\[\\e[36m\\]\\w\\[\\e[0m\\] $ " } });
    writeFileSync(join(server.files, "test_median.py"), "from stats import median\n\n\ndef test_median():\n    assert median([3, 1, 2]) == 2\n");
    await server.api("POST", "/v1/processes", { cmd: ["python3", "-m", "http.server", "8000", "--bind", "127.0.0.1"], id: "web", tag: "site" });
    await server.api("POST", "/v1/processes", { cmd: "exit 1", id: "lint" });
    await server.api("POST", "/v1/processes", { cmd: "sleep 0.4", id: "fetch" });
    const build = "for n in $(seq 1 60); do printf '\\033[32mPASS\\033[0m tests/test_%02d.py::test_case_%d \\033[2m[%d ms]\\033[0m\\n' $n $n $((n * 7 % 40)); [ $((n % 23)) = 0 ] && echo \"warning: test_$n is slow\" >&2; done; printf '\\033[33mcollected 60 items\\033[0m\\n'; sleep 1000";
    await server.api("POST", "/v1/processes", { cmd: build, id: "tests", tag: "nightly" });
    const page = await visit(checking, server, "#/p/tests", { viewport: { width: 1200, height: 720 } });
    await sees(page, ".log-line", "collected 60 items");
    await until("a sample", async () => !(await text(page, ".gauge")).includes("\u2013"));
    if (folder) await page.screenshot({ path: join(folder, "console-processes.png") });
    await page.emulateMedia({ colorScheme: "light" });
    await server.api("POST", "/v1/contexts", { language: "python", id: "analysis" });
    await go(page, "#/n/analysis");
    const cell = async (code) => {
      await page.locator(".cell").last().getByLabel("Code").fill(code);
      await page.keyboard.press("Shift+Enter");
    };
    await cell("class Frame:\n    def __init__(self, rows): self.rows = rows\n    def _repr_html_(self):\n        return '<table>' + ''.join('<tr>' + ''.join(f'<t{\"h\" if i == 0 else \"d\"}>{c}</t{\"h\" if i == 0 else \"d\"}>' for c in r) + '</tr>' for i, r in enumerate(self.rows)) + '</table>'\n\nFrame([['model', 'passed', 'seconds'], ['small', '41 / 60', '12.8'], ['large', '58 / 60', '31.4']])");
    await sees(page, ".output td", "58 / 60");
    await cell("class Plot:\n    def _repr_svg_(self):\n        bars = ''.join(f'<rect x=\"{20 + 44 * n}\" y=\"{110 - h}\" width=\"30\" height=\"{h}\" rx=\"3\" fill=\"#0f766e\" opacity=\"{0.45 + n / 14}\"/>' for n, h in enumerate([28, 44, 39, 61, 72, 90, 97]))\n        return f'<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"340\" height=\"124\">{bars}<path d=\"M12 110.5h316\" stroke=\"#98a2ad\"/></svg>'\n\nPlot()");
    await seesDrawing(page, 340);
    await page.locator(".cell").last().getByLabel("Code").fill("");
    if (folder) await page.screenshot({ path: join(folder, "console-notebook.png") });
  },
};

// --- the runner

async function check(name, action) {
  const checking = { closers: [], wrong: [] };
  checking.server = async (options) => {
    const server = await Server.start(options);
    checking.closers.push(() => server.close());
    return server;
  };
  checking.line = async (server) => {
    const line = await Line.to(server.port);
    checking.closers.push(() => line.close());
    return line;
  };
  const begun = Date.now();
  let failure = null;
  try {
    await action(checking);
    assert.deepEqual(checking.wrong, []);
  } catch (error) {
    failure = error;
    for (const context of browser.contexts()) {
      for (const page of context.pages()) console.log(`      ${page.url()}\n${await page.locator("body").innerText().catch(() => "")}`.slice(0, 3000));
    }
    if (checking.wrong.length) console.log(checking.wrong.join("\n"));
  }
  for (const close of checking.closers.reverse()) await close();
  console.log(`${failure ? "FAILED" : "ok"} ${name} (${((Date.now() - begun) / 1000).toFixed(1)} s)`);
  if (failure) console.log(failure.stack);
  return !failure;
}

browser = await chromium.launch({ executablePath: CHROMIUM, args: FLAGS });
let passed = 0;
let failed = 0;
for (const [name, action] of Object.entries(checks)) {
  if (words.length && !words.some((word) => name.includes(word))) continue;
  if (await check(name, action)) passed += 1;
  else failed += 1;
}
await browser.close();
console.log(`${passed} passed, ${failed} failed`);
process.exit(failed ? 1 : 0);
