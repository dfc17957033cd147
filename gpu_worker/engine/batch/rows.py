"""The row table: which rows take part in the next step and what becomes of them. Pure bookkeeping, no
tensors.

A step has two ends. `launch` decides who takes part and advances lengths, `read` takes the sampled ids. One
more step may be launched between the two: everything that `launch` needs is arithmetic, so only what depends
on sampled ids waits for `read`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from common.messages.packing import pack_floats, pack_ids
from gpu_worker.engine.batch.outcome import (
    NO_PROMPT_LOGPROBS,
    NO_TOP_LOGPROBS,
    Int32,
    PromptLogprobs,
    StepResultBuilder,
    TopLogprobs,
)
from gpu_worker.engine.batch.sampling_state import SampleRequest, SamplingState
from gpu_worker.protocol import Grant, StartRow

NO_BLOCKS: Int32 = np.zeros(0, np.int32)
MAX_SCORED_TOKENS = 256


@dataclass(slots=True, eq=False)
class Row:
    """`kv_len` and `index` are as of the last launched step, `read_index` as of the last read one.

    Attributes:
        ids: the prompt and the tokens generated before this row started; what prefill computes.
        blocks: KV blocks in order; position p lies in blocks[p // block_size].
        kv_len: tokens whose KV is written.
        index: index of the next token to sample.
        ends: what ids end the row with which reason.
        anew: what was generated before is computed as if it were of the prompt.
        prompt_logprobs: how many of the likeliest tokens are told beside each token of `ids`; None where
            nothing is told of these.
        manner: how it chooses; None is plainly greedy.
        last_id: input of the next decode step, once the step that sampled it is read.
        place: of its token among those sampled by the last launched step that held it.
        in_flight: steps launched with this row and not read yet.
    """

    number: int
    ids: Int32
    index: int
    max_new_tokens: int
    blocks: Int32
    ends: Mapping[int, str] = field(default_factory=dict)
    sampling_state: SamplingState | None = None
    base: int = 0
    generated_as_prompt: bool = False
    prompt_logprobs: int | None = None
    kv_len: int = 0
    read_index: int = 0
    last_id: int = 0
    sample_place: int = 0
    in_flight: int = 0
    ended: bool = False

    @classmethod
    def of(cls, start: StartRow, eos_ids: Sequence[int], anew: bool = False) -> "Row":
        ids, blocks = np.frombuffer(start.ids, "<i4"), np.frombuffer(start.blocks, "<i4")
        ends = dict.fromkeys(start.stopping.stop_ids, "stop_sequence")
        ends |= {} if start.stopping.ignore_eos else dict.fromkeys(eos_ids, "eos_token")
        state = SamplingState.of(start, list(ends))
        told = start.prompt_logprobs
        return cls(
            start.row,
            ids,
            start.base,
            start.stopping.max_new_tokens,
            blocks,
            ends,
            state,
            start.base,
            anew,
            told,
            read_index=start.base,
        )

    @property
    def first_length(self) -> int:
        """Of the sequence, when the K of its first tokens are computed."""
        return len(self.ids) - (0 if self.generated_as_prompt else self.base)


@dataclass(slots=True)  # not frozen: to make one would take twice as long
class RowSlice:
    """What a row does in one step: positions `begin` to `begin + count - 1`, then a sample where `samples`.

    Attributes:
        source: where its input is sampled by a step that is not read yet: the place among that step's
            samples.
        scores: of so many tokens of the prompt it tells how likely they are, from position `begin + 1` on.
    """

    row: Row
    begin: int
    count: int
    samples: bool
    source_place: int | None = None
    num_scored: int = 0

    @property
    def decodes(self) -> bool:
        return self.begin >= len(self.row.ids)

    @property
    def kv_len(self) -> int:
        return self.begin + self.count

    @property
    def num_logits(self) -> int:
        """Of how many tokens logits are wanted, up to its last: those that tell of the prompt, then the one
        that samples.
        """
        return self.num_scored + self.samples

    @property
    def sample_request(self) -> SampleRequest | None:
        """None where the likeliest token is wanted."""
        state, index = self.row.sampling_state, self.kv_len - (len(self.row.ids) - self.row.base)
        return SampleRequest(state, index) if state and state.applies_at(index) else None


def arrange(slices: Sequence[RowSlice]) -> list[RowSlice]:
    """The order on the line: rows that decode, longest first, then the chunks of prompts in the order of
    starts.
    """
    decoding = sorted(
        (row_slice for row_slice in slices if row_slice.decodes), key=attrgetter("begin"), reverse=True
    )
    return decoding + [row_slice for row_slice in slices if not row_slice.decodes]


class Rows:
    """
    Attributes:
        max_scored_tokens: tokens in one step of prompts that are told of: each needs a line of logits.
        outgrown_at: beyond this length the model wants every K anew: then a row is preempted, and starts
            again with all its tokens.
    """

    def __init__(
        self,
        block_size: int,
        eos_ids: Sequence[int],
        max_scored_tokens: int = MAX_SCORED_TOKENS,
        outgrown_at: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.eos_ids = eos_ids
        self.max_scored_tokens, self.outgrown_at = max_scored_tokens, outgrown_at
        self.rows: dict[int, Row] = {}  # in the order of starts
        self.step = 0
        self.until = 0
        self.prefill_tokens = 0
        self.outcome = StepResultBuilder()

    def apply(self, grant: Grant) -> list[Int32]:
        """Takes a grant; returns the blocks that rows own newly."""
        self.until, self.prefill_tokens = grant.until, grant.prefill_tokens
        for number, why in grant.stops:
            if number in self.rows:
                self.finish(self.rows[number], why)
        granted = [self.extend(number, np.frombuffer(blocks, "<i4")) for number, blocks in grant.blocks]
        for start in grant.starts:
            self.rows[start.row] = Row.of(start, self.eos_ids, self.outgrown_at is not None)
            granted.append(self.rows[start.row].blocks)
        return granted

    def extend(self, number: int, blocks: Int32) -> Int32:
        row = self.rows.get(number)
        if row is None:
            return NO_BLOCKS
        row.blocks = np.concatenate((row.blocks, blocks))
        return blocks

    def launch(self) -> list[RowSlice]:
        """The parts of the next step, as they stand on the line; empty where no step may or can be run."""
        if self.step >= self.until:
            return []
        slices = arrange(self.schedule_slices())
        self.step += bool(slices)
        place = 0
        for row_slice in slices:
            row = row_slice.row
            row.kv_len, row.sample_place = row_slice.kv_len, place
            row.index += row_slice.samples
            row.in_flight += 1
            place += row_slice.samples
        return slices

    def schedule_slices(self) -> list[RowSlice]:
        slices, left, scores = [], self.prefill_tokens, self.max_scored_tokens
        for row in self.rows.values():
            if row.ended or row.index >= row.max_new_tokens:
                continue
            begin = row.kv_len
            room, prefill = len(row.blocks) * self.block_size - begin, len(row.ids) - begin
            if prefill <= 0:
                if room > 0:
                    slices.append(RowSlice(row, begin, 1, True, row.sample_place if row.in_flight else None))
                continue
            told = row.prompt_logprobs is not None
            count = min(room, prefill, left, scores if told else left)
            if count > 0:
                samples = count == prefill
                slices.append(RowSlice(row, begin, count, samples, num_scored=count - samples if told else 0))
                left -= count
                scores -= count if told else 0
        return slices

    def collect(
        self,
        slices: Sequence[RowSlice],
        ids: Sequence[int],
        logprobs: Sequence[float],
        top_logprobs: Mapping[int, TopLogprobs] = NO_TOP_LOGPROBS,
        prompt_logprobs: Sequence[PromptLogprobs] = NO_PROMPT_LOGPROBS,
    ) -> None:
        """Takes what a launched step brought: `ids` has one entry for each part that samples, in order;
        `top_logprobs` is by their place there; `prompt_logprobs` has one for each part that tells of its prompt, in order.
        """
        sampled, told = enumerate(zip(ids, logprobs, strict=True)), iter(prompt_logprobs)
        for row_slice in slices:
            row_slice.row.in_flight -= 1
            if row_slice.num_scored:
                self.add_prompt_logprobs(row_slice, next(told))
            if row_slice.samples:
                place, (token, logprob) = next(sampled)
                self.add_token(row_slice, token, logprob, top_logprobs.get(place))
            if row_slice.row.ended:
                self.release(row_slice.row)

    def add_prompt_logprobs(self, row_slice: RowSlice, told: PromptLogprobs) -> None:
        if not row_slice.row.ended:
            self.outcome.prompt_logprobs.append((row_slice.row.number, row_slice.begin + 1, *told))

    def add_token(self, row_slice: RowSlice, token: int, logprob: float, top: TopLogprobs | None) -> None:
        row, outcome = row_slice.row, self.outcome
        if row.ended:
            return
        if not row_slice.decodes:
            outcome.prefilled.append((row.number, row_slice.kv_len))
        if top:
            outcome.top_logprobs.append((len(outcome.samples), pack_ids(top.ids), pack_floats(top.logprobs)))
        outcome.samples.append((row.number, row.read_index, token, logprob))
        row.last_id = token
        row.read_index += 1
        if row.sampling_state:
            row.sampling_state.accept(token)
        if row.read_index >= row.max_new_tokens:
            self.finish(row, "length")
        elif token in row.ends:
            self.finish(row, row.ends[token])
        elif row_slice.kv_len == self.outgrown_at:
            self.finish(row, "preempted")

    def finish(self, row: Row, why: str) -> None:
        if not row.ended:
            row.ended = True
            self.outcome.ended.append((row.number, why, row.read_index))
            self.release(row)

    def release(self, row: Row) -> None:
        """Lets go of an ended row, once no launched step holds it."""
        if row.in_flight == 0 and self.rows.pop(row.number, None) is not None:
            self.outcome.released.append((row.number, row.kv_len))
            self.outcome.freed.append(row.blocks)

    def take_result(self) -> StepResultBuilder:
        """What happened since the last call."""
        outcome, self.outcome = self.outcome, StepResultBuilder()
        return outcome
