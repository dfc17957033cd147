"""A row, and the slice of it that one step computes. No tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from gpu_worker.engine.batch.grammar import GrammarMask
from gpu_worker.engine.batch.sampling_state import SampleRequest, SamplingState
from gpu_worker.engine.batch.step_result import Int32
from gpu_worker.protocol import StartRow

GrammarFactory = Callable[[str, Sequence[int]], GrammarMask]
"""(grammar, tokens of the row so far) → its mask."""


def no_grammars(source: str, tokens: Sequence[int]) -> GrammarMask:
    """For rows that have no grammar."""
    raise ValueError("rows with a grammar need a model's vocabulary")


@dataclass(slots=True, eq=False)
class Row:
    """A row. `kv_len` and `index` are as of the last launched step, `collected_index` as of the last one
    read.

    Attributes:
        ids: the prompt and the tokens generated before this row started; what prefill computes.
        blocks: KV blocks in order; position p lies in blocks[p // block_size].
        kv_len: tokens whose KV is written.
        index: index of the next token to sample.
        ends: ids that end the row, and the reason of each.
        generated_as_prompt: tokens generated before are computed as if they belonged to the prompt.
        prompt_logprobs: number of the likeliest tokens reported beside each token of `ids`; None reports no
            log-probabilities of these.
        sampling_state: None is greedy without penalties.
        last_id: the last token generated, once the step that sampled it is read: input of the next decode
            step.
        sample_place: place of its token among those sampled by the last launched step that held it.
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
    collected_index: int = 0
    last_id: int = 0
    sample_place: int = 0
    in_flight: int = 0
    ended: bool = False

    @classmethod
    def of(
        cls,
        start: StartRow,
        eos_ids: Sequence[int],
        make_grammar: GrammarFactory = no_grammars,
        generated_as_prompt: bool = False,
    ) -> "Row":
        """Makes a row that starts; `eos_ids` end it, too, unless it ignores them. A grammar's end is such an
        id: nothing may follow it.
        """
        ids, blocks = np.frombuffer(start.ids, "<i4"), np.frombuffer(start.blocks, "<i4")
        source = start.sampling.grammar if start.sampling else ""
        grammar = make_grammar(source, ids[len(ids) - start.base :].tolist()) if source else None
        ends = dict.fromkeys(start.stopping.stop_ids, "stop_sequence")
        if grammar or not start.stopping.ignore_eos:
            ends |= dict.fromkeys(eos_ids, "eos_token")
        return cls(
            number=start.row,
            ids=ids,
            index=start.base,
            max_new_tokens=start.stopping.max_new_tokens,
            blocks=blocks,
            ends=ends,
            sampling_state=SamplingState.of(start, list(ends), grammar),
            base=start.base,
            generated_as_prompt=generated_as_prompt,
            prompt_logprobs=start.prompt_logprobs,
            collected_index=start.base,
            last_id=int(ids[-1]) if start.base else 0,
            kv_len=start.num_cached,
        )

    @property
    def end(self) -> str | None:
        """Why it ends with the last token that was read; None where it goes on."""
        if not self.collected_index:
            return None
        return "length" if self.collected_index >= self.max_new_tokens else self.ends.get(self.last_id)

    @property
    def is_ready(self) -> bool:
        """Whether a step may compute it. A row waits for its grammar as a whole: its first token would."""
        return self.sampling_state is None or self.sampling_state.is_ready

    @property
    def first_length(self) -> int:
        """Length of the sequence when the K of its first tokens are computed."""
        return len(self.ids) - (0 if self.generated_as_prompt else self.base)


@dataclass(slots=True)  # not frozen: to make one would take twice as long
class RowSlice:
    """What one step computes of a row: positions `begin` to `begin + count - 1`, then a sample where
    `samples`.

    Attributes:
        source_place: where its input is sampled by a step that is not read yet: the place among that step's
            samples.
        num_scored: tokens of the prompt whose log-probabilities are reported, from position `begin + 1` on.
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
        """Tokens of the row whose KV is written once the slice is computed."""
        return self.begin + self.count

    @property
    def num_logits(self) -> int:
        """Number of tokens, up to its last, whose logits are needed: the scored ones,
        then the one to sample.
        """
        return self.num_scored + self.samples

    @property
    def sample_request(self) -> SampleRequest | None:
        """None is greedy without penalties."""
        state, index = self.row.sampling_state, self.kv_len - (len(self.row.ids) - self.row.base)
        return SampleRequest(state, index) if state and state.applies_at(index) else None


def arrange(slices: Sequence[RowSlice]) -> list[RowSlice]:
    """Puts slices in the order of a step's tokens: rows that decode, longest first, then chunks of prompts in
    the order of starts.
    """
    decoding = [row_slice for row_slice in slices if row_slice.decodes]
    prompts = [row_slice for row_slice in slices if not row_slice.decodes]
    return sorted(decoding, key=attrgetter("begin"), reverse=True) + prompts
