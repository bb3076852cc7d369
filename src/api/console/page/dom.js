// Elements, formats and small controls that every view uses. Text from the server only ever becomes text nodes and
// attributes here; nothing in the console parses it as HTML.

/** Makes an element. `on...` properties are listeners, `class`, `data-...` and the rest are attributes. */
export function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined && child !== false) element.append(child);
  }
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

/** Makes an element of SVG. */
export function svg(tag, properties, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(properties ?? {})) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const ICONS = {
  overview: "M2.5 9.5h2.6l2-6 3 9 2-6 .9 3h2.5",
  processes: "M2.5 4h2M2.5 8h2M2.5 12h2M7 4h6.5M7 8h6.5M7 12h6.5",
  terminal: "M3 4.5l3.5 3.5L3 11.5M8.5 12H13",
  files: "M2 4.2c0-.7.5-1.2 1.2-1.2h3l1.4 1.8h5.2c.7 0 1.2.5 1.2 1.2v5.8c0 .7-.5 1.2-1.2 1.2H3.2C2.5 13 2 12.5 2 11.8z",
  file: "M4 2.5h5l3 3v8H4zM9 2.5v3h3",
  link: "M6.5 9.5l3-3M7.5 4.5l1-1a2.8 2.8 0 0 1 4 4l-1 1M8.5 11.5l-1 1a2.8 2.8 0 0 1-4-4l1-1",
  notebook: "M4 2.5h8.5v11H4zM2.5 5H5M2.5 8H5M2.5 11H5M7.5 6h2.5M7.5 8.5h2.5",
  ports: "M5.5 2.5v3M10.5 2.5v3M3.5 5.5h9v2.5a4.5 4.5 0 0 1-9 0zM8 12.5v1.5",
  network: "M8 2.200a5.8 5.8 0 1 0 0 11.600A5.8 5.8 0 0 0 8 2.200zM2.2 8h11.600M8 2.200c-4 4-4 7.6 0 11.600c4-4 4-7.6 0-11.6",
  sandboxes: "M2.5 2.5h4.5v4.5H2.5zM9 2.5h4.5v4.5H9zM2.5 9h4.5v4.5H2.5zM9 9h4.5v4.5H9z",
  plus: "M8 3v10M3 8h10",
  close: "M4 4l8 8M12 4l-8 8",
  up: "M8 12.5v-9M4 7.5l4-4 4 4",
  down: "M8 3.5v9M4 8.5l4 4 4-4",
  upload: "M8 10.5v-8M5 5.5l3-3 3 3M2.5 10v3.5h11V10",
  download: "M8 2.5v8M5 7.5l3 3 3-3M2.5 10v3.5h11V10",
  pause: "M5.5 3.5v9M10.5 3.5v9",
  play: "M5 3l7.5 5L5 13z",
  stop: "M4 4h8v8H4z",
  trash: "M3 4.5h10M6.5 4V2.5h3V4M4.5 4.5l.6 9h5.800l.6-9",
  search: "M7 2.5a4.5 4.5 0 1 0 0 9 4.5 4.5 0 0 0 0-9zM10.3 10.300l3.2 3.2",
  edit: "M3 13l.6-2.800L10.8 3l2.2 2.2-7.2 7.200z",
  folderplus: "M2 12.5V3.5h4l1.4 1.800H14v7.200zM8 7.5v3M6.5 9h3",
  fileplus: "M4 2.5h5l3 3v8H4zM8 7.5v3.5M6.3 9.200h3.4",
  open: "M9.5 2.5h4v4M13.5 2.5l-6 6M11.5 9v4.5h-9v-9H7",
  theme: "M8 2.5a5.5 5.5 0 1 0 0 11zM8 2.5a5.5 5.5 0 0 1 0 11",
  leave: "M6.5 2.5h-4v11h4M10 5l3 3-3 3M13 8H6",
  restart: "M3 8a5 5 0 1 1 1.6 3.700M3 12.5v-3h3",
  back: "M10 3L5 8l5 5",
  copy: "M5.5 5.5h8v8h-8zM10.5 5.5v-3h-8v8h3",
};

/** One of the icons, 16 pixels square, drawn in the colour of the text beside it. */
export function icon(name) {
  const path = svg("path", { d: ICONS[name] });
  return svg("svg", { class: "icon", viewBox: "0 0 16 16", "aria-hidden": "true" }, path);
}

/** A button with an icon. Without `label` it shows only the icon, and `title` is its name. */
export function button(name, { title, label, ...properties }) {
  const named = label ? {} : { "aria-label": title };
  const look = label ? "button" : "button square";
  return h("button", { type: "button", title, ...named, ...properties, class: `${look} ${properties.class ?? ""}` },
    name && icon(name), label && h("span", {}, label));
}

/** Characters that are invisible, or that change the order of the text around them. */
const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

/** Most characters of a name, a command or a message. */
const LONGEST_NAME = 2_000;

/** Text with its unseen characters spelled out, so that a name cannot pass for another. What is longer than `most` is cut. */
export function visible(text, most = LONGEST_NAME) {
  if (text.length > most) text = `${text.slice(0, most)}…`;
  return text.replace(UNSEEN, (unseen) => `\u2039${unseen.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}\u203a`);
}

/** What a line shows: a carriage return that something follows writes over it, as progress bars do. */
export function settled(line) {
  const end = line.endsWith("\r") ? line.length - 1 : line.length;
  return line.slice(line.lastIndexOf("\r", end - 1) + 1, end);
}

/** A name or a line from inside the sandbox: spelled out, and kept in its own direction. */
export function foreign(text, tag = "bdi", properties = {}) {
  return h(tag, { dir: "auto", ...properties }, visible(text));
}

/**
 * Brings the children of `parent` in line with `items`, and keeps the elements of those that stay. Items with the same key
 * are told apart by their order.
 */
export function reconcile(parent, items, keyOf, make, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const gone = new Set(parent.children);
  const seen = new Map();
  let at = parent.firstElementChild;
  for (const item of items) {
    const plain = String(keyOf(item));
    const count = (seen.get(plain) ?? 0) + 1;
    seen.set(plain, count);
    const key = count === 1 ? plain : `${plain} #${count}`;
    const element = known.get(key) ?? make(item);
    gone.delete(element);
    element.dataset.key = key;
    update?.(element, item);
    if (element === at) at = at.nextElementSibling;
    else parent.insertBefore(element, at);
  }
  for (const element of gone) element.remove();
}

/** Sets the text of an element only if it differs, so that a selection in it stays. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** Bytes as people read them. */
export function bytes(count) {
  if (count === null || count === undefined) return "–";
  let unit = 0;
  while (count >= 1024 && unit < UNITS.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${unit && count < 100 ? count.toFixed(1) : Math.round(count)} ${UNITS[unit]}`;
}

/** Milliseconds as people read them. */
export function duration(ms) {
  if (ms < 1000) return `${Math.max(0, Math.round(ms))} ms`;
  const seconds = ms / 1000;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** How long ago a time was, by the clock of this browser. */
export function ago(at) {
  const ms = Date.now() - at;
  return ms < 1000 ? "now" : ms < 60_000 ? `${Math.floor(ms / 1000)} s` : duration(ms).replace(/ \d+ s$/, "");
}

const DAY = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const CLOCK = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });

/** What a format makes of a time. A file can have one that no `Date` reaches. */
const timed = (format, ms) => (Math.abs(ms) <= 8.64e15 ? format.format(ms) : "–");
/** A time in full. */
export const moment = (ms) => timed(DAY, ms);
/** A time of a day. */
export const clock = (ms) => timed(CLOCK, ms);
/** A count with separators. */
export const count = (number) => number.toLocaleString("en");

/** A word on a tint: `good`, `bad`, `busy` or `quiet`. */
export function badge(tone, text) {
  return h("span", { class: `badge ${tone}` }, text);
}

/** What a view shows when there is nothing to show. */
export function empty(name, title, text, ...actions) {
  return h("div", { class: "empty" }, icon(name), h("h2", {}, title), h("p", {}, text), actions);
}

const notices = h("div", { class: "notices", role: "status", "aria-live": "polite" });

/** Tells something at the edge of the page for a few seconds. */
export function notify(text, tone = "quiet", ...extra) {
  if (!notices.isConnected) document.body.append(notices);
  const notice = h("div", { class: `notice ${tone}` }, h("span", {}, visible(text)), extra);
  const close = () => notice.remove();
  notice.append(button("close", { title: "Dismiss", class: "ghost", onclick: close }));
  notices.append(notice);
  while (notices.children.length > 4) notices.firstChild.remove();
  setTimeout(close, tone === "bad" ? 12_000 : 6_000);
}

/** Tells of a failure, unless it is only that the view was left. */
export function complain(error) {
  if (error?.name !== "AbortError") notify(error?.message ?? String(error), "bad");
}

/** A listener that tells of the failures of `action`, and that ignores further calls until it has ended. */
export function guarded(action) {
  let runs = false;
  return async (event) => {
    if (runs) return;
    runs = true;
    try {
      await action(event);
    } catch (error) {
      complain(error);
    } finally {
      runs = false;
    }
  };
}

/**
 * Asks in a modal dialog. `fields` are elements with a `name`; the answer is an object of their values, or null if
 * the dialog was cancelled.
 */
export function ask({ title, text, fields = [], confirm = "OK", danger = false, others = [] }) {
  return new Promise((resolve) => {
    const dialog = h("dialog", { "aria-label": title });
    const finish = (answer) => {
      dialog.close();
      dialog.remove();
      resolve(answer);
    };
    const values = () => Object.fromEntries(fields.map((field) => {
      const input = field.matches("[name]") ? field : field.querySelector("[name]");
      return [input.name, input.value];
    }));
    const form = h("form", { method: "dialog", onsubmit: (event) => {
      event.preventDefault();
      finish(values());
    } },
    h("h2", {}, title), text && h("p", {}, text), fields,
    h("div", { class: "actions" },
      h("button", { type: "button", class: "button", onclick: () => finish(null) }, "Cancel"),
      others.map(({ label, answer }) => h("button", { type: "button", class: "button", onclick: () => finish(answer) }, label)),
      h("button", { class: `button ${danger ? "danger" : "primary"}` }, confirm)));
    dialog.append(form);
    dialog.addEventListener("cancel", (event) => {
      event.preventDefault();
      finish(null);
    });
    document.body.append(dialog);
    dialog.showModal();
    // Enter, which may follow a shortcut by habit, does nothing that cannot be undone.
    (dialog.querySelector("[name]") ?? dialog.querySelector(`.actions button:${danger ? "first" : "last"}-child`)).focus();
  });
}

/** A labelled field of a form. */
export function field(label, control, hint) {
  return h("label", { class: "field" }, h("span", {}, label), control, hint && h("small", {}, hint));
}

/**
 * Calls `action` now and every `ms` milliseconds while the page can be seen, until `signal` aborts. Returns a function
 * that calls it at once.
 */
export function every(ms, signal, action) {
  let timer;
  let runs = false;
  let again = false;
  let told = null;
  const round = async () => {
    if (runs) {
      again = true;
      return;
    }
    clearTimeout(timer);
    if (signal.aborted || document.hidden) return;
    runs = true;
    try {
      await action();
    } catch (error) {
      // The banner tells that the server does not answer, and the page itself that a sandbox is gone.
      if (error.name !== "AbortError" && !error.isOffline && error.status !== 404 && error.message !== told) {
        told = error.message;
        complain(error);
      }
    } finally {
      runs = false;
      if (!signal.aborted) timer = setTimeout(round, again ? 0 : ms);
      again = false;
    }
  };
  document.addEventListener("visibilitychange", round, { signal });
  signal.addEventListener("abort", () => clearTimeout(timer));
  round();
  return round;
}

/** Resolves after `ms` milliseconds; rejects when `signal` aborts. */
export function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(new DOMException("left", "AbortError"));
    }, { once: true });
  });
}

/** Saves `blob` as a file of the person's own machine. */
export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  const anchor = h("a", { href: url, download: name });
  document.body.append(anchor);
  anchor.click();
  anchor.remove();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}
