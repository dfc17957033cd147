"""Check: whether a grammar in llguidance's form can be served, and what its texts can begin with.

Grammars are checked with a vocabulary of single bytes: what is too complex for it is too complex for a
model's.
"""

import functools
import heapq
import json
import re
from collections.abc import Iterable
from itertools import count
from typing import NamedTuple

import llguidance

from api.grammar.lark import regex

NUM_BYTES = 256
NUM_TRIED = 32
"""How many tokens of a text are tried: usually they take a millisecond, at most half a second."""
ALLOWED_BIAS = 200
"""The bias that llguidance gives a token that may come next."""
NO_TEXT = "NoExtensionBias"
"""llguidance's error for a grammar that no text satisfies."""
UNSATISFIABLE = "no text satisfies it"
OWN_WORDS = (
    (re.compile("Regex is empty:.*"), "no text has all that is said of a string"),
    (re.compile(r"\s+while processing json-schema:///(#\S*)"), r" (at `\1`)"),
    (re.compile(r"json-schema:///(#\S*)"), r"`\1`"),
    (re.compile("^Unsatisfiable schema: "), "no value satisfies it: "),
    (re.compile(r"^panic: (.|\n)*"), "its rules cannot be told apart"),
)
"""What llguidance says of a schema → what the error says."""
MAX_QUOTED = 100

MAX_PLACES = 256
"""How many places are searched for dead ends; it takes some 30 ms."""
MAX_FORCED = 8192
"""How many bytes may be forced at once: the engine tokenizes all of them at each step."""
MAX_ALIKE = 16
"""How many places in a row are searched where the same may follow, as within a string."""
FREE = 64
"""Where more bytes than this may follow, text is free: a quote ends it, and a letter stands for the rest."""
FREE_TEXT = b'"a'
CLOSING = b'"}]'
SHAPE = b"{}[],"
"""Two places differ if the texts before them have different numbers of these bytes."""
CLASSES = (
    b"0123456789",
    b"abcdefghijklmnopqrstuvwxyz",
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    bytes(range(128, 256)),
)
MANY = 8
"""Where more bytes of a class than this may follow, the first one stands for the rest."""
SPACE = b" \n\t\r"


class Bytes:
    """A vocabulary of single bytes, tokens without a text up to its size, and an end.

    Attributes:
        size: all ids that a grammar may name are below it.
    """

    bos_token_id = None

    def __init__(self, size: int = NUM_BYTES) -> None:
        self.size = max(size, NUM_BYTES)
        self.eos_token_id = self.size
        self.special_token_ids = (self.size,)
        self.tokens = (
            *(bytes([i]) for i in range(NUM_BYTES)),
            *(b"" for _ in range(NUM_BYTES, self.size)),
            b"<eos>",
        )

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@functools.lru_cache(maxsize=8)
def byte_tokenizer(size: int = NUM_BYTES) -> llguidance.LLTokenizer:
    """llguidance's tokenizer of single bytes. A grammar may name ids below `size`."""
    vocabulary = Bytes(size)
    wrapper = llguidance.TokenizerWrapper(vocabulary)
    return llguidance.LLTokenizer(wrapper, n_vocab=vocabulary.size + 1, eos_token=[vocabulary.size])


# --- checks -------------------------------------------------------------------------------------------------


def find_error(source: str, size: int = NUM_BYTES) -> str:
    """Why a grammar cannot be served; "" if it can, as far as the beginning of one of its texts shows.

    Args:
        size: ids that the grammar names are below it.
    """
    tokenizer = byte_tokenizer(size)
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0)
    if matcher.is_error():
        return error_of(matcher)
    if way := find_dead_end(matcher.deep_copy(), tokenizer.eos_token):
        return describe_dead_end(way)
    next_token = last_allowed(matcher, tokenizer)
    for _ in range(NUM_TRIED):
        if next_token < 0 or not matcher.consume_token(next_token):
            break
        next_token = last_allowed(matcher, tokenizer)
    cause = error_of(matcher)
    return f"it is too complex: {cause}" if cause and not cause.startswith(NO_TEXT) else ""


def last_allowed(matcher: llguidance.LLMatcher, tokenizer: llguidance.LLTokenizer) -> int:
    """The highest token that may come next, without the end; -1 if none may."""
    if matcher.is_stopped():
        return -1
    return matcher.compute_logit_bias().rfind(ALLOWED_BIAS, 0, tokenizer.eos_token)


def error_of(matcher: llguidance.LLMatcher) -> str:
    """The error of a matcher; "" if it has none."""
    cause = matcher.get_error().split("<state>")[0].strip()
    for pattern, words in OWN_WORDS:
        cause = pattern.sub(words, cause)
    return cause


def can_begin(source: str, text: str, size: int = NUM_BYTES) -> bool:
    """Whether a text of the grammar can begin with this one."""
    matcher = llguidance.LLMatcher(byte_tokenizer(size), source, log_level=0)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens)


@functools.lru_cache(maxsize=256)
def check_white_space(pattern: str) -> None:
    """Raises ValueError for a regex that matches more than white space."""
    cause = find_error(f"start: OTHER\nOTHER: {regex(pattern)} & ~/\\s*/")
    if cause != UNSATISFIABLE:
        raise ValueError(cause or "its `whitespace_pattern` must match nothing but white space")


# --- dead ends ----------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """The beginning of a text, and the grammar's state after it. Ways are tried in this order.

    Attributes:
        num_turns: how many of its bytes were not the ones that close soonest.
        number: the newest way has the lowest.
        matcher: the grammar's state after the text.
        text: as tokens of single bytes.
        mask: what was allowed in the place of its last byte.
        num_alike: for how many bytes in a row the mask has been the same.
    """

    num_turns: int
    number: int
    matcher: llguidance.LLMatcher
    text: tuple[int, ...] = ()
    mask: bytes = b""
    num_alike: int = 0


def find_dead_end(start: llguidance.LLMatcher, end: int) -> Way | None:
    """The way into a dead end of a grammar, or to a forced text that is too long (its matcher has no error);
    None if there is none.

    At a dead end nothing may follow, although no text of the grammar ends there. A regex has none. Rules may
    have them: after a comma, those of a JSON object may offer a name that no text can have.

    Args:
        start: a matcher of the grammar; it is consumed.
        end: the token that ends a text.
    """
    numbers, seen = count(-1, -1), set[object]()
    ways = [Way(0, 0, start)]
    while ways and len(seen) < MAX_PLACES:
        way = heapq.heappop(ways)
        matcher, forced = way.matcher, way.matcher.compute_ff_tokens()
        if len(forced) > MAX_FORCED:
            return way
        matcher.consume_tokens(forced)
        text = (*way.text, *forced)
        if matcher.is_stopped() and not matcher.is_error():
            continue
        mask = matcher.compute_bitmask()  # at a dead end the matcher has an error afterwards
        if matcher.is_error():
            return way._replace(text=text)
        num_alike = way.num_alike + 1 if mask == way.mask else 0
        place = mask, text[-1:], num_alike, *(text.count(byte) for byte in SHAPE)
        if place in seen or num_alike >= MAX_ALIKE:
            continue
        seen.add(place)
        for turns, byte in enumerate(tokens_to_try(mask, end)):
            after = matcher.deep_copy()
            after.consume_token(byte)
            turned = way.num_turns + bool(turns)
            heapq.heappush(ways, Way(turned, next(numbers), after, (*text, byte), mask, num_alike))
    return None


def tokens_to_try(mask: bytes, end: int) -> list[int]:
    """The bytes and tokens of a mask that are tried; those that close soonest come first."""
    bits = int.from_bytes(mask, "little")
    allowed = [token for token in range(end) if bits >> token & 1]
    if len(allowed) > FREE:
        return [byte for byte in FREE_TEXT if bits >> byte & 1] or allowed[:1]
    for members in CLASSES:
        if len(alike := [token for token in allowed if token in members]) > MANY:
            allowed = [token for token in allowed if token not in alike[1:]]
    allowed.sort(key=lambda token: (token not in CLOSING, token))
    return [token for token in allowed if token not in SPACE] or allowed


def describe_dead_end(way: Way) -> str:
    """What is wrong with a grammar that has this way into a dead end."""
    cause = error_of(way.matcher)
    if not cause:
        return f"it forces a text of more than {MAX_FORCED} bytes"
    if not cause.startswith(NO_TEXT):
        return f"it is too complex: {cause}"
    return f"nothing can follow {quoted_end(way.text)}" if way.text else UNSATISFIABLE


def quoted_end(tokens: Iterable[int]) -> str:
    """The end of a text of single bytes, between quotes."""
    text = bytes(token for token in tokens if token < NUM_BYTES).decode(errors="replace")
    return json.dumps(text.rstrip()[-MAX_QUOTED:], ensure_ascii=False)
