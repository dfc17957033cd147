// A cell of the wall: one answer as it streams in, its worker, and its pauses.

import { figure, make, plural, say } from "../dom.js";
import { partsOf, showRibbon } from "../runs.js";
import { label, markOf, nameOf } from "../workers.js";
import { Stretches } from "./stretches.js";

const LEAST_SILENCE_MS = 900;
const USUAL_GAPS = 5;

export class Cell {
  /** `state` is `waiting`, `streaming`, `silent` (nobody knows why), `paused` (its worker died), `done` or
   * `failed`. */
  constructor(question, maxTokens) {
    this.question = question;
    this.maxTokens = maxTokens;
    this.answer = null;
    const words = make("p", { className: "words" });
    this.frame = make("div", { className: "scroll" }, words);
    this.holder = make("span", { className: "holder" });
    this.figures = make("span", { className: "figures" });
    const foot = make("p", { className: "foot" }, this.holder, this.figures);
    this.ribbon = make("div", { className: "ribbon", "aria-hidden": "true" });
    this.node = make("li", { className: "cell" }, make("h3", {}, question), this.frame, this.ribbon, foot);
    this.stretches = new Stretches(words);
    this.pauses_ms = [];
    this.dead = null;
    this.isStale = false;
    this.ending = "";
    this.mark("waiting");
  }

  get isLive() {
    return ["waiting", "streaming", "silent", "paused"].includes(this.state);
  }

  get numTokens() {
    return this.stretches.tokens.length;
  }

  mark(state) {
    this.state = state;
    this.node.dataset.state = state;
    this.show();
  }

  /** Takes the data of a frame. */
  hear(data) {
    if (data === "[DONE]") return;
    const frame = JSON.parse(data);
    if (frame.error) return this.fail(frame.error.message ?? frame.error);
    const { delta, finish_reason } = frame.choices[0];
    if (typeof delta.content === "string" && delta.role === undefined) this.add(delta.content);
    if (finish_reason) this.finish();
  }

  add(text) {
    const now_ms = performance.now();
    if (["silent", "paused"].includes(this.state)) this.goOn(now_ms - this.heard_ms);
    if (this.state === "waiting") this.begin(now_ms);
    this.heard_ms = now_ms;
    this.stretches.add(text);
    this.follow();
  }

  follow() {
    this.frame.scrollTop = this.frame.scrollHeight;
    this.frame.classList.toggle("deep", this.frame.scrollTop > 0);
  }

  begin(now_ms) {
    this.begun_ms = now_ms;
    this.isStale = true;
    this.mark("streaming");
  }

  goOn(silence_ms) {
    if (this.dead) {
      this.pauses_ms.push(silence_ms);
      this.stretches.doubt();
    }
    this.isStale = true;
    this.dead = null;
    this.mark("streaming");
  }

  /** Notes that its worker has died: it pauses until another one goes on. */
  lose(process) {
    if (!this.isLive || this.stretches.worker !== process.id) return false;
    this.dead = process.id;
    this.heard_ms ??= performance.now();
    this.mark("paused");
    return true;
  }

  tick(now_ms) {
    if (this.state === "streaming") {
      const usual_ms = (this.heard_ms - this.begun_ms) / Math.max(1, this.numTokens - 1);
      const isSilent = now_ms - this.heard_ms > Math.max(LEAST_SILENCE_MS, USUAL_GAPS * usual_ms);
      if (isSilent) this.mark("silent");
    }
    this.show(now_ms);
  }

  /** Sets which workers computed its tokens. A worker that is new to it flashes once. */
  place(runs) {
    const worker = this.stretches.place(runs);
    if (worker === null) return;
    this.holder.replaceChildren(label(worker));
    this.node.classList.toggle("hopped", this.stretches.runs.length > 1);
    this.follow();
    this.show();
  }

  finish() {
    this.isStale = true;
    this.mark("done");
  }

  fail(why) {
    this.ending = why;
    this.mark("failed");
  }

  show(now_ms = performance.now()) {
    say(this.figures, this.words(now_ms));
    const most = this.state === "done" ? this.numTokens : this.maxTokens;
    showRibbon(this.ribbon, partsOf(this.stretches.runs, this.numTokens), most);
  }

  words(now_ms) {
    const silence = `${((now_ms - this.heard_ms) / 1000).toFixed(1)} s`;
    const paused = this.pauses_ms.map((pause_ms) => `paused ${(pause_ms / 1000).toFixed(1)} s`);
    const tokens = plural(this.numTokens, "token");
    const short = paused.length ? [this.numTokens, ...paused].join(" · ") : null;
    switch (this.state) {
      case "waiting":
        return "waits";
      case "paused":
        return `${markOf(this.dead)} ${nameOf(this.dead)} died, ${silence}`;
      case "silent":
        return `${tokens} · silent ${silence}`;
      case "failed":
        return this.ending;
      case "done":
        return `✓ ${short ?? tokens}`;
      default:
        return short ?? [tokens, ...this.speed(now_ms)].join(" · ");
    }
  }

  speed(now_ms) {
    const seconds = (now_ms - this.begun_ms) / 1000;
    return seconds > 1 ? [`${figure(this.numTokens / seconds)}/s`] : [];
  }
}
