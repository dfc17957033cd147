"""Detokenizer: token ids to text, as they come; and the stop strings in it.

The text after token k is a pure function of prompt, ids and stop strings, so the worker's agent and a gateway
that fills a gap get the same text.
"""

import json
from collections.abc import Sequence
from copy import copy
from functools import lru_cache

from tokenizers import Tokenizer

CONTEXT_TOKENS = 5
"""Tokens of the prompt that are decoded with the first new one, to get the space before it right."""
MAX_INCOMPLETE_TOKENS = 32
"""Most tokens for which the text of a token waits.

No character is longer. Without a bound, endless invalid bytes would make each step slower.
"""
INCOMPLETE = "\ufffd"
"""What a decoder writes for bytes that are no character yet."""
CONCATENATE = [
    ["ByteLevel"],
    ["Replace", "ByteFallback", "Fuse"],
    ["Replace", "ByteFallback", "Fuse", "Strip"],
]
"""Decoders with which a token of complete characters adds the same to every text of complete characters."""


@lru_cache(maxsize=16)
def concatenates(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer's decoder is one of CONCATENATE."""
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
    parts = decoder.get("decoders", [decoder])
    return [part.get("type") for part in parts] in CONCATENATE and not parts[-1].get("stop")


@lru_cache(maxsize=16)
def piece_cache(tokenizer: Tokenizer) -> dict[int, tuple[str, str]]:
    """Return the cache of a tokenizer: id → (text that the token adds, text of the token alone).

    The two differ where a decoder strips the first space.
    """
    return {}


class Detokenizer:
    """The text that each token of one request adds. Special tokens appear as their literal text.

    Attributes:
        ids: tokens that are decoded together with the next one.
        num_read: how many of `ids` are in `text`; the others wait for the rest of a character.
        text: the text of those.
        cacheable: whether no token waits and the cache holds for the next token, if it has it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.cache = piece_cache(tokenizer)
        self.concatenates = concatenates(tokenizer)
        self.ids = list(prompt_ids[-CONTEXT_TOKENS:])
        self.num_read = len(self.ids)
        self.text = self.decode(self.ids)
        self.cacheable = self.concatenates and is_complete(self.text)

    def copy(self) -> "Detokenizer":
        """An independent copy."""
        other = copy(self)
        other.ids = list(self.ids)
        return other

    def decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def step(self, token_id: int) -> str:
        """Return the text that `token_id` completes: empty while a character is incomplete."""
        if self.cacheable and (piece := self.cache.get(token_id)):
            self.ids = [token_id]
            self.num_read = 1
            added, self.text = piece
            return added
        was_cacheable = self.cacheable
        added = self.decode_step(token_id)
        self.cacheable = self.concatenates and bool(added) and is_complete(self.text)
        if was_cacheable and self.cacheable and is_complete(added):
            self.cache[token_id] = added, self.text
        return added

    def decode_step(self, token_id: int) -> str:
        """`step` without the cache: decode the new token after those before it."""
        self.ids.append(token_id)
        text = self.decode(self.ids)
        num_waiting = len(self.ids) - self.num_read
        is_waiting = text.endswith(INCOMPLETE) and num_waiting < MAX_INCOMPLETE_TOKENS
        if len(text) <= len(self.text) or is_waiting:
            return ""
        added = text[len(self.text) :]
        self.ids = self.ids[self.num_read :]
        self.num_read = num_waiting
        self.text = self.decode(self.ids)
        return added


def is_complete(text: str) -> bool:
    """Whether the text is not empty and has complete characters only."""
    return bool(text) and INCOMPLETE not in text


class StopMatcher:
    """Finds stop strings in a text that comes in pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = stops
        self.overlap = max(map(len, stops), default=1) - 1
        self.tail = ""
        self.matched = False

    def step(self, text: str) -> bool:
        """Add the next piece. Return whether a stop string has appeared in the text so far."""
        seen = self.tail + text
        self.tail = seen[-self.overlap :] if self.overlap else ""
        for stop in self.stops:
            if stop in seen:
                self.matched = True
        return self.matched
