"""Control texts: texts of control tokens (`<|im_end|>`) that a client writes into messages stay text.

A chat template mixes the client's texts with its own control tokens, and its result does not show which is
which. So each control text of a client gets a guard character inside before the template sees it: those
without a guard are the template's. A copy of the tokenizer in which control tokens have other names
(`PlainCopy`) tokenizes the prompt.
"""

import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from tokenizers import Encoding, Tokenizer

from api.errors import invalid

GUARDS = [chr(number) for number in range(0xE000, 0xF900)]
"""Private-use characters: they have no meaning, are no space, and survive every filter of a template."""
TAKEN_GUARD = re.compile(r"[\ue000-\uf8ff]|\\u[ef][0-9a-f]{3}")
"""One of GUARDS in a text, or as JSON and Python write it."""
PRIVATE = range(0x100000, 0x10FFFE)
"""Private-use characters."""


class Guarded(NamedTuple):
    """A prompt's text with guards: a control text with a `guard` inside is a client's."""

    text: str
    guard: str


class Rendered(NamedTuple):
    """A rendered prompt; `guarded` is None if the client wrote no control text."""

    text: str
    guarded: Guarded | None = None


class ControlTexts:
    """The texts of a model's control tokens.

    Attributes:
        starts: matches the first character of each control text.
        beginnings, ends: parts of control texts, of two characters at least: a template may join two of them.
        guards_all: whether every prompt is guarded, because the tokenizer's normalizer may make control
            tokens of other texts.
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
        """A guard that neither the client's texts nor the template contain; None if no text needs one. Raises
        ApiError.
        """
        texts = [*texts_of(given)]
        if not self.guards_all and not any(self.places(text) for text in texts):
            return None
        taken = {
            code.removeprefix("\\u") for text in (*texts, template) for code in TAKEN_GUARD.findall(text)
        }
        free = (guard for guard in GUARDS if guard not in taken and escaped(guard)[2:] not in taken)
        if (guard := next(free, None)) is None:
            raise invalid("`messages` has every private-use character: one must be left", "messages")
        return guard

    def guarded(self, given: Any, guard: str) -> Any:
        """A copy of a client's value with guards in its texts, keys included."""
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
        """Where guards go: after the first character of each control text, and of each part of one at the
        beginning or end of the text, not counting white space.
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
    """All texts in a client's value, keys included."""
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
    """The prompt that a template made of guarded texts; it may have escaped guards as JSON and Python do."""
    if guard is None:
        return Rendered(text)
    guarded = text.replace(escaped(guard), guard)
    return Rendered(guarded.replace(guard, ""), Guarded(guarded, guard))


def escaped(guard: str) -> str:
    return f"\\u{ord(guard):04x}"


class PlainCopy:
    """A copy of a tokenizer in which each control token has another text, an alias of the same length.

    So control texts are ordinary text, and the library treats the template's control tokens as always: it
    normalizes, strips the spaces around a token, and adds what begins a prompt.

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
        they strip.
        """
        encoding = self.original.encode_batch([text], add_special_tokens=False)[0]
        for index, token_id in enumerate(encoding.ids):
            span = encoding.token_to_chars(index) if token_id in self.texts else None
            if span is not None:
                found = text[span[0] : span[1]]
                own = self.texts[token_id] if self.texts[token_id] in found else found.strip()
                start = span[0] + found.index(own)
                yield token_id, start, start + len(own)


def private_text(length: int) -> str:
    """A text of private-use characters that were drawn at random: no client can guess it."""
    return "".join(chr(secrets.choice(PRIVATE)) for _ in range(length))


def new_aliases(texts: dict[int, str]) -> dict[int, str]:
    """An alias for each id, unlike all others."""
    found: dict[int, str] = {}
    for token_id, text in texts.items():
        while token_id not in found:
            alias = private_text(len(text))
            if alias not in found.values():
                found[token_id] = alias
    return found


def renamed(source: dict[str, Any], aliases: dict[str, str], original: Tokenizer) -> dict[str, Any]:
    """A tokenizer.json with aliases in place of control texts, also in the model's vocabulary: the model
    would find them there.
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
