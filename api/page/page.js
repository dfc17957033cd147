// The page: a chat on the left, the fleet's instruments on the right. Everything is shown as text, never as
// markup.

import { startCharts } from "./charts.js";
import { startChat } from "./chat.js";
import { find, say } from "./dom.js";
import { on, watch } from "./fleet.js";
import { startLog, startTiles } from "./tiles.js";

startHealth();
startCharts();
startTiles();
startLog();
startChat();
watch();

/** Shows, at the top, whether the fleet serves requests, as a gateway sees it. */
function startHealth() {
  on("seen", (fleet) => {
    say(find("model"), fleet.model);
    find("model").title = `pool ${fleet.pool}, version ${fleet.version}`;
    document.title = `${fleet.model} · Tokenfleet`;
    find("demo").hidden = !fleet.demo;
    find("trouble").hidden = true;
    showHealth(fleet.health.state, fleet.health.text);
  });
  on("lost", (text) => {
    showHealth("bad", "not connected");
    find("trouble").hidden = false;
    say(find("trouble"), `${text} Trying again every second.`);
  });
}

function showHealth(state, text) {
  find("health").dataset.state = state;
  say(find("health").lastElementChild, text);
}
