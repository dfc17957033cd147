"""Endings: rows with a grammar are steered to an end of their text, so that `max_tokens` does not cut it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import llguidance
import torch

from gpu_worker.engine.batch.sampling_state import SampleRequest
from gpu_worker.engine.sampling.ending_search import Ending, EndingSearch
from gpu_worker.engine.sampling.exits import exits_of
from gpu_worker.engine.sampling.grammar import pack_ids
from gpu_worker.engine.sampling.matcher import Matcher, Matchers, Steering
from gpu_worker.engine.sampling.multinomial import SamplerOutput
from gpu_worker.engine.sampling.sampler import sample, sample_again

MIN_WINDOW = 128
"""A row is watched for so many last tokens at least."""
BEGINNINGS = (b"", b"{", b"[")


@dataclass(eq=False)
class Endings:
    """Steers rows into short endings.

    Attributes:
        steers: rows are steered; else they are sampled only.
    """

    matchers: Matchers
    steers: bool = True

    @cached_property
    def search(self) -> EndingSearch:
        return EndingSearch(self.matchers.vocabulary)

    def start(self, source: str, tokens: Sequence[int]) -> Matcher:
        """The matcher of a row that has sampled these tokens so far; what steering needs to know of its
        grammar is found behind it, in the same thread.
        """
        matcher = self.matchers.start(source, tokens)
        if self.steers:
            matcher.steering = self.matchers.in_thread(lambda: steering_of(self.search, source))
        return matcher

    def sample(self, logits: torch.Tensor, requests: Sequence[SampleRequest | None]) -> SamplerOutput:
        """Sample logits float [rows, vocabulary]; those rows again whose grammar could not end in time
        behind their tokens.
        """
        output = sample(logits, requests)
        if self.steers and (places := self.steer(requests, output.ids)):
            sample_again(output, places, logits, requests)
        return output

    def steer(self, requests: Sequence[SampleRequest | None], ids: torch.Tensor) -> list[int]:
        """Narrow the masks of rows whose sampled tokens, ids int64 [rows], leave them too few to end → the
        places of these rows, which sample again.
        """
        near = [place for place, request in enumerate(requests) if request and is_near(request)]
        if not near:
            return []
        sampled = ids.tolist()
        return [place for place in near if self.narrow(requests[place], sampled[place])]

    def narrow(self, request: SampleRequest | None, token: int) -> bool:
        """Allow nothing but an ending's first token, if the sampled one leaves too few for any ending."""
        assert request is not None
        matcher = request.state.grammar
        assert isinstance(matcher, Matcher)
        left = request.tokens_left
        if self.fits(matcher, token, left - 1):
            return False
        ending = self.find(matcher, matcher.compiled.result().deep_copy(), matcher.newest)
        if ending is None or not ending.fits(left):
            return False
        first = ending.tokens[0] if ending.tokens else self.matchers.vocabulary.eos_token
        if first in request.state.banned_ids_at(request.index):
            return False
        matcher.bits = pack_ids([first], self.matchers.vocab_size)
        return True

    def fits(self, matcher: Matcher, token: int, left: int) -> bool:
        """Whether an ending behind this token has at most so many tokens."""
        after = matcher.compiled.result().deep_copy()
        if not after.consume_token(token) or token in self.matchers.vocabulary.eos_tokens:
            return True
        ending = self.find(matcher, after, token)
        return ending is not None and ending.fits(left)

    def find(self, matcher: Matcher, state: llguidance.LLMatcher, newest: int | None) -> Ending | None:
        """An ending from a state in the grammar of a row, behind its newest token; the state is consumed."""
        assert matcher.steering is not None
        return self.search.find(state, newest, matcher.steering.result().exits)


def is_near(request: SampleRequest) -> bool:
    """Whether a row is so near its end that its tokens are watched."""
    matcher = request.state.grammar
    if not isinstance(matcher, Matcher) or matcher.steering is None:
        return False
    return (
        request.tokens_left <= matcher.steering.result().window and not matcher.compiled.result().is_error()
    )


@lru_cache(maxsize=256)
def steering_of(search: EndingSearch, source: str) -> Steering:
    """How a grammar's rows are steered: they are watched four times as near their end as its shortest text is
    long, or the shortest that begins as an object or a list.
    """
    exits = exits_of(search, source)
    lengths = [MIN_WINDOW]
    for beginning in BEGINNINGS:
        tokens = search.vocabulary.tokenize_bytes(beginning)
        state = llguidance.LLMatcher(search.vocabulary, source, log_level=0)
        if not state.is_error() and state.try_consume_tokens(tokens) == len(tokens):
            ending = search.find(state, tokens[-1] if tokens else None, exits)
            lengths += [4 * len(ending.tokens)] if ending else []
    return Steering(max(lengths), exits)
