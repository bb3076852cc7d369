// examples/terminal.html without a browser: its script runs with xterm.js, whose screen is in memory, and with
// the attach addon. What a browser adds is checked here: where the page's files are, and that the server allows the
// origin of the page before each request (CORS).
//
//     node terminal_page.mjs <address of the server> <token> <directory of node_modules> <page>
//
// The exit status is 0 only if all assertions held.

import assert from "node:assert/strict";
import { existsSync, readFileSync } from "node:fs";
import { createRequire } from "node:module";

const [url, token, modules, page] = process.argv.slice(2);
const ORIGIN = "http://127.0.0.1:8000";
setTimeout(() => assert.fail("it takes too long"), 60_000);

const html = readFileSync(page, "utf8");
for (const [, file] of html.matchAll(/(?:src|href)="([^"]+)"/g)) {
  assert.ok(existsSync(`${modules}/${file}`), file);
}
assert.ok(html.includes(`SBX_ALLOWED_ORIGINS=${ORIGIN}`));
const address = '"http://127.0.0.1:49983"';
const script = html.match(/<script type="module">(.*?)<\/script>/s)[1];
assert.ok(script.includes(address));

const require = createRequire(modules + "/");
globalThis.self = globalThis;
globalThis.WebSocket ??= require("undici").WebSocket;
const headless = require("@xterm/headless");
let terminal, element;
globalThis.Terminal = class extends headless.Terminal {
  constructor() {
    super({ allowProposedApi: true });
    terminal = this;
  }
  open(container) {
    element = container;
  }
};
globalThis.AttachAddon = require("@xterm/addon-attach");
let fits = 0;
// The real one measures characters.
globalThis.FitAddon = { FitAddon: class { activate() {} dispose() {} fit() { fits += 1; } } };

const listeners = {};
globalThis.addEventListener = (name, listener) => (listeners[name] = listener);
globalThis.document = { getElementById: (id) => ({ id }) };
globalThis.location = { hash: `#${token}`, pathname: "/terminal.html" };
let shown;
globalThis.history = { replaceState: (_state, _title, path) => (shown = path) };

const request = globalThis.fetch;
globalThis.fetch = async (target, options) => {
  const names = Object.keys(options.headers).join(",").toLowerCase();
  const headers = { Origin: ORIGIN, "Access-Control-Request-Method": options.method, "Access-Control-Request-Headers": names };
  const preflight = await request(target, { method: "OPTIONS", headers });
  assert.equal(preflight.status, 204);
  const listed = (name) => preflight.headers.get(name).toLowerCase().split(/, */);
  assert.ok(listed("Access-Control-Allow-Methods").includes(options.method.toLowerCase()));
  for (const name of names.split(",")) assert.ok(listed("Access-Control-Allow-Headers").includes(name), name);
  const reply = await request(target, { ...options, headers: { ...options.headers, Origin: ORIGIN } });
  assert.equal(reply.headers.get("Access-Control-Allow-Origin"), ORIGIN);
  return reply;
};
const Socket = globalThis.WebSocket;
globalThis.WebSocket = class extends Socket {
  constructor(target, protocols) {
    super(target, { protocols, headers: { Origin: ORIGIN } });
  }
};

const source = script.replace(address, JSON.stringify(url));
await import("data:text/javascript," + encodeURIComponent(source));
assert.equal(element.id, "terminal");
assert.equal(shown, "/terminal.html", "the token is not in the address");

const screen = () => {
  const { active } = terminal.buffer;
  const lines = Array.from({ length: active.length }, (_, y) => active.getLine(y).translateToString(true));
  return lines.join("\n");
};
const shows = (text) => new Promise((resolve) => {
  const look = () => (screen().includes(text) ? resolve() : setTimeout(look, 10));
  look();
});
// Keys before the connection are lost, and nothing else is.
terminal.input("x");
while (!screen().trim()) await new Promise((resolve) => setTimeout(resolve, 10));
const type = (text) => terminal.input(text + "\r");
type("PS1='> '; echo s$((6 * 7))e $(stty size)");
await shows("s42e 24 80");
listeners.resize();
assert.equal(fits, 2);
terminal.resize(100, 30);
type("until [ \"$(stty size)\" = '30 100' ]; do sleep 0.05; done; echo re''sized");
await shows("\nresized");
type("exit 9");
await shows("[exit 9]");
process.exit(0);
