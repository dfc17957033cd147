"""Lark: a grammar in llguidance's dialect of it, built rule by rule."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import llguidance

TEXT = r"/(.|\n)*/"
"""Any text."""


class Lark:
    """The rules of one grammar.

    Attributes:
        special_ids: the model's special tokens, id by text. A grammar names them by their ids.
        rules: the name of each, by what it says.
        nested: whole grammars, to which rules refer by name.
    """

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        self.special_ids = special_ids
        self.rules: dict[tuple[str, str], str] = {}
        self.nested: list[dict[str, Any]] = []

    def source(self, start: str) -> str:
        """The grammar: Lark, or llguidance's list of grammars if others are nested in it."""
        lark = "\n".join([f"start: {start}", *(f"{name}{body}" for (_, body), name in self.rules.items())])
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self.nested]}) if self.nested else lark

    def nest(self, source: str, name: str = "") -> str:
        """A reference to a whole grammar, given as Lark or as a list of grammars. The names of its rules do
        not collide with others.
        """
        is_list = source.lstrip().startswith('{"grammars"')
        first, *others = json.loads(source)["grammars"] if is_list else [{"lark_grammar": source}]
        name = name or f"grammar_{len(self.nested)}"
        self.nested += [{**first, "name": name}, *others]
        return f"@{name}"

    def mark(self, text: str) -> str:
        """A text that may be a special token."""
        return f"<[{self.special_ids[text]}]>" if text in self.special_ids else literal(text)

    def marked(self, text: str) -> str:
        """A text that may have special tokens in it; nothing for the empty text."""
        return " ".join(map(self.mark, self.pieces(text)))

    def any_marked(self, texts: Sequence[str]) -> str:
        """One of the texts, which may have special tokens in them; nothing for none."""
        return one_of(map(self.marked, texts)) if len(texts) > 1 else "".join(map(self.marked, texts))

    def pieces(self, text: str) -> list[str]:
        """A text, split at the special tokens in it."""
        marks = [re.escape(mark) for mark in self.special_ids if mark in text]
        pieces = re.split(f"({'|'.join(marks)})", text) if marks else [text]
        return [piece for piece in pieces if piece]

    def rule(self, body: str, option: str = "", kind: str = "rule") -> str:
        return self.rules.setdefault((kind, f"{option}: {body}"), f"{kind}_{len(self.rules)}")

    def lexeme(self, pattern: str) -> str:
        """One lexeme of regexes and literals; it takes the longest text that matches."""
        return self.rule(pattern, kind="LEXEME")

    def json(self, schema: Mapping[str, Any]) -> str:
        """A JSON value."""
        return self.rule(f"%json {json.dumps(schema)}")

    def until(self, mark: str, pattern: str = TEXT) -> str:
        """A text that matches the pattern, up to a mark, and the mark. A special token ends the text before
        it, without a lazy rule.
        """
        head, *tail = self.pieces(mark)
        if head in self.special_ids:
            return f"{self.lexeme(pattern)} {self.marked(mark)}"
        before = self.lexeme(f"{pattern} {literal(head)}")
        return " ".join([before if tail else self.rule(before, "[lazy]"), *map(self.mark, tail)])


def literal(text: str) -> str:
    """A text between quotes. llguidance takes a delete character only as an escape."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def regex(pattern: str) -> str:
    """A regex between slashes."""
    return f"/{llguidance.regex_to_lark(pattern, use_ascii='')}/"


def one_of(expressions: Iterable[str]) -> str:
    return f"({' | '.join(expressions)})"
