"""Drafter: a model, or heads, that proposes tokens for all rows of a step at once.

One rank drafts, the one that samples, and tells the others. Drafts are sampled as the row's own tokens are:
with its parameters, its grammar and the random numbers of those tokens. So a draft that computes the same
logits is always right, whatever the temperature.

A draft model is a smaller model with a cache of its own, whose blocks are those of the rows. Its K and V are
computed along with prompts, and along with drafts. Where they are missing (rows that paused, blocks of rows
that paused, tokens of an earlier worker) they are computed before the next draft, in chunks.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from gpu_worker.engine.batch.row import Row, RowSlice, StepPart, arrange, request_at
from gpu_worker.engine.batch.sampling_state import GrammarMask, SampleRequest, SamplingState
from gpu_worker.engine.batch.split_step import Forward, is_out_of_memory, release_tensors
from gpu_worker.engine.batch.step_result import Int32
from gpu_worker.engine.cuda.graphs import Capture, CudaGraphs
from gpu_worker.engine.drafting.proposers import TRIAL_PROPOSALS, Acceptance, ProposalCosts, Proposer
from gpu_worker.engine.model import warmup
from gpu_worker.engine.model.model import Draft, LoadedModel
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.engine.sampling.grammar import Matchers
from gpu_worker.engine.sampling.sampler import sample

log = logging.getLogger(__name__)

NO_DRAFT = -1
"""Fills up the drafts that are sent to other ranks."""


def draft_proposer_of(row: Row) -> Proposer | None:
    """The proposer of a row for which a model drafts."""
    return row.proposer if row.proposer and row.proposer.drafts_by else None


@dataclass(slots=True)
class DraftChain:
    """The drafts of one row, one after the other.

    Attributes:
        count: how many are wanted.
        state: that of the row after the drafts so far.
        piece: what a draft model computes next.
        hidden: of heads, the state [any] of the model's dtype from which the next draft is made.
    """

    row: Row
    proposer: Proposer
    count: int
    state: SamplingState | None
    piece: RowSlice | None = None
    hidden: torch.Tensor | None = None
    drafted: list[int] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        samples = self.piece is None or self.piece.samples
        return samples and len(self.drafted) < self.count

    @property
    def last(self) -> int:
        """The token before the next draft."""
        return self.drafted[-1] if self.drafted else self.proposer.text.last

    @property
    def sample_request(self) -> SampleRequest | None:
        """How the next draft is sampled."""
        return request_at(self.state, self.row.index + len(self.drafted))

    def add(self, token: int) -> None:
        self.drafted.append(token)
        self.state = self.state.after(token) if self.state else None
        if self.piece:
            self.piece.row.last_id = token
            self.piece = RowSlice(self.piece.row, self.piece.kv_len, 1, True)


class Drafter(StepPart):
    """Makes drafts before each step. One of this class makes none: it stands on ranks that do not draft.

    Attributes:
        worker: what became of all rows' drafts.
        asked: the last drafts.
    """

    def __init__(
        self,
        draft: Draft,
        target: LoadedModel,
        matchers: Matchers,
        costs: ProposalCosts,
        communicator: Communicator,
    ) -> None:
        self.method = draft.method
        self.num_drafted = draft.num_tokens
        self.device = target.device
        self.vocab_size = target.vocab_size
        self.matchers = matchers
        self.costs = costs
        self.communicator = communicator
        self.worker = Acceptance()
        self.asked: list[DraftChain] = []

    # What kinds of drafters have of their own.

    def begin(self, chains: Sequence[DraftChain]) -> list[DraftChain]:
        """Those that are ready."""
        return []

    def compute(self, chains: Sequence[DraftChain]) -> tuple[list[DraftChain], torch.Tensor]:
        """Compute the next token of each → those that draft one more, in the order of their logits float
        [chains, vocabulary of the draft].
        """
        raise NotImplementedError

    def on_forward(self, slices: Sequence[RowSlice]) -> None:
        """Take note of a step that the model has just computed."""

    def capture(self, capture: Capture, max_rows: int) -> None:
        """Capture what can be captured of drafts for up to `max_rows` rows."""

    def measure_ms(self, num_rows: int) -> float:
        """ms of one draft for each of so many rows."""
        return 0.0

    # What all do.

    def draft(self, chains: Sequence[DraftChain]) -> None:
        """Make the drafts of each row, at most `count`; none where it is not ready to draft."""
        running = self.begin(chains)
        while running:
            sampling, logits = self.compute(running)
            requests = [chain.sample_request for chain in sampling]
            self.matchers.finish_masks(requests)
            ids = sample(fit(logits, self.vocab_size), requests).ids.tolist() if sampling else ()
            for chain, token in zip(sampling, ids, strict=True):
                chain.add(token)
            running = [chain for chain in running if chain.goes_on]

    def make_proposer(self, ids: Int32, grammar: GrammarMask | None) -> Proposer:
        """The proposer of a row with these ids so far."""
        acceptance = Acceptance(budget=self.worker.budget, gate=self.worker)
        return Proposer(ids, grammar, self.num_drafted, acceptance, self.costs, drafts_by=self.method)

    def before(self, rows: Any) -> None:
        """Leave proposals for the next step with its rows, on all ranks those of one. A step has none if
        memory does not suffice for them; of several ranks the worker ends.
        """
        self.asked = wanted = self.wanted(rows.decoding(), rows.block_size, rows.num_spare)
        if not wanted:
            return
        try:
            self.draft(wanted)
        except RuntimeError as error:
            if self.communicator.world_size > 1 or not is_out_of_memory(error):
                raise
            log.warning("out of memory while drafting: a step has no proposals")
            release_tensors(error)
            torch.cuda.empty_cache()
            return
        missing = [[NO_DRAFT] * (self.num_drafted - len(one.drafted)) for one in wanted]
        filled = [one.drafted + rest for one, rest in zip(wanted, missing, strict=True)]
        sent = torch.tensor(filled).to(self.device)
        self.communicator.broadcast_tensor(sent)
        self.take(sent)

    def wanted(self, rows: Sequence[Row], block_size: int, spare: int) -> list[DraftChain]:
        """The rows that want drafts, the same on all ranks. A trial is spread over the rows: a draft for all
        takes little longer than for one.
        """
        wanted: list[DraftChain] = []
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
                wanted.append(DraftChain(row, proposer, count, row.sampling_state))
                spare -= count
        return wanted

    def take(self, drafts: torch.Tensor) -> None:
        """Leave drafts int64 [rows, most drafts], filled up with NO_DRAFT, with the rows."""
        for one, ids in zip(self.asked, drafts.tolist(), strict=True):
            one.proposer.take([token for token in ids if token != NO_DRAFT], len(self.asked))


def is_forced(row: Row) -> bool:
    """Whether a row's grammar says what comes next, so that nothing need be drafted."""
    state = row.sampling_state
    return bool(state and state.grammar and state.grammar.forced(1))


def fit(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """logits float [rows, any] → [rows, vocab_size]: tokens that a draft lacks are never likely."""
    missing = vocab_size - logits.shape[1]
    if missing > 0:
        return torch.nn.functional.pad(logits, (0, missing), value=torch.finfo(logits.dtype).min)
    return logits[:, :vocab_size].contiguous() if missing else logits


MAX_CATCH_UP = {"cpu": 128, "cuda": 2048}
"""Tokens that are computed before a draft, at most, of rows whose K and V are missing."""


class BlockTable:
    """Which tokens of each block the draft's cache holds.

    Attributes:
        held: int64 [blocks + 1]: how many, from the block's first on.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.held = np.zeros(num_blocks + 1, np.int64)
        self.block_size = block_size

    def length(self, blocks: Int32) -> int:
        """How many tokens of a row are there from its first on."""
        held = self.held[blocks]
        incomplete = np.flatnonzero(held < self.block_size)
        full = int(incomplete[0]) if len(incomplete) else len(held)
        return full * self.block_size + (int(held[full]) if full < len(held) else 0)

    def note(self, blocks: Int32, length: int) -> None:
        """A row's first `length` tokens are there."""
        full, rest = divmod(length, self.block_size)
        self.held[blocks[:full]] = self.block_size
        if rest:
            self.held[blocks[full]] = max(self.held[blocks[full]], rest)


def piece_of(row: Row, known: Int32, begin: int, end: int, samples: bool) -> RowSlice:
    """The positions of a row's known ids from `begin` to `end`; two or fewer as a row that decodes, the last
    token as a proposal of it.
    """
    if samples and end - begin <= 2:
        first, *rest = known[begin:end].tolist()
        drafting = Row(row.number, known[:begin], 0, 1, row.blocks, last_id=first)
        return RowSlice(drafting, begin, end - begin, True, proposed=rest)
    return RowSlice(Row(row.number, known, 0, 1, row.blocks), begin, end - begin, samples)


class ModelDrafter(Drafter):
    """Drafts by a model.

    Attributes:
        graphs: captured steps; None computes each step by itself.
    """

    def __init__(self, draft: Draft, *others: Any) -> None:
        super().__init__(draft, *others)
        assert draft.cached
        self.loaded = loaded = draft.cached
        self.block_size = loaded.geometry.block_size
        self.table = BlockTable(loaded.cache.num_blocks, self.block_size)
        self.graphs: CudaGraphs | None = None

    def capture(self, capture: Capture, max_rows: int) -> None:
        """Capture steps in which all rows draft one token."""
        if self.loaded.capturable:
            self.graphs = warmup.capture_steps(self.loaded, capture, max_rows, deterministic=False)

    def sleep(self) -> None:
        self.graphs = None
        self.table.held[:] = 0

    def measure_ms(self, num_rows: int) -> float:
        return self.time_single_tokens(self.forward, num_rows)

    def time_single_tokens(self, forward: Forward, num_rows: int) -> float:
        """ms of a step of one token of so many rows."""
        slices = warmup.single_tokens(num_rows, self.vocab_size, self.block_size)
        return warmup.fastest_ms(lambda: forward(slices), self.loaded.device)

    def granted(self, blocks: Sequence[Int32]) -> None:
        for one in blocks:
            self.table.held[one] = 0

    def on_forward(self, slices: Sequence[RowSlice]) -> None:
        """Compute the chunks of prompts that the model has computed, as far as all tokens before them are
        there.
        """
        chunks = []
        for row_slice in slices:
            proposer = draft_proposer_of(row_slice.row)
            if row_slice.decodes or proposer is None or proposer.acceptance.is_paused:
                continue
            row = row_slice.row
            if self.held_length(row, proposer) >= row_slice.begin and row_slice.kv_len < self.loaded.context:
                chunks.append(RowSlice(row, row_slice.begin, row_slice.count, samples=False))
                proposer.kv_len = row_slice.kv_len
                self.table.note(row.blocks, row_slice.kv_len)
        if chunks:
            self.forward(chunks)

    def held_length(self, row: Row, proposer: Proposer) -> int:
        """How many of a row's tokens are in the cache, from the first on."""
        if proposer.kv_len is None:
            proposer.kv_len = min(self.table.length(row.blocks), proposer.text.length - 1)
        return proposer.kv_len

    def begin(self, chains: Sequence[DraftChain]) -> list[DraftChain]:
        left = MAX_CATCH_UP[self.loaded.device.type] + 2 * len(chains)
        for chain in chains:
            if chain.proposer.text.length + chain.count <= self.loaded.context:
                chain.piece = self.catch_up(chain, left)
                left -= chain.piece.count if chain.piece else 0
        return [chain for chain in chains if chain.piece]

    def compute(self, chains: Sequence[DraftChain]) -> tuple[list[DraftChain], torch.Tensor]:
        """Rows that have tokens left to compute before the next draft do not draft."""
        by_row = {chain.piece.row.number: chain for chain in chains if chain.piece}
        pieces = arrange([chain.piece for chain in chains if chain.piece])
        logits = self.forward(pieces)
        for piece in pieces:
            by_row[piece.row.number].proposer.kv_len = piece.kv_len
        return [by_row[piece.row.number] for piece in pieces if piece.samples], logits

    def catch_up(self, one: DraftChain, left: int) -> RowSlice | None:
        """What a row must compute before its first draft: all known tokens whose K and V are missing, at
        least the last; if these are more than `left`, only so many. None if it cannot draft.
        """
        text, row = one.proposer.text, one.row
        begin = self.held_length(row, one.proposer)
        if (
            text.length - begin > MAX_CATCH_UP[self.loaded.device.type]
            and one.proposer.acceptance.is_on_trial
        ):
            return None  # too dear as long as nobody knows whether drafts pay
        end = min(text.length, begin + max(1, left))
        self.table.note(row.blocks, end)
        known, samples = text.known[: text.length], end == text.length
        return piece_of(row, known, begin, end, samples)

    @torch.inference_mode()
    def forward(self, slices: Sequence[RowSlice]) -> torch.Tensor:
        """→ logits float [slices that sample, vocabulary], of the last token of each."""
        if self.graphs and self.graphs.can_run(slices, None):
            logits = self.graphs.run(slices, None)
        else:
            logits = self.loaded.compute(slices)
        counts = [piece.num_logits for piece in slices]
        if sum(counts) == sum(piece.samples for piece in slices):
            return logits
        ends = np.cumsum(counts)[[piece.samples for piece in slices]] - 1
        return logits[torch.as_tensor(ends, device=logits.device)]
