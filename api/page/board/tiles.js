// The processes: a tile for each. A process that restarts takes the tile of its predecessor, so that no
// button moves under the pointer.

import { bytes, figure, find, make, plural, say } from "../dom.js";
import { kill, on } from "../fleet.js";
import { note } from "./log.js";
import { colourOf, compareNames, label, nameOf, placeOf } from "../workers.js";

const SILENT_S = 2;
const LINGER_MS = 30_000;
const ORDER = ["worker", "batcher", "gateway", "broker"];
const OVER = ["silent", "killed", "gone"];
const DEAD = ["killed", "gone"];

const DIALS = [
  { label: "rows", name: "rows", limit: "max_rows", means: "Requests that it computes now, of its most" },
  {
    label: "KV",
    name: "blocks",
    limit: "num_blocks",
    means: "Blocks of its KV cache that these requests hold, of all",
  },
];

/** Tiles by process id; and the ids of processes whose successor has their tile. */
const tiles = new Map();
const replaced = new Set();

export function startTiles() {
  on("seen", (fleet) => {
    for (const process of fleet.processes) {
      if (!replaced.has(process.id)) tileOf(process).show(process, fleet.demo);
    }
    arrange();
  });
  on("went", (process) => tiles.get(process.id)?.end());
  on("killed", (process) => tiles.get(process.id)?.mark("killed"));
  on("lost", () => tiles.forEach((tile) => tile.lose()));
}

function tileOf(process) {
  if (tiles.has(process.id)) return tiles.get(process.id);
  const left = [...tiles.values()].find((tile) => tile.isFor(process));
  if (left) {
    replaced.add(left.process.id);
    tiles.delete(left.process.id);
    left.renew();
  }
  tiles.set(process.id, left ?? tile(process));
  return tiles.get(process.id);
}

/** Moves only what is out of place: a button keeps its focus. */
function arrange() {
  const rank = ({ process }) => `${ORDER.indexOf(process.kind)} ${process.id}`;
  const sorted = [...tiles.values()].sort((one, other) => compareNames(rank(one), rank(other)));
  sorted.forEach(({ node }, place) => {
    const there = find("tiles").children[place];
    if (there !== node) find("tiles").insertBefore(node, there ?? null);
  });
}

function tile(process) {
  const state = make("span", { className: "state" });
  const foot = make("p", { className: "foot" });
  const [value, unit] = [make("output"), make("span")];
  const isWorker = process.kind === "worker";
  const name = isWorker ? label(process.id) : make("span", {}, nameOf(process.id));
  const title = make("h3", {}, name, make("small", {}, process.kind));
  const dials = isWorker ? DIALS.map(dial) : [];
  const button = make("button", { type: "button", className: "kill", hidden: true }, "Kill");
  const node = make(
    "li",
    { className: `tile ${isWorker ? colourOf(process.id) : ""}`, "data-kind": process.kind },
    title,
    state,
    make("p", { className: "main-figure" }, value, unit),
    foot,
    make("div", { className: "dials" }, ...dials.map((one) => one.node)),
    button,
  );
  const self = { node, process, show, mark, lose, end, isFor, isLike, renew };
  button.onclick = () => press(button, self.process);

  function show(latest, demo) {
    self.process = latest;
    say(name.lastChild, nameOf(latest.id));
    title.title = [latest.id, latest.host, `pid ${latest.pid}`, latest.dtype].filter(Boolean).join(", ");
    button.hidden = !demo;
    button.setAttribute("aria-label", `Kill ${latest.kind} ${latest.id}`);
    const isSilent = latest.age_s > SILENT_S;
    if (node.dataset.state !== "killed") mark(isSilent ? "silent" : latest.state);
    const [main, about] = mainFigure(latest);
    say(value, main);
    say(unit, about);
    dials.forEach((one) => one.set(latest));
    say(foot, footnote(latest));
    node.classList.toggle("busy", latest.rows > 0 && latest.kind === "worker");
  }

  function mark(word) {
    node.dataset.state = word;
    button.disabled = word === "unknown" || DEAD.includes(word);
    say(state, word === "silent" ? `silent for ${self.process.age_s.toFixed(0)} s` : word);
  }

  function lose() {
    if (!DEAD.includes(node.dataset.state)) mark("unknown");
  }

  function end() {
    mark("gone");
    say(value, "–");
    dials.forEach((one) => one.clear());
    const id = self.process.id;
    const hasSuccessor = [...tiles.values()].some((tile) => tile !== self && tile.isLike(self.process));
    const leave = () => {
      if (self.process.id !== id) return;
      node.remove();
      tiles.delete(id);
    };
    setTimeout(leave, hasSuccessor ? 0 : LINGER_MS);
  }

  function isLike(other) {
    const { kind, id } = self.process;
    return kind === other.kind && placeOf(id) === placeOf(other.id);
  }

  /** Whether this tile's process has ended, and the other one is its successor. */
  function isFor(other) {
    return OVER.includes(node.dataset.state) && isLike(other);
  }

  function renew() {
    node.dataset.state = "";
    node.classList.remove("new");
    requestAnimationFrame(() => node.classList.add("new"));
  }

  return self;
}

function mainFigure(process) {
  switch (process.kind) {
    case "worker":
      return [figure(process.rate), "tokens/s"];
    case "batcher":
      if (!process.active) return ["–", process.state];
      return [figure(process.waiting), `waiting, ${plural(process.rows, "row")}`];
    case "gateway":
      return [figure(process.streams), process.streams === 1 ? "stream" : "streams"];
    default:
      return [figure(process.commands_per_s), "commands/s"];
  }
}

function footnote(process) {
  switch (process.kind) {
    case "worker":
      return [process.device, cached(process)].filter(Boolean).join(" · ");
    case "broker":
      return `${bytes(process.memory_bytes)} · ${plural(process.clients, "client")}`;
    default:
      return `pid\u00a0${process.pid}`;
  }
}

/** The part of its rows' first tokens that a worker had in its prefix cache. */
function cached({ known, cached }) {
  return cached ? `${Math.round((100 * cached) / known)}% cached` : "";
}

function dial({ label, name, limit, means }) {
  const [fill, count] = [make("i"), make("span")];
  const meter = { className: "track", role: "meter", "aria-label": label, "aria-valuemin": "0" };
  const track = make("div", meter, fill);
  const node = make("div", { className: "dial", title: means }, make("span", {}, label), count, track);

  function set(process) {
    const [value, most] = [process[name], process[limit]];
    fill.style.width = `${most ? Math.min(100, (100 * value) / most) : 0}%`;
    fill.hidden = value === 0;
    track.setAttribute("aria-valuenow", value);
    track.setAttribute("aria-valuemax", most);
    say(count, most ? `${figure(value)} / ${figure(most)}` : "–");
  }

  function clear() {
    fill.hidden = true;
    track.removeAttribute("aria-valuenow");
    say(count, "–");
  }

  return { node, set, clear };
}

async function press(button, process) {
  button.disabled = true;
  try {
    await kill(process);
  } catch (error) {
    button.disabled = false;
    note(error.message, "bad");
  }
}
