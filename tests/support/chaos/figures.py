"""Figures of chaos: pauses by what caused them, and what is left when all is over."""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from redis.asyncio import Redis

from common.broker.keys import Keys
from tests.support.chaos.answers import Choice
from tests.support.chaos.strikes import Strike
from tests.support.fleet.fleet import Fleet
from tests.support.fleet.leftovers import processes

KEYS = Keys("default")
MIB = 2**20


def pauses_by_kind(
    choices: Iterable[Choice], struck: Sequence[tuple[float, Strike]]
) -> dict[str, list[float]]:
    """The longest pause of each choice after each strike, sorted, by the strike's label. A pause belongs to
    the first strike within it, else to the last one before it.
    """
    times_s = [time_s for time_s, _ in struck]
    found: defaultdict[str, list[float]] = defaultdict(list)
    for choice in choices:
        longest: dict[int, float] = {}
        for begin_s, end_s in choice.gaps:
            first, before = bisect_left(times_s, begin_s), bisect_right(times_s, begin_s) - 1
            cause = first if first < len(times_s) and times_s[first] <= end_s else before
            if cause >= 0:
                longest[cause] = max(longest.get(cause, 0.0), end_s - begin_s)
        for cause, pause_s in longest.items():
            found[struck[cause][1].label].append(pause_s)
    return {label: sorted(pauses) for label, pauses in sorted(found.items())}


def describe_pauses(pauses: list[float]) -> str:
    p50, p99 = pauses[len(pauses) // 2], pauses[int(len(pauses) * 0.99)]
    return f"{len(pauses):5} pauses, p50 {p50:5.2f} s, p99 {p99:5.2f} s, longest {pauses[-1]:5.2f} s"


@dataclass(frozen=True, slots=True)
class Holdings:
    """The most handles and bytes that a process of each kind holds."""

    handles: dict[str, int]
    memory: dict[str, int]

    @classmethod
    def of(cls, fleet: Fleet) -> "Holdings":
        handles: dict[str, int] = {}
        memory: dict[str, int] = {}
        for process in [fleet.known[fleet.launcher.pid], *processes(fleet)]:
            kind = " ".join(process.cmdline()).split()[1]
            handles[kind] = max(handles.get(kind, 0), process.num_fds())
            memory[kind] = max(memory.get(kind, 0), process.memory_info().rss)
        return cls(handles, memory)


async def count_keys(redis: Redis) -> Counter[str]:
    """Keys of the pool by kind."""
    return Counter([key.decode().split(":")[2] async for key in redis.scan_iter(KEYS.key("*"))])
