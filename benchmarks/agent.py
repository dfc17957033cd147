"""python -m benchmarks.agent: what a token costs the agent, from the engine's frame to its publication (text, stops, logs, events).

The engine is scripted and the broker is real. Microseconds of this process's CPU, so the broker's own work is not in it; medians of runs.
"""

import argparse
import statistics
import time
from itertools import count
from typing import Any

import uvloop
from tokenizers import Tokenizer

from common import model_files
from common.broker import connect
from common.keys import Keys
from common.messages import Generate, Plan, Start, Worker
from common.packing import pack_floats, pack_ids
from common.settings import Settings
from gpu_worker.agent import Agent
from gpu_worker.door import Step, decode, encode
from gpu_worker.table import Table
from tests import brokers

TEXT = "The lighthouse keeper counted the ships every evening and wrote their names in a blue book. " * 20
ROWS = (1, 32, 256)
TOKENS = 8192
"""Of one run, over all rows."""


class Silence:
    """An engine that is told everything and says nothing."""

    def send(self, grant: Any) -> None:
        pass


def step(at: int, num_rows: int, ids: list[int]) -> Step:
    sampled = [ids[(at + row) % len(ids)] for row in range(num_rows)]
    return Step(at, pack_ids(range(num_rows)), pack_ids([at] * num_rows), pack_ids(sampled), pack_floats([-1.5] * num_rows))


async def measure(redis: Any, tokenizer: Tokenizer, num_rows: int, number: int) -> float:
    """µs of CPU a token."""
    ids = tokenizer.encode(TEXT).ids
    keys, name = Keys("default"), f"w{number}"
    agent = Agent(Settings(), redis, Silence(), Table(tokenizer), Worker(name, name, "m", "bfloat16", 16, 10_000, 64, 100_000))  # type: ignore[arg-type]
    await agent.open()
    starts = []
    for row in range(num_rows):
        request = Generate(f"{number}-{row}", "d", pack_ids(ids[:30]), 10**6, stop=["xyz"] if row % 2 else [], channel=keys.events("g"))
        await redis.hset(keys.home(request.request_id), mapping={"digest": "d", "worker": name, "attempt": 1, "base": 0, "width": 1})
        starts.append(Start(row, 1, 0, b"", b"", request))
    agent.apply(Plan(1, 1, 10**6, 64, starts))
    frames = [encode(step(at, num_rows, ids)) for at in range(TOKENS // num_rows)]
    began = time.process_time()
    for frame in frames:
        agent.take_in(decode(frame[4:]))  # type: ignore[arg-type]
        await agent.flush()
    return (time.process_time() - began) / TOKENS * 1e6


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    tokenizer = Tokenizer.from_file(str(model_files.resolve("smollm2") / "tokenizer.json"))
    numbers = count()
    with brokers.running() as broker:
        redis = connect(broker.url)
        for num_rows in ROWS:
            costs = [await measure(redis, tokenizer, num_rows, next(numbers)) for _ in range(runs)]
            print(f"{num_rows:4} rows: {statistics.median(costs):6.1f} µs a token ({min(costs):.1f} to {max(costs):.1f})")
        await redis.aclose()


if __name__ == "__main__":
    uvloop.run(main())
