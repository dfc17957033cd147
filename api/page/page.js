// The page: a chat and the wall on the left, the fleet's instruments on the right. What a model or a server
// says is shown as text, never as markup.

import { startCharts } from "./board/charts.js";
import { startFlow } from "./board/flow.js";
import { startLog } from "./board/log.js";
import { startTiles } from "./board/tiles.js";
import { startChat } from "./chat/chat.js";
import { find, say } from "./dom.js";
import { on, watch } from "./fleet.js";
import { startManage } from "./manage/manage.js";
import { showNamed, startTabs } from "./tabs.js";
import { startWall } from "./wall/wall.js";

startHealth();
startFlow();
startCharts();
startWall();
startTiles();
startLog();
startChat();
startTabs();
startManage();
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
  on("access", ({ status, text }) => {
    find("trouble").hidden = true;
    if (status === 200) return;
    document.querySelector("main").dataset.access = "chat";
    find("tab-wall").hidden = true;
    showNamed();
    showHealth("", "chat only");
    say(find("barred"), text);
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
