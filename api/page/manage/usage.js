// Usage of this month, by key, tenant and model, the largest first.

import { figure, make, plural } from "../dom.js";
import { table } from "./table.js";

const HEADS = ["Key", "Tenant", "Model", "Requests", "Prompt", "Cached", "Generated"];

export function showUsage({ data, total }) {
  const sorted = [...data].sort((one, other) => other.total_tokens - one.total_tokens);
  const rows = sorted.map((row) => [
    row.key || "none",
    row.tenant || "none",
    row.model,
    row.requests,
    row.prompt_tokens,
    row.cached_tokens,
    share(row.completion_tokens, total.completion_tokens),
  ]);
  const words = `${plural(total.requests, "request")}, ${figure(total.total_tokens)} tokens.`;
  return make("div", {}, make("p", { className: "sum" }, words), table(HEADS, rows));
}

/** A count, on a bar of its share of all. */
function share(count, all) {
  const bar = make("i", { "aria-hidden": "true" });
  bar.style.width = `${all ? (100 * count) / all : 0}%`;
  return make("span", { className: "share" }, bar, figure(count));
}
