"""Ending search: the shortest text that is found behind which a grammar is satisfied."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import llguidance
import numpy as np

MAX_PIECES = 1024
"""Pieces of an ending: bytes, exits, and forced stretches; beyond them the search gives up."""
CLOSING = b'"}]'
OPENED: Mapping[int | None, bytes] = {ord("{"): b"}", ord("["): b"]"}
"""What closes at once what a byte may have opened."""
CLASSES = (
    b"0123456789",
    b"abcdefghijklmnopqrstuvwxyz",
    b",:.-/@+#=&%?!()_[{ ",
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZ",
)
"""Bytes of which an ending is made, besides those that close; others come last."""
CONTROL = 1
"""A byte that JSON lacks: where it may come, text is free."""
SPECIAL = b"\xff"
"""The byte with which llguidance begins the name of a special token; no text has it."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Tokens behind which a row's text satisfies its grammar.

    Attributes:
        is_whole: nothing may follow: the last token says so, and must not be the last that the row may have,
            or its reason were `length`.
    """

    tokens: list[int]
    is_whole: bool

    def fits(self, tokens_left: int) -> bool:
        return len(self.tokens) + self.is_whole <= tokens_left


@dataclass(frozen=True, slots=True)
class Exits:
    """Texts, each as the tokens of its bytes, that single bytes in a fixed order would not find; the shortest
    first.

    Attributes:
        of_strings: behind one of them a string that has to match a pattern may be closed.
        of_text: one of them ends free text: a mark, or the rest of one.
        to_answer: one of them begins the answer itself, where a call could begin, too.
    """

    of_strings: list[list[int]]
    of_text: list[list[int]]
    to_answer: list[list[int]]


NO_EXITS = Exits([], [], [])


@dataclass(frozen=True, eq=False)
class EndingSearch:
    """Finds short endings: what is forced, an exit, or one byte after the other.

    Each piece follows from the matcher's state and the byte before it alone: so an ending that is found from
    further on is no longer than the rest of the one before, whether the row was resumed there or not.
    """

    vocabulary: llguidance.LLTokenizer

    @cached_property
    def byte_ids(self) -> dict[int, int]:
        return byte_ids_of(self.vocabulary)

    @cached_property
    def byte_of(self) -> dict[int, int]:
        return {token: byte for byte, token in self.byte_ids.items()}

    @cached_property
    def orders(self) -> Mapping[int | None, list[int]]:
        """The tokens of single bytes in the order in which they are tried, by the byte before them."""
        return {
            before: [self.byte_ids[byte] for byte in order_after(before) if byte in self.byte_ids]
            for before in (None, *range(256))
        }

    def tokens_of(self, text: bytes) -> list[int]:
        """A token for each byte. Raises KeyError for a byte that the vocabulary lacks."""
        return [self.byte_ids[byte] for byte in text]

    def find(
        self, matcher: llguidance.LLMatcher, newest: int | None, exits: Exits = NO_EXITS
    ) -> Ending | None:
        """An ending from a matcher's state behind its newest token; the matcher is consumed. None if none is
        found.
        """
        tokens: list[int] = []
        for _ in range(MAX_PIECES):
            if matcher.is_accepting():
                ends = [self.vocabulary.eos_token] if matcher.is_stopped() else []
                return Ending(self.joined(tokens) + ends, bool(ends))
            before = self.last_byte(tokens[-1] if tokens else newest)
            piece = self.next_piece(matcher, before, exits)
            if not piece or not matcher.consume_tokens(piece):
                return None
            tokens += piece
        return None

    def last_byte(self, token: int | None) -> int | None:
        text = b"" if token is None else self.vocabulary.decode_bytes([token])
        return text[-1] if text else None

    def next_piece(self, matcher: llguidance.LLMatcher, before: int | None, exits: Exits) -> list[int]:
        """The tokens that an ending goes on with: those of bytes, or a special one where only that is
        allowed; none if there are none.
        """
        # the tokens first: rules that force none may force bytes without an end
        forced = matcher.compute_ff_tokens() and matcher.compute_ff_bytes().partition(SPECIAL)[0]
        if forced and self.byte_ids.keys() >= {*forced}:
            return self.tokens_of(forced)
        if exits is not NO_EXITS and (found := self.exit_from(matcher, exits)):
            return found
        for token in self.orders[before]:
            if matcher.validate_tokens([token]):
                return [token]
        bits = np.frombuffer(matcher.deep_copy().compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
        return [int(token) for token in allowed[:1]]

    def exit_from(self, matcher: llguidance.LLMatcher, exits: Exits) -> list[int]:
        """The way to the answer itself, the exit from a string that cannot be closed at once, or from free
        text; none if there is none.
        """
        for way in exits.to_answer:
            if matcher.validate_tokens(way) == len(way):
                return way
        control, quote = self.tokens_of(bytes([CONTROL, ord('"')]))
        if matcher.validate_tokens([control]):
            ways = ((way, matcher.validate_tokens([*way, control]) == len(way)) for way in exits.of_text)
        elif matcher.validate_tokens([quote]):
            return []
        else:
            ways = ((way, matcher.validate_tokens([*way, quote]) > len(way)) for way in exits.of_strings)
        return next((way for way, leads_out in ways if leads_out), [])

    def joined(self, tokens: list[int]) -> list[int]:
        """The tokens of bytes as the longest tokens that fit each time, so that a text's rest has the rest of
        its tokens; special ones as they are.
        """
        found: list[int] = []
        for is_text, group in groupby(tokens, self.byte_of.__contains__):
            run = list(group)
            found += self.tokenize(bytes(self.byte_of[token] for token in run)) if is_text else run
        return found

    def tokenize(self, text: bytes) -> list[int]:
        try:
            tokens = self.vocabulary.greedy_tokenize(text.decode())
        except UnicodeDecodeError:
            return self.tokens_of(text)
        return list(tokens)


def order_after(before: int | None) -> bytes:
    """The bytes in the order in which they are tried behind another: those that close, then other classes
    than that one's, then what follows it in its own, so that no repetition goes on for ever.
    """
    closing = OPENED.get(before, b"") + CLOSING
    others = bytes(sorted(set(range(256)) - set(CLOSING) - set(b"".join(CLASSES))))
    for i, own in enumerate(CLASSES):
        if before is not None and before in own:
            place = own.index(before) + 1
            rest = (*CLASSES[i + 1 :], *CLASSES[:i], own[place:], own[:place], others)
            return closing + b"".join(rest)
    return closing + b"".join((*CLASSES, others))


def byte_ids_of(vocabulary: llguidance.LLTokenizer) -> dict[int, int]:
    """The tokens that are a single byte each; a vocabulary need not have all of them."""
    tokens = {byte: vocabulary.tokenize_bytes(bytes([byte])) for byte in range(256)}
    return {
        byte: ids[0]
        for byte, ids in tokens.items()
        if len(ids) == 1 and vocabulary.decode_bytes(ids) == bytes([byte])
    }
