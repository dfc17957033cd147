// The status at the top: whether the fleet accepts requests.

import { find, say } from "./node.js";
import { on } from "./fleet.js";

export function startHealth() {
  on("seen", (fleet) => {
    say(find("model"), fleet.model);
    find("model").title = `pool ${fleet.pool}, version ${fleet.version}`;
    document.title = `${fleet.model} · Tokenfleet`;
    find("demo").hidden = !fleet.demo;
    find("trouble").hidden = true;
    const [state, text] = health(fleet.processes);
    show(state, text);
  });
  on("lost", (text) => {
    show("bad", "not connected");
    find("trouble").hidden = false;
    say(find("trouble"), `${text} Trying again every second.`);
  });
}

function health(processes) {
  const ready = processes.filter((one) => one.kind === "worker" && one.state === "ready").length;
  if (!ready) return ["bad", "no worker is ready"];
  if (!processes.some((one) => one.active)) return ["warn", "no batcher is active"];
  return ["good", ready === 1 ? "1 worker ready" : `${ready} workers ready`];
}

function show(state, text) {
  find("health").dataset.state = state;
  say(find("health").lastElementChild, text);
}
