// The text of an answer in stretches: each has the colour of the worker that computed its tokens. The first
// token of a later stretch has the worker's mark and name before it.

import { make } from "../dom.js";
import { colourOf, label, nameOf } from "../workers.js";

export class Stretches {
  constructor(node) {
    this.node = node;
    this.tokens = [];
    this.runs = [];
    this.doubtful = false;
    this.tail = null;
  }

  get text() {
    return this.tokens.join("");
  }

  get worker() {
    return this.doubtful ? null : (this.runs.at(-1)?.worker ?? null);
  }

  add(text) {
    this.tokens.push(text);
    this.tail ??= this.node.appendChild(make("span", { className: "stretch" }));
    this.tail.append(text);
  }

  /** From the next token on the worker is not known. */
  doubt() {
    this.doubtful = true;
    this.tail = null;
  }

  /** Sets the runs of all tokens so far. Returns the worker that is new, if there is one. */
  place(runs) {
    const last = runs.at(-1);
    const isNew = last && (last.worker !== this.runs.at(-1)?.worker || runs.length !== this.runs.length);
    if (!isNew) return null;
    this.runs = runs;
    this.doubtful = false;
    this.node.replaceChildren(...runs.flatMap((run, i) => this.stretch(run, i)));
    this.tail = this.node.lastElementChild;
    return last.worker;
  }

  stretch({ begin, worker }, place) {
    const end = this.runs[place + 1]?.begin ?? this.tokens.length;
    const text = this.tokens.slice(begin, end).join("");
    const title = `${nameOf(worker)} computed ${begin ? `tokens from ${begin + 1} on` : "the first tokens"}`;
    const span = make("span", { className: `stretch ${colourOf(worker)}`, title }, text);
    return place ? [label(worker), span] : [span];
  }
}
