// The wall: sixteen answers at once, each stretch of tokens in the colour of its worker. Kill a worker, and
// its streams pause, hop to another one, and go on. Answers of a run in which nothing dies are kept: each
// token of later runs is compared with them.

import { figure, find, make, plural, say } from "../dom.js";
import { kill, look, on } from "../fleet.js";
import { ask, comeBack, mergedEvents } from "../requests.js";
import { readRuns } from "../runs.js";
import { compareNames, label, nameOf, placeOf } from "../workers.js";
import { Cell } from "./cell.js";
import { isChaos, startChaos } from "./chaos.js";

/** The model that `tokenfleet serve` starts with answers these without going round in circles. */
const QUESTIONS = [
  "Why is the sky blue?",
  "What is a black hole?",
  "What is gravity?",
  "What is a comet?",
  "How do birds fly?",
  "What is a galaxy?",
  "What is DNA?",
  "What is music?",
  "What is the moon?",
  "What is a robot?",
  "What is electricity?",
  "What is a tsunami?",
  "What is a vaccine?",
  "What is evolution?",
  "What is jazz music?",
  "What is a volcano?",
];
const MAX_TOKENS = 180;
/** How long the fleet goes on without this page. */
const RESUME_S = 30;
const TICK_MS = 100;
const READ_AGAIN_MS = 150;
const READERS = 3;
/** How long the end of a run is shown before the next one. */
const SHOWN_MS = 2000;

let cells = [];
let running = null;
/** The tokens of each answer as nothing disturbed them, once they are known. */
let undisturbed = null;
/** The last process that died in this run, and the cells that it held up. */
let death = null;
const dead = new Set();
/** Of the earlier runs that were compared. */
const compared = { tokens: 0, lost: 0, changed: 0 };

export function startWall() {
  find("run").onclick = run;
  find("halt").onclick = halt;
  find("wall").append(...QUESTIONS.map((question) => new Cell(question, MAX_TOKENS).node));
  startChaos({
    begin: () => running || run(),
    isDue: () => running && undisturbed && cells.every((cell) => !cell.isLive || cell.state === "streaming"),
    failed: (why) => tell(why, "bad"),
  });
  on("seen", showLegend);
  on("went", lose);
  on("killed", lose);
  on("came", restore);
}

/** One run; with chaos one after the other. */
async function run() {
  running = new AbortController();
  const { signal } = running;
  show(true);
  do await answerAll(signal);
  while (isChaos() && !signal.aborted);
  running = null;
  show(false);
}

async function answerAll(signal) {
  death = null;
  cells = QUESTIONS.map((question, i) => new Cell(question, MAX_TOKENS, undisturbed?.[i]));
  find("wall").replaceChildren(...cells.map((cell) => cell.node));
  const isFirst = isChaos() && !undisturbed;
  tell(isFirst ? "First undisturbed, to compare with." : `${cells.length} streams run.`);
  const ticking = setInterval(tick, TICK_MS);
  const reading = readWorkers();
  try {
    await Promise.all(cells.map((cell) => begin(cell, signal).catch((error) => refuse(cell, error))));
    await readAll(signal);
  } catch (error) {
    const end = error.name === "AbortError" ? (cell) => cell.stop() : (cell) => cell.fail(error.message);
    cells.filter((cell) => cell.isLive).forEach(end);
  }
  await reading;
  clearInterval(ticking);
  conclude();
  if (isChaos() && !signal.aborted) await new Promise((resolve) => setTimeout(resolve, SHOWN_MS));
}

function tick() {
  for (const cell of cells) if (cell.isLive) cell.tick(performance.now());
  for (const one of chips.values()) one.count();
  if (death) tellDeath();
  tellTally();
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
  const response = await comeBack("/v1/chat/completions", options);
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
async function readWorkers() {
  const readers = Array.from({ length: READERS }, async () => {
    while (cells.some((cell) => cell.isLive || cell.isStale)) {
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
  if (!running || dead.has(process.id)) return;
  dead.add(process.id);
  if (process.kind === "worker") cells.forEach((cell) => cell.lose(process));
  death = { process, struck: new Set() };
}

/** A process that is there again with its old id was only silent. */
function restore({ id }) {
  if (!dead.delete(id) || death?.process.id !== id) return;
  death = null;
  tell(`${nameOf(id)} was silent, and is there again.`);
}

/** Says what became of the streams that the last death held up, as their cells have it. */
function tellDeath() {
  const { process, struck } = death;
  cells.filter((cell) => cell.isHeldBy(process)).forEach((cell) => struck.add(cell));
  const back = [...struck].filter((cell) => !cell.isHeldBy(process) && cell.state !== "failed");
  const [name, all] = [nameOf(process.id), plural(struck.size, "stream")];
  if (!struck.size) return tell(`${name} died: no stream waits.`);
  if (!back.length) return tell(`${name} died: ${all} paused.`, "bad");
  if (back.length < struck.size) return tell(`${name} died: ${back.length} of ${all} went on.`, "bad");
  const longest_s = Math.max(...back.map((cell) => cell.gap_ms)) / 1000;
  tell(`${name} died: ${all} went on, after ${longest_s.toFixed(1)} s at most.`, "good");
}

/** What was compared with the undisturbed answers: earlier runs and this one. */
function tally() {
  const own = cells.filter((cell) => cell.expected);
  const sum = (of) => own.reduce((total, cell) => total + of(cell), 0);
  return {
    tokens: compared.tokens + sum((cell) => cell.numTokens),
    lost: compared.lost + sum((cell) => cell.numLost),
    changed: compared.changed + sum((cell) => cell.numChanged),
  };
}

function tellTally() {
  find("tally").hidden = !undisturbed;
  for (const [name, value] of Object.entries({ ...tally(), killed: dead.size })) {
    say(find(`tally-${name}`), figure(value));
    find(`tally-${name}`).dataset.mood = value && ["lost", "changed"].includes(name) ? "bad" : "";
  }
}

function conclude() {
  const whole = cells.filter((cell) => cell.state === "done");
  const tokens = whole.reduce((total, cell) => total + cell.numTokens, 0);
  const hops = cells.reduce((total, cell) => total + Math.max(0, cell.stretches.runs.length - 1), 0);
  const hopped = hops > 0 ? ` ${plural(hops, "hop")} to another worker.` : "";
  const isWhole = whole.length === cells.length;
  const all = isWhole ? "All" : `${whole.length} of`;
  tell(`${all} ${cells.length} answers are whole: ${figure(tokens)} tokens.${hopped}`, isWhole ? "good" : "");
  Object.assign(compared, tally());
  cells.forEach((cell) => (cell.expected = null));
  if (!death && isWhole) undisturbed ??= cells.map((cell) => cell.stretches.tokens);
  tellTally();
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
  const byPlace = new Map(workers.map((one) => [placeOf(one.id), one]));
  for (const place of [...byPlace.keys()].sort(compareNames)) {
    if (!chips.has(place)) {
      chips.set(place, chip(byPlace.get(place)));
      find("legend").append(chips.get(place).node);
    }
  }
  for (const [place, one] of chips) one.show(byPlace.get(place), fleet.demo);
}

function chip({ id }) {
  let process = null;
  const output = make("output");
  const button = make("button", { type: "button", className: "kill", hidden: true }, "Kill");
  button.onclick = () => (button.disabled = true, kill(process).catch(({ message }) => tell(message, "bad")));
  const name = label(id);
  const node = make("li", { className: "chip" }, name, output, button);

  function show(latest, demo) {
    process = latest;
    say(name.lastChild, nameOf(id));
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
