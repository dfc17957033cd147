"""Prints what kills cost: `python -m benchmarks.chaos [--kills 100] [--seed 1] [--model]`.

Streams of every kind run (greedy, seeded, two choices, answers in one piece, jobs through Redis and arq),
always as many at once. Every few seconds processes of the fleet are hit, drawn from all: SIGKILL, SIGSTOP and
SIGCONT; of the broker also a start with its file of a second before, and all its connections cut. One strike
in three hits two processes at once. Gateways lose 5% of the messages of their subscriptions.

Every answer is compared, token by token, with the undisturbed one, which is learnt first. Workers run engines
without a model, whose ids depend on all ids before them; `--model` runs the real ones. It ends with 1 when
a token is lost or repeated, a request fails, a process does not come back, or something is left over.
"""

import argparse
import asyncio
import math
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import uvloop

from common.broker.client import connect
from tests.support.chaos.attack import Attack
from tests.support.chaos.cases import make_cases, make_reader
from tests.support.chaos.chaos_fleet import ChaosFleet
from tests.support.chaos.crowd import Crowd, Tally
from tests.support.chaos.figures import (
    MIB,
    Holdings,
    count_keys,
    describe_busy,
    describe_pauses,
    find_pauses,
    is_idle,
)
from tests.support.chaos.strikes import BROKER_WAYS, KINDS, Targets, draw_strikes
from tests.support.waiting import wait_until

COUNTS = {"gateway": 2, "batcher": 2, "agent": 3, "engine": 3, "jobs": 2}
IDLE_S = 120.0
NUM_LONGEST = 8
MOST_HANDLES, MOST_MEMORY = 64, 96 * MIB
"""How much more a process may hold afterwards than one of its kind held before."""


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        num_cases: different requests of each kind.
        counts: processes by kind.
        spared: kinds of processes and ways to hit them that are left out.
        every_s: mean time between two strikes.
        loss: share of the messages of subscriptions that are lost.
        step_ms: of an engine without a model; None runs the model.
    """

    seed: int = 1
    kills: int = 100
    num_streams: int = 64
    every_s: float = 2.5
    num_tokens: int = 200
    num_cases: int = 16
    spared: Sequence[str] = ()
    loss: float = 0.05
    counts: Mapping[str, int] = field(default_factory=lambda: COUNTS)
    step_ms: float | None = 40.0
    log_to: Path | None = None


@dataclass
class Outcome:
    """What came of it; `wrong` is empty where all is as it must be."""

    tally: Tally
    attack: Attack
    num_dropped: int = 0
    before: Holdings | None = None
    after: Holdings | None = None
    keys: Counter[str] = field(default_factory=Counter)
    left_over: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        return [*self.tally.wrong, *(f"{name} never came back" for name in self.attack.lost), *self.left_over]


async def run(plan: Plan) -> Outcome:
    """Runs a fleet, its clients and the strikes."""
    draw = random.Random(plan.seed)
    async with started(plan) as fleet, fleet.proxy(draw) as proxy:
        await asyncio.to_thread(fleet.ready)
        attack = Attack(fleet, fleet.directory, Path(fleet.broker["files"]))
        num_processes = len(fleet.pids())
        async with make_reader(fleet.base_url, fleet.redis_url, str(plan.seed)) as reader:
            crowd = Crowd(reader, make_cases(plan.seed, plan.num_cases, plan.num_tokens), plan.seed)
            log("undisturbed answers")
            await crowd.learn(plan.num_streams)
            outcome = Outcome(crowd.tally, attack, before=Holdings.of(fleet))
            proxy.share = plan.loss
            await strike_under_load(plan, crowd, attack)
            log("all processes are back")
            await attack.settled(num_processes, plan.counts["agent"])
        log("nothing is left over")
        await look_for_leftovers(outcome, fleet)
        outcome.num_dropped = proxy.num_dropped
    return outcome


@asynccontextmanager
async def started(plan: Plan) -> AsyncIterator[ChaosFleet]:
    """The fleet, just started; its log is kept where the plan says."""
    counts: dict[str, Any] = {
        f"num_{kind}{'' if kind == 'jobs' else 's'}": plan.counts[kind]
        for kind in ("gateway", "batcher", "jobs")
    }
    fleet = ChaosFleet(plan.step_ms, num_workers=plan.counts["agent"], kv_cache_bytes="256MiB", **counts)
    fleet.start()
    try:
        yield fleet
    finally:
        if plan.log_to:
            shutil.copy(fleet.directory / "stderr", plan.log_to)
        fleet.kill()


async def strike_under_load(plan: Plan, crowd: Crowd, attack: Attack) -> None:
    """Strikes until there were as many hits as planned, and waits for the answers."""
    noting = asyncio.create_task(attack.note_files())
    running = asyncio.create_task(crowd.run(plan.num_streams))
    strikes = draw_strikes(plan.seed, Targets.of(plan.counts), plan.every_s, plan.spared)
    while attack.hits.total() < plan.kills and not running.done():
        [strike] = islice(strikes, 1)
        await asyncio.sleep(strike.pause_s)
        victims = await attack.strike(strike)
        if any(hit.kind == "gateway" for hit in strike.hits):
            crowd.gateway_hit_s = math.inf  # one that is killed takes connections until it is gone
            await attack.gone(victims)
            crowd.gateway_hit_s = time.monotonic()
        log(f"{attack.hits.total():4} {strike}")
    crowd.stopping.set()
    log("the last answers")
    await running
    noting.cancel()


async def look_for_leftovers(outcome: Outcome, fleet: ChaosFleet) -> None:
    async with connect(fleet.redis_url) as redis:
        try:
            await wait_until(lambda: is_idle(redis), IDLE_S)
        except TimeoutError:
            outcome.left_over.append(f"not idle after {IDLE_S:.0f} s: {await describe_busy(redis)}")
        outcome.keys = await count_keys(redis)
    outcome.after = after = Holdings.of(fleet)
    assert outcome.before
    for kind, count in after.handles.items():
        if count > outcome.before.handles[kind] + MOST_HANDLES:
            outcome.left_over.append(f"{kind} has {count} handles")
    for kind, size in after.memory.items():
        if size > outcome.before.memory[kind] + MOST_MEMORY:
            outcome.left_over.append(f"{kind} has {size // MIB} MiB")


def log(text: str) -> None:
    """Prints what is waited for, or was done."""
    print(f"{time.strftime('%X')} {text}", flush=True)


def describe(plan: Plan, outcome: Outcome) -> str:
    tally, attack = outcome.tally, outcome.attack
    pauses = find_pauses(tally.choices, attack.struck)
    assert outcome.before and outcome.after
    lines = [
        f"seed {plan.seed}: {attack.hits.total()} kills, {len(attack.struck)} strikes: {counts(attack.hits)}",
        *(f"  {line}" for line in describe_pauses(pauses)),
        "the longest pauses:",
        *(f"  {pause}" for pause in pauses[:NUM_LONGEST]),
        f"messages lost: {outcome.num_dropped}",
        f"answers checked: {tally.whole.total()} ({counts(tally.whole)}); {tally.num_tokens} tokens",
        f"of these, streams that broke off and went on: {tally.resumed.total()} ({counts(tally.resumed)})",
        f"cut by a gateway's death, right so far, and asked again: {tally.cut.total()} ({counts(tally.cut)})",
        f"refused and asked again: {tally.refused.total()} ({counts(tally.refused)})",
        f"keys: {counts(outcome.keys)}",
        f"handles, before → after: {changes(outcome.before.handles, outcome.after.handles, 1)}",
        f"MiB, before → after: {changes(outcome.before.memory, outcome.after.memory, MIB)}",
        f"tokens lost {tally.num_lost}, repeated or foreign {tally.num_added}; "
        f"processes that never came back {len(attack.lost)}; wrong {len(outcome.wrong)}",
        *(f"  {text}" for text in outcome.wrong),
    ]
    return "\n".join(lines)


def counts(found: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(found.items()))


def changes(before: dict[str, int], after: dict[str, int], unit: int) -> str:
    return ", ".join(f"{kind} {before[kind] // unit} → {after[kind] // unit}" for kind in sorted(after))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000, help="of a run to repeat")
    parser.add_argument("--kills", type=int, default=Plan.kills)
    parser.add_argument("--streams", type=int, default=Plan.num_streams)
    parser.add_argument("--every", type=float, default=Plan.every_s, help="mean seconds between strikes")
    parser.add_argument("--tokens", type=int, default=Plan.num_tokens, help="new tokens of each stream")
    parser.add_argument("--loss", type=float, default=Plan.loss, help="share of messages that gateways lose")
    choices = sorted({*KINDS, *BROKER_WAYS, "stop"} - {"kill"})
    parser.add_argument("--spare", nargs="+", default=(), choices=choices, help="what is not to happen")
    parser.add_argument("--model", action="store_true", help="real engines with the embedded model")
    parser.add_argument("--log", type=Path, help="file for what the fleet logs")
    args = parser.parse_args()
    plan = Plan(
        seed=args.seed,
        kills=args.kills,
        num_streams=args.streams,
        every_s=args.every,
        num_tokens=args.tokens,
        spared=args.spare,
        loss=args.loss,
        step_ms=None if args.model else Plan.step_ms,
        log_to=args.log,
    )
    print(f"seed {plan.seed}", flush=True)
    outcome = uvloop.run(run(plan))
    print(describe(plan, outcome), flush=True)
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
