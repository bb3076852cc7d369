// Files: folders, viewing and editing, uploads by drop, downloads as archives, search.

import { ApiError, at, call, events, get, send, upload } from "./api.js";
import {
  ago, ask, badge, bytes, button, complain, count, empty, every, field, foreign, guarded, h, icon, moment, notify, save,
  setText, visible,
} from "./dom.js";
import { Budget } from "./bounds.js";
import { drawing, lines, offer, picture } from "./pictures.js";
import { archive, dropped } from "./tar.js";

/** Entries that a folder shows at first, and adds at a time. */
const PAGE = 500;
/** Entries of a folder that is listed again only when its time says that it changed. */
const LARGE = 500;
/** Largest text that can be edited here, in bytes; what it may take to lay out, and one of its lines. */
const LARGEST_TEXT = 4 * 1024 * 1024;
const EDITED = 6_000_000;
const EDITED_LINE = 500_000;
/** What the matches of a search may take to draw, and what one does. */
const MATCHES = 1_000_000;
const MATCH = 50;
/** Largest image that is shown, in bytes. */
const LARGEST_IMAGE = 8 * 1024 * 1024;
/** Bytes of a binary file that are shown. */
const DUMPED = 4096;

const IMAGES = new Map(Object.entries({ png: "image/png", jpg: "image/jpeg", jpeg: "image/jpeg", gif: "image/gif", webp: "image/webp", svg: "image/svg+xml", avif: "image/avif" }));

/** A path below another. */
export const join = (folder, name) => (folder === "/" ? `/${name}` : `${folder}/${name}`);
const agoText = (at) => (ago(at) === "now" ? "now" : `${ago(at)} ago`);
const nameOf = (path) => path.slice(path.lastIndexOf("/") + 1) || "/";
const folderOf = (path) => path.slice(0, path.lastIndexOf("/")) || "/";

export function filesView(workspace, signal) {
  const { prefix } = workspace;
  const route = (path) => workspace.link("f", path);
  let folder = null;
  let shown = null;
  let entries = [];
  let next = null;
  let limit = PAGE;
  let listedAt = null;
  let opening = null;
  let editor = null;

  const crumbs = h("nav", { class: "crumbs", "aria-label": "Path" });
  const rows = h("tbody");
  const table = h("table", { class: "table files" },
    h("thead", {}, h("tr", {}, ["Name", "Size", "Modified", "Mode", ""].map((title) => h("th", { scope: "col" }, title || h("span", { class: "unseen" }, "Actions"))))), rows);
  const more = h("div", { class: "more" });
  const find = h("input", { type: "search", placeholder: "Search in files", "aria-label": "Search in files", spellcheck: "false" });
  const searching = h("form", { class: "search", onsubmit: guarded(async (event) => {
    event.preventDefault();
    await search(find.value);
  }) }, icon("search"), find);
  const chooser = h("input", { type: "file", multiple: true, hidden: true, onchange: () => {
    sendFiles(dropped.fromInput(chooser.files));
    chooser.value = "";
  } });
  const bar = h("div", { class: "bar" }, crumbs, h("span", { class: "space" }), searching,
    button("fileplus", { title: "New file", onclick: guarded(newFile) }),
    button("folderplus", { title: "New folder", onclick: guarded(newFolder) }),
    button("upload", { title: "Upload files; folders can be dropped on the page", label: "Upload", onclick: () => chooser.click() }), chooser,
    button("download", { title: "Download this folder as .tar.gz", label: "Archive", onclick: guarded(() => download(folder, true)) }));
  const listing = h("div", { class: "listing" }, table, more);
  const pane = h("div", { class: "pane", hidden: true });
  const body = h("div", { class: "split files-split" }, listing, pane);
  const progress = h("div", { class: "progress", hidden: true, role: "status" });
  const element = h("div", { class: "stack drop", ondragover: (event) => {
    event.preventDefault();
    element.classList.add("over");
  }, ondragleave: (event) => {
    if (!element.contains(event.relatedTarget)) element.classList.remove("over");
  }, ondrop: (event) => {
    event.preventDefault();
    element.classList.remove("over");
    sendFiles(dropped.fromDrop(event.dataTransfer));
  } }, bar, progress, body);

  function showCrumbs() {
    const parts = folder.split("/").filter(Boolean);
    let path = "";
    crumbs.replaceChildren(h("a", { href: route("/") }, workspace.rootName), ...parts.flatMap((part) => {
      path += `/${part}`;
      return [h("span", { class: "quiet", "aria-hidden": "true" }, "/"), h("a", { href: route(path) }, foreign(part))];
    }));
  }

  /** Lists again if something may have changed: a large folder only if a name in it has. */
  async function relist() {
    if (entries.length > LARGE) {
      const { mtime_ms: changedAt } = await get(at(`${prefix}/files/stat`, { path: folder }), signal);
      if (changedAt === listedAt) return;
      listedAt = changedAt;
    }
    await list();
  }

  async function list() {
    const asked = folder;
    const answer = await get(at(`${prefix}/files/list`, { path: folder, limit: 10_000 }), signal);
    if (asked !== folder) return;
    const rank = (entry) => (entry.type === "dir" ? 0 : 1);
    const sorted = answer.entries.sort((one, other) => rank(one) - rank(other) || (one.name < other.name ? -1 : 1));
    const isSame = JSON.stringify(sorted) === JSON.stringify(entries) && rows.firstChild;
    entries = sorted;
    next = answer.next;
    if (!isSame) showEntries();
  }

  function showEntries() {
    const focused = rows.contains(document.activeElement) ? document.activeElement.closest("tr").dataset.name : null;
    rows.replaceChildren(...entries.slice(0, limit).map(entryRow));
    if (!entries.length) rows.append(h("tr", {}, h("td", { colspan: 5 }, h("p", { class: "quiet" }, "This folder is empty. Drop files or folders here."))));
    const left = entries.length - limit;
    more.replaceChildren(...(left > 0 ? [button("down", { label: `Show ${count(Math.min(left, PAGE))} more of ${count(left)}`, onclick: () => {
      limit += PAGE;
      showEntries();
    } })] : next ? [h("p", { class: "quiet" }, "There are more than 10,000 entries; the rest is not shown.")] : []));
    if (focused !== null) [...rows.children].find((row) => row.dataset.name === focused)?.querySelector("a")?.focus();
  }

  function entryRow(entry) {
    const path = join(folder, entry.name);
    const isFolder = entry.type === "dir";
    const kind = isFolder ? "files" : entry.type === "symlink" ? "link" : "file";
    const row = h("tr", { class: entry.name.startsWith(".") ? "hidden-name" : null },
      h("td", {}, h("a", { class: "name", href: route(path), "aria-current": path === shown ? "true" : null }, icon(kind), foreign(entry.name), entry.type === "other" && badge("quiet", "special"))),
      h("td", { class: "figures" }, isFolder ? "" : bytes(entry.size)),
      h("td", { class: "quiet figures", title: moment(entry.mtime_ms) }, agoText(entry.mtime_ms)),
      h("td", { class: "mono quiet" }, entry.mode ?? ""),
      h("td", { class: "actions" },
        button("download", { title: `Download ${visible(entry.name)}`, class: "ghost", onclick: guarded(() => download(path, isFolder)) }),
        button("edit", { title: `Rename ${visible(entry.name)}`, class: "ghost", onclick: guarded(() => rename(path)) }),
        button("trash", { title: `Delete ${visible(entry.name)}`, class: "ghost", onclick: guarded(() => remove(path, isFolder)) })));
    row.dataset.name = entry.name;
    return row;
  }

  async function newFile() {
    const answer = await ask({ title: "New file", fields: [field("Name", h("input", { name: "name", required: true, autocomplete: "off" }))], confirm: "Create" });
    if (!answer) return;
    const path = join(folder, answer.name);
    await call("PUT", at(`${prefix}/files/write`, { path, if_absent: 1 }), { body: "" });
    await list();
    location.hash = route(path);
  }

  async function newFolder() {
    const answer = await ask({ title: "New folder", fields: [field("Name", h("input", { name: "name", required: true, autocomplete: "off" }))], confirm: "Create" });
    if (!answer) return;
    await call("POST", at(`${prefix}/files/mkdir`, { path: join(folder, answer.name) }));
    await list();
  }

  async function rename(path) {
    const answer = await ask({ title: "Rename", fields: [field("Name", h("input", { name: "name", required: true, value: nameOf(path), autocomplete: "off" }))], confirm: "Rename" });
    if (!answer || answer.name === nameOf(path)) return;
    await call("POST", at(`${prefix}/files/move`, { from: path, to: join(folderOf(path), answer.name) }));
    await list();
  }

  async function remove(path, isFolder) {
    const text = isFolder ? "The folder and all that is in it are deleted. There is no way back." : "There is no way back.";
    if (!await ask({ title: `Delete ${visible(nameOf(path))}?`, text, confirm: "Delete", danger: true })) return;
    await call("DELETE", at(`${prefix}/files/delete`, { path, recursive: isFolder ? 1 : null }));
    if (path === shown) location.hash = route(folder);
    await list();
  }

  async function download(path, isFolder) {
    const name = path === "/" ? "files" : nameOf(path);
    notify(`Downloading ${name}`);
    const response = isFolder
      ? await send("GET", at(`${prefix}/files/archive`, { path, format: "tar.gz" }))
      : await send("GET", at(`${prefix}/files/read`, { path }));
    save(await response.blob(), isFolder ? `${name}.tar.gz` : name);
  }

  async function sendFiles(found) {
    try {
      const files = await found;
      if (!files.length) return;
      const into = folder;
      progress.hidden = false;
      progress.textContent = `Packing ${count(files.length)} entries`;
      const body = await archive(files);
      const answer = await upload(at(`${prefix}/files/archive`, { path: into }), body, (loaded, total) => {
        progress.textContent = `Uploading to ${visible(into)}: ${bytes(loaded)} of ${bytes(total)}`;
        progress.style.setProperty("--part", `${(100 * loaded) / total}%`);
      }, signal);
      notify(`Uploaded ${count(answer.files)} ${answer.files === 1 ? "file" : "files"}, ${bytes(answer.bytes)}`, "good");
      await list();
    } catch (error) {
      complain(error);
    } finally {
      progress.hidden = true;
    }
  }

  /** Asks before changes are lost that are not saved. */
  const mayLeave = async () => !editor?.isDirty?.() || Boolean(await ask({ title: "Leave the changes?", text: `${visible(shown)} has changes that are not saved.`, confirm: "Leave them", danger: true }));

  async function search(pattern) {
    if (!pattern || !await mayLeave()) return;
    closePane();
    const control = new AbortController();
    const found = h("ol", { class: "matches" });
    const state = h("p", { class: "quiet", role: "status" }, "Searching");
    let last = null;
    openPane(h("article", { class: "detail" },
      h("header", {}, h("h2", {}, "Matches of ", h("span", { class: "mono" }, visible(pattern))), h("span", { class: "space" }), closeButton()), state, found));
    editor = { close: () => control.abort(), element: found };
    try {
      const json = { pattern, literal: true, case: "smart", path: folder, limit: 1000 };
      const budget = new Budget(MATCHES);
      for await (const event of events("POST", `${prefix}/files/grep`, { json, signal: control.signal })) {
        if (event.event === "match" && budget.spend(MATCH)) {
          if (event.path !== last) found.append(h("li", { class: "path" }, h("a", { href: route(event.path.startsWith("/") ? event.path : join(folder, event.path)) }, foreign(event.path))));
          last = event.path;
          found.append(h("li", {}, h("span", { class: "quiet figures" }, String(event.line)), matchText(event, budget)));
        } else if (event.event === "end") {
          setText(state, event.code ? event.error : `${count(event.matches)} in ${count(event.files)} of ${count(event.searched)} files${event.truncated || budget.left < 0 ? "; there are more" : ""}`);
        }
      }
    } catch (error) {
      setText(state, error.message);
    }
  }

  function matchText({ text, spans }, budget) {
    const characters = [...text];
    const line = h("code");
    const cut = (start, end) => budget.take(visible(characters.slice(start, end).join("")));
    let from = 0;
    for (const [start, end] of spans) {
      if (!budget.spend(MATCH)) break;
      line.append(cut(from, start), h("mark", {}, cut(start, end)));
      from = end;
    }
    line.append(cut(from));
    return line;
  }

  const closeButton = () => h("a", { class: "button square", href: route(folder), "aria-label": "Close", onclick: () => show([folder]) }, icon("close"));

  function openPane(content) {
    pane.replaceChildren(content);
    pane.hidden = false;
    body.classList.add("detailed");
  }

  function closePane() {
    opening?.abort();
    editor?.close();
    editor = null;
    shown = null;
    pane.hidden = true;
    pane.replaceChildren();
    body.classList.remove("detailed");
  }

  /** Shows a folder, or a file beside the folder that it is in. */
  async function show(parts) {
    const path = `/${parts.join("/").replace(/^\/+/, "")}`.replace(/(.)\/+$/, "$1");
    if (path === shown) return;
    if (!await mayLeave()) {
      history.replaceState(null, "", route(shown));
      return;
    }
    closePane();
    let entry = { type: "dir" };
    try {
      if (path !== "/") entry = await get(at(`${prefix}/files/stat`, { path }), signal);
    } catch (error) {
      if (signal.aborted) return;
      // Said where the file would be: the address may be a link that somebody has sent.
      if (folder === null) await enter(folderOf(path)).catch(() => enter("/"));
      shown = path;
      openPane(h("article", { class: "detail file", "aria-label": `File ${visible(nameOf(path))}` },
        h("header", {}, h("h2", {}, foreign(nameOf(path))), h("span", { class: "space" }), closeButton()),
        h("div", { class: "content" }, empty("file", "There is no file at this address", error.message))));
      return;
    }
    const wanted = entry.type === "dir" ? path : folderOf(path);
    if (entry.type === "symlink") {
      // A link to a folder lists; in a sandbox it is refused with a sentence.
      const listed = await get(at(`${prefix}/files/list`, { path, limit: 1 }), signal).then(() => true, () => false);
      if (listed) return enter(path);
    }
    if (wanted !== folder) await enter(wanted);
    if (entry.type !== "dir") {
      shown = path;
      for (const link of rows.querySelectorAll("a.name")) {
        if (link.getAttribute("href") === route(path)) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
      }
      await openInPane(path, entry);
    }
  }

  async function openInPane(path, entry) {
    opening?.abort();
    opening = new AbortController();
    const reopen = async () => openInPane(path, await get(at(`${prefix}/files/stat`, { path }), signal));
    editor = await openFile(workspace, path, entry, AbortSignal.any([signal, opening.signal]), { closeButton, changed: list, download, reopen });
    openPane(editor.element);
  }

  async function enter(path) {
    folder = path;
    entries = [];
    limit = PAGE;
    rows.replaceChildren();
    showCrumbs();
    await list();
  }

  addEventListener("beforeunload", (event) => {
    if (editor?.isDirty?.()) event.preventDefault();
  }, { signal });
  every(4000, signal, async () => {
    if (folder !== null) await relist();
  });

  return {
    element,
    title: "Files",
    mayLeave,
    address: () => route(shown ?? folder ?? "/"),
    show: (parts) => show(parts).catch((error) => {
      complain(error);
      rows.replaceChildren(h("tr", {}, h("td", { colspan: 5 }, h("p", { class: "quiet" }, error.message))));
    }),
    close: closePane,
  };
}

/** A file in the pane: as text that can be edited, as an image, or as the first bytes of something else. */
async function openFile(workspace, path, entry, signal, { closeButton, changed, download, reopen }) {
  const { prefix } = workspace;
  const name = nameOf(path);
  const state = h("span", { role: "status" });
  const actions = h("span", { class: "group" });
  const content = h("div", { class: "content" });
  const element = h("article", { class: "detail file", "aria-label": `File ${visible(name)}` },
    h("header", {}, h("h2", {}, foreign(name)), state, h("span", { class: "space" }), actions,
      button("download", { title: `Download ${visible(name)} as it is`, onclick: guarded(() => download(path, false)) }), closeButton()),
    content);
  const viewer = { element, close() {}, isDirty: () => false };
  const say = (text) => content.replaceChildren(h("p", { class: "quiet" }, text));
  if (entry.type !== "file") {
    say(entry.type === "symlink" ? "This is a symbolic link. It is not followed here." : "This is no regular file.");
    return viewer;
  }

  // The file may grow while it is read, so each read has a limit.
  const read = async (most) => (await send("GET", at(`${prefix}/files/read`, { path, length: most }), { signal })).arrayBuffer();
  const image = IMAGES.get(name.split(".").pop().toLowerCase());
  if (image && entry.size <= LARGEST_IMAGE) {
    const blob = new Blob([await read(LARGEST_IMAGE)], { type: image });
    const instead = (reason) => offer(reason, blob, name, image);
    if (image === "image/svg+xml") content.replaceChildren(drawing(await blob.text(), visible(name), instead));
    else {
      const reader = new FileReader();
      reader.readAsDataURL(blob);
      await new Promise((resolve) => { reader.onloadend = resolve; });
      content.replaceChildren(picture(reader.result, visible(name), instead));
    }
    state.replaceChildren(badge("quiet", bytes(entry.size)));
    return viewer;
  }
  const stat = () => get(at(`${prefix}/files/stat`, { path, hash: "sha256" }), signal);
  let isWhole = entry.size <= LARGEST_TEXT;
  let isSettled = false;
  let before = isWhole ? await stat() : null;
  let raw = null;
  // The content and its digest are of the same moment if the digest was the same on both sides of it.
  for (let tries = 0; isWhole && !isSettled && tries < 3; tries += 1) {
    raw = new Uint8Array(await read(LARGEST_TEXT + 1));
    isWhole = raw.length <= LARGEST_TEXT;
    const after = await stat();
    isSettled = after.sha256 === before.sha256;
    before = after;
  }
  raw ??= new Uint8Array(await read(DUMPED));
  const text = isWhole ? asText(raw) : null;
  if (text === null) {
    const asLines = guarded(async () => content.replaceChildren(lines(new TextDecoder().decode(await read(LARGEST_TEXT)))));
    content.replaceChildren(h("div", { class: "offer" }, h("p", { class: "quiet" }, isWhole ? `Not text. ${bytes(entry.size)}:` : `${bytes(entry.size)}, too large to edit here. It begins:`),
      !isWhole && button("file", { label: `Show the first ${bytes(LARGEST_TEXT)} as text`, onclick: asLines })), h("pre", { class: "dump" }, dump(raw.subarray(0, DUMPED))));
    return viewer;
  }
  // A text area lays out all of its lines at once.
  if (new Budget(EDITED).take(text) !== text || isLineLonger(text)) {
    content.replaceChildren(offer("This text is too large to edit here", text, name));
    return viewer;
  }

  // A text area has lines that end with LF. What ends otherwise, but not throughout, would not come back as it was.
  const crlf = text.split("\r\n").length - 1;
  const isCrlf = crlf > 0 && crlf === text.split("\n").length - 1 && !text.replaceAll("\r\n", "").includes("\r");
  const isEditable = isSettled && (isCrlf || !text.includes("\r"));
  let saved = isCrlf ? text.replaceAll("\r\n", "\n") : text;
  let digest = before.sha256;

  const numbers = h("pre", { class: "numbers", "aria-hidden": "true" });
  const area = h("textarea", { class: "editor", wrap: "off", spellcheck: "false", autocapitalize: "off", autocomplete: "off", readonly: !isEditable,
    "aria-label": `Content of ${visible(name)}`, "aria-description": "Tab indents; press Escape first to move on with Tab. Control S saves.", value: saved });
  const saveButton = h("button", { type: "button", class: "button primary", disabled: true, onclick: guarded(() => store()) }, "Save");
  actions.replaceChildren(saveButton);
  content.replaceChildren(h("div", { class: "editing" }, h("div", { class: "gutter" }, numbers), area));
  if (!isEditable) state.replaceChildren(badge("quiet", isSettled ? "read only: its lines end in several ways" : "read only: it is being written"));

  const isDirty = () => isEditable && area.value !== saved;
  let numbered = 0;
  function refresh() {
    const now = area.value.split("\n").length;
    if (now !== numbered) {
      numbered = now;
      numbers.textContent = Array.from({ length: now }, (_, at) => at + 1).join("\n");
    }
    saveButton.disabled = !isDirty();
    if (isEditable) state.replaceChildren(isDirty() ? badge("busy", "not saved") : badge("quiet", `${count(now)} lines, ${bytes(new Blob([area.value]).size)}`));
  }
  let movesOn = false;
  area.addEventListener("input", refresh);
  area.addEventListener("scroll", () => { numbers.style.transform = `translateY(${-area.scrollTop}px)`; });
  area.addEventListener("keydown", (event) => {
    if (event.key === "s" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      if (isDirty()) saveButton.click();
    } else if (event.key === "Tab" && !movesOn && !event.shiftKey && isEditable) {
      event.preventDefault();
      // The only way to insert text that a browser can undo.
      document.execCommand("insertText", false, "\t");
    }
    movesOn = event.key === "Escape";
  });

  async function store(isForced) {
    const edited = area.value;
    const body = isCrlf ? edited.replaceAll("\n", "\r\n") : edited;
    try {
      const written = await call("PUT", at(`${prefix}/files/write`, { path, hash: "sha256", if_sha256: isForced ? null : digest }), { body });
      digest = written.sha256;
      saved = edited;
      refresh();
      notify(`Saved ${name}`, "good");
      await changed();
    } catch (error) {
      if (!(error instanceof ApiError) || error.code !== "changed") throw error;
      const answer = await ask({
        title: `${visible(name)} changed meanwhile`,
        text: "Somebody else has written this file since it was opened here. Nothing is saved yet.",
        confirm: "Overwrite", danger: true, others: [{ label: "Load theirs", answer: "load" }],
      });
      if (answer === "load") await reopen();
      else if (answer) await store(true);
    }
  }

  viewer.isDirty = isDirty;
  refresh();
  return viewer;
}

/** Whether a line of a text takes too long to lay out for a text area. */
const isLineLonger = (text) => text.split("\n").some((line) => new Budget(EDITED_LINE).take(line) !== line);

/** Bytes as text; null if they are none. */
function asText(raw) {
  if (raw.subarray(0, 65_536).includes(0)) return null;
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(raw);
  } catch {
    return null;
  }
}

function dump(raw) {
  const lines = [];
  for (let from = 0; from < raw.length; from += 16) {
    const row = [...raw.subarray(from, from + 16)];
    const hex = row.map((byte) => byte.toString(16).padStart(2, "0")).join(" ").padEnd(48);
    lines.push(`${from.toString(16).padStart(8, "0")}  ${hex} ${row.map((byte) => (byte > 31 && byte < 127 ? String.fromCharCode(byte) : "·")).join("")}`);
  }
  return lines.join("\n");
}
