"""Sampling states: how a row samples its tokens, and what it keeps from one token to the next (counts of
tokens, a decaying top-p, a grammar). No tensors.
"""

import logging
import re
from collections.abc import Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass
from itertools import takewhile

import llguidance
import numpy as np
import numpy.typing as npt

from common.messages.plan import NewRow
from common.messages.request import SamplingParams
from gpu_worker.engine.batch.step_result import Float32

log = logging.getLogger(__name__)

Bits = npt.NDArray[np.int32]

LIMIT_ERROR = re.compile("too (many|big)|; max is")
"""In llguidance's error if a grammar takes more work or memory than llguidance allows."""
SPARE_COLUMNS = 64
"""Room for new ids in a table of counts."""


class TokenCounts:
    """The distinct ids of one row and how often each occurs, for penalties.

    Attributes:
        num_tokens: tokens of prompt and generation.
        num_distinct: distinct ids among them.
        table: int64 [3, columns]: ids, their counts, their counts in the generation.
        column_of: id → its column.
    """

    def __init__(self, prompt: npt.NDArray[np.int32]) -> None:
        ids, counts = np.unique(prompt, return_counts=True)
        self.num_tokens = len(prompt)
        self.num_distinct = len(ids)
        self.table = np.zeros((3, self.num_distinct + SPARE_COLUMNS), np.int64)
        self.table[0, : self.num_distinct], self.table[1, : self.num_distinct] = ids, counts
        self.column_of = {token: place for place, token in enumerate(ids.tolist())}

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        return self.table[0, : self.num_distinct]

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Counts of `ids` in prompt and generation."""
        return self.table[1, : self.num_distinct]

    @property
    def generated(self) -> npt.NDArray[np.int64]:
        """Counts of `ids` in the generation."""
        return self.table[2, : self.num_distinct]

    def accept(self, token: int) -> None:
        """Count a generated token."""
        place = self.column_of.setdefault(token, self.num_distinct)
        if place == self.num_distinct:
            self.add_column(token)
        self.table[1:, place] += 1
        self.num_tokens += 1

    def copy(self) -> "TokenCounts":
        """An independent copy."""
        other = copy(self)
        other.table, other.column_of = self.table.copy(), self.column_of.copy()
        return other

    def add_column(self, token: int) -> None:
        if self.num_distinct == self.table.shape[1]:
            self.table = np.concatenate((self.table, np.zeros_like(self.table)), axis=1)
        self.table[0, self.num_distinct] = token
        self.num_distinct += 1


@dataclass(slots=True, eq=False)
class GrammarMask:
    """What a grammar allows as a row's next token: the row's place in its grammar. The mask is read after the
    forward is launched and may be computed while it runs: only the sampler waits.

    Attributes:
        compiled: llguidance's matcher, once it is compiled. If it has an error, every token fails the row.
        vocab_size: of the model; its tokenizer may have more tokens.
        bits: the tokens that may come next, at least one: bit t % 32 of word t // 32. None allows all: the
            matcher has an error, or `Matchers` has yet to compute them.
        following: a token, and the copy of this matcher that has taken that token, too.
    """

    compiled: "Future[llguidance.LLMatcher]"
    vocab_size: int
    bits: Bits | None = None
    following: "tuple[int, GrammarMask] | None" = None

    @property
    def is_ready(self) -> bool:
        """Whether the next token can be sampled: a grammar takes time to compile."""
        return self.compiled.done()

    def must_end(self) -> bool:
        """Tell whether only an end-of-sequence token may come next."""
        return self.compiled.result().is_stopped()

    def accept(self, token: int) -> str:
        """Take the row's newest token → why the row fails: `grammar` if the token is not allowed, or
        `grammar_limit`; "" if the row goes on.
        """
        self.bits = self.following = None
        matcher = self.compiled.result()
        # with an error it would take an end-of-sequence token, the only one in its mask
        if not matcher.is_error() and matcher.consume_token(token):
            return ""
        error = matcher.get_error().split("<state>")[0].strip()
        log.warning("a row fails: %s", error)
        return "grammar_limit" if LIMIT_ERROR.search(error) else "grammar"

    def copy(self) -> "GrammarMask":
        """An independent copy."""
        copied: Future[llguidance.LLMatcher] = Future()
        copied.set_result(self.compiled.result().deep_copy())
        return GrammarMask(copied, self.vocab_size)

    def after(self, token: int) -> "GrammarMask":
        """A copy that has taken one more token."""
        if self.following is None or self.following[0] != token:
            following = self.copy()
            following.compiled.result().consume_token(token)
            self.following = token, following
        return self.following[1]

    def forced(self, most: int) -> list[int]:
        """At most `most` next tokens, as far as the grammar allows no others; none for a matcher with an
        error.

        llguidance tokenizes the text that a grammar forces. The tokens may be another text, as the name of a
        special token becomes that token: these the grammar does not accept.
        """
        state = self.compiled.result()
        tokens = list(takewhile(self.vocab_size.__gt__, state.compute_ff_tokens()[:most]))
        return tokens[: state.validate_tokens(tokens)] if tokens else []

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """How many of these next tokens it allows, one after the other; none for a matcher with an error."""
        state = self.compiled.result()
        return 0 if state.is_error() else state.validate_tokens(list(tokens))


class SamplingState:
    """How one row samples, after its `ids` so far. The first `num_prompt` are its prompt's, and `grammar` has
    taken the others.

    Attributes:
        end_ids: ids that are not sampled before the index `min_new_tokens`.
        bias_ids, bias: ids, and what is added to their logits.
        banned_ids: bad words of one id.
        bad_words: (ids before the last, last id) of longer bad words.
        tail: the row's last ids, as many as the longest bad word and the watermark need.
        allowed: the only ids that may be sampled; None for all.
        allowed_mask: their mask, once it is needed.
        parameters: what kernels read of the row, packed once it is needed.
        token_counts: None if nothing is penalised.
        top_p: of the next token.
        remembers: it takes account of each token that is sampled.
        changes_logits: it remembers, or adds something to the model's own logits.
        always_applies: the state applies to every token, not only to those before `min_new_tokens`.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        top_n_tokens: int = 0,
        min_new_tokens: int = 0,
        end_ids: Sequence[int] = (),
        ids: Sequence[int] | npt.NDArray[np.int32] = (),
        num_prompt: int = 0,
        grammar: GrammarMask | None = None,
    ) -> None:
        self.sampling, self.grammar = sampling, grammar
        self.top_n_tokens, self.min_new_tokens, self.end_ids = top_n_tokens, min_new_tokens, [*end_ids]
        words, known = sampling.bad_words, np.asarray(ids, np.int32)
        self.bias_ids = np.array([token for token, _ in sampling.logit_bias], np.int64)
        self.bias = np.array([value for _, value in sampling.logit_bias], np.float32)
        self.banned_ids = [word[0] for word in words if len(word) == 1]
        self.bad_words = [(word[:-1], word[-1]) for word in words if len(word) > 1]
        self.allowed = frozenset(sampling.allowed_token_ids) or None
        self.allowed_mask: Bits | None = None
        self.parameters = b""
        self.tail_length = max(bool(sampling.watermark_delta), *(len(word) - 1 for word in words), 0)
        self.tail: list[int] = known[max(0, num_prompt - self.tail_length) : num_prompt].tolist()
        self.token_counts = TokenCounts(known[:num_prompt]) if has_penalties(sampling) else None
        self.top_p, self.decays = sampling.top_p, sampling.temperature > 0 and sampling.top_p_decay < 1
        self.remembers = any((self.tail_length, self.token_counts, self.decays, grammar, self.allowed))
        self.changes_logits = bool(self.remembers or self.banned_ids or len(self.bias_ids))
        reports = top_n_tokens > 0 or sampling.report_logits
        self.always_applies = reports or sampling.temperature > 0 or self.changes_logits
        for token in known[num_prompt:].tolist() if self.remembers else ():
            self.note(token)

    @classmethod
    def of(
        cls, start: NewRow, end_ids: list[int], grammar: GrammarMask | None = None
    ) -> "SamplingState | None":
        """The state of a row that starts; None if it is greedy without penalties. `end_ids` end the row."""
        request, ids = start.request, np.frombuffer(start.ids, "<i4")
        state = cls(
            request.sampling or SamplingParams(),
            request.top_n_tokens,
            request.stopping.min_new_tokens,
            end_ids,
            ids,
            len(ids) - start.base,
            grammar,
        )
        return state if state.always_applies or state.min_new_tokens > start.base else None

    def is_steady(self, index: int) -> bool:
        """Whether its tokens from this index on are sampled alike: from the model's own logits, with the same
        parameters.
        """
        return index >= self.min_new_tokens and not self.changes_logits

    def banned_ids_at(self, index: int) -> list[int]:
        """Return the ids that must not be sampled as the token of this index."""
        words = [last for rest, last in self.bad_words if self.tail[-len(rest) :] == rest]
        is_early = index < self.min_new_tokens and not (self.grammar and self.grammar.must_end())
        return self.banned_ids + words + (self.end_ids if is_early else [])

    def accept(self, token: int) -> str:
        """Take a sampled token → why the row fails, as `GrammarMask.accept`; it fails for an id that is not
        `allowed`, too.
        """
        self.note(token)
        if self.allowed is not None and token not in self.allowed:
            return "grammar"
        return self.grammar.accept(token) if self.grammar else ""

    def note(self, token: int) -> None:
        """Take a sampled token into account, but not in the grammar."""
        if self.token_counts is not None:
            self.token_counts.accept(token)
        if self.tail_length:
            self.tail = [*self.tail, token][-self.tail_length :]
        if self.decays:
            self.top_p = self.decayed_top_p(token)

    def decayed_top_p(self, token: int) -> float:
        """top_p after a token, by factual-nucleus sampling (arXiv:2206.04624): multiplied by `top_p_decay`,
        but not below `top_p_min`; the request's own again after one of `top_p_reset_ids`.
        """
        own = self.sampling
        if token in own.top_p_reset_ids:
            return own.top_p
        return max(self.top_p * own.top_p_decay, min(own.top_p_min, own.top_p))

    def copy(self) -> "SamplingState":
        """An independent copy."""
        return self.copy_with(self.grammar.copy() if self.grammar else None)

    def after(self, token: int) -> "SamplingState":
        """A copy that has taken one more token."""
        state = self.copy_with(self.grammar.after(token) if self.grammar else None)
        state.note(token)
        return state

    def copy_with(self, grammar: GrammarMask | None) -> "SamplingState":
        state = copy(self)
        state.grammar, state.token_counts = grammar, self.token_counts and self.token_counts.copy()
        return state

    def penalty(self) -> Float32:
        """Return what the frequency and presence penalties subtract from the scores of `token_counts.ids`."""
        assert self.token_counts is not None
        sampling, counts = self.sampling, self.token_counts
        penalty = sampling.frequency_penalty * counts.generated + sampling.presence_penalty * (
            counts.generated > 0
        )
        if sampling.relative_frequency_penalty:
            penalty = penalty + sampling.relative_frequency_penalty / counts.num_tokens * counts.counts
        return np.asarray(penalty, np.float32)


def has_penalties(sampling: SamplingParams) -> bool:
    penalties = (sampling.frequency_penalty, sampling.presence_penalty, sampling.relative_frequency_penalty)
    return sampling.repetition_penalty != 1 or any(penalties)


@dataclass(slots=True)
class SampleRequest:
    """A row's sampling state, and the index of the token that it samples now."""

    state: SamplingState
    index: int
