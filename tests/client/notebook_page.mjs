// examples/notebook.html without a browser: its script runs with as much of a document as it uses. What a browser adds
// is checked here: the server allows the origin of the page before each request (CORS).
//
//     node notebook_page.mjs <address of the server> <token> <page>
//
// The exit status is 0 only if all assertions held.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

const [url, token, page] = process.argv.slice(2);
const ORIGIN = "http://127.0.0.1:8000";
setTimeout(() => assert.fail("it takes too long"), 60_000);

const html = readFileSync(page, "utf8");
assert.ok(html.includes(`SBX_ALLOWED_ORIGINS=${ORIGIN}`));
const address = '"http://127.0.0.1:49983"';
const script = html.match(/<script type="module">(.*?)<\/script>/s)[1];
assert.ok(script.includes(address));

class Element {
  children = [];
  attributes = {};
  constructor(name) {
    this.name = name;
  }
  append(...nodes) {
    for (const node of nodes) node.parent = this;
    this.children.push(...nodes);
  }
  replaceChildren() {
    this.children = [];
  }
  replaceWith(node) {
    node.parent = this.parent;
    this.parent.children[this.parent.children.indexOf(this)] = node;
  }
  setAttribute(name, value) {
    this.attributes[name] = value;
  }
}
const ids = {};
for (const [, id] of html.matchAll(/id="([^"]+)"/g)) ids[id] = new Element(id);
globalThis.document = { createElement: (name) => new Element(name), getElementById: (id) => ids[id] };
globalThis.location = { hash: `#${token}`, pathname: "/notebook.html" };
let shown, asked;
globalThis.history = { replaceState: (_state, _title, path) => (shown = path) };
globalThis.prompt = (question) => {
  asked = question;
  return "Ada";
};

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

await import("data:text/javascript," + encodeURIComponent(script.replace(address, JSON.stringify(url))));
assert.equal(shown, "/notebook.html", "the token is not in the address");

// Runs code in the first cell and returns what it shows.
const [cell, start, output] = ids.cells.children;
const run = async (code) => {
  cell.value = code;
  await start.onclick();
  return output.children;
};

let nodes = await run("import sys\nx = 6\nprint('out', flush=True)\nprint('err', file=sys.stderr)\nx * 7");
assert.deepEqual(nodes.map((node) => [node.className, node.textContent]), [["stdout", "out\n"], ["stderr", "err\n"], ["value", "42"]]);

nodes = await run("class Table:\n  def _repr_html_(self): return f'<table>{x}</table>'\nTable()");
assert.equal(nodes[0].name, "iframe");
assert.equal(nodes[0].srcdoc, "<table>6</table>");
assert.equal(nodes[0].attributes.sandbox, "", "what the code shows has no scripts and no origin");

nodes = await run("class Image:\n  def _repr_png_(self): return b'\\x89PNG'\ndisplay(Image())");
assert.equal(nodes[0].src.trim(), "data:image/png;base64,iVBORw==");

nodes = await run("1 / 0");
assert.equal(nodes[0].className, "error");
assert.ok(nodes[0].textContent.endsWith("ZeroDivisionError: division by zero"));

nodes = await run("print('hello', input('name? '))");
assert.equal(asked, "name? ");
assert.equal(nodes.at(-1).textContent, "hello Ada\n");

const endless = run("print('begun', flush=True)\nwhile True: pass");
while (!output.children.some((node) => node.textContent === "begun\n")) await new Promise((resolve) => setTimeout(resolve, 10));
await ids.interrupt.onclick();
assert.ok((await endless).at(-1).textContent.includes("KeyboardInterrupt"));

nodes = await run("x");
assert.equal(nodes[0].textContent, "6", "an interrupt keeps the variables");

nodes = await run("import os; os._exit(1)");
assert.equal(nodes.at(-1).textContent, "died: all variables are gone; restart");
await ids.restart.onclick();
nodes = await run("'x' in globals()");
assert.equal(nodes[0].textContent, "False");

ids.add.onclick();
assert.equal(ids.cells.children.length, 6);
process.exit(0);
