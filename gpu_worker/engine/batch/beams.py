"""Beam search: the text of each beam, the rules of the search, the rows and KV blocks of a group, and the
best continuations of a step.

The rules are those of transformers' `GenerationMixin._beam_search` for a batch of one. Where several
continuations of one step end, transformers keeps as many candidates as are needed to go on with `width`
beams; so does `num_candidates`. Scores are transformers', too: penalties, bans and masks change
log-probabilities, not logits, in float32.

To the batcher a group is one row. It has `leader`'s number, and its blocks are granted to the leader.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from common.detokenize import Detokenizer, StopMatcher
from common.messages.records import BeamSequence, num_group_blocks, pack_sequences
from common.messages.request import BeamParams, StoppingParams
from common.model_files import read_tokenizer
from gpu_worker.engine.batch.inputs import to_device
from gpu_worker.engine.batch.row import Row, RowOutput, RowSlice, StepPart, StepSlices
from gpu_worker.engine.batch.sampling_state import SampleRequest, SamplingState
from gpu_worker.engine.batch.step_result import Candidate, Int32, StepSamples
from gpu_worker.engine.sampling.sampler import adjust_scores
from gpu_worker.protocol import StepResult


@dataclass(slots=True, eq=False)
class BeamText:
    """The text of a beam.

    Attributes:
        num_free: next tokens whose text is no part of a stop string, by `min_new_tokens`.
    """

    detokenizer: Detokenizer
    matcher: StopMatcher
    num_free: int

    def after(self, token: int) -> "BeamText":
        """A copy that has taken one more token."""
        other = BeamText(self.detokenizer.copy(), copy(self.matcher), max(0, self.num_free - 1))
        text = other.detokenizer.step(token)
        if not self.num_free:
            other.matcher.step(text)
        return other


BeamTextFactory = Callable[[list[int], StoppingParams], BeamText]
"""(prompt, stopping params with stop strings) → the text of a beam without tokens."""


def text_factory(directory: Path) -> BeamTextFactory:
    """Make texts with the tokenizer in a model's directory, which is read when the first text is made."""

    @cache
    def tokenizer() -> Tokenizer:
        return read_tokenizer(directory)

    def make(prompt: list[int], stopping: StoppingParams) -> BeamText:
        detokenizer = Detokenizer(tokenizer(), prompt)
        return BeamText(detokenizer, StopMatcher(stopping.stop), stopping.min_new_tokens)

    return make


AT_FULL, NEVER = 1, 2
"""Values of `BeamParams.early_stopping`."""
LARGEST = float(np.finfo(np.float32).max)


@dataclass(slots=True, eq=False)
class Beam:
    """One open sequence.

    Attributes:
        parent: the place of the beam, one step ago, that it continues.
        ids, logprobs: of its generated tokens.
        total: the sum of its log-probabilities.
        text: None without stop strings.
    """

    parent: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    total: float = 0.0
    state: SamplingState | None = None
    text: BeamText | None = None


@dataclass(slots=True, eq=False)
class BeamSearch:
    """The search of one request.

    Attributes:
        ends: ids that end a sequence → the reason.
        beams: the open sequences, all of the same length. At first there is one, without tokens.
        length: tokens of each open sequence.
        finished: the best sequences that have ended, at most `width`, the best first.
        failure: why the last beam that died did so.
        is_over: no better sequence will come.
    """

    params: BeamParams
    max_new_tokens: int
    ends: Mapping[int, str]
    beams: list[Beam]
    length: int = 0
    finished: list[BeamSequence] = field(default_factory=list)
    failure: str = "grammar"
    is_over: bool = False

    @property
    def num_candidates(self) -> int:
        """How many of the best continuations of all beams a step needs: each beam can end with each of the
        ids in `ends`, and `width` others are needed to go on.
        """
        return max(2, 1 + len(self.ends)) * self.params.width

    @property
    def totals(self) -> list[float]:
        return [beam.total for beam in self.beams]

    @property
    def finish_reason(self) -> str | None:
        """Why the request ends: the reason of the best sequence; None while the search goes on."""
        if not self.is_over:
            return None
        return self.finished[0].reason if self.finished else self.failure

    def advance(self, candidates: Iterable[Candidate]) -> None:
        """Take the best continuations of all beams, the best first.

        Of the first `width`, those that end are sequences; those that do not end, up to `width`, go on. One
        whose total is -inf, or no number, is no continuation.
        """
        self.length += 1
        children: list[Beam] = []
        for rank, candidate in enumerate(map(Candidate._make, candidates)):
            if rank >= self.params.width <= len(children):
                break
            if candidate.total > -math.inf and (child := self.extend(candidate)):
                if reason := self.end_of(child, candidate.token):
                    if rank < self.params.width:
                        self.finish(child, reason)
                elif len(children) < self.params.width:
                    children.append(child)
        self.beams = children
        self.is_over = not (children and self.can_improve())

    def extend(self, candidate: Candidate) -> Beam | None:
        """Return the beam with one more token; None if its grammar refuses the token."""
        parent, token = self.beams[candidate.parent], candidate.token
        state = parent.state and parent.state.copy()
        if state and (failure := state.accept(token)):
            self.failure = failure
            return None
        text = parent.text and parent.text.after(token)
        ids, logprobs = [*parent.ids, token], [*parent.logprobs, candidate.logprob]
        return Beam(candidate.parent, ids, logprobs, candidate.total, state, text)

    def end_of(self, beam: Beam, token: int) -> str | None:
        """Why a beam ends with its newest token."""
        if self.length >= self.max_new_tokens:
            return "length"
        return self.ends.get(token) or ("stop_sequence" if beam.text and beam.text.matcher.matched else None)

    def finish(self, beam: Beam, reason: str) -> None:
        """Keep an ended sequence if it is among the best."""
        score = normalized(beam.total, self.length, self.params.length_penalty)
        self.finished.append(BeamSequence(beam.ids, beam.logprobs, score, reason))
        self.finished.sort(key=lambda sequence: -sequence.score)
        del self.finished[self.params.width :]

    def can_improve(self) -> bool:
        """Whether an open beam may become a better sequence, by `early_stopping`. With a length penalty above
        0 a longer sequence has the better score; NEVER takes this into account.
        """
        params = self.params
        if len(self.finished) < params.width:
            return True
        if params.early_stopping == AT_FULL:
            return False
        to_the_end = params.early_stopping == NEVER and params.length_penalty > 0
        length = self.max_new_tokens if to_the_end else self.length
        best = normalized(max(self.totals), length, params.length_penalty)
        return best > self.finished[-1].score


def normalized(total: float, length: int, penalty: float) -> float:
    """The score of a sequence: the sum of its log-probabilities, divided by its length to the power of
    `penalty`. Scores travel as float32.
    """
    try:
        score = total / math.pow(length, penalty)
    except (OverflowError, ZeroDivisionError):
        score = total * 0.0 if penalty > 0 else total * math.inf
    return max(-LARGEST, min(LARGEST, score))


Copy = tuple[int, int]
"""(source, target), of blocks or of slots of states."""


class Copies(StepPart):
    """Copies what beams of the next step share no longer.

    Attributes:
        copies: that must be made before the step just launched is computed.
    """

    def __init__(self, copy: Callable[[Sequence[Copy]], None], copies: list[Copy]) -> None:
        self.copy = copy
        self.copies = copies

    def prepare(self, rows: Any, slices: StepSlices) -> Sequence[RowSlice]:
        if self.copies:
            self.copy(self.copies)
            self.copies.clear()
        return slices


@dataclass(slots=True)
class BeamBlocks:
    """The blocks of a group behind the full blocks of its prompt. Beams share what they have in common: a
    full block is shared, the last one is copied while it has room.

    `num_group_blocks` blocks always suffice. At most `width` beams have tables, of equal length, so with
    nothing shared they hold that many. What no continued beam has is free. Of each beam that is continued the
    first child takes the table as it is, every other child one more block. Sources of copies are blocks of
    first children, targets were free: no block is both.

    Attributes:
        tables: blocks of each beam, in order.
        granted: blocks that they may have.
    """

    tables: list[list[int]]
    granted: list[int]

    def fork(self, parents: Sequence[int], is_full: bool) -> list[Copy]:
        """Give the next beams the tables of their `parents` → the blocks to copy. `is_full`: the last block
        of each table is full, and each gets one more.
        """
        tables = [[*self.tables[parent]] for parent in parents]
        free = set(self.granted).difference(*tables)
        copies: list[Copy] = []
        for number, table in enumerate(tables):
            if is_full:
                table.append(free.pop())
            elif parents[number] in parents[:number]:
                copies.append((table[-1], free.pop()))
                table[-1] = copies[-1][1]
        self.tables = tables
        return copies


@dataclass(slots=True, eq=False)
class BeamGroup(RowOutput):
    """One beam search in a batch. The leader computes the prompt, as every row does; then each beam has a row
    of its own.

    Attributes:
        copies, slot_copies: take the blocks, and the slots of states, to copy before the next step.
        rows: of the beams that the last launched step computed; none before the second token.
        blocks: None before that.
        num_decoded: tokens that the rows have computed together.
        slots: the beams' slots of states, one each, shared out as their last blocks are; None without states.
    """

    leader: Row
    search: BeamSearch
    block_size: int
    copies: list[Copy]
    slot_copies: list[Copy]
    num_places: int
    rows: list[Row] = field(default_factory=list)
    blocks: BeamBlocks | None = None
    num_decoded: int = 0
    slots: BeamBlocks | None = None
    has_branches = True

    @property
    def num_shared(self) -> int:
        """Full blocks of the prompt."""
        return len(self.leader.ids) // self.block_size

    @property
    def kv_len(self) -> int:
        """Tokens that each beam holds: the newest one is not computed yet."""
        return len(self.leader.ids) + self.search.length - 1

    def extend(self, blocks: Int32) -> None:
        if self.blocks:
            self.blocks.granted += blocks.tolist()

    def num_in_flight(self, row: Row) -> int:
        return self.leader.in_flight + sum(row.in_flight for row in self.rows)

    def may_join(self, row: Row, step: int) -> bool:
        return (self.rows or [row])[0].launched_step < step

    def decode(self, row: Row, spare: int, block_size: int) -> Sequence[RowSlice]:
        """Nothing while a step is not read, or the blocks granted do not suffice."""
        if self.num_in_flight(row) or not self.has_room:
            return ()
        self.fork()
        self.num_decoded += len(self.rows)
        return [RowSlice(row, row.kv_len, 1, samples=True) for row in self.rows]

    def is_unsure(self, row_slice: RowSlice) -> bool:
        """It is not known which beams go on."""
        return row_slice.samples

    def take(self, row_slice: RowSlice, samples: StepSamples, place: int, result: StepResult) -> str | None:
        """The search goes on once all of its slices are read."""
        leader, search = self.leader, self.search
        result.num_beams += row_slice.decodes
        if not row_slice.samples or leader.ended or self.num_in_flight(leader):
            return None
        if not search.length:
            result.prefilled.append((leader.number, leader.kv_len))
        search.advance(samples.candidates.get(leader.number, ()))
        leader.collected_index = search.length
        if why := search.finish_reason:
            result.sequences.append((leader.number, pack_sequences(search.finished)))
        return why

    @property
    def has_room(self) -> bool:
        """Whether the blocks granted suffice for one more token of all beams."""
        width, num_prompt = self.search.params.width, len(self.leader.ids)
        needed = num_group_blocks(num_prompt, self.kv_len + 1, width, self.block_size)
        return len(self.leader.blocks) >= needed

    def fork(self) -> None:
        """Make the rows of the search's beams."""
        beams, kv_len = self.search.beams, self.kv_len
        if self.blocks is None:
            end = -(-kv_len // self.block_size)
            own = self.leader.blocks[self.num_shared :].tolist()
            self.blocks = BeamBlocks([own[: end - self.num_shared]], own)
            if self.leader.slots:
                self.slots = BeamBlocks([self.leader.slots[:1]], self.leader.slots)
        is_full = kv_len % self.block_size == 0
        parents = [beam.parent for beam in beams]
        self.copies += self.blocks.fork(parents, is_full)
        if self.slots:
            self.slot_copies += self.slots.fork(parents, is_full=False)
        shared = self.leader.blocks[: self.num_shared]
        while len(self.rows) < len(beams):
            self.rows.append(replace(self.leader, line=array("q", self.leader.line)))
        del self.rows[len(beams) :]
        for row, beam, table in zip(self.rows, beams, self.blocks.tables, strict=True):
            row.blocks = np.concatenate((shared, np.array(table, np.int32)))
            row.kv_len = kv_len
            row.last_id = beam.ids[-1] if beam.ids else 0
            row.sampling_state = beam.state
        for row, slots in zip(self.rows, self.slots.tables if self.slots else (), strict=False):
            row.slots = slots


@dataclass(frozen=True, slots=True)
class SearchStep:
    """The samples of one beam search in a step: `begin` to `end` among all samples, one for each beam.
    `num_found` continuations are looked for.
    """

    number: int
    search: BeamSearch
    begin: int
    end: int
    num_found: int


def search_steps(slices: StepSlices, vocab_size: int) -> Iterator[SearchStep]:
    """Yield the searches that sample in a step of these slices. The slices of a search are neighbours. One
    that has lost a beam, since its forward failed, has ended.
    """
    end = len(slices.rows)
    for output, parts in groupby(slices.others, lambda row_slice: row_slice.row.output):
        begin, end = end, end + sum(row_slice.num_samples for row_slice in parts)
        if isinstance(output, BeamGroup) and end - begin == len(output.search.beams):
            num_found = min(output.search.num_candidates, (end - begin) * vocab_size)
            yield SearchStep(output.leader.number, output.search, begin, end, num_found)


@torch.inference_mode()
def score_beams(
    logits: torch.Tensor, requests: Sequence[SampleRequest | None], steps: Sequence[SearchStep], samples: bool
) -> torch.Tensor:
    """logits float [rows, vocabulary] and requests of all samples of a step → the best continuations of its
    searches, one search after the other, the best first: float64 [4, continuations], the fields of Candidate.
    If this rank does not sample: room for those of another one.
    """
    if not samples:
        size = sum(step.num_found for step in steps)
        return torch.zeros((4, size), dtype=torch.float64, device=logits.device)
    return torch.cat(
        [
            best_continuations(logits[step.begin : step.end], requests[step.begin : step.end], step)
            for step in steps
        ],
        1,
    )


def candidates_of(steps: Sequence[SearchStep], found: torch.Tensor) -> dict[int, list[Candidate]]:
    """What `score_beams` has found, float64 [4, continuations] on the host, by the number of the search."""
    each = (Candidate(int(parent), int(token), *scores) for parent, token, *scores in found.T.tolist())
    return {step.number: list(islice(each, step.num_found)) for step in steps}


def best_continuations(
    logits: torch.Tensor, requests: Sequence[SampleRequest | None], step: SearchStep
) -> torch.Tensor:
    """logits float [beams, vocabulary] → float64 [4, n], as `score_beams` has them.

    With a diversity rate continuations are ranked by their sum plus the rate times the place of their beam,
    the best beam's being 0; the sum itself stays. So TensorRT-LLM ranks them by `beamSearchDiversityRate`
    (beamStage3Kernel in cpp/tensorrt_llm/kernels/beamSearchKernels/beamSearchKernelsTemplate.h).
    """
    logprobs = logits.float().log_softmax(-1)
    known = [request for request in requests if request]
    if known:
        adjust_scores(logprobs, known)
    totals = logprobs + to_device(step.search.totals, logits.device, torch.float32)[:, None]
    ranked = totals
    if diversity := step.search.params.diversity:
        ranked = totals + diversity * torch.arange(len(totals), device=logits.device)[:, None]
    best = ranked.flatten().topk(step.num_found).indices
    places, scores = (best // logits.shape[1], best % logits.shape[1]), (logprobs, totals)
    return torch.stack([*(one.double() for one in places), *(one.flatten()[best].double() for one in scores)])
