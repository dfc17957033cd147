"""Outcome: what came of a run of kills, in words, and what is left over."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from redis.asyncio import Redis

from benchmarks.chaos.attack import Attack
from benchmarks.chaos.clients import Tally
from common.broker.keys import Keys
from tests.support.chaos.engine import NUM_BLOCKS

KEYS = Keys("default")
COUNTS = {"gateway": 2, "batcher": 2, "agent": 3, "engine": 3}


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
    """

    tally: Tally
    attack: Attack
    interrupted: bool = False
    left_over: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        return [*self.tally.wrong, *(f"{name} never came back" for name in self.attack.lost), *self.left_over]


def describe(plan: Plan, outcome: Outcome) -> str:
    tally, attack = outcome.tally, outcome.attack
    lines = [
        f"seed {plan.seed}: {attack.hits.total()} kills: {counts(attack.hits)}",
        f"answers checked: {tally.whole.total()} ({counts(tally.whole)}); {tally.num_tokens} tokens",
        f"of these, streams that broke off and went on: {tally.resumed.total()} ({counts(tally.resumed)})",
        f"cut by a gateway's death, right so far, and asked again: {tally.cut.total()} ({counts(tally.cut)})",
        f"refused and asked again: {tally.refused.total()} ({counts(tally.refused)})",
        *(f"wrong: {text}" for text in outcome.wrong),
        "interrupted: what is left over was not looked at" if outcome.interrupted else "",
        f"{time.strftime('%F %X')}, {plan.num_streams} streams, {attack.hits.total()} kills: "
        f"{tally.whole.total()} answers, {tally.num_tokens} tokens; processes that never came back "
        f"{len(attack.lost)}; wrong {len(outcome.wrong)}",
    ]
    return "\n".join(filter(None, lines))


def counts(found: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(found.items()))


STANDING = {
    *("workers", "processes", "batcher", "epoch", "clock", "control", "state", "requests", "worker"),
    *("gateway", "plans", "reports", "log", "metrics", "timeline", "submit", "tenants"),
    *("arq", "jobs"),
}
"""Keys of an idle fleet: all but those of requests and jobs."""
KEPT = [build("job-*") for build in (KEYS.job, KEYS.result, KEYS.reply, KEYS.request, KEYS.tokens)]
"""Keys that answered jobs keep for an hour. Requests over HTTP keep none."""


async def idle(redis: Redis, ignored: set[bytes]) -> bool:
    """Whether each process reports no request, row, block, stream or job, and no other key is left."""
    state: dict[bytes, bytes] = await redis.hgetall(KEYS.state)  # type: ignore[misc]
    keys = [key async for key in redis.scan_iter(KEYS.gateway("*"))]
    gateways: list[dict[bytes, bytes]] = [await redis.hgetall(key) for key in keys]  # type: ignore[misc]
    kept = ignored | {key for pattern in KEPT async for key in redis.scan_iter(pattern)}
    kinds = {key.decode().split(":")[2] async for key in redis.scan_iter(KEYS.key("*")) if key not in kept}
    busy = [int(state.get(name, b"1")) for name in (b"requests", b"rows", b"blocks")]
    return (
        not any(busy)
        and all(gateway.get(b"streams", b"0") == b"0" for gateway in gateways)  # or its heartbeat has expired
        and kinds <= STANDING
        and not await redis.xlen(KEYS.requests)
        and not await redis.xlen(KEYS.submit)
    )


async def is_idle(redis: Redis) -> bool:
    """As `idle`. Requests of a killed gateway, their tokens and answers to jobs may stay a while."""
    found = {key for kind in ("request", "result") async for key in redis.scan_iter(KEYS.key(kind, "*"))}
    expiring = {key for key in found if await redis.ttl(key) > 0}
    return await idle(redis, expiring | {key.replace(b":request:", b":tokens:") for key in expiring})
