// Interpreter contexts as a notebook: cells of code, and what they show as text, tables and images. Rich results come
// from code that nobody trusts, so HTML is read for the texts of its tables only, and images are data of an <img>.

import { ApiError, at, call, events, get, post } from "./api.js";
import { Budget, fill } from "./bounds.js";
import { ask, badge, button, duration, field, guarded, h, notify, setText, settled, visible } from "./dom.js";
import { drawing, offer, picture } from "./pictures.js";
import { tabsView } from "./tabs.js";

/** Most characters of a stream that are kept to be shown. */
const MOST_STREAM = 200_000;
/** Most cells of a row of a table that are shown, and most columns that they span. */
const MOST_CELLS = 200;
const MOST_COLUMNS = 1_000;
/** What the tables of a result may take to draw, what one does, a cell or row of it, and each place that a cell spans. */
const TABLES = 1_000_000;
const TABLE = 500;
const CELL = 50;
const PLACE = 8;
/** Most characters of HTML in which tables are looked for. */
const MOST_HTML = 2_000_000;
/** Most parts of the output of a cell, and most characters in them; the oldest go first. */
const MOST_PARTS = 500;
const MOST_OUTPUT = 20_000_000;
/** Most characters of JSON that is laid out in lines, by how deep it is. */
const MOST_INDENTED = 20_000;

/** How a context stands. */
const toneOf = (context) => ({ busy: "busy", idle: "good", dead: "bad" })[context.state] ?? "quiet";

export function notebookView(workspace, signal) {
  const { prefix } = workspace;
  const make = guarded(async () => {
    const languages = await get(`${prefix}/languages`, signal);
    const choices = languages.filter((language) => language.available).flatMap(({ language, backends }) => backends.map((backend) => [language, typeof backend === "string" ? backend : backend.name]));
    if (!choices.length) return notify("no interpreter is installed here: python3, node or bash", "bad");
    const select = h("select", { name: "choice" }, choices.map(([language, backend]) => h("option", { value: `${language} ${backend}` }, backend === language || backend === "node" ? language : `${language} (${backend})`)));
    const answer = await ask({ title: "New context", text: "An interpreter that keeps its variables between cells.", fields: [field("Language", select), field("Name", h("input", { name: "id", pattern: "[A-Za-z0-9._\\-]{1,64}", autocomplete: "off" }), "Optional: letters, digits, . _ -")], confirm: "Start" });
    if (!answer) return;
    const [language, backend] = answer.choice.split(" ");
    const context = await post(`${prefix}/contexts`, { language, backend, id: answer.id || undefined });
    await view.round();
    workspace.go("n", context.id);
  });
  const starter = (properties) => button("plus", { label: "New context", class: "primary", onclick: make, ...properties });
  const view = tabsView(workspace, signal, {
    section: "n",
    title: "Contexts",
    start: starter({ title: "Start an interpreter" }),
    list: () => get(`${prefix}/contexts`, signal),
    look: (context) => ({ tone: toneOf(context), name: `${context.id} ${context.id.includes(context.language) ? "" : context.language}`.trim() }),
    open: (id, round) => notebook(workspace, id, signal, round),
    nothing: (areSome) => (areSome
      ? ["notebook", "Choose a context", "Variables, imports and the working directory stay from cell to cell."]
      : ["notebook", "No interpreter runs", "A context is a Python, JavaScript or bash that keeps its variables from cell to cell.", starter()]),
    scrolls: true,
  });
  return { ...view, title: "Notebook" };
}

/** The cells of one context. They are kept in this tab: the server keeps what executions showed, and not their code. */
function notebook(workspace, id, parent, refresh) {
  const path = `${workspace.prefix}/contexts/${encodeURIComponent(id)}`;
  const key = `sbx-cells:${path}`;
  const control = new AbortController();
  parent.addEventListener("abort", () => control.abort(), { signal: control.signal });
  const { signal } = control;
  const cells = [];
  let last = Promise.resolve();
  // One after the other: a browser has few connections for a server, and a cell that runs or waits would keep one each.
  const inTurn = (action) => {
    last = last.then(action);
    return last;
  };

  const state = h("span", { role: "status" });
  const facts = h("span", { class: "quiet" });
  const list = h("div", { class: "cells" });
  const element = h("article", { class: "notebook", "aria-label": `Context ${id}` },
    h("header", { class: "bar" }, h("h2", { class: "mono" }, id), state, facts, h("span", { class: "space" }),
      button("stop", { title: "Interrupt the code that runs", label: "Interrupt", onclick: guarded(async () => {
        const answer = await post(`${path}/interrupt`);
        if (answer.interrupted && !answer.ended) notify("the code goes on; restart the context to end it");
      }) }),
      button("restart", { title: "Start the interpreter anew: all variables are lost", label: "Restart", onclick: guarded(async () => {
        await post(`${path}/restart`);
        notify(`${id} is restarted`);
        refresh();
      }) }),
      button("trash", { title: "End the interpreter", label: "Delete", onclick: guarded(async () => {
        if (!await ask({ title: `Delete ${id}?`, text: "The interpreter ends, and its variables are lost.", confirm: "Delete", danger: true })) return;
        await call("DELETE", path);
        sessionStorage.removeItem(key);
        workspace.go("n");
      }) })),
    list);

  const remember = () => {
    try {
      sessionStorage.setItem(key, JSON.stringify(cells.filter((cell) => cell.source().trim()).map((cell) => ({ source: cell.source(), execution: cell.execution, generation: cell.generation }))));
    } catch {
      // The tab's storage is full: the cells live as long as the page.
    }
  };

  function addCell(kept = {}, after = null) {
    const cell = makeCell({ path, signal, kept, remember, refresh, inTurn,
      next: () => {
        const at = cells.indexOf(cell);
        (cells[at + 1] ?? addCell({}, cell)).focus();
      },
      remove: () => {
        const at = cells.indexOf(cell);
        cells.splice(at, 1);
        cell.element.remove();
        if (!cells.length) addCell();
        remember();
        (cells[at] ?? cells.at(-1)).focus();
      } });
    cells.splice(after ? cells.indexOf(after) + 1 : cells.length, 0, cell);
    if (after) after.element.after(cell.element);
    else list.append(cell.element);
    return cell;
  }

  let kept = [];
  try {
    kept = JSON.parse(sessionStorage.getItem(key) ?? "[]");
  } catch {
    sessionStorage.removeItem(key);
  }
  for (const one of kept) addCell(one);
  addCell();
  queueMicrotask(() => cells.at(-1).focus());

  return {
    element,
    update(context) {
      if (!context) {
        state.replaceChildren(badge("bad", "gone"));
        return;
      }
      state.replaceChildren(badge(toneOf(context), context.state));
      setText(facts, `${context.language} · ${context.backend} ${context.version ?? ""} · ${visible(context.cwd)}`);
    },
    close: () => control.abort(),
  };
}

function makeCell({ path, signal, kept, remember, refresh, inTurn, next, remove }) {
  const area = h("textarea", { class: "code", rows: "1", spellcheck: "false", autocapitalize: "off", autocomplete: "off", value: kept.source ?? "",
    "aria-label": "Code", "aria-description": "Shift Enter runs the cell; Tab indents, and moves on after Escape." });
  const number = h("span", { class: "mono quiet count" }, "[ ]");
  const output = h("div", { class: "output" });
  const state = h("span", { class: "quiet small", role: "status" });
  const run = button("play", { title: "Run this cell: Shift+Enter", onclick: () => execute() });
  const element = h("section", { class: "cell" },
    h("div", { class: "margin" }, number, run),
    h("div", { class: "main" }, area, output, h("div", { class: "foot" }, state)),
    button("close", { title: "Remove this cell", class: "ghost", onclick: remove }));
  const cell = { element, source: () => area.value, execution: kept.execution ?? null, generation: kept.generation ?? null, focus: () => area.focus() };
  let isRunning = false;

  const grow = () => { area.rows = Math.min(40, Math.max(1, area.value.split("\n").length)); };
  let movesOn = false;
  area.addEventListener("input", () => {
    grow();
    remember();
  });
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.shiftKey || event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      execute();
      if (event.shiftKey) next();
    } else if (event.key === "Tab" && !movesOn && !event.shiftKey) {
      event.preventDefault();
      document.execCommand("insertText", false, "    ");
    }
    movesOn = event.key === "Escape";
  });
  grow();

  const show = shower(output, path, element);

  async function follow(stream) {
    let last = -1;
    let ended = null;
    for await (const event of stream) {
      if (event.seq !== undefined) last = event.seq;
      if (event.event === "start") {
        cell.execution = event.execution;
        cell.generation = event.generation;
        setText(number, `[${event.execution_count}]`);
        setText(state, "running");
        remember();
      } else if (event.event === "queued") {
        cell.execution = event.execution;
        setText(state, `${event.position} before it`);
      } else {
        if (event.event === "end") ended = event;
        show(event);
      }
    }
    return { last, ended };
  }

  async function execute() {
    if (isRunning || !area.value.trim()) return;
    isRunning = true;
    run.disabled = true;
    show(null);
    setText(number, "[*]");
    setText(state, "waits");
    cell.execution = null;
    await inTurn(executeNow);
  }

  async function executeNow() {
    if (signal.aborted) return;
    const execution = `console-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
    try {
      const json = { code: area.value, id: execution, allow_input: true, on_disconnect: "keep" };
      let { last, ended } = await follow(events("POST", `${path}/execute`, { json, signal }));
      // The connection broke: the rest is read where it is kept.
      for (let wait = 250; !ended && !signal.aborted; wait = Math.min(2 * wait, 4000)) {
        await new Promise((resolve) => setTimeout(resolve, wait));
        const rest = await follow(events("GET", at(`${path}/executions/${execution}/events`, { follow: 1, after: last < 0 ? null : last }), { signal })).catch((error) => {
          if (error instanceof ApiError) throw error;
          return { last, ended: null };
        });
        last = Math.max(last, rest.last);
        ended = rest.ended;
      }
      finish(ended);
    } catch (error) {
      setText(number, "[ ]");
      setText(state, error.name === "AbortError" ? "" : error.message);
    } finally {
      isRunning = false;
      run.disabled = false;
      remember();
      refresh();
    }
  }

  function finish(ended) {
    if (!ended) return;
    const how = ended.reason === "completed" ? "" : ended.reason === "error" ? "failed, " : `${ended.reason}, `;
    setText(state, `${how}${duration(ended.duration_ms)}${ended.exit_code ? `, exit ${ended.exit_code}` : ""}${ended.state === "lost" ? "; the variables are lost" : ""}`);
  }

  // What a cell of an earlier visit showed is still on the server, unless it has forgotten it.
  if (cell.execution) {
    follow(events("GET", at(`${path}/executions/${encodeURIComponent(cell.execution)}/events`, { follow: 1 }), { signal })).then(({ ended }) => finish(ended), (error) => {
      if (error instanceof ApiError) setText(state, "its output is no longer kept");
    });
  }
  return cell;
}

/** How many characters one form of a result is made from: the code that made it chooses what its members are called. */
function sizeOf(form) {
  return typeof form === "string" ? form.length : (JSON.stringify(form) ?? "").length;
}

/** Shows events in the `output` of a cell; null clears it. */
function shower(output, path, cell) {
  let clears = false;
  let asking = null;
  const displays = new Map();
  /** The parts of the output, oldest first, and how many characters each was made from. */
  const sizes = new Map();
  let held = 0;
  const resize = (part, size) => {
    held += size - (sizes.get(part) ?? 0);
    sizes.set(part, size);
  };
  const add = (part, size = 0) => {
    output.append(part);
    resize(part, size);
  };
  const clear = () => {
    output.replaceChildren();
    displays.clear();
    sizes.clear();
    held = 0;
    clears = false;
  };

  function draw(event) {
    switch (event.event) {
      case "stdout":
      case "stderr": {
        const last = output.lastElementChild;
        const block = last?.matches(`pre.${event.event}`) ? last : h("pre", { class: event.event });
        if (block !== last) add(block, MOST_STREAM);
        append(block, event.data);
        break;
      }
      case "display":
      case "result": {
        const { data = {}, display_id: id } = event;
        const known = event.update && displays.get(id);
        const part = known || h("div", { "data-id": id });
        const size = Object.values(data).reduce((sum, form) => sum + sizeOf(form), 0);
        part.replaceChildren(richest(data));
        if (known) resize(part, size);
        else add(part, size);
        if (id) displays.set(id, part);
        break;
      }
      case "clear":
        if (event.wait) clears = true;
        else clear();
        break;
      case "error":
        add(textBlock("error", event.traceback?.length ? event.traceback.join("\n") : `${event.name}: ${event.value}`), MOST_STREAM);
        break;
      case "dropped":
        add(h("p", { class: "quiet" }, event.bytes ? `${event.bytes} bytes of output were thrown away` : "part of the output is no longer kept"));
        break;
      case "input":
        asking = prompt(event, path, cell);
        add(asking);
        break;
    }
  }

  return (event) => {
    // Whatever comes after a question is after its answer.
    asking?.settle();
    asking = null;
    if (event === null) return clear();
    if (clears && event.event !== "clear") clear();
    try {
      draw(event);
    } catch (error) {
      // What cannot be shown costs itself, and not what comes after it.
      add(h("p", { class: "quiet" }, `a part of the output cannot be shown: ${error.message}`));
    }
    for (const [part, size] of sizes) {
      if (sizes.size <= MOST_PARTS && (held <= MOST_OUTPUT || sizes.size === 1)) break;
      held -= size;
      sizes.delete(part);
      displays.delete(part.dataset.id);
      part.remove();
    }
  };
}

const ESCAPES = /\x1b\[[0-9;:]*[ -/]*[@-~]/g;

/** Text of several lines, with what cannot be seen spelled out. */
function visibleLines(text) {
  return text.replace(ESCAPES, "").split("\n").map((line) => visible(line, Infinity)).join("\n");
}

/** A block of text. */
const textBlock = (kind, text) => fill(h("pre", { class: kind }), visibleLines(text));

/** Adds to a block of text, which is drawn once a frame however often this is called. */
function append(block, data) {
  block.raw = (block.raw ?? "") + data;
  if (block.raw.length > 2 * MOST_STREAM) block.raw = block.raw.slice(-MOST_STREAM);
  block.frame ??= requestAnimationFrame(() => {
    block.frame = undefined;
    const shown = block.raw.slice(-MOST_STREAM).split("\n").map(settled).join("\n");
    // What follows may write over a line that ends like this.
    block.raw = block.raw.endsWith("\r") ? `${shown}\r` : shown;
    fill(block, visibleLines(shown.replaceAll("\t", "    ")));
  });
}

/** A form for the answer to a question; `settle` leaves the question as text. */
function prompt(event, path, cell) {
  // Never of the type `password`: Chromium fills such a field with the saved token, even where `autocomplete` is off. And no
  // checker of spelling, which may send what is typed to a service.
  const input = h("input", { type: "text", class: event.password ? "secret" : "mono", autocomplete: "one-time-code", autocapitalize: "off", spellcheck: "false", "aria-label": visible(event.prompt) || "Input" });
  const answered = h("div");
  const form = h("form", { class: "command", onsubmit: guarded(async (submitted) => {
    submitted.preventDefault();
    await post(`${path}/input`, { value: input.value });
    answered.settle(event.password ? "" : input.value);
  }) }, h("span", { class: "mono" }, visible(event.prompt)), input, h("button", { class: "button primary" }, "Send"));
  answered.append(form);
  answered.settle = (answer = "") => {
    if (form.isConnected) form.replaceWith(textBlock("stdout", event.prompt + visible(answer)));
  };
  // Code that asks takes the keyboard, but not from somebody who is writing elsewhere.
  queueMicrotask(() => {
    const active = document.activeElement;
    if (cell.contains(active) || !active?.value) input.focus();
  });
  return answered;
}

const PICTURES = ["image/png", "image/jpeg", "image/gif", "image/webp"];

/** A value in the richest of its forms that can be shown. */
function richest(data) {
  const plain = data["text/plain"];
  const alt = visible(String(plain ?? "picture"));
  const instead = (type, name) => (reason) => offer(reason, data[type], name, type);
  for (const type of PICTURES) {
    if (typeof data[type] === "string") return picture(`data:${type};base64,${data[type].replaceAll(/\s/g, "")}`, alt, instead(type, "picture.base64.txt"));
  }
  const svg = "image/svg+xml";
  if (typeof data[svg] === "string") return drawing(data[svg], alt, instead(svg, "drawing.svg"));
  const html = data["text/html"];
  const table = typeof html === "string" && tablesOf(html, (reason) => offer(reason, html, "table.html", "text/html"));
  if (table) return table;
  const text = String(plain ?? data["text/markdown"] ?? html ?? inLines(data["application/json"] ?? data));
  const shown = textBlock("result", text.slice(0, MOST_STREAM));
  return text.length > MOST_STREAM ? h("div", {}, shown, offer("This is the beginning of a long text", text, "result.txt", "text/plain")) : shown;
}

/** JSON with a line for each value, if it is short: the indents of deep lists are much longer than the lists. */
function inLines(value) {
  const text = JSON.stringify(value);
  return text.length > MOST_INDENTED ? text : JSON.stringify(value, null, 2);
}

/** A text without what is between `start` and `end`, letters in either case. Without an end all of the rest goes. */
function without(text, start, end) {
  const lower = text.toLowerCase();
  const kept = [];
  let from = 0;
  for (let at = lower.indexOf(start); at >= 0; at = lower.indexOf(start, from)) {
    kept.push(text.slice(from, at));
    const close = lower.indexOf(end, at);
    if (close < 0) return kept.join("");
    from = close + end.length;
  }
  kept.push(text.slice(from));
  return kept.join("");
}

/** Tags that words do not run together across. */
const BLOCKS = new Set(["br", "div", "li", "p", "td", "th", "tr"]);
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: " ", ndash: "–", mdash: "—", hellip: "…", times: "×", minus: "−" };

/** The characters that a text of HTML stands for. */
function decoded(text) {
  return text.replace(/&(#x[0-9a-f]{1,6}|#[0-9]{1,7}|[a-z]{2,8});/gi, (found, name) => {
    if (name[0] !== "#") return ENTITIES[name] ?? found;
    const code = name[1].toLowerCase() === "x" ? parseInt(name.slice(2), 16) : Number(name.slice(1));
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : found;
  });
}

const COLSPAN = /\bcolspan\s*=\s*["']?([2-9]|[1-9][0-9]{1,2})\b/i;
const ROWSPAN = /\browspan\s*=\s*["']?([2-9]|[1-9][0-9]{1,2})\b/i;

/** The parts of an HTML text: `[text, isEnd, name, attributes]` for each tag and the text before it. The last has no name. */
function* tags(html) {
  const pieces = html.split("<");
  let text = pieces[0];
  for (const piece of pieces.slice(1)) {
    const end = piece.indexOf(">");
    const name = end > 0 && /^\/?[a-z][a-z0-9]*/i.exec(piece)?.[0];
    if (!name) text += `<${piece}`;
    else {
      yield [text, name[0] === "/", name.replace("/", "").toLowerCase(), piece.slice(name.length, end)];
      text = piece.slice(end + 1);
    }
  }
  yield [text, false, "", ""];
}

/**
 * The tables of an HTML text, made anew from the texts of their cells; what is in a table in a cell is a part of the
 * cell's text. Null if it has none. Where it is too long, and below the rows that are shown where there are more, stands what
 * `instead` makes, given why. The text is as hostile as the code that made it: nothing here parses it as HTML, and
 * everything takes linear time.
 */
function tablesOf(html, instead) {
  if (html.length > MOST_HTML) return instead("This HTML is too long to look for tables in");
  const text = [["<script", "</script>"], ["<style", "</style>"], ["<!--", "-->"]].reduce((rest, [start, end]) => without(rest, start, end), html);
  const tables = [];
  let depth = 0;
  let row = null;
  let cell = null;
  for (const [before, isEnd, name, attributes] of tags(text)) {
    if (cell) cell.text.push(before);
    if (name === "table") {
      depth = Math.max(0, depth + (isEnd ? -1 : 1));
      if (!isEnd && depth === 1) tables.push([]);
      if (depth === 0 || (!isEnd && depth === 1)) row = cell = null;
    } else if (depth === 1 && name === "tr") {
      row = cell = null;
      if (!isEnd) tables.at(-1).push(row = []);
    } else if (depth === 1 && (name === "td" || name === "th")) {
      cell = null;
      if (!isEnd) {
        if (!row) tables.at(-1).push(row = []);
        const span = (pattern) => Number((attributes && pattern.exec(attributes)?.[1]) || 1);
        row.push(cell = { name, text: [], colspan: span(COLSPAN), rowspan: span(ROWSPAN) });
      }
    } else if (cell && BLOCKS.has(name)) cell.text.push(" ");
  }
  if (!tables.length) return null;
  const budget = new Budget(TABLES);
  const frames = h("div", { class: "frames" });
  for (const rows of tables) {
    if (!budget.spend(TABLE)) break;
    const table = h("table", { class: "frame" });
    frames.append(table);
    for (const cells of rows) {
      if (!budget.spend(CELL)) break;
      const made = h("tr");
      table.append(made);
      let columns = 0;
      for (const { name, text: parts, colspan, rowspan } of cells.slice(0, MOST_CELLS)) {
        columns += colspan;
        const spans = columns <= MOST_COLUMNS && budget.spend(CELL + PLACE * (colspan * rowspan - 1)) ? { colspan, rowspan } : null;
        made.append(h(name, spans, budget.take(visible(decoded(parts.join("")).replace(/\s+/g, " ").trim(), Infinity))));
      }
    }
  }
  if (budget.left < 0) frames.append(instead("Only a part of this is shown"));
  return frames;
}
