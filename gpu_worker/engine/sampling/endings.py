"""Endings: how the text of a row with a grammar can end soon, so that `max_tokens` does not cut it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import llguidance
import numpy as np
import torch

from gpu_worker.engine.batch.sampling_state import SampleRequest
from gpu_worker.engine.sampling.grammar import pack_ids
from gpu_worker.engine.sampling.matcher import Matcher, Matchers
from gpu_worker.engine.sampling.multinomial import SamplerOutput
from gpu_worker.engine.sampling.sampler import sample, sample_again

MAX_ENDING = 2048
"""Bytes of an ending; beyond them the search gives up."""
MIN_WINDOW = 128
"""A row is watched for so many last tokens at least."""
CLOSING = b'"}]'
OPENED: Mapping[int | None, bytes] = {ord("{"): b"}", ord("["): b"]"}
"""What closes at once what a byte may have opened."""
CLASSES = (
    b"0123456789",
    b"abcdefghijklmnopqrstuvwxyz",
    b",:.-/@+#=&%?!()_{[ ",
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZ",
)
"""Bytes of which an ending is made, besides those that close; others come last."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Tokens behind which a row's text satisfies its grammar.

    Attributes:
        is_whole: nothing may follow: the last token says so, and must not be the last that the row may have,
            or its reason were `length`.
    """

    tokens: list[int]
    is_whole: bool

    def fits(self, tokens_left: int) -> bool:
        return len(self.tokens) + self.is_whole <= tokens_left


class Endings:
    """Finds short endings, one byte after the other, and steers rows into them.

    A byte follows from the matcher's state and the byte before it alone: so the ending that is found from
    anywhere on an ending is its rest, whether the row was resumed there or not.

    Attributes:
        steers: rows are steered; else they are sampled only.
    """

    def __init__(self, matchers: Matchers, steers: bool = True) -> None:
        self.matchers = matchers
        self.steers = steers

    @property
    def vocabulary(self) -> llguidance.LLTokenizer:
        return self.matchers.vocabulary

    @cached_property
    def byte_ids(self) -> dict[int, int]:
        return byte_ids_of(self.vocabulary)

    @cached_property
    def orders(self) -> Mapping[int | None, list[tuple[int, int]]]:
        """Behind each byte, (byte, its token) in the order in which they are tried."""
        return {
            before: [(byte, self.byte_ids[byte]) for byte in order_after(before) if byte in self.byte_ids]
            for before in (None, *range(256))
        }

    def sample(self, logits: torch.Tensor, requests: Sequence[SampleRequest | None]) -> SamplerOutput:
        """Samples logits float [rows, vocabulary]; those rows again whose grammar could not end in time
        behind their tokens.
        """
        output = sample(logits, requests)
        if self.steers and (places := self.steer(requests, output.ids)):
            sample_again(output, places, logits, requests)
        return output

    def steer(self, requests: Sequence[SampleRequest | None], ids: torch.Tensor) -> list[int]:
        """Narrows the masks of rows whose sampled tokens, ids int64 [rows], leave them too few to end → the
        places of these rows, which sample again.
        """
        near = [place for place, request in enumerate(requests) if request and self.is_near(request)]
        if not near:
            return []
        sampled = ids.tolist()
        return [place for place in near if self.narrow(requests[place], sampled[place])]

    def is_near(self, request: SampleRequest) -> bool:
        """Whether a row is so near its end that its tokens are watched: four times as near as its grammar's
        shortest text.
        """
        matcher = request.state.grammar
        if not isinstance(matcher, Matcher) or matcher.compiled.result().is_error():
            return False
        if matcher.window is None:
            start = matcher.compiled.result().deep_copy()
            start.reset()
            shortest = self.find(start, None)
            matcher.window = max(MIN_WINDOW, 4 * len(shortest.tokens) if shortest else 0)
        return request.tokens_left <= matcher.window

    def narrow(self, request: SampleRequest | None, token: int) -> bool:
        """Allows nothing but an ending's first token, if the sampled one leaves too few for any ending."""
        assert request is not None
        matcher = request.state.grammar
        assert isinstance(matcher, Matcher)
        left = request.tokens_left
        if self.fits(matcher, token, left - 1):
            return False
        ending = self.find(matcher.compiled.result().deep_copy(), matcher.newest)
        if ending is None or not ending.fits(left):
            return False
        first = ending.tokens[0] if ending.tokens else self.vocabulary.eos_token
        if first in request.state.banned_ids_at(request.index):
            return False
        matcher.bits = pack_ids([first], self.matchers.vocab_size)
        return True

    def fits(self, matcher: Matcher, token: int, left: int) -> bool:
        """Whether an ending behind this token has at most so many tokens."""
        after = matcher.compiled.result().deep_copy()
        if not after.consume_token(token) or token in self.vocabulary.eos_tokens:
            return True
        ending = self.find(after, token)
        return ending is not None and ending.fits(left)

    def find(self, matcher: llguidance.LLMatcher, newest: int | None) -> Ending | None:
        """An ending from a matcher's state behind its newest token; the matcher is consumed. None if none is
        found.
        """
        tokens: list[int] = []
        text = bytearray()
        before = self.last_byte(newest)
        while not matcher.is_accepting():
            byte, token = self.next_byte(matcher, before)
            if token is None or len(text) >= MAX_ENDING or not matcher.consume_token(token):
                return None
            if byte is None:
                tokens += [*self.tokenize(text), token]
                text.clear()
            else:
                text.append(byte)
            before = byte
        tokens += self.tokenize(text)
        ends = [self.vocabulary.eos_token] if matcher.is_stopped() else []
        return Ending(tokens + ends, bool(ends))

    def last_byte(self, token: int | None) -> int | None:
        text = b"" if token is None else self.vocabulary.decode_bytes([token])
        return text[-1] if text else None

    def next_byte(self, matcher: llguidance.LLMatcher, before: int | None) -> tuple[int | None, int | None]:
        """The byte that an ending goes on with, and its token; or a special token where only that is
        allowed.
        """
        for byte, token in self.orders[before]:
            if matcher.validate_tokens([token]):
                return byte, token
        bits = np.frombuffer(matcher.deep_copy().compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        return None, int(allowed[0]) if len(allowed) else None

    def tokenize(self, text: bytearray) -> list[int]:
        """The text's tokens, the longest that fits each time: so a text's rest has the rest of its tokens."""
        try:
            tokens = self.vocabulary.greedy_tokenize(text.decode())
        except UnicodeDecodeError:
            return [self.byte_ids[byte] for byte in text]
        return list(tokens)


def order_after(before: int | None) -> bytes:
    """The bytes in the order in which they are tried behind another: those that close, then other classes
    than that one's, then what follows it in its own, so that no repetition goes on for ever.
    """
    closing = OPENED.get(before, b"") + CLOSING
    others = bytes(sorted(set(range(256)) - set(CLOSING) - set(b"".join(CLASSES))))
    for i, own in enumerate(CLASSES):
        if before is not None and before in own:
            place = own.index(before) + 1
            rest = (*CLASSES[i + 1 :], *CLASSES[:i], own[place:], own[:place], others)
            return closing + b"".join(rest)
    return closing + b"".join((*CLASSES, others))


def byte_ids_of(vocabulary: llguidance.LLTokenizer) -> dict[int, int]:
    """The tokens that are a single byte each; a vocabulary need not have all of them."""
    tokens = {byte: vocabulary.tokenize_bytes(bytes([byte])) for byte in range(256)}
    return {
        byte: ids[0]
        for byte, ids in tokens.items()
        if len(ids) == 1 and vocabulary.decode_bytes(ids) == bytes([byte])
    }
