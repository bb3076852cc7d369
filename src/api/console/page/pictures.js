// Pictures from inside a sandbox, and what stands where something is too large to show.

import { bytes, button, h, save } from "./dom.js";
import { LogView } from "./log.js";

/** Most lines of a text that is offered. */
const MOST_LINES = 300_000;
/** Most pixels of a picture, and of one of its sides. */
const MOST_PIXELS = 64_000_000;
const LONGEST_SIDE = 20_000;
/** The largest SVG that is drawn, in characters. */
const LARGEST_SVG = 8_000_000;
/** Most elements of an SVG, each counted as often as it is drawn, and what one step of a filter counts for. */
const MOST_ELEMENTS = 100_000;
const FILTER = 2_000;
/** Most tags of an SVG, and how deep: parsers take time for each element at each depth. */
const MOST_TAGS = 300_000;
const DEEPEST = 200;
/** Most attributes: the sum of the squares of how many each element has, because browsers look for one among all of them. */
const MOST_ATTRIBUTES = 20_000_000;
/** Most namespaces of an SVG: parsers look through all of them at each name. */
const MOST_NAMESPACES = 100;
/** How long a drawing may take, in milliseconds. */
const PATIENCE = 8_000;

/** A text as lines. Only those in view are drawn. */
export function lines(text) {
  const view = new LogView({ label: "Text", isWhole: true });
  const shown = text.split("\n", MOST_LINES);
  view.add("stdout", shown.join("\n"));
  if (shown.length === MOST_LINES) view.note("The lines after this one are not shown.");
  return view.element;
}

/** Says why something is not shown, and offers it as text and as a file. */
export function offer(reason, content, name, type) {
  const blob = new Blob([content], { type });
  const element = h("div", { class: "offer" }, h("p", { class: "quiet" }, `${reason}. It has ${bytes(blob.size)}.`),
    button("file", { label: "Show as text", onclick: async () => element.replaceWith(lines(await blob.text())) }), " ",
    button("download", { label: "Download", onclick: () => save(blob, name) }));
  return element;
}

/** A picture from a data URL. `instead` makes what stands there if it is not shown, given why. */
export function picture(url, alt, instead) {
  const image = h("img", { alt });
  const element = h("div", { class: "picture" });
  // A browser knows the size before it decodes the pixels, which it does when they are drawn.
  image.onload = () => {
    const { naturalWidth: width, naturalHeight: height } = image;
    if (width * height <= MOST_PIXELS && Math.max(width, height) <= LONGEST_SIDE) element.append(image);
    else element.replaceWith(instead(`This picture of ${width} × ${height} pixels is too large to show`));
  };
  image.onerror = () => element.replaceWith(instead("This picture cannot be shown"));
  image.src = url;
  return element;
}

/**
 * A picture from an SVG text. As an `<img>` it runs no script and loads nothing, but a short text can take for ever to
 * draw, so first its elements are counted. The count does not see everything, such as the number of dashes. So it is drawn
 * in a frame of an origin of its own, for which Chromium has another process.
 */
export function drawing(text, alt, instead) {
  let made;
  try {
    made = plainSvg(text);
  } catch (error) {
    return instead(error instanceof TooLarge ? error.message : "This drawing cannot be shown");
  }
  const { source, width, height } = made;
  const frame = h("iframe", { sandbox: true, title: alt, tabindex: "-1", style: `width:${width}px;aspect-ratio:${width}/${height}`,
    srcdoc: `<body style="margin:0"><img style="display:block;width:100%" src="data:image/svg+xml,${encodeURIComponent(source)}">` });
  const element = h("div", { class: "picture" }, frame);
  const timer = setTimeout(() => element.replaceWith(instead("This drawing takes too long to show")), PATIENCE);
  frame.onload = () => clearTimeout(timer);
  return element;
}

class TooLarge extends Error {
  message = "This drawing is too large to show";
}

const SVG = "http://www.w3.org/2000/svg";
const UNITS = { "": 1, px: 1, pt: 4 / 3, pc: 16, in: 96, cm: 37.8, mm: 3.78 };
const REMOVED = /^(script|foreignObject|metadata|animate|set$|discard)/;
const SHAPES = /^(path|line|polyline|polygon)$/;
const FUNCTIONS = /^(rgba?|hsla?|translate|scale|rotate|matrix|skew[xy]|)$/i;

/** What an attribute draws besides: the ids that it names. Null if this cannot be told. */
function targetsOf(name, value) {
  if (/(^|:)href$/.test(name)) return /^#[\w.:-]+$/.test(value) ? [value.slice(1)] : /^data:image\/(png|jpeg|gif|webp)[;,]/.test(value) ? [] : null;
  if (value.includes("\\")) return null;
  const found = [];
  const parts = value.split("(");
  for (let at = 1; at < parts.length; at += 1) {
    const call = /[a-z-]*$/i.exec(parts[at - 1].trimEnd().slice(-12))[0];
    const target = /^\s*["']?#([\w.:-]+)["']?\s*\)/.exec(parts[at]);
    if (/^url$/i.test(call) && target) found.push(target[1]);
    else if (!FUNCTIONS.test(call)) return null;
  }
  return found;
}

/** What begins with `<` and is no tag, and how it ends; a start tag, an end tag or a document type; its quoted values. */
const OTHER = /^(?:!--|!\[CDATA\[|\?)/;
const ENDS = { "!--": "-->", "![CDATA[": "]]>", "?": "?>" };
const TAG = /^[^"'>]*(?:(?:"[^"]*"|'[^']*')[^"'>]*)*>/;
const VALUE = /"[^"]*"|'[^']*'/g;

/**
 * Fails if an XML text takes a browser long to parse, or its elements long to look through. What is not well-formed, or
 * declares something in its document type, is not looked at further.
 */
function check(text) {
  const [, ...pieces] = text.split("<", MOST_TAGS + 1);
  let depth = 0;
  let attributes = 0;
  let end;
  for (const piece of pieces) {
    const other = end ? "" : OTHER.exec(piece)?.[0];
    end ||= ENDS[other];
    if (end) {
      if (piece.includes(end, other.length)) end = null;
      continue;
    }
    const [tag] = TAG.exec(piece);
    attributes += (tag.match(VALUE)?.length ?? 0) ** 2;
    if (tag[0] === "/") depth -= 1;
    else if (tag[0] !== "!" && !tag.endsWith("/>")) depth += 1;
    if (depth > DEEPEST || attributes > MOST_ATTRIBUTES) throw new TooLarge();
  }
  if (pieces.length === MOST_TAGS) throw new TooLarge();
}

/** An SVG text with nothing but what draws, if it is not too much, and its size in pixels. */
function plainSvg(text) {
  if (text.length > LARGEST_SVG || text.includes("<!ENTITY") || text.split("xmlns", MOST_NAMESPACES + 2).length > MOST_NAMESPACES + 1) throw new TooLarge();
  // Browsers report each event handler that the policy of this page forbids, and would for hours.
  const quiet = text.replace(/(\s)on(?=\w+\s*=\s*["'])/g, "$1data-on");
  check(quiet);
  const root = new DOMParser().parseFromString(quiet, "image/svg+xml").documentElement;
  if (root.namespaceURI !== SVG || root.localName !== "svg") throw new Error("not an SVG");
  for (const element of root.querySelectorAll("*")) {
    // A style in a style has the text of both.
    if (element.namespaceURI !== SVG || REMOVED.test(element.localName) || element.parentNode.localName === "style") element.remove();
  }
  const all = [root, ...root.querySelectorAll("*")];
  const named = new Map();
  const uses = new Map();
  for (const element of all) {
    // A style is looked at for every element.
    if (element.localName === "style" && (/[\\@(]|\{[^}]*\{/.test(element.textContent) || element.textContent.length * all.length > 20_000_000)) element.textContent = "";
    const points = 1 + (element.getAttribute("d") ?? element.getAttribute("points") ?? "").length / 4;
    const used = [];
    let size = 0;
    for (const name of element.getAttributeNames()) {
      const value = element.getAttribute(name);
      const targets = targetsOf(name, value);
      // A marker is drawn at each point of a shape; that of a group, at those of all shapes in it.
      const isMarker = targets?.length && `${name} ${value}`.includes("marker");
      if (!targets || (isMarker && !SHAPES.test(element.localName))) element.removeAttribute(name);
      else {
        size += value.length;
        for (const target of targets) used.push([target, isMarker ? points : 1]);
      }
    }
    uses.set(element, [size / 200, used]);
    if (element.id && !named.has(element.id)) named.set(element.id, element);
  }
  const counts = new Map();
  /** How much an element draws. Without end if it draws itself. */
  function count(element) {
    if (counts.has(element)) return counts.get(element);
    counts.set(element, Infinity);
    const [size, used] = uses.get(element);
    let sum = size + (element.localName.startsWith("fe") ? FILTER : 1);
    for (const child of element.childNodes) {
      if (child.localName) sum += count(child);
      else if (child.nodeType !== Node.COMMENT_NODE) sum += child.data.trim().length / 4;
    }
    for (const [target, times] of used) if (named.has(target)) sum += times * count(named.get(target));
    counts.set(element, sum);
    return sum;
  }
  if (count(root) > MOST_ELEMENTS) throw new TooLarge();
  const [, , ...inner] = (root.getAttribute("viewBox") ?? "").slice(0, 200).trim().split(/[\s,]+/).map(Number);
  const side = (name, otherwise) => {
    const [, number, unit] = /^\s*([\d.]+)\s*([a-z]*)\s*$/.exec((root.getAttribute(name) ?? "").slice(0, 40)) ?? [];
    return Math.min(Number(number) * UNITS[unit] || otherwise, LONGEST_SIDE);
  };
  const width = side("width", inner[0] || 300);
  return { source: new XMLSerializer().serializeToString(root), width, height: side("height", inner[1] || width / 2) };
}
