"""The same figures as a picture: three panels of bars, light or dark as the reader's page is."""

from xml.sax.saxutils import escape

from deploy.bench.report import BARS, FIRST, FIRST_P99, GAP, GAP_P99, Comparison, Measure, label, number

WIDTH, HEIGHT = 860, 316
PANEL, GAP_PX = 260, 20
TOP, BOTTOM = 96, 280
TAILS = {FIRST: FIRST_P99, GAP: GAP_P99}
"""What a thin line above a bar shows."""
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2933 } .dim { fill: #6b7785 } .title { font-weight: 600; font-size: 13px }
.back { fill: #fff } .axis { stroke: #c5ccd3 } .s0 { fill: #0e7c86; stroke: #0e7c86 } .s1 { fill: #b4509a; stroke: #b4509a }
@media (prefers-color-scheme: dark) { text { fill: #e4e8ec } .dim { fill: #9aa5b1 } .back { fill: #14181d } .axis { stroke: #3b4652 }
.s0 { fill: #35b8c2; stroke: #35b8c2 } .s1 { fill: #d980c2; stroke: #d980c2 } }
rect { stroke-width: 0 } line { stroke-width: 1.5 }"""


def draw(result: Comparison) -> str:
    """An SVG document."""
    parts = [legend(result)]
    parts += [panel(result, measure, 20 + i * (PANEL + GAP_PX)) for i, measure in enumerate(BARS)]
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    frame = f'<rect class="back" width="{WIDTH}" height="{HEIGHT}"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n{frame}\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def legend(result: Comparison) -> str:
    x, parts = 20, []
    for i, server in enumerate(result.servers):
        words = f"{server.name} {server.model}".strip()
        parts.append(
            f'<rect class="s{i}" x="{x}" y="18" width="12" height="12" rx="2"/>{text(x + 18, 28, words)}'
        )
        x += 40 + 7 * len(words)
    wanted = result.wanted
    about = f"prompts of {result.prompt_tokens or wanted.prompt_tokens} tokens, {wanted.max_tokens} new ones, greedy"
    return "".join(parts) + text(20, 50, f"{about}; bars are medians, thin lines 99th percentiles", "dim")


def panel(result: Comparison, measure: Measure, left: int) -> str:
    """Bars in groups of one load; the scale is the panel's own."""
    tail = TAILS.get(measure)
    shown = {key: (measure.of(it), tail.of(it) if tail else None) for key, it in result.figures.items()}
    most = max((value for pair in shown.values() for value in pair if value is not None), default=0.0) or 1.0
    better = "more is better" if measure.more_is_better else "less is better"
    parts = [text(left, 78, measure.title, "title"), text(left + PANEL, 78, better, "dim", "end")]
    group = PANEL / len(result.wanted.concurrency)
    each = min(34.0, group * 0.8 / len(result.servers))
    for number_of_group, users in enumerate(result.wanted.concurrency):
        middle = left + group * (number_of_group + 0.5)
        parts.append(text(middle, BOTTOM + 18, f"{users} user{'s' if users > 1 else ''}", "dim", "middle"))
        for i, server in enumerate(result.servers):
            value, high = shown[users, i]
            x = middle + each * (i - len(result.servers) / 2)
            parts.append(
                bar(
                    i,
                    x,
                    each - 3,
                    value,
                    high,
                    most,
                    measure.factor,
                    f"{label(result, server)}, {users} users",
                )
            )
    parts.append(f'<line class="axis" x1="{left}" x2="{left + PANEL}" y1="{BOTTOM}" y2="{BOTTOM}"/>')
    return "".join(parts)


def bar(
    i: int,
    x: float,
    width: float,
    value: float | None,
    high: float | None,
    most: float,
    factor: float,
    title: str,
) -> str:
    middle = x + width / 2
    if value is None:
        return text(middle, BOTTOM - 5, "–", "", "middle")
    top = BOTTOM - (BOTTOM - TOP - 16) * value / most
    shape = f'<rect class="s{i}" x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{BOTTOM - top:.1f}" rx="2"/>'
    peak = top
    if high is not None and high > value:
        peak = BOTTOM - (BOTTOM - TOP - 16) * high / most
        shape += f'<line class="s{i}" x1="{middle:.1f}" x2="{middle:.1f}" y1="{peak:.1f}" y2="{top:.1f}"/>'
    figure = number(value, factor)
    return f"<g><title>{escape(title)}: {figure}</title>{shape}{text(middle, peak - 5, figure, '', 'middle')}</g>"


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
