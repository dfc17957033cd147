// The way of a token, drawn: requests from gateways over Redis to the batcher, plans to the workers, tokens
// back. Dots run faster where more passes: not one for each token.

import { figure, find, make, plural, svg } from "../dom.js";
import { on } from "../fleet.js";
import { colourOf, compareNames, markOf, nameOf } from "../workers.js";

const MAX_SHOWN = 5;
const ROW = 36;
const BOX = 30;
const DASH = 18;
const LEAST_HEIGHT = 128;
/** Narrower than this there is no room for words on the lines and for units. */
const ROOMY = 470;
/** A box without this room for each character leaves units out, and then the figure. */
const CHARACTER = 6.6;
const MARGINS = 24;
const calm = matchMedia("(prefers-reduced-motion: reduce)");

let latest = null;
/** Paths and boxes by key; they stay while their place does, so that no animation begins anew. */
let drawn = { shape: "", links: new Map(), boxes: new Map() };

export function startFlow() {
  on("seen", (fleet) => ((latest = fleet), draw()));
  on("went", () => latest && draw());
  new ResizeObserver(() => latest && draw()).observe(find("flow"));
}

function draw() {
  const groups = groupsOf(latest);
  const width = Math.max(280, find("flow").clientWidth);
  const shape = [width, ...Object.values(groups).flat().map((one) => one.key)].join();
  if (shape !== drawn.shape) build(groups, width, shape);
  for (const box of Object.values(groups).flat()) drawn.boxes.get(box.key)(box);
  for (const box of [...groups.gateways, ...groups.workers, ...groups.batchers]) flow(box);
  find("flow").firstElementChild.setAttribute("aria-label", describe(groups));
}

/** What is shown of each kind: boxes with a key, a text, a rate and a state. */
function groupsOf({ processes }) {
  const of = (kind) =>
    processes.filter((one) => one.kind === kind).sort((one, other) => compareNames(one.id, other.id));
  const broker = of("broker")[0];
  return {
    gateways: few(of("gateway").map(gateway), ""),
    broker: [{ key: "broker", name: "Redis", text: `${figure(broker?.commands_per_s ?? 0)}/s`, rate: 0 }],
    batchers: of("batcher").filter((one) => one.active).map(batcher).slice(0, 1),
    workers: few(of("worker").map(worker), "/s"),
  };
}

const gateway = ({ id, streams, state }) => {
  return { key: id, name: nameOf(id), text: plural(streams, "stream"), rate: streams, state };
};
const batcher = ({ id, rows, state }) => {
  return { key: id, name: nameOf(id), text: plural(rows, "row"), rate: rows, state };
};
const worker = ({ id, rate, state, age_s }) => {
  const isOff = state !== "ready" || age_s > 2;
  const text = isOff ? (state === "ready" ? "silent" : state) : `${figure(rate)} tokens/s`;
  const shown = isOff ? { rate: 0, state: state === "asleep" ? state : "off" } : { rate, state };
  return { key: id, name: `${markOf(id)} ${nameOf(id)}`, text, colour: colourOf(id), ...shown };
};

/** The first boxes, and one for all others. */
function few(boxes, unit) {
  if (boxes.length <= MAX_SHOWN) return boxes;
  const rest = boxes.slice(MAX_SHOWN - 1);
  const rate = rest.reduce((total, one) => total + one.rate, 0);
  const name = `${rest.length} more`;
  return [...boxes.slice(0, MAX_SHOWN - 1), { key: name, name, text: figure(rate) + unit, rate }];
}

function describe({ gateways, broker, batchers, workers }) {
  const list = (boxes) => boxes.map((one) => `${one.name} ${one.text}`).join(", ") || "none";
  return (
    `The way of a token. Gateways: ${list(gateways)}. ${list(broker)}. ` +
    `Active batcher: ${list(batchers)}. Workers: ${list(workers)}.`
  );
}

// --- drawing

function build({ gateways, broker, batchers, workers }, width, shape) {
  const height = Math.max(LEAST_HEIGHT, ROW * Math.max(gateways.length, workers.length) + 8);
  const side = Math.min(138, Math.max(92, width * 0.24));
  const middle = Math.min(112, side);
  const picture = svg("svg", "way");
  picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  picture.setAttribute("role", "img");
  drawn = { shape, links: new Map(), boxes: new Map() };
  const centre = { x: (width - middle) / 2, y: height * 0.3 - BOX / 2, width: middle };
  const below = { x: centre.x, y: height - BOX - 3, width: middle };
  const column = (x, boxes) =>
    boxes.map((box, i) => ({ box, x, y: (height * (i + 0.5)) / boxes.length - BOX / 2, width: side }));
  const left = column(1, gateways);
  const right = column(width - side - 1, workers);
  for (const place of left) link(picture, place.box, edge(place, 1), edge(centre, 0));
  for (const place of right) link(picture, place.box, edge(place, 0), edge(centre, 1), place.box.colour);
  for (const box of batchers) linkDown(picture, box, centre, below);
  const middles = [{ box: broker[0], ...centre }, ...batchers.map((box) => ({ box, ...below }))];
  for (const place of [...left, ...middles, ...right]) picture.append(boxAt(place));
  if (width >= ROOMY && left.length && right.length) words(picture, side, centre, width, below);
  find("flow").replaceChildren(picture);
}

const edge = ({ x, y, width }, side) => ({ x: x + side * width, y: y + BOX / 2 });

/** Two lines between a process and Redis: towards Redis, and back. */
function link(picture, box, from, to, colour = "") {
  const bend = (from.x + to.x) / 2;
  const curve = (shift) =>
    `M${from.x} ${from.y + shift}C${bend} ${from.y + shift} ${bend} ${to.y + shift} ${to.x} ${to.y + shift}`;
  drawn.links.set(box.key, [line(picture, curve(-4), colour, 1), line(picture, curve(4), colour, -1)]);
}

function linkDown(picture, box, above, below) {
  const x = above.x + above.width / 2;
  const down = (shift) => `M${x + shift} ${above.y + BOX}V${below.y}`;
  drawn.links.set(box.key, [line(picture, down(-5), "", 1), line(picture, down(5), "", -1)]);
}

/** A line with dots on it that run forwards (1) or backwards. Returns what sets their speed. */
function line(picture, way, colour, direction) {
  const [under, dots] = [svg("path", "track"), svg("path", `dots ${colour}`)];
  for (const path of [under, dots]) path.setAttribute("d", way);
  picture.append(under, dots);
  const frames = { strokeDashoffset: [0, -direction * DASH] };
  const run = dots.animate(frames, { duration: 1000, iterations: Infinity });
  return (rate) => {
    dots.classList.toggle("still", rate <= 0);
    const speed = rate > 0 && !calm.matches ? 0.4 + Math.log10(1 + rate) : 0;
    run.updatePlaybackRate(speed);
  };
}

function flow({ key, rate }) {
  for (const setSpeed of drawn.links.get(key)) setSpeed(rate);
}

function boxAt({ box, x, y, width }) {
  const group = svg("g", `box ${box.colour ?? ""}`);
  const frame = svg("rect", "");
  const sizes = { x, y, width, height: BOX, rx: 7 };
  for (const [name, value] of Object.entries(sizes)) frame.setAttribute(name, value);
  const [name, text] = [svg("text", "name"), svg("text", "text")];
  for (const node of [name, text]) node.setAttribute("y", y + BOX / 2 + 4);
  name.setAttribute("x", x + 9);
  text.setAttribute("x", x + width - 9);
  group.append(frame, name, text);
  drawn.boxes.set(box.key, (now) => {
    name.textContent = now.name;
    const room = (width - MARGINS) / CHARACTER - now.name.length;
    const brief = now.text.replace(/ tokens| streams?| rows?/, ""); // digits are narrow
    text.textContent = now.text.length < room ? now.text : brief.length < room + 2 ? brief : "";
    group.dataset.state = now.state ?? "";
    group.classList.toggle("busy", now.rate > 0);
  });
  return group;
}

/** What passes on each pair of lines. */
function words(picture, side, centre, width, below) {
  const put = (x, y, text, anchor = "middle") => {
    const node = svg("text", "word");
    node.setAttribute("x", x);
    node.setAttribute("y", y);
    node.setAttribute("text-anchor", anchor);
    node.textContent = text;
    picture.append(node);
  };
  const [first, second] = [(side + centre.x) / 2, width - (side + centre.x) / 2];
  const y = centre.y + BOX / 2;
  put(first, Math.min(y - 12, 14), "requests →");
  put(first, below.y + BOX - 6, "← tokens");
  put(second, Math.min(y - 12, 14), "plans →");
  put(second, below.y + BOX - 6, "← tokens");
}
