"""Lark: a grammar in llguidance's dialect, built rule by rule."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

TEXT = r"/(.|\n)*/"


class Lark:
    """The rules of one grammar.

    Attributes:
        special_ids: the model's special tokens; their text is no text to the grammar, which names their id.
    """

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self.special_ids = special_ids
        self.rules: list[str] = []

    def source(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self.rules])

    def mark(self, text: str) -> str:
        """A text that may be a special token."""
        return f"<[{self.special_ids[text]}]>" if text in self.special_ids else literal(text)

    def marked(self, text: str) -> str:
        """A text with marks in it that may be special tokens; nothing for the empty text."""
        return " ".join(map(self.mark, self.pieces(text)))

    def pieces(self, text: str) -> list[str]:
        """A text, cut around the special tokens in it."""
        marks = [re.escape(mark) for mark in self.special_ids if mark in text]
        pieces = re.split(f"({'|'.join(marks)})", text) if marks else [text]
        return [piece for piece in pieces if piece]

    def rule(self, body: str, option: str = "") -> str:
        name = f"rule_{len(self.rules)}"
        self.rules.append(f"{name}{option}: {body}")
        return name

    def lexeme(self, pattern: str) -> str:
        """One lexeme of regexes and literals: the longest text that is such."""
        name = f"LEXEME_{len(self.rules)}"
        self.rules.append(f"{name}: {pattern}")
        return name

    def json(self, schema: Mapping[str, Any]) -> str:
        """A JSON value."""
        return self.rule(f"%json {json.dumps(schema)}")

    def until(self, mark: str, pattern: str = TEXT) -> str:
        """Any text, or one that matches regexes, up to a mark, and the mark. Behind text, a special token can
        only be a mark, or in one.
        """
        head, *tail = self.pieces(mark)
        if head in self.special_ids:
            return " ".join([self.lexeme(pattern), *map(self.mark, (head, *tail))])
        before = f"{pattern} {literal(head)}"
        return " ".join([self.lexeme(before) if tail else self.rule(before, "[lazy]"), *map(self.mark, tail)])


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """A text in a regex between slashes, which must stand in one line."""
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/")


def regex(pattern: str) -> str:
    """A regex between slashes."""
    escapes = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    escaped = re.sub(r"(?s)\\.|/|\n", lambda found: escapes.get(found[0], found[0]), pattern)
    return f"/{escaped}/"


def one_of(expressions: Iterable[str]) -> str:
    return f"({' | '.join(expressions)})"


def listed(items: Sequence[str], comma: str, many: bool) -> str:
    """One of the items; with `many`, or more of them."""
    one = one_of(items)
    return f"{one} ({literal(comma)} {one})*" if many else one
