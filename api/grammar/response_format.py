"""Grammars from the fields of requests: OpenAI's and TGI's `response_format`, TGI's `grammar`, vLLM's
`structured_outputs` and `guided_*`.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from api.errors import ApiError, cut, invalid, quoted
from api.grammar.grammar import MAX_SCHEMA_DEPTH, Grammar, depth_of

ANY_OBJECT = '{"type": "object"}'
GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Kinds of `structured_outputs`, of which it has one."""
GRAMMAR_SCHEMA: Any = {
    "required": ["type", "value"],
    "properties": {"type": {"enum": ["json", "json_object", "json_schema", "regex"]}, "value": {}},
}
"""JSON schema of TGI's grammars."""
WITHOUT_EFFECT = ("disable_fallback", "disable_any_whitespace", "_backend", "_backend_was_auto")
PATTERN = "whitespace_pattern"
OF_JSON = ("json", "structural_tag")
"""Kinds of grammars that may have JSON in them."""


def from_response_format(value: Mapping[str, Any], field: str = "response_format") -> Grammar | None:
    """The grammar of `{"type": …}`; None for text. OpenAI puts the schema under `json_schema`, TGI under
    `value`. Objects are closed with OpenAI's `strict`, and in TGI's shape, as there. Raises ApiError.
    """
    kind = value.get("type")
    match kind:
        case "text":
            return None
        case "json_object" | "json" if value.get("value") is None:
            return Grammar("json", ANY_OBJECT, field)
        case "json_object" | "json":
            return schema_grammar(value["value"], f"{field}.value", closed=True)
        case "json_schema":
            name = "json_schema" if "json_schema" in value else "value"
            inner = value.get(name)
            if not isinstance(inner, Mapping):
                raise required(f"{field}.{name}.schema")
            return named_schema(inner, f"{field}.{name}", closed=name == "value")
        case "regex":
            return Grammar("regex", text_of(value.get("value"), f"{field}.value"), f"{field}.value")
        case "structural_tag":
            return tag_grammar(value, field)
        case _:
            allowed = "text, json_object, json_schema, json, regex, structural_tag"
            raise invalid(f"`{field}.type` must be one of {allowed}. Given: {quoted(kind)}", f"{field}.type")


def from_tgi(value: Mapping[str, Any]) -> Grammar | None:
    """The grammar of TGI's `grammar`, which always has a `value`. Raises ApiError."""
    if value.get("value") is None:
        raise required("grammar.value")
    return from_response_format(value, "grammar")


def from_structured_outputs(value: Mapping[str, Any]) -> Grammar | None:
    """The grammar of vLLM's `structured_outputs`, which has one of KINDS. Raises ApiError."""
    field = "structured_outputs"
    given = {name: value[name] for name in KINDS if value.get(name) not in (None, False)}
    for name, item in value.items():
        if name not in (*KINDS, *WITHOUT_EFFECT, PATTERN) and item:
            raise invalid(f"`{field}.{cut(name)}` is not supported yet", f"{field}.{cut(name)}")
    if len(given) != 1:
        raise invalid(f"`{field}` must have one of {', '.join(KINDS)}. Given: {len(given)}", field)
    [(name, item)] = given.items()
    return with_whitespace(guided(name, item, f"{field}.{name}"), value.get(PATTERN), f"{field}.{PATTERN}")


def with_whitespace(grammar: Grammar | None, pattern: Any, field: str) -> Grammar | None:
    """The grammar with a pattern, if one is given, for the white space of its JSON. Raises ApiError where it
    has no JSON.
    """
    if pattern is None or pattern == "":
        return grammar
    if grammar is None or grammar.kind not in OF_JSON:
        raise invalid(f"`{field}` can only be used for JSON: beside a JSON schema or a structural tag", field)
    return replace(grammar, whitespace=text_of(pattern, field))


def guided(kind: str, value: Any, field: str) -> Grammar:
    """The grammar of a field that has the kind in its name. Raises ApiError."""
    if kind == "json_object":
        if value is not True:
            raise invalid(f"`{field}` must be true", field)
        return Grammar("json", ANY_OBJECT, field)
    if kind == "json":
        return schema_grammar(value, field)
    if kind == "structural_tag":
        return tag_grammar(value, field)
    if kind != "choice":
        return Grammar(kind, text_of(value, field), field)
    if not isinstance(value, list) or not value or not all(isinstance(word, str) and word for word in value):
        raise invalid(f"`{field}` must be a list of texts that are not empty", field)
    return Grammar(kind, json.dumps(value), field)


def named_schema(value: Mapping[str, Any], field: str, closed: bool = False) -> Grammar:
    """OpenAI's object with a `schema` and a name. Raises ApiError."""
    if "schema" not in value:
        raise required(f"{field}.schema")
    strict = value.get("strict")
    if not isinstance(strict, bool | None):
        raise invalid(f"`{field}.strict` must be true or false", f"{field}.strict")
    return schema_grammar(value["schema"], f"{field}.schema", closed=closed or strict is True)


def schema_grammar(value: Any, field: str, closed: bool = False) -> Grammar:
    """A JSON schema, given as an object or as its text. Raises ApiError."""
    if not isinstance(value, str | dict | bool):
        raise invalid(f"`{field}` must be a JSON schema", field)
    text = value if isinstance(value, str) else json.dumps(value)
    return Grammar("json", text, field, closed=closed)


def tag_grammar(value: Any, field: str) -> Grammar:
    """A structural tag, given as an object or as its text. Raises ApiError."""
    try:
        tag = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise invalid(f"`{field}` is not JSON: {cut(str(error))}", field) from error
    if not isinstance(tag, Mapping):
        raise invalid(f"`{field}` must be a structural tag", field)
    if (depth := depth_of(tag)) > MAX_SCHEMA_DEPTH:
        raise invalid(
            f"`{field}` cannot be compiled: its depth must be at most {MAX_SCHEMA_DEPTH}. Given: {depth}",
            field,
        )
    return Grammar("structural_tag", json.dumps(tag), field)


def text_of(value: Any, field: str) -> str:
    """A text that is not empty. Raises ApiError."""
    if not isinstance(value, str) or not value:
        raise invalid(f"`{field}` must be a text that is not empty", field)
    return value


def required(field: str) -> ApiError:
    return invalid(f"`{field}` is required", field)


def only_one(fields: Mapping[str, Grammar | None]) -> Grammar | None:
    """The grammar of the one field that gives one. Raises ApiError where several do."""
    given = {name: grammar for name, grammar in fields.items() if grammar is not None}
    if len(given) > 1:
        first, second, *_ = given
        raise invalid(f"`{first}` and `{second}` exclude each other", second)
    return next(iter(given.values()), None)
