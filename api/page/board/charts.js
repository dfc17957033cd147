// Charts of the last five minutes since the page was opened: tokens per second, the queue, the KV cache. A
// red line marks a process' end.

import { figure, find, make, say, svg } from "../dom.js";
import { on } from "../fleet.js";

const LEAST_S = 60;
const MOST_S = 300;
const WIDTH = 300;
const HEIGHT = 44;

/** `of` a snapshot is the figure. */
const STRIPS = [
  {
    name: "Tokens/s",
    of: (fleet) => sum(workers(fleet), "rate"),
    note: (fleet) => `${fleet.requests.running} running`,
    means: "Running: requests that a worker computes now. The figure is what all workers make together.",
    least: 10,
  },
  {
    name: "Queue",
    of: (fleet) => fleet.requests.waiting,
    note: (fleet) => `${figure(fleet.requests.live)} of ${figure(fleet.requests.limit)} live`,
    means:
      "Live: requests that wait or run, of the most that are admitted (MAX_CONCURRENT_REQUESTS). " +
      "The figure is those that wait.",
    least: 4,
  },
  {
    name: "KV cache",
    of: (fleet) => (100 * sum(workers(fleet), "blocks")) / (sum(workers(fleet), "num_blocks") || 1),
    note: blocks,
    means: "Blocks in which workers keep what they have computed of each token, in use of all there are.",
    least: 10,
    unit: "%",
  },
];

const workers = (fleet) => fleet.processes.filter((one) => one.kind === "worker");
const sum = (list, name) => list.reduce((total, one) => total + one[name], 0);

function blocks(fleet) {
  return `${figure(sum(workers(fleet), "blocks"))} of ${figure(sum(workers(fleet), "num_blocks"))}`;
}

export function startCharts() {
  const strips = STRIPS.map(strip);
  const deaths = [];
  let now_s = 0;
  find("charts").append(...strips.map((one) => one.node));
  on("went", () => deaths.push(now_s));
  on("seen", (fleet) => {
    now_s = fleet.time_s;
    strips.forEach((one) => one.add(fleet, deaths));
  });
}

function strip({ name, of, note, means, least, unit = "" }) {
  const value = make("output");
  const about = make("span", { className: "about" });
  const top = make("span", { className: "top-of-scale" });
  const [area, line, marks] = [svg("path", "area"), svg("path", "line"), svg("path", "mark")];
  const picture = svg("svg", "picture");
  picture.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  picture.setAttribute("preserveAspectRatio", "none");
  picture.setAttribute("role", "img");
  picture.append(area, line, marks);
  const since = make("span");
  const scale = make("div", { className: "scale" }, since, make("span", {}, "now"));
  const frame = make("div", { className: "frame" }, picture, top);
  const parts = [make("h3", {}, name), value, about, frame, scale];
  const node = make("article", { className: "strip", title: means }, ...parts);
  const points = [];

  function add(fleet, deaths) {
    const now_s = fleet.time_s;
    points.push([now_s, of(fleet)]);
    while (points[0][0] < now_s - MOST_S) points.shift();
    const span_s = Math.max(LEAST_S, now_s - points[0][0]);
    const most = roof(Math.max(least, ...points.map(([, height]) => height)));
    const x = (time_s) => (WIDTH * (1 - (now_s - time_s) / span_s)).toFixed(1);
    const y = (height) => (HEIGHT - (HEIGHT - 3) * (height / most) - 1).toFixed(1);
    const way = `M${points.map(([time_s, height]) => `${x(time_s)} ${y(height)}`).join("L")}`;
    const recent = deaths.filter((time_s) => time_s > now_s - span_s);
    line.setAttribute("d", way);
    area.setAttribute("d", `${way}L${x(now_s)} ${HEIGHT}L${x(points[0][0])} ${HEIGHT}Z`);
    marks.setAttribute("d", recent.map((time_s) => `M${x(time_s)} 0V${HEIGHT}`).join(""));
    tell(fleet, span_s, most);
  }

  function tell(fleet, span_s, most) {
    const figures = figure(of(fleet)) + unit;
    picture.setAttribute("aria-label", `${name}: now ${figures}`);
    say(since, span_s < 90 ? `${Math.round(span_s)} s ago` : `${(span_s / 60).toFixed(1)} min ago`);
    say(value, figures);
    say(about, note(fleet));
    say(top, figure(most) + unit);
  }

  return { node, add };
}

/** The next of 1, 2, 5, 10, 20 … */
function roof(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}
