// The chat: its messages, the form, and each answer as it streams in, with its figures and pauses.

import { figure, find, make, plural, say } from "./dom.js";
import { look, on } from "./fleet.js";
import { answerEvents, Refused } from "./requests.js";

const HISTORY = "tokenfleet.history";
const ENDINGS = { stop: "", length: "stopped at its limit" };
const IDEAS = [
  "Describe the life of a honeybee from egg to adult.",
  "Give me five tips for learning a new language.",
  "How does a computer work? Explain it simply.",
];

/** A silence of SILENCE_MS is shown. One of PAUSE_MS is a pause, shown if a process has died. */
const SILENCE_MS = 700;
const PAUSE_MS = 120;
/** A death explains a pause within this time of it. */
const RECENT_MS = 4000;
const CHECK_MS = 100;
const FIRST_LOOK_MS = 200;

let turns = [];
let stopping = null;

export function startChat() {
  find("composer").onsubmit = (event) => (event.preventDefault(), submit());
  find("words").onkeydown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) event.preventDefault(), submit();
  };
  document.addEventListener("keydown", (event) => event.key === "Escape" && stopping?.abort());
  find("stop").onclick = () => stopping?.abort();
  find("anew").onclick = anew;
  find("ideas").append(...IDEAS.map(ideaButton));
  JSON.parse(sessionStorage.getItem(HISTORY) ?? "[]").forEach(recall);
}

function ideaButton(idea) {
  return make("button", { type: "button", className: "plain", onclick: () => send(idea) }, idea);
}

function recall(turn) {
  turns.push(turn);
  const words = make("p", { className: "words" }, turn.content);
  put(make("article", { className: `turn ${turn.role === "user" ? "user" : "model"}` }, words));
}

function anew() {
  stopping?.abort();
  turns = [];
  sessionStorage.removeItem(HISTORY);
  find("talk").replaceChildren(find("empty"));
  find("empty").hidden = false;
  find("words").focus();
}

function submit() {
  const text = find("words").value.trim();
  if (!text || stopping) return;
  find("words").value = "";
  send(text);
}

function send(text) {
  if (stopping) return;
  leaveUnanswered();
  recall({ role: "user", content: text });
  find("talk").scrollTop = find("talk").scrollHeight;
  answer();
}

/** Forgets a question that got no answer, though the page still shows it: many templates refuse two messages
 * of one role in a row. Only the last question can be asked again. */
function leaveUnanswered() {
  if (turns.at(-1)?.role === "user") turns.pop();
  for (const button of find("talk").querySelectorAll(".again")) button.remove();
}

/** Requests an answer to the messages so far. */
async function answer() {
  const one = new Answer();
  const history = turns;
  put(one.node);
  busy(new AbortController());
  try {
    const ending = await stream(one);
    one.end("done", ENDINGS[ending] ?? ending);
    say(find("said"), one.text);
  } catch (error) {
    if (error.name === "AbortError") one.end("stopped", "stopped");
    else broke(one, error);
  }
  busy(null);
  if (turns === history && one.text) turns.push({ role: "assistant", content: one.text });
  if (turns === history) sessionStorage.setItem(HISTORY, JSON.stringify(turns));
  follow();
}

/** Reads the answer to its end. Returns the finish reason. Throws Refused, or AbortError. */
async function stream(one) {
  const answered = answerEvents("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(request()),
    signal: stopping.signal,
  });
  let ending = null;
  try {
    for await (const data of answered) {
      if (data === "[DONE]") break;
      const frame = JSON.parse(data);
      if (frame.error) throw new Refused(200, frame.error.message ?? frame.error);
      const choice = frame.choices?.[0];
      if (choice?.delta?.content) one.add(choice.delta.content), follow();
      ending = choice?.finish_reason ?? ending;
      if (frame.usage) one.num_tokens = frame.usage.completion_tokens;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof Refused) throw error;
    throw new Refused(0, "");
  }
  if (ending === null) throw new Refused(0, "");
  return ending;
}

function request() {
  const system = find("system").value.trim();
  return {
    model: "tgi",
    messages: [...(system ? [{ role: "system", content: system }] : []), ...turns],
    temperature: find("temperature").valueAsNumber || 0,
    max_tokens: find("max_tokens").valueAsNumber || 400,
    stream: true,
    stream_options: { include_usage: true },
  };
}

function broke(one, error) {
  const cut = "The connection was lost, and no gateway went on with the answer.";
  const why = one.num_tokens && !error.status ? cut : error.message || cut;
  one.end("broken", why);
  const again = make("button", { type: "button", className: "plain again" }, "Ask again");
  again.onclick = () => {
    if (stopping) return;
    if (turns.at(-1)?.role === "assistant") turns.pop();
    one.node.remove();
    answer();
  };
  one.node.append(again);
}

function put(node) {
  find("empty").hidden = true;
  find("talk").append(node);
  follow();
}

/** Scrolls to the end, unless the reader has scrolled up. */
function follow() {
  const talk = find("talk");
  if (talk.scrollHeight - talk.scrollTop - talk.clientHeight < 160) talk.scrollTop = talk.scrollHeight;
}

/** Stop takes the place of Send, and its focus, while an answer streams. */
function busy(controller) {
  stopping = controller;
  const [former, shown] = controller ? [find("send"), find("stop")] : [find("stop"), find("send")];
  const focused = document.activeElement === former;
  [former.hidden, shown.hidden] = [true, false];
  if (focused) shown.focus();
  find("talk").setAttribute("aria-busy", controller !== null);
}

// --- answers

/** The answer that streams now; it hears of processes that end. */
let current = null;
on("went", (process) => current?.lost(process));
on("killed", (process) => current?.lost(process));

class Answer {
  constructor() {
    this.words = make("p", { className: "words" }, "");
    this.status = make("p", { className: "status", hidden: true });
    this.figures = make("p", { className: "figures" });
    const parts = [this.words, this.status, this.figures];
    this.node = make("article", { className: "turn model", "aria-label": "Answer" }, ...parts);
    this.node.dataset.state = "streaming";
    this.begun_ms = this.heard_ms = performance.now();
    this.first_ms = null;
    this.num_tokens = 0;
    this.dead = null;
    this.gap = null;
    this.pauses = [];
    this.heard_of = new Set();
    this.ticking = setInterval(() => this.tick(), CHECK_MS);
    current = this;
  }

  get text() {
    return this.words.textContent;
  }

  add(text) {
    const now = performance.now();
    const silence_ms = now - this.heard_ms;
    if (this.first_ms === null) setTimeout(look, FIRST_LOOK_MS);
    this.first_ms ??= now;
    if (this.num_tokens && this.isLong(silence_ms, PAUSE_MS)) this.resumed(silence_ms);
    this.heard_ms = now;
    this.num_tokens += 1;
    this.words.append(document.createTextNode(text));
    this.status.hidden = true;
    this.show();
  }

  /** Whether a silence is longer than the pace of this answer explains. */
  isLong(silence_ms, least_ms) {
    const usual_ms = this.num_tokens > 1 ? (this.heard_ms - this.first_ms) / (this.num_tokens - 1) : 0;
    return silence_ms > Math.max(least_ms, 3 * usual_ms);
  }

  /** Marks the end of a pause; the death of a process explains it, known before or shortly after. */
  resumed(silence_ms) {
    const mark = make("span", { className: "resumed" });
    this.words.append(mark);
    this.gap = { mark, silence_ms, at_ms: performance.now(), token: this.num_tokens };
    if (this.dead && performance.now() - this.dead.at_ms < RECENT_MS + silence_ms) this.explain();
  }

  /** Notes the end of a process, once for each process that may have held this answer. */
  lost(process) {
    const { rows, active, streams, kind } = process;
    const matters = { worker: rows > 0, batcher: active, gateway: streams > 0, broker: true }[kind];
    if (!matters || this.heard_of.has(process.id)) return;
    if (process.kind !== "broker") this.heard_of.add(process.id);
    this.dead = { process, at_ms: performance.now() };
    if (this.gap && performance.now() - this.gap.at_ms < RECENT_MS) this.explain();
    else this.tick();
  }

  explain() {
    const { mark, silence_ms, token } = this.gap;
    const { process } = this.dead;
    const seconds = (silence_ms / 1000).toFixed(1);
    mark.classList.add("known");
    const where = `here, after token ${token}; the answer went on ${seconds} s later`;
    mark.title = `${process.kind} ${process.id} died ${where}`;
    this.pauses.push(`${name(process)} died at token ${token}, resumed after ${seconds} s`);
    this.gap = this.dead = null;
    this.show();
  }

  /** Shows a silence, and reads the fleet's state to find its cause. */
  tick() {
    const silence_ms = performance.now() - this.heard_ms;
    if (this.dead && performance.now() - this.dead.at_ms > RECENT_MS + silence_ms) this.dead = null;
    if (!this.isLong(silence_ms, this.dead ? PAUSE_MS : SILENCE_MS)) return;
    const seconds = (silence_ms / 1000).toFixed(1);
    this.status.hidden = false;
    this.status.dataset.mood = this.dead ? "bad" : "";
    const dead = this.dead?.process;
    if (dead) say(this.status, `${dead.kind} ${name(dead)} died, resuming… ${seconds} s`);
    else if (this.num_tokens) say(this.status, `no token for ${seconds} s`);
    else say(this.status, `waiting for the first token, ${seconds} s`);
    if (silence_ms % 500 < CHECK_MS) look();
  }

  get speed() {
    const seconds = (this.heard_ms - this.first_ms) / 1000;
    return seconds > 0 ? (this.num_tokens - 1) / seconds : 0;
  }

  show() {
    const waited_s = (this.first_ms - this.begun_ms) / 1000;
    const first = this.first_ms === null ? [] : [`first token ${waited_s.toFixed(2)} s`];
    const speed = this.num_tokens > 1 ? [`${figure(this.speed)} tokens/s`] : [];
    const ending = this.ending ? [this.ending] : [];
    const all = [plural(this.num_tokens, "token"), ...first, ...speed, ...this.pauses, ...ending];
    say(this.figures, all.join(" · "));
  }

  /** `state` is `done`, `stopped` or `broken`. */
  end(state, why = "") {
    clearInterval(this.ticking);
    if (current === this) current = null;
    this.node.dataset.state = state;
    this.status.hidden = state !== "broken";
    this.status.dataset.mood = "bad";
    if (state === "broken") say(this.status, why);
    else this.ending = why;
    this.show();
  }
}

const name = (process) => process.id.split("-")[0];
