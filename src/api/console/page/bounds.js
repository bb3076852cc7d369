// How much is drawn of what a sandbox gives the page to show. Its content may be made to keep the page from everything
// else, so drawing it takes time that is linear in its size, and that a budget ends.

import { h } from "./dom.js";

/** Most characters of one text that are drawn. */
const MOST_SHOWN = 200_000;
/** What is laid out of a text at once, when it comes into view. */
const CHUNK = 20_000;

/** What may still be drawn. A unit is what a letter of ASCII takes to lay out: a microsecond, or less. */
export class Budget {
  constructor(most) {
    this.left = most;
  }

  /** Whether so much was left. */
  spend(units) {
    this.left -= units;
    return this.left >= 0;
  }

  /** As much of the beginning of `text` as may be drawn. */
  take(text) {
    let wasReversed = false;
    for (let at = 0; at < text.length; at += 1) {
      const code = text.charCodeAt(at);
      const isReversed = (code >= 0x590 && code < 0x900) || (code >= 0xfb1d && code < 0xfe00) || (code >= 0xfe70 && code < 0xff00);
      // Each turn of the direction begins a layout of its own, and rare letters are looked for in many fonts.
      if (code < 0x300) this.left -= code === 10 ? 20 : 1;
      else if (isReversed) this.left -= wasReversed ? 12 : 80;
      else this.left -= code >= 0xd800 && code < 0xe000 ? 25 : 12;
      wasReversed = isReversed;
      if (this.left < 0) return text.slice(0, at);
    }
    return text;
  }
}

/** Shows a text of any kind in `block`, in parts that browsers lay out when they come into view. */
export function fill(block, text) {
  const parts = [];
  for (let rest = text.slice(0, MOST_SHOWN); rest; rest = rest.slice(parts.at(-1).textContent.length)) {
    let part = new Budget(CHUNK).take(rest.slice(0, CHUNK));
    if (part.length < rest.length) part = part.slice(0, part.lastIndexOf("\n") + 1) || part;
    parts.push(h("span", { class: "part", style: `contain-intrinsic-height:auto ${18 * part.split("\n").length}px` }, part));
  }
  if (text.length > MOST_SHOWN) parts.push(h("span", { class: "quiet" }, ` … ${text.length - MOST_SHOWN} more characters`));
  block.replaceChildren(...parts);
  return block;
}
