// An answer of the chat as it streams in, with its figures and pauses, and the workers that computed it.

import { figure, make, plural, say } from "../dom.js";
import { look, on } from "../fleet.js";
import { partsOf, readRuns, showRibbon } from "../runs.js";
import { nameOf } from "../workers.js";
import { Markdown, withoutMarks } from "./markdown.js";

/** A silence of SILENCE_MS is shown. One of PAUSE_MS is a pause, shown if a process has died. */
const SILENCE_MS = 700;
const PAUSE_MS = 120;
/** A death explains a pause within this time of it. */
const RECENT_MS = 4000;
const CHECK_MS = 100;
const FIRST_LOOK_MS = 200;
/** A batcher notes within this time where an answer goes on. */
const RUNS_MS = 300;

/** The answer that streams now; it hears of processes that end. */
let current = null;
on("went", (process) => current?.lost(process));
on("killed", (process) => current?.lost(process));

export class Answer {
  constructor() {
    this.words = make("div", { className: "words markdown" });
    this.markdown = new Markdown(this.words);
    this.source = this.text = "";
    this.thought = make("div");
    const shown = { className: "thoughts", hidden: true, open: true };
    this.thoughts = make("details", shown, make("summary", {}, "Reasoning"), this.thought);
    this.ribbon = make("div", { className: "ribbon", role: "img", hidden: true });
    this.status = make("p", { className: "status", hidden: true });
    this.figures = make("p", { className: "figures" });
    const parts = [this.thoughts, this.words, this.status, this.ribbon, this.figures];
    this.node = make("article", { className: "turn model", "aria-label": "Answer" }, ...parts);
    this.node.dataset.state = "streaming";
    this.begun_ms = this.heard_ms = performance.now();
    this.first_ms = null;
    this.num_tokens = 0;
    this.dead = null;
    this.gap = null;
    this.pauses = [];
    this.heard_of = new Set();
    this.answer = null;
    this.runs = [];
    this.ticking = setInterval(() => this.tick(), CHECK_MS);
    current = this;
  }

  /** Notes the answer's id: its workers are asked for by it. */
  begin(answer) {
    this.answer = answer;
  }

  /** Shows which workers computed how much of it. */
  async readRuns() {
    if (!this.answer) return;
    this.runs = await readRuns(this.answer);
    this.showRuns();
  }

  showRuns() {
    const parts = partsOf(this.runs, this.num_tokens);
    this.ribbon.hidden = !this.runs.length;
    showRibbon(this.ribbon, parts, this.num_tokens);
    const words = parts
      .filter(({ worker }) => worker)
      .map(({ worker, count }) => `${nameOf(worker)} computed ${plural(count, "token")}`);
    this.ribbon.title = words.join(", then ");
    this.ribbon.setAttribute("aria-label", this.ribbon.title);
  }

  /** Takes a token of the answer, or of the reasoning before it. */
  add(text, isThought) {
    const now = performance.now();
    const silence_ms = now - this.heard_ms;
    if (this.first_ms === null) setTimeout(() => (look(), this.readRuns()), FIRST_LOOK_MS);
    this.first_ms ??= now;
    if (this.num_tokens && this.isLong(silence_ms, PAUSE_MS)) this.resumed(silence_ms);
    this.heard_ms = now;
    this.num_tokens += 1;
    if (isThought) this.think(text);
    else this.speak(text);
    this.status.hidden = true;
    this.show();
  }

  think(text) {
    this.thoughts.hidden = false;
    this.thought.append(text);
  }

  speak(text) {
    if (!this.text) this.thoughts.open = false;
    this.text += text;
    this.source += withoutMarks(text);
    this.markdown.show(this.source);
  }

  /** Whether a silence is longer than the pace of this answer explains. */
  isLong(silence_ms, least_ms) {
    const usual_ms = this.num_tokens > 1 ? (this.heard_ms - this.first_ms) / (this.num_tokens - 1) : 0;
    return silence_ms > Math.max(least_ms, 3 * usual_ms);
  }

  /** Marks the end of a pause; the death of a process explains it, known before or shortly after. */
  resumed(silence_ms) {
    const mark = make("span", { className: "resumed" });
    this.source += this.markdown.addMark(mark);
    setTimeout(() => this.readRuns(), RUNS_MS);
    this.gap = { mark, silence_ms, at_ms: performance.now(), token: this.num_tokens };
    if (this.dead && performance.now() - this.dead.at_ms < RECENT_MS + silence_ms) this.explain();
  }

  /** Notes the end of a process, once for each process that may have held this answer. */
  lost(process) {
    const { rows, active, streams, kind } = process;
    const matters = { worker: rows > 0, batcher: active, gateway: streams > 0, broker: true }[kind];
    if (!matters || this.heard_of.has(process.id)) return;
    this.heard_of.add(process.id);
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
    if (this.runs.length) this.showRuns();
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
    this.readRuns();
  }
}

const name = (process) => nameOf(process.id);
