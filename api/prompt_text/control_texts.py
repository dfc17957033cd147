"""Control texts: the texts of control tokens that clients write into messages, and which must stay text.

A chat template mixes what a client wrote with control tokens of its own, and tells nobody which is which. So
each such text of a client gets a guard inside before the template sees it: what is whole afterwards is the
template's.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from tokenizers import Tokenizer

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
