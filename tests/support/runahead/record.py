"""Record: what an engine did, as tests/support/runahead/recorded_engine.py writes it down."""

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

WINDOW_S = 0.25


@dataclass
class Record:
    """What the engine did.

    Attributes:
        steps: (begin, end, rows that sampled), in s of the monotonic clock.
        rows: row by the number of its request.
        of_row: the steps in which each row sampled.
    """

    steps: list[tuple[float, float, list[int]]] = field(default_factory=list)
    rows: dict[int, int] = field(default_factory=dict)
    of_row: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def read(cls, file: Path, first_ids: int) -> "Record":
        record = cls()
        for line in file.read_text().splitlines():
            end_s, kind, value, other = json.loads(line)
            if kind == "start":
                record.rows.setdefault(other - first_ids, value)
                continue
            begin_s = end_s - value / 1e3
            record.steps.append((begin_s, end_s, other))
            for row in other:
                record.of_row[row].append(begin_s)
        return record

    def steps_of(self, number: int) -> list[float]:
        """Return when the steps of a request began."""
        return self.of_row[self.rows[number]] if number in self.rows else []

    def idle(self, begin_s: float, end_s: float) -> list[float]:
        """Return the share of each window between two times in which no step ran."""
        count = int((end_s - begin_s) / WINDOW_S)
        left = [WINDOW_S] * count
        for step_begin_s, step_end_s, _ in self.steps:
            for i in range(
                int((step_begin_s - begin_s) / WINDOW_S), int((step_end_s - begin_s) / WINDOW_S) + 1
            ):
                if 0 <= i < count:
                    window_s = begin_s + i * WINDOW_S
                    left[i] -= max(0.0, min(step_end_s, window_s + WINDOW_S) - max(step_begin_s, window_s))
        return [max(0.0, one) / WINDOW_S for one in left]

    def busy(self, begin_s: float, end_s: float) -> float:
        """Return the mean number of rows in a step between two times; 0 while no step runs."""
        inside = [step for step in self.steps if begin_s <= step[0] and step[1] <= end_s]
        return sum((end - begin) * len(rows) for begin, end, rows in inside) / (end_s - begin_s)
