// Terminals: shells that stay when the page goes, each attached by a WebSocket that comes back where it was.

import { at, get, post, socket } from "./api.js";
import { badge, button, guarded, h, notify, pause, setText, visible } from "./dom.js";
import { commandText, signalButtons, stateBadge } from "./processes.js";
import { tabsView } from "./tabs.js";

/** The library of the terminal is loaded when the first one is opened. */
let library;

/** The 16 colours, on a ground of the page's own. */
const DARK = {
  background: "#0b0d10", foreground: "#d7dae0", cursor: "#5eead4", cursorAccent: "#0b0d10", selectionBackground: "#2b4a52",
  black: "#2a2f36", red: "#f47174", green: "#7ecb8f", yellow: "#e2b86b", blue: "#79a8f0", magenta: "#c792ea", cyan: "#5fc9c4", white: "#d7dae0",
  brightBlack: "#6b7480", brightRed: "#ff9497", brightGreen: "#a0e4ae", brightYellow: "#f5d28f", brightBlue: "#a3c4ff", brightMagenta: "#dfb6fa", brightCyan: "#8ee6e0", brightWhite: "#ffffff",
};
const LIGHT = {
  background: "#ffffff", foreground: "#1f2328", cursor: "#0f766e", cursorAccent: "#ffffff", selectionBackground: "#cfe8e4",
  black: "#1f2328", red: "#b42318", green: "#1a7f37", yellow: "#8a6100", blue: "#0b5cad", magenta: "#8250df", cyan: "#0f766e", white: "#6e7781",
  brightBlack: "#57606a", brightRed: "#d1242f", brightGreen: "#1f883d", brightYellow: "#9a6700", brightBlue: "#0969da", brightMagenta: "#a475f9", brightCyan: "#1b7c83", brightWhite: "#32383f",
};

/**
 * Control sequences (ECMA-48 8.3) whose parameter says how often something is done, and what limits it. To tab or to scroll
 * further than the screen reaches changes nothing more.
 */
const REPEATED = { I: "cols", L: "rows", M: "rows", S: "rows", T: "rows", Z: "cols", b: null };
const MOST_REPEATED = 1_000;

/**
 * Commands (OSC) of which only the question for a colour is followed. The library moves every line of every link (8) with each
 * line that scrolls, and draws all anew for each colour that is set (4, 10 to 12) or set back. The colours are the page's own.
 */
const COSTLY = [4, 8, 10, 11, 12, 104, 110, 111, 112];

/** Most characters that the library takes at once. It gives the page a turn between two parts, and never within one. */
const PART = 1_024;

/** With this many bytes that the program has not read, what else is typed or answered is lost, as in any terminal. */
const MOST_UNREAD = 1_000_000;

/** Most UTF-16 units in a cell. The library adds marks to the cell before them without end, and draws it in quadratic time. */
const MOST_IN_CELL = 16;

/** Most widths of texts of cells that are kept. With this many, a character with marks is taken to be as wide as without. */
const MOST_WIDTHS = 10_000;
const MOST_MARKED = 1_000;

/** How often a lost connection is tried again before the pause between tries is this long. */
const LONGEST_PAUSE = 5000;

export function terminalsView(workspace, signal) {
  const path = `${workspace.prefix}/processes`;
  const start = guarded(async () => {
    const started = await post(path, { pty: { rows: 30, cols: 100 } });
    await view.round();
    workspace.go("t", started.id);
  });
  const starter = (properties) => button("plus", { label: "New terminal", class: "primary", onclick: start, ...properties });
  const view = tabsView(workspace, signal, {
    section: "t",
    title: "Terminals",
    start: starter({ title: "Start a shell in a new terminal" }),
    list: async (shown) => (await get(path, signal)).filter((process) => process.pty && (process.running || process.id === shown)),
    look: (process) => ({
      tone: process.running ? "busy" : "quiet",
      name: visible(process.tag ?? `${process.id} ${commandText(process).split(" ")[0].split("/").pop()}`),
    }),
    open: (id) => new Attached(workspace, id, signal),
    nothing: (areSome) => (areSome
      ? ["terminal", "Choose a terminal", "Each one goes on when this page is closed, and shows all of its output when it is opened again."]
      : ["terminal", "No terminal is open", "A terminal is a shell that goes on when this page is closed.", starter()]),
  });
  return view;
}

/** Bounds what a cell holds where the library adds to it, so that no control between two marks gets past this. */
function bounded(modules) {
  const line = Object.getPrototypeOf(new modules[0].Terminal()._core.buffer.lines.get(0));
  const add = line.addCodepointToCell;
  line.addCodepointToCell = function (column, ...rest) {
    if (this.getString(column).length < MOST_IN_CELL) add.call(this, column, ...rest);
  };
  return modules;
}

/**
 * Measures the texts of cells by a canvas, where the library lays out the page for each. If there are many, the marks of a
 * character are not measured with it, but for the one that makes it a picture (VS16).
 */
function measureByCanvas(renderer) {
  const widths = renderer._widthCache;
  const context = new OffscreenCanvas(0, 0).getContext("2d");
  const { get } = widths;
  context.fontKerning = "none";
  widths.get = (text, ...style) => get.call(widths, widths._holey.size > MOST_MARKED ? text.match(/^.\ufe0f?/su)[0] : text, ...style);
  widths._measure = (text, style) => {
    if (widths._holey.size >= MOST_WIDTHS) widths._holey.clear();
    context.font = `${style & 2 ? "italic" : ""} ${style & 1 ? widths._weightBold : widths._weight} ${widths._fontSize}px ${widths._font}`;
    return context.measureText(text).width;
  };
  // What it has measured by a layout is measured again.
  renderer.handleCharSizeChanged();
}

/** One terminal on the screen, and its connection. */
class Attached {
  #control = new AbortController();
  #socket = null;
  #terminal = null;
  #fit = null;
  /** The first byte of output that has not come yet. */
  #offset = 0;
  /** Whether what the terminal answers may be sent: not while old output is shown again. */
  #isLive = false;
  #hasEnded = false;
  /** What goes to the program when the task that runs has ended. */
  #typed = "";
  #decoder = new TextDecoder("utf-8", { ignoreBOM: true });

  constructor(workspace, id, parent) {
    this.workspace = workspace;
    this.id = id;
    this.path = `${workspace.prefix}/processes/${encodeURIComponent(id)}`;
    parent.addEventListener("abort", () => this.close(), { signal: this.#control.signal });
    this.title = h("span", { class: "mono name" }, id);
    this.state = h("span", { role: "status" });
    this.size = h("span", { class: "quiet figures" });
    this.signals = h("span", { class: "group" }, signalButtons(workspace, () => id, "foreground"));
    this.screen = h("div", { class: "screen", "aria-label": "Terminal" });
    this.element = h("article", { class: "terminal", "aria-label": `Terminal ${id}` },
      h("div", { class: "bar" }, this.title, this.state, h("span", { class: "space" }), this.size,
        h("a", { class: "button", href: workspace.link("p", id), title: "Its output as a log" }, "Log"), this.signals),
      this.screen,
      h("p", { class: "hint quiet small" }, "Tab and all other keys go to the terminal; Shift+Esc leaves it."));
  }

  async start() {
    const { signal } = this.#control;
    library ??= Promise.all([import("./xterm.mjs"), import("./xterm-addon-fit.mjs")]).then(bounded);
    const [{ Terminal }, { FitAddon }] = await library;
    if (signal.aborted) return;
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    const look = () => ((document.documentElement.dataset.theme ?? (scheme.matches ? "dark" : "light")) === "dark" ? DARK : LIGHT);
    const terminal = new Terminal({
      allowProposedApi: false, convertEol: false, cursorBlink: false, fontSize: 13, scrollback: 10_000, theme: look(), logLevel: "off",
      fontFamily: getComputedStyle(document.documentElement).getPropertyValue("--mono"),
      screenReaderMode: false,
    });
    this.#terminal = terminal;
    const restyle = () => { terminal.options.theme = look(); };
    scheme.addEventListener("change", restyle, { signal });
    document.addEventListener("theme", restyle, { signal });
    // The library does it as often as it is told to. Handlers of its public interface get a copy of the parameters.
    for (const [final, side] of Object.entries(REPEATED)) terminal._core.registerCsiHandler({ final }, ({ params }) => {
      params[0] = Math.min(params[0], terminal[side] ?? MOST_REPEATED);
      return false;
    });
    // Nor is mode 12 followed, a cursor that blinks: each change of it draws all anew.
    for (const final of "hl") terminal._core.registerCsiHandler({ prefix: "?", final }, ({ params, length }) => {
      for (let at = 0; at < length; at += 1) if (params[at] === 12) params[at] = 0;
      return false;
    });
    for (const kind of COSTLY) terminal.parser.registerOscHandler(kind, (data) => kind > 100 || data !== "?");
    this.#fit = new FitAddon();
    terminal.loadAddon(this.#fit);
    terminal.open(this.screen);
    measureByCanvas(terminal._core._renderService._renderer.value);
    terminal.attachCustomKeyEventHandler((event) => {
      if (event.key !== "Escape" || !event.shiftKey) return true;
      if (event.type === "keydown") this.element.querySelector(".bar a").focus();
      return false;
    });
    terminal.onData((data) => {
      if (!this.#isLive) return;
      // The answers to all that a part of the output asks are one message.
      if (!this.#typed) queueMicrotask(() => {
        this.#type(new TextEncoder().encode(this.#typed));
        this.#typed = "";
      });
      this.#typed += data;
    });
    terminal.onBinary((data) => this.#type(Uint8Array.from(data, (letter) => letter.charCodeAt(0))));
    terminal.onTitleChange((title) => setText(this.title, visible(title) || this.id));
    terminal.onResize(({ rows, cols }) => {
      setText(this.size, `${cols} × ${rows}`);
      this.#send({ resize: { rows, cols } });
    });
    const observer = new ResizeObserver(() => this.#refit());
    observer.observe(this.screen);
    signal.addEventListener("abort", () => {
      observer.disconnect();
      terminal.dispose();
    });
    this.#refit();
    terminal.focus();
    await this.#stay();
  }

  update(process) {
    if (process && !this.#hasEnded && !process.running) this.#end(stateBadge(process));
  }

  close() {
    this.#control.abort();
    this.#socket?.close();
  }

  #refit() {
    if (this.screen.clientHeight > 40 && this.screen.clientWidth > 40) this.#fit.fit();
    setText(this.size, `${this.#terminal.cols} × ${this.#terminal.rows}`);
  }

  #type(data) {
    if (this.#isLive && this.#socket?.readyState === WebSocket.OPEN && this.#socket.bufferedAmount < MOST_UNREAD) this.#socket.send(data);
  }

  #send(request) {
    if (this.#socket?.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(request));
  }

  /** Connects, and again when the connection breaks, from the byte that comes next. */
  async #stay() {
    let wait = 250;
    while (!this.#control.signal.aborted && !this.#hasEnded) {
      const wasConnected = await this.#connect();
      if (this.#control.signal.aborted || this.#hasEnded) return;
      this.state.replaceChildren(badge("bad", "connection lost, trying again"));
      const gone = await get(this.path, this.#control.signal).then(() => false, (error) => error.status === 404);
      if (gone) return this.#end(badge("bad", "gone: removed, or the server was restarted"));
      if (wasConnected) wait = 250;
      await pause(wait, this.#control.signal).catch(() => {});
      wait = Math.min(wait * 2, LONGEST_PAUSE);
    }
  }

  /** One connection, until it ends. Resolves to whether it was made. */
  #connect() {
    const { rows, cols } = this.#terminal;
    this.#isLive = false;
    return new Promise((resolve) => {
      const connected = socket(at(`${this.path}/attach`, { offset: this.#offset, rows, cols }), "sbx.pty.v1");
      this.#socket = connected;
      let wasAttached = false;
      connected.onmessage = ({ data }) => {
        if (typeof data !== "string") {
          this.#offset += data.byteLength;
          const text = this.#decoder.decode(data, { stream: true });
          for (let at = 0; at < text.length; at += PART) this.#terminal.write(text.slice(at, at + PART));
          return;
        }
        const event = JSON.parse(data);
        if (event.event === "attached") {
          wasAttached = true;
          this.#offset = event.offset;
          this.state.replaceChildren(badge("busy", "live"));
        } else this.#told(event);
      };
      connected.onclose = () => resolve(wasAttached);
    });
  }

  #told(event) {
    switch (event.event) {
      case "live":
        // After all that was written before has been shown, and answered to.
        this.#terminal.write("", () => { this.#isLive = true; });
        break;
      case "dropped":
        this.#offset += event.bytes;
        break;
      case "mode":
        this.state.replaceChildren(event.mode === "ro"
          ? [badge("quiet", "watching: another client types"), " ", button(null, { label: "Take over", onclick: () => this.#send({ take: true }) })]
          : badge("busy", "live"));
        break;
      case "error":
        notify(event.error, "bad");
        break;
      case "exit":
        this.#end(stateBadge({ ...event, running: false }));
        break;
    }
  }

  #end(state) {
    this.#hasEnded = true;
    this.#isLive = false;
    this.signals.hidden = true;
    this.state.replaceChildren(state);
    if (this.#terminal) this.#terminal.options.cursorInactiveStyle = "none";
  }
}
