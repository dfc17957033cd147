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
    manner: SamplingState | None = None
    base: int = 0
    anew: bool = False
    prompt_logprobs: int | None = None
    kv_len: int = 0
    read_index: int = 0
    last_id: int = 0
    place: int = 0
    in_flight: int = 0
    ended: bool = False

    @classmethod
    def of(cls, start: StartRow, eos_ids: Sequence[int], anew: bool = False) -> "Row":
        ids, blocks = np.frombuffer(start.ids, "<i4"), np.frombuffer(start.blocks, "<i4")
        ends = dict.fromkeys(start.stopping.stop_ids, "stop_sequence")
        ends |= {} if start.stopping.ignore_eos else dict.fromkeys(eos_ids, "eos_token")
        manner = SamplingState.of(start, list(ends))
        told = start.prompt_logprobs
        return cls(
            start.row,
            ids,
            start.base,
            start.stopping.max_new_tokens,
            blocks,
            ends,
            manner,
            start.base,
            anew,
            told,
            read_index=start.base,
        )

    @property
    def first_length(self) -> int:
        """Of the sequence, when the K of its first tokens are computed."""
        return len(self.ids) - (0 if self.anew else self.base)


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
    source: int | None = None
    scores: int = 0

    @property
    def decodes(self) -> bool:
        return self.begin >= len(self.row.ids)

    @property
    def kv_len(self) -> int:
        return self.begin + self.count

    @property
    def wanted(self) -> int:
        """Of how many tokens logits are wanted, up to its last: those that tell of the prompt, then the one
        that samples.
        """
        return self.scores + self.samples

    @property
    def turn(self) -> SampleRequest | None:
        """None where the likeliest token is wanted."""
        manner, index = self.row.manner, self.kv_len - (len(self.row.ids) - self.row.base)
        return SampleRequest(manner, index) if manner and manner.asks(index) else None


def arrange(parts: Sequence[RowSlice]) -> list[RowSlice]:
    """The order on the line: rows that decode, longest first, then the chunks of prompts in the order of
    starts.
    """
    decoding = sorted((part for part in parts if part.decodes), key=attrgetter("begin"), reverse=True)
    return decoding + [part for part in parts if not part.decodes]


class Rows:
    """
    Attributes:
        max_scores: tokens in one step of prompts that are told of: each needs a line of logits.
        outgrown_at: beyond this length the model wants every K anew: then a row is preempted, and starts
            again with all its tokens.
    """

    def __init__(
        self,
        block_size: int,
        eos_ids: Sequence[int],
        max_scores: int = MAX_SCORED_TOKENS,
        outgrown_at: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.eos_ids = eos_ids
        self.max_scores, self.outgrown_at = max_scores, outgrown_at
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
        parts = arrange(self.parts())
        self.step += bool(parts)
        place = 0
        for part in parts:
            row = part.row
            row.kv_len, row.place = part.kv_len, place
            row.index += part.samples
            row.in_flight += 1
            place += part.samples
        return parts

    def parts(self) -> list[RowSlice]:
        parts, left, scores = [], self.prefill_tokens, self.max_scores
        for row in self.rows.values():
            if row.ended or row.index >= row.max_new_tokens:
                continue
            begin = row.kv_len
            room, prefill = len(row.blocks) * self.block_size - begin, len(row.ids) - begin
            if prefill <= 0:
                if room > 0:
                    parts.append(RowSlice(row, begin, 1, True, row.place if row.in_flight else None))
                continue
            told = row.prompt_logprobs is not None
            count = min(room, prefill, left, scores if told else left)
            if count > 0:
                samples = count == prefill
                parts.append(RowSlice(row, begin, count, samples, scores=count - samples if told else 0))
                left -= count
                scores -= count if told else 0
        return parts

    def read(
        self,
        parts: Sequence[RowSlice],
        ids: Sequence[int],
        logprobs: Sequence[float],
        tops: Mapping[int, TopLogprobs] = NO_TOP_LOGPROBS,
        prompts: Sequence[PromptLogprobs] = NO_PROMPT_LOGPROBS,
    ) -> None:
        """Takes what a launched step brought: `ids` has one entry for each part that samples, in order;
        `tops` is by their place there; `prompts` has one for each part that tells of its prompt, in order.
        """
        sampled, told = enumerate(zip(ids, logprobs, strict=True)), iter(prompts)
        for part in parts:
            part.row.in_flight -= 1
            if part.scores:
                self.tell(part, next(told))
            if part.samples:
                place, (token, logprob) = next(sampled)
                self.take(part, token, logprob, tops.get(place))
            if part.row.ended:
                self.release(part.row)

    def tell(self, part: RowSlice, told: PromptLogprobs) -> None:
        if not part.row.ended:
            self.outcome.prompts.append((part.row.number, part.begin + 1, *told))

    def take(self, part: RowSlice, token: int, logprob: float, top: TopLogprobs | None) -> None:
        row, outcome = part.row, self.outcome
        if row.ended:
            return
        if not part.decodes:
            outcome.prefilled.append((row.number, part.kv_len))
        if top:
            outcome.tops.append((len(outcome.samples), pack_ids(top.ids), pack_floats(top.logprobs)))
        outcome.samples.append((row.number, row.read_index, token, logprob))
        row.last_id = token
        row.read_index += 1
        if row.manner:
            row.manner.take(token)
        if row.read_index >= row.max_new_tokens:
            self.finish(row, "length")
        elif token in row.ends:
            self.finish(row, row.ends[token])
        elif part.kv_len == self.outgrown_at:
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

    def report(self) -> StepResultBuilder:
        """What happened since the last call."""
        outcome, self.outcome = self.outcome, StepResultBuilder()
        return outcome
