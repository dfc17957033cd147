"""Prints what granting steps ahead gains over lock-step:
`python -m benchmarks.batcher.runahead [--real] [--slower 10]`.

One worker of 16 rows behind a broker that answers 0, 1 and 5 ms late; its engine's steps take 2 ms by the
clock, or with `--real` are those of the default model. HORIZON=1 is lock-step: a plan for each step.
`--slower N` makes steps, delays and the pauses of callers N times as long: figures in steps stay the same,
except for what a busy machine adds. Printed:

- round trip: from the admission of a request by an idle pool until its first step;
- start: the same while other rows run and there is room, p50 and p99, and p99 as round trip + steps;
- cancel: steps that a row still runs after its cancel, p50 and p99, and p99 less the round trip;
- idle: share of the time in which the engine runs no step while requests are live, mean and p99 of 0.25 s;
- busy: share of the rows that are in a step, while twice as many requests are live; over all time.
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from redis.asyncio import Redis

from common import model_files
from common.broker.client import connect
from common.broker.keys import Keys
from common.broker.pool_client import PoolClient, cancel_request
from common.messages.records import pack_ids
from common.messages.request import Generate, StoppingParams
from tests.support import broker_state, brokers
from tests.support.fleet.batchers import batcher
from tests.support.machine.ports import free_port
from tests.support.runahead.record import Record
from tests.support.runahead.recorded_engine import RECORD, STEP_MS
from tests.support.waiting import wait_until

ROWS, PROMPT_TOKENS, MEAN_TOKENS = 16, 16, 128
STEP = 2.0
DELAYS_MS = (0.0, 1.0, 5.0)
FIRST_IDS = 1_000
"""The first id of a prompt is the number of its request, from here on."""
KEYS = Keys("default")
ROOT = Path(__file__).parents[2]


class Load:
    """Requests of one run.

    Attributes:
        slower: by this the pauses of callers are multiplied.
        admitted_s, cancelled_s: when, by number of the request.
    """

    def __init__(self, redis: Redis, seed: int, slower: float) -> None:
        self.redis = redis
        self.slower = slower
        self.random = random.Random(seed)
        self.numbers = itertools.count()
        self.admitted_s: dict[int, float] = {}
        self.cancelled_s: dict[int, float] = {}

    async def admit(self, max_new_tokens: int) -> int:
        number = next(self.numbers)
        first = FIRST_IDS + number
        prompt = pack_ids([first, *self.random.choices(range(300, 30_000), k=PROMPT_TOKENS - 1)])
        stopping = StoppingParams(max_new_tokens, ignore_eos=True)
        await broker_state.admit(self.redis, Generate(f"r{number}", "d", prompt, stopping))
        self.admitted_s[number] = time.monotonic()
        return number

    async def cancel(self, number: int) -> None:
        if await cancel_request(PoolClient(self.redis, KEYS), f"r{number}"):
            self.cancelled_s[number] = time.monotonic()

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(self.slower * seconds)

    async def is_empty(self) -> bool:
        return not await self.redis.xlen(KEYS.requests)

    async def ask_idle_pool(self, count: int) -> list[int]:
        """Run one request after the other."""
        numbers = []
        for _ in range(count):
            numbers.append(await self.admit(2))
            await wait_until(self.is_empty)
            await self.pause(self.random.uniform(0.0, 0.02))
        return numbers

    async def arrive(self, count: int) -> list[int]:
        """Run requests that find room; one in three is cancelled."""
        places = asyncio.Semaphore(ROWS // 2)

        async def ask() -> int:
            async with places:
                await self.pause(self.random.expovariate(20.0))
                number = await self.admit(MEAN_TOKENS)
                if number % 3 == 0:
                    await self.pause(self.random.uniform(0.05, 0.15))
                    await self.cancel(number)
                await wait_until(lambda: self.has_ended(number))
                return number

        return await asyncio.gather(*(ask() for _ in range(count)))

    async def has_ended(self, number: int) -> bool:
        return bool(await self.redis.hexists(KEYS.request(f"r{number}"), "terminal"))  # type: ignore[misc]

    async def fill(self, seconds: float) -> tuple[float, float]:
        """Run twice as many requests as there are rows. Returns when that began and ended."""
        begin_s = time.monotonic()
        while time.monotonic() < begin_s + seconds:
            for _ in range(2 * ROWS - await self.redis.xlen(KEYS.requests)):
                await self.admit(1 + min(8 * MEAN_TOKENS, int(self.random.expovariate(1 / MEAN_TOKENS))))
            await self.pause(0.005)
        return begin_s + 0.5, time.monotonic()


@contextlib.contextmanager
def child(module: str, *args: str, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    own = {"PARENT_PID": str(os.getpid()), "PYTHONPATH": str(ROOT)}
    variables = {**os.environ, **environ, **own}
    process = subprocess.Popen([sys.executable, "-m", module, *args], env=variables)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def measure(delay_ms: float, horizon: int, real: bool, seconds: float, slower: float) -> str:
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        broker, record = stack.enter_context(brokers.running()), Path(directory, "record")
        url = brokers.open_port(broker.url)
        if delay_ms:
            ports = free_port(), urlsplit(url).port
            words = [*map(str, ports), str(slower * delay_ms)]
            stack.enter_context(child("tests.support.runahead.slow_proxy", *words))
            url = f"redis://127.0.0.1:{ports[0]}/0"
        settings = {"HORIZON": str(horizon), "MAX_BATCH_SIZE": str(ROWS), "LOG_LEVEL": "warning"}
        settings |= {"REDIS_URL": url, "MODEL_ID": str(model_files.resolve("smollm2"))}
        engine = {RECORD: str(record)} | ({} if real else {STEP_MS: str(slower * STEP)})
        stack.enter_context(batcher(url, WORKER_TTL_S="10", HEARTBEAT_S="0.5", **settings))
        stack.enter_context(child("tests.support.runahead.recorded_worker", **settings, **engine))
        async with connect(broker.url) as redis:
            await wait_until(lambda: redis.hget(KEYS.state, "workers"))
            load = Load(redis, 1, slower)
            await load.ask_idle_pool(3)
            idle = await load.ask_idle_pool(20)
            begin_s = time.monotonic()
            arriving = await load.arrive(int((3 if real else 16) * seconds))
            arrived = begin_s + 0.5, time.monotonic() - 0.5
            filled = await load.fill(slower * seconds)
        return describe(Record.read(record, FIRST_IDS), load, idle, arriving, arrived, filled)


def describe(
    record: Record,
    load: Load,
    idle: list[int],
    arriving: list[int],
    arrived: tuple[float, float],
    filled: tuple[float, float],
) -> str:
    def starts_ms(numbers: list[int]) -> list[float]:
        return [
            (record.steps_of(number)[0] - load.admitted_s[number]) * 1e3
            for number in numbers
            if record.steps_of(number)
        ]

    step_ms = statistics.median((end - begin) * 1e3 for begin, end, _ in record.steps)
    trip_ms = statistics.median(starts_ms(idle))
    late = starts_ms(arriving)
    runs_on = [
        float(sum(begin_s > at_s for begin_s in record.steps_of(number)))
        for number, at_s in load.cancelled_s.items()
    ]
    stops = percentile(runs_on, 0.99)
    shares = record.idle(*arrived) + record.idle(*filled)
    return (
        f"step {step_ms:4.1f} ms, round trip {trip_ms:4.1f} ms; "
        f"start {statistics.median(late):5.1f}, p99 {percentile(late, 0.99):5.1f} ms "
        f"(round trip {(percentile(late, 0.99) - trip_ms) / step_ms:+.1f} steps); "
        f"cancel {statistics.median(runs_on):3.0f}, p99 {stops:3.0f} steps "
        f"(round trip {stops - trip_ms / step_ms:+.1f}); "
        f"idle {statistics.mean(shares):5.1%}, p99 {percentile(shares, 0.99):5.1%}; "
        f"busy {record.busy(*filled) / ROWS:5.1%}"
    )


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(len(values) * share)]


async def main(real: bool, seconds: float, slower: float, delays_ms: list[float]) -> None:
    for delay_ms in delays_ms:
        for name, horizon in (("lock-step", 1), ("granted ahead", 256)):
            figures = await measure(delay_ms, horizon, real, seconds, slower)
            print(f"broker {delay_ms:.0f} ms late, {name:13}: {figures}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each of two loads")
    parser.add_argument("--delay", type=float, action="append", help="ms; again for another")
    parser.add_argument("--slower", type=float, default=1.0)
    args = parser.parse_args()
    asyncio.run(main(args.real, args.seconds, args.slower, args.delay or list(DELAYS_MS)))
