"""Sampling states: how a row samples its tokens, and what it keeps from one token to the next. No tensors."""

from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from common.messages.request import SamplingParams
from gpu_worker.engine.batch.grammar import Bits, GrammarMask
from gpu_worker.engine.batch.philox import PhiloxStream
from gpu_worker.engine.batch.token_counts import TokenCounts
from gpu_worker.engine.batch.top_p_decay import TopPDecay
from gpu_worker.protocol import StartRow

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]


@dataclass(slots=True, eq=False)
class SamplingState:
    """How one row samples.

    Attributes:
        always_applies: whether the row needs more than `min_new_tokens`.
        end_ids: ids that are not sampled before the index `min_new_tokens`.
        bias_ids, bias: ids, and what is added to their logits.
        banned_ids: bad words of one id.
        bad_words: (ids before the last, last id) of longer bad words.
        tail: the row's last ids, as many as the longest bad word and the watermark need.
        allowed, allowed_mask: the only ids that are sampled, None for all; their mask, once it is needed.
        token_counts: None where nothing is penalised.
        top_p_decay: None where top_p is constant.
    """

    sampling: SamplingParams
    top_n_tokens: int
    min_new_tokens: int
    always_applies: bool
    end_ids: list[int]
    bias_ids: Int64
    bias: Float32
    banned_ids: list[int]
    bad_words: list[tuple[list[int], int]]
    tail_length: int
    tail: list[int]
    random: PhiloxStream
    token_counts: TokenCounts | None = field(default=None)
    top_p_decay: TopPDecay | None = None
    grammar: GrammarMask | None = None
    allowed: frozenset[int] | None = None
    allowed_mask: Bits | None = None

    @classmethod
    def of(
        cls, start: StartRow, end_ids: list[int], grammar: GrammarMask | None = None
    ) -> "SamplingState | None":
        """Make the state of a row that starts; None where it is greedy without penalties. `end_ids` end the
        row. `grammar` has taken the tokens before `start.base`.
        """
        sampling = start.sampling or SamplingParams()
        always_applies = start.top_n_tokens > 0 or not is_plain_greedy(sampling) or grammar is not None
        if not always_applies and start.stopping.min_new_tokens <= start.base:
            return None
        ids = np.frombuffer(start.ids, "<i4")
        words = sampling.bad_words
        tail_length = max(bool(sampling.watermark_delta), *(len(word) - 1 for word in words), 0)
        num_prompt = len(ids) - start.base
        return cls(
            sampling=sampling,
            top_n_tokens=start.top_n_tokens,
            min_new_tokens=start.stopping.min_new_tokens,
            always_applies=always_applies,
            end_ids=end_ids,
            bias_ids=np.array([token for token, _ in sampling.logit_bias], np.int64),
            bias=np.array([value for _, value in sampling.logit_bias], np.float32),
            banned_ids=[word[0] for word in words if len(word) == 1],
            bad_words=[(word[:-1], word[-1]) for word in words if len(word) > 1],
            tail_length=tail_length,
            tail=ids[max(0, len(ids) - tail_length) :].tolist(),
            random=PhiloxStream(sampling.seed, sampling.choice),
            token_counts=TokenCounts(ids[:num_prompt], ids[num_prompt:].tolist())
            if has_penalties(sampling)
            else None,
            top_p_decay=TopPDecay(sampling, ids[num_prompt:].tolist()) if sampling.top_p_decay < 1 else None,
            grammar=grammar,
            allowed=frozenset(sampling.allowed_token_ids) or None,
        )

    @property
    def top_p(self) -> float:
        """top_p of the next token."""
        return self.top_p_decay.top_p if self.top_p_decay else self.sampling.top_p

    @property
    def is_ready(self) -> bool:
        """Whether the next token can be sampled."""
        return self.grammar is None or self.grammar.is_ready()

    def applies_at(self, index: int) -> bool:
        """Tell whether the token of this index needs more than greedy sampling."""
        return self.always_applies or index < self.min_new_tokens

    def banned_ids_at(self, index: int) -> list[int]:
        """Return the ids that must not be sampled as the token of this index."""
        words = [last for rest, last in self.bad_words if self.tail[-len(rest) :] == rest]
        is_early = index < self.min_new_tokens and not (self.grammar and self.grammar.must_end())
        return self.banned_ids + words + (self.end_ids if is_early else [])

    def accept(self, token: int) -> str:
        """Take a sampled token. Returns why the row fails, as `GrammarMask.accept` does; ids that are not
        allowed are such a reason, too.
        """
        self.note(token)
        if self.allowed is not None and token not in self.allowed:
            return "grammar"
        return self.grammar.accept(token) if self.grammar else ""

    def note(self, token: int) -> None:
        """Take a sampled token into account, its grammar apart."""
        if self.token_counts is not None:
            self.token_counts.accept(token)
        if self.tail_length:
            self.tail = [*self.tail, token][-self.tail_length :]
        if self.top_p_decay is not None:
            self.top_p_decay.accept(token)

    def after(self, token: int) -> "SamplingState":
        """A copy that has taken one more token."""
        counts = self.token_counts.copy() if self.token_counts else None
        grammar = self.grammar.after(token) if self.grammar else None
        state = replace(self, token_counts=counts, top_p_decay=copy(self.top_p_decay), grammar=grammar)
        state.note(token)
        return state

    def penalty(self) -> Float32:
        """Return what the frequency and presence penalties subtract from the scores of
        `token_counts.ids`.
        """
        assert self.token_counts is not None
        sampling, counts = self.sampling, self.token_counts
        penalty = sampling.frequency_penalty * counts.generated + sampling.presence_penalty * (
            counts.generated > 0
        )
        penalty = penalty + sampling.relative_frequency_penalty / counts.num_tokens * counts.counts
        return np.asarray(penalty, np.float32)


def has_penalties(sampling: SamplingParams) -> bool:
    penalties = (sampling.frequency_penalty, sampling.presence_penalty, sampling.relative_frequency_penalty)
    return sampling.repetition_penalty != 1 or any(penalties)


def is_plain_greedy(sampling: SamplingParams) -> bool:
    """Tell whether the likeliest token of the model's own logits is always sampled; truncation keeps it in
    any case.
    """
    return sampling.temperature == 0 and not (
        sampling.logit_bias
        or sampling.bad_words
        or sampling.allowed_token_ids
        or sampling.watermark_delta
        or has_penalties(sampling)
    )


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A row's sampling state, and the index of the token that it samples now."""

    state: SamplingState
    index: int
