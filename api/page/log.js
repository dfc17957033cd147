// The log of processes that join, change state or end; newest first.

import { find, make } from "./node.js";
import { on } from "./fleet.js";

const MAX_LINES = 60;
const SILENT_S = 1.5;
const title = ({ kind, id }) => (kind === id ? kind : `${kind} ${id}`);
const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });

export function startLog() {
  let begun = false;
  on("seen", (fleet) => {
    if (!begun) note(`watching ${fleet.processes.length} processes of pool ${fleet.pool}`);
    begun = true;
  });
  on("came", (one) => note(`${title(one)} joined, ${one.state}`, "good"));
  on("turned", (one) => one.age_s < SILENT_S && note(`${title(one)} is ${one.state} now`, "good"));
  on("went", (one) => note(`${title(one)} is gone`, "bad"));
  on("killed", (one) => note(`${title(one)} was killed from this page`, "bad"));
}

export function note(text, mood = "") {
  const log = find("log");
  log.prepend(make("li", { "data-mood": mood }, make("time", {}, clock.format(new Date())), text));
  while (log.children.length > MAX_LINES) log.lastElementChild.remove();
}
