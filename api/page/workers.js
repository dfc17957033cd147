// Workers on this page: each has a colour and a mark, by its name and host, so that a restarted one keeps
// them. The colours differ for colour-blind readers, too; the marks need no colour at all.

import { make } from "./dom.js";

const MARKS = ["●", "▲", "■", "◆", "★", "✚", "▼", "◗"];
/** Characters of a host that are shown, if that is enough to tell it from others. */
const LEAST_SHOWN = 4;
const slots = new Map();
/** The host of each process; and all hosts of each name, which the replicas of a deployment share. */
const hosts = new Map();
const hostsOf = new Map();
const natural = new Intl.Collator("en", { numeric: true });

/** Compares names as people count: w2 before w10. */
export const compareNames = (one, other) => natural.compare(one, other);

/** `w0-3f2a…` is a name and an incarnation. */
export function split(id) {
  const at = id.lastIndexOf("-");
  return at < 0 ? [id, ""] : [id.slice(0, at), id.slice(at + 1)];
}

/** Name and host: a process that restarts has those of its predecessor. */
export function placeOf(id) {
  const [name] = split(id);
  const [host, ...others] = hostsOf.get(name) ?? [];
  return `${name} ${hosts.get(id) ?? (others.length ? "" : host)}`;
}

/** The name; where several hosts have a process of that name, also the characters that tell its host from
 * theirs. */
export function nameOf(id) {
  const [name] = split(id);
  const all = [...(hostsOf.get(name) ?? [])];
  if (all.length < 2 || !hosts.has(id)) return name;
  let [begin, count] = [0, LEAST_SHOWN];
  while (all[0][begin] && all.every((host) => host[begin] === all[0][begin])) begin += 1;
  const own = (host) => host.slice(begin, begin + count);
  while (new Set(all.map(own)).size < all.length) count += 1;
  return `${name} ${own(hosts.get(id))}`;
}

/** Notes hosts of processes, and gives slots to workers that have none, in the order of their names. */
export function meet(processes) {
  for (const { id, host } of processes) {
    hosts.set(id, host);
    hostsOf.set(split(id)[0], (hostsOf.get(split(id)[0]) ?? new Set()).add(host));
  }
  const workers = processes.filter(({ kind }) => kind === "worker").map(({ id }) => id);
  workers.sort((one, other) => compareNames(placeOf(one), placeOf(other))).forEach(slotOf);
}

function slotOf(id) {
  const place = placeOf(id);
  if (!slots.has(place)) slots.set(place, slots.size % MARKS.length);
  return slots.get(place);
}

/** The class that sets `--worker` to its colour. */
export const colourOf = (id) => `worker-${slotOf(id)}`;
export const markOf = (id) => MARKS[slotOf(id)];

/** Mark and name, in its colour. */
export function label(id) {
  const mark = make("i", { className: "mark", "aria-hidden": "true" }, markOf(id));
  return make("span", { className: `worker ${colourOf(id)}` }, mark, nameOf(id));
}
