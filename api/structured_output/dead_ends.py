"""Dead ends: places in a grammar behind which nothing may follow, although no text of it ends there.

A regex has none. Rules have them: those of a JSON object offer, behind a comma, a name that no text can have.
"""

import heapq
from dataclasses import dataclass, field
from itertools import count

import llguidance
import numpy as np

MAX_PLACES = 256
"""Places that are looked at: some 30 ms."""
MAX_FORCED = 8192
"""Bytes that may be forced at once: the engine has all of them tokenized at each step."""
MAX_ALIKE = 16
"""Places in a row where the same may follow, as within a string, that are looked at."""
FREE = 64
"""Where more bytes than these may follow, text is free: a quote ends it, and a letter stands for the rest."""
FREE_TEXT = b'"a'
CLOSING = b'"}]'
SHAPE = b"{}[],"
"""Places with different numbers of these before them are different ones."""
CLASSES = (
    b"0123456789",
    b"abcdefghijklmnopqrstuvwxyz",
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    bytes(range(128, 256)),
)
MANY = 8
"""Where more bytes of a class than these may follow, the first stands for the rest."""
SPACE = b" \n\t\r"


@dataclass(order=True, slots=True)
class Way:
    """A way into a grammar.

    Attributes:
        num_turns: how often it did not take what closes soonest.
        number: of all ways, the newest lowest.
        matcher: behind its text.
        text: as tokens of single bytes.
        mask: what could follow before its last byte.
        num_alike: bytes in a row before which just that could follow.
    """

    num_turns: int
    number: int
    matcher: llguidance.LLMatcher = field(compare=False)
    text: tuple[int, ...] = field(compare=False, default=())
    mask: bytes = field(compare=False, default=b"")
    num_alike: int = field(compare=False, default=0)

    @property
    def place(self) -> object:
        return self.mask, self.text[-1:], self.num_alike, *(self.text.count(byte) for byte in SHAPE)

    def follow_forced(self) -> bool:
        """Follow what is forced, unless that is too much."""
        forced = self.matcher.compute_ff_tokens()
        if 0 < len(forced) <= MAX_FORCED:
            self.matcher.consume_tokens(forced)
            self.text += tuple(forced)
        return len(forced) <= MAX_FORCED

    def look(self) -> None:
        """See what may follow; the matcher of a dead end has an error then."""
        mask = self.matcher.compute_bitmask()
        self.num_alike = self.num_alike + 1 if mask == self.mask else 0
        self.mask = mask


def find_dead_end(start: llguidance.LLMatcher, end: int) -> Way | None:
    """The way into a dead end of a grammar, or to a text that is too long to be forced, which has no error;
    None if none is found. `start` is consumed, `end` the token of an end.
    """
    numbers, seen = count(-1, -1), set[object]()
    ways = [Way(0, 0, start)]
    while ways and len(seen) < MAX_PLACES:
        way = heapq.heappop(ways)
        if not way.follow_forced():
            return way
        if way.matcher.is_stopped() and not way.matcher.is_error():
            continue
        way.look()
        if way.matcher.is_error():
            return way
        if way.place not in seen and way.num_alike < MAX_ALIKE:
            seen.add(way.place)
            for turns, byte in enumerate(following(way.mask, end)):
                matcher = way.matcher.deep_copy()
                matcher.consume_token(byte)
                later = way.num_turns + bool(turns), next(numbers), matcher, (*way.text, byte)
                heapq.heappush(ways, Way(*later, way.mask, way.num_alike))
    return None


def following(mask: bytes, end: int) -> list[int]:
    """The bytes and tokens of a mask that are tried, what closes soonest first; none at an end."""
    flags = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:end]
    allowed: list[int] = np.flatnonzero(flags).tolist()
    if len(allowed) > FREE:
        return [byte for byte in FREE_TEXT if flags[byte]] or allowed[:1]
    for members in CLASSES:
        if len(alike := [token for token in allowed if token in members]) > MANY:
            allowed = [token for token in allowed if token not in alike[1:]]
    allowed.sort(key=lambda token: (token not in CLOSING, token))
    return [token for token in allowed if token not in SPACE] or allowed
