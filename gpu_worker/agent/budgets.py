"""Key budgets: what the API keys of running requests may still get this month, and which rows must end
because of it.

Whatever is published is counted, and the broker's answer says how much is left. So between two answers a
worker publishes no more than was left at the first of them.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from gpu_worker.agent.row_text import RowText
from gpu_worker.worker_scripts import FlushedCount


@dataclass(slots=True)
class KeyBudgets:
    """The budgets of the keys that have rows here.

    Attributes:
        num_rows: live rows of each key with a budget.
        left: tokens that a key may still get, by the last answer. It is forgotten with the flush after the
            key's last row has ended.
    """

    num_rows: Counter[str] = field(default_factory=Counter)
    left: dict[str, int] = field(default_factory=dict)

    def on_start(self, row: RowText) -> None:
        if row.has_budget:
            self.num_rows[row.request.key_id] += 1

    def on_end(self, row: RowText) -> None:
        if not row.has_budget:
            return
        key_id = row.request.key_id
        self.num_rows[key_id] -= 1
        if self.num_rows[key_id] <= 0:
            del self.num_rows[key_id]

    def note(self, counted: Iterable[FlushedCount], left: Iterable[int]) -> None:
        """Note what the answer to a flush says is left for the key of each request that it counted."""
        for count, number in zip(counted, left, strict=True):
            if count.key_id in self.num_rows:
                self.left[count.key_id] = number

    def take_rows_to_cut(self, rows: Iterable[RowText]) -> list[tuple[RowText, int]]:
        """Return rows that have more unpublished tokens than their keys may still get, and how many of these
        tokens each keeps. The first token of an answer was set aside at its admission.
        """
        if not self.left:
            return []
        left, cut = self.left, []
        for row in rows:
            number = left.get(row.request.key_id) if row.has_budget else None
            if number is not None:
                own = int(len(row.texts) == row.num_tokens)
                kept = min(len(row.texts), own + max(number, 0))
                left[row.request.key_id] = number - (kept - own)
                if kept < len(row.texts):
                    cut.append((row, kept))
        self.left = {key_id: number for key_id, number in left.items() if key_id in self.num_rows}
        return cut
