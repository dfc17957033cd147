"""Page of a run: one HTML file that needs nothing else."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import jinja2

from deploy.bench.measure import Server
from deploy.chaos import report
from deploy.chaos.figures import ChaosFigures
from deploy.chaos.run import TRUTH_ROUNDS, Recording
from deploy.chaos.stream import ReceivedAnswer

TEMPLATE = Path(__file__).with_name("page.html")
WIDTH, TOP, BOTTOM = 1000, 18, 18
LANE, BAR = 14, 8
GAP_S = 0.25
"""A longer wait for a token is left empty in the chart."""
NUM_TICKS = 6
Bar = tuple[float, float, float, str]


@dataclass(frozen=True, slots=True)
class StreamChart:
    """Bars of the streams' tokens by time, in a picture `width` wide.

    Attributes:
        lanes: the height of each stream's line.
        bars: (x, y, width, class), from one token to another without a long wait.
        strikes: (x, kind).
        ticks: (x, seconds).
    """

    height: int
    lanes: Sequence[float]
    bars: Sequence[Bar]
    strikes: Sequence[tuple[float, str]]
    ticks: Sequence[tuple[float, str]]
    width: int = WIDTH
    bar: int = BAR
    gap_ms: int = round(GAP_S * 1e3)

    @property
    def bottom(self) -> int:
        return self.height - BOTTOM


def render(server: Server, recording: Recording, found: ChaosFigures) -> str:
    """Return the page."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    strikes = recording.plan.strikes
    commands = [(name, getattr(strikes, name)) for name in ("kill", "restart", "pause", "unpause")]
    return environment.from_string(TEMPLATE.read_text()).render(
        title=f"{server.name} under strikes",
        server=server,
        headline=report.headline(server, recording, found),
        tiles=list(tiles(found)),
        chart=draw(recording),
        rows=list(report.rows(found)),
        notes=list(report.notes(recording, found)),
        plan=recording.plan,
        rounds=TRUTH_ROUNDS,
        found=found,
        commands=[(name, command) for name, command in commands if command],
    )


def tiles(found: ChaosFigures) -> Iterator[tuple[str, str, bool | None]]:
    """Yield name, value and whether it is good, of the figures that matter most. None: neither."""
    is_known = found.num_stable > 0
    for name in ("lost", "repeated", "changed"):
        count: int = getattr(found, name)
        yield f"tokens {name}", f"{count:,}" if is_known else "–", not count if is_known else None
    undelivered = f"{found.undelivered:,}" if is_known else "–"
    yield "tokens undelivered", undelivered, not found.undelivered if is_known else None
    yield f"of {found.requests:,} requests failed", f"{found.failed:,}", not found.failed
    yield "longest outage", report.seconds(found.outage_max_s), None


def draw(recording: Recording) -> StreamChart:
    """Return the chart of a run."""
    span_s = max(recording.ended_s - recording.begun_s, 1e-3)

    def x(time_s: float) -> float:
        return round((time_s - recording.begun_s) / span_s * WIDTH, 1)

    num_lanes = recording.plan.num_streams
    bars = []
    for answer in recording.answers:
        y = TOP + answer.user * LANE + (LANE - BAR) / 2
        kind = "cut" if answer.error else "run"
        bars += [(x(begin), y, max(1.0, x(end) - x(begin)), kind) for begin, end in stretches(answer)]
    return StreamChart(
        height=TOP + num_lanes * LANE + BOTTOM,
        lanes=[TOP + (i + 0.5) * LANE for i in range(num_lanes)],
        bars=bars,
        strikes=[(x(strike.begun_s), strike.kind) for strike in recording.striker.strikes],
        ticks=[(round(i * WIDTH / NUM_TICKS), f"{i * span_s / NUM_TICKS:.0f} s") for i in range(NUM_TICKS)],
    )


def stretches(answer: ReceivedAnswer) -> Iterator[tuple[float, float]]:
    """Yield the times in which tokens came without a long wait. A request that failed before its first token
    is a point.
    """
    times = answer.times_s or ([answer.ended_s] if answer.error else [])
    if not times:
        return
    begin = times[0]
    for sooner, later in pairwise(times):
        if later - sooner > GAP_S:
            yield begin, sooner
            begin = later
    yield begin, times[-1]
