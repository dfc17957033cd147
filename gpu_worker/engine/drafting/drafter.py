"""Drafter: a model, or heads, that proposes tokens for all rows of a step at once.

One rank drafts, the one that samples, and tells the others. Drafts are sampled as the row's own tokens are:
with its parameters, its grammar and the random numbers of those tokens. So a draft that computes the same
logits is always right, whatever the temperature.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from gpu_worker.engine.batch.row import Row, RowSlice
from gpu_worker.engine.batch.sampling_state import GrammarMask
from gpu_worker.engine.batch.split_step import is_out_of_memory, release_tensors
from gpu_worker.engine.batch.step_result import Int32
from gpu_worker.engine.cuda.graphs import Capture
from gpu_worker.engine.drafting.proposers import TRIAL_PROPOSALS, Acceptance, ProposalCosts, Proposer

log = logging.getLogger(__name__)

NO_DRAFT = -1
"""Fills up the drafts that are sent to other ranks."""


def draft_proposer_of(row: Row) -> Proposer | None:
    """The proposer of a row for which a model drafts."""
    return row.proposer if row.proposer and row.proposer.drafts_by else None


@dataclass(slots=True)
class DraftRow:
    """A row for which drafts are made.

    Attributes:
        count: how many.
    """

    row: Row
    proposer: Proposer
    count: int


class DraftSource:
    """What makes drafts. One of this class makes none: it stands on ranks that do not draft."""

    def draft(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Of each row its drafts, at most `count`; none where it is not ready to draft."""
        return []

    def on_forward(self, slices: Sequence[RowSlice]) -> None:
        """Take note of a step that the model has just computed."""

    def on_granted(self, granted: Iterable[Int32]) -> None:
        """These blocks are empty now."""

    def on_sleep(self) -> None:
        """The caches are given up, and what was captured with them."""

    def capture(self, capture: Capture, max_rows: int) -> None:
        """Capture what can be captured of drafts for up to `max_rows` rows."""

    def measure_ms(self, num_rows: int) -> float:
        """ms of one draft for each of so many rows."""
        return 0.0


class Drafter:
    """Makes drafts before each step.

    Attributes:
        worker: what became of all rows' drafts.
        asked: the rows of the last `draft`.
    """

    def __init__(self, method: str, num_drafted: int, source: DraftSource, costs: ProposalCosts) -> None:
        self.method = method
        self.num_drafted = num_drafted
        self.source = source
        self.costs = costs
        self.worker = Acceptance()
        self.asked: list[DraftRow] = []

    def make_proposer(self, ids: Int32, grammar: GrammarMask | None) -> Proposer:
        """The proposer of a row with these ids so far."""
        acceptance = Acceptance(budget=self.worker.budget, gate=self.worker)
        return Proposer(ids, grammar, self.num_drafted, acceptance, self.costs, drafts_by=self.method)

    def draft(self, rows: Sequence[Row], block_size: int, spare: int, may_fail: bool) -> torch.Tensor | None:
        """Make drafts for rows that decode next, at most `spare` together → int64 [rows, most drafts], filled
        up with NO_DRAFT; None if no row wants any, or if it `may_fail` and memory does not suffice.
        """
        self.asked = wanted = self.wanted(rows, block_size, spare)
        if not wanted:
            return None
        try:
            drafts = self.source.draft(wanted)
        except RuntimeError as error:
            if not may_fail or not is_out_of_memory(error):
                raise
            log.warning("out of memory while drafting: a step has no proposals")
            release_tensors(error)
            torch.cuda.empty_cache()
            return None
        filled = [(*draft, *[NO_DRAFT] * (self.num_drafted - len(draft))) for draft in drafts]
        shape = (len(wanted), self.num_drafted)
        return torch.tensor(filled) if filled else torch.full(shape, NO_DRAFT)

    def wanted(self, rows: Sequence[Row], block_size: int, spare: int) -> list[DraftRow]:
        """The rows that want drafts, the same on all ranks. A trial is spread over the rows: a draft for all
        takes little longer than for one.
        """
        wanted: list[DraftRow] = []
        most_each = spare
        if self.worker.is_on_trial and rows:
            spare = min(spare, TRIAL_PROPOSALS)
            most_each = max(1, TRIAL_PROPOSALS // len(rows))
        for row in rows:
            proposer = draft_proposer_of(row)
            room = len(row.blocks) * block_size - row.kv_len - 1
            most = min(room, row.max_new_tokens - row.index - 1, spare, most_each)
            if proposer is None or most <= 0 or row.num_unread or is_forced(row):
                continue
            if count := proposer.num_worth(most):
                wanted.append(DraftRow(row, proposer, count))
                spare -= count
        return wanted

    def take(self, drafts: torch.Tensor) -> None:
        """Leave drafts int64 [rows, most drafts] of `draft` with the rows."""
        for one, ids in zip(self.asked, drafts.tolist(), strict=True):
            one.proposer.take([token for token in ids if token != NO_DRAFT], len(self.asked))


def is_forced(row: Row) -> bool:
    """Whether a row's grammar says what comes next, so that nothing need be drafted."""
    state = row.sampling_state
    return bool(state and state.grammar and state.grammar.forced(1))
