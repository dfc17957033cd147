// A cell of the wall: one answer as it streams in, its worker, and its pauses.

import { figure, make, plural, say } from "../dom.js";
import { tokenOf } from "../requests.js";
import { partsOf, showRibbon } from "../runs.js";
import { label, markOf, nameOf } from "../workers.js";
import { Stretches } from "./stretches.js";

const LEAST_SILENCE_MS = 900;
const USUAL_GAPS = 5;

export class Cell {
  /** `state` is `waiting`, `streaming`, `silent` (nobody knows why), `paused` (its worker died), `done` or
   * `failed`. */
  constructor(question, maxTokens, expected = null) {
    this.question = question;
    this.maxTokens = maxTokens;
    this.expected = expected;
    this.answer = null;
    const words = make("p", { className: "words" });
    this.frame = make("div", { className: "scroll" }, words);
    this.holder = make("span", { className: "holder" });
    this.figures = make("span", { className: "figures" });
    const foot = make("p", { className: "foot" }, this.holder, this.figures);
    this.ribbon = make("div", { className: "ribbon", "aria-hidden": "true" });
    this.node = make("li", { className: "cell" }, make("h3", {}, question), this.frame, this.ribbon, foot);
    this.stretches = new Stretches(words);
    /** When each token came. */
    this.times_ms = [];
    this.numChanged = 0;
    /** The worker that died under it, until another one has gone on; and how long each of these took. */
    this.dead = null;
    this.pauses_ms = [];
    this.gap_ms = 0;
    this.isStale = false;
    this.isStopped = false;
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
    const token = tokenOf(delta);
    if (token !== undefined) this.add(token);
    if (finish_reason) this.finish();
  }

  /** A paused cell may still get tokens of the worker that died: only its timeline tells when it goes on. */
  add(text) {
    const now_ms = performance.now();
    if (this.state === "waiting") this.begin(now_ms);
    if (this.state === "silent") {
      this.gap_ms = now_ms - this.heard_ms;
      this.mark("streaming");
    }
    if (this.dead) this.isStale = true;
    if (this.expected && text !== this.expected[this.numTokens]) this.numChanged += 1;
    this.heard_ms = now_ms;
    this.times_ms.push(now_ms);
    this.stretches.add(text);
    this.goOn();
    this.follow();
  }

  /** Tokens of the undisturbed answer that did not come; while it lives, they still may. */
  get numLost() {
    const isWhole = this.isLive || this.isStopped || !this.expected;
    return isWhole ? 0 : Math.max(0, this.expected.length - this.numTokens);
  }

  /** Whether it stands still since this process has died. */
  isHeldBy({ id, kind }) {
    return this.isLive && (kind === "worker" ? this.dead === id : this.state === "silent");
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

  /** Ends a pause once a token of the next worker is there. */
  goOn() {
    const last = this.stretches.runs.at(-1);
    if (!this.dead || last.worker === this.dead || this.numTokens <= last.begin) return;
    this.gap_ms = this.times_ms[last.begin] - (this.times_ms[last.begin - 1] ?? this.begun_ms);
    this.pauses_ms.push(this.gap_ms);
    this.dead = null;
    this.mark(this.isLive ? "streaming" : this.state);
  }

  /** Notes that its worker has died: it pauses until another one goes on. */
  lose(process) {
    if (!this.isLive || this.stretches.worker !== process.id) return false;
    this.dead = process.id;
    this.stretches.doubt();
    this.isStale = true;
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
    this.goOn();
    this.follow();
    this.show();
  }

  finish() {
    this.isStale = true;
    this.mark("done");
  }

  stop() {
    this.isStopped = true;
    this.fail("stopped");
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
    const paused_s = (this.pauses_ms.reduce((sum, pause_ms) => sum + pause_ms, 0) / 1000).toFixed(1);
    const tokens = plural(this.numTokens, "token");
    const short = this.pauses_ms.length ? `${this.numTokens} · ${paused_s} s late` : null;
    switch (this.state) {
      case "waiting":
        return "waits";
      case "paused":
        return `${markOf(this.dead)} ${nameOf(this.dead)} died, ${silence}`;
      case "silent":
        return `${this.numTokens} · silent ${silence}`;
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
