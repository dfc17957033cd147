"""Grammar: what an answer must look like, compiled for the masks that the engine makes of it.

A gateway compiles each grammar once, for a vocabulary of single bytes, so that what cannot be served is
refused before it is queued. Workers compile it again for their model's vocabulary.
"""

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from api.errors import ApiError, invalid
from api.event_loop.offload import LONG, offload
from api.structured_output.lark import Lark
from api.structured_output.regexes import EMPTY
from api.structured_output.schemas import NAMES_OF_SCHEMAS, VALUES, close_objects, map_schemas
from api.structured_output.structural_tag import source_of_tag

MAX_GRAMMAR_BYTES = 256 * 1024
MAX_SCHEMA_DEPTH = 64
WHITESPACE = r"(\x20|\n\x20{0,32})?"
"""White space between the tokens of JSON: none, a space, or a line that is indented. More than that, a model
could write for ever.
"""
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Formats that are enforced; others are annotations, as in JSON Schema."""
UNIMPLEMENTED = re.compile(r'Unimplemented keys: \["(.*)"\]')
EOS = 256
NUM_TRIED = 32
"""Bytes of a text that are tried when a grammar is compiled: a millisecond, and at most half a second."""
ALLOWED = 200
"""What llguidance gives a token that may come next."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar as a client wrote it.

    Attributes:
        kind: `json` (a JSON schema), `regex`, `choice` (a JSON list of strings), `grammar` (Lark or GBNF),
            `structural_tag` (as JSON).
        text: the grammar.
        field: the request's field that has it.
        whitespace: a regex for white space in JSON.
        closed: objects of a JSON schema have no properties but those that they list, where that is safe.
    """

    kind: str
    text: str
    field: str
    whitespace: str = WHITESPACE
    closed: bool = False


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar in llguidance's own form, of which the client gave a part.

    Attributes:
        source: the grammar.
        field: the request's field that needs it.
    """

    source: str
    field: str


async def compile_grammar(grammar: Grammar, special_tokens: Mapping[str, int]) -> str:
    """The grammar in llguidance's own form. Raises ApiError (422) with the keyword at fault and its place.

    `special_tokens` are the ids of the model's, by their texts: tags may be such.
    """
    size = len(grammar.text)
    if size > MAX_GRAMMAR_BYTES:
        raise invalid(
            f"`{grammar.field}` must have at most {MAX_GRAMMAR_BYTES} characters. Given: {size}",
            grammar.field,
        )
    marks = special_tokens.items() if grammar.kind == "structural_tag" else ()
    return await offload(LONG, lambda: compile_cached(grammar, tuple(marks)))


@functools.lru_cache(maxsize=256)
def compile_cached(grammar: Grammar, marks: tuple[tuple[str, int], ...] = ()) -> str:
    try:
        source = source_of(grammar)
    except (ValueError, GbnfToLarkError) as error:
        raise refusal(grammar, str(error)) from error
    if cause := error_of(source):
        raise refusal(grammar, cause)
    return source_of(grammar, marks) if marks else source


def error_of(source: str) -> str:
    """Why a grammar in llguidance's form cannot be served; "" if it can, as far as the beginning of one of
    its texts shows: what is too much work for single bytes is so for a model's vocabulary, too.
    """
    matcher = llguidance.LLMatcher(byte_vocabulary(), source, log_level=0)
    next_byte = last_allowed(matcher)
    if matcher.is_error():
        return cause_of(matcher)
    for _ in range(NUM_TRIED):
        if next_byte < 0 or not matcher.consume_token(next_byte):
            break
        next_byte = last_allowed(matcher)
    cause = cause_of(matcher)
    return f"it is too complex: {cause}" if cause and not cause.startswith(EMPTY) else ""


def last_allowed(matcher: llguidance.LLMatcher) -> int:
    """The last byte that may come next; -1 if none may."""
    return -1 if matcher.is_stopped() else matcher.compute_logit_bias().rfind(ALLOWED, 0, EOS)


def cause_of(matcher: llguidance.LLMatcher) -> str:
    """The error of a matcher; "" if it has none."""
    return matcher.get_error().split("<state>")[0].strip()


def source_of(grammar: Grammar, marks: tuple[tuple[str, int], ...] = ()) -> str:
    """The grammar in llguidance's form, not yet checked, for a vocabulary with these special tokens. Raises
    ValueError.
    """
    match grammar.kind:
        case "json":
            schema = as_compiled(checked_schema(grammar), grammar.closed)
            return llguidance.LLMatcher.grammar_from_json_schema(
                json.dumps(schema), overrides={"whitespace_pattern": grammar.whitespace}
            )
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            words = " | ".join(json.dumps(word, ensure_ascii=False) for word in json.loads(grammar.text))
            return llguidance.LLMatcher.grammar_from_lark(f"start: {words}")
        case "structural_tag":
            schema_rule = functools.partial(embedded_schema, whitespace=grammar.whitespace)
            return source_of_tag(json.loads(grammar.text), grammar.field, Lark(dict(marks)), schema_rule)
        case _:
            return llguidance.LLMatcher.grammar_from_lark(any_to_lark(grammar.text))


def embedded_schema(schema: Any, field: str, whitespace: str) -> dict[str, Any]:
    """A JSON schema as a part of a Lark grammar. Raises ApiError."""
    if not isinstance(schema, dict | bool):
        raise invalid(f"`{field}` must be a JSON schema", field)
    grammar = Grammar("json", json.dumps(schema), field, whitespace)
    compile_cached(grammar)
    schema = as_compiled(checked_schema(grammar), closed=False)
    return {**schema, "x-guidance": {"whitespace_pattern": whitespace}}


def checked_schema(grammar: Grammar) -> Any:
    """The schema as an object. Raises ApiError."""
    try:
        schema = json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise refusal(grammar, f"it is not JSON: {error}") from error
    if schema is True:
        return {}
    if schema is False:
        raise refusal(grammar, "no value satisfies the schema `false`")
    if not isinstance(schema, dict):
        raise refusal(grammar, "a JSON schema is an object")
    if (depth := depth_of(schema)) > MAX_SCHEMA_DEPTH:
        raise refusal(grammar, f"its depth must be at most {MAX_SCHEMA_DEPTH}. Given: {depth}")
    return schema


def depth_of(value: Any) -> int:
    """How deep objects and lists are nested in each other."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [part for item in level for part in (item.values() if isinstance(item, dict) else item)]
    return depth


def as_compiled(schema: Any, closed: bool) -> Any:
    """A schema as it is compiled: without what is not enforced; if `closed`, its objects are closed where
    that is safe.
    """
    enforced = map_schemas(schema, without_annotations)
    return close_objects(enforced) if closed else enforced


def without_annotations(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without a format that is not enforced, and without llguidance's own options."""
    return {
        name: value
        for name, value in schema.items()
        if name != "x-guidance" and not (name == "format" and value not in FORMATS)
    }


def refusal(grammar: Grammar, cause: str) -> ApiError:
    """The error for a grammar that cannot be compiled; a keyword's place is a JSON pointer (RFC 6901)."""
    if (found := UNIMPLEMENTED.fullmatch(cause)) is not None:
        keyword = found[1].split('", "')[0]
        place = next(places(json.loads(grammar.text), keyword), "")
        cause = f"the keyword `{keyword}`{f' (at `{place}`)' if place else ''} is not supported"
    elif cause.startswith("oneOf constraints"):
        place = next(places(json.loads(grammar.text), "oneOf"), "")
        cause = (
            f"the keyword `oneOf` (first at `{place}`) is supported only where no value can match two of "
            "its schemas"
        )
    return invalid(f"`{grammar.field}` cannot be compiled: {cause}", grammar.field)


def places(schema: Any, keyword: str, path: str = "#") -> Iterator[str]:
    """JSON pointers of a keyword in a schema."""
    if isinstance(schema, list):
        for i, item in enumerate(schema):
            yield from places(item, keyword, f"{path}/{i}")
    elif isinstance(schema, dict):
        if keyword in schema:
            yield f"{path}/{keyword}"
        for name, value in schema.items():
            if name in NAMES_OF_SCHEMAS and isinstance(value, dict):
                for key, item in value.items():
                    yield from places(item, keyword, f"{path}/{name}/{escape(key)}")
            elif name not in VALUES:
                yield from places(value, keyword, f"{path}/{escape(name)}")


def escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


class ByteTokenizer:
    """A tokenizer whose tokens are single bytes, and an end."""

    eos_token_id = EOS
    bos_token_id = None
    tokens = (*(bytes([i]) for i in range(EOS)), b"<eos>")
    special_token_ids = (EOS,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@functools.cache
def byte_vocabulary() -> llguidance.LLTokenizer:
    wrapper = llguidance.TokenizerWrapper(ByteTokenizer())
    return llguidance.LLTokenizer(wrapper, n_vocab=EOS + 1, eos_token=[EOS])
