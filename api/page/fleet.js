// The fleet's state: read every second, and passed to listeners.

import { ask, readAccess } from "./requests.js";
import { meet } from "./workers.js";

const EVERY_MS = 1000;
const PATIENCE_MS = 5000;
const SILENT_S = 2;

/** Listeners by what they hear: `access` what the key may see; `seen` a snapshot; `lost` why there is none;
 * a process that `came`, `turned` another state, `went`, or was `killed` from here. */
const listeners = { access: [], seen: [], lost: [], came: [], turned: [], went: [], killed: [] };
let isShown = false;
let known = null;
let heartbeats = new Map();
let looking = null;

export const on = (what, listener) => listeners[what].push(listener);
export const tell = (what, ...about) => listeners[what].forEach((listener) => listener(...about));

export async function watch() {
  const access = await readAccess((why) => tell("lost", why));
  isShown = access.status === 200;
  tell("access", access);
  while (await look()) {
    await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
  }
}

/** Whether this key may see the fleet, timelines included. */
export const sees = () => isShown;

/** Reads the state now; concurrent calls share one request. Returns whether to read it again. */
export function look() {
  if (!isShown) return Promise.resolve(false);
  looking ??= glance().finally(() => (looking = null));
  return looking;
}

async function glance() {
  let fleet;
  try {
    fleet = await (await ask("/fleet", { patience_ms: PATIENCE_MS })).json();
  } catch (error) {
    isShown = error.status !== 403;
    if (isShown) tell("lost", error.status ? error.message : "No gateway answers.");
    else tell("access", { status: 403, text: error.message });
    return isShown;
  }
  for (const one of fleet.processes) if (one.kind === "broker") one.id = `Redis-${one.pid}`;
  meet(fleet.processes);
  measure(fleet);
  compare(fleet.processes);
  tell("seen", fleet);
  return true;
}

/** Tokens per second of each worker, between its last two heartbeats. */
function measure(fleet) {
  const latest = new Map();
  for (const worker of fleet.processes.filter((one) => one.kind === "worker")) {
    const time_s = fleet.time_s - worker.age_s;
    const last = heartbeats.get(worker.id);
    if (last && time_s - last.time_s < 0.1) {
      worker.rate = worker.age_s < SILENT_S ? last.rate : 0;
      latest.set(worker.id, { ...last, rate: worker.rate });
    } else {
      worker.rate = last ? (worker.tokens - last.tokens) / (time_s - last.time_s) : 0;
      latest.set(worker.id, { time_s, tokens: worker.tokens, rate: worker.rate });
    }
  }
  heartbeats = latest;
}

function compare(processes) {
  const now = new Map(processes.map((one) => [one.id, one]));
  if (known) {
    for (const [id, one] of known) if (!now.has(id)) tell("went", one);
    for (const [id, one] of now) {
      if (!known.has(id)) tell("came", one);
      else if (known.get(id).state !== one.state) tell("turned", one);
    }
  }
  known = now;
}

export async function kill(process) {
  const id = process.kind === "broker" ? process.kind : process.id;
  await ask(`/fleet/processes/${encodeURIComponent(id)}/kill`, { method: "POST" });
  tell("killed", process);
  setTimeout(look, 300);
}
