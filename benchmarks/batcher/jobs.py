"""Prints how well a batch fills what interactive callers leave:
`python -m benchmarks.batcher.jobs [--engine real] [--through jobs]`.

Callers of the class `interactive` come at random, and bulk work of the same shape waits in a queue that is
never empty: the lines of a batch (/v1/batches), or jobs through Redis. In each run a fresh fleet has three
phases of `--seconds`:

- alone: callers, and nothing else;
- bulk alone: bulk work, and nobody calls;
- both. The callers come at the same moments as before.

Printed are the callers' time to first token and the tokens/s that all workers generate together; in the
end the medians over the runs of two ratios: callers' p99, both to alone, and tokens/s, both to bulk alone.

`--engine scripted`: two gateways, and two workers of 16 rows without a model; a step takes 8 ms by the
clock, and 0.04 ms more for each prompt token. `--engine real`: one worker of the bundled model with 32 rows.

Exit status 1 if a ratio is missed (MOST_LATER, LEAST_SHARE), a caller is refused or gets too few tokens, or
the bulk work ends too soon.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from itertools import count

from redis.asyncio import Redis

from benchmarks.batcher.bulk import COMPLETIONS, KEYS, WAYS, Send, Shape
from benchmarks.batcher.timed_gaps import LEAST_SHARE, MOST_LATER
from benchmarks.client import stream
from benchmarks.serve import percentile
from common.broker.client import connect
from common.metrics import catalogue
from tests.support.chaos.chaos_fleet import ChaosFleet
from tests.support.fleet.fleet import Fleet
from tests.support.waiting import wait_until

STEP_MS, TOKEN_US = 8.0, 40
FULL_ROUNDS = 2
"""Bulk work has filled the fleet once it has generated this many answers of every row."""
WARM_UP_S, FILL_S, SETTLE_S = 5.0, 300.0, 0.3
TOKENS = catalogue.TOKENS.field(())
CALLERS = count(10_000_000)
"""Seeds of the callers' prompts."""


@dataclass(frozen=True)
class Setup:
    """A kind of fleet and its load.

    Attributes:
        per_s: callers a second.
        num_rows: of one worker.
    """

    model: str
    shape: Shape
    per_s: float
    num_workers: int
    num_rows: int
    step_ms: float | None

    def fleet(self, files: str) -> Fleet:
        extra = {} if self.step_ms is None else {"chaos_token_us": TOKEN_US}
        return ChaosFleet(
            self.step_ms,
            has_proxy=False,
            num_workers=self.num_workers,
            num_gateways=2,
            preload_gateway=False,
            max_batch_size=self.num_rows,
            files_dir=files,
            **extra,
        )


SETUPS = {
    "scripted": Setup("default", Shape(512, 64), 5.0, 2, 16, STEP_MS),
    "real": Setup("default", Shape(128, 32), 0.5, 1, 32, None),
}


@dataclass(frozen=True)
class Phase:
    """What a phase found: sorted times to first token, in ms, and tokens/s of all workers."""

    firsts_ms: list[float]
    tokens_per_s: float

    @property
    def p99_ms(self) -> float:
        return percentile(self.firsts_ms, 0.99)

    def describe(self) -> str:
        callers = (
            f", {len(self.firsts_ms)} callers, first token p50 {statistics.median(self.firsts_ms):.0f} ms, "
            f"p99 {self.p99_ms:.0f} ms"
            if self.firsts_ms
            else ""
        )
        return f"{self.tokens_per_s:.0f} tokens/s{callers}"


@dataclass(frozen=True)
class Ratios:
    """Callers' p99, both to alone; tokens/s, both to bulk alone."""

    later: float
    share: float


class Run:
    """The three phases of one fleet. `seed`: of the moments at which callers come."""

    def __init__(self, setup: Setup, fleet: Fleet, redis: Redis, seconds: float, seed: int) -> None:
        self.setup = setup
        self.fleet = fleet
        self.redis = redis
        self.seconds = seconds
        self.seed = seed
        self.loop = asyncio.get_running_loop()

    async def call(self) -> float:
        """One caller's time to first token, in ms. Raises HttpStatusError if it is refused."""
        body = self.setup.shape.body(self.setup.model, next(CALLERS))
        answer = await stream(f"{self.fleet.base_url}{COMPLETIONS}", body | {"stream": True, "priority": -1})
        return (answer.times_s[0] - answer.sent_s) * 1e3

    async def callers(self, seconds: float) -> list[float]:
        """The sorted times to first token of callers that come within `seconds`."""
        draw, calls = random.Random(self.seed), []
        end_s = self.loop.time() + seconds
        while self.loop.time() < end_s:
            calls.append(asyncio.create_task(self.call()))
            await asyncio.sleep(draw.expovariate(self.setup.per_s))
        return sorted(await asyncio.gather(*calls))

    async def generated(self) -> tuple[float, float]:
        """How many tokens workers have generated so far, and when: workers count once a second, at the same
        moment.
        """
        before = await self.read_generated()
        await wait_until(self.has_counted(before))
        moment_s = self.loop.time()
        await asyncio.sleep(SETTLE_S)
        return await self.read_generated(), moment_s

    def has_counted(self, before: float) -> Callable[[], Awaitable[bool]]:
        async def is_more() -> bool:
            return await self.read_generated() > before

        return is_more

    async def read_generated(self) -> float:
        return float(await self.redis.hget(KEYS.metrics, TOKENS) or 0)  # type: ignore[misc]

    async def phase(self, name: str, with_callers: bool = True, with_bulk: bool = True) -> Phase:
        """Runs a phase and prints it. Tokens/s are counted beside bulk work only."""
        sooner = await self.generated() if with_bulk else (0.0, 0.0)
        if with_callers:
            firsts_ms = await self.callers(self.seconds)
        else:
            firsts_ms = await asyncio.sleep(self.seconds, [])
        later = await self.generated() if with_bulk else (0.0, 1.0)
        found = Phase(firsts_ms, (later[0] - sooner[0]) / (later[1] - sooner[1]))
        print(f"  {name}: {found.describe()}", flush=True)
        return found

    async def fill(self) -> None:
        """Waits until bulk work has filled the fleet."""
        setup = self.setup
        enough = FULL_ROUNDS * setup.num_workers * setup.num_rows * setup.shape.out_tokens
        await wait_until(self.has_counted(await self.read_generated() + enough), FILL_S)

    async def ratios(self, send: Send, num_requests: int) -> Ratios:
        """Runs the three phases. Raises TimeoutError if bulk work ends too soon."""
        await self.callers(WARM_UP_S)
        alone = await self.phase("alone", with_bulk=False)
        await send(self.fleet, self.setup.model, self.setup.shape, range(num_requests))
        await self.fill()
        bulk = await self.phase("bulk alone", with_callers=False)
        both = await self.phase("both")
        await self.fill()  # it has not ended yet
        return Ratios(both.p99_ms / alone.p99_ms, both.tokens_per_s / bulk.tokens_per_s)


async def measure(setup: Setup, through: str, num_requests: int, seconds: float, seed: int) -> Ratios:
    with tempfile.TemporaryDirectory() as files:
        fleet = setup.fleet(files)
        with fleet:
            async with connect(fleet.redis_url) as redis:
                run = Run(setup, fleet, redis, seconds, seed)
                return await run.ratios(WAYS[through], num_requests)


def summary(found: list[Ratios]) -> int:
    """Prints the medians → the exit status."""
    later = statistics.median(one.later for one in found)
    share = statistics.median(one.share for one in found)
    print(
        f"medians of {len(found)}: callers' p99 {later:.2f} times alone (at most {MOST_LATER} wanted), "
        f"tokens/s {share:.3f} of bulk alone (at least {LEAST_SHARE})"
    )
    return int(later > MOST_LATER or share < LEAST_SHARE)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=SETUPS, default="scripted")
    parser.add_argument("--through", choices=WAYS, default="batches")
    parser.add_argument("--requests", type=int, default=10_000, help="of bulk work")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each phase")
    parser.add_argument("--per-s", type=float, help="callers a second")
    parser.add_argument("--rows", type=int, help="of one worker")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    setup = SETUPS[args.engine]
    setup = replace(setup, per_s=args.per_s or setup.per_s, num_rows=args.rows or setup.num_rows)
    found = []
    for seed in range(1, args.runs + 1):
        print(f"run {seed}: {args.engine} engines, through {args.through}", flush=True)
        found.append(asyncio.run(measure(setup, args.through, args.requests, args.seconds, seed)))
        print(
            f"  callers' p99 {found[-1].later:.2f} times alone, tokens/s {found[-1].share:.3f} of bulk alone"
        )
    return summary(found)


if __name__ == "__main__":
    sys.exit(main())
