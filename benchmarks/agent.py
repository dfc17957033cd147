"""What a token costs the agent, from the engine's frame to the gateway's event: `python -m benchmarks.agent
[--runs 3]`.

The whole agent runs (text, stop strings, both logs, events), with a real broker and behind its door an engine
that says what it was told beforehand (benchmarks/scripted_engine.py): as fast as the agent takes it, so that
a flush has what came since the last; and each step when the one before was published, so that each is a
flush. Printed are µs of this process's CPU a token (the broker's and the engine's are not in it), and for the
second way the time from frame to gateway; medians of runs.
"""

import argparse
import asyncio
import contextlib
import json
import socket
import statistics
import sys
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import uvloop
from redis.asyncio import Redis
from tokenizers import Tokenizer

from common import model_files
from common.broker.client import connect
from common.broker.keys import Keys
from common.messages.codec import encode
from common.messages.packing import pack_ids
from common.messages.plan import Plan, RowStart, WorkerCapacity
from common.messages.request import Generate, StoppingParams
from common.settings.settings import Settings
from gpu_worker.agent.agent import Agent
from gpu_worker.agent.engine_client import EngineClient, EngineDied, RankProcess
from gpu_worker.agent.row_text import RowTable
from tests.support import brokers
from tests.support.waiting import wait_until

TEXT = (Path(__file__).parent.parent / "README.md").read_text()
PROMPT_TOKENS = 2048
ROWS = (1, 32, 256)
TOKENS = 2**16
"""Of one run, over all rows."""
MAX_TURNS = 2**11
"""Steps of one run in which each waits for the one before."""
KEYS = Keys("default")
CHANNEL = KEYS.events("g")


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a token, in µs of CPU; and from frame to gateway, in ms, where steps waited for each other."""

    cpu_us: float
    way_ms: float


async def measure(url: str, tokenizer: Tokenizer, name: str, num_rows: int, waits: bool) -> Cost:
    num_steps = min(TOKENS // num_rows, MAX_TURNS if waits else TOKENS)
    redis, engine = connect(url), EngineClient([await scripted(url, num_steps, waits)])
    agent = Agent(
        Settings(),
        redis,
        engine,
        RowTable(tokenizer),
        WorkerCapacity(name, name, "m", "bfloat16", 16, 10_000, 64, 100_000),
    )
    serving = asyncio.create_task(agent.run())
    await hand(redis, name, num_rows, pack_ids(tokenizer.encode(TEXT).ids[:PROMPT_TOKENS]))
    await wait_until(lambda: len(agent.state.table.rows) == num_rows)
    began_s = time.process_time()
    await plan(redis, name, Plan(1, 2, 10**6, 64))
    with contextlib.suppress(EngineDied):  # it has no more to say
        await serving
    cpu_us = (time.process_time() - began_s) / (num_steps * num_rows) * 1e6
    way_ms = await way(engine.ranks[0].process)
    engine.ranks[0].writer.close()
    await redis.aclose()
    return Cost(cpu_us, way_ms)


async def scripted(url: str, num_steps: int, waits: bool) -> RankProcess:
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "benchmarks.scripted_engine",
                "--fd",
                str(theirs.fileno()),
                "--broker",
                url,
                "--channel",
                CHANNEL,
            ),
            *("--steps", str(num_steps), *(["--wait"] if waits else [])),
            pass_fds=[theirs.fileno()],
            stdout=asyncio.subprocess.PIPE,
        )
    return RankProcess(process, *await asyncio.open_unix_connection(sock=ours))


async def way(engine: asyncio.subprocess.Process) -> float:
    assert engine.stdout
    said = await engine.stdout.read()
    return statistics.median(json.loads(said)) if said else 0.0


async def hand(redis: Redis, worker: str, num_rows: int, prompt_ids: bytes) -> None:
    """Rows to a worker, as the batcher does; every other one looks for a stop string."""
    starts = []
    for row in range(num_rows):
        stopping = StoppingParams(10**6, stop=["xyz"] if row % 2 else [])
        request = Generate(f"{worker}-{row}", "d", prompt_ids, stopping, channel=CHANNEL)
        placed = {"digest": "d", "worker": worker, "attempt": 1, "base": 0, "width": 1}
        await redis.hset(KEYS.request(request.request_id), mapping=placed)  # type: ignore[misc]
        starts.append(RowStart(row, 1, 0, b"", b"", request))
    await plan(redis, worker, Plan(1, 1, 0, 64, starts))


async def plan(redis: Redis, worker: str, plan: Plan) -> None:
    await redis.xadd(KEYS.plans(worker), {"plan": encode(plan)}, id=f"{plan.epoch}-{plan.number}")


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    tokenizer = Tokenizer.from_file(str(model_files.resolve("smollm2") / "tokenizer.json"))
    names = (f"w{number}" for number in count())
    with brokers.running() as broker:
        for num_rows in ROWS:
            fast = [await measure(broker.url, tokenizer, next(names), num_rows, False) for _ in range(runs)]
            turns = [await measure(broker.url, tokenizer, next(names), num_rows, True) for _ in range(runs)]
            way_ms = statistics.median(cost.way_ms for cost in turns)
            print(
                f"{num_rows:4} rows: {told(fast)}; a flush a step {told(turns)}, {way_ms:.2f} ms to the gateway",
                flush=True,
            )


def told(costs: list[Cost]) -> str:
    each = sorted(cost.cpu_us for cost in costs)
    return f"{statistics.median(each):6.1f} µs of CPU a token ({each[0]:.1f} to {each[-1]:.1f})"


if __name__ == "__main__":
    uvloop.run(main())
