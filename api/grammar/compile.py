"""Grammar: what an answer must look like, from a client's words to llguidance's form.

`read.py` reads it from a request. Here it is compiled, and `check.py` says whether it can be
served: others are refused before they are queued. `force.py` adds calls and thinking. Workers compile
llguidance's form for their model's vocabulary.
"""

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax

from api.errors import ApiError, cut, invalid
from api.grammar.apart import run_apart
from api.grammar.check import find_error
from api.grammar.json_schema import WHITESPACE, enforce
from api.grammar.lark import Lark, literal
from api.grammar.structural_tag import TagRules, must_be
from api.json import parse_text
from api.prompts.tokenizer import ModelTokenizer

MAX_GRAMMAR_BYTES = 256 * 1024
ANY_OBJECT = '{"type": "object"}'
MAX_SCHEMA_DEPTH = 64
ESCAPED_DASH = re.compile(r"(?<!\\)((?:\\\\)*)\\-")
UNFORCED = '\n\n\n%llguidance {"no_forcing": true}\n'
"""Keeps llguidance from looking for forced text: rules of a client may force one without an end."""
SpecialIds = tuple[tuple[str, int], ...]
"""(text, id) of special tokens."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar as a client wrote it.

    Attributes:
        kind: `json` (a JSON schema), `regex`, `choice` (a JSON list of strings), `grammar` (Lark or GBNF),
            `structural_tag` (as JSON).
        text: the grammar.
        field: the request's field that has it.
        whitespace: a regex for white space in JSON.
        closed: objects of a JSON schema have only the properties that they list, where that is safe.
    """

    kind: str
    text: str
    field: str
    whitespace: str = WHITESPACE
    closed: bool = False


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar in llguidance's own form. A part of it came from the client.

    Attributes:
        source: the grammar.
        field: the request's field that needs it.
    """

    source: str
    field: str


def describes_json(grammar: Grammar | None) -> bool:
    """Whether all that a grammar describes is JSON."""
    return grammar is not None and grammar.kind == "json"


# --- compiling ----------------------------------------------------------------------------------------------


async def compile_grammar(grammar: Grammar, tokenizer: ModelTokenizer | None = None) -> str:
    """Compile a grammar apart, and check it. Raises ApiError (422) with the cause.

    `tokenizer` is the model's: tags may be its special tokens.
    """
    size = len(grammar.text)
    if size > MAX_GRAMMAR_BYTES:
        raise invalid(
            f"`{grammar.field}` must have at most {MAX_GRAMMAR_BYTES} characters. Given: {size}",
            grammar.field,
        )
    special_ids: SpecialIds = ()
    if tokenizer is not None and grammar.kind == "structural_tag":
        special_ids = tuple(tokenizer.special_tokens.items())
    return await run_apart(grammar.field, compile_checked, grammar, special_ids)


@functools.lru_cache(maxsize=256)
def compile_checked(grammar: Grammar, special_ids: SpecialIds = ()) -> str:
    """Compile a grammar, and check it. Raises ApiError (422), as `compile_grammar`.

    Args:
        special_ids: the model's special tokens, which tags may be; they are checked as texts.
    """
    try:
        source = compile_unchecked(grammar)
    except ValueError as error:
        raise cannot_compile(grammar, str(error)) from error
    if cause := find_error(source):
        raise cannot_compile(grammar, cause)
    return compile_unchecked(grammar, special_ids) if special_ids else source


def compile_unchecked(grammar: Grammar, special_ids: SpecialIds = ()) -> str:
    """The grammar in llguidance's form. Raises ApiError and ValueError."""
    match grammar.kind:
        case "json":
            return json.dumps({"grammars": [{"json_schema": enforced_schema(grammar)}]})
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            words = " | ".join(map(literal, json.loads(grammar.text)))
            return llguidance.LLMatcher.grammar_from_lark(f"start: {words}")
        case "structural_tag":
            schema_of = functools.partial(schema_in_tag, grammar.whitespace)
            rules = TagRules(Lark(dict(special_ids)), schema_of, embedded_grammar)
            return rules.source(grammar.text, grammar.field)
        case _:
            return llguidance.LLMatcher.grammar_from_lark(to_lark(grammar.text))


def enforced_schema(grammar: Grammar) -> Mapping[str, Any]:
    """What is enforced of a JSON schema, with llguidance's option for its white space. Raises ApiError."""
    schema = parse_schema(grammar)
    enforce(schema, grammar.closed)
    return {**schema, "x-guidance": {"whitespace_pattern": grammar.whitespace}}


def embedded_schema(grammar: Grammar) -> Mapping[str, Any]:
    """A JSON schema as a part of a Lark grammar. Raises ApiError."""
    compile_checked(grammar)
    return enforced_schema(grammar)


def schema_in_tag(whitespace: str, schema: Any, field: str) -> Mapping[str, Any]:
    """A JSON schema as a part of a structural tag. Raises ApiError."""
    must_be("a JSON schema", lambda value: isinstance(value, dict | bool))(schema, field)
    return embedded_schema(Grammar("json", json.dumps(schema), field, whitespace))


def embedded_grammar(text: str, field: str) -> str:
    """A grammar in GBNF or Lark, as a part of another, in Lark. Raises ApiError."""
    compile_checked(Grammar("grammar", text, field))
    return to_lark(text)


def to_lark(text: str) -> str:
    """A grammar in Lark, given as Lark or as GBNF. xgrammar's GBNF may escape a dash. Raises ValueError."""
    try:
        return any_to_lark(text if is_lark_syntax(text) else ESCAPED_DASH.sub(r"\1\\x2d", text)) + UNFORCED
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except Exception as error:  # the converter has no type of its own for rules that are missing
        raise ValueError(str(error)) from error


def parse_schema(grammar: Grammar) -> dict[str, Any]:
    """The schema as an object of its own. Raises ApiError."""
    try:
        schema = parse_text(grammar.text)
    except ValueError as error:
        raise cannot_compile(grammar, f"it is not JSON that can be read: {error}") from error
    if schema is True:
        return {}
    if schema is False:
        raise cannot_compile(grammar, "no value satisfies the schema `false`")
    if not isinstance(schema, dict):
        raise cannot_compile(grammar, "a JSON schema is an object")
    if (depth := depth_of(schema)) > MAX_SCHEMA_DEPTH:
        raise cannot_compile(grammar, f"its depth must be at most {MAX_SCHEMA_DEPTH}. Given: {depth}")
    return schema


def depth_of(value: Any) -> int:
    """How deep objects and lists are nested in each other."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [part for item in level for part in (item.values() if isinstance(item, dict) else item)]
    return depth


def cannot_compile(grammar: Grammar, cause: str) -> ApiError:
    """The error for a grammar that cannot be compiled; `cause` may be llguidance's."""
    return invalid(f"`{grammar.field}` cannot be compiled: {cut(cause)}", grammar.field)
