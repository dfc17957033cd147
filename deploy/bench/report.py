"""Report of a benchmark: a table with ratios, bars and notes for the terminal, and a picture (SVG).

The picture is three panels of bars, drawn by matplotlib (the extra `bench`).
"""

import importlib.util
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from common.process.logs import plural
from common.settings.settings import SettingError
from deploy.bench.load import LoadPlan
from deploy.bench.measure import Figures, Server
from deploy.cli.client import blocks

WIDE, MEDIUM = 96, 70
MAX_BAR_CELLS = 40
BUSY_CORES = 0.7
NOISE = 0.05
"""Rounds with one load that differ by more are worth a warning."""
COLORS = ("cyan", "magenta")
SAME_RATIO = 0.02
"""A ratio this near to 1 is not coloured."""
SVG_COLORS = ("#0e7c86", "#b4509a")
SVG_GROUP_WIDTH = 0.8
"""All bars of one load; loads are 1 apart."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a benchmark.

    Attributes:
        servers: ours first.
        figures: by (users, server).
        prompt_tokens: as measured; None if no server reports them.
        client_cores: processor time of this client by time. Near 1, the client itself limits the figures.
    """

    servers: Sequence[Server]
    plan: LoadPlan
    path: str
    figures: dict[tuple[int, int], Figures]
    prompt_tokens: int | None
    client_cores: float


@dataclass(frozen=True, slots=True)
class Measure:
    """One column. A stored value times `factor` is the value shown."""

    title: str
    of: Callable[[Figures], float | None]
    factor: float
    more_is_better: bool
    least_width: int = 0


TOKENS = Measure("tokens/s", lambda it: it.tokens_per_s, 1, True)
FIRST = Measure("first token ms", lambda it: it.first_p50_s, 1000, False)
FIRST_P99 = Measure("p99", lambda it: it.first_p99_s, 1000, False, MEDIUM)
GAP = Measure("next token ms", lambda it: it.gap_p50_s, 1000, False)
GAP_P99 = Measure("p99", lambda it: it.gap_p99_s, 1000, False, MEDIUM)
MEASURES = (TOKENS, FIRST, FIRST_P99, GAP, GAP_P99)
BARS = (TOKENS, FIRST, GAP)
TAILS = {FIRST: FIRST_P99, GAP: GAP_P99}
"""What the thin line above a bar of the picture shows."""


def view(result: Comparison, width: int) -> RenderableType:
    parts: list[RenderableType] = [head(result), Text(), table(result, width), Text()]
    for measure in BARS:
        parts += [bars(result, measure, width), Text()]
    return Group(*parts, *(Text(note, style="yellow") for note in notes(result)))


def head(result: Comparison) -> Text:
    plan = result.plan
    lines = Text()
    for server, color in zip(result.servers, COLORS, strict=False):
        lines.append(f"{server.name}  ", style=f"bold {color}").append(f"{server.model or 'model unknown'}  ")
        lines.append(f"{server.url}\n", style="dim")
    num_tokens = result.prompt_tokens or f"about {plan.prompt_tokens}"
    prompt = f"prompts of {num_tokens} tokens, {plan.max_tokens} new ones"
    return lines.append(f"{plan.duration_s:g} s, {prompt}, greedy, {result.path}", style="dim")


def table(result: Comparison, width: int) -> Table:
    measures = [measure for measure in MEASURES if width >= measure.least_width]
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    shown.add_column("users", justify="right")
    shown.add_column("server", no_wrap=True, overflow="ellipsis")
    for measure in measures:
        shown.add_column(measure.title, justify="right")
    if width >= WIDE:
        shown.add_column("answers", justify="right")
    shown.add_column("errors", justify="right")
    for users in result.plan.concurrency:
        both = [result.figures[users, i] for i in range(len(result.servers))]
        for i, (server, it) in enumerate(zip(result.servers, both, strict=True)):
            cells = [number(measure.of(it), measure.factor) for measure in measures]
            answers = [Text(str(it.num_answers), style="dim")] if width >= WIDE else []
            errors = Text(str(it.num_errors), style="red" if it.num_errors else "dim")
            shown.add_row(
                str(users) if i == 0 else "",
                Text(label(result, server), style=COLORS[i]),
                *cells,
                *answers,
                errors,
            )
        if len(both) == 2:
            shown.add_row(
                "", Text("ratio", style="bold"), *(ratio_cell(measure, *both) for measure in measures)
            )
        shown.add_row()
    return shown


def label(result: Comparison, server: Server) -> str:
    """Return the server's kind; if both are of one kind, `ours` or `theirs`."""
    if len({one.kind for one in result.servers}) == len(result.servers):
        return server.kind
    return "ours" if server is result.servers[0] else "theirs"


def ratio_cell(measure: Measure, ours: Figures, theirs: Figures) -> Text:
    """Return ours divided by theirs; green where ours is better."""
    own, other = measure.of(ours), measure.of(theirs)
    if not own or not other:
        return Text("–", style="dim")
    part = own / other
    better = part > 1 if measure.more_is_better else part < 1
    return Text(
        f"{part:.2f}×", style="bold" if abs(part - 1) < SAME_RATIO else "bold green" if better else "bold red"
    )


def number(value: float | None, factor: float = 1.0) -> str:
    """Format a value with three digits."""
    if value is None:
        return "–"
    value *= factor
    return (
        f"{value:,.0f}".replace(",", " ")
        if value >= 100
        else f"{value:.1f}"
        if value >= 10
        else f"{value:.2f}"
    )


def bars(result: Comparison, measure: Measure, width: int) -> Text:
    """Return one bar for each server and load, all on one scale."""
    values = {
        key: value * measure.factor
        for key, it in result.figures.items()
        if (value := measure.of(it)) is not None
    }
    widest = max(len(label(result, server)) for server in result.servers)
    cells = max(4, min(MAX_BAR_CELLS, width - widest - 18))
    lines = Text(measure.title, style="bold").append(
        "  more is better" if measure.more_is_better else "  less is better", style="dim not bold"
    )
    for users in result.plan.concurrency:
        for i, server in enumerate(result.servers):
            value = values.get((users, i))
            lines.append(
                f"\n{users if i == 0 else '':>5}  {label(result, server):<{widest}}  ", style="not bold"
            )
            lines.append(
                blocks(round((value or 0.0) / (max(values.values()) or 1.0) * cells * 8)) if values else "",
                style=f"{COLORS[i]} not bold",
            )
            lines.append(f" {number(value)}", style="not bold")
    return lines


def notes(result: Comparison) -> list[str]:
    """Return the warnings that a reader needs to judge the figures."""
    found = []
    for i, server in enumerate(result.servers):
        mine = {users: it for (users, index), it in result.figures.items() if index == i}
        errors = sum(it.num_errors for it in mine.values())
        if errors:
            first = next(it.error for it in mine.values() if it.error)
            found.append(f"{server.name}: {plural(errors, 'request')} failed; the first: {first}")
        if not all(it.tokens_per_s or it.num_errors for it in mine.values()):
            found.append(
                f"{server.name}: no token came in time; "
                "a longer --duration, fewer users or shorter prompts show more"
            )
        if any(it.tokens_per_frame > 1.05 for it in mine.values()):
            found.append(
                f"{server.name} sends several tokens in one frame: "
                "its time to the next token is that to the next frame"
            )
        if not server.ignores_eos:
            found.append(
                f"{server.name} cannot be told to go on after the end of a sequence: "
                "its answers may be shorter"
            )
    if (noise := max(it.spread for it in result.figures.values())) > NOISE:
        found.append(
            f"tokens/s of two rounds with one load differ by up to {noise:.0%}, and smaller differences say "
            "nothing: end what else runs on the machine, or measure for longer"
        )
    if len({server.model for server in result.servers}) > 1:
        found.append("the names of the models differ: make sure that they are the same")
    if result.client_cores > BUSY_CORES:
        found.append(
            f"this client used {result.client_cores:.0%} of a core: it may be what limits the figures"
        )
    return found


def check_matplotlib() -> None:
    """Raises SettingError if the extra `bench` is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SettingError("--svg", "needs matplotlib: pip install 'tokenfleet[bench]'")


def draw(result: Comparison) -> str:
    """Draw the picture. Returns an SVG document."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif"}):
        figure = Figure(figsize=(9, 3.4), layout="constrained")
        for axes, measure in zip(figure.subplots(1, len(BARS)), BARS, strict=True):
            draw_panel(axes, result, measure)
        names = [f"{server.name} {server.model}".strip() for server in result.servers]
        bars: Any = figure.axes[0].containers
        figure.legend(bars, names, loc="outside upper left", ncols=2, frameon=False)
        tokens = result.prompt_tokens or result.plan.prompt_tokens
        about = f"prompts of {tokens} tokens, {result.plan.max_tokens} new ones, greedy"
        figure.supxlabel(f"{about}; bars are medians, thin lines 99th percentiles", fontsize=8)
        content = io.StringIO()
        figure.savefig(content, format="svg")
    return content.getvalue()


def draw_panel(axes: Any, result: Comparison, measure: Measure) -> None:
    """Draw bars in one group for each load, on a scale of this panel's own."""
    loads = result.plan.concurrency
    width = SVG_GROUP_WIDTH / len(result.servers)
    for i, server in enumerate(result.servers):
        figures = [result.figures[users, i] for users in loads]
        values = [measure.of(it) for it in figures]
        places = [group + width * (i - (len(result.servers) - 1) / 2) for group in range(len(loads))]
        heights = [(value or 0.0) * measure.factor for value in values]
        bars = axes.bar(places, heights, width * 0.9, color=SVG_COLORS[i])
        axes.bar_label(bars, [number(value, measure.factor) for value in values], padding=2)
        for users, bar, value in zip(loads, bars, values, strict=True):
            if value is not None:
                bar.set_gid(f"{label(result, server)}, {users} users: {number(value, measure.factor)}")
        if measure in TAILS:
            tails = [(TAILS[measure].of(it) or 0.0) * measure.factor for it in figures]
            axes.vlines(
                places, heights, [max(pair) for pair in zip(heights, tails, strict=True)], SVG_COLORS[i]
            )
    better = "more is better" if measure.more_is_better else "less is better"
    axes.set_title(f"{measure.title} ({better})", fontsize=9)
    axes.set_xticks(range(len(loads)), [f"{users} user{'s' * (users > 1)}" for users in loads])
    axes.set_yticks([])
    axes.spines[["left", "right", "top"]].set_visible(False)
