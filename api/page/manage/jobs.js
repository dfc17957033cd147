// Jobs over Redis: listed and cancelled.

import { figure, make, moment, say } from "../dom.js";
import { ask } from "../requests.js";
import { confirmed } from "./confirm.js";
import { table } from "./table.js";

const ROUTE = "/admin/jobs";
const HEADS = ["Job", "State", "Time (UTC)", ""];
const STATES = ["queued", "running", "done", "failed", "cancelled"];
const LIVE = ["queued", "running"];
const MOST = 200;
const REFRESH_MS = 3000;

const sum = make("p", { className: "sum" });
const list = make("div");
const words = make("p", { className: "keys-say", role: "status" });
const state = make(
  "select",
  { name: "status" },
  make("option", { value: "" }, "all"),
  ...STATES.map((name) => make("option", {}, name)),
);

/** The list, which is asked for again while it is seen. */
export function startJobs(content) {
  const form = make("form", { className: "new-key" }, make("label", {}, "State ", state));
  form.setAttribute("aria-label", "Which jobs are shown");
  state.onchange = () => attempt(refresh);
  show(content);
  setInterval(() => isSeen() && attempt(refresh), REFRESH_MS);
  return make("div", {}, sum, form, words, list);
}

/** Whether the list is looked at, and no button of it has the focus. */
function isSeen() {
  return list.checkVisibility() && !document.hidden && !list.contains(document.activeElement);
}

async function refresh() {
  const query = new URLSearchParams({ limit: MOST });
  if (state.value) query.set("status", state.value);
  show(await (await ask(`${ROUTE}?${query}`)).json());
}

function show({ jobs, counts: { live, ended } }) {
  say(sum, `${figure(live)} queued or running, ${figure(ended)} ended within the last hour.`);
  list.replaceChildren(jobs.length ? table(HEADS, jobs.map(row)) : "");
}

function row(job) {
  const actions = make("span", { className: "actions" });
  if (LIVE.includes(job.state)) actions.append(button("Cancel", job.id, cancel));
  const state = make("span", { className: "job-state", "data-state": job.state }, job.state);
  return [
    twoLines(make("code", {}, job.id), [job.kind, job.tenant].filter(Boolean).join(", ")),
    twoLines(state, job.error),
    twoLines(moment(job.ended_at || job.created_at), job.ended_at ? "ended" : "submitted", "two-lines time"),
    actions,
  ];
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
  if (!(await confirmed(`Cancel ${id}?`, sure))) return;
  await ask(`${ROUTE}/${encodeURIComponent(id)}/cancel`, { method: "POST" });
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
