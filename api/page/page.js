// The page: a chat on the left, the fleet's instruments on the right. Everything shown is set as text, never
// as markup.

import { startChat } from "./chat.js";
import { startCharts } from "./charts.js";
import { startTiles } from "./tiles.js";
import { startLog } from "./log.js";
import { startHealth } from "./health.js";
import { watch } from "./fleet.js";

startHealth();
startCharts();
startTiles();
startLog();
startChat();
watch();
