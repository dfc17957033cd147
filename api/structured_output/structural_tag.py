"""Structural tags: texts with structured parts between tags, as vLLM and xgrammar describe them, in Lark."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from api.errors import invalid
from api.structured_output.format_fields import checked, flag_of, items_of, object_of, text_of
from api.structured_output.lark import TEXT, Lark, escaped, one_of, regex
from api.structured_output.regexes import can_go_on

SchemaRule = Callable[[Any, str], Mapping[str, Any]]
"""(JSON schema, its field) → the schema as it is compiled. Raises ApiError."""
Tag = tuple[str, Mapping[str, Any]]
"""(its field, its own fields)."""
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


def source_of_tag(value: Mapping[str, Any], field: str, lark: Lark, schema_rule: SchemaRule) -> str:
    """The grammar of a structural tag: a `format`, or the older `structures` and `triggers`. Raises ApiError
    that names the part at fault.
    """
    rules = FormatRules(lark, schema_rule)
    if "format" in value:
        return lark.source(rules.rule(value["format"], f"{field}.format"))
    form = {"triggers": value.get("triggers")}
    return lark.source(rules.triggered(form, rules.structures_of(value, field), field, END))


class Behind(NamedTuple):
    """What stands behind a format.

    Attributes:
        text: it begins with this; free text ends there, for the first time that it comes.
        first: where it is no such text, a regex of its first character; "" is the end of the whole.
    """

    text: str = ""
    first: str = ""

    @property
    def start(self) -> str:
        """A regex of its first character."""
        return escaped(self.text[0]) if self.text else self.first


END = Behind()
SOMETHING = Behind(first=r"(.|\n)")


@dataclass(frozen=True, slots=True)
class FormatRules:
    """The rules of formats in one grammar. Each is one with the text `behind` it."""

    lark: Lark
    schema_rule: SchemaRule

    def rule(self, form: Any, field: str, behind: Behind = END) -> str:
        form = checked(form, field)
        match form["type"]:
            case "any_text" | "regex":
                return self.matched(pattern_of(form, field), field, behind)
            case "sequence":
                return self.sequence(form, field, behind)
            case "or":
                elements = items_of(form.get("elements"), f"{field}.elements")
                return one_of(
                    self.rule(one, f"{field}.elements.{i}", behind) for i, one in enumerate(elements)
                )
            case "tag":
                return self.tag(form, field, behind)
            case "triggered_tags":
                return self.triggered(form, self.tags_of(form, field), field, behind)
            case "const_string":
                one = self.lark.marked(text_of(form, "value", field))
            case "json_schema":
                one = self.lark.json(self.schema_rule(form.get("json_schema"), f"{field}.json_schema"))
            case _:
                one = self.separated(form, field, behind)
        return f"{one} {self.lark.marked(behind.text)}"

    def matched(self, pattern: str, field: str, behind: Behind) -> str:
        """A text that matches. The longest one is taken, but where a text says where it ends."""
        if behind.text:
            return self.lark.until(behind.text, pattern)
        if behind.first and goes_on(pattern, behind.first, field):
            raise invalid(f"`{field}` has no end: it must be the last, or a text must stand behind it", field)
        return self.lark.lexeme(pattern)

    def sequence(self, form: Mapping[str, Any], field: str, behind: Behind) -> str:
        """The elements, each with the text that the next one begins with. Regexes side by side are one."""
        items = items_of(form.get("elements"), f"{field}.elements")
        places = [f"{field}.elements.{i}" for i in range(len(items))]
        heads, rests = zip(*map(cut_head, items, places), strict=True)
        ends = [*(Behind(*pair) for pair in zip(heads[1:], map(first_of, rests[1:]), strict=True)), behind]
        source, pattern = [self.lark.marked(heads[0])], ""
        for i, (rest, place, end) in enumerate(zip(rests, places, ends, strict=True)):
            if is_match(rest):
                pattern = f"{pattern} {pattern_of(rest, place)}"
                if end.text or i + 1 == len(rests) or not is_match(rests[i + 1]):
                    source.append(self.matched(pattern, place, end))
                    pattern = ""
            else:
                source.append(self.rule(rest, place, end) if rest else self.lark.marked(end.text))
        return " ".join(source)

    def tag(self, form: Mapping[str, Any], field: str, behind: Behind, trigger: str = "") -> str:
        """A tag, behind the trigger that it begins with."""
        begin = self.lark.marked(text_of(form, "begin", field, empty=True)[len(trigger) :])
        content, place = form.get("content"), f"{field}.content"
        end = text_of(form, "end", field, empty=True)
        if not end:
            return f"{begin} {self.rule(content, place, behind)}"
        return f"{begin} {self.rule(content, place, Behind(end))} {self.lark.marked(behind.text)}"

    def triggered(self, form: Mapping[str, Any], tags: Sequence[Tag], field: str, behind: Behind) -> str:
        """Text, with tags in it wherever their triggers come."""
        triggers = [
            text_of({"": trigger}, "", f"{field}.triggers.{i}")
            for i, trigger in enumerate(items_of(form.get("triggers"), f"{field}.triggers"))
        ]
        is_needed, is_single = (flag_of(form, name, field) for name in ("at_least_one", "stop_after_first"))
        behind_tag = behind if is_single or behind == END else SOMETHING
        groups: dict[str, list[str]] = {}
        for place, tag in tags:
            begin = text_of(tag, "begin", place)
            # the shortest: it comes before those that it begins
            found = min((trigger for trigger in triggers if begin.startswith(trigger)), key=len, default=None)
            if found is None:
                raise invalid(f"`{place}.begin` must begin with one of `triggers`", f"{place}.begin")
            trigger = self.whole_mark(begin, found)
            groups.setdefault(trigger, []).append(self.tag(tag, place, behind_tag, trigger))
        calls = [f"{self.lark.until(trigger)} {one_of(rest)}" for trigger, rest in groups.items()]
        found_tag = self.lark.rule(one_of(calls))
        first = [f"{self.lark.marked(trigger)} {one_of(rest)}" for trigger, rest in groups.items()]
        start = one_of(first) if is_needed else ""
        if is_single:
            return start or one_of([found_tag, self.matched(TEXT, field, behind)])
        return f"{start} ({found_tag})* {self.matched(TEXT, field, behind)}"

    def whole_mark(self, begin: str, trigger: str) -> str:
        """A trigger that is a part of a special token comes with that whole token."""
        marks = [mark for mark in self.lark.special_ids if begin.startswith(mark)]
        return next((mark for mark in marks if mark.startswith(trigger)), trigger)

    def separated(self, form: Mapping[str, Any], field: str, behind: Behind) -> str:
        tags = self.tags_of(form, field)
        separator = text_of(form, "separator", field, empty=True)
        is_single = flag_of(form, "stop_after_first", field)
        starts = [behind.start] if is_single else [escaped(separator[0]) if separator else SOMETHING.first]
        if not is_single and behind != END:
            starts.append(behind.start)
        inside = Behind(first="|".join(starts))
        one = self.lark.rule(one_of(self.tag(tag, place, inside) for place, tag in tags))
        many = one if is_single else f"{one} ({self.lark.marked(separator)} {one})*"
        return many if flag_of(form, "at_least_one", field) else f"({many})?"

    def structures_of(self, value: Mapping[str, Any], field: str) -> list[Tag]:
        """The tags of the older form."""
        found: list[Tag] = []
        for i, structure in enumerate(items_of(value.get("structures"), f"{field}.structures")):
            place = f"{field}.structures.{i}"
            one = object_of(structure, place)
            schema = {} if one.get("schema") is None else one["schema"]
            self.schema_rule(schema, f"{place}.schema")
            content = {"type": "json_schema", "json_schema": schema}
            found.append((place, {"begin": one.get("begin"), "content": content, "end": one.get("end")}))
        return found

    def tags_of(self, form: Mapping[str, Any], field: str) -> list[Tag]:
        found: list[Tag] = []
        for i, value in enumerate(items_of(form.get("tags"), f"{field}.tags")):
            place = f"{field}.tags.{i}"
            tag = {"type": "tag", **object_of(value, place)}
            if tag["type"] != "tag":
                raise invalid(f"`{place}.type` must be tag. Given: {tag['type']!r}", f"{place}.type")
            found.append((place, tag))
        return found


def cut_head(value: Any, field: str) -> tuple[str, Mapping[str, Any]]:
    """The text that a format begins with, and the rest of it: empty, if it is all text. Raises ApiError."""
    form = checked(value, field)
    match form["type"]:
        case "const_string":
            return text_of(form, "value", field), {}
        case "tag":
            return text_of(form, "begin", field, empty=True), {**form, "begin": ""}
        case _:
            return "", form


def first_of(form: Mapping[str, Any]) -> str:
    """A regex of the character that a format begins with."""
    if form.get("type") != "json_schema":
        return SOMETHING.first
    schema = form.get("json_schema")
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    return FIRST_OF_JSON.get(kind, FIRST_OF_ANY_JSON) if isinstance(kind, str) else FIRST_OF_ANY_JSON


def is_match(form: Mapping[str, Any]) -> bool:
    return form.get("type") in ("any_text", "regex")


def pattern_of(form: Mapping[str, Any], field: str) -> str:
    return TEXT if form["type"] == "any_text" else regex(text_of(form, "pattern", field))


def goes_on(pattern: str, first: str, field: str) -> bool:
    try:
        return can_go_on(pattern, first)
    except ValueError as error:
        raise invalid(f"`{field}` cannot be compiled: {error}", field) from error
