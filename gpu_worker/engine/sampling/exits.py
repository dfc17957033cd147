"""Exits: what may lead out of the strings and the free text of a grammar, found in its source."""

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import llguidance

from gpu_worker.engine.sampling.ending_search import CONTROL, NO_EXITS, EndingSearch, Exits

MAX_EXAMPLE = 64
"""Characters of a pattern's shortest text; for a longer one no exit is known."""
MAX_TEXTS = 32
"""Different patterns of a grammar whose shortest texts are searched for; and its marks."""
MAX_EXITS = 256
SPECIAL_TOKEN = re.compile(r"<\[([0-9]{1,9})\]>")
FINAL_MESSAGE = re.compile(r'<\[([0-9]{1,9})\]> "final" <\[([0-9]{1,9})\]>')
"""How an answer begins in Harmony, where a call could begin, too."""
MARK_BEHIND_TEXT = re.compile(r'^(?:\w+\[lazy\]|[A-Z]\w*): .* ("(?:[^"\\]|\\.)*")$', re.MULTILINE)
"""The last literal of a lazy rule, or of a lexeme, as which gateways write free text up to a mark."""
JSON_RULE = "%json "


def exits_of(search: EndingSearch, source: str) -> Exits:
    """The exits of a grammar in llguidance's form: of each pattern's shortest text all ends, since free text
    may stand before it, or a part of it; the marks of its rules in Lark; and how an answer begins in Harmony.
    """
    if not {CONTROL, ord('"')} <= search.byte_ids.keys():
        return NO_EXITS
    schemas, rules = parts_of(source)
    constraints = sorted({json.dumps(one) for one in constraints_of(schemas)})
    texts = [shortest_text(search, constraint) for constraint in constraints[:MAX_TEXTS]]
    named = {int(token) for token in SPECIAL_TOKEN.findall(rules)}
    special = sorted(token for token in named if token < search.vocabulary.vocab_size)[:MAX_TEXTS]
    of_text = [[token] for token in special] + ends_of(search, marks_of(rules))
    return Exits(ends_of(search, texts), of_text, answers_of(search, rules))


def answers_of(search: EndingSearch, rules: str) -> list[list[int]]:
    """How the answer itself begins in rules of Harmony, and how behind the first mark of that."""
    pairs = {(int(first), int(last)) for first, last in FINAL_MESSAGE.findall(rules)}
    known = sorted(pair for pair in pairs if max(pair) < search.vocabulary.vocab_size)[:MAX_TEXTS]
    rest = search.tokens_of(b"final")
    return [way for first, last in known for way in ([first, *rest, last], [*rest, last])]


def ends_of(search: EndingSearch, texts: list[bytes]) -> list[list[int]]:
    known = search.byte_ids.keys()
    ends = {text[-length:] for text in texts for length in range(1, min(len(text), MAX_EXAMPLE) + 1)}
    able = sorted((end for end in ends if known >= {*end}), key=lambda end: (len(end), end))
    return [search.tokens_of(end) for end in able[:MAX_EXITS]]


def marks_of(rules: str) -> list[bytes]:
    """Texts at which free text ends. Those that are no JSON, as rules of a client may be, are not tried."""
    found: list[bytes] = []
    for mark in MARK_BEHIND_TEXT.findall(rules)[:MAX_TEXTS]:
        with suppress(ValueError):
            found.append(json.loads(mark).encode())
    return found


def parts_of(source: str) -> tuple[list[Any], str]:
    """The JSON schemas in a grammar, and its rules in Lark."""
    if not source.lstrip().startswith('{"grammars"'):
        return embedded_schemas(source), source
    grammars = json.loads(source)["grammars"]
    rules = "\n".join(grammar["lark_grammar"] for grammar in grammars if grammar.get("lark_grammar"))
    schemas = [grammar["json_schema"] for grammar in grammars if grammar.get("json_schema")]
    return schemas + embedded_schemas(rules), rules


def embedded_schemas(rules: str) -> list[Any]:
    found: list[Any] = []
    for place in re.finditer(JSON_RULE, rules):
        with suppress(ValueError, RecursionError):  # a text of a client may have the words, too
            found.append(json.JSONDecoder().raw_decode(rules, place.end())[0])
    return found


def constraints_of(schemas: list[Any]) -> Iterator[Mapping[str, Any]]:
    """Schemas of the strings in schemas that have to match something; names of properties are such, too."""
    left = [*schemas]
    while left:  # rules in Lark may have a schema of any depth
        schema = left.pop()
        if isinstance(schema, list):
            left += schema
        elif isinstance(schema, dict):
            left += schema.values()
            kept = {name: schema[name] for name in ("pattern", "format") if isinstance(schema.get(name), str)}
            if kept:
                yield kept
            names = schema.get("patternProperties")
            for name in names if isinstance(names, dict) else ():
                yield {"pattern": name}


@lru_cache(maxsize=1024)
def shortest_text(search: EndingSearch, constraint: str) -> bytes:
    """The shortest text of a string that matches, as JSON writes it between its quotes; nothing if none is
    found.

    A matcher allows no byte behind which no text of the greatest length follows: so with the least length
    that any text has, each way leads to its end.
    """

    def matcher_of(max_length: int) -> llguidance.LLMatcher:
        schema = {"type": "string", **json.loads(constraint), "maxLength": max_length}
        source = llguidance.LLMatcher.grammar_from_json_schema(schema)
        return llguidance.LLMatcher(search.vocabulary, source, log_level=0)

    least = bisect_left(range(MAX_EXAMPLE), 1, key=lambda length: not matcher_of(length).is_error())
    matcher = matcher_of(least)
    ending = None if matcher.is_error() else search.find(matcher, None)
    text = b"" if ending is None else search.vocabulary.decode_bytes(ending.tokens)
    return text.removeprefix(b'"').rpartition(b'"')[0]
