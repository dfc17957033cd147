// API keys: listed, added, rotated and revoked. A new key is shown once.

import { figure, find, make, moment, say } from "../dom.js";
import { ask } from "../requests.js";
import { confirmed } from "./confirm.js";
import { table } from "./table.js";

const ROUTE = "/admin/keys";
const HEADS = ["Key", "Name", "Tenant", "State", "Limits", "Models", "Expires", ""];
const LIMITS = [
  ["max_concurrent", "at once"],
  ["requests_per_minute", "requests/min"],
  ["tokens_per_minute", "tokens/min"],
  ["budget_tokens", "tokens/month"],
];
const TEXTS = ["name", "tenant", "expires_at"];
const NUMBERS = ["requests_per_minute", "tokens_per_minute", "budget_tokens"];

const list = make("div");

export function startKeys(keys) {
  find("new-key").onsubmit = (event) => (event.preventDefault(), attempt(add));
  find("issued-copy").hidden = !navigator.clipboard; // browsers have none for http:// but on this machine
  find("issued-copy").onclick = copy;
  show(keys);
  find("keys").hidden = false;
  return make("div", {}, list, find("keys"));
}

function show({ keys }) {
  list.replaceChildren(table(HEADS, keys.map(row)));
}

function row(key) {
  const isOver = key.state !== "active";
  const actions = [
    make("button", { type: "button", disabled: isOver, onclick: () => attempt(() => rotate(key)) }, "Rotate"),
    make("button", { type: "button", disabled: isOver, onclick: () => attempt(() => revoke(key)) }, "Revoke"),
  ];
  for (const button of actions) button.setAttribute("aria-label", `${button.textContent} ${key.key_id}`);
  const state = make("span", { className: "key-state", "data-state": key.state }, key.state);
  const expires = moment(key.expires_at) || "never";
  const limits = LIMITS.filter(([name]) => key[name]).map(([name, words]) => `${figure(key[name])} ${words}`);
  return [
    make("code", {}, key.key_id),
    `${key.name}${key.admin ? " (admin)" : ""}`,
    key.tenant,
    state,
    limits.join(", ") || "none",
    key.models.join(", ") || "all",
    expires,
    make("span", { className: "actions" }, ...actions),
  ];
}

/** Does what a button asks for; says why it was refused. */
async function attempt(action) {
  say(find("keys-say"), "");
  try {
    await action();
    show(await (await ask(ROUTE)).json());
  } catch (error) {
    say(find("keys-say"), error.message);
  }
}

async function add() {
  const form = find("new-key").elements;
  const fields = {};
  for (const name of TEXTS) if (form[name].value.trim()) fields[name] = form[name].value.trim();
  for (const name of NUMBERS) if (form[name].value) fields[name] = form[name].valueAsNumber;
  if (form.admin.checked) fields.admin = true;
  const headers = { "content-type": "application/json" };
  issue(await (await ask(ROUTE, { method: "POST", headers, body: JSON.stringify(fields) })).json());
  find("new-key").reset();
}

async function rotate({ key_id }) {
  const sure = "The present key is refused within seconds. Running requests go on.";
  if (!(await confirmed(`Rotate ${key_id}?`, sure))) return;
  issue(await (await ask(place(key_id, "rotate"), { method: "POST" })).json());
}

async function revoke({ key_id }) {
  const sure = "Its requests end within seconds. This cannot be undone.";
  if (await confirmed(`Revoke ${key_id}?`, sure)) await ask(place(key_id, "revoke"), { method: "POST" });
}

const place = (keyId, what) => `${ROUTE}/${encodeURIComponent(keyId)}/${what}`;

function issue({ key, key_id }) {
  say(find("issued-title"), `The key of ${key_id}`);
  say(find("issued-copy"), "Copy");
  find("issued-text").value = key;
  find("issued").showModal();
  find("issued-text").select();
}

async function copy() {
  await navigator.clipboard.writeText(find("issued-text").value);
  say(find("issued-copy"), "Copied");
}
