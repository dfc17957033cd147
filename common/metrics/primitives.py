"""Metric types: counters and histograms, cheap enough for every step; and gauges, read on request.

prometheus_client makes the text (exposition.py), but counts here: every second a process adds its changes to
the pool's sums. So changes must be cheap to find, and many equal values (the rows of a step) as cheap as one.
"""

from bisect import bisect_left
from collections import Counter as Counts
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Literal

INFINITY = float("inf")
SUM = "sum"
TOTAL = -INFINITY
"""The key of the sum of all values, among the bounds of a histogram's buckets."""
SEPARATOR = "|"

Labels = tuple[str, ...]
Kind = Literal["counter", "histogram", "gauge"]


@dataclass(slots=True, eq=False)
class Metric:
    """A metric of the catalogue.

    Attributes:
        labels: name of each label → its known values. A series with known values is shown as 0 before it is
            first counted.
    """

    name: str
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    kind: Kind = field(init=False, default="gauge")

    def field(self, labels: Labels, part: str = "") -> str:
        """The field of one value of one series in the pool's hash."""
        return SEPARATOR.join((self.name, *labels, part))


@dataclass(slots=True, eq=False)
class Gauge(Metric):
    """A value that is read when metrics are requested."""


@dataclass(slots=True, eq=False)
class Counter(Metric):
    kind: Kind = field(init=False, default="counter")
    values: dict[Labels, float] = field(init=False, default_factory=lambda: defaultdict(float))

    def add(self, amount: float = 1, *labels: str) -> None:
        self.values[labels] += amount

    def fields(self) -> Iterator[tuple[str, float]]:
        for labels, value in list(self.values.items()):  # a copy: counting goes on while a thread renders it
            yield self.field(labels), value


@dataclass(slots=True, eq=False)
class Histogram(Metric):
    """Counts values by the smallest bound that they do not exceed. Buckets are not cumulative, so that
    histograms with different bounds can be added.

    Attributes:
        bounds: ascending; the last one is infinite.
    """

    bounds: tuple[float, ...] = (INFINITY,)
    kind: Kind = field(init=False, default="histogram")
    series: dict[Labels, dict[float, float]] = field(
        init=False, default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )

    def observe(self, value: float, *labels: str, times: int = 1) -> None:
        """Count a value `times` times."""
        parts = self.series[labels]
        parts[self.bounds[bisect_left(self.bounds, value)]] += times
        parts[TOTAL] += value * times

    def observe_all(self, values: Sequence[float], *labels: str) -> None:
        """Count each of the values."""
        parts = self.series[labels]
        for place, times in Counts(map(bisect_left, repeat(self.bounds), values)).items():
            parts[self.bounds[place]] += times
        parts[TOTAL] += sum(values)

    def fit(self, limit: int) -> None:
        """Set the bounds to a hundred equal steps up to `limit`."""
        if self.bounds[-2:-1] != (float(limit),):
            self.bounds = (*(limit * i / 100 for i in range(1, 101)), INFINITY)

    def fields(self) -> Iterator[tuple[str, float]]:
        for labels, parts in list(self.series.items()):
            for bound, number in list(parts.items()):
                yield self.field(labels, SUM if bound == TOTAL else repr(bound)), number


def exponential(first: float, factor: float, count: int) -> tuple[float, ...]:
    return (*(first * factor**i for i in range(count)), INFINITY)
