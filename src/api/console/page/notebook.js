// Interpreter contexts as a notebook: cells of code, and what they show as text, tables and images. Rich results come
// from code that nobody trusts, so HTML is read for the texts of its tables only, and images are data of an <img>.

import { ApiError, at, call, events, get, post } from "./api.js";
import { ask, badge, button, duration, field, guarded, h, notify, setText, settled, visible } from "./dom.js";
import { tabsView } from "./tabs.js";

/** Most characters of one text that are shown. */
const MOST_SHOWN = 200_000;
/** Most rows of a table that are shown. */
const MOST_ROWS = 500;
/** Most cells of a row that are shown. */
const MOST_CELLS = 200;
/** Most tables of one result. */
const MOST_TABLES = 50;
/** Most characters of HTML in which tables are looked for. */
const MOST_HTML = 2_000_000;
/** Most parts of the output of a cell; the oldest go first. */
const MOST_PARTS = 500;

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

  const shown = shower(output, path, element);
  const show = (event) => {
    try {
      shown(event);
    } catch (error) {
      // What cannot be shown costs itself, and not what comes after it.
      output.append(h("p", { class: "quiet" }, `a part of the output cannot be shown: ${error.message}`));
    }
  };

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

/** Shows events in the `output` of a cell; null clears it. */
function shower(output, path, cell) {
  let clears = false;
  let asking = null;
  const displays = new Map();
  return (event) => {
    // Whatever comes after a question is after its answer.
    asking?.settle();
    asking = null;
    if (event === null) {
      output.replaceChildren();
      displays.clear();
      return;
    }
    if (clears && event.event !== "clear") {
      output.replaceChildren();
      clears = false;
    }
    switch (event.event) {
      case "stdout":
      case "stderr": {
        const last = output.lastElementChild;
        const block = last?.matches(`pre.${event.event}`) ? last : h("pre", { class: event.event });
        if (block !== last) output.append(block);
        append(block, event.data);
        break;
      }
      case "display":
      case "result": {
        const known = event.display_id && displays.get(event.display_id);
        const made = richest(event.data ?? {});
        if (event.update && known) known.replaceWith(made);
        else output.append(made);
        if (event.display_id) displays.set(event.display_id, made);
        break;
      }
      case "clear":
        if (event.wait) clears = true;
        else output.replaceChildren();
        break;
      case "error":
        output.append(h("pre", { class: "error" }, visibleLines(event.traceback?.length ? event.traceback.join("\n") : `${event.name}: ${event.value}`)));
        break;
      case "dropped":
        output.append(h("p", { class: "quiet" }, event.bytes ? `${event.bytes} bytes of output were thrown away` : "part of the output is no longer kept"));
        break;
      case "input":
        asking = prompt(event, path, cell);
        output.append(asking);
        break;
    }
    while (output.childElementCount > MOST_PARTS) output.firstElementChild.remove();
  };
}

const ESCAPES = /\x1b\[[0-9;:]*[ -/]*[@-~]/g;

/** Text of several lines, with what cannot be seen spelled out. */
function visibleLines(text) {
  return text.replace(ESCAPES, "").split("\n").map(visible).join("\n");
}

/** Adds to a block of text, which is drawn once a frame however often this is called. */
function append(block, data) {
  block.raw = ((block.raw ?? "") + data).slice(-MOST_SHOWN);
  block.frame ??= requestAnimationFrame(() => {
    block.frame = undefined;
    const shown = block.raw.split("\n").map(settled).join("\n");
    // What follows may write over a line that ends like this.
    block.raw = block.raw.endsWith("\r") ? `${shown}\r` : shown;
    block.textContent = visibleLines(shown.replaceAll("\t", "    "));
  });
}

/** A form for the answer to a question; `settle` leaves the question as text. */
function prompt(event, path, cell) {
  const input = h("input", { type: event.password ? "password" : "text", class: "mono", autocomplete: "off", "aria-label": visible(event.prompt) || "Input" });
  const form = h("form", { class: "command", onsubmit: guarded(async (submitted) => {
    submitted.preventDefault();
    await post(`${path}/input`, { value: input.value });
    form.settle(event.password ? "" : input.value);
  }) }, h("span", { class: "mono" }, visible(event.prompt)), input, h("button", { class: "button primary" }, "Send"));
  form.settle = (answer = "") => {
    if (form.isConnected) form.replaceWith(h("pre", { class: "stdout" }, visibleLines(event.prompt) + visible(answer)));
  };
  // Code that asks takes the keyboard from nothing but its own cell.
  queueMicrotask(() => {
    if (document.activeElement === document.body || cell.contains(document.activeElement)) input.focus();
  });
  return form;
}

const PICTURES = ["image/png", "image/jpeg", "image/gif", "image/webp"];

/** A value in the richest of its forms that can be shown. */
function richest(data) {
  const plain = data["text/plain"];
  for (const type of PICTURES) {
    if (typeof data[type] === "string") return h("div", { class: "picture" }, h("img", { src: `data:${type};base64,${data[type].replaceAll(/\s/g, "")}`, alt: visible(plain ?? "image") }));
  }
  if (typeof data["image/svg+xml"] === "string") {
    // As an image SVG runs no script and loads nothing.
    return h("div", { class: "picture" }, h("img", { src: `data:image/svg+xml,${encodeURIComponent(data["image/svg+xml"])}`, alt: visible(plain ?? "drawing") }));
  }
  const table = typeof data["text/html"] === "string" && tableOf(data["text/html"]);
  if (table) return table;
  const text = plain ?? data["text/markdown"] ?? data["text/html"] ?? JSON.stringify(data["application/json"] ?? data, null, 2);
  return h("pre", { class: "result" }, visibleLines(String(text).slice(0, MOST_SHOWN)));
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
const TAG = /<(\/?)([a-z][a-z0-9]*)([^<>]*)>/gi;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: " ", ndash: "–", mdash: "—", hellip: "…", times: "×", minus: "−" };

/** The characters that a text of HTML stands for. */
function decoded(text) {
  return text.replace(/&(#x[0-9a-f]{1,6}|#[0-9]{1,7}|[a-z]{2,8});/gi, (found, name) => {
    if (name[0] !== "#") return ENTITIES[name] ?? found;
    const code = name[1].toLowerCase() === "x" ? parseInt(name.slice(2), 16) : Number(name.slice(1));
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : found;
  });
}

/**
 * The tables of an HTML text, made anew from the texts of their cells; what is in a table in a cell is a part of the
 * cell's text. Null if it has none, or is too long. The text is as hostile as the code that made it: nothing here
 * parses it as HTML, and everything takes linear time.
 */
function tableOf(html) {
  if (html.length > MOST_HTML) return null;
  const text = [["<script", "</script>"], ["<style", "</style>"], ["<!--", "-->"]].reduce((rest, [start, end]) => without(rest, start, end), html);
  const tables = [];
  let depth = 0;
  let row = null;
  let cell = null;
  let from = 0;
  for (const found of text.matchAll(TAG)) {
    if (cell) cell.text += text.slice(from, found.index);
    from = found.index + found[0].length;
    const name = found[2].toLowerCase();
    const isEnd = found[1] === "/";
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
        const span = (key) => new RegExp(`\\b${key}\\s*=\\s*["']?([2-9]|[1-9][0-9]{1,2})\\b`, "i").exec(found[3])?.[1];
        row.push(cell = { name, text: "", colspan: span("colspan"), rowspan: span("rowspan") });
      }
    } else if (cell && BLOCKS.has(name)) cell.text += " ";
  }
  if (!tables.length) return null;
  return h("div", { class: "frames" }, tables.slice(0, MOST_TABLES).map((rows) => {
    const made = rows.slice(0, MOST_ROWS).map((cells) => h("tr", {}, cells.slice(0, MOST_CELLS).map(({ name, text: content, ...spans }) => h(name, spans, visible(decoded(content).replace(/\s+/g, " ").trim())))));
    if (rows.length > MOST_ROWS) made.push(h("tr", {}, h("td", { class: "quiet" }, `${rows.length - MOST_ROWS} more rows`)));
    return h("table", { class: "frame" }, made);
  }));
}
