// The chat: its messages and the form.

import { find, make, say } from "../dom.js";
import { answerEvents, Refused, tokenOf } from "../requests.js";
import { Answer } from "./answer.js";
import { Markdown, withoutMarks } from "./markdown.js";
import { chosen, startModel } from "./model.js";
import { contentNodes, hasPictures, startPictures, textOf, withPictures } from "./pictures.js";

const HISTORY = "tokenfleet.history";
const ENDINGS = { stop: "", length: "stopped at its limit" };
/** The model that `tokenfleet serve` starts with answers these without going round in circles. */
const IDEAS = [
  "Why is exercise good for you?",
  "What is machine learning?",
  "Why do we sleep?",
];

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
  startModel();
  startPictures();
  JSON.parse(sessionStorage.getItem(HISTORY) ?? "[]").forEach(recall);
  toEnd();
}

function ideaButton(idea) {
  return make("button", { type: "button", className: "plain", onclick: () => send(idea) }, idea);
}

function recall(turn) {
  turns.push(turn);
  const isUser = turn.role === "user";
  const words = make("div", { className: `words ${isUser ? "" : "markdown"}` });
  if (isUser) words.append(...contentNodes(turn.content));
  else new Markdown(words).show(withoutMarks(turn.content));
  put(make("article", { className: `turn ${isUser ? "user" : "model"}` }, words));
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
  if (!(text || hasPictures()) || stopping) return;
  find("words").value = "";
  send(text);
}

function send(text) {
  if (stopping) return;
  leaveUnanswered();
  recall({ role: "user", content: withPictures(text) });
  toEnd();
  answer();
}

/** Forgets a question that got no answer, though the page still shows it: many templates refuse two messages
 * of one role in a row. Only the last question can be asked again. */
function leaveUnanswered() {
  if (turns.at(-1)?.role === "user") turns.pop();
  for (const button of find("talk").querySelectorAll(".again")) button.remove();
}

/** Requests an answer to the messages so far. Reasoning is no part of the conversation. */
async function answer() {
  const one = new Answer();
  const history = turns;
  put(one.node);
  keep();
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
  if (turns === history && one.num_tokens) turns.push({ role: "assistant", content: one.text });
  if (turns === history) keep();
  follow();
}

/** Keeps the conversation for a reload; without its pictures, if they are more than the browser keeps. */
function keep() {
  try {
    sessionStorage.setItem(HISTORY, JSON.stringify(turns));
  } catch {
    const texts = turns.map((turn) => ({ ...turn, content: textOf(turn.content) || "(a picture)" }));
    sessionStorage.setItem(HISTORY, JSON.stringify(texts));
  }
}

/** Reads the answer to its end. Returns the finish reason. Throws Refused, or AbortError. */
async function stream(one) {
  const answered = answerEvents("/v1/chat/completions", (answer) => one.begin(answer), {
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
      const token = tokenOf(choice?.delta);
      if (token !== undefined) one.add(token, choice.delta.content === undefined), follow();
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
    model: chosen(),
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
  if (talk.scrollHeight - talk.scrollTop - talk.clientHeight < 160) toEnd();
}

const toEnd = () => (find("talk").scrollTop = find("talk").scrollHeight);

/** Stop takes the place of Send, and its focus, while an answer streams. */
function busy(controller) {
  stopping = controller;
  const [former, shown] = controller ? [find("send"), find("stop")] : [find("stop"), find("send")];
  const focused = document.activeElement === former;
  [former.hidden, shown.hidden] = [true, false];
  if (focused) shown.focus();
  find("talk").setAttribute("aria-busy", controller !== null);
}
