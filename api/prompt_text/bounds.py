"""Bounds: how many tokens a text has at least, known without tokenizing it."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

SHRINKS = {"Prepend": 1, "NFC": 4}
"""Normalizers → the most characters of a text that become one; 4 is Unicode's longest composition."""
SPLITTERS = ("ByteLevel", "Metaspace", "Digits", "Punctuation")
"""Pre-tokenizers that leave no character out."""

BYTE_TOKENS = {f"<0x{number:02X}>" for number in range(256)}
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
"""Bytes that ByteLevel spells as the character of that number; the others, in order, from 256 on."""
BYTE_LEVEL = {chr(number): number for number in PRINTABLE} | {
    chr(256 + i): number for i, number in enumerate(sorted({*range(256)} - {*PRINTABLE}))
}
"""ByteLevel's characters → bytes."""


@dataclass(frozen=True, slots=True)
class TextBound:
    """How many tokens a text has at least.

    Attributes:
        max_chars: the most characters that one token stands for.
        dropped: characters of which no token is made.
    """

    max_chars: int
    dropped: str = ""

    def least_tokens(self, text: str) -> int:
        num_chars = len(text) - sum(text.count(character) for character in self.dropped)
        return -(-num_chars // self.max_chars)


def text_bound(tokenizer: Tokenizer) -> TextBound | None:
    """The bound of a tokenizer; None where one token may stand for any number of characters."""
    splitters = [*parts_of(tokenizer.pre_tokenizer)]
    strips = any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
    dropped = dropped_characters(tokenizer, splitters)
    if strips or dropped is None or not all(map(keeps_characters, splitters)):
        return None
    shrinks = [shrink_of(one) for one in parts_of(tokenizer.normalizer)]
    if None in shrinks:
        return None
    # A token's text has a character for each character, or as ByteLevel spells it, for each byte of the text.
    longest = max(map(len, tokenizer.get_vocab())) * max([1, *(shrink for shrink in shrinks if shrink)])
    return TextBound(longest, dropped)


def dropped_characters(tokenizer: Tokenizer, splitters: Iterable[Mapping[str, Any]]) -> str | None:
    """Characters of which no token is made; None if there may be any, or if a token may be made of many that
    are unknown.
    """
    model = tokenizer.model
    if not isinstance(model, BPE):
        return None
    known = tokenizer.get_vocab().keys()
    if any(one["type"] == "ByteLevel" for one in splitters):
        unknown = BYTE_LEVEL.keys() - known
        # A character beyond ASCII has a byte of these, and with that a token.
        within = all(BYTE_LEVEL[spelled] < 0x80 or BYTE_LEVEL[spelled] >= 0xC0 for spelled in unknown)
        ascii_only = "".join(chr(BYTE_LEVEL[spelled]) for spelled in unknown if BYTE_LEVEL[spelled] < 0x80)
        return ascii_only if within else None
    if model.byte_fallback and known >= BYTE_TOKENS:
        return ""
    return "" if model.unk_token is not None and not model.fuse_unk else None


def parts_of(component: Any) -> Iterator[Mapping[str, Any]]:
    """What a normalizer or pre-tokenizer consists of, as tokenizer.json has it."""
    if component is not None:
        yield from flatten(json.loads(component.__getstate__()))


def flatten(part: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    inner = part.get("normalizers") or part.get("pretokenizers")
    if inner is None:
        yield part
    else:
        for one in inner:
            yield from flatten(one)


def keeps_characters(splitter: Mapping[str, Any]) -> bool:
    kind, behavior = splitter["type"], splitter.get("behavior")
    return behavior != "Removed" and (kind in SPLITTERS or kind == "Split")


def shrink_of(normalizer: Mapping[str, Any]) -> int | None:
    """The most characters that become one; None if any number may."""
    if normalizer["type"] == "Replace":
        replaced = normalizer["pattern"].get("String")
        keeps = replaced is not None and len(replaced) <= len(normalizer["content"])
        return 1 if keeps else None
    return SHRINKS.get(normalizer["type"])
