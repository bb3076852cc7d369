// Curves of what a workspace or the whole server uses, and what isolates it; on a host also the list of sandboxes.

import { call, get, post, session } from "./api.js";
import { ago, ask, badge, button, bytes, complain, count, duration, empty, every, field, guarded, h, notify, reconcile, setText, svg, visible } from "./dom.js";

/** How far back curves go, in milliseconds. */
const SPAN = 5 * 60_000;
/** Time between two samples, in milliseconds. */
const PERIOD = 3000;

/** What was measured, for as long as the page is open: views come and go, curves stay. */
export class Meter {
  samples = [];
  latest = null;
  #last = null;

  /** Adds a sample of `/v1/metrics`, or of one sandbox. */
  add(document) {
    const isSandbox = document.machine === undefined;
    const own = isSandbox ? document : document.machine;
    const now = performance.now();
    const cpu = own.cpu_seconds;
    const last = this.#last;
    // After a restart of the server counts begin anew.
    const rate = last && cpu >= last.cpu ? (cpu - last.cpu) / ((now - last.now) / 1000) : null;
    this.#last = { now, cpu };
    this.latest = {
      document,
      cpu: rate,
      // Of a sandbox nobody says how many it may use.
      cpus: isSandbox ? null : own.cpus,
      memory: isSandbox ? document.memory_limit_used_bytes ?? document.memory_bytes : own.memory_used_bytes,
      memoryLimit: isSandbox ? document.memory_limit_bytes ?? null : own.memory_bytes,
      processes: document.processes_running ?? document.processes,
    };
    if (rate !== null) this.samples.push({ at: Date.now(), cpu: rate, memory: this.latest.memory, processes: this.latest.processes });
    while (this.samples.length && this.samples[0].at < Date.now() - SPAN) this.samples.shift();
  }
}

/** Samples what a workspace uses, as long as `signal` allows. `lost` is told once that there is no access any more. */
export function sample(path, meter, signal, changed, lost) {
  let isLost = false;
  return every(PERIOD, signal, async () => {
    try {
      meter.add(await call("GET", path, { signal }));
    } catch (error) {
      if (!isLost && [403, 404].includes(error.status)) lost(error);
      isLost ||= [403, 404].includes(error.status);
      throw error;
    }
    changed();
  });
}

const WIDTH = 300;
const HEIGHT = 64;

/** One curve in a card, with the present value beside its name. */
function curve(title, pick, format, roof) {
  const line = svg("path", { class: "line" });
  const area = svg("path", { class: "area" });
  const value = h("p", { class: "big figures" }, "–");
  const limit = h("span", { class: "quiet" });
  const graph = svg("svg", { class: "curve", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, area, line);
  const element = h("section", { class: "card" }, h("h3", {}, title), h("div", { class: "row" }, value, limit), graph,
    h("div", { class: "row quiet small" }, h("span", {}, "5 min ago"), h("span", { class: "space" }), h("span", {}, "now")));
  return {
    element,
    draw(meter) {
      const { samples, latest } = meter;
      if (!latest) return;
      const now = pick(latest);
      setText(value, now === null ? "–" : format(now));
      const top = roof(latest);
      setText(limit, top.text ?? "");
      const values = samples.map(pick);
      const most = Math.max(top.least ?? 0, ...values) || 1;
      graph.setAttribute("aria-label", `${title}: ${now === null ? "no value yet" : format(now)}`);
      const end = Date.now();
      const points = samples.map((one, index) => `${(WIDTH * (1 - (end - one.at) / SPAN)).toFixed(1)},${(HEIGHT - 2 - (HEIGHT - 6) * (values[index] / most)).toFixed(1)}`);
      line.setAttribute("d", points.length > 1 ? `M${points.join("L")}` : "");
      area.setAttribute("d", points.length > 1 ? `M${points[0].split(",")[0]},${HEIGHT}L${points.join("L")}L${points.at(-1).split(",")[0]},${HEIGHT}Z` : "");
    },
  };
}

/** Processors as people count them: 1.5 of 2. */
const cores = (number) => `${number < 10 ? number.toFixed(2) : number.toFixed(1)}`;

function curves() {
  const all = [
    curve("Processors", (one) => one.cpu, cores, (latest) => ({ least: 1, text: latest.cpus ? `of ${latest.cpus}` : "" })),
    curve("Memory", (one) => one.memory, bytes, (latest) => ({ least: latest.memoryLimit ?? 64 * 1024 * 1024, text: latest.memoryLimit ? `of ${bytes(latest.memoryLimit)}` : "" })),
    curve("Processes", (one) => one.processes, count, () => ({ least: 4 })),
  ];
  return { element: h("div", { class: "cards" }, all.map((one) => one.element)), draw: (meter) => all.forEach((one) => one.draw(meter)) };
}

const facts = (rows) => h("dl", { class: "facts tall" }, rows.filter(Boolean).map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value))));
const words = (list) => (list?.length ? h("span", { class: "words" }, list.map((word) => badge("quiet", visible(String(word))))) : "none");

/** The tones of the states of a sandbox. */
const TONES = { running: "good", paused: "busy", stopped: "quiet" };

/** What a sandbox does, and why it does not run. */
const stateOf = ({ state, why }) => badge(TONES[state] ?? "quiet", why ? `${state}: ${why}` : state);

/** What becomes of a sandbox by a rule, in words. */
const FATES = { delete: "deleted", pause: "paused", stop: "stopped" };
const idleRule = (sandbox) => sandbox.idle_timeout_secs
  ? `${FATES[sandbox.on_idle]} after ${duration(1000 * sandbox.idle_timeout_secs)} without ${sandbox.idle_by === "requests" ? "a request" : "work"}`
  : "kept for as long as it takes";
const expiryRule = (sandbox) => sandbox.expires_at_ms
  ? `${FATES[sandbox.on_expiry]} in ${duration(Math.max(0, sandbox.expires_at_ms - Date.now()))}`
  : sandbox.state === "running" ? "no end is set" : "no end before it runs again";

/** The button that has a sandbox rest, or run again; `done` follows. */
const restButton = (sandbox, done) => {
  const [picture, label, act] = sandbox.state === "running" ? ["pause", "Pause", "pause"] : ["play", "Resume", "resume"];
  return button(picture, { label, title: `${label} sandbox ${sandbox.id}`, onclick: guarded(async () => {
    await post(`/v1/sandboxes/${encodeURIComponent(sandbox.id)}/${act}`, {});
    await done();
  }) });
};

/** What a workspace uses, and what surrounds it. */
export function overviewView(workspace, signal) {
  const graphs = curves();
  const about = h("section", { class: "card wide" });
  const element = h("div", { class: "page" }, graphs.element, about);
  const redraw = () => graphs.draw(workspace.meter);
  workspace.onSample = redraw;
  redraw();

  const describe = async () => {
    const health = await get("/health", signal);
    const { isolation } = health;
    const network = await get(`${workspace.prefix}/network`, signal);
    const posture = typeof network.posture === "string" ? network.posture : network.posture.mode;
    const rows = [["Server", `sbx-server ${health.version}, ${health.mode} mode`], ["Running for", duration(health.uptime_ms)],
      ["Network", badge(posture === "open" ? "quiet" : "good", posture)]];
    if (!workspace.sandbox) {
      rows.push(["Isolation", "The container or machine around the server: commands run as its user"],
        ["Networks it can enforce", words(isolation.postures)]);
    } else if (session.isOperator) {
      const sandbox = await get(workspace.prefix, signal);
      if (sandbox.name) rows.push(["Name", visible(sandbox.name)]);
      rows.push(["State", h("span", { class: "row" }, stateOf(sandbox), restButton(sandbox, describe))],
        ["Labels", words(Object.entries(sandbox.labels).map(([name, value]) => `${name}: ${value}`))],
        ["Idle", idleRule(sandbox)], ["Lifetime", expiryRule(sandbox)],
        ["Sandbox", h("span", { class: "mono" }, sandbox.id)], ["User", String(sandbox.uid)],
        sandbox.root === "private" ? ["Root", `its own, made of ${visible(sandbox.template)}; commands run as ${visible(sandbox.user)}`] : null, ["Created", `${ago(sandbox.created_at_ms)} ago`],
        ["Layers", words(sandbox.isolation?.layers)],
        ["Limits", words(Object.entries(sandbox.limits ?? {}).map(([name, how]) => `${name}: ${how}`))],
        ["Restrictions", words(sandbox.restrictions)],
        sandbox.tcp_ports?.length ? ["TCP ports", sandbox.tcp_ports.join(", ")] : null);
    } else {
      // The server describes a sandbox to its operator only.
      rows.push(["Sandbox", h("span", { class: "mono" }, workspace.sandbox)], ["Layers", words(isolation.layers)]);
    }
    about.replaceChildren(h("h3", {}, "Isolation and limits"), facts(rows));
  };
  describe().catch(complain);
  return { element, isPage: true, title: "Overview", show() {}, close: () => { workspace.onSample = null; } };
}

/** All sandboxes of a host, and what they use. */
export function sandboxesView(workspace, signal) {
  const graphs = curves();
  const rows = h("tbody");
  const table = h("table", { class: "table" },
    h("thead", {}, h("tr", {}, ["Sandbox", "State", "Age", "Processors", "Memory", "Processes", "Network", ""].map((title) => h("th", { scope: "col" }, title || h("span", { class: "unseen" }, "Actions"))))), rows);
  const nothing = empty("sandboxes", "No sandbox yet", "A sandbox has a user, a home and rules of its own, and takes less than a millisecond to make.");
  table.hidden = nothing.hidden = true;
  const element = h("div", { class: "page" }, graphs.element,
    h("div", { class: "bar" }, h("h2", {}, "Sandboxes"), h("span", { class: "space" }), button("plus", { label: "New sandbox", class: "primary", onclick: guarded(make) })),
    table, nothing);
  let last = new Map();

  async function make() {
    const { isolation } = await get("/health", signal);
    const choices = (name, values) => h("select", { name }, h("option", { value: "" }, "the server's default"), values.map((value) => h("option", {}, value)));
    const kept = isolation.no_private_root ? [] : (await get("/v1/snapshots?limit=1000", signal).catch(() => ({ snapshots: [] }))).snapshots.map((one) => one.name);
    const templates = isolation.no_private_root ? [] : [...new Set([...isolation.templates ?? [], ...kept.filter(Boolean)])].sort();
    const answer = await ask({ title: "New sandbox", confirm: "Create", fields: [
      field("Network", choices("network", (isolation.postures ?? []).filter((posture) => posture !== "allowlist"))),
      field("Isolation", choices("isolation", isolation.isolations ?? [])),
      templates.length ? field("A root of its own, made of", h("select", { name: "template" }, h("option", { value: "" }, "the server's default"), templates.map((name) => h("option", {}, name)))) : null,
      field("Memory of all its processes, in MiB", h("input", { name: "memory", type: "number", min: "1", placeholder: "unlimited" })),
      field("Deleted after so many seconds without work", h("input", { name: "idle", type: "number", min: "1", placeholder: "never" })),
    ].filter(Boolean) });
    if (!answer) return;
    const made = await post("/v1/sandboxes", {
      network: answer.network || undefined, isolation: answer.isolation || undefined,
      ...(answer.template ? { root: "private", template: answer.template } : {}),
      max_total_mem_mb: answer.memory ? Number(answer.memory) : undefined, idle_timeout_secs: answer.idle ? Number(answer.idle) : undefined,
    });
    if (!made.sandboxes.length) return notify(`no sandbox was made: ${made.rejected_reason}`, "bad");
    location.hash = `#/s/${made.sandboxes[0].id}`;
  }

  const makeRow = ({ id }) => h("tr", {},
    h("td", {}, h("a", { href: `#/s/${encodeURIComponent(id)}`, class: "mono name" }, id), h("div", { class: "quiet small" })), h("td"), h("td", { class: "quiet" }), h("td", { class: "figures" }), h("td", { class: "figures" }), h("td", { class: "figures" }), h("td", {}),
    h("td", { class: "actions" }, button("trash", { title: `Delete sandbox ${id}`, class: "ghost", onclick: guarded(async () => {
      if (!await ask({ title: "Delete this sandbox?", text: `${id}: its processes end and its home is removed. There is no way back.`, confirm: "Delete", danger: true })) return;
      await call("DELETE", `/v1/sandboxes/${encodeURIComponent(id)}`);
      round();
    }) })));

  const round = every(PERIOD, signal, async () => {
    const [sandboxes, metrics] = await Promise.all([get("/v1/sandboxes", signal), get("/v1/metrics", signal)]);
    const now = performance.now();
    const used = new Map(metrics.per_sandbox.map((one) => [one.id, one]));
    const list = Array.isArray(sandboxes) ? sandboxes : sandboxes.sandboxes;
    table.hidden = list.length === 0;
    nothing.hidden = list.length > 0;
    reconcile(rows, list, ({ id }) => id, makeRow, (row, sandbox) => {
      const use = used.get(sandbox.id);
      const before = last.get(sandbox.id);
      const rate = use && before ? (1000 * (use.cpu_seconds - before.cpu)) / (now - before.now) : null;
      const [title, state, age, cpu, memory, processes, network] = row.cells;
      setText(title.lastChild, sandbox.name ? visible(sandbox.name) : "");
      const does = stateOf(sandbox);
      if (state.textContent !== does.textContent) state.replaceChildren(does);
      setText(age, ago(sandbox.created_at_ms));
      setText(cpu, rate === null ? "–" : cores(Math.max(0, rate)));
      setText(memory, bytes(use?.memory_limit_used_bytes ?? use?.memory_bytes) + (use?.memory_limit_bytes ? ` of ${bytes(use.memory_limit_bytes)}` : ""));
      setText(processes, String(use?.processes ?? 0));
      setText(network, typeof sandbox.network === "string" ? sandbox.network : sandbox.network?.mode ?? "");
    });
    last = new Map(metrics.per_sandbox.map((one) => [one.id, { cpu: one.cpu_seconds, now }]));
    graphs.draw(workspace.meter);
  });
  graphs.draw(workspace.meter);
  return { element, isPage: true, title: "Sandboxes", show() {}, close() {} };
}
