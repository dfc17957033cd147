"""Ids to text. The text after token k is a pure function of prompt, ids and stop strings, so whoever asks
gets the same bytes: the worker's agent, and a gateway that fills a gap.
"""

import json
from collections.abc import Sequence
from functools import lru_cache

from tokenizers import Tokenizer

CONTEXT_TOKENS = 5
"""Tokens of the prompt that come before the first new one, so that spacing at the start is right."""
MAX_INCOMPLETE_TOKENS = 32
"""A token's text may wait for that many more: no character is longer, and endless invalid bytes must not make
each step slower.
"""
INCOMPLETE = "\ufffd"


CONCATENATE = [
    ["ByteLevel"],
    ["Replace", "ByteFallback", "Fuse"],
    ["Replace", "ByteFallback", "Fuse", "Strip"],
]
"""Decoders with which a token of whole characters adds the same to every text of whole characters."""


@lru_cache(maxsize=16)
def concatenates(tokenizer: Tokenizer) -> bool:
    """Whether its decoder is one of those."""
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
    parts = decoder.get("decoders", [decoder])
    return [part.get("type") for part in parts] in CONCATENATE and not parts[-1].get("stop")


@lru_cache(maxsize=16)
def piece_cache(tokenizer: Tokenizer) -> dict[int, tuple[str, str]]:
    """Of the tokens that were met: what each adds to a text, and its text alone, of which a decoder may strip
    the first space.
    """
    return {}


class Detokenizer:
    """What each token adds to the text of one request. Special tokens appear as their literal text.

    Attributes:
        read: the text of the first `num_read` of `ids`; what the others add is not known yet.
        settled: whether no others are there and a piece holds for the next token, if there is one.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self.tokenizer, self.pieces, self.concatenates = (
            tokenizer,
            piece_cache(tokenizer),
            concatenates(tokenizer),
        )
        self.ids = list(prompt_ids[-CONTEXT_TOKENS:])
        self.num_read = len(self.ids)
        self.read = self.decode(self.ids)
        self.settled = self.concatenates and is_complete(self.read)

    def decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def step(self, token_id: int) -> str:
        """The text that `token_id` completes: empty while a character is incomplete."""
        if self.settled and (piece := self.pieces.get(token_id)):
            self.ids, self.num_read = [token_id], 1
            new, self.read = piece
            return new
        settled, new = self.settled, self.look(token_id)
        self.settled = self.concatenates and bool(new) and is_complete(self.read)
        if settled and self.settled and is_complete(new):
            self.pieces[token_id] = new, self.read
        return new

    def look(self, token_id: int) -> str:
        """`step`, by decoding what is not read yet behind what is."""
        self.ids.append(token_id)
        text = self.decode(self.ids)
        pending = len(self.ids) - self.num_read
        if len(text) <= len(self.read) or (text.endswith(INCOMPLETE) and pending < MAX_INCOMPLETE_TOKENS):
            return ""
        new = text[len(self.read) :]
        self.ids = self.ids[self.num_read :]
        self.num_read = pending
        self.read = self.decode(self.ids)
        return new


def is_complete(text: str) -> bool:
    """Whether there is a text, of nothing but complete characters."""
    return bool(text) and INCOMPLETE not in text


class StopMatcher:
    """Looks for stop strings in a text that comes in pieces."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = stops
        self.overlap = max(map(len, stops), default=1) - 1
        self.tail = ""
        self.matched = False

    def step(self, text: str) -> bool:
        """Whether a stop string has appeared anywhere up to the end of `text`, the next piece."""
        seen = self.tail + text
        self.tail = seen[-self.overlap :] if self.overlap else ""
        for stop in self.stops:
            if stop in seen:
                self.matched = True
        return self.matched


def generated_text(
    tokenizer: Tokenizer,
    prompt_ids: Sequence[int],
    ids: Sequence[int],
    stops: Sequence[str],
    reason: str,
    min_new_tokens: int = 0,
) -> str:
    """The whole text of an ended request, without special tokens; with reason `stop_sequence` it ends behind
    the first stop string that comes after the first `min_new_tokens` tokens.
    """
    text = clean_text(tokenizer, prompt_ids, ids)
    if reason != "stop_sequence":
        return text
    begin = len(clean_text(tokenizer, prompt_ids, ids[:min_new_tokens])) if min_new_tokens else 0
    found = [(text.find(stop, begin), stop) for stop in stops]
    ends = [at + len(stop) for at, stop in found if at >= 0]
    return text[: min(ends)] if ends else text


def clean_text(tokenizer: Tokenizer, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
    context = list(prompt_ids[-CONTEXT_TOKENS:])
    before: str = tokenizer.decode(context, skip_special_tokens=True)
    whole: str = tokenizer.decode(context + list(ids), skip_special_tokens=True)
    return whole[len(before) :].rstrip(INCOMPLETE)
