"""Structural tags: text with structured parts between tags, as clients of vLLM and SGLang send it. Its
formats have xgrammar's names; each becomes an expression in Lark.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from api.errors import ApiError, cut, invalid, quoted
from api.grammar.lark import TEXT, Lark, literal, one_of, regex, without

Item = TypeVar("Item")
Text = Annotated[str, Field(min_length=1)]
OneOrMore = Annotated[list[Item], Field(min_length=1, fail_fast=True)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1, strict=False)]
Following = Sequence[str] | None
"""What follows a format: one of these texts; nothing at the end of the whole; None where it has no fixed
beginning. Only a text shows where free text ends.
"""


class TagModel(BaseModel):
    """A part of a structural tag. Unknown fields are refused, and values are not converted."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


def as_list(end: Any) -> Any:
    """The ends of a tag; a text is its only one."""
    if not isinstance(end, str | list):
        raise PydanticCustomError("ends", "must be a text, or a list of texts")
    return [end] if isinstance(end, str) else end


class ConstStringFormat(TagModel):
    """This text."""

    type: Literal["const_string"]
    value: Text


class RegexFormat(TagModel):
    """A text that matches a regex."""

    type: Literal["regex"]
    pattern: Text


class GrammarFormat(TagModel):
    """A text that a grammar in GBNF or Lark allows."""

    type: Literal["grammar"]
    grammar: Text


class AnyTextFormat(TagModel):
    """Any text that contains none of `excludes`."""

    type: Literal["any_text"]
    excludes: list[Text] = []
    max_chars: Count | None = None
    max_tokens: None = None


class JSONSchemaFormat(TagModel):
    """A JSON value that satisfies a schema. The styles of single models are not supported."""

    type: Literal["json_schema"]
    json_schema: Any
    style: Literal["json"] = "json"
    any_order: Literal[False] = False
    max_whitespace_cnt: Count | None = None


class SequenceFormat(TagModel):
    """Several formats, one after the other."""

    type: Literal["sequence"]
    elements: OneOrMore["Format"]


class OrFormat(TagModel):
    """One of several formats."""

    type: Literal["or"]
    elements: OneOrMore["Format"]


class TagFormat(TagModel):
    """A format between two texts; the second is one of `end`."""

    type: Literal["tag"] = "tag"
    begin: str
    content: "Format"
    end: Annotated[OneOrMore[str], BeforeValidator(as_list)]


class TriggeredTagsFormat(TagModel):
    """Any text, with tags in it. A trigger begins one of the tags that begin with it."""

    type: Literal["triggered_tags"]
    triggers: OneOrMore[Text]
    tags: OneOrMore[TagFormat]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: list[Text] = []


class TagsWithSeparatorFormat(TagModel):
    """Tags with a separator between them, and no other text."""

    type: Literal["tags_with_separator"]
    tags: OneOrMore[TagFormat]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = Annotated[
    ConstStringFormat
    | RegexFormat
    | GrammarFormat
    | AnyTextFormat
    | JSONSchemaFormat
    | SequenceFormat
    | OrFormat
    | TagFormat
    | TriggeredTagsFormat
    | TagsWithSeparatorFormat,
    Field(discriminator="type"),
]
"""Any of the formats, told apart by `type`."""


class StructuralTag(BaseModel):
    """A structural tag: one format that consists of others."""

    format: Format


class OlderStructure(TagModel):
    """A JSON value between two texts, in the older form of structural tags."""

    begin: str
    json_schema: Any = Field(alias="schema", default_factory=dict)
    end: str


class OlderStructuralTag(BaseModel):
    """The older form of a structural tag: text with structures in it, where a trigger comes."""

    triggers: OneOrMore[Text]
    structures: OneOrMore[OlderStructure]


WORDS = {
    "missing": "is required",
    "union_tag_not_found": "must have a `type`",
    "string_type": "must be a text",
    "string_too_short": "must be a text that is not empty",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "too_short": "must be a list that is not empty",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
}
"""What is wrong, by pydantic's types of errors."""
UNSUPPORTED = ("extra_forbidden", "literal_error", "none_required")
UNIONS = ("format", "content")
"""Fields that are a format."""


def read_tag(text: str, field: str) -> StructuralTag | OlderStructuralTag:
    """Read a structural tag from its JSON. Raises ApiError that names the part at fault."""
    fields = json.loads(text).keys()
    model = OlderStructuralTag if "structures" in fields and "format" not in fields else StructuralTag
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise tag_error(problem, path_of(problem["loc"], field)) from error


def tag_error(problem: ErrorDetails, place: str) -> ApiError:
    """The error for what pydantic found."""
    kind, given = problem["type"], problem["input"]
    if kind == "union_tag_invalid":
        allowed, place = problem["ctx"]["expected_tags"].replace("'", ""), f"{place}.type"
        return invalid(f"`{place}` must be one of {allowed}. Given: {quoted(given['type'])}", place)
    if kind in UNSUPPORTED:
        return invalid(f"`{place}` is not supported. Given: {quoted(given)}", place)
    return invalid(f"`{place}` {WORDS.get(kind) or problem['msg'].replace('Input should', 'must')}", place)


def path_of(steps: Sequence[int | str], field: str) -> str:
    """The place of a problem: pydantic's path to it, without the names of types that follow each format."""
    names = [field]
    for before, last, step in zip(("", "", *steps), ("", *steps), steps, strict=False):
        if last not in UNIONS and before != "elements":
            names.append(cut(str(step)))
    return ".".join(names)


# --- rules --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TagRules:
    """The rules of formats in one grammar.

    Attributes:
        schema: (JSON schema, its field, white space) → the schema as it is compiled. Raises ApiError.
        grammar: (GBNF or Lark, its field) → the grammar in Lark. Raises ApiError.
    """

    lark: Lark
    schema: Callable[[Any, str, str], Mapping[str, Any]]
    grammar: Callable[[str, str], str]

    def source(self, text: str, field: str) -> str:
        """The grammar of a structural tag, given as JSON. Raises ApiError that names the part at fault."""
        tag = read_tag(text, field)
        if isinstance(tag, StructuralTag):
            return self.lark.source(self.rule(tag.format, f"{field}.format", ()))
        tags = []
        for i, one in enumerate(tag.structures):
            schema = {} if one.json_schema is None else one.json_schema
            self.schema(schema, f"{field}.structures.{i}.schema", "")
            content = JSONSchemaFormat(type="json_schema", json_schema=schema)
            tags.append(TagFormat(begin=one.begin, content=content, end=[one.end]))
        form = TriggeredTagsFormat(type="triggered_tags", triggers=tag.triggers, tags=tags)
        return self.lark.source(self.triggered(form, field, (), "structures").lstrip())

    def rule(self, form: Format, field: str, after: Following) -> str:
        """The expression of a format, and of the text that follows it."""
        return f"{self.lark.marked(beginning_of(form))} {self.rest(form, field, after)}".lstrip()

    def rest(self, form: Format, field: str, after: Following) -> str:
        """What follows the beginning of a format."""
        match form:
            case SequenceFormat(elements=elements):
                starts = [(start,) if (start := beginning_of(one)) else None for one in elements]
                parts = enumerate(zip(elements, [*starts[1:], after], strict=True))
                return " ".join(self.rest(one, f"{field}.elements.{i}", next_) for i, (one, next_) in parts)
            case OrFormat(elements=elements):
                return one_of(
                    self.rule(one, f"{field}.elements.{i}", after) for i, one in enumerate(elements)
                )
            case TagFormat():
                return self.content(form, field, after)
            case TriggeredTagsFormat():
                return self.triggered(form, field, after)
            case AnyTextFormat(excludes=excludes, max_chars=most):
                return self.text(text_without(excludes, most), field, after)
            case RegexFormat(pattern=pattern):
                return self.text(regex(pattern), field, after)
            case TagsWithSeparatorFormat():
                source = self.separated(form, field)
            case GrammarFormat(grammar=grammar):
                source = self.lark.nest(self.grammar(grammar, f"{field}.grammar"))
            case JSONSchemaFormat(json_schema=schema, max_whitespace_cnt=most):
                whitespace = "" if most is None else rf"[ \n\t]{{0,{most}}}"
                source = self.lark.json(self.schema(schema, f"{field}.json_schema", whitespace))
            case ConstStringFormat():
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

    def content(self, tag: TagFormat, field: str, after: Following) -> str:
        """What stands after the beginning of a tag. Without an end, it goes on up to what follows."""
        place, ends = f"{field}.content", [end for end in tag.end if end]
        found = [self.rule(tag.content, place, after)] if "" in tag.end else []
        if ends:
            found.append(f"{self.rule(tag.content, place, ends)} {self.lark.any_marked(after or ())}")
        return one_of(found)

    def triggered(self, form: TriggeredTagsFormat, field: str, after: Following, name: str = "tags") -> str:
        """Free text, with tags wherever their triggers come; `name` is the field that has the tags."""
        groups: dict[str, list[str]] = {}
        for i, tag in enumerate(form.tags):
            place = f"{field}.{name}.{i}"
            trigger = self.trigger_of(tag, form.triggers, place)
            head = self.lark.marked(tag.begin.removeprefix(trigger))
            content = self.content(tag, place, after if form.stop_after_first or after == () else None)
            groups.setdefault(trigger, []).append(f"{head} {content}")
        first = one_of(f"{self.lark.marked(trigger)} {one_of(rest)}" for trigger, rest in groups.items())
        if form.at_least_one and form.stop_after_first:
            return f"{first} {self.lark.any_marked(after or ())}"
        pattern = text_without(form.excludes)
        found = (f"{self.lark.until(trigger, pattern)} {one_of(rest)}" for trigger, rest in groups.items())
        any_tag, text = self.lark.rule(one_of(found)), self.text(pattern, field, after)
        if form.stop_after_first:
            return one_of([any_tag, text])
        return f"{first if form.at_least_one else ''} ({any_tag})* {text}"

    def trigger_of(self, tag: TagFormat, triggers: Sequence[str], place: str) -> str:
        """The shortest trigger that a tag begins with, since it comes first; if it is a part of a special
        token, the whole token. Raises ApiError where there is none.
        """
        trigger = min((one for one in triggers if tag.begin.startswith(one)), key=len, default=None)
        if trigger is None:
            raise invalid(f"`{place}.begin` must begin with one of `triggers`", f"{place}.begin")
        marks = [mark for mark in self.lark.special_ids if tag.begin.startswith(mark)]
        return next((mark for mark in marks if mark.startswith(trigger)), trigger)

    def separated(self, form: TagsWithSeparatorFormat, field: str) -> str:
        """Tags with a separator between them."""
        tags = [self.rule(tag, f"{field}.tags.{i}", None) for i, tag in enumerate(form.tags)]
        one = self.lark.rule(one_of(tags))
        many = one if form.stop_after_first else f"{one} ({self.lark.marked(form.separator)} {one})*"
        return many if form.at_least_one else f"({many})?"


def beginning_of(form: Format) -> str:
    """The fixed text with which a format begins; "" if there is none."""
    match form:
        case ConstStringFormat(value=text) | TagFormat(begin=text):
            return text
        case SequenceFormat(elements=elements):
            return beginning_of(elements[0])
        case _:
            return ""


def text_without(excludes: Sequence[str], most: int | None = None) -> str:
    """The pattern of any text that has none of these in it, and at most `most` characters."""
    text = TEXT if most is None else rf"/(.|\n){{0,{most}}}/"
    return without(text, map(literal, excludes)) if excludes else text
