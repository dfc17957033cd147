"""PendingPlan: a plan that is not published yet, and the rows that start with it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from batcher.scheduling.replica import Replica
from batcher.scheduling.sequence import PlacedRow
from common.messages.plan import Plan


@dataclass(slots=True, eq=False)
class PendingPlan:
    """`rows` are those that start with `plan`, in its order."""

    replica: Replica
    plan: Plan
    rows: list[PlacedRow]

    def withdraw(self, positions: Iterable[int]) -> list[PlacedRow]:
        """Remove the rows at these positions, as if they had never been placed. Return them."""
        withdrawn = [self.rows[position] for position in positions]
        numbers = {row.number for row in withdrawn}
        self.rows = [row for row in self.rows if row.number not in numbers]
        starts = [start for start in self.plan.starts if start.row not in numbers]
        self.plan = replace(self.plan, starts=starts)
        for row in withdrawn:
            self.replica.withdraw(row)
        return withdrawn
