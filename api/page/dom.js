// Helpers for the document (DOM), and for numbers and times in it.

const SVG = "http://www.w3.org/2000/svg";

export const find = (id) => document.getElementById(id);

/** An element with properties (`className`, `onclick` …; `aria-…`, `role` and `data-…` as attributes) and
 * children, texts included. */
export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children);
  return node;
}

/** An element of a drawing. */
export function svg(tag, name) {
  const node = document.createElementNS(SVG, tag);
  node.setAttribute("class", name);
  return node;
}

/** Sets a text only if it changes, so that screen readers announce it once. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

const wide = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
/** Three digits are enough for a dial. */
export const figure = (value) =>
  value >= 100 || Number.isInteger(value) ? wide.format(value) : value.toFixed(value >= 1 ? 1 : 2);

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const power = Math.min(units.length - 1, Math.floor(Math.log2(Math.max(1, count)) / 10));
  return `${figure(count / 2 ** (10 * power))} ${units[power]}`;
}

const day = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "short", timeZone: "UTC" });
/** A Unix time (s) in UTC; nothing for 0. */
export const moment = (unixS) => (unixS ? day.format(new Date(1000 * unixS)) : "");
