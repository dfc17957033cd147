"""Prefill: which prompts a step computes, in which order, and how many of their tokens. No tensors."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpu_worker.engine.batch.row import Row, RowSlice
from gpu_worker.protocol import Grant

PATIENCE = 16
"""One step in this number begins with the prompt that has waited longest, unless it was first since then."""
BURST_STEPS = 8
"""The prompts that wait beside rows that decode take about this many steps, however long they are."""
TOKENS_PER_PAUSE = 112
"""A row that decodes pauses for prompts once in this many of its tokens: fewer than one gap in a hundred is
such a pause, so their 99th percentile does not contain it.
"""
MOST_PAUSES = 16.0
"""Pauses that may be left over from the time before."""


def line_up(prompts: Iterable[Row], step: int) -> list[Row]:
    """Return prompts in the order in which a step computes them: by class, then the one with the fewest
    tokens left, then the one that started first. In one of PATIENCE steps the one that has waited longest
    comes first, so that short prompts do not starve a long one.
    """
    line = sorted(prompts, key=lambda row: (row.class_index, len(row.ids) - row.kv_len))
    last = max(line, key=lambda row: row.num_passed, default=None)
    if last and step % PATIENCE == 0 and last.num_passed >= PATIENCE - 1:
        line.remove(last)
        line.insert(0, last)
    for place, row in enumerate(line):
        row.num_passed = row.num_passed + 1 if place else 0
    return line


def chunks(line: Sequence[Row], block_size: int, tokens_left: int, scores_left: int) -> Iterator[RowSlice]:
    """Yield chunks of at most `tokens_left` tokens together, at most `scores_left` of them scored."""
    for row in line:
        begin = row.kv_len
        unscored = max(0, row.scored_from - begin)
        prefill = len(row.ids) - begin
        count = min(num_computable(row, block_size), tokens_left, unscored + scores_left)
        if count > 0:
            samples = count == prefill
            yield RowSlice(row, begin, count, samples, num_scored=max(0, count - samples - unscored))
            tokens_left -= count
            scores_left -= max(0, count - unscored)


def num_computable(row: Row, block_size: int) -> int:
    """Return how many tokens of a row's prompt are left and have blocks."""
    return min(len(row.blocks) * block_size, len(row.ids)) - row.kv_len


def even_part(waiting: int, most: int) -> int:
    """Return the tokens of the next step, at most `most`: `waiting` tokens take as few steps as they can, and
    equal ones, so that the longest of them is as short as it can be.
    """
    return -(-waiting // max(1, -(-waiting // most)))


@dataclass(slots=True)
class PrefillBudget:
    """How many prompt tokens a step may have.

    Beside rows that decode they are as many as the grant says, so that no step takes long. If the grant lets
    the engine exceed that, prompts which come together do not wait for many such steps:

    - All that wait are computed in about BURST_STEPS steps.
    - As long as it is rare, they have a whole step. Each row that decodes pauses for it once, where several
      middling steps would be as many long gaps for each row.

    Only prompts as urgent as the rows that decode make a step longer.

    Attributes:
        pauses: of one row each, that are left. A whole step may begin while there are any, for all rows.
    """

    pauses: float = MOST_PAUSES

    def tokens(self, grant: Grant, num_decoding: int, waiting: int, urgent: int) -> int:
        """Return the budget of a step in which `num_decoding` rows decode and `waiting` prompt tokens could
        be computed, `urgent` of them for requests that are as urgent.
        """
        whole = grant.prefill_tokens
        if not num_decoding or not grant.mixed_prefill_tokens:
            return whole
        most = min(whole, grant.mixed_prefill_tokens)
        if grant.may_exceed:
            most = min(whole, max(most, -(-urgent // BURST_STEPS)))
            if most < min(urgent, whole) and self.pauses > 0:
                self.pauses -= num_decoding
                return whole
            self.pauses = min(MOST_PAUSES, self.pauses + num_decoding / TOKENS_PER_PAUSE)
        return even_part(waiting, most)
