"""Prints whether kills cost a token: `python -m benchmarks.chaos [--kills 100] [--seed 1] [--model]`.

Streams of every kind run (greedy, seeded, two choices, answers in one piece, jobs through Redis and arq), of
all classes and two tenants, always the same number at once; with `--blocks 200` rows are preempted. Every few
seconds a random process of the fleet is hit: SIGKILL, or SIGSTOP and later SIGCONT. The broker is also
started with its file of a second before, or loses all its connections. One strike in three hits two processes
at once. Gateways lose 5% of the messages of their subscriptions.

Every answer is compared, token by token, with the undisturbed one, which is recorded first. Workers run
engines without a model, whose ids depend on all ids before them; `--model` runs the real ones. Exit status 1
if a token is lost or repeated, a request fails, a process does not come back, or something is left over.
SIGINT and SIGTERM end the run: what was counted so far is printed, and the fleet's log is kept.
"""

import argparse
import asyncio
import math
import shutil
import signal
import sys
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.chaos.attack import BROKER_WAYS, KINDS, Attack, draw_strikes, targets_of
from benchmarks.chaos.clients import Crowd, Tally, make_cases, make_reader
from benchmarks.chaos.outcome import KEYS, Outcome, Plan, describe, is_idle
from common.broker.client import connect
from tests.support.chaos.launcher import ChaosFleet
from tests.support.waiting import wait_until

IDLE_S = 120.0


async def run(plan: Plan) -> Outcome:
    """Runs a fleet, its clients and the strikes. A failure or a cancel ends it; what was counted remains."""
    async with started(plan) as fleet:
        await asyncio.to_thread(fleet.ready)
        outcome = Outcome(Tally(), Attack(fleet, fleet.directory, Path(fleet.broker["files"])))
        try:
            await play(plan, fleet, outcome)
        except asyncio.CancelledError:
            outcome.interrupted = True
        except Exception as error:
            traceback.print_exc()
            outcome.left_over.append(f"the run ended early: {error!r}")
    return outcome


async def play(plan: Plan, fleet: ChaosFleet, outcome: Outcome) -> None:
    # not those of now: the fleet answers before the last of them has its name
    num_processes = 1 + sum(count for kind, count in plan.counts.items() if kind != "engine")
    async with make_reader(fleet.base_url, fleet.redis_url, str(plan.seed)) as reader:
        cases = make_cases(plan.seed, plan.num_cases, plan.num_tokens)
        crowd = Crowd(reader, cases, plan.seed, outcome.tally)
        log("undisturbed answers")
        await crowd.learn(plan.num_streams)
        await strike_under_load(plan, crowd, outcome.attack)
        log("all processes are back")
        await outcome.attack.settled(num_processes, plan.counts["agent"])
    log("nothing is left over")
    await look_for_leftovers(outcome, fleet)


@asynccontextmanager
async def started(plan: Plan) -> AsyncIterator[ChaosFleet]:
    """The fleet, just started; its log is kept where the plan says."""
    counts: dict[str, Any] = {f"num_{kind}s": plan.counts[kind] for kind in ("gateway", "batcher")}
    counts |= {"num_workers": plan.counts["agent"], "speculate": plan.speculate}
    if plan.step_ms is None:
        counts |= {"dtype": "float32", "threads": 1}  # rounded ids differ from batch to batch
    counts |= {"stopped_grace_s": plan.stopped_grace_s, "tokenfleet_test_lose": f"{plan.loss}:{plan.seed}"}
    fleet = ChaosFleet(plan.step_ms, plan.num_blocks, kv_cache_bytes="256MiB", **counts)
    try:
        fleet.start()
        yield fleet
    finally:
        if plan.log_to:
            shutil.copy(fleet.directory / "stderr", plan.log_to)
        fleet.kill()


async def strike_under_load(plan: Plan, crowd: Crowd, attack: Attack) -> None:
    """Strikes until the planned number of hits, and waits for the answers."""
    running = asyncio.create_task(crowd.run(plan.num_streams))
    noting = asyncio.create_task(attack.note_files())
    try:
        await strike_often(plan, crowd, attack, running)
        crowd.stopping.set()
        log("the last answers")
        await running
    finally:
        noting.cancel()
        running.cancel()


async def strike_often(plan: Plan, crowd: Crowd, attack: Attack, running: asyncio.Task[None]) -> None:
    strikes = draw_strikes(plan.seed, targets_of(plan.counts), plan.every_s, plan.spared)
    while attack.hits.total() < plan.kills and not running.done():
        [strike] = islice(strikes, 1)
        await asyncio.sleep(strike.pause_s)
        victims = await attack.strike(strike)
        if any(hit.kind == "gateway" for hit in strike.hits):
            crowd.gateway_hit_s = math.inf  # one that is killed takes connections until it is gone
            await attack.gone(victims)
            # one that is stopped takes them until it goes on, or is ended for that
            crowd.gateway_hit_s = time.monotonic() + max(hit.stop_s for hit in strike.hits)
        log(f"{attack.hits.total():4} {strike}")


async def look_for_leftovers(outcome: Outcome, fleet: ChaosFleet) -> None:
    async with connect(fleet.redis_url) as redis:
        try:
            await wait_until(lambda: is_idle(redis), IDLE_S)
        except TimeoutError:
            outcome.left_over.append(f"not idle after {IDLE_S:.0f} s: {await redis.hgetall(KEYS.state)}")  # type: ignore[misc]


def log(text: str) -> None:
    """Prints what the run waits for, or has done."""
    print(f"{time.strftime('%X')} {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=time.time_ns() % 100_000, help="of a run to repeat")
    parser.add_argument("--kills", type=int, default=Plan.kills)
    parser.add_argument("--streams", dest="num_streams", type=int, default=Plan.num_streams)
    parser.add_argument(
        "--every", dest="every_s", type=float, default=Plan.every_s, help="mean between strikes"
    )
    parser.add_argument(
        "--tokens", dest="num_tokens", type=int, default=Plan.num_tokens, help="of each stream"
    )
    parser.add_argument("--loss", type=float, default=Plan.loss, help="share of messages that gateways lose")
    choices = sorted({*KINDS, *BROKER_WAYS, "stop"} - {"kill"})
    spared = "what is not to happen"
    parser.add_argument("--spare", dest="spared", nargs="+", default=(), choices=choices, help=spared)
    model: dict[str, Any] = {"action": "store_const", "const": None, "default": Plan.step_ms}
    parser.add_argument("--model", dest="step_ms", **model, help="real engines with the embedded model")
    blocks = "of each cache, without --model"
    parser.add_argument("--blocks", dest="num_blocks", type=int, default=Plan.num_blocks, help=blocks)
    parser.add_argument("--speculate", type=int, default=0, help="tokens that rows propose at a time")
    grace = "STOPPED_GRACE_S: 0 lets the stopped go on with what they held"
    parser.add_argument(
        "--stopped-grace", dest="stopped_grace_s", type=float, default=Plan.stopped_grace_s, help=grace
    )
    parser.add_argument("--log", dest="log_to", type=Path, help="file for what the fleet logs")
    plan = Plan(**vars(parser.parse_args()))
    print(f"seed {plan.seed}", flush=True)
    outcome = uvloop.run(run_until_told(plan))
    print(describe(plan, outcome), flush=True)
    return 1 if outcome.wrong or outcome.interrupted else 0


async def run_until_told(plan: Plan) -> Outcome:
    """As `run`, until it is done or a signal ends it."""
    running = asyncio.create_task(run(plan))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, running.cancel)
    return await running


if __name__ == "__main__":
    sys.exit(main())
