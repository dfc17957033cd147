"""Prints how long streams pause while all workers are replaced: `python -m benchmarks.batcher.replace_fleet`.

A fleet of 4 workers of 64 rows without a model (each step takes STEP_MS by the clock, and 0.1 ms for each
prompt token) serves 256 streams, which follow each other. With `--how roll`, `tokenfleet roll` replaces every
process; with `--how drain` one worker after the other is drained and started again in its place, so 192 rows
have room. First comes as long a time without that (BEFORE_S).

Printed: the longest pause of each client (p50, p99, longest), before, meanwhile, and for each process;
answers with wrong ids, and streams that broke. Exit status 1 if there is one of these, or with `roll` if the
p99 is over LIMIT_S.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from itertools import pairwise

from redis.asyncio import Redis

from benchmarks.client import Stream, stream
from common.broker import worker_scripts
from common.broker.client import connect
from common.broker.keys import Keys
from common.broker.lua import run_script
from tests.support.chaos.chaos_fleet import ChaosFleet
from tests.support.chaos.engine import TOKEN_US
from tests.support.chaos.figures import count_resumes
from tests.support.releases.mixed_pool import expected_ids
from tests.support.waiting import wait_until

KEYS = Keys("default")
NUM_WORKERS, NUM_ROWS, STEP_MS, TOKEN_MS = 4, 64, 150.0, 0.1
BEFORE_S = 10.0
NUM_TOKENS, PROMPT_WORDS = 300, 150
LIMIT_S = 1.0
Marks = list[tuple[str, float]]
"""What was replaced, and when."""


class Client:
    """A client that reads one stream after the other.

    Attributes:
        answers: all that it has asked for.
        num_wrong: answers with other ids than an undisturbed worker gives.
    """

    def __init__(self, number: int) -> None:
        self.prompt = f"number {number} " + " ".join(["and"] * PROMPT_WORDS)
        self.expected = expected_ids(self.prompt, NUM_TOKENS)
        self.answers: list[Stream] = []
        self.num_wrong = 0

    async def ask_on(self, url: str) -> None:
        body = {"inputs": self.prompt, "parameters": {"max_new_tokens": NUM_TOKENS}}
        while True:
            self.answers.append(answer := Stream())
            await stream(f"{url}/generate_stream", body, answer)
            self.num_wrong += answer.ids != self.expected

    def longest_pause_s(self, begin_s: float, end_s: float) -> float:
        """Return the longest gap between two tokens of one stream within a time."""
        gaps = (
            later - sooner
            for answer in self.answers
            for sooner, later in pairwise(answer.times_s)
            if later > begin_s and sooner < end_s
        )
        return max(gaps, default=0.0)


async def ready_workers(redis: Redis) -> set[str]:
    names = [name.decode() for name in await redis.zrange(KEYS.workers, 0, -1)]
    return {name for name in names if await redis.hget(KEYS.worker(name), "state") == b"ready"}  # type: ignore[misc]


async def drain_all(redis: Redis, marks: Marks) -> None:
    """Drain one worker after the other, as `tokenfleet drain` does, and wait for the one in its place."""
    for worker in sorted(await ready_workers(redis)):
        await run_script(redis, worker_scripts.drain(KEYS, worker))

        async def is_replaced(old: str = worker) -> bool:
            ready = await ready_workers(redis)
            return old not in ready and len(ready) == NUM_WORKERS

        await wait_until(is_replaced, 120)
        marks.append((worker, time.monotonic()))


async def roll(fleet: ChaosFleet, marks: Marks) -> None:
    words = [sys.executable, "-P", "-m", "deploy.cli", "roll", "--pid", str(fleet.launcher.pid)]
    environ = os.environ | {"PARENT_PID": "0"}
    process = await asyncio.create_subprocess_exec(*words, env=environ, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    async for line in process.stdout:
        marks.append((line.decode().split()[0], time.monotonic()))
    assert await process.wait() == 0, fleet.errors()[-6000:]


def pauses(clients: Sequence[Client], begin_s: float, end_s: float) -> list[float]:
    return sorted(client.longest_pause_s(begin_s, end_s) for client in clients)


def percentile(values: Sequence[float], share: float) -> float:
    return values[int(share * (len(values) - 1))]


def describe(clients: Sequence[Client], begin_s: float, end_s: float) -> str:
    """Return the longest pauses of clients within a time, in words."""
    found = pauses(clients, begin_s, end_s)
    p50, p99 = percentile(found, 0.5), percentile(found, 0.99)
    return f"longest pause p50 {p50:.2f} s, p99 {p99:.2f} s, longest {found[-1]:.2f} s"


async def main(how: str, num_clients: int) -> int:
    settings = {"num_workers": NUM_WORKERS, "max_batch_size": NUM_ROWS, "num_batchers": 2, "num_gateways": 2}
    os.environ[TOKEN_US] = str(TOKEN_MS * 1e3)
    with ChaosFleet(STEP_MS, has_proxy=False, **settings) as fleet:
        clients = [Client(number) for number in range(num_clients)]
        tasks = [asyncio.create_task(client.ask_on(fleet.base_url)) for client in clients]
        await wait_until(lambda: all(client.answers and client.answers[-1].frames for client in clients), 60)
        marks: Marks = [("", time.monotonic())]
        await asyncio.wait(tasks, timeout=BEFORE_S)
        marks.append(("before", time.monotonic()))
        if how == "drain":
            async with connect(fleet.redis_url) as redis:
                await drain_all(redis, marks)
        else:
            await roll(fleet, marks)
        resumes = await count_resumes(fleet.base_url)
        broken = sum(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for (_, begin_s), (name, end_s) in pairwise(marks):
        print(f"{name}: {end_s - begin_s:.1f} s; {describe(clients, begin_s, end_s)}")
    begin_s, end_s = marks[1][1], marks[-1][1]
    wrong = sum(client.num_wrong for client in clients)
    answers = sum(len(client.answers) for client in clients)
    print(
        f"{how}: {num_clients} streams, {end_s - begin_s:.1f} s; {describe(clients, begin_s, end_s)}; "
        f"{answers} answers, {wrong} with wrong ids, {broken} clients cut off; "
        f"went on elsewhere: {dict(resumes)}"
    )
    p99 = percentile(pauses(clients, begin_s, end_s), 0.99)
    return int(wrong > 0 or broken > 0 or (how == "roll" and p99 > LIMIT_S))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--how", choices=("roll", "drain"), default="roll")
    parser.add_argument("--clients", type=int, default=NUM_WORKERS * NUM_ROWS)
    parsed = parser.parse_args()
    sys.exit(asyncio.run(main(parsed.how, parsed.clients)))
