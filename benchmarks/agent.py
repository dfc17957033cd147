"""Prints the agent's CPU time per token, and its latency: `python -m benchmarks.agent [--runs 3]`.

The whole agent runs (text, stop strings, both logs, events) between a real broker and an engine without a
model (echo_engine.py), in two modes. In the first, the engine sends steps as fast as the
agent reads them, and a flush publishes several. In the second, it sends a step once the last one is
published, and each has a flush of its own. CPU time is this process's, without broker and engine. Latency is
that of the second mode: from the engine's frame to the gateway's event. All figures are medians of runs.

`--instructions` prints how many instructions a token takes in the second mode, in place of all that. They
hardly depend on the machine, so one run is enough. It needs valgrind.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import uvloop
from redis.asyncio import Redis
from tokenizers import Tokenizer

from benchmarks.callgrind import VARIABLES, InstructionMeter, require_valgrind, under_callgrind
from common import model_files
from common.broker.client import connect
from common.broker.keys import Keys
from common.broker.pool_client import PoolClient
from common.messages.codec import encode
from common.messages.plan import NewRow, Plan, WorkerCapacity
from common.messages.records import pack_ids
from common.messages.request import Generate, StoppingParams
from common.settings.settings import Settings
from gpu_worker.agent.agent import Agent
from gpu_worker.agent.engine_client import EngineClient, EngineDied, RankProcess
from gpu_worker.agent.state import AgentState
from tests.support import brokers
from tests.support.waiting import wait_until

TEXT = (Path(__file__).parent.parent / "LICENSE").read_text()  # the same for any two commits
PROMPT_TOKENS = 2048
ROWS = (1, 32, 256)
TOKENS = 2**16
"""Tokens of one run, over all rows."""
MAX_WAITING_STEPS = 2**11
"""Steps of one run in the second mode."""
COUNTED_STEPS = {1: 128, 32: 64, 256: 64}
"""Number of rows → steps whose instructions are counted."""
KEYS = Keys("default")
CHANNEL = KEYS.events("g")


class CpuMeter:
    """Measures the CPU time of this process."""

    def begin(self) -> None:
        self.began_s = time.process_time()

    def end(self) -> float:
        """Return the CPU time since `begin` in µs."""
        return (time.process_time() - self.began_s) * 1e6


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time of a token in µs, or its instructions; in the second mode, ms from the engine's frame to the
    gateway's event.
    """

    token: float
    latency_ms: float


async def measure(
    url: str,
    tokenizer: Tokenizer,
    name: str,
    num_rows: int,
    num_steps: int,
    *,
    waits: bool,
    meter: CpuMeter | InstructionMeter,
) -> Cost:
    redis, engine = connect(url), EngineClient([await start_engine(url, num_steps, waits)])
    agent = Agent(
        Settings(),
        PoolClient(redis, KEYS),
        engine,
        AgentState(tokenizer),
        WorkerCapacity(
            incarnation=name,
            name=name,
            model="m",
            dtype="bfloat16",
            block_size=16,
            num_blocks=10_000,
            max_batch_prefill_tokens=64,
            context=100_000,
        ),
    )
    serving = asyncio.create_task(agent.run())
    blocks = pack_ids(range(1, 2 + (PROMPT_TOKENS + num_steps) // 16))  # of each row: they hold nothing
    await start_rows(redis, name, num_rows, pack_ids(tokenizer.encode(TEXT).ids[:PROMPT_TOKENS]), blocks)
    await wait_until(lambda: len(agent.state.rows) == num_rows)
    await plan(redis, name, Plan(1, 2, 10**6, 10**6))
    if waits:  # for the first step: by then the engine has computed all
        await wait_until(lambda: agent.state.step > 0)
    num_left = num_steps - agent.state.step
    meter.begin()
    with contextlib.suppress(EngineDied):  # after its last step
        await serving
    cost = Cost(meter.end() / (num_left * num_rows), await read_latency_ms(engine.ranks[0]))
    engine.ranks[0].transport.close()
    await redis.aclose()
    return cost


async def start_engine(url: str, num_steps: int, waits: bool) -> RankProcess:
    ours, engines = socket.socketpair()
    with engines:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.echo_engine", str(engines.fileno()), url, CHANNEL),
            *(str(num_steps), str(int(waits))),
            pass_fds=[engines.fileno()],
            stdout=asyncio.subprocess.PIPE,
        )
    return await RankProcess.open(process, ours)


async def read_latency_ms(rank: RankProcess) -> float:
    engine = rank.process
    assert isinstance(engine, asyncio.subprocess.Process) and engine.stdout
    output = await engine.stdout.read()
    return statistics.median(json.loads(output)) if output else 0.0


async def start_rows(redis: Redis, worker: str, num_rows: int, prompt_ids: bytes, blocks: bytes) -> None:
    """Starts rows on a worker, as the batcher does; every other one looks for a stop string."""
    starts = []
    for row in range(1, num_rows + 1):
        stopping = StoppingParams(10**6, stop=["xyz"] if row % 2 else [])
        request = Generate(f"{worker}-{row}", "d", prompt_ids, stopping, channel=CHANNEL)
        placed = {"digest": "d", "worker": worker, "attempt": 1, "base": 0, "width": 1}
        await redis.hset(KEYS.request(request.request_id), mapping=placed)  # type: ignore[misc]
        starts.append(NewRow(row, 1, 0, b"", blocks, request))
    await plan(redis, worker, Plan(1, 1, 0, 64, starts))


async def plan(redis: Redis, worker: str, plan: Plan) -> None:
    await redis.xadd(KEYS.plans(worker), {"plan": encode(plan)}, id=f"{plan.epoch}-{plan.number}")


def load_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(model_files.resolve("smollm2") / "tokenizer.json"))


async def measure_times(url: str, runs: int) -> None:
    tokenizer, meter = load_tokenizer(), CpuMeter()
    names = (f"w{number}" for number in count())
    for num_rows in ROWS:
        most = TOKENS // num_rows
        fast, waiting = [
            [
                await measure(url, tokenizer, next(names), num_rows, n, waits=waits, meter=meter)
                for _ in range(runs)
            ]
            for n, waits in ((most, False), (min(most, MAX_WAITING_STEPS), True))
        ]
        latency_ms = statistics.median(cost.latency_ms for cost in waiting)
        print(
            f"{num_rows:4} rows: {describe(fast)}; "
            f"a flush a step {describe(waiting)}, {latency_ms:.2f} ms to the gateway",
            flush=True,
        )


def describe(costs: list[Cost]) -> str:
    each = sorted(cost.token for cost in costs)
    return f"{statistics.median(each):6.1f} µs of CPU a token ({each[0]:.1f} to {each[-1]:.1f})"


def count_instructions(url: str) -> None:
    """Count the instructions of a process of its own for each number of rows."""
    for num_rows in ROWS:
        with tempfile.TemporaryDirectory() as folder:
            own = ["-m", "benchmarks.agent", "--counted", url, str(num_rows), folder]
            command = under_callgrind([sys.executable, *own], Path(folder))
            subprocess.run(command, check=True, env=os.environ | VARIABLES)


async def print_instructions(url: str, num_rows: int, folder: Path) -> None:
    """Print the instructions of a token, in a process that runs under callgrind."""
    meter, num_steps = InstructionMeter(os.getpid(), folder), COUNTED_STEPS[num_rows]
    name = f"w-counted-{num_rows}"
    cost = await measure(url, load_tokenizer(), name, num_rows, num_steps, waits=True, meter=meter)
    print(f"{num_rows:4} rows: {cost.token:9,.0f} instructions a token, a flush a step", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--instructions", action="store_true")
    parser.add_argument("--counted", nargs=3, metavar=("URL", "ROWS", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.counted:
        url, num_rows, folder = args.counted
        uvloop.run(print_instructions(url, int(num_rows), Path(folder)))
        return
    if args.instructions:
        require_valgrind()
    with brokers.running() as broker:
        if args.instructions:
            count_instructions(broker.url)
        else:
            uvloop.run(measure_times(broker.url, args.runs))


if __name__ == "__main__":
    main()
