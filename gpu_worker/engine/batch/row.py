"""A row: one line of the batch, from its start to its end; and its slices, what one step computes. No
tensors.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NoReturn

import numpy as np

from common.messages.plan import NewRow
from common.messages.records import pack_floats, pack_ids
from common.messages.request import Generate
from gpu_worker.engine.batch.row_pictures import RowPictures
from gpu_worker.engine.batch.sampling_state import GrammarMask, SampleRequest, SamplingState
from gpu_worker.engine.batch.step_result import Int32, Int64, StepSamples
from gpu_worker.engine.drafting.proposers import Proposer
from gpu_worker.protocol import SAMPLE, StepResult

GrammarFactory = Callable[[str, Sequence[int]], GrammarMask]
"""(grammar, tokens of the row so far) → its mask."""
PicturesFactory = Callable[[NewRow], RowPictures | None]
"""A row that starts → the pictures of its prompt; None if it has none."""


def not_served(*_: object) -> NoReturn:
    """Raises ValueError: this engine lacks what a row asks for."""
    raise ValueError("rows with grammars, and beams with stop strings, need a model's tokenizer")


def no_pictures(start: NewRow) -> None:
    """None. Raises ValueError if the row has pictures: this engine does not see."""
    if any(start.contents):
        raise ValueError("rows with pictures need a model that sees")


@dataclass(slots=True, eq=False)
class Adapter:
    """A LoRA adapter that rows may have.

    Attributes:
        folder: where it was read.
        stamp: what its files were then (adapters.py).
        slot: where its weights lie on the device; -1: nowhere.
    """

    name: str
    folder: str = ""
    stamp: tuple[int, ...] = ()
    slot: int = -1


NUM_ENDS = 4
NUMBERS = (
    *("number", "kv_len", "collected_index", "last_id", "in_flight", "sample_place", "room", "end"),
    *("goes_on_from", "num_places", "class_index"),
)
LINE = np.dtype([*((name, np.int64) for name in NUMBERS), ("end_ids", np.int64, NUM_ENDS)])
NEVER = 2**62
"""No row has so many tokens."""


class Number:
    """A number of a row, which lies in the row's line."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.place = NUMBERS.index(name)

    def __get__(self, row: "Row", owner: type) -> int:
        return row.line[self.place]

    def __set__(self, row: "Row", value: int) -> None:
        row.line[self.place] = value


class RowOutput:
    """What a row brings: tokens. Values of its prompt, and the sequences of a beam search (beams.py), answer
    the same questions.

    Attributes:
        num_places: places that the row takes in a batch.
        samples: a token is sampled at the end of its prompt.
        has_branches: the tokens computed after its prompt belong to several sequences.
        num_decoded: tokens that were computed beside the row's own.
        is_whole: one step computes the whole prompt.
    """

    num_places = 1
    samples = True
    has_branches = False
    num_decoded = 0
    is_whole = False

    def extend(self, blocks: Int32) -> None:
        """Take note of blocks that the row has got."""

    def num_in_flight(self, row: "Row") -> int:
        """Slices that are launched and not read."""
        return row.in_flight

    def may_join(self, row: "Row", step: int) -> bool:
        """Whether the row may be in the next micro-batch of a step."""
        return row.launched_step < step and not row.num_unread

    def decode(self, row: "Row", spare: int, block_size: int) -> "Sequence[RowSlice]":
        """What the next step computes of a row whose prompt is computed: its next token and at most `spare`
        proposals, none beyond its blocks or `recompute_length`.
        """
        begin, source_place = row.kv_len, row.sample_place if row.num_unread else None
        end, limit = len(row.blocks) * block_size, row.recompute_length
        proposed = row.propose(min(spare, (min(end, limit) if limit and begin < limit else end) - begin - 1))
        method = row.proposer.method if row.proposer and proposed else ""
        return (RowSlice(row, begin, 1 + len(proposed), True, source_place, 0, proposed, method),)

    def is_unsure(self, row_slice: "RowSlice") -> bool:
        """Whether it is unknown, until the step is read, how many of a slice's proposals are right, or what
        is computed next.
        """
        proposer = row_slice.row.proposer
        if proposer is None or not row_slice.samples:
            return False
        return proposer.waits or bool(row_slice.proposed and not proposer.is_sure)

    def take(self, row_slice: "RowSlice", samples: StepSamples, place: int, result: StepResult) -> str | None:
        """Take what a step sampled for a slice, from `place` on → why the row ends; None if it goes on.
        Tokens of a row that has ended are dropped, and those after wrong proposals.
        """
        row, proposed, num_samples = row_slice.row, row_slice.proposed, row_slice.num_samples
        if not num_samples or row_slice.num_returns != row.num_returns:
            return None
        tokens = confirmed(samples.ids[place : place + num_samples], proposed)
        first = kv_len = row_slice.kv_len - len(proposed)
        why = None
        for kv_len in range(first, first if row.ended else first + len(tokens)):
            if why := self.add(row_slice, kv_len, place + kv_len - first, samples, result):
                break
        if kv_len < row_slice.kv_len:
            row.kv_len = kv_len  # the ids up to there are certain
            row.num_returns += 1
        if proposed:
            result.proposals.append((row_slice.method, len(proposed), len(tokens) - 1))
        if row.proposer:
            row.proposer.learn(tokens, len(proposed))
        return why

    def add(
        self, row_slice: "RowSlice", kv_len: int, place: int, samples: StepSamples, result: StepResult
    ) -> str | None:
        """Add the token sampled after `kv_len` tokens to the row and to the result → why the row ends."""
        row, token = row_slice.row, samples.ids[place]
        state = row.sampling_state
        if state and state.remembers and (why := state.accept(token)):
            return why
        if not row_slice.decodes:
            result.prefilled.append((row.number, kv_len))
        if samples.top_logprobs and (top := samples.top_logprobs.get(place)):
            ids, logprobs = top
            result.top_logprobs.append((result.num_samples, pack_ids(ids), pack_floats(logprobs)))
        result.samples += SAMPLE.pack(row.number, row.collected_index, token, samples.logprobs[place])
        row.last_id = token
        row.collected_index += 1
        return row.finish_reason or ("preempted" if kv_len == row.recompute_length else None)


TOKENS = RowOutput()


@dataclass(frozen=True, slots=True)
class PooledValues(RowOutput):
    """The row ends with its prompt, of which it returns values as `logits`.

    Attributes:
        pair_start: as in PoolingParams.
    """

    pair_start: int = 0
    is_whole: bool = False
    samples = False

    def take(self, row_slice: "RowSlice", samples: StepSamples, place: int, result: StepResult) -> str | None:
        row = row_slice.row
        if row.ended or row_slice.kv_len < len(row.ids):
            return None
        result.prefilled.append((row.number, row.kv_len))
        return "length"


@dataclass(slots=True, eq=False)
class Row:
    """A row. `kv_len` and `index` are as of the last step launched, `collected_index` as of the last step
    read.

    Attributes:
        ids: the prompt and the tokens generated before this row started: prefill computes them.
        blocks: KV blocks in order; position p lies in blocks[p // block_size].
        ends: ids that end the row → the reason.
        recompute_length: beyond this length its model needs every K computed anew: the row is preempted, and
            starts again with all its tokens, the generated ones computed as if they belonged to the prompt.
        prompt_logprobs: number of the likeliest tokens reported beside each token of `ids`; None reports no
            log-probabilities of the prompt.
        logits: (first position, end, dtype) of those whose logits are returned; None returns none.
        sampling_state: None is greedy without penalties.
        num_returns: how often the row went back from wrong proposals; slices launched before that are void.
        proposer: proposes the tokens after the next one; None proposes none.
        num_passed: steps since its prompt was the first to be computed.
        is_suspect: as in NewRow.
        output: what it brings; the rows of a beam search have one together.
        awaited: what its prefill waits for, until it `is_ready`: its grammar, its pictures.
        launched_step: the last step launched with this row.
        adapter: the LoRA adapter with which it is computed; None for the model alone.
        pictures: of its prompt; None if it has none.
        slots: where its states lie, in a model that has states; of a beam search one for each beam.
        line, place: its numbers, and their place among those of all rows:
        kv_len: tokens whose KV is written.
        last_id: the last token that was read: input of the next decode step.
        sample_place: the place of its last token among the samples of the last launched step with this row.
        in_flight: number of steps launched with this row and not read yet.
        room: tokens for which it has blocks.
        end: with so many tokens computed all that it needs is launched; 0 once it has ended.
        goes_on_from: with so many tokens it is in the arrays of `StepSlices`; NEVER if it needs more.
        class_index: the lower, the sooner its prompt is computed.
    """

    number: int
    ids: Int32
    max_new_tokens: int
    blocks: Int32
    ends: Mapping[int, str] = field(default_factory=dict)
    sampling_state: SamplingState | None = None
    base: int = 0
    recompute_length: int | None = None
    prompt_logprobs: int | None = None
    logits: tuple[int, int, str] | None = None
    num_returns: int = 0
    proposer: Proposer | None = None
    ended: bool = False
    num_passed: int = 0
    is_suspect: bool = False
    output: RowOutput = TOKENS
    awaited: Sequence[Any] = ()
    launched_step: int = 0
    adapter: Adapter | None = None
    pictures: RowPictures | None = None
    slots: list[int] = field(default_factory=list)
    line: "array[int] | memoryview" = field(default_factory=lambda: array("q", bytes(LINE.itemsize)))
    place: int = -1
    kv_len, collected_index, last_id, in_flight = Number(), Number(), Number(), Number()
    sample_place, room, end, goes_on_from = Number(), Number(), Number(), Number()
    num_places, class_index = Number(), Number()

    @property
    def num_prompt(self) -> int:
        """Tokens of its prompt."""
        return len(self.ids) - self.base

    @property
    def index(self) -> int:
        """Index of the next token to sample."""
        return max(self.base, self.kv_len - self.num_prompt + 1)

    @property
    def num_unread(self) -> int:
        """Tokens that launched steps sample, and that are not read yet."""
        return self.index - self.collected_index

    @property
    def slot(self) -> int:
        """The slot of its states; the scratch slot if it has none."""
        return self.slots[0] if self.slots else 0

    @property
    def finish_reason(self) -> str | None:
        """Why the row ends with the last token read; None if it goes on."""
        if not self.collected_index:
            return None
        return "length" if self.collected_index >= self.max_new_tokens else self.ends.get(self.last_id)

    @property
    def is_ready(self) -> bool:
        """Whether a step may compute it."""
        return all(one.is_ready for one in self.awaited)

    def propose(self, room: int) -> Sequence[int]:
        """Propose tokens after the next one, at most `room`."""
        most = min(room, self.max_new_tokens - self.index - 1)
        return self.proposer.propose(most, self.num_unread) if self.proposer and most > 0 else ()

    @property
    def scored_from(self) -> int:
        """The first position of `ids` whose logits are needed although no token is sampled there."""
        if self.prompt_logprobs is not None:
            return 0
        return self.logits[0] if self.logits else len(self.ids)

    @property
    def first_length(self) -> int:
        """The length of the sequence when the K of its first tokens is computed."""
        return len(self.ids) - (self.base if self.recompute_length is None else 0)


def logits_span(request: Generate) -> tuple[int, int, str] | None:
    """First position, end and dtype of the logits that a request returns; None for none."""
    logits = request.logits
    if logits is None:
        return None
    end = logits.end_position(request.num_prompt, request.stopping.max_new_tokens)
    return logits.first_position(request.num_prompt), end, logits.dtype


@dataclass(slots=True, eq=False)
class RowSlice:
    """What one step computes of a row: `count` positions from `begin` on, then a sample if `samples`, and one
    more sample after each proposal.

    Attributes:
        source_place: if the step in flight samples the input: the place among its samples.
        num_scored: positions before the sample whose logits are needed, too: for log-probabilities of the
            prompt, or because logits are returned.
        proposed: ids at the last positions of a row that decodes; one counts if all samples before it confirm
            the proposals.
        method: where the proposals come from.
        num_returns: the row's `num_returns` at the launch. If the row's is another one later, it went back to
            a position before the slice, since proposals were wrong: the slice is void, and what it wrote into
            the cache is written again.
        kv_len: tokens of the row whose KV is written once the slice is computed.
        num_logits: last tokens whose logits are needed: the scored ones, then those that are sampled from.
    """

    row: Row
    begin: int
    count: int
    samples: bool
    source_place: int | None = None
    num_scored: int = 0
    proposed: Sequence[int] = ()
    method: str = ""
    num_returns: int = field(init=False)
    decodes: bool = field(init=False)
    kv_len: int = field(init=False)
    num_samples: int = field(init=False)
    num_logits: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_returns = self.row.num_returns
        self.decodes = self.begin >= len(self.row.ids)
        self.kv_len = self.begin + self.count
        self.num_samples = self.samples + len(self.proposed)
        self.num_logits = self.num_scored + self.num_samples

    @property
    def returned_logits(self) -> range:
        """The positions whose logits are returned."""
        if self.row.logits is None:
            return range(0)
        first, end, _ = self.row.logits
        return range(max(self.begin, first), min(self.kv_len, end))

    @property
    def first_index(self) -> int:
        """Index of the first token that it samples."""
        return self.kv_len - len(self.proposed) - self.row.num_prompt

    @property
    def sample_requests(self) -> list[SampleRequest | None]:
        """How each sample is drawn, as if all proposals before it were right."""
        state = self.row.sampling_state
        requests = [request_at(state, self.first_index)] if self.samples else []
        for index, token in enumerate(self.proposed, self.first_index + 1):
            state = state and state.after(token)
            requests.append(request_at(state, index))
        return requests


@dataclass(slots=True, eq=False)
class StepSlices(Sequence[RowSlice]):
    """What a step computes, in the order of its tokens. Most of most steps are next tokens of rows to which
    nothing else applies, such as proposals or a grammar: they come first, as arrays, the longest row first.

    Attributes:
        others: the slices after them, chunks of prompts last.
        lines: int64 [rows]; where the numbers of the rows with next tokens lie.
        rows: [rows]
        begins: int64 [rows]; positions.
        ids: int64 [rows]; inputs. One that the host does not know yet is -1 minus its place among the samples
            of the step in flight.
        indices: int64 [rows]; of the tokens that are sampled.
        every: all slices, once somebody has asked for one.
    """

    others: Sequence[RowSlice]
    lines: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    rows: Sequence[Row] = ()
    begins: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    ids: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    indices: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    every: list[RowSlice] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows) + len(self.others)

    def __iter__(self) -> Iterator[RowSlice]:
        if not self.every:
            sources = (None if token >= 0 else -1 - token for token in self.ids.tolist())
            columns = zip(self.rows, self.begins.tolist(), sources, strict=True)
            self.every += (RowSlice(row, begin, 1, True, source) for row, begin, source in columns)
            self.every += self.others
        return iter(self.every)

    def __getitem__(self, place: Any) -> Any:
        return [*self][place]

    @property
    def has_prompts(self) -> bool:
        return bool(self.others) and not self.others[-1].decodes

    @property
    def num_tokens(self) -> int:
        return len(self.rows) + sum(one.count for one in self.others)


class StepPart:
    """What an engine has beside its model's forward (drafts, adapters, pictures, states): it is asked around
    each step. `rows` are the engine's `Rows`.

    Attributes:
        failure: why rows end for which it cannot prepare a step.
    """

    failure = ""

    def before(self, rows: Any) -> None:
        """Before the rows of the next step are chosen."""

    def prepare(self, rows: Any, slices: StepSlices) -> Sequence[RowSlice]:
        """Before the forward → the slices that it may have."""
        return slices

    def after(self, rows: Any, slices: StepSlices) -> None:
        """Once the forward is launched."""

    def granted(self, blocks: Sequence[Int32]) -> None:
        """These blocks have been granted: what they held is gone."""

    def sleep(self) -> None:
        """The model gives up its cache, and what was captured with it. No row is held."""


def request_at(state: SamplingState | None, index: int) -> SampleRequest | None:
    """How the token of this index is sampled; None is greedy without penalties."""
    applies = state and (state.always_applies or index < state.min_new_tokens)
    return SampleRequest(state, index) if state and applies else None


def confirmed(sampled: Sequence[int], proposed: Sequence[int]) -> list[int]:
    """Return the sampled ids that count: the first one, and those after a run of right proposals."""
    wrong = (place for place, (token, one) in enumerate(zip(sampled, proposed, strict=False)) if token != one)
    return list(sampled[: 1 + next(wrong, len(proposed))])


def arrange(slices: Sequence[RowSlice]) -> StepSlices:
    """A step of these slices: rows that decode, the longest first, then chunks of prompts."""
    decoding = [row_slice for row_slice in slices if row_slice.decodes]
    prompts = [row_slice for row_slice in slices if not row_slice.decodes]
    return StepSlices(sorted(decoding, key=attrgetter("begin"), reverse=True) + prompts)
