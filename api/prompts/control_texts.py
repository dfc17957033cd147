"""Control texts: the texts of control tokens that clients write into messages, and which must stay text.

A chat template mixes what a client wrote with control tokens of its own, and tells nobody which is which. So
each such text of a client gets a guard inside before the template sees it: what is whole afterwards is the
template's.

Plain copy: a copy of a tokenizer for prompts in which a client wrote control tokens' texts.

Bounds: how many tokens a text has at least, known without tokenizing it.
"""

import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from tokenizers import Encoding, Tokenizer
from tokenizers.models import BPE

from api.errors import invalid

GUARDS = [chr(number) for number in range(0xE000, 0xF900)]
"""Private-use characters, which have no meaning, are no space, and survive every filter of a template."""
TAKEN = re.compile(r"[\ue000-\uf8ff]|\\u[ef][0-9a-f]{3}")
"""One of them in a text, or as JSON and Python write it."""


class Guarded(NamedTuple):
    """A prompt's text with guards: a control token's text with a `guard` inside is a client's."""

    text: str
    guard: str


class Rendered(NamedTuple):
    """A prompt that a template rendered; `guarded` is None where no client wrote a control token's text."""

    text: str
    guarded: Guarded | None = None


class ControlTexts:
    """The texts of a model's control tokens.

    Attributes:
        starts: matches the first character of such a text, wherever one begins.
        beginnings, ends: parts of such texts, of two characters at least: what a template joins may be whole.
        guards_all: every prompt is taken as guarded, since some texts become control tokens only by the
            tokenizer's normalizer.
    """

    def __init__(self, texts: Iterable[str] = (), guards_all: bool = False) -> None:
        known = [text for text in texts if text]
        rests: dict[str, list[str]] = {}
        for text in known:
            rests.setdefault(text[0], []).append(text[1:])
        self.starts = re.compile(
            "|".join(
                f"{re.escape(first)}(?={'|'.join(map(re.escape, sorted(found)))})"
                for first, found in rests.items()
            )
            or "(?!)"
        )
        self.beginnings = {text[:length] for text in known for length in range(2, len(text))}
        self.ends = {text[-length:] for text in known for length in range(2, len(text))}
        self.longest = max(map(len, known), default=0)
        self.firsts = {text[0] for text in known}
        self.lasts = {text[-1] for text in known}
        self.guards_all = guards_all

    def guard_for(self, given: Any, template: str) -> str | None:
        """A guard that neither a client's texts nor the template have; None if nothing needs one. Raises
        ApiError.
        """
        texts = [*texts_of(given)]
        if not self.guards_all and not any(self.places(text) for text in texts):
            return None
        taken = {code.removeprefix("\\u") for text in (*texts, template) for code in TAKEN.findall(text)}
        free = (guard for guard in GUARDS if guard not in taken and escaped(guard)[2:] not in taken)
        if (guard := next(free, None)) is None:
            raise invalid("`messages` has every private-use character: one must be left", "messages")
        return guard

    def guarded(self, given: Any, guard: str) -> Any:
        """A copy of what a client gave, with guards in its texts, keys included."""
        if isinstance(given, str):
            return self.guard_text(given, guard)
        if isinstance(given, Mapping):
            return {self.guarded(key, guard): self.guarded(value, guard) for key, value in given.items()}
        if isinstance(given, list | tuple):
            return [self.guarded(one, guard) for one in given]
        return given

    def guard_text(self, text: str, guard: str) -> str:
        cuts = [0, *sorted(self.places(text)), len(text)]
        return guard.join(text[start:end] for start, end in pairwise(cuts))

    def places(self, text: str) -> set[int]:
        """The places of guards: behind the first character of each control text, and of each part of one at
        an end of the text, white space around it aside.
        """
        found = {match.end() for match in self.starts.finditer(text)}
        stop = len(text.rstrip())
        tail = text[max(0, stop - self.longest) : stop]
        if not self.firsts.isdisjoint(tail):
            found |= {
                stop - length + 1 for length in range(2, len(tail) + 1) if tail[-length:] in self.beginnings
            }
        start = len(text) - len(text.lstrip())
        head = text[start : start + self.longest]
        if not self.lasts.isdisjoint(head) and any(
            head[:length] in self.ends for length in range(2, len(head) + 1)
        ):
            found.add(start + 1)
        return found


def control_texts(tokenizer: Tokenizer) -> ControlTexts:
    """The control texts of a tokenizer."""
    tokens = [one for one in tokenizer.get_added_tokens_decoder().values() if one.special]
    hides = tokenizer.normalizer is not None and any(token.normalized for token in tokens)
    return ControlTexts((token.content for token in tokens), guards_all=hides)


def texts_of(given: Any) -> Iterator[str]:
    """All texts in what a client gave, keys included."""
    left = [given]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            left += [*one, *one.values()]
        elif isinstance(one, list | tuple):
            left += one


def rendered_text(text: str, guard: str | None) -> Rendered:
    """What a template made of guarded texts; it may have written guards as JSON and Python write them."""
    if guard is None:
        return Rendered(text)
    guarded = text.replace(escaped(guard), guard)
    return Rendered(guarded.replace(guard, ""), Guarded(guarded, guard))


def escaped(guard: str) -> str:
    return f"\\u{ord(guard):04x}"


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
