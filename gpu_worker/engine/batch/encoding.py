"""Which units of pictures are encoded before a step. No tensors.

A unit counts as the prompt tokens that take as long, so a step's budget of prompt tokens bounds its
encodings, too. A unit that costs more than a whole budget is encoded all the same, since it cannot be split.
Then prompts beside rows that decode wait until the budgets of further steps have made up for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpu_worker.engine.batch.prefill import num_computable
from gpu_worker.engine.batch.row import Row
from gpu_worker.engine.batch.row_pictures import PictureState


class EncodedUnit(NamedTuple):
    """A unit that is encoded before the step just scheduled."""

    picture: PictureState
    number: int


@dataclass(slots=True)
class EncodingSchedule:
    """The units of the next step.

    Attributes:
        debt: prompt tokens that encodings took beyond the budgets of earlier steps.
    """

    units: list[EncodedUnit] = field(default_factory=list)
    debt: int = 0

    def schedule(self, line: Sequence[Row], block_size: int, budget: int, is_mixed: bool) -> int:
        """Schedule units for rows in line, as far as their blocks reach → the budget that is left for tokens.
        `is_mixed`: rows decode in this step, too.
        """
        self.debt = self.debt if is_mixed else 0
        paid = min(budget, self.debt)
        self.debt -= paid
        left = budget - paid
        cost = 0
        for row in line:
            own = self.schedule_row(row, block_size, left, budget) if row.pictures else 0
            cost += own
            left -= own + max(0, min(left - own, num_computable(row, block_size)))
        self.debt += max(0, cost + paid - budget)
        return max(0, budget - paid - cost)

    def schedule_row(self, row: Row, block_size: int, left: int, budget: int) -> int:
        """Schedule the next units of a row → what they cost. The first unit of a step may cost more than its
        budget.
        """
        assert row.pictures
        end, cost = len(row.blocks) * block_size, 0
        for placed in row.pictures.left(row.kv_len):
            picture = placed.picture
            while not picture.is_scheduled and placed.places[picture.num_embedded] < end:
                if left - cost < picture.unit_cost and left - cost < budget:
                    return cost
                self.units.append(EncodedUnit(picture, picture.num_scheduled))
                picture.num_scheduled += 1
                cost += picture.unit_cost
        return cost

    def take(self) -> list[EncodedUnit]:
        """Return the units that are encoded before the step is computed."""
        units, self.units = self.units, []
        return units


def encoding_cost(row: Row) -> int:
    """Prompt tokens that take as long as what is left to encode for a row."""
    if not row.pictures:
        return 0
    pictures = (placed.picture for placed in row.pictures.left(row.kv_len))
    return sum((one.num_units - one.num_scheduled) * one.unit_cost for one in pictures)
