"""Vocabulary: the tokens that a grammar may name. Grammars are checked with a vocabulary of single bytes."""

import functools
from collections.abc import Mapping

import llguidance

from api.tokenizer import ModelTokenizer

NUM_BYTES = 256


class Bytes:
    """A vocabulary of single bytes, tokens without a text up to its size, and an end.

    Attributes:
        size: all ids that a grammar may name are below it.
        special_tokens: ids of control tokens by their texts.
    """

    bos_token_id = None
    special_tokens: Mapping[str, int] = {}

    def __init__(self, size: int = NUM_BYTES) -> None:
        self.size = max(size, NUM_BYTES)
        self.eos_token_id = self.size
        self.special_token_ids = (self.size,)
        self.tokens = (
            *(bytes([i]) for i in range(NUM_BYTES)),
            *(b"" for _ in range(NUM_BYTES, self.size)),
            b"<eos>",
        )

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


Vocabulary = ModelTokenizer | Bytes
"""A model's tokens, or the stand-in for them. Both are hashed by identity."""
BYTES = Bytes()


@functools.lru_cache(maxsize=8)
def byte_vocabulary(size: int = NUM_BYTES) -> llguidance.LLTokenizer:
    """The vocabulary of single bytes, in which ids below `size` may be named."""
    tokenizer = Bytes(size)
    wrapper = llguidance.TokenizerWrapper(tokenizer)
    return llguidance.LLTokenizer(wrapper, n_vocab=tokenizer.size + 1, eos_token=[tokenizer.size])
