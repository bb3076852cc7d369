// A log of any length: only the lines that can be seen are elements. It knows lines, colours, searching and
// following; where the lines come from is the caller's business.

import { Budget } from "./bounds.js";
import { button, count, h, icon, setText, settled, visible } from "./dom.js";

/** Height of a line in pixels; `.log-line` in style.css has the same. */
const LINE = 18;
/** Lines beyond the view that are drawn too, so that a fast scroll shows text. */
const SPARE = 30;
/** Most lines that are kept, and how many more there may be before the oldest go. */
const MOST_LINES = 300_000;
const GOING = 10_000;
/** Most characters that are kept in all, and of one line. */
const MOST_CHARACTERS = 100_000_000;
const MOST_OF_LINE = 1_000_000;
/** Most characters of a line that are searched. */
const MOST_SEARCHED = 100_000;
/** Most characters that are held back during a pause; more end it. */
const MOST_HELD = 20_000_000;
/** Most characters of a line that are drawn, what they may take, and what one of its parts does. */
const MOST_DRAWN = 4_000;
const ROW = 8_000;
const PART = 20;

/** The state of colours between two texts: what SGR sequences (ECMA-48 8.3.117) have set. */
const PLAIN = { fore: "", bold: false, dim: false };
const SEQUENCE = /\x1b(?:\[([0-9;:]*)([ -/]*)([@-~])|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_][^\x1b]*(?:\x1b\\)?|[ -/]*[0-~])/g;

function afterSgr(state, parameters) {
  const codes = parameters.split(/[;:]/).map(Number);
  let next = { ...state };
  for (let at = 0; at < codes.length; at += 1) {
    const code = codes[at];
    if (code === 0) next = { ...PLAIN };
    else if (code === 1) next.bold = true;
    else if (code === 2) next.dim = true;
    else if (code === 22) next.bold = next.dim = false;
    else if (code >= 30 && code <= 37) next.fore = `c${code - 30}`;
    else if (code >= 90 && code <= 97) next.fore = `c${code - 90}`;
    else if (code === 39) next.fore = "";
    else if (code === 38 || code === 48) {
      // Of the 256 colours only the first 16 have a class; others are shown plain.
      if (codes[at + 1] === 5) {
        if (code === 38) next.fore = codes[at + 2] < 16 ? `c${codes[at + 2] % 8}` : "";
        at += 2;
      } else at += 4;
    }
  }
  return next;
}

/** Cuts a line into `[text, state]` parts, and returns them with the state after it. */
function parts(text, state) {
  const found = [];
  let from = 0;
  for (const sequence of text.matchAll(SEQUENCE)) {
    if (sequence.index > from) found.push([text.slice(from, sequence.index), state]);
    from = sequence.index + sequence[0].length;
    if (sequence[3] === "m") state = afterSgr(state, sequence[1] || "0");
  }
  if (from < text.length) found.push([text.slice(from), state]);
  return [found, state];
}

function plain(text) {
  return text.includes("\x1b") ? text.replace(SEQUENCE, "") : text;
}

/** A log and its toolbar. */
export class LogView {
  #lines = [];
  /** The line that may still grow, for each stream. */
  #open = new Map();
  #dropped = 0;
  #waiting = [];
  #held = 0;
  #size = 0;
  #isPaused = false;
  #follows = true;
  /** Where following has scrolled to. */
  #end = 0;
  #frame = 0;
  #found = [];
  #chosen = -1;
  #needle = "";

  /** `isWhole` is a log to which nothing comes any more. */
  constructor({ label, isWhole = false }) {
    this.#follows = !isWhole;
    this.rows = h("div", { class: "log-rows" });
    this.sizer = h("div", { class: "log-sizer" }, this.rows);
    this.box = h("div", { class: "log", tabindex: "0", role: "log", "aria-label": label, "aria-live": "off",
      onscroll: () => this.#scrolled(), onkeydown: (event) => this.#key(event) }, this.sizer);
    this.input = h("input", { type: "search", placeholder: "Find", "aria-label": "Find in the log", spellcheck: "false",
      oninput: () => this.#search(), onkeydown: (event) => {
        if (event.key === "Enter") this.#step(event.shiftKey ? -1 : 1);
      } });
    this.matches = h("span", { class: "quiet figures", "aria-live": "polite" });
    this.following = button("down", { title: "Follow the end of the log", label: "Follow", "aria-pressed": "true", onclick: () => this.follow() });
    this.pausing = button("pause", { title: "Hold back new lines", label: "Pause", "aria-pressed": "false", onclick: () => this.#pause() });
    this.figures = h("span", { class: "quiet figures", "data-lines": "0" });
    this.bar = h("div", { class: "bar" },
      h("span", { class: "search" }, icon("search"), this.input),
      button("up", { title: "Previous match", class: "ghost", onclick: () => this.#step(-1) }),
      button("down", { title: "Next match", class: "ghost", onclick: () => this.#step(1) }),
      this.matches, h("span", { class: "space" }), this.figures, !isWhole && [this.following, this.pausing],
      button("copy", { title: "Copy the whole log", onclick: () => navigator.clipboard?.writeText(this.text()) }));
    this.element = h("div", { class: "log-view" }, this.bar, this.box);
    new ResizeObserver(() => this.#draw()).observe(this.box);
  }

  /** Adds output of a stream, which may end in the middle of a line. */
  add(stream, text) {
    if (this.#isPaused) {
      this.#waiting.push([stream, text]);
      this.#held += text.length;
      if (this.#held > MOST_HELD) this.#pause();
    } else this.#add(stream, text);
    this.#draw();
  }

  /** Adds a line of the console's own. */
  note(text) {
    this.add("note", text);
  }

  /** All lines as plain text. */
  text() {
    return this.#lines.map((line) => plain(settled(line.text))).join("\n");
  }

  /** Goes to the end and stays there. */
  follow() {
    this.#follows = true;
    this.#draw();
  }

  #add(stream, text) {
    if (stream === "note") {
      this.#lines.push({ stream, text, state: PLAIN });
      this.#open.clear();
      return;
    }
    const first = this.#lines.length;
    const pieces = text.split("\n");
    const open = this.#open.get(stream);
    let state = open?.after ?? PLAIN;
    // A line goes on only where nothing of the other stream stands between its parts.
    if (open?.line && this.#lines.at(-1) === open.line) {
      const piece = pieces.shift();
      const before = open.line.text.length;
      if (!open.isFull) open.line.text += piece;
      if (open.line.text.length > MOST_OF_LINE) {
        // A bar that rewrites its line for hours leaves its last state; of any other line the rest is not kept.
        open.line.text = settled(open.line.text).slice(0, MOST_OF_LINE);
        open.isFull = open.line.text.length > MOST_OF_LINE / 2;
      }
      this.#size += open.line.text.length - before;
      this.#rematch(open.line, this.#lines.length - 1);
      if (piece.includes("\x1b")) state = parts(piece.slice(0, MOST_OF_LINE), state)[1];
      if (pieces.length === 0) {
        open.after = state;
        return;
      }
    }
    for (const whole of pieces) {
      const piece = whole.slice(0, MOST_OF_LINE);
      this.#size += piece.length;
      this.#lines.push({ stream, text: piece, state });
      if (piece.includes("\x1b")) state = parts(piece, state)[1];
    }
    const last = this.#lines.at(-1);
    // The end of a text that ends with a newline is no line yet.
    if (last?.text === "" && pieces.length) {
      this.#lines.pop();
      this.#open.set(stream, { after: state });
    } else this.#open.set(stream, { line: last, after: state });
    if (this.#needle) for (let at = first; at < this.#lines.length; at += 1) this.#rematch(this.#lines[at], at);
    // Many at a time, because all lines are searched again afterwards.
    if (this.#lines.length > MOST_LINES + GOING || this.#size > MOST_CHARACTERS) {
      let excess = 0;
      while (excess < this.#lines.length - 1 && (this.#lines.length - excess > MOST_LINES || this.#size > 0.9 * MOST_CHARACTERS)) {
        this.#size -= this.#lines[excess].text.length;
        excess += 1;
      }
      this.#lines.splice(0, excess);
      this.#dropped += excess;
      this.box.scrollTop -= excess * LINE;
      this.#search();
    }
  }

  #pause() {
    this.#isPaused = !this.#isPaused;
    this.pausing.setAttribute("aria-pressed", this.#isPaused);
    if (!this.#isPaused) {
      for (const [stream, text] of this.#waiting) this.#add(stream, text);
      this.#waiting = [];
      this.#held = 0;
    }
    this.#draw();
  }

  #scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.box;
    // The event comes a frame later, when the box may have become smaller; then the log is not at its end, and nobody
    // has scrolled it away from there.
    const isOwn = this.#follows && scrollTop === this.#end;
    this.#follows = isOwn || scrollTop + clientHeight >= scrollHeight - 4;
    this.#draw();
  }

  #key(event) {
    if (event.key === "End") this.follow();
    else if (event.key === "/" || (event.key === "f" && (event.ctrlKey || event.metaKey))) {
      event.preventDefault();
      this.input.focus();
    }
  }

  #contains(line) {
    return plain(settled(line.text).slice(0, MOST_SEARCHED)).toLowerCase().includes(this.#needle);
  }

  #rematch(line, at) {
    if (!this.#needle || this.#found.at(-1) === at) return;
    if (this.#contains(line)) this.#found.push(at);
  }

  #search() {
    this.#needle = this.input.value.toLowerCase();
    this.#found = [];
    this.#chosen = -1;
    if (this.#needle) this.#lines.forEach((line, at) => this.#contains(line) && this.#found.push(at));
    if (this.#found.length) {
      const top = Math.floor(this.box.scrollTop / LINE);
      this.#chosen = this.#found.findIndex((at) => at >= top) - 1;
      this.#step(1);
    } else this.#draw();
  }

  #step(by) {
    if (!this.#found.length) return;
    this.#chosen = (this.#chosen + by + this.#found.length) % this.#found.length;
    this.#follows = false;
    this.box.scrollTop = this.#found[this.#chosen] * LINE - this.box.clientHeight / 2;
    this.#draw();
  }

  #draw() {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.#drawNow();
    });
  }

  #drawNow() {
    const lines = this.#lines;
    this.sizer.style.height = `${lines.length * LINE + 12}px`;
    if (this.#follows) {
      this.box.scrollTop = this.box.scrollHeight;
      this.#end = this.box.scrollTop;
    }
    const first = Math.max(0, Math.floor(this.box.scrollTop / LINE) - SPARE);
    const last = Math.min(lines.length, first + Math.ceil(this.box.clientHeight / LINE) + 2 * SPARE);
    this.rows.style.transform = `translateY(${first * LINE}px)`;
    const chosen = this.#found[this.#chosen];
    const drawn = [];
    for (let at = first; at < last; at += 1) drawn.push(this.#row(lines[at], at === chosen));
    this.rows.replaceChildren(...drawn);
    const waiting = this.#waiting.length ? `, ${count(this.#waiting.length)} parts held back` : "";
    setText(this.figures, `${count(lines.length)} ${lines.length === 1 ? "line" : "lines"}${waiting}${this.#dropped ? `, ${count(this.#dropped)} gone` : ""}`);
    this.figures.dataset.lines = lines.length;
    setText(this.matches, this.#needle ? (this.#found.length ? `${count(this.#chosen + 1)} of ${count(this.#found.length)}` : "no match") : "");
    this.following.setAttribute("aria-pressed", this.#follows);
  }

  #row(line, isChosen) {
    const budget = new Budget(ROW);
    const row = h("div", { class: `log-line ${line.stream}${isChosen ? " chosen" : ""}` });
    let text = settled(line.text);
    let more = 0;
    if (text.length > MOST_DRAWN) {
      more = text.length - MOST_DRAWN;
      text = text.slice(0, MOST_DRAWN);
    }
    for (const [part, state] of parts(text, line.state)[0]) {
      const look = `${state.fore}${state.bold ? " bold" : ""}${state.dim ? " dim" : ""}`;
      const all = visible(part.replaceAll("\t", "    "), MOST_DRAWN);
      const drawn = budget.spend(PART) ? budget.take(all) : "";
      more += all.length - drawn.length;
      if (drawn) row.append(...this.#marked(drawn, look, budget));
    }
    if (more) row.append(h("span", { class: "quiet" }, ` … ${count(more)} more characters`));
    if (!row.firstChild) row.append("\u200b");
    return row;
  }

  /** The text with the matches of the search marked. */
  #marked(text, look, budget) {
    const wrap = (part) => (look ? h("span", { class: look }, part) : part);
    if (!this.#needle) return [wrap(text)];
    const found = [];
    const lower = text.toLowerCase();
    let from = 0;
    for (let at = lower.indexOf(this.#needle); at >= 0 && lower.length === text.length && budget.spend(PART); at = lower.indexOf(this.#needle, from)) {
      if (at > from) found.push(wrap(text.slice(from, at)));
      from = at + this.#needle.length;
      found.push(h("mark", {}, text.slice(at, from)));
    }
    found.push(wrap(text.slice(from)));
    return found;
  }
}
