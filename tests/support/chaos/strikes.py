"""Strikes: what is done to whom, and when; drawn from a seed, without a fleet."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

KINDS = ("gateway", "batcher", "agent", "engine", "jobs", "broker")
PAIRS = 1 / 3
"""Share of strikes that hit two processes at once."""
STOPS = 1 / 5
"""Share of hits that are SIGSTOP … SIGCONT in place of SIGKILL."""
STOP_S = (0.3, 6.0)
"""How long a process is stopped: in part longer than leases and times to live."""
BROKER_WAYS = ("kill", "set-back", "cut")
"""SIGKILL; SIGKILL and a start with the file of a second before; all its connections are closed."""


@dataclass(frozen=True, slots=True)
class Hit:
    """What happens to one process.

    Attributes:
        kind: one of KINDS.
        name: of the process, as `w0`; an engine has its worker's.
        way: `kill`, `stop`, or another of BROKER_WAYS.
        stop_s: how long it is stopped.
    """

    kind: str
    name: str
    way: str
    stop_s: float = 0.0

    def __str__(self) -> str:
        stop = f" for {self.stop_s:.1f} s" if self.way == "stop" else ""
        return f"{self.way} {self.kind} {self.name}{stop}"

    @property
    def label(self) -> str:
        """The name under which figures are listed."""
        return f"{self.kind} {self.way}"


@dataclass(frozen=True, slots=True)
class Strike:
    """One hit, or two at once; `pause_s` is the time since the strike before it."""

    pause_s: float
    hits: tuple[Hit, ...]

    @property
    def label(self) -> str:
        return " + ".join(sorted(hit.label for hit in self.hits))

    def __str__(self) -> str:
        return " and ".join(map(str, self.hits))


@dataclass(frozen=True, slots=True)
class Targets:
    """Names of a fleet's processes by kind."""

    names: dict[str, list[str]]

    @classmethod
    def of(cls, counts: Mapping[str, int]) -> "Targets":
        """Make the targets from `counts`: processes by kind. A worker is an agent and an engine."""
        letters = {"gateway": "g", "batcher": "b", "agent": "w", "engine": "w", "jobs": "j"}
        names = {kind: [f"{letters[kind]}{i}" for i in range(count)] for kind, count in counts.items()}
        return cls({kind: found for kind, found in names.items() if found} | {"broker": ["broker"]})


def draw_strikes(seed: int, targets: Targets, every_s: float, spared: Sequence[str] = ()) -> Iterator[Strike]:
    """Yield strikes without end, without the kinds and ways that are `spared`. Kinds and pairs of kinds come
    from shuffled decks, so that each comes equally often.
    """
    draw = random.Random(seed)
    kinds = [kind for kind in KINDS if kind not in spared]
    cards = [(kind,) for kind in kinds]
    singles = endless_deck(draw, cards)
    pairs = endless_deck(draw, possible_pairs(targets, kinds) or cards)
    while True:
        deck = pairs if draw.random() < PAIRS else singles
        pause_s = every_s * draw.uniform(0.5, 1.5)
        yield Strike(pause_s, draw_hits(draw, targets, next(deck), spared))


def possible_pairs(targets: Targets, kinds: Sequence[str]) -> list[tuple[str, ...]]:
    return [
        (first, second)
        for first, second in combinations_with_replacement(kinds, 2)
        if first != second or len(targets.names[first]) > 1
    ]


def endless_deck(draw: random.Random, cards: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    while cards:
        yield from draw.sample(cards, len(cards))


def draw_hits(
    draw: random.Random, targets: Targets, kinds: Sequence[str], spared: Sequence[str]
) -> tuple[Hit, ...]:
    """Return one hit for each kind; two of one kind hit two processes."""
    hits: list[Hit] = []
    for kind in kinds:
        taken = [hit.name for hit in hits if hit.kind == kind]
        name = draw.choice([name for name in targets.names[kind] if name not in taken])
        hits.append(draw_hit(draw, kind, name, spared))
    return tuple(hits)


def draw_hit(draw: random.Random, kind: str, name: str, spared: Sequence[str]) -> Hit:
    is_stop, stop_s = draw.random() < STOPS, draw.uniform(*STOP_S)
    ways = [way for way in BROKER_WAYS if way not in spared] if kind == "broker" else ["kill"]
    way = draw.choice(ways)
    return Hit(kind, name, "stop", stop_s) if is_stop and "stop" not in spared else Hit(kind, name, way)
