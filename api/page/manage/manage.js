// The view for who runs the fleet: its models, adapters and jobs, what has been used this month, and the API
// keys. It is there only for a key that may see it, and each part only where its route answers.

import { find, make } from "../dom.js";
import { on } from "../fleet.js";
import { ask } from "../requests.js";
import { showNamed } from "../tabs.js";
import { startAdapters } from "./adapters.js";
import { startJobs } from "./jobs.js";
import { startKeys } from "./keys.js";
import { table } from "./table.js";
import { showUsage } from "./usage.js";

const PATIENCE_MS = 5000;

export const startManage = () => on("access", show);

/** A key that is no admin's sees what its tenant has used. */
async function show({ status, has_keys }) {
  if (status === 404) return;
  const routes = ["/v1/models", "/usage"];
  if (status === 200) routes.push("/admin/adapters", "/admin/jobs");
  if (has_keys) routes.push("/admin/keys");
  const [models, usage, adapters, jobs, keys] = await Promise.all(routes.map(answer));
  const hasAdapters = adapters && (adapters.adapters.length > 0 || adapters.may_change);
  if (!usage && !keys && !hasAdapters && !jobs) return;
  find("tab-manage").hidden = false;
  const parts = [["Models", modelsTable((models?.data ?? []).filter(({ parent }) => !parent))]];
  if (hasAdapters) parts.push(["Adapters", startAdapters(adapters)]);
  if (jobs) parts.push(["Jobs", startJobs(jobs)]);
  if (usage) parts.push(["Usage of this month", showUsage(usage)]);
  if (keys) parts.push(["API keys", startKeys(keys)]);
  const sections = parts.map(([title, node]) =>
    make("section", { "aria-label": title }, make("h2", {}, title), node),
  );
  find("manage").replaceChildren(...sections);
  showNamed();
}

/** What a route answers; null if there is none, or this key may not ask it. */
async function answer(path) {
  try {
    return await (await ask(path, { patience_ms: PATIENCE_MS })).json();
  } catch {
    return null;
  }
}

/** The models by name; of a fleet whose workers take turns, what waits for each, and where it sleeps. */
function modelsTable(models) {
  const node = make("div", {}, table(["Model"], models.map(({ id }) => [id])));
  on("seen", (fleet) => {
    if (!fleet.models) return;
    const rows = fleet.models.map((one) => [one.pool, one.waiting, one.workers.map(place).join("; ")]);
    node.replaceChildren(table(["Model", "Waiting", "Workers"], rows));
  });
  return node;
}

function place({ state, kept_in, swap_s }) {
  const where = state === "asleep" && kept_in ? ` in ${kept_in}` : "";
  return `${state}${where}${swap_s ? `, the last swap took ${swap_s.toFixed(1)} s` : ""}`;
}
