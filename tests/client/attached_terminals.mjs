// The WebSocket of browsers, and xterm.js with its attach addon, at terminals of the server.
//
//     node attached_terminals.mjs <address of the server> <token> <node_modules>
//
// The exit status is 0 only if all assertions held.

import assert from "node:assert/strict";
import { createRequire } from "node:module";

const [url, token, modules] = process.argv.slice(2);
const require = createRequire(modules + "/");
globalThis.self = globalThis;
globalThis.WebSocket ??= require("undici").WebSocket;
const { Terminal } = require("@xterm/headless");
const { AttachAddon } = require("@xterm/addon-attach");

// Without it Node.js ends with status 13 as soon as nothing is left that an assertion could wait for.
setTimeout(() => assert.fail("it takes too long"), 60_000);

const bearer = "sbx.bearer." + Buffer.from(token).toString("base64url");

async function start(cmd, pty = true) {
  const reply = await fetch(`${url}/v1/processes`, {
    method: "POST",
    headers: { "X-Sandbox-Token": token },
    body: JSON.stringify({ cmd, pty }),
  });
  return (await reply.json()).id;
}

function connect(id, protocols, query = "") {
  const target = `${url.replace("http", "ws")}/v1/processes/${id}/attach${query}`;
  const socket = new WebSocket(target, protocols);
  socket.binaryType = "arraybuffer";
  return socket;
}

const closed = (socket) => new Promise((resolve) => socket.addEventListener("close", resolve));

// Events and requests.
{
  const id = await start('read line; echo "got $line"; exit 5');
  const socket = connect(id, ["sbx.pty.v1", bearer]);
  const events = [];
  let output = "";
  socket.addEventListener("message", ({ data }) => {
    if (typeof data === "string") events.push(JSON.parse(data));
    else output += new TextDecoder().decode(data);
    if (events.at(-1)?.event === "live" && !output) socket.send(new TextEncoder().encode("text\n"));
  });
  const { code, reason, wasClean } = await closed(socket);
  assert.deepEqual([code, reason, wasClean], [1000, "exit 5", true]);
  assert.equal(socket.protocol, "sbx.pty.v1");
  assert.match(output, /got text/);
  assert.deepEqual(events.map(({ event }) => event), ["attached", "live", "exit"]);
}

// A wrong token, and a close by the client.
{
  const id = await start("read line");
  const refused = connect(id, ["sbx.pty.v1", "sbx.bearer.d3Jvbmc"]);
  await new Promise((resolve) => refused.addEventListener("error", resolve));
  const socket = connect(id, ["sbx.raw.v1", bearer]);
  await new Promise((resolve) => socket.addEventListener("open", resolve));
  assert.equal(socket.protocol, "sbx.raw.v1");
  socket.close(4001, "done");
  assert.equal((await closed(socket)).code, 4001);
}

// The attach addon, unchanged. The question where the cursor is was asked before it came.
{
  const id = await start('printf "\\033[6nfirst "; read line; echo "<$line>"; read line; echo "<$line>"');
  const waiting = connect(id, ["sbx.raw.v1", bearer]);
  await new Promise((resolve) => waiting.addEventListener("message", resolve));
  const terminal = new Terminal({ rows: 24, cols: 80, allowProposedApi: true });
  const socket = connect(id, ["sbx.raw.v1", bearer]);
  terminal.loadAddon(new AttachAddon(socket));
  const screen = () => {
    const { active } = terminal.buffer;
    const lines = Array.from({ length: 24 }, (_, y) => active.getLine(y).translateToString(true));
    return lines.join("\n");
  };
  const shows = (text) => new Promise((resolve) => {
    const look = () => (screen().includes(text) ? resolve() : setTimeout(look, 10));
    look();
  });
  await shows("first");
  terminal.input("h\u00e9llo\r");
  await shows("<h\u00e9llo>");
  terminal.input("again\r");
  const { code, reason } = await closed(socket);
  assert.deepEqual([code, reason], [1000, "exit 0"]);
  await shows("<again>");
  assert.ok(!screen().includes("R<") && !screen().includes("[1;"), screen());
}

// A program that draws 200x60 again and again. Who has seen all of it and who comes later see the same screen.
{
  const draw = `stty -echo; awk 'BEGIN { for (frame = 0; frame < 40; frame++) for (row = 1; row <= 60; row++) {
    printf("\\033[%d;1H", row); for (column = 0; column < 200; column++) printf("%c", 33 + (frame + row + column) % 90) } }'; read line`;
  const id = await start(draw, { rows: 60, cols: 200 });
  const line = (y) => Array.from({ length: 200 }, (_, x) => String.fromCharCode(33 + ((39 + y + 1 + x) % 90))).join("");
  const expected = Array.from({ length: 60 }, (_, y) => line(y)).join("\n");
  for (const _ of ["from the beginning", "later"]) {
    const terminal = new Terminal({ rows: 60, cols: 200, allowProposedApi: true });
    terminal.loadAddon(new AttachAddon(connect(id, ["sbx.raw.v1", bearer])));
    const screen = () => {
      const { active } = terminal.buffer;
      return Array.from({ length: 60 }, (_, y) => active.getLine(active.baseY + y).translateToString(true)).join("\n");
    };
    while (screen() !== expected) await new Promise((resolve) => setTimeout(resolve, 10));
  }
}
process.exit(0);
