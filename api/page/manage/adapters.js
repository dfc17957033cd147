// LoRA adapters: listed, loaded and unloaded.

import { make, say } from "../dom.js";
import { ask } from "../requests.js";
import { table } from "./table.js";

const ROUTE = "/admin/adapters";
const HEADS = ["Adapter", "State", "Workers", "Rank", "Path", ""];

const list = make("div");
const words = make("p", { className: "keys-say", role: "status" });

export function startAdapters(content) {
  show(content);
  const parts = content.may_change ? [newAdapter()] : [];
  return make("div", {}, list, ...parts, words);
}

function show({ adapters, num_workers, may_change }) {
  list.replaceChildren(table(HEADS, adapters.map((one) => row(one, num_workers, may_change))));
}

function row(one, numWorkers, mayChange) {
  const unload = make(
    "button",
    {
      type: "button",
      disabled: !mayChange || one.state !== "ready",
      onclick: () => attempt("/v1/unload_lora_adapter", { lora_name: one.name }),
    },
    "Unload",
  );
  unload.setAttribute("aria-label", `Unload ${one.name}`);
  const causes = Object.entries(one.refused).map(([worker, why]) => `${worker}: ${why}`);
  const workers = [`${one.num_workers} of ${numWorkers}`, ...causes].join("; ");
  const actions = make("span", { className: "actions" }, unload);
  return [make("code", {}, one.name), one.state, workers, one.rank, one.path, actions];
}

/** The form of another adapter. */
function newAdapter() {
  const name = make("input", { name: "lora_name", maxLength: 128, required: true });
  const path = make("input", { name: "lora_path", required: true });
  const form = make(
    "form",
    { className: "new-key" },
    make("label", {}, "Name ", name),
    make("label", {}, "Folder or hub id ", path),
    make("button", { type: "submit", className: "main" }, "Load"),
  );
  form.setAttribute("aria-label", "New adapter");
  form.onsubmit = async (event) => {
    event.preventDefault();
    const body = { lora_name: name.value.trim(), lora_path: path.value.trim() };
    if (await attempt("/v1/load_lora_adapter", body)) form.reset();
  };
  return form;
}

/** Asks for a change, which may take a while; says why it was refused. Returns whether it was done. */
async function attempt(path, body) {
  say(words, "Asking all workers …");
  try {
    const headers = { "content-type": "application/json" };
    await ask(path, { method: "POST", headers, body: JSON.stringify(body) });
    show(await (await ask(ROUTE)).json());
    say(words, "");
    return true;
  } catch (error) {
    say(words, error.message);
    return false;
  }
}
