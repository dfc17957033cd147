"""A plan on its way to a worker, and the rows that go with it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from batcher.replica import Replica
from batcher.sequence import Row
from common.messages.plan import Plan


@dataclass(slots=True, eq=False)
class Order:
    """`started` are the rows that start with `plan`, in its order."""

    replica: Replica
    plan: Plan
    started: list[Row]

    def withdraw(self, places: Iterable[int]) -> list[Row]:
        """Takes out the rows at these places, as if they had never been placed. Returns them."""
        out = [self.started[place] for place in places]
        numbers = {row.number for row in out}
        self.started = [row for row in self.started if row.number not in numbers]
        self.plan = replace(
            self.plan, starts=[start for start in self.plan.starts if start.row not in numbers]
        )
        for row in out:
            self.replica.withdraw(row)
        return out

    def handed_over(self) -> None:
        for row in self.started:
            row.handed_over = True
