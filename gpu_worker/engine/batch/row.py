"""A row: one line of the batch, from its start to its end; and its slices, what one step computes. No
tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NoReturn

from common.messages.plan import NewRow
from common.messages.request import BeamParams, Generate, PoolingParams
from gpu_worker.engine.batch.adapters import Adapter
from gpu_worker.engine.batch.row_pictures import RowPictures
from gpu_worker.engine.batch.sampling_state import GrammarMask, SampleRequest, SamplingState
from gpu_worker.engine.batch.step_result import Int32
from gpu_worker.engine.drafting.proposers import Proposer

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
class Row:
    """A row. `kv_len` and `index` are as of the last step launched, `collected_index` as of the last step
    read.

    Attributes:
        ids: the prompt and the tokens generated before this row started: prefill computes them.
        blocks: KV blocks in order; position p lies in blocks[p // block_size].
        kv_len: tokens whose KV is written.
        index: index of the next token to sample.
        ends: ids that end the row → the reason.
        generated_as_prompt: the generated tokens among `ids` are computed as if they belonged to the prompt.
        prompt_logprobs: number of the likeliest tokens reported beside each token of `ids`; None reports no
            log-probabilities of the prompt.
        logits: (first position, end, dtype) of those whose logits are returned; None returns none.
        sampling_state: None is greedy without penalties.
        last_id: the last token generated, once the step that sampled it is read: input of the next decode
            step.
        sample_place: the place of its last token among the samples of the last launched step with this row.
        in_flight: number of steps launched with this row and not read yet.
        num_unread: tokens that these steps sample.
        num_returns: how often the row went back from wrong proposals; slices launched before that are void.
        proposer: proposes the tokens after the next one; None proposes none.
        class_index: the lower, the sooner its prompt is computed.
        num_passed: steps since its prompt was the first to be computed.
        beams: it belongs to a beam search (beams.py); None to none.
        launched_step: the last step launched with this row.
        adapter: the LoRA adapter with which it is computed; None for the model alone.
        pictures: of its prompt; None if it has none.
        slots: where its states lie, in a model that has states; of a beam search one for each beam.
        pooling: it ends with its prompt, of which it returns values as `logits`; None generates tokens.
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
    logits: tuple[int, int, str] | None = None
    kv_len: int = 0
    collected_index: int = 0
    last_id: int = 0
    sample_place: int = 0
    in_flight: int = 0
    num_unread: int = 0
    num_returns: int = 0
    proposer: Proposer | None = None
    ended: bool = False
    class_index: int = 0
    num_passed: int = 0
    beams: BeamParams | None = None
    launched_step: int = 0
    adapter: Adapter | None = None
    pictures: RowPictures | None = None
    slots: list[int] = field(default_factory=list)
    pooling: PoolingParams | None = None

    @property
    def num_places(self) -> int:
        """Places that it takes in a batch."""
        return self.beams.width if self.beams else 1

    @property
    def slot(self) -> int:
        """The slot of its states; the scratch slot if it has none."""
        return self.slots[0] if self.slots else 0

    @property
    def needs_no_step(self) -> bool:
        """Whether all that it needs is launched: its tokens, or the prompt of a row that pools."""
        if self.pooling:
            return self.kv_len >= len(self.ids)
        return self.index >= self.max_new_tokens

    @property
    def has_grammar(self) -> bool:
        return self.sampling_state is not None and self.sampling_state.grammar is not None

    @property
    def finish_reason(self) -> str | None:
        """Why the row ends with the last token read; None if it goes on."""
        if not self.collected_index:
            return None
        return "length" if self.collected_index >= self.max_new_tokens else self.ends.get(self.last_id)

    @property
    def is_ready(self) -> bool:
        """Whether a step may compute it. The prefill of a row waits for its grammar and its pictures, too."""
        return (self.sampling_state is None or self.sampling_state.is_ready) and (
            self.pictures is None or self.pictures.is_ready
        )

    def propose(self, room: int) -> Sequence[int]:
        """Propose tokens after the next one, at most `room`."""
        most = min(room, self.max_new_tokens - self.index - 1)
        return self.proposer.propose(most, self.num_unread) if self.proposer and most > 0 else ()

    def go_on(self, kv_len: int, num_samples: int, step: int) -> None:
        """Advance after the launch of a step."""
        self.launched_step = step
        self.kv_len = kv_len
        self.index += num_samples
        self.num_unread += num_samples
        self.in_flight += 1

    def go_back(self, kv_len: int) -> None:
        """Go back to the `kv_len` tokens whose ids are certain."""
        self.kv_len = kv_len
        self.index = kv_len - (len(self.ids) - self.base) + 1
        self.num_unread = 0
        self.num_returns += 1

    @property
    def scored_from(self) -> int:
        """The first position of `ids` whose logits are needed although no token is sampled there."""
        if self.prompt_logprobs is not None:
            return 0
        return self.logits[0] if self.logits else len(self.ids)

    @property
    def first_length(self) -> int:
        """The length of the sequence when the K of its first tokens is computed."""
        return len(self.ids) - (0 if self.generated_as_prompt else self.base)


def logits_span(request: Generate) -> tuple[int, int, str] | None:
    """First position, end and dtype of the logits that a request returns; None for none."""
    logits = request.logits
    if logits is None:
        return None
    end = logits.end_position(request.num_prompt, request.stopping.max_new_tokens)
    return logits.first_position(request.num_prompt), end, logits.dtype


@dataclass(slots=True)  # not frozen: making one would take twice as long
class RowSlice:
    """What one step computes of a row: `count` positions from `begin` on, then a sample if `samples`, and one
    more sample after each proposal.

    Attributes:
        source_place: if the step in flight samples the input: the place among its samples.
        num_scored: positions before the sample whose logits are needed, too: for log-probabilities of the
            prompt, or because logits are returned.
        proposed: ids at the last positions of a row that decodes; one counts if all samples before it confirm
            the proposals.
        num_returns: the row's `num_returns` at the launch.
        method: where the proposals come from.
    """

    row: Row
    begin: int
    count: int
    samples: bool
    source_place: int | None = None
    num_scored: int = 0
    proposed: Sequence[int] = ()
    num_returns: int = 0
    method: str = ""

    @property
    def decodes(self) -> bool:
        return self.begin >= len(self.row.ids)

    @property
    def kv_len(self) -> int:
        """Tokens of the row whose KV is written once the slice is computed."""
        return self.begin + self.count

    @property
    def num_samples(self) -> int:
        return self.samples + len(self.proposed)

    @property
    def num_logits(self) -> int:
        """Number of last tokens whose logits are needed: the scored ones, then those that are sampled
        from.
        """
        return self.num_scored + self.num_samples

    @property
    def returned_logits(self) -> range:
        """The positions whose logits are returned."""
        if self.row.logits is None:
            return range(0)
        first, end, _ = self.row.logits
        return range(max(self.begin, first), min(self.kv_len, end))

    @property
    def is_void(self) -> bool:
        """Whether its row went back to a position before it, since proposals were wrong. What it wrote into
        the cache is written again.
        """
        return self.num_returns != self.row.num_returns

    @property
    def is_unsure(self) -> bool:
        """Whether it is unknown, until the step is read, how many of its proposals are right, what is
        proposed next, or which beams go on.
        """
        if self.row.beams:
            return self.samples
        proposer = self.row.proposer
        if proposer is None or not self.samples:
            return False
        return proposer.waits or bool(self.proposed and not proposer.is_sure)

    @property
    def first_index(self) -> int:
        """Index of the first token that it samples."""
        return self.kv_len - len(self.proposed) - (len(self.row.ids) - self.row.base)

    @property
    def sample_request(self) -> SampleRequest | None:
        """How the first sample is drawn; None is greedy without penalties."""
        return request_at(self.row.sampling_state, self.first_index)

    @property
    def sample_requests(self) -> list[SampleRequest | None]:
        """How each sample is drawn, as if all proposals before it were right."""
        state, requests = self.row.sampling_state, [self.sample_request]
        for index, token in enumerate(self.proposed, self.first_index + 1):
            state = state and state.after(token)
            requests.append(request_at(state, index))
        return requests


def request_at(state: SamplingState | None, index: int) -> SampleRequest | None:
    """How the token of this index is sampled; None is greedy without penalties."""
    applies = state and (state.always_applies or index < state.min_new_tokens)
    return SampleRequest(state, index) if state and applies else None


def confirmed(sampled: Sequence[int], proposed: Sequence[int]) -> list[int]:
    """Return the sampled ids that count: the first one, and those after a run of right proposals."""
    wrong = (place for place, (token, one) in enumerate(zip(sampled, proposed, strict=False)) if token != one)
    return list(sampled[: 1 + next(wrong, len(proposed))])


def arrange(slices: Sequence[RowSlice]) -> list[RowSlice]:
    """Put slices in the order of a step's tokens: rows that decode, longest first, then chunks of prompts."""
    decoding = [row_slice for row_slice in slices if row_slice.decodes]
    prompts = [row_slice for row_slice in slices if not row_slice.decodes]
    return sorted(decoding, key=attrgetter("begin"), reverse=True) + prompts


def decode_slice(row: Row, room: int, recompute_length: int | None) -> RowSlice:
    """The next token of a row that decodes, and proposals: as many as there is room for, none beyond
    `recompute_length`.
    """
    begin = row.kv_len
    if recompute_length and begin < recompute_length:
        room = min(room, recompute_length - begin)
    proposed = row.propose(room - 1)
    source_place = row.sample_place if row.num_unread else None
    method = row.proposer.method if row.proposer and proposed else ""
    return RowSlice(
        row,
        begin,
        1 + len(proposed),
        True,
        source_place,
        proposed=proposed,
        num_returns=row.num_returns,
        method=method,
    )


def place_samples(slices: Sequence[RowSlice]) -> None:
    """Set each row's `sample_place` for a launched step."""
    end = 0
    for row_slice in slices:
        end += row_slice.num_samples
        row_slice.row.sample_place = end - 1
