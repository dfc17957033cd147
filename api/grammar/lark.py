"""Lark: a grammar in llguidance's dialect of it, built rule by rule: of texts, JSON schemas, a client's own
grammars, and structural tags, whose formats have xgrammar's names.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from api.errors import cut, quoted

SpecialIds = Mapping[str, int] | tuple[tuple[str, int], ...]
"""Special tokens: their ids by their texts."""
FIELDS = (
    *("type", "value", "pattern", "grammar", "json_schema", "elements", "begin", "content", "end"),
    *("triggers", "tags", "at_least_one", "stop_after_first", "structures", "schema"),
)
"""Fields of formats and tags; the last two are those of the older form, in place of `tags` and `content`."""
DEFAULTS: Sequence[Any] = (None, False, [], "json")
"""Values that xgrammar's classes write into other fields, which are not set."""
Following = Sequence[str] | None
"""What follows a format, and belongs to its expression: one of these texts; nothing at the end of the whole;
None where it is another format's, so that free text has no end.
"""
TEXT = r"/(.|\n)*/"
"""Any text."""
IS_LARK = re.compile(r"^\s*(%llguidance\b|\??start\s*(\[[^\]]*\])?\s*:(?!:=))", re.MULTILINE)
ESCAPED_DASH = re.compile(r"(?<!\\)((?:\\\\)*)\\-")
UNFORCED = '\n\n\n%llguidance {"no_forcing": true}\n'
"""Keeps llguidance from looking for forced text: rules of a client may force one without an end."""
WHITESPACE = r"(\x20|\n\x20{0,32})?"
"""White space between the tokens of JSON: none, a space, or a new line with its indent. A model could write
more than that for ever.
"""
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Formats that are enforced; others are annotations, as in JSON Schema."""
NAMES_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose keys are names, not keywords."""
VALUES = ("const", "enum", "default", "examples")
"""Keywords whose values are data, not schemas."""
NEUTRAL: Mapping[str, Sequence[Any]] = {
    "propertyNames": ({}, {"type": "string"}),
    "dependentRequired": ({},),
    "unevaluatedProperties": (True,),
    "uniqueItems": (False,),
}
"""Values that clients write, and that allow everything; llguidance does not know their keywords."""
DECIDING = {"type", "$ref", "enum", "const", "anyOf", "oneOf", "allOf"}
"""Keywords without one of which a schema with `properties` means an object."""
IN_URIS = "#/%~!$&'()*+,;=:@?"
"""Characters that stay as they are in a reference."""
OF_OTHERS = {"additionalProperties", "patternProperties"}
"""Keywords that say something of properties which the schema does not list."""
OF_OBJECTS = {"properties", "required", "minProperties", "maxProperties"} | OF_OTHERS


class Lark:
    """The rules of one grammar.

    Attributes:
        special_ids: the model's special tokens, id by text. A grammar names them by their ids.
        whitespace: a regex for white space in the JSON of formats.
        rules: the name of each, by what it says.
        nested: whole grammars, to which rules refer by name.
    """

    def __init__(self, special_ids: SpecialIds = (), whitespace: str = WHITESPACE) -> None:
        self.special_ids = dict(special_ids)
        self.whitespace = whitespace
        self.rules: dict[tuple[str, str], str] = {}
        self.nested: list[dict[str, Any]] = []

    def source(self, start: str) -> str:
        """The grammar: Lark, or llguidance's list of grammars if others are nested in it."""
        lark = "\n".join([f"start: {start}", *(f"{name}{body}" for (_, body), name in self.rules.items())])
        return json.dumps({"grammars": [{"lark_grammar": lark}, *self.nested]}) if self.nested else lark

    def nest(self, source: str, name: str = "") -> str:
        """A reference to a whole grammar, given as Lark or as a list of grammars. The names of its rules do
        not collide with others.
        """
        is_list = source.lstrip().startswith('{"grammars"')
        first, *others = json.loads(source)["grammars"] if is_list else [{"lark_grammar": source}]
        name = name or f"grammar_{len(self.nested)}"
        self.nested += [{**first, "name": name}, *others]
        return f"@{name}"

    def marked(self, text: str) -> str:
        """A text that may have special tokens in it; nothing for the empty text."""
        return " ".join(map(self.mark, self.pieces(text)))

    def mark(self, piece: str) -> str:
        return f"<[{self.special_ids[piece]}]>" if piece in self.special_ids else literal(piece)

    def pieces(self, text: str) -> list[str]:
        """A text, split at the special tokens in it."""
        marks = [re.escape(mark) for mark in self.special_ids if mark in text]
        pieces = re.split(f"({'|'.join(marks)})", text) if marks else [text]
        return [piece for piece in pieces if piece]

    def rule(self, body: str, option: str = "", kind: str = "rule") -> str:
        return self.rules.setdefault((kind, f"{option}: {body}"), f"{kind}_{len(self.rules)}")

    def lexeme(self, pattern: str) -> str:
        """One lexeme of regexes and literals; it takes the longest text that matches."""
        return self.rule(pattern, kind="LEXEME")

    def json(self, schema: Mapping[str, Any]) -> str:
        """A JSON value."""
        return self.rule(f"%json {json.dumps(schema)}")

    def until(self, mark: str, pattern: str = TEXT) -> str:
        """A text that matches the pattern, up to a mark, and the mark. A special token ends the text before
        it, without a lazy rule.
        """
        head, *tail = self.pieces(mark)
        if head in self.special_ids:
            return f"{self.lexeme(pattern)} {self.marked(mark)}"
        before = self.lexeme(f"{pattern} {literal(head)}")
        return " ".join([before if tail else self.rule(before, "[lazy]"), *map(self.mark, tail)])

    # --- formats of structural tags -------------------------------------------------------------------------

    def format(self, form: Any, after: Following) -> str:
        """A format, and the text that follows it. Raises ValueError for one that is not served."""
        check_fields(form)
        match form:
            case {"type": "sequence", "elements": [*first, last]}:
                return " ".join([*(self.format(one, None) for one in first), self.format(last, after)])
            case {"type": "or", "elements": [_, *_] as elements}:
                return one_of(self.format(one, after) for one in elements)
            case {"type": "tag"}:
                return self.tag(form, after)
            case {"type": "triggered_tags", "tags": [_, *_] as tags} | {"structures": [_, *_] as tags}:
                return self.triggered(form, tags, after)
            case {"type": "any_text"}:
                return self.text(TEXT, after)
            case {"type": "regex", "pattern": str(pattern)} if pattern:
                return self.text(regex(pattern), after)
            case {"type": "grammar", "grammar": str(grammar)}:
                part = self.nest(to_lark(grammar))
            case {"type": "json_schema", "json_schema": dict(schema)}:
                part = self.json(enforced(schema, False, self.whitespace))
            case {"type": "const_string", "value": str(value)} if value:
                part = self.marked(value)
            case _:
                raise ValueError(f"a format of type {quoted(form.get('type'))} is not served: {quoted(form)}")
        return f"{part} {one_of(map(self.marked, after))}" if after else part

    def text(self, pattern: str, after: Following) -> str:
        """A text that matches a pattern, up to a text that follows."""
        if after is None:
            raise ValueError("free text has no end: it must be the last, or in a tag with an `end`")
        return one_of(self.until(mark, pattern) for mark in after) if after else self.lexeme(pattern)

    def tag(self, tag: Mapping[str, Any], after: Following, trigger: str = "") -> str:
        """A tag without the trigger that it begins with. Without an end, it goes on up to what follows."""
        ends, rest = texts_of(tag, "end"), tag.get("begin", "").removeprefix(trigger)
        content = tag.get("content", {"type": "json_schema", "json_schema": tag.get("schema")})
        inner = f"{self.marked(rest)} {self.format(content, ends or after)}"
        return f"{inner} {one_of(map(self.marked, after))}" if ends and after else inner

    def triggered(self, form: Mapping[str, Any], tags: Sequence[Any], after: Following) -> str:
        """Free text, with tags wherever their triggers come."""
        stops, written = form.get("stop_after_first"), []
        for tag in tags:
            check_fields(tag)
            found = [one for one in texts_of(form, "triggers") if tag.get("begin", "").startswith(one)]
            if not found:
                raise ValueError(f"`begin` must begin with one of `triggers`. Given: {quoted(tag)}")
            trigger = min(found, key=len)  # which comes first
            written.append((trigger, self.tag(tag, after if stops or after == () else None, trigger)))
        first = one_of(f"{self.marked(trigger)} {tag}" for trigger, tag in written)
        if form.get("at_least_one") and stops:
            return first
        later = self.rule(one_of(f"{self.until(trigger)} {tag}" for trigger, tag in written))
        text = self.text(TEXT, after)
        begin = first if form.get("at_least_one") else ""
        return one_of([later, text]) if stops else f"{begin} ({later})* {text}"


def check_fields(part: Any) -> None:
    """Raises ValueError for a part of a structural tag that has a field which is not served."""
    if not isinstance(part, dict) or not isinstance(part.get("begin", ""), str):
        raise ValueError(f"a part must be an object, and its `begin` a text. Given: {quoted(part)}")
    for name, value in part.items():
        if name not in FIELDS and value not in DEFAULTS:
            raise ValueError(f"`{cut(name)}` is not supported. Given: {quoted(value)}")


def texts_of(part: Mapping[str, Any], name: str) -> list[str]:
    """The texts in a field, which may have one or several; an empty one is none. Raises ValueError."""
    value = part.get(name)
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"`{name}` must be a text, or a list of texts. Given: {quoted(value)}")
    return [text for text in texts if text]


def literal(text: str) -> str:
    """A text between quotes. llguidance takes a delete character only as an escape."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def regex(pattern: str) -> str:
    """A regex between slashes."""
    return f"/{llguidance.regex_to_lark(pattern, use_ascii='')}/"


def one_of(expressions: Iterable[str]) -> str:
    return f"({' | '.join(expressions)})"


def to_lark(text: str) -> str:
    """A client's grammar, in Lark or GBNF, as Lark. xgrammar's GBNF may escape a dash. Raises ValueError."""
    try:
        return (text if IS_LARK.search(text) else gbnf_to_lark(ESCAPED_DASH.sub(r"\1\\x2d", text))) + UNFORCED
    except Exception as error:  # the converter has no type of its own for rules that are missing
        raise ValueError(str(error)) from error


# --- JSON schemas -------------------------------------------------------------------------------------------


def enforced(schema: dict[str, Any], closed: bool, whitespace: str = WHITESPACE) -> Mapping[str, Any]:
    """What is enforced of a schema, which is changed, with llguidance's option for its white space.

    Args:
        closed: objects that list their properties have no others: OpenAI's strict mode and TGI's grammars
            mean that. Where others are allowed, a small model writes them until `max_tokens`.
    """
    whole, *parts = schemas = [*all_schemas(schema)]
    for one in schemas:
        for name in [name for name, values in NEUTRAL.items() if one.get(name) in values]:
            del one[name]
        if one.get("format") not in FORMATS:
            one.pop("format", None)
        if isinstance(path := one.get("$ref"), str) and path.startswith("#"):
            one["$ref"] = quote(path, safe=IN_URIS)
        if "properties" in one and not DECIDING & one.keys():
            one["type"] = "object"
    if closed:
        # what one of several schemas of an object closes, another may require
        listing = [] if any(map(combines, schemas)) else [part for part in parts if part.get("properties")]
        for one in [whole, *listing]:
            if lists_its_names(one) and not combines(one):
                one["additionalProperties"] = False
    return {**schema, "x-guidance": {"whitespace_pattern": whitespace}}


def all_schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Every schema in the schema, itself first."""
    if isinstance(schema, list):
        for item in schema:
            yield from all_schemas(item)
    elif isinstance(schema, dict):
        yield schema
        for name, value in schema.items():
            if name in NAMES_OF_SCHEMAS and isinstance(value, dict):
                yield from all_schemas([*value.values()])
            elif name not in VALUES:
                yield from all_schemas(value)


def combines(schema: Mapping[str, Any]) -> bool:
    """Whether an object may have to satisfy this schema and another one, or exactly one of several."""
    places = ("$ref" in schema) + ("anyOf" in schema) + bool(OF_OBJECTS & schema.keys())
    return places > 1 or "allOf" in schema or "oneOf" in schema


def lists_its_names(schema: Mapping[str, Any]) -> bool:
    """Whether an object lists its properties, also the required ones, and says nothing of others."""
    names, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(names, dict) or not isinstance(required, list) or OF_OTHERS & schema.keys():
        return False
    return all(isinstance(name, str) and name in names for name in required)
