// Ports that servers inside listen on, and what became of connections to the outside.

import { get, post } from "./api.js";
import { badge, button, clock, count, empty, every, foreign, guarded, h, notify, reconcile } from "./dom.js";

/** Most ports that are listed. */
const MOST_PORTS = 1_000;

export function portsView(workspace, signal) {
  const rows = h("tbody");
  const table = h("table", { class: "table" },
    h("thead", {}, h("tr", {}, ["Port", "Address", "Process", "Command", ""].map((title) => h("th", { scope: "col" }, title || h("span", { class: "unseen" }, "Actions"))))), rows);
  const nothing = empty("ports", "Nothing listens", "Servers that run inside appear here, and open in a tab of their own.");
  table.hidden = nothing.hidden = true;
  const element = h("div", { class: "page" }, table, nothing);

  /** Opens the server behind a port: by a ticket, because a new tab sends no token. */
  const open = (port) => guarded(async () => {
    const ticket = await post(`${workspace.prefix}/tickets`, { port });
    window.open(ticket.path, "_blank", "noopener,noreferrer");
    notify(`Port ${port} opens in a new tab.`, "quiet", h("a", { href: ticket.path, target: "_blank", rel: "noopener noreferrer" }, "Open it here"));
  });
  const makeRow = ({ port, address, pid, command }) => h("tr", {},
    h("td", { class: "mono" }, String(port)), h("td", { class: "mono quiet" }, address ?? "–"), h("td", { class: "figures" }, String(pid ?? "–")),
    h("td", {}, command ? foreign(command, "bdi", { class: "mono name" }) : "–"),
    h("td", { class: "actions" }, button("open", { label: "Open", "aria-label": `Open port ${port} in a new tab`, title: "Open in a new tab", onclick: open(port) })));

  every(2000, signal, async () => {
    const ports = await get(`${workspace.prefix}/ports`, signal);
    table.hidden = ports.length === 0;
    nothing.hidden = ports.length > 0;
    reconcile(rows, ports.slice(0, MOST_PORTS), ({ port, address, pid }) => `${port} ${address} ${pid}`, makeRow);
  });
  return { element, isPage: true, title: "Ports", show() {}, close() {} };
}

export function networkView(workspace, signal) {
  const posture = h("p", { class: "lead" });
  const figures = h("div", { class: "cards" });
  const rows = h("tbody");
  const table = h("table", { class: "table" },
    h("thead", {}, h("tr", {}, ["Time", "Host", "Port", "Verdict", "Rule"].map((title) => h("th", { scope: "col" }, title)))), rows);
  const nothing = h("p", { class: "quiet" }, "No connection has been judged yet. Connections are judged where the network is an allow-list or has a deny-list.");
  table.hidden = nothing.hidden = true;
  const element = h("div", { class: "page" }, posture, figures, table, nothing);
  const card = (title, number) => h("div", { class: "card" }, h("h3", {}, title), h("p", { class: "big figures" }, count(number)));
  const says = {
    open: "Commands reach whatever the machine reaches.",
    blocked: "Commands reach nothing, not even the machine itself.",
    allowlist: "Commands reach what the rules name, and nothing else.",
  };

  every(3000, signal, async () => {
    const network = await get(`${workspace.prefix}/network`, signal);
    const mode = typeof network.posture === "string" ? network.posture : network.posture.mode;
    posture.replaceChildren(badge(mode === "open" ? "quiet" : "good", mode), " ", says[mode] ?? "");
    figures.replaceChildren(card("Allowed", network.allowed), card("Refused", network.refused));
    table.hidden = network.recent.length === 0;
    nothing.hidden = network.recent.length > 0;
    const newest = network.recent.map((entry, at) => ({ ...entry, key: `${entry.at_ms} ${entry.host} ${entry.port} ${at}` })).reverse();
    reconcile(rows, newest, (entry) => entry.key, (entry) => h("tr", {},
      h("td", { class: "figures quiet" }, clock(entry.at_ms)), h("td", {}, foreign(entry.host, "bdi", { class: "mono name" })), h("td", { class: "figures" }, String(entry.port)),
      h("td", {}, badge(entry.verdict === "allowed" ? "good" : "bad", entry.verdict)), h("td", { class: "quiet" }, foreign(entry.rule ?? ""))));
  });
  return { element, isPage: true, title: "Network", show() {}, close() {} };
}
