"""Reads a grammar from the fields of a request: OpenAI's and TGI's `response_format`, TGI's `grammar`, vLLM's
`structured_outputs` and `guided_*`, and structural tags. A grammar that is read is not yet compiled.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from api.errors import cut, invalid, quoted
from api.grammar.compile import ANY_OBJECT, Grammar
from api.grammar.lark import Format
from api.json import parse_text

WITHOUT_EFFECT = ("disable_fallback", "disable_any_whitespace", "_backend", "_backend_was_auto")
PATTERN = "whitespace_pattern"
RESPONSE_FORMATS = ("text", "json_object", "json_schema", "json", "regex", "structural_tag")
Check = Callable[[Any, str], Any]
"""(value of a field, None if it is not given, its place) → the value as it is read. Raises ApiError."""
DEFAULTS: Sequence[Any] = (None, False, [], "json")
"""Values that xgrammar's classes write into fields which are not set."""


# --- fields of bodies ---------------------------------------------------------------------------------------


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


def read_response_format(value: Mapping[str, Any], field: str = "response_format") -> Grammar | None:
    """The grammar of `{"type": …}`; None for text. OpenAI puts the schema under `json_schema`, TGI under
    `value`. Objects are closed with OpenAI's `strict`, and in TGI's shape, as there. Raises ApiError.
    """
    match type_of(value, RESPONSE_FORMATS, field):
        case "json_object" | "json" if value.get("value") is not None:
            return read_schema(value["value"], f"{field}.value", closed=True)
        case "json_object" | "json":
            return Grammar("json", ANY_OBJECT, field)
        case "json_schema":
            name = "json_schema" if "json_schema" in value else "value"
            return read_named_schema(value.get(name), f"{field}.{name}", closed=name == "value")
        case "regex":
            return KINDS["regex"](value.get("value"), f"{field}.value")
        case "structural_tag":
            return KINDS["structural_tag"](value, field)
        case _:
            return None


def read_structured_outputs(value: Mapping[str, Any], field: str = "structured_outputs") -> Grammar | None:
    """The grammar of vLLM's `structured_outputs`, which has one of KINDS. Raises ApiError."""
    given = {name: value[name] for name in KINDS if value.get(name) not in (None, False)}
    for name, item in value.items():
        if name not in (*KINDS, *WITHOUT_EFFECT, PATTERN) and item:
            raise invalid(f"`{field}.{cut(name)}` is not supported yet")
    if len(given) != 1:
        raise invalid(f"`{field}` must have one of {', '.join(KINDS)}. Given: {len(given)}")
    [(name, item)] = given.items()
    return with_whitespace(KINDS[name](item, f"{field}.{name}"), value.get(PATTERN), f"{field}.{PATTERN}")


def with_whitespace(grammar: Grammar | None, pattern: Any, field: str) -> Grammar | None:
    """The grammar with a pattern, if one is given, for the white space of its JSON. Raises ApiError where it
    has no JSON.
    """
    if pattern is None or pattern == "":
        return grammar
    if grammar is None or grammar.kind not in ("json", "structural_tag"):
        raise invalid(f"`{field}` can only be used for JSON: beside a JSON schema or a structural tag")
    return replace(grammar, whitespace=text(pattern, field))


# --- one kind of grammar ------------------------------------------------------------------------------------


def read_named_schema(value: Any, field: str, closed: bool = False) -> Grammar:
    """OpenAI's object with a `schema` and a name. Raises ApiError."""
    strict = flag(an_object(value, field).get("strict"), f"{field}.strict")
    return read_schema(value.get("schema"), f"{field}.schema", closed=closed or bool(strict))


def read_schema(value: Any, field: str, closed: bool = False) -> Grammar:
    """A JSON schema, given as an object or as its text. Raises ApiError."""
    return Grammar("json", json.dumps(a_schema(as_json(value, field), field)), field, closed=closed)


def as_json(value: Any, field: str) -> Any:
    """A value that may be given as its JSON text. Raises ApiError."""
    try:
        return parse_text(value) if isinstance(value, str) else value
    except ValueError as error:
        raise invalid(f"`{field}` is not JSON that can be read: {cut(str(error))}") from error


# --- checks of values ---------------------------------------------------------------------------------------


def must_be(words: str, is_right: Callable[[Any], bool]) -> Check:
    """A check of a value that is read as it is."""

    def check(value: Any, place: str) -> Any:
        if not is_right(value):
            raise invalid(f"`{place}` must be {words}")
        return value

    return check


an_object = must_be("an object", lambda value: isinstance(value, dict))
any_text = must_be("a text", lambda value: isinstance(value, str))
text = must_be("a text that is not empty", lambda value: isinstance(value, str) and value != "")
flag = must_be("true or false", lambda value: value is None or isinstance(value, bool))
a_schema = must_be("a JSON schema", lambda value: isinstance(value, dict))


def list_of(check: Check) -> Check:
    is_list = must_be("a list that is not empty", lambda value: isinstance(value, list) and value != [])
    return lambda value, place: [check(item, f"{place}.{i}") for i, item in enumerate(is_list(value, place))]


# --- structural tags ----------------------------------------------------------------------------------------


def ends(value: Any, place: str) -> Sequence[str]:
    """The texts of which one ends a tag; none for the empty text."""
    must_be("a text, or a list of texts", lambda one: isinstance(one, str | list))(value, place)
    return [value] * bool(value) if isinstance(value, str) else list_of(text)(value, place)


def read_fields(value: Any, place: str, fields: Mapping[str, Check]) -> Format:
    """The fields of an object. Raises ApiError for the first that is wrong, missing or unknown."""
    for name, item in an_object(value, place).items():
        if name not in ("type", *fields) and item not in DEFAULTS:
            place = f"{place}.{cut(name)}"
            raise invalid(f"`{place}` is not supported. Given: {quoted(item)}")
    return {name: check(value.get(name), f"{place}.{name}") for name, check in fields.items()}


def type_of(value: Any, kinds: Collection[str], place: str) -> str:
    """The `type` of an object, which is one of these. Raises ApiError."""
    kind = an_object(value, place).get("type")
    if not isinstance(kind, str) or kind not in kinds:
        place = f"{place}.type"
        raise invalid(f"`{place}` must be one of {', '.join(kinds)}. Given: {quoted(kind)}")
    return kind


def read_format(value: Any, place: str) -> Format:
    """Any of the formats, told apart by `type`."""
    kind = type_of(value, FORMATS, place)
    return {"type": kind, **read_fields(value, place, FORMATS[kind])}


def read_structural_tag(value: Any, place: str) -> Grammar:
    """A structural tag, given as an object or as its text. The older form is tags with JSON in them."""
    tag = an_object(as_json(value, place), place)
    if "structures" not in tag or "format" in tag:
        form = read_format(tag.get("format"), f"{place}.format")
    else:
        read = read_fields({name: tag.get(name) for name in OLDER}, place, OLDER)
        tags = [
            {**one, "content": {"type": "json_schema", "json_schema": one["schema"]}}
            for one in read["structures"]
        ]
        form = {"type": "triggered_tags", "triggers": read["triggers"], "tags": tags}
    return Grammar("structural_tag", json.dumps(form), place)


def fields_of(fields: Mapping[str, Check]) -> Check:
    return lambda value, place: read_fields(value, place, fields)


TAG: Mapping[str, Check] = {"begin": any_text, "content": read_format, "end": ends}
STRUCTURE: Mapping[str, Check] = {"begin": any_text, "schema": a_schema, "end": ends}
OLDER: Mapping[str, Check] = {"triggers": list_of(text), "structures": list_of(fields_of(STRUCTURE))}
FORMATS: Mapping[str, Mapping[str, Check]] = {
    "const_string": {"value": text},
    "regex": {"pattern": text},
    "grammar": {"grammar": text},
    "any_text": {},
    "json_schema": {"json_schema": a_schema},
    "sequence": {"elements": list_of(read_format)},
    "or": {"elements": list_of(read_format)},
    "tag": TAG,
    "triggered_tags": {
        "triggers": list_of(text),
        "tags": list_of(fields_of(TAG)),
        "at_least_one": flag,
        "stop_after_first": flag,
    },
}
"""Types of formats → their fields → the check of each.

- `const_string` is this text, `any_text` any text.
- `regex`, `grammar` (GBNF or Lark) and `json_schema` are a text that matches.
- `sequence` is several formats, one after the other, `or` one of several.
- `tag` is a format between two texts, of which the second is one of `end`.
- `triggered_tags` is any text with tags in it: a trigger begins one of the tags that begin with it.
"""


KINDS: Mapping[str, Callable[[Any, str], Grammar]] = {
    "json": read_schema,
    "regex": lambda value, field: Grammar("regex", text(value, field), field),
    "choice": lambda value, field: Grammar("choice", json.dumps(list_of(text)(value, field)), field),
    "grammar": lambda value, field: Grammar("grammar", text(value, field), field),
    "json_object": lambda value, field: Grammar("json", ANY_OBJECT, field),
    "structural_tag": read_structural_tag,
}
"""Kinds of `structured_outputs`, of which it has one → their readers."""
FIELDS: Mapping[str, Callable[[Any, str], Grammar | None]] = {
    **{f"guided_{kind}": KINDS[kind] for kind in ("json", "regex", "choice", "grammar")},
    "response_format": read_response_format,
    "structured_outputs": read_structured_outputs,
}
"""Fields of OpenAI's routes that give a grammar → their readers."""
