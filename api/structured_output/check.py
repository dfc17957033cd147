"""Checks of grammars in llguidance's form: whether one can be served, and what its texts can begin with."""

import functools
import json
import re
from collections.abc import Iterable

import llguidance

from api.structured_output.dead_ends import MAX_FORCED, Way, find_dead_end
from api.structured_output.lark import TEXT, regex
from api.structured_output.vocabulary import NUM_BYTES, byte_vocabulary

EMPTY = "NoExtensionBias"
"""llguidance's error for a grammar that no text satisfies."""
OWN_WORDS = (
    (re.compile("Regex is empty:.*"), "no text has all that is said of a string"),
    (re.compile(r"\s+while processing json-schema:///(#\S*)"), r" (at `\1`)"),
    (re.compile(r"json-schema:///(#\S*)"), r"`\1`"),
    (re.compile("^Unsatisfiable schema: "), "no value satisfies it: "),
    (re.compile(r"^panic: (.|\n)*"), "its rules cannot be told apart"),
)
"""What llguidance says of a schema → what the error says."""
MAX_QUOTED = 100
NUM_TRIED = 32
"""How many tokens of a text are tried: usually they take a millisecond, at most half a second."""
ALLOWED = 200
"""The bias that llguidance gives a token that may come next."""


def error_of(source: str, size: int = NUM_BYTES) -> str:
    """Why a grammar cannot be served; "" if it can, as far as the beginning of one of its texts shows.

    What is too complex for single bytes is too complex for a model's vocabulary.

    Args:
        size: ids that the grammar names are below it.
    """
    vocabulary = byte_vocabulary(size)
    matcher = llguidance.LLMatcher(vocabulary, source, log_level=0)
    if matcher.is_error():
        return cause_of(matcher)
    if way := find_dead_end(matcher.deep_copy(), vocabulary.eos_token):
        return cause_of_end(way)
    next_token = last_allowed(matcher, vocabulary)
    for _ in range(NUM_TRIED):
        if next_token < 0 or not matcher.consume_token(next_token):
            break
        next_token = last_allowed(matcher, vocabulary)
    cause = cause_of(matcher)
    return f"it is too complex: {cause}" if cause and not cause.startswith(EMPTY) else ""


def cause_of_end(way: Way) -> str:
    """What is wrong with a grammar that has this way into a dead end."""
    cause = cause_of(way.matcher)
    if not cause:
        return f"it forces a text of more than {MAX_FORCED} bytes"
    if not cause.startswith(EMPTY):
        return f"it is too complex: {cause}"
    return f"nothing can follow {quoted(way.text)}" if way.text else "no text satisfies it"


def quoted(tokens: Iterable[int]) -> str:
    """The end of a text of single bytes, between quotes."""
    text = bytes(token for token in tokens if token < NUM_BYTES).decode(errors="replace")
    return json.dumps(text.rstrip()[-MAX_QUOTED:], ensure_ascii=False)


def can_begin(source: str, text: str, size: int = NUM_BYTES) -> bool:
    """Whether a text of the grammar can begin with this one."""
    matcher = llguidance.LLMatcher(byte_vocabulary(size), source, log_level=0)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens)


@functools.lru_cache(maxsize=256)
def can_go_on(pattern: str, first: str) -> bool:
    """Whether a text that matches can go on with this character and still match: the longest match would then
    take a part of what follows. Both are regexes of a Lark grammar. Raises ValueError.
    """
    return not is_empty(f"ONE & (ONE /{first}/ {TEXT})\nONE: {pattern}")


@functools.lru_cache(maxsize=256)
def is_space(pattern: str) -> bool:
    """Whether a regex matches nothing but white space. Raises ValueError."""
    return is_empty(f"{regex(pattern)} & ~/\\s*/")


def is_empty(lexeme: str) -> bool:
    """Whether no text matches a lexeme of Lark. Raises ValueError."""
    source = f"start: LEXEME\nLEXEME: {lexeme}"
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), source, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    cause = cause_of(matcher)
    if cause and not cause.startswith(EMPTY):
        raise ValueError(cause)
    return bool(cause)


def last_allowed(matcher: llguidance.LLMatcher, vocabulary: llguidance.LLTokenizer) -> int:
    """The highest token that may come next, without the end; -1 if none may."""
    if matcher.is_stopped():
        return -1
    return matcher.compute_logit_bias().rfind(ALLOWED, 0, vocabulary.eos_token)


def cause_of(matcher: llguidance.LLMatcher) -> str:
    """The error of a matcher; "" if it has none."""
    cause = matcher.get_error().split("<state>")[0].strip()
    for pattern, words in OWN_WORDS:
        cause = pattern.sub(words, cause)
    return cause
