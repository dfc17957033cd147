"""Plain copy: a copy of a tokenizer for prompts in which a client wrote control tokens' texts."""

import json
import secrets
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from tokenizers import Encoding, Tokenizer

from api.errors import invalid
from api.prompt_text.control_texts import Guarded

ALIAS_CHARACTERS = range(0x100000, 0x10FFFE)
"""Private-use characters: what consists of some of them, drawn at random, no client can write."""


class PlainCopy:
    """A tokenizer in which each control token has another text, an alias of the same length.

    So the token's own text is text like any other, and all that happens around a template's control tokens is
    done by the library, as always: normalization, the spaces that a token takes, and what begins a prompt.

    Attributes:
        aliases: control token's id → alias.
        texts: control token's id → its text in the original.
    """

    def __init__(self, original: Tokenizer) -> None:
        self.original = original
        special = {i: token for i, token in original.get_added_tokens_decoder().items() if token.special}
        self.texts = {token_id: token.content for token_id, token in special.items() if token.content}
        self.aliases = new_aliases(self.texts)
        by_text = {text: self.aliases[token_id] for token_id, text in self.texts.items()}
        source = json.loads(original.to_str())
        self.tokenizer = Tokenizer.from_str(json.dumps(renamed(source, by_text, original)))

    def encode(self, prompt: Guarded, add_special_tokens: bool) -> Encoding:
        """The prompt's encoding; offsets are those of its text without guards. Raises ApiError."""
        text = self.aliased(prompt)
        return self.tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def aliased(self, prompt: Guarded) -> str:
        """The prompt's text without guards, and with aliases in place of the template's control tokens.
        Raises ApiError.
        """
        parts = prompt.text.split(prompt.guard)
        text, guards = "".join(parts), [*accumulate(map(len, parts))][:-1]
        if any(alias in text for alias in self.aliases.values()):
            raise invalid("`messages` has private-use characters that are reserved here", "messages")
        pieces, done = [], 0
        for token_id, start, end in self.control_tokens(text):
            if bisect_right(guards, start) == bisect_right(guards, end):  # none of it is a client's
                pieces += [text[done:start], self.aliases[token_id]]
                done = end
        return "".join([*pieces, text[done:]])

    def control_tokens(self, text: str) -> Iterator[tuple[int, int, int]]:
        """(id, start, end) of the control tokens that the original finds in a text, without the spaces that
        they take.
        """
        encoding = self.original.encode_batch([text], add_special_tokens=False)[0]
        for place, token_id in enumerate(encoding.ids):
            span = encoding.token_to_chars(place) if token_id in self.texts else None
            if span is not None:
                found = text[span[0] : span[1]]
                own = self.texts[token_id] if self.texts[token_id] in found else found.strip()
                start = span[0] + found.index(own)
                yield token_id, start, start + len(own)


def new_aliases(texts: dict[int, str]) -> dict[int, str]:
    found: dict[int, str] = {}
    for token_id, text in texts.items():
        while (alias := random_text(len(text))) in found.values():
            pass
        found[token_id] = alias
    return found


def random_text(length: int) -> str:
    return "".join(chr(secrets.choice(ALIAS_CHARACTERS)) for _ in range(length))


def renamed(source: dict[str, Any], aliases: dict[str, str], original: Tokenizer) -> dict[str, Any]:
    """What tokenizer.json has, with aliases for control tokens' texts, also where the model knows these: it
    would find them in a text.
    """
    for token in source["added_tokens"]:
        alias = aliases.get(token["content"], "")
        if alias:
            kept = original.normalizer is None or alias in original.normalizer.normalize_str(alias)
            token |= {"content": alias, "special": False, "normalized": token["normalized"] and kept}
    model = source["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {aliases.get(text, text): token_id for text, token_id in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[aliases.get(text, text), score] for text, score in vocabulary]
    if model.get("unk_token") in aliases:
        model["unk_token"] = aliases[model["unk_token"]]
    return source
