// Chaos, in a demonstration: while it is switched on, something is killed every few seconds, as soon as all
// streams flow again.

import { find } from "../dom.js";
import { kill, on } from "../fleet.js";
import { mayComeBack } from "../requests.js";

const EVERY_MS = 4000;
const KINDS = ["worker", "gateway", "worker", "batcher", "worker", "broker"];

/** `begin` runs the streams; `isDue` says whether they flow; `failed` is told why nothing was killed. */
export function startChaos({ begin, isDue, failed }) {
  let processes = [];
  let turn = 0;
  on("seen", (fleet) => {
    processes = fleet.processes;
    find("chaos").parentElement.hidden = !fleet.demo;
  });
  find("chaos").onchange = () => find("chaos").checked && begin();
  setTimeout(takeTurn, EVERY_MS);

  async function takeTurn() {
    if (find("chaos").checked && isDue()) await strike();
    setTimeout(takeTurn, EVERY_MS);
  }

  /** Kills one of the next kind: kinds take turns, and so do processes of a kind. While no gateway answers,
   * nothing is killed. */
  async function strike() {
    const serving = ["ready", "active"];
    const kind = KINDS[turn % KINDS.length];
    const those = processes.filter((one) => one.kind === kind && serving.includes(one.state));
    const victim = those[Math.floor(turn / KINDS.length + (turn + 1) / 2) % those.length];
    try {
      if (victim) await kill(victim);
      turn++;
    } catch (error) {
      if (mayComeBack(error)) return;
      find("chaos").checked = false;
      failed(error.message);
    }
  }
}

export const isChaos = () => find("chaos").checked;
