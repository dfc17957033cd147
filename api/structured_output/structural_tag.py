"""Structural tags: texts with structured parts between tags, as vLLM and xgrammar describe them, in Lark."""

from collections.abc import Mapping
from typing import Any

from api.structured_output.behind import END
from api.structured_output.format_fields import items_of, object_of
from api.structured_output.format_rules import Compiler, FormatRules
from api.structured_output.lark import Lark
from api.structured_output.token_sets import TokenSets
from api.structured_output.triggered_tags import Tag
from api.structured_output.vocabulary import Vocabulary


def source_of_tag(value: Mapping[str, Any], field: str, vocabulary: Vocabulary, compiler: Compiler) -> str:
    """The grammar of a structural tag: a `format`, or the older `structures` and `triggers`. Raises ApiError
    that names the part at fault.
    """
    lark = Lark(vocabulary.special_tokens)
    rules = FormatRules(lark, TokenSets(lark, vocabulary), compiler)
    if "format" in value:
        return lark.source(rules.rule(value["format"], f"{field}.format"))
    form = {"type": "triggered_tags", "triggers": value.get("triggers")}
    tags = structures_of(value, field, compiler)
    return lark.source(rules.lists.in_text(form, tags, field, END))


def structures_of(value: Mapping[str, Any], field: str, compiler: Compiler) -> list[Tag]:
    """The tags of the older form."""
    found: list[Tag] = []
    for structure, place in items_of(value, "structures", field):
        one = object_of(structure, place)
        schema = {} if one.get("schema") is None else one["schema"]
        compiler.schema(schema, f"{place}.schema", "")
        content = {"type": "json_schema", "json_schema": schema}
        found.append((place, {"begin": one.get("begin"), "content": content, "end": one.get("end")}))
    return found
