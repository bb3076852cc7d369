// The page itself: signing in, the frame, and which view the address shows. Views know nothing of each other.

import { connection, enter, keepToken, recallToken, session } from "./api.js";
import { button, bytes, field, h, icon, notify, reconcile, setText } from "./dom.js";
import { filesView } from "./files.js";
import { networkView, portsView } from "./network.js";
import { notebookView } from "./notebook.js";
import { Meter, overviewView, sample, sandboxesView } from "./overview.js";
import { processesView } from "./processes.js";
import { terminalsView } from "./terminals.js";

/** The sections of a workspace: the letter of their addresses, name, icon, view. */
const SECTIONS = [
  ["", "Overview", "overview", overviewView],
  ["p", "Processes", "processes", processesView],
  ["t", "Terminals", "terminal", terminalsView],
  ["f", "Files", "files", filesView],
  ["n", "Notebook", "notebook", notebookView],
  ["ports", "Ports", "ports", portsView],
  ["network", "Network", "network", networkView],
];

/** What the person chose to look at the page with. */
const THEMES = [null, "dark", "light"];

function applyTheme() {
  const theme = localStorage.getItem("sbx-theme");
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  document.dispatchEvent(new Event("theme"));
}

function nextTheme() {
  const now = THEMES.indexOf(localStorage.getItem("sbx-theme"));
  const next = THEMES[(now + 1) % THEMES.length];
  if (next) localStorage.setItem("sbx-theme", next);
  else localStorage.removeItem("sbx-theme");
  applyTheme();
}

/** One workspace, as views see it. `sandbox` is null where the machine itself is one. */
function makeWorkspace(sandbox) {
  const base = sandbox && session.isOperator ? `#/s/${encodeURIComponent(sandbox)}` : "#";
  const link = (section, path = "") => {
    const parts = [section, ...String(path).split("/")].filter(Boolean);
    return `${base}/${parts.map(encodeURIComponent).join("/")}`;
  };
  return {
    sandbox,
    base,
    prefix: sandbox ? `/v1/sandboxes/${encodeURIComponent(sandbox)}` : "/v1",
    rootName: sandbox ? "home" : "/",
    meter: new Meter(),
    onSample: null,
    link,
    go: (section, path) => { location.hash = link(section, path); },
  };
}

/** The address as sandbox, section and the rest. */
function readAddress() {
  const parts = location.hash.replace(/^#\/?/, "").split("/").map((part) => {
    try {
      return decodeURIComponent(part);
    } catch {
      return part;
    }
  });
  let sandbox = session.sandbox;
  if (session.mode === "host" && session.isOperator) {
    if (parts[0] !== "s" || !parts[1]) return { sandbox: null, section: "sandboxes", rest: [] };
    sandbox = parts[1];
    parts.splice(0, 2);
  }
  return { sandbox, section: parts[0] ?? "", rest: parts.slice(1) };
}

class App {
  #view = null;
  #shown = null;
  #control = null;
  #workspace = null;
  #sampling = null;
  #isAsking = false;

  start() {
    this.nav = h("nav", { class: "sections", "aria-label": "Sections" });
    this.where = h("div", { class: "where" });
    this.gauge = h("dl", { class: "gauge figures small" });
    this.status = h("span", { class: "online" }, h("span", { class: "dot good" }), h("span", { class: "text" }, "connected"));
    this.main = h("main", { id: "main", tabindex: "-1" });
    this.banner = h("div", { class: "banner", role: "alert", hidden: true }, "The server does not answer. Trying again.");
    document.body.replaceChildren(
      h("a", { class: "skip", href: "#main", onclick: (event) => {
        event.preventDefault();
        this.main.focus();
      } }, "Skip to the content"),
      h("div", { class: "frame-page" },
        h("aside", { class: "sidebar" },
          h("a", { class: "brand", href: "#/" }, icon("terminal"), "sbx"), this.where, this.nav, h("span", { class: "space" }), this.gauge,
          h("div", { class: "row foot" }, this.status, h("span", { class: "space" }),
            button("theme", { title: "Colours: as the system, dark, or light", class: "ghost", onclick: nextTheme }),
            button("leave", { title: "Forget the token", class: "ghost", onclick: () => signOut() }))),
        h("div", { class: "body" }, this.banner, this.main)));
    connection.addEventListener("change", ({ detail }) => this.#online(detail));
    addEventListener("hashchange", () => this.route());
    this.route();
  }

  #online(isOnline) {
    this.banner.hidden = isOnline;
    this.status.firstChild.className = `dot ${isOnline ? "good" : "bad"}`;
    setText(this.status.lastChild, isOnline ? "connected" : "no answer");
  }

  async route() {
    if (this.#isAsking) return;
    const { sandbox, section, rest } = readAddress();
    const name = `${sandbox} ${section}`;
    if (this.#shown !== name && this.#view?.mayLeave) {
      this.#isAsking = true;
      const may = await this.#view.mayLeave();
      this.#isAsking = false;
      if (!may) {
        history.replaceState(null, "", this.#view.address());
        return;
      }
    }
    if (!this.#workspace || this.#workspace.sandbox !== sandbox) this.#enter(sandbox);
    const known = SECTIONS.find(([letter]) => letter === section);
    if (this.#shown !== name) {
      this.#view?.close();
      this.#control?.abort();
      this.#control = new AbortController();
      this.#shown = name;
      const make = section === "sandboxes" ? sandboxesView : known?.[3];
      if (!make) {
        location.hash = `${this.#workspace.base}/`;
        return;
      }
      this.#view = make(this.#workspace, this.#control.signal);
      // Views that fill the page have bars of their own; the section that is marked names them.
      const title = h("header", { class: this.#view.isPage ? "title" : "unseen" }, h("h1", {}, this.#view.title));
      this.main.replaceChildren(title, this.#view.element);
      document.title = `${this.#view.title}${sandbox ? ` · ${sandbox.slice(0, 8)}` : ""} · sbx`;
    }
    for (const link of this.nav.children) {
      if (link.dataset.section === section) {
        link.setAttribute("aria-current", "page");
        link.scrollIntoView({ block: "nearest", inline: "nearest" });
      }
      else link.removeAttribute("aria-current");
    }
    this.#view.show(rest);
  }

  /** Goes to a workspace: its sections, and the samples of what it uses. */
  #enter(sandbox) {
    this.#sampling?.abort();
    this.#sampling = new AbortController();
    const workspace = makeWorkspace(sandbox);
    this.#workspace = workspace;
    const isList = session.mode === "host" && !sandbox;
    this.nav.replaceChildren(...(isList ? [["sandboxes", "Sandboxes", "sandboxes"]] : SECTIONS).map(([section, name, picture]) => h("a", {
      href: isList ? "#/" : workspace.link(section), "data-section": section,
    }, icon(picture), h("span", {}, name))));
    this.where.replaceChildren(...(session.mode === "host" && sandbox
      ? [session.isOperator && h("a", { class: "up quiet small", href: "#/" }, "‹ all sandboxes"), h("span", { class: "mono name", title: sandbox }, sandbox)].filter(Boolean)
      : [h("span", { class: "quiet" }, session.mode === "host" ? "host" : "this machine")]));
    const path = sandbox ? `${workspace.prefix}/metrics` : "/v1/metrics";
    sample(path, workspace.meter, this.#sampling.signal, () => {
      const { cpu, memory, processes } = workspace.meter.latest;
      const rows = [["Processors", cpu === null ? "–" : `${Math.round(100 * cpu)} %`], ["Memory", bytes(memory)], ["Processes", String(processes)]];
      reconcile(this.gauge, rows, ([name]) => name, ([name]) => h("div", {}, h("dt", {}, name), h("dd", {})), (row, [, value]) => setText(row.lastChild, value));
      workspace.onSample?.();
    }, loseAccess);
  }
}

/** The sandbox is gone, or the server has another token since it was restarted. */
function loseAccess(error) {
  if (error.status === 404 && session.isOperator) {
    notify("This sandbox is gone.");
    location.hash = "#/";
    return;
  }
  keepToken(null);
  location.hash = "";
  location.reload();
}

function signOut() {
  keepToken(null);
  location.hash = "";
  location.reload();
}

/** Asks for the token until one opens something. */
function signIn(reason) {
  const token = h("input", { name: "token", type: "password", autocomplete: "current-password", required: true, spellcheck: "false", "aria-describedby": "sign-in-text" });
  const problem = h("p", { class: "problem", role: "alert" }, reason ?? "");
  const form = h("form", { class: "sign-in card", onsubmit: async (event) => {
    event.preventDefault();
    problem.textContent = "";
    keepToken(token.value.trim());
    await begin();
  } },
  h("div", { class: "brand" }, icon("terminal"), "sbx"),
  h("h1", {}, "Sign in"),
  h("p", { class: "quiet", id: "sign-in-text" }, "The server's token opens everything; the token of a sandbox opens that sandbox. It stays in this tab."),
  field("Token", token), problem, h("button", { class: "button primary" }, "Sign in"));
  document.body.replaceChildren(h("main", { class: "center" }, form));
  token.focus();
}

async function begin() {
  try {
    if (await enter()) new App().start();
    else signIn();
  } catch (error) {
    if (error.status !== 403) return signIn(error.message);
    keepToken(null);
    signIn("This token does not open this server.");
  }
}

addEventListener("hashchange", () => {
  // A link with a token, opened in a tab that is already here.
  if (location.hash.startsWith("#token=")) {
    recallToken();
    location.reload();
  }
});

applyTheme();
recallToken();
begin();
