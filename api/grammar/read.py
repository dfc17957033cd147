"""Reads a grammar from the fields of a request: OpenAI's and TGI's `response_format`, TGI's `grammar`, vLLM's
`structured_outputs` and `guided_*`. A grammar that is read is not yet compiled.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from api.errors import cut, invalid, quoted
from api.grammar.compile import ANY_OBJECT, MAX_SCHEMA_DEPTH, Grammar, depth_of
from api.grammar.structural_tag import flag, list_of, must_be, required, text
from api.json import parse_text

WITHOUT_EFFECT = ("disable_fallback", "disable_any_whitespace", "_backend", "_backend_was_auto")
PATTERN = "whitespace_pattern"
GRAMMAR_SCHEMA: Any = {
    "required": ["type", "value"],
    "properties": {"type": {"enum": ["json", "json_object", "json_schema", "regex"]}, "value": {}},
}
"""JSON schema of TGI's grammars."""


def read_grammar(fields: Mapping[str, Any], whitespace: str | None) -> Grammar | None:
    """The grammar of a body of OpenAI's routes; None if it has none. Raises ApiError, also for two of them.

    Args:
        fields: those of FIELDS; None for one that is not given.
        whitespace: vLLM's `guided_whitespace_pattern`.
    """
    read = {name: reader(fields[name], name) for name, reader in FIELDS.items() if fields[name] is not None}
    given = {name: grammar for name, grammar in read.items() if grammar is not None}
    if len(given) > 1:
        first, second, *_ = given
        raise invalid(f"`{first}` and `{second}` exclude each other", second)
    return with_whitespace(next(iter(given.values()), None), whitespace, "guided_whitespace_pattern")


def read_tgi_grammar(value: Mapping[str, Any]) -> Grammar | None:
    """The grammar of TGI's `grammar`, which always has a `value`. Raises ApiError."""
    if value.get("value") is None:
        raise required("grammar.value")
    return read_response_format(value, "grammar")


def read_response_format(value: Mapping[str, Any], field: str = "response_format") -> Grammar | None:
    """The grammar of `{"type": …}`; None for text. OpenAI puts the schema under `json_schema`, TGI under
    `value`. Objects are closed with OpenAI's `strict`, and in TGI's shape, as there. Raises ApiError.
    """
    match value.get("type"):
        case "text":
            return None
        case "json_object" | "json" if value.get("value") is None:
            return Grammar("json", ANY_OBJECT, field)
        case "json_object" | "json":
            return read_schema(value["value"], f"{field}.value", closed=True)
        case "json_schema":
            name = "json_schema" if "json_schema" in value else "value"
            inner = value.get(name)
            if not isinstance(inner, Mapping):
                raise required(f"{field}.{name}.schema")
            return read_named_schema(inner, f"{field}.{name}", closed=name == "value")
        case "regex":
            return KINDS["regex"](value.get("value"), f"{field}.value")
        case "structural_tag":
            return read_structural_tag(value, field)
        case kind:
            allowed = "text, json_object, json_schema, json, regex, structural_tag"
            raise invalid(f"`{field}.type` must be one of {allowed}. Given: {quoted(kind)}", f"{field}.type")


def read_flat_format(form: Mapping[str, Any] | None, field: str, kinds: Sequence[str]) -> Grammar | None:
    """The grammar of a format of one of these types, whose `schema` stands beside `type`; None for any text.
    Raises ApiError.
    """
    if form is None:
        return None
    if (kind := form.get("type")) not in kinds:
        allowed = f"{'one of ' if len(kinds) > 1 else ''}{', '.join(kinds)}"
        raise invalid(f"`{field}.type` must be {allowed}. Given: {quoted(kind)}", f"{field}.type")
    if kind == "json_schema":
        return read_named_schema(form, field)
    return Grammar("json", ANY_OBJECT, field) if kind == "json_object" else None


def read_structured_outputs(value: Mapping[str, Any], field: str = "structured_outputs") -> Grammar | None:
    """The grammar of vLLM's `structured_outputs`, which has one of KINDS. Raises ApiError."""
    given = {name: value[name] for name in KINDS if value.get(name) not in (None, False)}
    for name, item in value.items():
        if name not in (*KINDS, *WITHOUT_EFFECT, PATTERN) and item:
            raise invalid(f"`{field}.{cut(name)}` is not supported yet", f"{field}.{cut(name)}")
    if len(given) != 1:
        raise invalid(f"`{field}` must have one of {', '.join(KINDS)}. Given: {len(given)}", field)
    [(name, item)] = given.items()
    return with_whitespace(KINDS[name](item, f"{field}.{name}"), value.get(PATTERN), f"{field}.{PATTERN}")


def with_whitespace(grammar: Grammar | None, pattern: Any, field: str) -> Grammar | None:
    """The grammar with a pattern, if one is given, for the white space of its JSON. Raises ApiError where it
    has no JSON.
    """
    if pattern is None or pattern == "":
        return grammar
    if grammar is None or grammar.kind not in ("json", "structural_tag"):
        raise invalid(f"`{field}` can only be used for JSON: beside a JSON schema or a structural tag", field)
    return replace(grammar, whitespace=text(pattern, field))


# --- one kind of grammar ------------------------------------------------------------------------------------


def read_text(kind: str, value: Any, field: str) -> Grammar:
    """A grammar that is a text. Raises ApiError."""
    return Grammar(kind, text(value, field), field)


def read_choice(value: Any, field: str) -> Grammar:
    """A list of the texts that an answer may be. Raises ApiError."""
    return Grammar("choice", json.dumps(list_of(text)(value, field)), field)


def read_object(value: Any, field: str) -> Grammar:
    """Any JSON object, which the value `true` asks for. Raises ApiError."""
    must_be("true", lambda one: one is True)(value, field)
    return Grammar("json", ANY_OBJECT, field)


def read_named_schema(value: Mapping[str, Any], field: str, closed: bool = False) -> Grammar:
    """OpenAI's object with a `schema` and a name. Raises ApiError."""
    if "schema" not in value:
        raise required(f"{field}.schema")
    strict = value.get("strict") is not None and flag(value["strict"], f"{field}.strict")
    return read_schema(value["schema"], f"{field}.schema", closed=closed or strict)


def read_schema(value: Any, field: str, closed: bool = False) -> Grammar:
    """A JSON schema, given as an object or as its text. Raises ApiError."""
    if not isinstance(value, str | dict | bool):
        raise invalid(f"`{field}` must be a JSON schema", field)
    text = value if isinstance(value, str) else json.dumps(value)
    return Grammar("json", text, field, closed=closed)


def read_structural_tag(value: Any, field: str) -> Grammar:
    """A structural tag, given as an object or as its text. Raises ApiError."""
    try:
        tag = parse_text(value) if isinstance(value, str) else value
    except ValueError as error:
        raise invalid(f"`{field}` is not JSON that can be read: {cut(str(error))}", field) from error
    if not isinstance(tag, Mapping):
        raise invalid(f"`{field}` must be a structural tag", field)
    if (depth := depth_of(tag)) > MAX_SCHEMA_DEPTH:
        words = f"its depth must be at most {MAX_SCHEMA_DEPTH}. Given: {depth}"
        raise invalid(f"`{field}` cannot be compiled: {words}", field)
    return Grammar("structural_tag", json.dumps(tag), field)


KINDS: Mapping[str, Callable[[Any, str], Grammar]] = {
    "json": read_schema,
    "regex": partial(read_text, "regex"),
    "choice": read_choice,
    "grammar": partial(read_text, "grammar"),
    "json_object": read_object,
    "structural_tag": read_structural_tag,
}
"""Kinds of `structured_outputs`, of which it has one → their readers."""
FIELDS: Mapping[str, Callable[[Any, str], Grammar | None]] = {
    **{f"guided_{kind}": KINDS[kind] for kind in ("json", "regex", "choice", "grammar")},
    "response_format": read_response_format,
    "structured_outputs": read_structured_outputs,
}
"""Fields of OpenAI's routes that give a grammar → their readers."""
