// A table of texts and elements; numbers stand at the right.

import { figure, make } from "../dom.js";

export function table(heads, rows) {
  const cell = (tag, value) => {
    const isNumber = typeof value === "number";
    return make(tag, { className: isNumber ? "number" : "" }, isNumber ? figure(value) : value);
  };
  const isNumber = (column) => rows.length > 0 && typeof rows[0][column] === "number";
  const head = heads.map((name, i) =>
    make("th", { scope: "col", className: isNumber(i) ? "number" : "" }, name),
  );
  const body = rows.map((row) => make("tr", {}, ...row.map((value) => cell("td", value))));
  const whole = make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body));
  return make("div", { className: "listing", tabIndex: 0, role: "group" }, whole);
}
