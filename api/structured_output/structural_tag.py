"""Structural tags: texts with structured parts between tags, as vLLM and xgrammar describe them, in Lark."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from api.errors import ApiError, invalid
from api.structured_output.lark import TEXT, Lark, one_of, regex

SchemaRule = Callable[[Any, str], Mapping[str, Any]]
"""(JSON schema, its field) → the schema as it is compiled. Raises ApiError."""
FIELDS: Mapping[str, tuple[str, ...]] = {
    "const_string": ("value",),
    "json_schema": ("json_schema",),
    "regex": ("pattern",),
    "any_text": (),
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags", "at_least_one", "stop_after_first"),
    "tags_with_separator": ("tags", "separator", "at_least_one", "stop_after_first"),
}
"""Formats, and what each consists of."""


def format_of(value: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """The `format` of a structural tag; from the older form with `structures` and `triggers`, too. Raises
    ApiError.
    """
    if "format" in value:
        return object_of(value["format"], f"{field}.format")
    structures = items_of(value.get("structures"), f"{field}.structures")
    tags = []
    for i, structure in enumerate(structures):
        one = object_of(structure, f"{field}.structures.{i}")
        schema = one.get("schema")
        content = {"type": "json_schema", "json_schema": {} if schema is None else schema}
        tags.append({"begin": one.get("begin"), "content": content, "end": one.get("end")})
    return {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}


def source_of_tag(form: Mapping[str, Any], field: str, lark: Lark, schema_rule: SchemaRule) -> str:
    """The grammar of a text that has this format. Raises ApiError that names the part at fault."""
    return lark.source(FormatRules(lark, schema_rule).rule(form, f"{field}.format"))


@dataclass(frozen=True, slots=True)
class FormatRules:
    """The rules of formats in one grammar. `end` is what stands behind a format: free text ends there, for
    the first time that it comes; "" is the end of the text.
    """

    lark: Lark
    schema_rule: SchemaRule

    def rule(self, form: Any, field: str, end: str = "") -> str:
        form = object_of(form, field)
        kind = form.get("type")
        if not isinstance(kind, str) or kind not in FIELDS:
            allowed = ", ".join(FIELDS)
            raise invalid(f"`{field}.type` must be one of {allowed}. Given: {kind!r}", f"{field}.type")
        for name, item in form.items():
            if name not in (*FIELDS[kind], "type") and item not in (None, False, []):
                raise invalid(f"`{field}.{name}` is not supported", f"{field}.{name}")
        match kind:
            case "any_text":
                return self.text(end)
            case "sequence":
                return self.sequence(form, field, end)
            case "or":
                elements = items_of(form.get("elements"), f"{field}.elements")
                return one_of(self.rule(one, f"{field}.elements.{i}", end) for i, one in enumerate(elements))
            case "triggered_tags":
                return self.triggered(form, field, end)
            case _:
                return f"{self.bounded(kind, form, field)} {self.lark.marked(end)}"

    def bounded(self, kind: str, form: Mapping[str, Any], field: str) -> str:
        """A format that says itself where it ends."""
        match kind:
            case "const_string":
                return self.lark.marked(text_of(form, "value", field))
            case "json_schema":
                place = f"{field}.json_schema"
                return self.lark.json(self.schema_rule(form.get("json_schema"), place))
            case "regex":
                return self.lark.rule(regex(text_of(form, "pattern", field)))
            case "tag":
                return self.tag(form, field)
            case _:
                return self.separated(form, field)

    def text(self, end: str) -> str:
        return self.lark.until(end) if end else self.lark.rule(TEXT)

    def sequence(self, form: Mapping[str, Any], field: str, end: str) -> str:
        *elements, last = items_of(form.get("elements"), f"{field}.elements")
        for i, element in enumerate(elements):
            if is_open(element):
                place = f"{field}.elements.{i}"
                raise invalid(f"`{place}` has no end: only the last of a sequence may be such", place)
        parts = [self.rule(one, f"{field}.elements.{i}") for i, one in enumerate(elements)]
        return " ".join([*parts, self.rule(last, f"{field}.elements.{len(elements)}", end)])

    def tag(self, form: Mapping[str, Any], field: str, trigger: str = "") -> str:
        """A tag, behind the trigger that it begins with."""
        begin = text_of(form, "begin", field, empty=True)[len(trigger) :]
        end = text_of(form, "end", field, empty=True)
        return f"{self.lark.marked(begin)} {self.rule(form.get('content'), f'{field}.content', end)}"

    def triggered(self, form: Mapping[str, Any], field: str, end: str) -> str:
        """Text, with tags in it wherever their triggers come."""
        tags = self.tags_of(form, field)
        triggers = [
            text_of({"": trigger}, "", f"{field}.triggers.{i}")
            for i, trigger in enumerate(items_of(form.get("triggers"), f"{field}.triggers"))
        ]
        groups: dict[str, list[str]] = {}
        for place, tag in tags:
            begin = text_of(tag, "begin", place)
            found = max((trigger for trigger in triggers if begin.startswith(trigger)), key=len, default=None)
            if found is None:
                raise invalid(f"`{place}.begin` must begin with one of `triggers`", f"{place}.begin")
            trigger = self.whole_mark(begin, found)
            groups.setdefault(trigger, []).append(self.tag(tag, place, trigger))
        calls = [f"{self.lark.until(trigger)} {one_of(rest)}" for trigger, rest in groups.items()]
        found_tag = self.lark.rule(one_of(calls))
        first = [f"{self.lark.marked(trigger)} {one_of(rest)}" for trigger, rest in groups.items()]
        is_needed, is_single = (flag_of(form, name, field) for name in ("at_least_one", "stop_after_first"))
        start = one_of(first) if is_needed else ""
        if is_single:
            closed = f"{start or found_tag} {self.lark.marked(end)}"
            return closed if is_needed else one_of([closed, self.text(end)])
        return f"{start} ({found_tag})* {self.text(end)}"

    def whole_mark(self, begin: str, trigger: str) -> str:
        """A trigger that is a part of a special token comes with that whole token."""
        marks = [mark for mark in self.lark.special_ids if begin.startswith(mark)]
        return next((mark for mark in marks if mark.startswith(trigger)), trigger)

    def separated(self, form: Mapping[str, Any], field: str) -> str:
        one = self.lark.rule(one_of(self.tag(tag, place) for place, tag in self.tags_of(form, field)))
        separator = self.lark.marked(text_of(form, "separator", field, empty=True))
        is_single = flag_of(form, "stop_after_first", field)
        tags = one if is_single else f"{one} ({separator} {one})*"
        return tags if flag_of(form, "at_least_one", field) else f"({tags})?"

    def tags_of(self, form: Mapping[str, Any], field: str) -> list[tuple[str, Mapping[str, Any]]]:
        """The tags of a format, and their fields."""
        found: list[tuple[str, Mapping[str, Any]]] = []
        for i, value in enumerate(items_of(form.get("tags"), f"{field}.tags")):
            place = f"{field}.tags.{i}"
            tag = {"type": "tag", **object_of(value, place)}
            if tag["type"] != "tag":
                raise invalid(f"`{place}.type` must be tag. Given: {tag['type']!r}", f"{place}.type")
            found.append((place, tag))
        return found


def is_open(form: Any) -> bool:
    """Whether only what follows a format, or the end of the text, ends it."""
    if not isinstance(form, Mapping):
        return False
    if form.get("type") in ("sequence", "or"):
        elements = form.get("elements")
        return isinstance(elements, list) and any(map(is_open, elements))
    return form.get("type") in ("any_text", "triggered_tags")


def text_of(form: Mapping[str, Any], name: str, field: str, empty: bool = False) -> str:
    value, place = form.get(name), f"{field}.{name}".removesuffix(".")
    if not isinstance(value, str) or not (value or empty):
        raise invalid(f"`{place}` must be a text{'' if empty else ' that is not empty'}", place)
    return value


def flag_of(form: Mapping[str, Any], name: str, field: str) -> bool:
    value = form.get(name)
    if not isinstance(value, bool | None):
        raise invalid(f"`{field}.{name}` must be true or false", f"{field}.{name}")
    return bool(value)


def object_of(value: Any, field: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise needed(field, "an object")
    return value


def items_of(value: Any, field: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise needed(field, "a list that is not empty")
    return value


def needed(field: str, what: str) -> ApiError:
    return invalid(f"`{field}` must be {what}", field)
