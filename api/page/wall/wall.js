// The wall: sixteen answers at once, each stretch of tokens in the colour of its worker. Kill a worker, and
// its streams pause, hop to another one, and go on.

import { figure, find, make, plural, say } from "../dom.js";
import { kill, look, on } from "../fleet.js";
import { ask, mergedEvents } from "../requests.js";
import { readRuns } from "../runs.js";
import { compareNames, label, meet, nameOf } from "../workers.js";
import { Cell } from "./cell.js";

const QUESTIONS = [
  "Why is the sky blue?",
  "How do bees make honey?",
  "What is a black hole?",
  "How does a sailboat move?",
  "Why do leaves change colour?",
  "What did the Romans build?",
  "How is bread made?",
  "What do whales eat?",
  "How does rain form?",
  "What is photosynthesis?",
  "Who was Marie Curie?",
  "How do magnets work?",
  "Why do we dream?",
  "What is jazz music?",
  "How do birds fly?",
  "What is a volcano?",
];
const MAX_TOKENS = 160;
/** How long the fleet goes on without this page. */
const RESUME_S = 30;
const TICK_MS = 100;
const READ_AGAIN_MS = 150;
const READERS = 3;

let cells = [];
let running = null;

export function startWall() {
  find("run").onclick = run;
  find("halt").onclick = halt;
  find("wall").append(...QUESTIONS.map((question) => new Cell(question, MAX_TOKENS).node));
  on("seen", (fleet) => {
    meet(fleet.processes.filter((one) => one.kind === "worker").map((one) => one.id));
    showLegend(fleet);
  });
  on("went", lose);
  on("killed", lose);
}

async function run() {
  running = new AbortController();
  const { signal } = running;
  cells = QUESTIONS.map((question) => new Cell(question, MAX_TOKENS));
  find("wall").replaceChildren(...cells.map((cell) => cell.node));
  show(true);
  tell(`${cells.length} streams run.`);
  const ticking = setInterval(tick, TICK_MS);
  const reading = readWorkers(signal);
  try {
    await Promise.all(cells.map((cell) => begin(cell, signal).catch((error) => refuse(cell, error))));
    await readAll(signal);
  } catch (error) {
    const why = error.name === "AbortError" ? "stopped" : error.message;
    cells.forEach((cell) => cell.isLive && cell.fail(why));
  }
  clearInterval(ticking);
  running.abort();
  await reading;
  running = null;
  show(false);
  conclude();
}

function tick() {
  for (const cell of cells) if (cell.isLive) cell.tick(performance.now());
  for (const one of chips.values()) one.count();
}

/** Requests an answer, and hangs up once it is admitted: the frames of all come on one connection. */
async function begin(cell, signal) {
  const body = {
    model: "tgi",
    messages: [{ role: "user", content: cell.question }],
    temperature: 0,
    max_tokens: MAX_TOKENS,
    stream: true,
    resume_s: RESUME_S,
  };
  const headers = { "content-type": "application/json" };
  const options = { method: "POST", headers, body: JSON.stringify(body), signal };
  const response = await ask("/v1/chat/completions", options);
  cell.answer = response.headers.get("content-location").split("/")[2];
  await response.body.cancel();
}

/** A refused question is shown as one; the others go on. */
function refuse(cell, error) {
  if (error.name === "AbortError") throw error;
  cell.fail(error.message);
}

async function readAll(signal) {
  const byAnswer = new Map(cells.filter((cell) => cell.answer).map((cell) => [cell.answer, cell]));
  for await (const { answer, data } of mergedEvents([...byAnswer.keys()], signal)) {
    byAnswer.get(answer).hear(data);
  }
}

/** Reads which workers compute the cells, again whenever that may have changed. */
async function readWorkers(signal) {
  const readers = Array.from({ length: READERS }, async () => {
    while (!signal.aborted || cells.some((cell) => cell.isStale)) {
      const cell = cells.find((one) => one.isStale);
      if (cell) await readWorker(cell);
      if (!cell || cell.isStale) await new Promise((resolve) => setTimeout(resolve, READ_AGAIN_MS));
    }
  });
  await Promise.all(readers);
}

async function readWorker(cell) {
  cell.isStale = false;
  const runs = await readRuns(cell.answer);
  cell.place(runs);
  if (!runs.length && cell.isLive) cell.isStale = true;
}

async function halt() {
  const rest = cells.filter((cell) => cell.isLive && cell.answer);
  running?.abort();
  await Promise.allSettled(rest.map((cell) => ask(`/requests/${cell.answer}`, { method: "DELETE" })));
}

// --- what is said

function lose(process) {
  if (process.kind !== "worker" || !running) return;
  const struck = cells.filter((cell) => cell.lose(process));
  if (!struck.length) return;
  const name = nameOf(process.id);
  tell(`${name} died: ${plural(struck.length, "stream")} paused.`, "bad");
  awaitReturn({ name, struck, at_ms: performance.now() });
}

/** Says how many streams have gone on, until all have. */
async function awaitReturn({ name, struck, at_ms }) {
  let numBack = 0;
  while (running && numBack < struck.length) {
    await new Promise((resolve) => setTimeout(resolve, TICK_MS));
    const count = struck.filter((cell) => cell.dead === null && cell.state !== "failed").length;
    if (count === numBack) continue;
    numBack = count;
    const all = plural(struck.length, "stream");
    const which = numBack < struck.length ? `${numBack} of ${all}` : all;
    const seconds = ((performance.now() - at_ms) / 1000).toFixed(1);
    tell(`${name} died: ${which} went on within ${seconds} s, with no token lost.`, "good");
  }
}

function conclude() {
  const whole = cells.filter((cell) => cell.state === "done");
  const tokens = whole.reduce((total, cell) => total + cell.numTokens, 0);
  const hops = cells.reduce((total, cell) => total + cell.stretches.runs.length - 1, 0);
  const hopped = hops > 0 ? ` ${plural(hops, "hop")} to another worker, and no token lost.` : "";
  const all = whole.length === cells.length ? "All" : `${whole.length} of`;
  tell(`${all} ${cells.length} answers are whole: ${figure(tokens)} tokens.${hopped}`);
  look();
}

function tell(text, mood = "") {
  find("wall-says").dataset.mood = mood;
  say(find("wall-says"), text);
}

function show(isRunning) {
  const [former, shown] = isRunning ? [find("run"), find("halt")] : [find("halt"), find("run")];
  const focused = document.activeElement === former;
  [former.hidden, shown.hidden] = [true, false];
  if (focused) shown.focus();
}

// --- legend

const chips = new Map();

/** A chip for each worker: how many streams of the wall it has; in a demonstration it can be killed here. */
function showLegend(fleet) {
  const workers = fleet.processes.filter((one) => one.kind === "worker");
  const byName = new Map(workers.map((one) => [nameOf(one.id), one]));
  for (const name of [...byName.keys()].sort(compareNames)) {
    if (!chips.has(name)) {
      chips.set(name, chip(byName.get(name)));
      find("legend").append(chips.get(name).node);
    }
  }
  for (const [name, one] of chips) one.show(byName.get(name), fleet.demo);
}

function chip({ id }) {
  let process = null;
  const output = make("output");
  const button = make("button", { type: "button", className: "kill", hidden: true }, "Kill");
  button.onclick = () => (button.disabled = true, kill(process).catch(({ message }) => tell(message, "bad")));
  const node = make("li", { className: "chip" }, label(id), output, button);

  function show(latest, demo) {
    process = latest;
    const isReady = latest?.state === "ready";
    node.dataset.state = isReady || latest?.state === "asleep" ? latest.state : "away";
    button.hidden = !demo;
    button.disabled = !isReady;
    button.setAttribute("aria-label", `Kill ${nameOf(id)}`);
    count();
  }

  function count() {
    const held = cells.filter((cell) => cell.isLive && cell.stretches.worker === process?.id);
    const word = running ? plural(held.length, "stream") : "ready";
    say(output, process?.state === "ready" ? word : (process?.state ?? "gone"));
  }

  return { node, show, count };
}
