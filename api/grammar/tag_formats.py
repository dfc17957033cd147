"""Formats of structural tags: the fields that clients of vLLM and SGLang send, under the names that xgrammar
gives them.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from api.errors import ApiError, cut, invalid, quoted

Item = TypeVar("Item")
Text = Annotated[str, Field(min_length=1)]
OneOrMore = Annotated[list[Item], Field(min_length=1, fail_fast=True)]
Count = Annotated[int, Field(ge=0, le=2**31 - 1, strict=False)]


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
    json_schema: Any = Field(alias="schema", default=None)
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
