"""What stands behind a part of a structural tag, by which a free text ends."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from api.structured_output.lark import Mark, escaped

ANYTHING = r"(.|\n)"
FIRST_OF_JSON = {
    "object": r"\{",
    "array": r"\[",
    "string": '"',
    "integer": "[-0-9]",
    "number": "[-0-9]",
    "boolean": "[tf]",
    "null": "n",
}
FIRST_OF_ANY_JSON = r"[\[{\"\-0-9tfn]"


class Behind(NamedTuple):
    """What stands behind a format.

    Attributes:
        marks: it begins with one of these; free text ends there, for the first time that one comes.
        firsts: where it has no marks, regexes of its first character; none at the end of the whole.
        ends: tokens that end the tag around; no set of tokens has them.
    """

    marks: tuple[Mark, ...] = ()
    firsts: tuple[str, ...] = ()
    ends: frozenset[int] = frozenset()

    @property
    def starts(self) -> tuple[str, ...]:
        """Regexes of its first character; a token is none."""
        return tuple(escaped(mark[0]) for mark in self.marks if isinstance(mark, str)) or self.firsts

    def inside(self, firsts: Sequence[str]) -> "Behind":
        """What stands behind a part that such parts may follow, or what stands behind them all."""
        tokens = {mark for mark in self.marks if isinstance(mark, int)}
        return Behind((), (*firsts, *self.starts), self.ends | tokens)


END = Behind()


def firsts_of(form: Mapping[str, Any]) -> tuple[str, ...]:
    """Regexes of the character that a format begins with; none where that is a token."""
    match form.get("type"):
        case "const_string":
            return (first_of_text(form.get("value")),)
        case "tag":
            begin = form.get("begin")
            return () if isinstance(begin, Mapping) else firsts_of_begin(begin, form.get("content"))
        case "json_schema" if form.get("style") in (None, "json"):
            return (first_of_json(form.get("json_schema")),)
        case "or":
            return firsts_of_all(form.get("elements"))
        case "plus":
            return firsts_of_all([form.get("content")])
        case "sequence":
            return firsts_of_all(list(form.get("elements") or ())[:1])
        case "triggered_tags" | "tags_with_separator" if form.get("at_least_one"):
            tags = form.get("tags") or ()
            return firsts_of_all([{"type": "tag", **tag} for tag in tags if isinstance(tag, Mapping)])
        case "token":
            return ()
        case _:
            return (ANYTHING,)


def firsts_of_all(forms: Any) -> tuple[str, ...]:
    found = [firsts_of(form) for form in forms or () if isinstance(form, Mapping)]
    return tuple(dict.fromkeys(first for firsts in found for first in firsts))


def firsts_of_begin(begin: Any, content: Any) -> tuple[str, ...]:
    return firsts_of_all([content]) if begin == "" else (first_of_text(begin),)


def first_of_text(text: Any) -> str:
    return escaped(text[0]) if isinstance(text, str) and text else ANYTHING


def first_of_json(schema: Any) -> str:
    """A regex of the first character of a JSON value."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    return FIRST_OF_JSON.get(kind, FIRST_OF_ANY_JSON) if isinstance(kind, str) else FIRST_OF_ANY_JSON
