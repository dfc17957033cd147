"""Structural tags: text with structured parts between tags, as clients of vLLM and SGLang send it. Its
formats have xgrammar's names; each becomes an expression in Lark.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from api.errors import ApiError, cut, invalid, quoted
from api.grammar.lark import TEXT, Lark, one_of, regex

Check = Callable[[Any, str], Any]
"""(value of a field, its place) → the value as it is read. Raises ApiError."""
Format = Mapping[str, Any]
"""A part of a structural tag, as it was read: its `type`, and the value of each field of this type."""
Following = Sequence[str] | None
"""What follows a format: one of these texts; nothing at the end of the whole; None where it has no fixed
beginning. Only a text shows where free text ends.
"""
REQUIRED: Any = object()
"""In place of a default."""


# --- fields -------------------------------------------------------------------------------------------------


def must_be(words: str, is_right: Callable[[Any], bool]) -> Check:
    """A check of a value that is read as it is."""

    def check(value: Any, place: str) -> Any:
        if not is_right(value):
            raise invalid(f"`{place}` must be {words}", place)
        return value

    return check


def only(allowed: Any) -> Check:
    """A check of a field that has one value here."""

    def check(value: Any, place: str) -> Any:
        if value != allowed or type(value) is not type(allowed):
            raise unsupported(value, place)
        return value

    return check


def unsupported(value: Any, place: str) -> ApiError:
    return invalid(f"`{place}` is not supported. Given: {quoted(value)}", place)


def required(place: str) -> ApiError:
    return invalid(f"`{place}` is required", place)


def list_of(check: Check) -> Check:
    is_list = must_be("a list that is not empty", lambda value: isinstance(value, list) and value != [])
    return lambda value, place: [check(item, f"{place}.{i}") for i, item in enumerate(is_list(value, place))]


def ends(value: Any, place: str) -> Any:
    """The ends of a tag; a text is its only one."""
    must_be("a text, or a list of texts", lambda one: isinstance(one, str | list))(value, place)
    return [value] if isinstance(value, str) else list_of(any_text)(value, place)


def read_fields(value: Any, place: str, fields: Mapping[str, tuple[Check, Any]]) -> Format:
    """The fields of an object. Raises ApiError for the first that is wrong, missing or unknown."""
    an_object(value, place)
    read = {}
    for name, (check, default) in fields.items():
        if name not in value and default is REQUIRED:
            raise required(f"{place}.{name}")
        read[name] = check(value[name], f"{place}.{name}") if name in value else default
    if unknown := [name for name in value if name not in fields]:
        raise unsupported(value[unknown[0]], f"{place}.{cut(unknown[0])}")
    return read


def read_format(value: Any, place: str) -> Format:
    """Any of the formats, told apart by `type`."""
    kind = an_object(value, place).get("type", REQUIRED)
    if kind is REQUIRED:
        raise invalid(f"`{place}` must have a `type`", place)
    if not isinstance(kind, str) or kind not in FORMATS:
        place = f"{place}.type"
        raise invalid(f"`{place}` must be one of {', '.join(FORMATS)}. Given: {quoted(kind)}", place)
    return read_fields(value, place, {"type": (only(kind), kind), **FORMATS[kind]})


def read_tag(value: Any, place: str) -> Format:
    """A tag among others; its `type` may be missing."""
    return read_fields(value, place, {"type": (only("tag"), "tag"), **FORMATS["tag"]})


def read_structure(value: Any, place: str) -> Format:
    """A JSON value between two texts, in the older form of structural tags, as a tag."""
    read = read_fields(value, place, STRUCTURE)
    schema = {} if read["schema"] is None else read["schema"]
    content = {"type": "json_schema", "json_schema": schema}
    return read_tag({"begin": read["begin"], "content": content, "end": read["end"]}, place)


an_object = must_be("an object", lambda value: isinstance(value, dict))
anything = must_be("", lambda value: True)
any_text = must_be("a text", lambda value: isinstance(value, str))
text = must_be("a text that is not empty", lambda value: isinstance(value, str) and value != "")
flag = must_be("true or false", lambda value: isinstance(value, bool))
excludes: tuple[Check, Any] = (only([]), [])
FORMATS: Mapping[str, Mapping[str, tuple[Check, Any]]] = {
    "const_string": {"value": (text, REQUIRED)},
    "regex": {"pattern": (text, REQUIRED)},
    "grammar": {"grammar": (text, REQUIRED)},
    "any_text": {"excludes": excludes, "max_chars": (only(None), None), "max_tokens": (only(None), None)},
    "json_schema": {
        "json_schema": (anything, REQUIRED),
        "style": (only("json"), "json"),
        "any_order": (only(False), False),
        "max_whitespace_cnt": (only(None), None),
    },
    "sequence": {"elements": (list_of(read_format), REQUIRED)},
    "or": {"elements": (list_of(read_format), REQUIRED)},
    "tag": {"begin": (any_text, REQUIRED), "content": (read_format, REQUIRED), "end": (ends, REQUIRED)},
    "triggered_tags": {
        "triggers": (list_of(text), REQUIRED),
        "tags": (list_of(read_tag), REQUIRED),
        "at_least_one": (flag, False),
        "stop_after_first": (flag, False),
        "excludes": excludes,
    },
}
"""Types of formats → their fields → the check of each, and its default.

- `const_string` is this text, `any_text` any text.
- `regex`, `grammar` (GBNF or Lark) and `json_schema` are a text that matches.
- `sequence` is several formats, one after the other, `or` one of several.
- `tag` is a format between two texts, of which the second is one of `end`.
- `triggered_tags` is any text with tags in it: a trigger begins one of the tags that begin with it.
"""
STRUCTURE = {"begin": (any_text, REQUIRED), "schema": (anything, None), "end": (any_text, REQUIRED)}
WHOLE = {"format": (read_format, REQUIRED)}
OLDER = {"triggers": (list_of(text), REQUIRED), "structures": (list_of(read_structure), REQUIRED)}
"""Fields of the older form: text with structures in it, where a trigger comes."""


# --- rules --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TagRules:
    """The rules of formats in one grammar.

    Attributes:
        schema: (JSON schema, its field) → the schema as it is compiled. Raises ApiError.
        grammar: (GBNF or Lark, its field) → the grammar in Lark. Raises ApiError.
    """

    lark: Lark
    schema: Callable[[Any, str], Mapping[str, Any]]
    grammar: Callable[[str, str], str]

    def source(self, text: str, field: str) -> str:
        """The grammar of a structural tag, given as JSON. Raises ApiError that names the part at fault."""
        tag = json.loads(text)
        fields = OLDER if "structures" in tag and "format" not in tag else WHOLE
        tag = read_fields({name: tag[name] for name in tag if name in fields}, field, fields)
        if fields is WHOLE:
            return self.lark.source(self.rule(tag["format"], f"{field}.format", ()))
        for i, one in enumerate(tag["structures"]):
            self.schema(one["content"]["json_schema"], f"{field}.structures.{i}.schema")
        form = {**tag, "at_least_one": False, "stop_after_first": False}
        return self.lark.source(self.triggered(form, field, (), "structures").lstrip())

    def rule(self, form: Format, field: str, after: Following) -> str:
        """The expression of a format, and of the text that follows it."""
        return f"{self.lark.marked(beginning_of(form))} {self.rest(form, field, after)}".lstrip()

    def rest(self, form: Format, field: str, after: Following) -> str:
        """What follows the beginning of a format."""
        match form:
            case {"type": "sequence", "elements": elements}:
                starts = [(start,) if (start := beginning_of(one)) else None for one in elements]
                parts = enumerate(zip(elements, [*starts[1:], after], strict=True))
                return " ".join(self.rest(one, f"{field}.elements.{i}", next_) for i, (one, next_) in parts)
            case {"type": "or", "elements": elements}:
                return one_of(
                    self.rule(one, f"{field}.elements.{i}", after) for i, one in enumerate(elements)
                )
            case {"type": "tag"}:
                return self.content(form, field, after)
            case {"type": "triggered_tags"}:
                return self.triggered(form, field, after)
            case {"type": "any_text"}:
                return self.text(TEXT, field, after)
            case {"type": "regex", "pattern": pattern}:
                return self.text(regex(pattern), field, after)
            case {"type": "grammar", "grammar": grammar}:
                source = self.lark.nest(self.grammar(grammar, f"{field}.grammar"))
            case {"type": "json_schema", "json_schema": schema}:
                source = self.lark.json(self.schema(schema, f"{field}.json_schema"))
            case _:  # a text, which is its beginning
                source = ""
        return f"{source} {self.lark.any_marked(after or ())}"

    def text(self, pattern: str, field: str, after: Following) -> str:
        """A text that matches a pattern, up to a text that may follow. Raises ApiError where none shows its
        end.
        """
        if after is None:
            raise invalid(f"`{field}` has no end: it must be the last, or a fixed text must follow it", field)
        return (
            one_of(self.lark.until(mark, pattern) for mark in after) if after else self.lark.lexeme(pattern)
        )

    def content(self, tag: Format, field: str, after: Following) -> str:
        """What stands after the beginning of a tag. Without an end, it goes on up to what follows."""
        content, place, ends = tag["content"], f"{field}.content", [end for end in tag["end"] if end]
        found = [self.rule(content, place, after)] if "" in tag["end"] else []
        if ends:
            found.append(f"{self.rule(content, place, ends)} {self.lark.any_marked(after or ())}")
        return one_of(found)

    def triggered(self, form: Format, field: str, after: Following, name: str = "tags") -> str:
        """Free text, with tags wherever their triggers come; `name` is the field that has the tags."""
        groups: dict[str, list[str]] = {}
        at_least_one, stop_after_first = form["at_least_one"], form["stop_after_first"]
        for i, tag in enumerate(form[name]):
            place = f"{field}.{name}.{i}"
            trigger = self.trigger_of(tag["begin"], form["triggers"], place)
            head = self.lark.marked(tag["begin"].removeprefix(trigger))
            content = self.content(tag, place, after if stop_after_first or after == () else None)
            groups.setdefault(trigger, []).append(f"{head} {content}")
        first = one_of(f"{self.lark.marked(trigger)} {one_of(rest)}" for trigger, rest in groups.items())
        if at_least_one and stop_after_first:
            return f"{first} {self.lark.any_marked(after or ())}"
        found = (f"{self.lark.until(trigger)} {one_of(rest)}" for trigger, rest in groups.items())
        any_tag, text = self.lark.rule(one_of(found)), self.text(TEXT, field, after)
        if stop_after_first:
            return one_of([any_tag, text])
        return f"{first if at_least_one else ''} ({any_tag})* {text}"

    def trigger_of(self, begin: str, triggers: Sequence[str], place: str) -> str:
        """The shortest trigger that a tag begins with, since it comes first; if it is a part of a special
        token, the whole token. Raises ApiError where there is none.
        """
        trigger = min((one for one in triggers if begin.startswith(one)), key=len, default=None)
        if trigger is None:
            raise invalid(f"`{place}.begin` must begin with one of `triggers`", f"{place}.begin")
        marks = [mark for mark in self.lark.special_ids if begin.startswith(mark)]
        return next((mark for mark in marks if mark.startswith(trigger)), trigger)


def beginning_of(form: Format) -> str:
    """The fixed text with which a format begins; "" if there is none."""
    match form:
        case {"type": "const_string", "value": str(text)} | {"type": "tag", "begin": str(text)}:
            return text
        case {"type": "sequence", "elements": [first, *_]}:
            return beginning_of(first)
        case _:
            return ""
