"""Figures of chaos: pauses by what caused them, and what is left when all is over."""

import contextlib
import time
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis

from common.broker.keys import Keys
from common.metrics.catalogue import RESUMES
from tests.support.chaos.answers import Choice
from tests.support.chaos.strikes import Strike
from tests.support.fleet.fleet import Fleet, title
from tests.support.fleet.leftovers import idle, processes

KEYS = Keys("default")
MIB = 2**20
NUM_SHOWN = 6
ON_ITS_WAY_S = 0.5
"""How long messages that a victim has sent may still arrive."""
COMPUTING = {"agent kill", "engine kill", "batcher kill"}


@dataclass(frozen=True, slots=True)
class Pause:
    """The longest pause of a stream after one strike; times are of the monotonic clock.

    Attributes:
        num_later: strikes that came between this one and the end of the pause, and prolonged it perhaps.
    """

    case: str
    label: str
    begin_s: float
    end_s: float
    num_later: int

    @property
    def duration_s(self) -> float:
        return self.end_s - self.begin_s

    def __str__(self) -> str:
        begun = time.strftime("%X", time.localtime(time.time() - time.monotonic() + self.begin_s))
        later = f", then {self.num_later} more" if self.num_later else ""
        return f"{self.case}: {self.duration_s:.1f} s from {begun} on ({self.label}{later})"


def find_pauses(
    choices: Iterable[tuple[str, Choice]], struck: Sequence[tuple[float, Strike]], longest_stop_s: float
) -> list[Pause]:
    """Return pauses, the longest first. A gap belongs to the first strike whose stop lasts into it. Without
    one, it belongs to the first strike within it or just before it, else to the last one before.
    """
    times_s = [time_s for time_s, _ in struck]
    stopped_until_s = [
        time_s + max(min(hit.stop_s, longest_stop_s) for hit in strike.hits) for time_s, strike in struck
    ]
    found: list[Pause] = []
    for case, choice in choices:
        longest: dict[int, Pause] = {}
        for begin_s, end_s in choice.gaps:
            first, before = bisect_left(times_s, begin_s - ON_ITS_WAY_S), bisect_right(times_s, begin_s) - 1
            cause = first if first < len(times_s) and times_s[first] <= end_s else before
            cause = next((i for i in range(max(0, cause)) if stopped_until_s[i] > begin_s), cause)
            if cause < 0:
                continue
            num_later = max(0, bisect_right(times_s, end_s) - cause - 1)
            pause = Pause(case, struck[cause][1].label, begin_s, end_s, num_later)
            longest[cause] = max(longest.get(cause, pause), pause, key=lambda one: one.duration_s)
        found += longest.values()
    return sorted(found, key=lambda one: -one.duration_s)


def describe_pauses(pauses: Sequence[Pause]) -> list[str]:
    """Return a line for each group of strikes, one for each number of victims, then one for each label."""
    by_label: defaultdict[str, list[float]] = defaultdict(list)
    for pause in reversed(pauses):
        for group in groups_of(pause.label):
            by_label[group].append(pause.duration_s)
        by_label[pause.label].append(pause.duration_s)
    return [f"{label:42} {describe_durations(found)}" for label, found in sorted(by_label.items())]


def groups_of(label: str) -> list[str]:
    """Return the groups of a strike: single or double, with SIGSTOP or without, and whether only workers and
    batchers were killed.
    """
    hits = label.split(" + ")
    number = "one" if len(hits) == 1 else "two at once"
    is_stop = any(hit.endswith(" stop") for hit in hits)
    groups = [f"* {'stopped, or one of them' if is_stop else 'nothing stopped'}, {number}"]
    if COMPUTING.issuperset(hits):
        groups.append(f"* workers, batchers killed, {number}")
    return groups


def describe_durations(sorted_s: Sequence[float]) -> str:
    p50, p99 = sorted_s[len(sorted_s) // 2], sorted_s[int(len(sorted_s) * 0.99)]
    return f"{len(sorted_s):5} pauses, p50 {p50:5.2f} s, p99 {p99:5.2f} s, longest {sorted_s[-1]:5.2f} s"


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
            with contextlib.suppress(psutil.Error, IndexError):  # it ends meanwhile
                kind = title(process)[1]
                handles[kind] = max(handles.get(kind, 0), process.num_fds())
                memory[kind] = max(memory.get(kind, 0), process.memory_info().rss)
        return cls(handles, memory)


async def is_idle(redis: Redis) -> bool:
    """As `idle`. Requests of a killed gateway, their tokens and answers to jobs may stay a while."""
    found = {key for kind in ("request", "result") async for key in redis.scan_iter(KEYS.key(kind, "*"))}
    expiring = {key for key in found if await redis.ttl(key) > 0}
    return await idle(redis, expiring | {key.replace(b":request:", b":tokens:") for key in expiring})


async def describe_busy(redis: Redis) -> str:
    """Describe what is not idle: the batcher's counts, and the first unfinished requests and jobs."""
    state: dict[bytes, bytes] = await redis.hgetall(KEYS.state)  # type: ignore[misc]
    counts = ", ".join(f"{name} {state.get(name.encode(), b'?').decode()}" for name in ("requests", "rows"))
    kept = [key.decode() async for key in redis.scan_iter(KEYS.key("tokens", "*"))]
    entries = [entry_id.decode() for entry_id, _ in await redis.xrange(KEYS.requests, count=NUM_SHOWN)]
    jobs = [entry_id.decode() for entry_id, _ in await redis.xrange(KEYS.submit, count=NUM_SHOWN)]
    return f"{counts}; tokens of {kept[:NUM_SHOWN]}; entries of requests {entries}, of submit {jobs}"


async def count_resumes(base_url: str) -> Counter[str]:
    """Count resumed requests by cause; what a killed batcher counted in its last second is lost."""
    async with httpx.AsyncClient(base_url=base_url, timeout=30) as http:
        text = (await http.get("/metrics")).text
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"{RESUMES.name}_total":
                found[sample.labels["cause"]] += round(sample.value)
    return found


async def count_keys(redis: Redis) -> Counter[str]:
    """Count the pool's keys by kind."""
    return Counter([key.decode().split(":")[2] async for key in redis.scan_iter(KEYS.key("*"))])
