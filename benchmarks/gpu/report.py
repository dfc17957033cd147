"""Writes FOLDER/report.md from what benchmarks/gpu/run.sh left there: `python -m benchmarks.gpu.report
FOLDER`. Whatever is missing is said to be missing.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu import ratios

LAST_LINES = 12
"""Of the log of an item that failed."""
MOST_LINES = 80
TEST = re.compile(r"^(?:FAILED|ERROR) (\S+)(?: - (.*))?$", re.M)
COUNTED = re.compile(r"(\d+) (passed|failed|skipped|deselected|errors?|xfailed)\b")
RUNNING = re.compile(r"^(tests/\S+::\S+)", re.M)
GRID = re.compile(r"^ *(\d+) rows at +(\d+): step +([\d.]+) ms, [\d.]+ of the floor \(([\d.]+) ms\)", re.M)
STRUCTURED = re.compile(r"^ *(\d+) streams: (\d+) → (\d+) \(([\d.]+)\)", re.M)
LOAD = re.compile(r"streams=(\d+) in=(\d+) out=(\d+)( sampled)?")
TIME, TOKENS = "Median TPOT (ms)", "Output token throughput (tok/s)"
"""Time between tokens is an answer's time divided by its tokens. The median gap would flatter a server that
sends the tokens of two steps together.
"""

Loads = dict[tuple[str, str], float]
"""By load and figure, as benchmarks/gpu/ratios.py reads them."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one figure of the servers must be: `ratio` times vLLM's, at most for times, at least for rates."""

    model: str
    streams: int
    figure: str
    ratio: float


WANTED = (
    Wanted("m8", 1, TIME, 0.92),
    Wanted("m8", 256, TOKENS, 1.1),
    Wanted("m8-fp8", 256, TOKENS, 1.25),
    Wanted("m135", 1, TIME, 0.85),
    Wanted("m135", 256, TOKENS, 2.0),
)
STRUCTURED_SHARE = 0.95
"""Least tokens/s of 32 streams with a schema, as a share of those without."""


class Folder:
    """What a run left: logs, and how each item ended."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def text(self, name: str) -> str:
        file = self.path / name
        return file.read_text(errors="replace") if file.exists() else ""

    def names(self, pattern: str) -> list[str]:
        """The files of this pattern without their last suffix, the oldest first."""
        files = sorted(self.path.glob(pattern), key=lambda file: (file.stat().st_mtime, file.name))
        return [file.stem for file in files]

    def items(self) -> list[str]:
        logs = [name for name in self.names("*.log") if name != "report" and not name.endswith(".server")]
        return list(dict.fromkeys([*logs, *(name for name in self.names("*.done") if name != "models")]))

    def end_of(self, item: str) -> tuple[int | None, str]:
        """An item's exit status, None if it was cut off, and how it ended."""
        words = self.text(f"{item}.done").split()
        if len(words) != 2:
            return None, "cut off, or still running"
        status, seconds = int(words[0]), words[1]
        why = {0: "ok", 124: "over its time limit", 137: "killed at its time limit"}
        return status, f"{why.get(status, f'exit status {status}')} after {seconds} s"

    def last_lines(self, item: str, count: int = LAST_LINES) -> list[str]:
        return self.text(f"{item}.log").rstrip().splitlines()[-count:]


# --- sections ----------------------------------------------------------------------------------------------


def report(folder: Folder) -> str:
    sections = (
        summary(folder),
        wanted_table(folder),
        tests(folder),
        all_loads(folder),
        printed(folder),
        failures(folder),
    )
    return "\n".join(line for section in sections for line in section) + "\n"


def summary(folder: Folder) -> Iterator[str]:
    yield from ("# What this machine showed", "")
    ends = {item: folder.end_of(item)[0] for item in folder.items()}
    good = sum(status == 0 for status in ends.values())
    cut = [item for item, status in ends.items() if status is None]
    bad = [item for item, status in ends.items() if status]
    yield f"{len(ends)} items were begun: {good} are ok, {len(bad)} failed, {len(cut)} were cut off."
    if bad:
        yield f"Failed: {', '.join(bad)}."
    if cut:
        yield f"Cut off, or still running; call run.sh again: {', '.join(cut)}."
    if down := folder.names("*.failed"):
        yield f"Servers that did not start: {', '.join(down)} (NAME.server.log)."
    yield ""


def tests(folder: Folder) -> Iterator[str]:
    yield from ("## Tests", "")
    files = [item for item in folder.items() if item.startswith("test_")]
    rows = []
    for item in files:
        log = folder.text(f"{item}.log")
        counts = counts_of(log)
        rows.append(
            [
                f"tests/gpu/{item}.py",
                *(counts.get(name, "") for name in ("passed", "failed", "error", "skipped")),
                folder.end_of(item)[1],
            ]
        )
    yield from table(["file", "passed", "failed", "errors", "skipped", "ended"], rows)
    for item in files:
        yield from failed_tests(folder, item)


def failed_tests(folder: Folder, item: str) -> Iterator[str]:
    """The tests of a file that failed, each with its reason; the one that ran when the file was cut off."""
    log = folder.text(f"{item}.log")
    for name, why in TEST.findall(log):
        yield f"- `{name}`: {why or 'no reason is given'}"
    if folder.end_of(item)[0] in (None, 124, 137) and (names := RUNNING.findall(log)):
        yield f"- `{names[-1]}` ran when {item}.py was cut off"
    yield ""


def wanted_table(folder: Folder) -> Iterator[str]:
    """The one table: what was wanted, and whether it was met."""
    yield from ("## What was wanted", "")
    rows = []
    for one in WANTED:
        ours, theirs = figures(folder, f"ours-{one.model}"), figures(folder, f"vllm-{one.model}")
        loads = [load for load, figure in {**ours, **theirs} if figure == one.figure]
        loads = [load for load in dict.fromkeys(loads) if is_wanted(load, one.streams)]
        rows += [wanted_row(folder, one, load, ours, theirs) for load in loads]
        if not loads:
            rows.append(
                [one.model, f"streams={one.streams}", one.figure, *["–"] * 4, bound(one), "not measured"]
            )
    rows += structured_rows(folder)
    yield from table(
        ["model", "load", "figure", "ours", "vLLM's", "floor", "ours / vLLM's", "wanted", "met?"], rows
    )
    yield "TPOT is an answer's time divided by its tokens: tokens of two steps may come together."
    yield "The floor is that of the decode steps alone: prompts are not in it."
    yield ""


def wanted_row(folder: Folder, one: Wanted, load: str, ours: Loads, theirs: Loads) -> list[str]:
    our, their = ours.get((load, one.figure)), theirs.get((load, one.figure))
    ratio = our / their if our is not None and their else None
    met = (
        "not measured"
        if ratio is None
        else yes(ratio <= one.ratio if one.figure == TIME else ratio >= one.ratio)
    )
    floor = floor_of(folder, one.model, load, one.figure)
    return [
        one.model,
        load,
        one.figure,
        shown(our),
        shown(their),
        shown(floor),
        shown(ratio),
        bound(one),
        met,
    ]


def is_wanted(load: str, streams: int) -> bool:
    """Greedy ones: sampled ones are in the table of all loads."""
    found = LOAD.fullmatch(load)
    return found is not None and int(found[1]) == streams and not found[4]


def bound(one: Wanted) -> str:
    return f"{'≤' if one.figure == TIME else '≥'} {one.ratio:g}"


def structured_rows(folder: Folder) -> Iterator[list[str]]:
    """Of each server: tokens/s with a schema as a share of those without."""
    for item in folder.items():
        if item.endswith("-structured"):
            found = {line[0]: line for line in STRUCTURED.findall(folder.text(f"{item}.log"))}
            if (line := found.get("32")) is None:
                continue
            share, ours = float(line[3]), item.startswith("ours-")
            figure = f"tokens/s, {line[1]} without a schema, {line[2]} with one"
            cells = [line[3], "–", "–"] if ours else ["–", line[3], "–"]
            name = item.removeprefix("ours-").removeprefix("vllm-").removesuffix("-structured")
            wanted = (
                (f"≥ {STRUCTURED_SHARE:g} of its own", yes(share >= STRUCTURED_SHARE)) if ours else ("–", "–")
            )
            yield [name, "streams=32 structured", figure, *cells, "–", *wanted]


def figures(folder: Folder, server: str) -> Loads:
    """All figures of a server, of the loads that are over."""
    found: Loads = {}
    for item in folder.items():
        if re.fullmatch(re.escape(server) + r"-\d+,\d+,\d+,\d+(-sampled)?", item):
            found |= ratios.read(folder.path / f"{item}.log")
    return found


def floor_of(folder: Folder, model: str, load: str, figure: str) -> float | None:
    """The floor of a load's decode steps, measured at its mean context: ms, or tokens/s."""
    found = LOAD.fullmatch(load)
    assert found
    streams, context = int(found[1]), int(found[2]) + int(found[3]) // 2
    grid = [line for line in GRID.findall(folder.text(f"engine-{model}.log")) if int(line[0]) == streams]
    near = [line for line in grid if abs(int(line[1]) - context) <= 32]
    if not near or model.endswith("fp8"):  # the floors there are those of bfloat16
        return None
    floor_ms = float(near[0][3])
    return floor_ms if figure == TIME else streams / floor_ms * 1e3


def all_loads(folder: Folder) -> Iterator[str]:
    yield from ("## All loads", "")
    servers = {
        item.removeprefix(kind)
        for item in folder.items()
        for kind in ("ours-", "vllm-")
        if item.startswith(kind)
    }
    models = sorted({re.sub(r"-(structured|\d+,.*)$", "", server) for server in servers})
    rows = []
    for model in models:
        ours, theirs = figures(folder, f"ours-{model}"), figures(folder, f"vllm-{model}")
        for load, figure in dict.fromkeys((*ours, *theirs)):
            our, their = ours.get((load, figure)), theirs.get((load, figure))
            ratio = our / their if our is not None and their else None
            rows.append([model, load, figure, shown(our), shown(their), shown(ratio)])
    yield from table(["model", "load", "figure", "ours", "vLLM's", "ours / vLLM's"], rows)


def printed(folder: Folder) -> Iterator[str]:
    """What the other items print: the machine, the bare engine with its floors, kernels, starts and kills."""
    for item in folder.items():
        if item.startswith(("machine", "doctor", "engine-", "profile-", "kills")):
            yield from (
                f"## {item}: {folder.end_of(item)[1]}",
                "",
                *block(folder.last_lines(item, MOST_LINES)),
            )
    rows = [[name, folder.text(f"{name}.start").strip()] for name in folder.names("*.start")]
    yield from table(["server", "serves after, s"], rows)
    yield from block(folder.text("clocks.txt").splitlines())
    yield f"All logs are in {folder.path}; traces of profiles are trace-*.json.gz."


def failures(folder: Folder) -> Iterator[str]:
    """The last lines of items that failed or were cut off, tests left out: those have a section."""
    for item in folder.items():
        status, how = folder.end_of(item)
        if status != 0 and not item.startswith("test_"):
            yield from (f"## {item}: {how}", "", *block(folder.last_lines(item)))
    for name in folder.names("*.failed"):
        yield from (f"## {name} did not start", "", *block(folder.last_lines(f"{name}.server")))


# --- text --------------------------------------------------------------------------------------------------


def table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    if not rows:
        yield from ("Nothing yet.", "")
        return
    yield line_of(head)
    yield line_of(["---"] * len(head))
    yield from map(line_of, rows)
    yield ""


def line_of(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def block(lines: list[str]) -> Iterator[str]:
    yield from (("```text", *lines, "```", "") if lines else ("Nothing yet.", ""))


def shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}" if value < 1000 else f"{value:.0f}"


def yes(met: bool) -> str:
    return "yes" if met else "**no**"


def last_line(log: str) -> str:
    return next(reversed(log.rstrip().splitlines()), "")


def counts_of(log: str) -> dict[str, str]:
    """What pytest counted, by its words."""
    return {name.rstrip("s"): number for number, name in COUNTED.findall(last_line(log))}


def write(path: Path) -> None:
    """Replace the report as a whole: a run that is cut off here keeps the last one."""
    new = path / "report.md.new"
    new.write_text(report(Folder(path)))
    new.replace(path / "report.md")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]))
