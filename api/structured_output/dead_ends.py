"""Dead ends: places in a grammar after which nothing may follow, although no text of the grammar ends there.

A regex has no dead ends. Rules may have them: after a comma, those of a JSON object may offer a name that no
text can have.
"""

import heapq
from dataclasses import dataclass, field
from itertools import count

import llguidance
import numpy as np

MAX_PLACES = 256
"""How many places are looked at, which takes some 30 ms."""
MAX_FORCED = 8192
"""How many bytes may be forced at once: the engine tokenizes all of them at each step."""
MAX_ALIKE = 16
"""How many places in a row are looked at where the same may follow, as within a string."""
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


@dataclass(order=True, slots=True)
class Way:
    """A way into a grammar.

    Attributes:
        num_turns: how many of its bytes were not the ones that close soonest.
        number: the order of ways; the newest has the lowest.
        matcher: the grammar's state after the text.
        text: as tokens of single bytes.
        mask: what was allowed in the place of its last byte.
        num_alike: for how many bytes in a row the mask has been the same.
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
        """Follow what is forced. False if that is too much."""
        forced = self.matcher.compute_ff_tokens()
        if 0 < len(forced) <= MAX_FORCED:
            self.matcher.consume_tokens(forced)
            self.text += tuple(forced)
        return len(forced) <= MAX_FORCED

    def look(self) -> None:
        """See what may follow. At a dead end the matcher has an error afterwards."""
        mask = self.matcher.compute_bitmask()
        self.num_alike = self.num_alike + 1 if mask == self.mask else 0
        self.mask = mask


def find_dead_end(start: llguidance.LLMatcher, end: int) -> Way | None:
    """The way into a dead end of a grammar, or to a forced text that is too long (its matcher has no error);
    None if there is none.

    Args:
        start: a matcher of the grammar; it is consumed.
        end: the token that ends a text.
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
    """The bytes and tokens of a mask that are tried; those that close soonest come first."""
    flags = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:end]
    allowed: list[int] = np.flatnonzero(flags).tolist()
    if len(allowed) > FREE:
        return [byte for byte in FREE_TEXT if flags[byte]] or allowed[:1]
    for members in CLASSES:
        if len(alike := [token for token in allowed if token in members]) > MANY:
            allowed = [token for token in allowed if token not in alike[1:]]
    allowed.sort(key=lambda token: (token not in CLOSING, token))
    return [token for token in allowed if token not in SPACE] or allowed
