// Markdown of answers, as DOM nodes: headings, lists, code, quotes, tables, emphasis, links. A model's text
// never becomes markup: there is no innerHTML, HTML is shown as text, and links lead to the web or mail only.

import { make } from "../dom.js";

/** Characters of `MARKS` stand for nodes that are put into the text; those of the model are left out. */
export const MARK = 0xe000;
const MARKS = /[\ue000-\uf8ff]/g;
/** What a line begins with, and a mark within it, which would hide what kind of line it is. */
const MARKED_BEGIN = /^[ \d#>*+.)-]*[\ue000-\uf8ff][ \d#>*+.)\ue000-\uf8ff-]*/gm;
const MAX_DEPTH = 6;
const MAX_INLINE = 8000;
const PROTOCOLS = ["http:", "https:", "mailto:"];

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const ITEM = /^( {0,9})([-*+]|\d{1,9}[.)])( +|$)(.*)$/;
const ROW = /^ {0,3}\|.*\|\s*$/;
const DELIMITERS = /^ {0,3}\|(?:\s*:?-+:?\s*\|)+\s*$/;
const INLINE = new RegExp(
  [
    "(?<code>(`+)(?!`)(?<inCode>[^]*?[^`])\\2(?!`))",
    "\\\\(?<escaped>[!-/:-@[-`{-~])",
    "\\*\\*(?=\\S)(?<strong>[^]*?\\S)\\*\\*",
    "~~(?=\\S)(?<gone>[^]*?\\S)~~",
    "\\*(?=[^\\s*])(?<em>[^*]*[^\\s*])\\*",
    "(?<![\\w_])_(?=[^\\s_])(?<low>[^_]*[^\\s_])_(?!\\w)",
    "!?\\[(?<label>[^\\[\\]]+)\\]\\((?<href>[^\\s()]+(?:\\([^\\s()]*\\)[^\\s()]*)?)\\)",
    "(?<url>https?://[^\\s<>()*`\"]*[^\\s<>()*`\".,;:!?'])",
    "(?<mark>[\\ue000-\\uf8ff])",
  ].join("|"),
  "u",
);

/** The model's text without characters that stand for marks. */
export const withoutMarks = (text) => text.replace(MARKS, "");

/** Shows a growing text in a node: blocks that have not changed stay. */
export class Markdown {
  constructor(node) {
    this.node = node;
    this.sources = [];
    this.marks = [];
  }

  /** Adds a node to the text where this character stands. */
  addMark(node) {
    this.marks.push(node);
    return String.fromCodePoint(MARK + this.marks.length - 1);
  }

  show(text) {
    const marksLast = (begin) => begin.replace(MARKS, "") + begin.match(MARKS).join("");
    const blocks = [...split(text.replace(MARKED_BEGIN, marksLast))];
    const same = blocks.findIndex(({ source }, i) => source !== this.sources[i]);
    const from = same < 0 ? blocks.length : same;
    while (this.node.children.length > from) this.node.lastElementChild.remove();
    for (const block of blocks.slice(from)) this.node.append(build(block, this.marks, 0));
    this.sources = blocks.map(({ source }) => source);
  }
}

// --- blocks

/** Yields the blocks of a text: kind, lines and source of each. */
function* split(text) {
  const lines = text.split("\n");
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const kind = kindOf(lines, at);
    const end = ENDS[kind](lines, at);
    const own = lines.slice(at, end);
    yield { kind, lines: own, source: `${kind}\n${own.join("\n")}` };
    at = end;
  }
}

function kindOf(lines, at) {
  const line = lines[at];
  if (FENCE.test(line)) return "code";
  if (HEADING.test(line)) return "heading";
  if (RULE.test(line)) return "rule";
  if (QUOTE.test(line)) return "quote";
  if (ITEM.test(line)) return "list";
  if (ROW.test(line) && DELIMITERS.test(lines[at + 1] ?? "")) return "table";
  return "paragraph";
}

/** The number of the line after a block that begins at `at`. */
const ENDS = {
  code(lines, at) {
    const [, fence] = FENCE.exec(lines[at]);
    const closes = (line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
    const end = lines.findIndex((line, i) => i > at && closes(line));
    return end < 0 ? lines.length : end + 1;
  },
  heading: (lines, at) => at + 1,
  rule: (lines, at) => at + 1,
  quote: (lines, at) => firstThat(lines, at, (line) => !QUOTE.test(line)),
  table: (lines, at) => firstThat(lines, at, (line) => !ROW.test(line)),
  paragraph: (lines, at) =>
    firstThat(lines, at, (line, i) => !line.trim() || kindOf(lines, i) !== "paragraph"),
  list(lines, at) {
    const goesOn = (line) => ITEM.test(line) || /^\s/.test(line);
    return firstThat(lines, at, (line, i) => {
      if (!line.trim()) return !goesOn(lines[i + 1] ?? "");
      return !goesOn(line) && (kindOf(lines, i) !== "paragraph" || !lines[i - 1].trim());
    });
  },
};

function firstThat(lines, at, ends) {
  const end = lines.findIndex((line, i) => i > at && ends(line, i));
  return end < 0 ? lines.length : end;
}

function build({ kind, lines }, marks, depth) {
  if (depth > MAX_DEPTH) return make("p", {}, lines.join("\n"));
  return BUILDERS[kind](lines, marks, depth);
}

const all = (text, marks, depth) => [...split(text)].map((block) => build(block, marks, depth + 1));

const BUILDERS = {
  paragraph: (lines, marks) => make("p", {}, ...inline(lines.join("\n").trim(), marks)),
  rule: () => make("hr"),
  quote: (lines, marks, depth) =>
    make("blockquote", {}, ...all(lines.map((line) => QUOTE.exec(line)[1]).join("\n"), marks, depth)),
  heading(lines, marks) {
    const [, level, text] = HEADING.exec(lines[0]);
    return make(`h${Math.min(6, level.length + 2)}`, {}, ...inline(text, marks));
  },
  code(lines) {
    const [, fence, language] = FENCE.exec(lines[0]);
    const isClosed = lines.length > 1 && lines.at(-1).trim().startsWith(fence);
    const text = lines.slice(1, isClosed ? -1 : undefined).join("\n");
    const code = make("code", {}, withoutMarks(text));
    return make("pre", { tabIndex: 0, "aria-label": `Code ${language.trim()}`.trim() }, code);
  },
  table(lines, marks) {
    const cells = (line, tag) =>
      line.trim().slice(1, -1).split("|").map((cell) => make(tag, {}, ...inline(cell.trim(), marks)));
    const head = make("thead", {}, make("tr", {}, ...cells(lines[0], "th")));
    const rows = lines.slice(2).map((line) => make("tr", {}, ...cells(line, "td")));
    return make("div", { className: "table" }, make("table", {}, head, make("tbody", {}, ...rows)));
  },
  list(lines, marks, depth) {
    const [, indent, marker] = ITEM.exec(lines[0]);
    const items = [];
    for (const line of lines) {
      const found = ITEM.exec(line);
      if (found && found[1].length <= indent.length + 1) items.push([found[4]]);
      else items.at(-1).push(line.slice(Math.min(line.search(/\S|$/), indent.length + marker.length + 1)));
    }
    const start = Number.parseInt(marker, 10);
    const own = items.map((item) => make("li", {}, ...itemNodes(item, marks, depth)));
    return Number.isNaN(start) ? make("ul", {}, ...own) : make("ol", { start }, ...own);
  },
};

/** An item's blocks; the first paragraph has no element of its own. */
function itemNodes(lines, marks, depth) {
  const [first, ...rest] = all(lines.join("\n"), marks, depth);
  return first?.tagName === "P" ? [...first.childNodes, ...rest] : [first, ...rest].filter(Boolean);
}

// --- texts

function inline(text, marks) {
  const nodes = [];
  let rest = text;
  while (rest && text.length < MAX_INLINE) {
    const found = INLINE.exec(rest);
    if (!found) break;
    nodes.push(rest.slice(0, found.index), ...inlineNode(found, marks));
    rest = rest.slice(found.index + found[0].length);
  }
  return [...nodes, rest].filter((node) => node !== "");
}

function inlineNode({ 0: whole, groups }, marks) {
  const { inCode, escaped, strong, gone, em, low, label, href, url, mark } = groups;
  if (inCode !== undefined) return [make("code", {}, withoutMarks(inCode).replace(/^ (.*) $/s, "$1"))];
  if (escaped) return [escaped];
  if (strong) return [make("strong", {}, ...inline(strong, marks))];
  if (gone) return [make("s", {}, ...inline(gone, marks))];
  if (em ?? low) return [make("em", {}, ...inline(em ?? low, marks))];
  if (mark) return [marks[mark.codePointAt(0) - MARK]].filter(Boolean);
  return link(href ?? url, label ? inline(label, marks) : [url], whole);
}

/** A link, or its text as it stands if it leads to no place on the web. */
function link(href, children, whole) {
  const address = withoutMarks(href);
  if (!URL.canParse(address) || !PROTOCOLS.includes(new URL(address).protocol)) return [whole];
  return [make("a", { href: address, rel: "noopener noreferrer nofollow", target: "_blank" }, ...children)];
}
