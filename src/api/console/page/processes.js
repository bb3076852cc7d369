// Processes: the list, the log of one, and what can be done with it.

import { ApiError, at, call, events, get, post } from "./api.js";
import {
  ago, badge, bytes, button, clock, complain, duration, empty, every, foreign, guarded, h, moment, notify,
  pause, reconcile, setText, visible,
} from "./dom.js";
import { LogView } from "./log.js";

/** What the server runs at a terminal without a command. */
const INTERACTIVE_SHELL = "[ -x /bin/bash ] && exec /bin/bash; exec /bin/sh";

/** Most characters of a command that are shown. */
const MOST_COMMAND = 500;
/** Most processes that are listed. */
const MOST_LISTED = 2_000;

/** A command as one line of text, or its beginning. */
export function commandText({ cmd, code, language }) {
  if (cmd === INTERACTIVE_SHELL) return "shell";
  const begin = (text) => (text.length > MOST_COMMAND ? `${text.slice(0, MOST_COMMAND)}…` : text);
  if (code) return `${language}: ${begin(code).split("\n").find((line) => line.trim()) ?? ""}`;
  return begin(Array.isArray(cmd) ? cmd.slice(0, MOST_COMMAND).map(begin).map((word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word}'`)).join(" ") : cmd ?? "");
}

/** How a process stands, as a badge. */
export function stateBadge(process) {
  if (process.running) return badge("busy", "running");
  if (process.reason === "exited") return badge(process.exit_code === 0 ? "good" : "bad", `exit ${process.exit_code}`);
  return badge("bad", process.reason === "signaled" || process.reason === "killed" ? `${process.reason} ${process.signal ?? ""}`.trim() : process.reason);
}

/** Buttons for signals, shared with terminals. */
export function signalButtons(workspace, idOf, group) {
  const signal = (name) => guarded(() => post(`${workspace.prefix}/processes/${encodeURIComponent(idOf())}/kill`, { signal: name, group }));
  return [
    button("stop", { title: "Interrupt: SIGINT", label: "Interrupt", onclick: signal("INT") }),
    button("close", { title: "Kill the whole process tree: SIGKILL", label: "Kill", onclick: guarded(() => post(`${workspace.prefix}/processes/${encodeURIComponent(idOf())}/kill`, { signal: "KILL" })) }),
  ];
}

export function processesView(workspace, signal) {
  const path = `${workspace.prefix}/processes`;
  let known = [];
  let shown = null;
  let detail = null;

  const input = h("input", { type: "text", name: "cmd", placeholder: "Run a command", "aria-label": "Command", autocomplete: "off", spellcheck: "false" });
  const form = h("form", { class: "command", onsubmit: guarded(async (event) => {
    event.preventDefault();
    const cmd = input.value.trim();
    if (!cmd) return;
    const started = await post(path, { cmd });
    input.value = "";
    // A server that was restarted gives the ids of before again.
    open(started.id);
    workspace.go("p", started.id);
  }) }, h("span", { class: "prompt", "aria-hidden": "true" }, "$"), input, h("button", { class: "button primary" }, "Run"));
  const list = h("ul", { class: "list", "aria-label": "Processes" });
  const side = h("div", { class: "side" }, form, list);
  const pane = h("div", { class: "pane" });
  const element = h("div", { class: "split" }, side, pane);

  const makeItem = (process) => h("li", {},
    h("a", { href: workspace.link("p", process.id) },
      h("span", { class: "row" }, h("span", { class: "dot" }), foreign(commandText(process), "bdi", { class: "mono name", title: visible(commandText(process)) })),
      h("span", { class: "row quiet small" }, h("span", { class: "mono" }, process.id), h("span", { class: "space" }), h("span", { class: "age" }))));

  function updateItem(item, process) {
    const state = process.running ? "busy" : process.exit_code === 0 ? "good" : "bad";
    item.querySelector(".dot").className = `dot ${state}`;
    item.querySelector(".dot").setAttribute("title", process.running ? "running" : process.reason);
    setText(item.querySelector(".age"), process.running ? ago(process.started_at_ms) : duration(process.duration_ms));
    const link = item.firstElementChild;
    if (process.id === shown) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }

  async function refresh() {
    known = await get(path, signal);
    const newest = [...known].sort((one, other) => Number(other.running) - Number(one.running) || other.started_at_ms - one.started_at_ms);
    reconcile(list, newest.slice(0, MOST_LISTED), (process) => process.id, makeItem, updateItem);
    if (!shown) showNothing();
    detail?.update(known.find((process) => process.id === shown));
  }

  function showNothing() {
    if (detail || pane.firstChild?.className === "empty") return;
    pane.replaceChildren(known.length
      ? empty("processes", "Choose a process", "Its output appears here while it runs, and stays after it has ended.")
      : empty("processes", "Nothing has run yet", "Run a command in the field on this page, or through the API: it appears here."));
  }

  const round = every(2000, signal, refresh);

  function open(id) {
    detail?.close();
    detail = null;
    shown = id ?? null;
    element.classList.toggle("detailed", Boolean(id));
    if (id) {
      detail = processDetail(workspace, id, signal, round);
      pane.replaceChildren(detail.element);
    } else pane.replaceChildren();
    round();
  }

  return {
    element,
    title: "Processes",
    show([id]) {
      if (id !== shown || !detail) open(id);
    },
    close: () => detail?.close(),
  };
}

function processDetail(workspace, id, parent, refresh) {
  const path = `${workspace.prefix}/processes/${encodeURIComponent(id)}`;
  const control = new AbortController();
  parent.addEventListener("abort", () => control.abort(), { signal: control.signal });
  const { signal } = control;

  const name = h("h2", { class: "mono" });
  const state = h("span", { class: "state", role: "status" });
  const facts = h("dl", { class: "facts" });
  const log = new LogView({ label: "Output" });
  const line = h("input", { type: "text", class: "mono", placeholder: "Type a line for its input", "aria-label": "Input", autocomplete: "off", spellcheck: "false" });
  const stdin = h("form", { class: "command", hidden: true, onsubmit: guarded(async (event) => {
    event.preventDefault();
    const typed = line.value;
    line.value = "";
    await call("POST", `${path}/stdin`, { body: `${typed}\n` });
  }) }, line, h("button", { class: "button" }, "Send"),
  button(null, { title: "End of input", label: "EOF", onclick: guarded(() => call("POST", `${path}/stdin?eof=1`)) }));
  const signals = h("span", { class: "group" }, signalButtons(workspace, () => id));
  const terminal = h("a", { class: "button", href: workspace.link("t", id), hidden: true }, "Open terminal");
  const remove = button("trash", { title: "End the process and forget it", label: "Remove", onclick: guarded(async () => {
    await call("DELETE", path);
    notify(`${id} is removed`);
    workspace.go("p");
  }) });
  const element = h("article", { class: "detail", "aria-label": `Process ${id}` },
    h("header", {},
      h("a", { class: "button square back", href: workspace.link("p"), "aria-label": "All processes" }, "‹"),
      name, state, h("span", { class: "space" }), terminal, signals, remove),
    facts, log.element, stdin);

  let startedAt = null;
  function update(process) {
    if (!process) {
      // It was removed, or the server was restarted.
      state.replaceChildren(badge("quiet", "no longer known"));
      signals.hidden = terminal.hidden = stdin.hidden = remove.hidden = true;
      return;
    }
    startedAt = process.started_at_ms;
    setText(name, visible(commandText(process)));
    name.title = visible(commandText(process));
    state.replaceChildren(stateBadge(process));
    signals.hidden = !process.running;
    terminal.hidden = !(process.pty && process.running);
    stdin.hidden = !(process.running && process.background && !process.pty);
    const rows = [
      ["Id", process.id], ["Pid", process.pid], process.tag && ["Tag", visible(process.tag)],
      ["Started", moment(process.started_at_ms)],
      [process.running ? "Running for" : "Ran for", process.running ? ago(process.started_at_ms) : duration(process.duration_ms)],
      ["Output", bytes(process.stdout_bytes + process.stderr_bytes)],
    ].filter(Boolean);
    reconcile(facts, rows, ([term]) => term, ([term]) => h("div", {}, h("dt", {}, term), h("dd", {})), (row, [, value]) => setText(row.lastChild, String(value)));
  }

  /** Follows the log from where it is, and again after the connection broke, until the process has ended. */
  async function follow() {
    const offsets = { stdout: 0, stderr: 0 };
    let wait = 250;
    for (;;) {
      try {
        const query = { follow: 1, stdout_offset: offsets.stdout, stderr_offset: offsets.stderr };
        for await (const event of events("GET", at(`${path}/logs`, query), { signal })) {
          wait = 250;
          if (event.event === "stdout" || event.event === "stderr") {
            offsets[event.event] = event.offset + event.bytes;
            log.add(event.event, event.data);
          } else if (event.event === "dropped") {
            offsets[event.stream] = event.offset + event.bytes;
            log.note(`${bytes(event.bytes)} of ${event.stream} are no longer kept`);
          } else if (event.event === "exit") {
            const how = event.reason === "exited" ? `exited with ${event.exit_code}` : `ended: ${event.reason}${event.signal ? `, signal ${event.signal}` : ""}`;
            startedAt ??= (await get(path, signal)).started_at_ms;
            log.note(`${how} after ${duration(event.duration_ms)} (${clock(startedAt + event.duration_ms)})`);
            refresh();
            return;
          }
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error instanceof ApiError) {
          log.note(error.status === 404 ? "this process is not known to the server: it was removed, or the server was restarted" : error.message);
          signals.hidden = stdin.hidden = true;
          return;
        }
      }
      await pause(wait, signal);
      wait = Math.min(wait * 2, 4000);
    }
  }

  get(path, signal).then(update, (error) => {
    if (error.code === "not_found") setText(name, id);
    else complain(error);
  });
  follow().catch(() => {});
  return { element, update, close: () => control.abort() };
}
