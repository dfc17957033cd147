"""Writes FOLDER/report.md from what benchmarks/gpu/run.sh left there: `python -m benchmarks.gpu.report
FOLDER`. Whatever is missing is said to be missing.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

LAST_LINES, MOST_LINES = 12, 80
"""Of the log of an item that failed, and of one whose figures are printed as they are."""
PRINTED = ("machine", "doctor", "engine-", "profile-", "kills")
FIGURE = re.compile(r"^streams=(\d+) (in=\d+ out=\d+(?: sampled)?) *\| *(.+?): +([\d.]+)\s*$", re.M)
STRUCTURED = re.compile(r"^ *(\d+) streams: \d+ → \d+ \(([\d.]+)\)", re.M)
TIME, TOKENS = "Median TPOT (ms)", "Output token throughput (tok/s)"
"""Time between tokens is an answer's time divided by its tokens. The median gap would flatter a server that
sends the tokens of two steps together.
"""
WANTED = {
    ("m8", 1, TIME): 0.92,
    ("m8", 256, TOKENS): 1.1,
    ("m8-fp8", 256, TOKENS): 1.25,
    ("m135", 1, TIME): 0.85,
    ("m135", 256, TOKENS): 2.0,
}
"""Model, streams and figure of greedy loads → the ratio to vLLM's: at most for times, at least for rates."""
STRUCTURED_SHARE = 0.95
"""Least tokens/s of 32 streams with a schema, as a share of those without."""
WHY = {0: "ok", 124: "over its time limit", 137: "killed at its time limit"}


class Folder:
    """What a run left: logs, and how each item ended."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def text(self, name: str) -> str:
        file = self.path / name
        return file.read_text(errors="replace") if file.exists() else ""

    def lines(self, name: str, count: int) -> list[str]:
        """The last lines of a file."""
        return self.text(name).rstrip().splitlines()[-count:]

    def names(self, pattern: str) -> list[str]:
        """The files of this pattern without their last suffix, the oldest first."""
        files = sorted(self.path.glob(pattern), key=lambda file: (file.stat().st_mtime, file.name))
        return [file.stem for file in files]

    def items(self) -> list[str]:
        logs = [name for name in self.names("*.log") if name != "report" and not name.endswith(".server")]
        return list(dict.fromkeys([*logs, *(name for name in self.names("*.done") if name != "models")]))

    def end_of(self, item: str) -> str:
        """How an item ended."""
        words = self.text(f"{item}.done").split()
        if len(words) != 2:
            return "cut off, or still running: call run.sh again"
        return f"{WHY.get(int(words[0]), f'exit status {words[0]}')} after {words[1]} s"

    def figures(self, server: str) -> dict[tuple[int, str, str], float]:
        """By streams, load and figure, of the loads of a server that are over."""
        own = re.compile(re.escape(server) + r"-\d+,.*")
        logs = [self.text(f"{item}.log") for item in filter(own.fullmatch, self.items())]
        found = [one for log in logs for one in FIGURE.findall(log)]
        return {(int(streams), load, what): float(value) for streams, load, what, value in found}


def report(folder: Folder) -> Iterator[str]:
    """Items with their last lines, which have the counts of tests; all loads; what some print; the ends of
    those that failed.
    """
    items = folder.items()
    yield "# What this machine showed\n"
    yield from table(
        ["item", "ended", "its last line"],
        [[item, folder.end_of(item), *folder.lines(f"{item}.log", 1)] for item in items],
    )
    yield from table(
        ["server", "serves after, s"],
        [[name, folder.text(f"{name}.start").strip()] for name in folder.names("*.start")],
    )
    yield "## All loads\n"
    head = ["model", "streams", "load", "figure", "ours", "vLLM's", "ours / vLLM's", "wanted", "met?"]
    yield from table(head, [*loads(folder), *structured(folder)])
    yield "TPOT is an answer's time divided by its tokens: tokens of two steps may come together.\n"
    for item in items:
        if item.startswith(PRINTED):
            yield from section(f"{item}: {folder.end_of(item)}", folder.lines(f"{item}.log", MOST_LINES))
        elif not folder.end_of(item).startswith("ok "):
            count = MOST_LINES if item.startswith("test_") else LAST_LINES
            yield from section(f"{item}: {folder.end_of(item)}", folder.lines(f"{item}.log", count))
    for name in folder.names("*.failed"):
        yield from section(f"{name} did not start", folder.lines(f"{name}.server.log", LAST_LINES))
    yield from section("Clocks", folder.lines("clocks.txt", MOST_LINES))
    yield f"All logs are in {folder.path}; traces of profiles are trace-*.json.gz.\n"


def loads(folder: Folder) -> Iterator[list[str]]:
    """All loads of each model, and what was wanted but not measured."""
    items = " ".join(folder.items())
    models = {*re.findall(r"\b(?:ours|vllm)-([\w-]+?)-\d+,", items), *(model for model, *_ in WANTED)}
    for model in sorted(models):
        ours, theirs = folder.figures(f"ours-{model}"), folder.figures(f"vllm-{model}")
        left = {(streams, figure) for name, streams, figure in WANTED if name == model}
        for streams, load, figure in dict.fromkeys((*ours, *theirs)):
            our, their = (one.get((streams, load, figure)) for one in (ours, theirs))
            ratio = our / their if our is not None and their else None
            bound = None if load.endswith("sampled") else WANTED.get((model, streams, figure))
            left -= {(streams, figure)} if bound else set()
            shown = [f"{value:.2f}" if value is not None else "–" for value in (our, their, ratio)]
            yield [model, str(streams), load, figure, *shown, *judged(ratio, bound, figure == TIME)]
        for streams, figure in sorted(left):
            verdict = judged(None, WANTED[model, streams, figure], figure == TIME)
            yield [model, str(streams), *"–", figure, *"–––", *verdict]


def structured(folder: Folder) -> Iterator[list[str]]:
    """Tokens/s with a schema as a share of those without, of each server."""
    for item in folder.items():
        if item.endswith("-structured"):
            shares = {
                int(streams): share for streams, share in STRUCTURED.findall(folder.text(f"{item}.log"))
            }
            if share := shares.get(32):
                own = [share, "–"] if item.startswith("ours-") else ["–", share]
                bound = STRUCTURED_SHARE if item.startswith("ours-") else None
                model = item.removesuffix("-structured").partition("-")[2]
                verdict = judged(float(share), bound, at_most=False)
                yield [model, "32", "structured", "share of tokens/s without a schema", *own, "–", *verdict]


def judged(value: float | None, bound: float | None, at_most: bool) -> list[str]:
    """What was wanted, and whether it was met."""
    if bound is None:
        return ["–", "–"]
    wanted = f"{'≤' if at_most else '≥'} {bound:g}"
    if value is None:
        return [wanted, "not measured"]
    return [wanted, "yes" if (value <= bound if at_most else value >= bound) else "**no**"]


def section(title: str, lines: list[str]) -> list[str]:
    return [f"## {title}", "", "```text", *lines, "```", ""]


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [[cell.replace("|", "/") for cell in row] for row in (head, ["---"] * len(head), *rows)]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    path = Path(sys.argv[1])
    new = path / "report.md.new"  # a run that is cut off here keeps the last one
    new.write_text("\n".join(report(Folder(path))))
    new.replace(path / "report.md")
