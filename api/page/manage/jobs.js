// Jobs over Redis: listed, searched, cancelled, and tried again if they are dead.

import { figure, make, moment, say } from "../dom.js";
import { ask } from "../requests.js";
import { confirmed } from "./confirm.js";
import { table } from "./table.js";

const ROUTE = "/admin/jobs";
const HEADS = ["Job", "State", "Time (UTC)", ""];
const STATES = ["queued", "running", "scheduled", "dead", "done", "failed", "cancelled"];
const WAITING = ["queued", "running", "scheduled"];
const PAGE = 50;
const REFRESH_MS = 3000;

const sum = make("p", { className: "sum" });
const list = make("div");
const words = make("p", { className: "keys-say", role: "status" });
const more = make("button", { type: "button", className: "plain", onclick: () => attempt(showMore) }, "More");
const search = make("input", { name: "search", maxLength: 128 });
const state = make(
  "select",
  { name: "status" },
  make("option", { value: "" }, "all"),
  ...STATES.map((name) => make("option", {}, name)),
);
let shown = [];
let cursor = null;

/** The list, which is asked for again while it is seen. */
export function startJobs(content) {
  const form = make(
    "form",
    { className: "new-key" },
    make("label", {}, "Part of the id ", search),
    make("label", {}, "State ", state),
    make("button", { type: "submit", className: "main" }, "Search"),
  );
  form.setAttribute("aria-label", "Search for jobs");
  form.onsubmit = (event) => (event.preventDefault(), attempt(refresh));
  state.onchange = () => attempt(refresh);
  show(content);
  setInterval(() => isSeen() && attempt(refresh), REFRESH_MS);
  return make("div", {}, sum, form, words, list, more);
}

/** Whether the first page is looked at, and no button of it has the focus. */
function isSeen() {
  const isUsed = list.contains(document.activeElement);
  return shown.length <= PAGE && list.checkVisibility() && !document.hidden && !isUsed;
}

async function read(from) {
  const query = new URLSearchParams({ limit: PAGE });
  if (search.value.trim()) query.set("search", search.value.trim());
  if (state.value) query.set("status", state.value);
  if (from) query.set("cursor", from);
  return (await ask(`${ROUTE}?${query}`)).json();
}

async function refresh() {
  show(await read(null));
}

async function showMore() {
  const before = shown;
  const content = await read(cursor);
  show({ ...content, jobs: [...before, ...content.jobs] });
}

function show({ jobs, counts, cursor: next }) {
  shown = jobs;
  cursor = next;
  const { live, scheduled, dead, ended } = counts;
  const ends = `${figure(dead)} dead, ${figure(ended)} ended otherwise within the last hour`;
  say(sum, `${figure(live)} queued or running, ${figure(scheduled)} scheduled, ${ends}.`);
  list.replaceChildren(jobs.length ? table(HEADS, jobs.map(row)) : "");
  more.hidden = !next;
}

function row(job) {
  const actions = make("span", { className: "actions" });
  if (WAITING.includes(job.state)) actions.append(button("Cancel", job.id, cancel));
  if (job.state === "dead") actions.append(button("Retry", job.id, retry));
  const state = make("span", { className: "job-state", "data-state": job.state }, job.state);
  return [
    twoLines(make("code", {}, job.id), [job.kind, job.tenant].filter(Boolean).join(", ")),
    twoLines(state, job.error),
    twoLines(...timeOf(job), "two-lines time"),
    actions,
  ];
}

/** The time that matters, and what it says. */
function timeOf({ ended_at, not_before, created_at, state }) {
  if (ended_at) return [moment(ended_at), "ended"];
  return state === "scheduled" ? [moment(not_before), "not before"] : [moment(created_at), "submitted"];
}

function twoLines(first, second, className = "two-lines") {
  return make("div", { className }, first, make("small", {}, second));
}

function button(text, id, action) {
  const properties = { type: "button", onclick: () => attempt(() => action(id)) };
  return make("button", { ...properties, "aria-label": `${text} ${id}` }, text);
}

async function cancel(id) {
  const sure = "It ends with an error for whoever waits for its answer.";
  if (await confirmed(`Cancel ${id}?`, sure)) await change(id, "cancel");
}

const retry = (id) => change(id, "retry");

async function change(id, what) {
  await ask(`${ROUTE}/${encodeURIComponent(id)}/${what}`, { method: "POST" });
  document.activeElement?.blur();
  await refresh();
}

/** Does what a button asks for; says why it was refused. */
async function attempt(action) {
  try {
    await action();
    say(words, "");
  } catch (error) {
    say(words, error.message);
  }
}
