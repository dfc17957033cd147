// Runs of an answer: which worker computed which tokens, as the request's timeline has it.

import { make } from "./dom.js";
import { sees } from "./fleet.js";
import { ask } from "./requests.js";
import { colourOf } from "./workers.js";

const PATIENCE_MS = 3000;

/** The runs of an answer, in order: the first token of each, and its worker. Empty while none is known. */
export async function readRuns(answer) {
  if (!sees()) return [];
  let timelines;
  try {
    const response = await ask(`/fleet/requests/${answer}`, { patience_ms: PATIENCE_MS });
    ({ timelines } = await response.json());
  } catch {
    return [];
  }
  return runsOf(Object.values(timelines)[0] ?? []);
}

/** A worker that died before its first token has no run; nor has one that goes on with its own. */
export function runsOf(events) {
  const runs = [];
  for (const { what, worker, num_tokens: begin } of events) {
    if (what !== "placed") continue;
    while (runs.length && runs.at(-1).begin >= begin) runs.pop();
    if (runs.at(-1)?.worker !== worker) runs.push({ begin, worker });
  }
  return runs;
}

/** The number of tokens of each run, of so many in all, with its worker; null while none is known. */
export function partsOf(runs, numTokens) {
  if (!runs.length) return [{ worker: null, count: numTokens }];
  const ends = [...runs.slice(1).map((run) => run.begin), numTokens];
  return runs.map(({ begin, worker }, i) => ({ worker, count: Math.max(0, ends[i] - begin) }));
}

/** A line of the tokens so far, of the most there may be, in the colours of their workers. */
export function showRibbon(ribbon, parts, most) {
  while (ribbon.children.length < parts.length) ribbon.append(make("i"));
  parts.forEach(({ worker, count }, i) => {
    const part = ribbon.children[i];
    part.className = worker ? colourOf(worker) : "";
    part.style.width = `${(100 * count) / most}%`;
  });
}
