// The log of processes that join, change state, end and come back; newest first.

import { find, make } from "../dom.js";
import { on } from "../fleet.js";
import { nameOf, placeOf } from "../workers.js";

const MAX_LINES = 60;
/** A process that is silent for longer does not show its new state itself. */
const FRESH_S = 1.5;

const title = ({ kind, id }) => (kind === "broker" ? nameOf(id) : `${kind} ${nameOf(id)}`);
const place = ({ kind, id }) => `${kind} ${placeOf(id)}`;
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

/** When the last process of each name ended, until it is back. */
const endings_ms = new Map();
const ended = new Set();

export function startLog() {
  let begun = false;
  on("seen", (fleet) => {
    if (!begun) note(`watching ${fleet.processes.length} processes of pool ${fleet.pool}`);
    begun = true;
  });
  on("came", (one) => note(arrival(one), "good", one.id));
  on("turned", (one) => one.age_s < FRESH_S && note(`${title(one)} is ${one.state} now`, "good", one.id));
  on("killed", (one) => end(one, "was killed from this page"));
  on("went", (one) => end(one, "is gone"));
}

/** One line for one end: a process that was killed here is gone a moment later. */
function end(one, how) {
  if (ended.has(one.id)) return;
  ended.add(one.id);
  endings_ms.set(place(one), performance.now());
  note(`${title(one)} ${how}`, "bad", one.id);
}

function arrival(process) {
  const ended_ms = endings_ms.get(place(process));
  if (ended_ms === undefined) return `${title(process)} joined, ${process.state}`;
  endings_ms.delete(place(process));
  const seconds = ((performance.now() - ended_ms) / 1000).toFixed(1);
  return `${title(process)} is back after ${seconds} s, ${process.state}`;
}

export function note(text, mood = "", about = "") {
  const log = find("log");
  const time = make("time", {}, clock.format(new Date()));
  log.prepend(make("li", { "data-mood": mood, title: about }, time, text));
  while (log.children.length > MAX_LINES) log.lastElementChild.remove();
}
