"""Texts that match a regex, or any text, in a structural tag: how each ends, in Lark."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from api.errors import cut, invalid
from api.structured_output.behind import ANYTHING, Behind
from api.structured_output.check import can_go_on
from api.structured_output.format_fields import checked, items_of, number_of, text_of, texts_of
from api.structured_output.lark import TEXT, Lark, literal, one_of, regex, without

NEVER = "{0,0}"
LOOPS = ("optional", "star", "plus", "repeat")


class Part(NamedTuple):
    """A format, and where it stands.

    Attributes:
        pattern: of a text that matches it, as one lexeme; "" if the format is no such text.
        is_free: any text will do, so it may end before what it could go on with.
    """

    form: Mapping[str, Any]
    field: str
    pattern: str = ""
    is_free: bool = False


def matched(lark: Lark, part: Part, behind: Behind) -> str:
    """A text that matches, up to what stands behind it. The longest one is taken, but where a mark says where
    it ends.
    """
    pattern = ending(part, behind.firsts)
    if behind.marks:
        return one_of(lark.until(mark, pattern) for mark in behind.marks)
    return lark.lexeme(pattern)


def ending(part: Part, firsts: Sequence[str]) -> str:
    """The pattern of a text behind which these characters may come: free text ends there. Raises ApiError for
    another that could go on with them.
    """
    first, field = "|".join(dict.fromkeys(firsts)), part.field
    try:
        if not first or not can_go_on(part.pattern, first):
            return part.pattern
    except ValueError as error:
        raise invalid(f"`{field}` cannot be compiled: {cut(str(error))}", field) from error
    if not part.is_free or ANYTHING in firsts:
        words = "it must be the last, or a text must stand behind it with which it cannot go on"
        raise invalid(f"`{field}` has no end: {words}", field)
    return without(part.pattern, [f"/{first}/"])


def text_without(excludes: Sequence[str], most: int | None = None) -> str:
    """The pattern of any text, of at most so many characters, that has none of these in it."""
    text = TEXT if most is None else rf"/(.|\n){{0,{most}}}/"
    return without(text, map(literal, excludes)) if excludes else text


def part_of(value: Any, field: str) -> Part:
    """A format as a part. Raises ApiError."""
    form = checked(value, field)
    return Part(form, field, pattern_of(form, field), form["type"] == "any_text")


def pattern_of(form: Mapping[str, Any], field: str) -> str:
    """The pattern of a format whose texts are those of a regex; "" for others. Raises ApiError."""
    match form["type"]:
        case "any_text" if number_of(form, "max_tokens", field) is None:
            most = number_of(form, "max_chars", field)
            return text_without(texts_of(form, "excludes", field), most)
        case "regex":
            return regex(text_of(form, "pattern", field))
        case "or":
            parts = [part_of(*item) for item in items_of(form, "elements", field)]
            return one_of(part.pattern for part in parts) if all(part.pattern for part in parts) else ""
        case kind if kind in LOOPS:
            pattern = part_of(form.get("content"), f"{field}.content").pattern
            times = repetition(form, field)
            return "" if not pattern or times == NEVER else f"({pattern}){times}"
        case _:
            return ""


def repetition(form: Mapping[str, Any], field: str) -> str:
    """How often a format comes, as Lark writes it. Raises ApiError."""
    if (sign := {"optional": "?", "star": "*", "plus": "+"}.get(form["type"])) is not None:
        return sign
    least, most = number_of(form, "min", field), number_of(form, "max", field, lowest=-1)
    if least is None or most is None:
        missing = f"{field}.{'min' if least is None else 'max'}"
        raise invalid(f"`{missing}` is required", missing)
    if 0 <= most < least:
        raise invalid(f"`{field}.max` must be at least `min`, or -1 for any. Given: {most}", f"{field}.max")
    return f"{{{least},{most if most >= 0 else ''}}}"


def merged(items: Sequence[tuple[Any, str]]) -> list[Part]:
    """The elements of a sequence; texts that match side by side are one. Raises ApiError."""
    found: list[Part] = []
    for item in items:
        part = part_of(*item)
        if part.pattern and found and found[-1].pattern:
            part = Part(part.form, part.field, f"{found.pop().pattern} {part.pattern}")
        found.append(part)
    return found
