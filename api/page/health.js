// The status at the top: whether the fleet serves requests, as a gateway sees it.

import { find, say } from "./node.js";
import { on } from "./fleet.js";

export function startHealth() {
  on("seen", (fleet) => {
    say(find("model"), fleet.model);
    find("model").title = `pool ${fleet.pool}, version ${fleet.version}`;
    document.title = `${fleet.model} · Tokenfleet`;
    find("demo").hidden = !fleet.demo;
    find("trouble").hidden = true;
    show(fleet.health.state, fleet.health.text);
  });
  on("lost", (text) => {
    show("bad", "not connected");
    find("trouble").hidden = false;
    say(find("trouble"), `${text} Trying again every second.`);
  });
}

function show(state, text) {
  find("health").dataset.state = state;
  say(find("health").lastElementChild, text);
}
