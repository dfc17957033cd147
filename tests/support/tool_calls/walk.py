"""Random walks through grammars: what a model without sense would write under them."""

import functools
from collections.abc import Mapping
from pathlib import Path
from random import Random

import llguidance
import numpy as np
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

ENDINGS = ('"', "}", "]", ")", "1", "true")
"""Tokens that bring values to their end."""
MAX_TOKENS = 400


class Walker:
    """Walks through grammars with a model's tokens."""

    def __init__(self, directory: Path, special_ids: Mapping[str, int]) -> None:
        self.vocabulary = vocabulary(directory)
        self.marks = {token: mark.encode() for mark, token in special_ids.items()}
        encoded = [self.vocabulary.tokenize_str(text) for text in ENDINGS]
        self.endings = np.array([*(ids[0] for ids in encoded if len(ids) == 1), *self.marks])

    def walk(self, source: str, seed: int, *marks: str) -> str:
        """The text of a walk to the grammar's end. Marks that must come are tried now and then, since chance
        would not find them.
        """
        random = Random(seed)
        matcher = llguidance.LLMatcher(self.vocabulary, source, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens: list[int] = []
        while not matcher.is_stopped():
            assert len(tokens) < MAX_TOKENS, self.text(tokens)
            ahead = (
                self.vocabulary.tokenize_str(random.choice(marks)) if marks and random.random() < 0.2 else []
            )
            if not ahead or matcher.validate_tokens(ahead) < len(ahead):
                ahead = [self.step(matcher, random)]
            if ahead[0] == self.vocabulary.eos_token:
                break
            assert matcher.consume_tokens(ahead), matcher.get_error()
            tokens += ahead
        return self.text(tokens)

    def step(self, matcher: llguidance.LLMatcher, random: Random) -> int:
        mask = allocate_token_bitmask(1, self.vocabulary.vocab_size)
        fill_next_token_bitmask(matcher, mask)
        allowed = np.unpackbits(mask[0].view(np.uint8), bitorder="little")
        if allowed[self.vocabulary.eos_token] and random.random() < 0.5:
            return self.vocabulary.eos_token
        endings = self.endings[allowed[self.endings] != 0]
        found = endings if len(endings) and random.random() < 0.5 else np.flatnonzero(allowed)
        assert len(found), matcher.get_error()
        return int(found[random.randrange(len(found))])

    def text(self, tokens: list[int]) -> str:
        pieces = [self.marks.get(token) or self.vocabulary.decode_bytes([token]) for token in tokens]
        return b"".join(pieces).decode(errors="replace")


@functools.cache
def vocabulary(directory: Path) -> llguidance.LLTokenizer:
    return llguidance.LLTokenizer(str(directory / "tokenizer.json"))
