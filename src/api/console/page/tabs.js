// A section whose things are tabs, one of them open: terminals, and contexts. What a tab is, and what it opens, is the
// caller's.

import { empty, every, h, reconcile, setText } from "./dom.js";

/** Time between two looks at what there is, in milliseconds. */
const PERIOD = 3000;

/**
 * Makes the view. `list` gets the things, given the id of the open one; `look` gives a tab's tone and name; `open` makes
 * `{ element, update, close }` for an id, and is given the function that looks again. `start` is a button; `nothing` makes
 * what stands there while none is open, given whether there are any.
 */
export function tabsView(workspace, signal, { section, title, start, list, look, open, nothing, scrolls = false }) {
  let shown = null;
  let opened = null;
  const tabs = h("nav", { class: "tabs", "aria-label": title });
  const pane = h("div", { class: scrolls ? "pane scrolls" : "pane" });
  const element = h("div", { class: "stack" }, h("div", { class: "bar tabbar" }, tabs, start), pane);

  const makeTab = ({ id }) => h("a", { href: workspace.link(section, id) }, h("span", { class: "dot" }), h("span", { class: "mono name" }));
  function updateTab(tab, thing) {
    const { tone, name } = look(thing);
    tab.firstChild.className = `dot ${tone}`;
    setText(tab.lastChild, name);
    if (thing.id === shown) tab.setAttribute("aria-current", "true");
    else tab.removeAttribute("aria-current");
  }

  const round = every(PERIOD, signal, async () => {
    let known;
    try {
      known = await list(shown);
    } catch (error) {
      if (error.code !== "not_built") throw error;
      const [picture] = nothing(false);
      start.hidden = true;
      pane.replaceChildren(empty(picture, title, error.message));
      return;
    }
    reconcile(tabs, known, ({ id }) => id, makeTab, updateTab);
    opened?.update(known.find(({ id }) => id === shown));
    if (!shown && pane.firstChild?.className !== "empty") pane.replaceChildren(empty(...nothing(known.length > 0)));
  });

  return {
    element,
    title,
    round,
    show([id]) {
      if (id === shown && opened) return;
      opened?.close();
      opened = null;
      shown = id ?? null;
      if (id) {
        opened = open(id, round);
        pane.replaceChildren(opened.element);
        opened.start?.();
      } else pane.replaceChildren();
      round();
    },
    close: () => opened?.close(),
  };
}
