// Workers on this page: each has a colour and a mark, by its name, so that a restarted one keeps them. The
// colours differ for colour-blind readers, too; the marks need no colour at all.

import { make } from "./dom.js";

const MARKS = ["●", "▲", "■", "◆", "★", "✚", "▼", "◗"];
const slots = new Map();
const natural = new Intl.Collator("en", { numeric: true });

/** Compares names as people count: w2 before w10. */
export const compareNames = (one, other) => natural.compare(one, other);

/** `w0-3f2a…` is a name and an incarnation. */
export function split(id) {
  const at = id.lastIndexOf("-");
  return at < 0 ? [id, ""] : [id.slice(0, at), id.slice(at + 1)];
}

export const nameOf = (id) => split(id)[0];

/** Gives slots to workers that have none, in the order of their names. */
export function meet(ids) {
  for (const name of ids.map(nameOf).sort(compareNames)) {
    if (!slots.has(name)) slots.set(name, slots.size % MARKS.length);
  }
}

function slotOf(id) {
  meet([id]);
  return slots.get(nameOf(id));
}

/** The class that sets `--worker` to its colour. */
export const colourOf = (id) => `worker-${slotOf(id)}`;
export const markOf = (id) => MARKS[slotOf(id)];

/** Mark and name, in its colour. */
export function label(id) {
  const mark = make("i", { className: "mark", "aria-hidden": "true" }, markOf(id));
  return make("span", { className: `worker ${colourOf(id)}` }, mark, nameOf(id));
}
