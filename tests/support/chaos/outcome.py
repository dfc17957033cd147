"""Outcome: what came of a run of kills, in words: pauses by what caused them, and what is left over."""

import contextlib
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis

from common.broker.keys import Keys
from common.metrics.catalogue import RESUMES
from tests.support.chaos.attack import Attack, Strike
from tests.support.chaos.clients import Choice, Tally
from tests.support.chaos.engine import NUM_BLOCKS
from tests.support.fleet.fleet import Fleet, title
from tests.support.fleet.leftovers import idle, processes

KEYS = Keys("default")
MIB = 2**20
NUM_LONGEST = 8
ON_ITS_WAY_S = 0.5
"""How long messages that a victim has sent may still arrive."""
COUNTS = {"gateway": 2, "batcher": 2, "agent": 3, "engine": 3, "jobs": 2}


@dataclass(frozen=True)
class Plan:
    """What a run does.

    Attributes:
        num_cases: different requests of each kind.
        num_blocks: of the KV cache of an engine without a model; with few of them rows are preempted.
        counts: processes by kind.
        spared: kinds of processes and ways to hit them that are left out.
        every_s: mean time between two strikes.
        loss: share of the messages of subscriptions that gateways lose.
        step_ms: of an engine without a model; None runs the model.
        stopped_grace_s: STOPPED_GRACE_S; with 0 the stopped go on, with what they held.
    """

    seed: int = 1
    kills: int = 100
    num_streams: int = 64
    every_s: float = 2.5
    num_tokens: int = 200
    num_cases: int = 16
    num_blocks: int = NUM_BLOCKS
    spared: Sequence[str] = ()
    loss: float = 0.05
    counts: Mapping[str, int] = field(default_factory=lambda: COUNTS)
    step_ms: float | None = 40.0
    speculate: int = 0
    stopped_grace_s: float = 0.5
    log_to: Path | None = None


@dataclass
class Outcome:
    """The result of a run; `wrong` is empty if all is well.

    Attributes:
        interrupted: whether the run was told to end early: then what is left over was not looked at.
        resumes: how often requests were resumed, by cause.
    """

    tally: Tally
    attack: Attack
    interrupted: bool = False
    resumes: Counter[str] = field(default_factory=Counter)
    before: dict[str, tuple[int, int]] = field(default_factory=dict)
    after: dict[str, tuple[int, int]] = field(default_factory=dict)
    left_over: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        return [*self.tally.wrong, *(f"{name} never came back" for name in self.attack.lost), *self.left_over]


def describe(plan: Plan, outcome: Outcome) -> str:
    tally, attack = outcome.tally, outcome.attack
    pauses = find_pauses(tally.choices, attack.struck, plan.stopped_grace_s or math.inf)
    holdings = [f"{kind} {outcome.before.get(kind)} → {found}" for kind, found in outcome.after.items()]
    lines = [
        f"seed {plan.seed}: {attack.hits.total()} kills, {len(attack.struck)} strikes: {counts(attack.hits)}",
        f"pauses, with {plan.counts['agent']} workers, of which a strike hits two at most:",
        *(f"  {line}" for line in describe_pauses(pauses)),
        "the longest pauses:",
        *(f"  {pause}" for pause in pauses[:NUM_LONGEST]),
        f"requests resumed: {counts(outcome.resumes)}",
        f"answers checked: {tally.whole.total()} ({counts(tally.whole)}); {tally.num_tokens} tokens",
        f"of these, streams that broke off and went on: {tally.resumed.total()} ({counts(tally.resumed)})",
        f"cut by a gateway's death, right so far, and asked again: {tally.cut.total()} ({counts(tally.cut)})",
        f"refused and asked again: {tally.refused.total()} ({counts(tally.refused)})",
        f"handles and MiB, before → after: {', '.join(holdings)}",
        *(f"wrong: {text}" for text in outcome.wrong),
        "interrupted: what is left over was not looked at" if outcome.interrupted else "",
        f"{time.strftime('%F %X')}, {plan.num_streams} streams, {attack.hits.total()} kills: "
        f"{tally.whole.total()} answers, {tally.num_tokens} tokens: {tally.num_lost} lost, {tally.num_added} "
        f"repeated or foreign; processes that never came back {len(attack.lost)}; wrong {len(outcome.wrong)}",
    ]
    return "\n".join(filter(None, lines))


def counts(found: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(found.items()))


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
    """Return pauses, the longest first. A gap belongs to the first strike within it or just before it, or
    whose stop lasts into it; without one, to the last strike before.
    """
    lasts_s = [
        time_s + max(ON_ITS_WAY_S, *(min(hit.stop_s, longest_stop_s) for hit in strike.hits))
        for time_s, strike in struck
    ]
    found: list[Pause] = []
    for case, choice in choices:
        longest: dict[int, Pause] = {}
        for begin_s, end_s in choice.gaps:
            before = [place for place, (time_s, _) in enumerate(struck) if time_s <= end_s]
            if not before:
                continue
            cause = next((place for place in before if lasts_s[place] >= begin_s), before[-1])
            pause = Pause(case, struck[cause][1].label, begin_s, end_s, before[-1] - cause)
            longest[cause] = max(longest.get(cause, pause), pause, key=lambda one: one.duration_s)
        found += longest.values()
    return sorted(found, key=lambda one: -one.duration_s)


def describe_pauses(pauses: Sequence[Pause]) -> list[str]:
    """Return a line for each label, and one for strikes of one and of two processes, with SIGSTOP and
    without.
    """
    by_label: defaultdict[str, list[float]] = defaultdict(list)
    for pause in reversed(pauses):
        number = "two at once" if " + " in pause.label else "one"
        stopped = "stopped, or one of them" if " stop" in pause.label else "nothing stopped"
        for label in (f"* {stopped}, {number}", pause.label):
            by_label[label].append(pause.duration_s)
    return [f"{label:42} {describe_durations(found)}" for label, found in sorted(by_label.items())]


def describe_durations(sorted_s: Sequence[float]) -> str:
    p50, p99 = sorted_s[len(sorted_s) // 2], sorted_s[int(len(sorted_s) * 0.99)]
    return f"{len(sorted_s):5} pauses, p50 {p50:5.2f} s, p99 {p99:5.2f} s, longest {sorted_s[-1]:5.2f} s"


def holdings(fleet: Fleet) -> dict[str, tuple[int, int]]:
    """Return the most handles and MiB that a process of each kind holds."""
    found: dict[str, tuple[int, int]] = {}
    for process in [fleet.known[fleet.launcher.pid], *processes(fleet)]:
        with contextlib.suppress(psutil.Error, IndexError):  # it ends meanwhile
            kind = title(process)[1]
            handles, mib = found.get(kind, (0, 0))
            found[kind] = max(handles, process.num_fds()), max(mib, process.memory_info().rss // MIB)
    return found


async def is_idle(redis: Redis) -> bool:
    """As `idle`. Requests of a killed gateway, their tokens and answers to jobs may stay a while."""
    found = {key for kind in ("request", "result") async for key in redis.scan_iter(KEYS.key(kind, "*"))}
    expiring = {key for key in found if await redis.ttl(key) > 0}
    return await idle(redis, expiring | {key.replace(b":request:", b":tokens:") for key in expiring})


async def describe_busy(redis: Redis) -> str:
    """Describe what is not idle: the batcher's counts, entries of requests and jobs, and keys by kind."""
    state: dict[bytes, bytes] = await redis.hgetall(KEYS.state)  # type: ignore[misc]
    kinds = Counter([key.decode().split(":")[2] async for key in redis.scan_iter(KEYS.key("*"))])
    waiting = await redis.xlen(KEYS.requests), await redis.xlen(KEYS.submit)
    return f"{state}; entries of requests and of submit {waiting}; keys: {counts(kinds)}"


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
