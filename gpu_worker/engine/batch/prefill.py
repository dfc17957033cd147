"""Which rows a step computes: how many prompt tokens it may have, when rows of the class `batch` wait for
one, which rows are launched, which prompts it has in which order, and which units of pictures are encoded
before it. No tensors.

A unit counts as the prompt tokens that take as long, so a step's budget of prompt tokens bounds its
encodings, too. A unit that costs more than a whole budget is encoded all the same, since it cannot be split.
Then prompts beside rows that decode wait until the budgets of further steps have made up for it.
"""

import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from common.messages.plan import Plan
from common.messages.request import LEAST_URGENT
from gpu_worker.engine.batch.row import Row, RowSlice
from gpu_worker.engine.batch.row_pictures import PictureState

BULK_SHARE = 3.0
"""Most tokens of bulk prompts in one step, as a multiple of what they have had in a step of late."""
BULK_MEMORY = 0.97
"""What is left of that mean after one step."""
TOKENS_PER_BULK_ROW = 8
"""Bulk rows that decode wait for callers' prompts of fewer tokens than this for each such row: only then do
they make the step much longer.
"""


def is_bulk(class_index: int) -> bool:
    return class_index >= LEAST_URGENT


@dataclass(slots=True)
class StepBudget:
    """What one step may have.

    Attributes:
        tokens: prompt tokens that are left, those of bulk prompts included.
        bulk_tokens: tokens of bulk prompts that are left.
        bulk_decodes: whether bulk rows decode in it.
    """

    tokens: int
    bulk_tokens: int
    bulk_decodes: bool = True

    def left(self, class_index: int) -> int:
        """Return how many tokens are left for a prompt of a class."""
        return min(self.tokens, self.bulk_tokens) if is_bulk(class_index) else self.tokens

    def spend(self, class_index: int, tokens: int) -> None:
        """Take `tokens` for a prompt of a class."""
        self.tokens -= tokens
        if is_bulk(class_index):
            self.bulk_tokens -= tokens


@dataclass(slots=True)
class PrefillBudget:
    """How many prompt tokens a step may have: as many as the grant says.

    Bulk rows, those of the class `batch`, fill what callers' rows leave. A caller waits for the rest of the
    step that runs when it comes, and then for its own prompt:

    - While callers are about (`bulk_tokens`), bulk prompts are spread over many steps, so that none is long.
      A step has at most BULK_SHARE times what steps have had of late, so a backlog is worked off.
    - A step with callers' prompts has no bulk prompts, and no bulk rows decode in it where they would make it
      much longer. Of two such steps in a row this holds for the first, so bulk rows never stand still; the
      second has `bulk_tokens` of bulk prompts at most.

    Attributes:
        bulk_pace: tokens of bulk prompts that a step has had of late.
        has_waited: whether bulk rows have waited for the last step.
    """

    bulk_pace: float = 0.0
    has_waited: bool = False

    def plan(self, grant: Plan, decoding: Sequence[int], prompts: Sequence[tuple[int, int]]) -> StepBudget:
        """Return the budget of a step in which rows of the classes `decoding` could decode, and `prompts` be
        computed, in this order: (class, tokens) of each. If a bulk prompt comes first, it has waited long
        enough, or is a suspect's.
        """
        num_bulk = sum(map(LEAST_URGENT.__le__, decoding))
        callers = sum(tokens for class_index, tokens in prompts if not is_bulk(class_index))
        bulk = sum(tokens for class_index, tokens in prompts if is_bulk(class_index))
        most = (grant.mixed_prefill_tokens if decoding else 0) or grant.prefill_tokens
        is_due = bool(callers and (bulk or num_bulk)) and not is_bulk(prompts[0][0])
        self.has_waited = is_due and not self.has_waited
        if self.has_waited:
            self.note_bulk(0)
            return StepBudget(most, 0, bulk_decodes=num_bulk * TOKENS_PER_BULK_ROW <= callers)
        if grant.bulk_tokens:
            pace = 0 if callers else round(BULK_SHARE * self.bulk_pace)
            num_steps = max(1, -(-bulk // max(grant.bulk_tokens, pace)))
            bulk = -(-bulk // num_steps)  # steps as equal as they can be: the longest is as short
        self.note_bulk(min(bulk, most))
        return StepBudget(most, min(bulk, most) if grant.bulk_tokens else most)

    def note_bulk(self, tokens: int) -> None:
        self.bulk_pace = BULK_MEMORY * self.bulk_pace + (1 - BULK_MEMORY) * tokens


PATIENCE = 16
"""One step in this number begins with the prompt that has waited longest, unless it was first since then."""


def line_up(prompts: Iterable[Row], step: int) -> list[Row]:
    """Return prompts in the order in which a step computes them: suspects, since another death counts as
    theirs even while they wait; then by class, then the one with the fewest tokens left, then the one that
    started first. In one of PATIENCE steps the one that has waited longest comes first, so that short prompts
    do not starve a long one.
    """
    line = sorted(prompts, key=lambda row: (not row.is_suspect, row.class_index, len(row.ids) - row.kv_len))
    last = max(line, key=lambda row: row.num_passed, default=None)
    if last and step % PATIENCE == 0 and last.num_passed >= PATIENCE - 1:
        line.remove(last)
        line.insert(0, last)
    for place, row in enumerate(line):
        row.num_passed = row.num_passed + 1 if place else 0
    return line


def chunks(
    line: Sequence[Row], block_size: int, budget: StepBudget, scores_left: int, has_snapshots: bool = False
) -> Iterator[RowSlice]:
    """Yield chunks of as many tokens as the budget has, at most `scores_left` of them scored. With
    `has_snapshots` one ends at the last end of a block in a prompt.
    """
    for row in line:
        begin = row.kv_len
        unscored = max(0, row.scored_from - begin)
        prefill = len(row.ids) - begin
        computable = num_computable(row, block_size)
        count = min(computable, budget.left(row.class_index), unscored + scores_left)
        if row.pictures and count > 0:
            count = row.pictures.chunk_end(begin, begin + count, begin + computable) - begin
        if has_snapshots and begin < (end := last_block_end(row, block_size)):
            count = min(count, end - begin)
        if count > 0:
            samples = count == prefill and row.output.samples
            yield RowSlice(row, begin, count, samples, num_scored=max(0, count - samples - unscored))
            budget.spend(row.class_index, count)
            scores_left -= max(0, count - unscored)


def last_block_end(row: Row, block_size: int) -> int:
    """The last end of a block in a row's prompt after which a token is left to compute."""
    return (len(row.ids) - 1) // block_size * block_size


def whole_prompts(line: Sequence[Row], block_size: int, budget: StepBudget) -> Iterator[RowSlice]:
    """Yield whole prompts of as many tokens as the budget has; the first may have more."""
    is_first = True
    for row in line:
        count = len(row.ids)
        if num_computable(row, block_size) == count and (is_first or count <= budget.left(row.class_index)):
            yield RowSlice(row, 0, count, samples=False, num_scored=max(0, count - row.scored_from))
            budget.spend(row.class_index, count)
            is_first = False


def num_computable(row: Row, block_size: int) -> int:
    """Return how many tokens of a row's prompt are left and have blocks, and embeddings."""
    end = min(len(row.blocks) * block_size, len(row.ids))
    return (row.pictures.embedded_until(row.kv_len, end) if row.pictures else end) - row.kv_len


def schedule_units(line: Sequence[Row], block_size: int, budget: int, debt: int) -> tuple[int, int]:
    """Schedule units for rows in line, as far as their blocks reach → the budget that is left for tokens, and
    the debt: prompt tokens that encodings took beyond the budgets of this step and earlier ones.
    """
    paid = min(budget, debt)
    left, cost = budget - paid, 0
    for row in line:
        own = schedule_row(row, block_size, left, budget) if row.pictures else 0
        cost += own
        left -= own + max(0, min(left - own, num_computable(row, block_size)))
    return max(0, budget - paid - cost), debt - paid + max(0, cost + paid - budget)


def schedule_row(row: Row, block_size: int, left: int, budget: int) -> int:
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
            picture.num_scheduled += 1
            cost += picture.unit_cost
    return cost


def encoding_cost(row: Row) -> int:
    """Prompt tokens that take as long as what is left to encode for a row."""
    if not row.pictures:
        return 0
    pictures = (placed.picture for placed in row.pictures.left(row.kv_len))
    return sum((one.num_units - one.num_scheduled) * one.unit_cost for one in pictures)


def micro_batch_size(rows: Collection[Row], num_micro_batches: int) -> int:
    """How many rows that decode the next launch may have: a share of all, so that the others are left for the
    launches beside it.
    """
    if num_micro_batches == 1:
        return sys.maxsize
    decoding = sum(len(row.ids) <= row.kv_len < row.end for row in rows)
    return -(-decoding // num_micro_batches)


def needed_pictures(rows: Iterable[Row]) -> set[PictureState]:
    """The pictures that rows are still to read, or whose shapes they wait for."""
    return {
        placed.picture
        for row in rows
        if row.pictures and not row.ended
        for placed in row.pictures.placed
        if placed.end > row.kv_len or not placed.picture.shape.done()
    }
