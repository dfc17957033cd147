"""The figures of a comparison as a picture: three panels of bars, drawn by matplotlib (the extra `bench`)."""

import importlib.util
import io
from typing import Any

from common.settings.settings import SettingError
from deploy.bench.report import BARS, FIRST, FIRST_P99, GAP, GAP_P99, Comparison, Measure, label, number

COLORS = ("#0e7c86", "#b4509a")
TAILS = {FIRST: FIRST_P99, GAP: GAP_P99}
"""The measure that the thin line above a bar shows."""
BAR_WIDTH = 0.8
"""All bars of one load; loads are 1 apart."""


def check_matplotlib() -> None:
    """Raises SettingError where the extra is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SettingError("--svg", "needs matplotlib: pip install 'tokenfleet[bench]'")


def draw(result: Comparison) -> str:
    """An SVG document."""
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
    """Bars in groups of one load; the scale is the panel's own."""
    loads = result.plan.concurrency
    width = BAR_WIDTH / len(result.servers)
    for i, server in enumerate(result.servers):
        figures = [result.figures[users, i] for users in loads]
        values = [measure.of(it) for it in figures]
        places = [group + width * (i - (len(result.servers) - 1) / 2) for group in range(len(loads))]
        heights = [(value or 0.0) * measure.factor for value in values]
        bars = axes.bar(places, heights, width * 0.9, color=COLORS[i])
        axes.bar_label(bars, [number(value, measure.factor) for value in values], padding=2)
        for users, bar, value in zip(loads, bars, values, strict=True):
            if value is not None:
                bar.set_gid(f"{label(result, server)}, {users} users: {number(value, measure.factor)}")
        if measure in TAILS:
            tails = [(TAILS[measure].of(it) or 0.0) * measure.factor for it in figures]
            axes.vlines(places, heights, [max(pair) for pair in zip(heights, tails, strict=True)], COLORS[i])
    better = "more is better" if measure.more_is_better else "less is better"
    axes.set_title(f"{measure.title} ({better})", fontsize=9)
    axes.set_xticks(range(len(loads)), [f"{users} user{'s' * (users > 1)}" for users in loads])
    axes.set_yticks([])
    axes.spines[["left", "right", "top"]].set_visible(False)
