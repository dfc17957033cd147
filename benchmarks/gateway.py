"""Prints the gateway's CPU time per token and per request: `python -m benchmarks.gateway [--runs 5]`.

A real gateway process runs on a broker of its own, or with `--gateways 2` two that share the streams: the
time is then the sum of both. A scripted worker without a model, in this process beside the client, sends a
token of each stream every step, at a fixed pace. CPU time depends little on other load. It is given for a
token while all streams run, and for the rest of a request. `--path /v1/completions` asks for OpenAI's chunks
in place of TGI's frames.

`--instructions` prints how many instructions a token takes while all streams run, in place of all that. They
hardly depend on the machine, so one run is enough. It needs valgrind.
"""

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil
import uvloop

from benchmarks.callgrind import VARIABLES, InstructionMeter, require_valgrind, under_callgrind
from benchmarks.client import Stream, stream
from benchmarks.serve import prompt
from deploy.launcher.embedded_broker import Broker
from tests.support import brokers
from tests.support.fleet.scripted_worker import Answer, FakeWorker, working
from tests.support.machine.ports import free_port
from tests.support.tokenizer import model_tokenizer
from tests.support.waiting import wait_until

LOADS = ((1, 768, 0.01), (32, 256, 0.04), (256, 96, 0.1))
"""(streams, new tokens of each, seconds between steps)"""
COUNTED_STEPS = {1: 128, 32: 64, 256: 16}
"""Number of streams → steps whose instructions are counted."""
COUNTED_MARGIN = 4
"""Further tokens of a stream: the first ones, and the last one, which waits for the end."""
LONG_SLICES = """
import runpy
import api.event_loop
api.event_loop.SLICE_S = 1e9  # under callgrind a slice would end by time, and not by its units
runpy.run_module("api", run_name="__main__")
"""
"""Program of a gateway whose instructions are counted."""
GENERATE_STREAM, COMPLETIONS = "/generate_stream", "/v1/completions"
ONE_TOKEN = {"inputs": "number 0", "parameters": {"max_new_tokens": 1}}


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time in µs."""

    token_user: float
    token_system: float
    request: float


class Gateway:
    """A gateway process and its CPU times, with a resolution of 10 ms."""

    def __init__(self, pid: int, url: str, path: str) -> None:
        self.process = psutil.Process(pid)
        self.url = url
        self.path = path

    def cpu_us(self) -> tuple[float, float]:
        """CPU time in user and in system mode."""
        times = self.process.cpu_times()
        return times.user * 1e6, times.system * 1e6

    def body(self, text: str, out_tokens: int) -> dict[str, Any]:
        if self.path == GENERATE_STREAM:
            return {"inputs": text, "parameters": {"max_new_tokens": out_tokens, "ignore_eos": True}}
        return {
            "prompt": text,
            "max_tokens": out_tokens,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
        }

    async def is_ready(self) -> bool:
        """Whether it serves: a scripted worker is no fleet, so /health would not say so."""
        try:
            async with httpx.AsyncClient() as client:
                return (await client.post(f"{self.url}/generate", json=ONE_TOKEN)).is_success
        except httpx.TransportError:
            return False


@contextmanager
def gateway(
    broker: Broker,
    path: str,
    command: Sequence[str] = (sys.executable, "-m", "api"),
    more_variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Gateway]:
    port = free_port()
    variables = {
        "REDIS_URL": broker.url,
        "PORT": str(port),
        "HOSTNAME": "127.0.0.1",
        "PARENT_PID": str(os.getpid()),
        "LOG_LEVEL": "warning",
        "WORKER_GRACE_S": "3600",  # no batcher runs, and the scripted worker shows itself once
    }
    with running(command, {**os.environ, **variables, **more_variables}) as pid:
        yield Gateway(pid, f"http://127.0.0.1:{port}", path)


@contextmanager
def running(command: Sequence[str], environ: dict[str, str]) -> Iterator[int]:
    process = subprocess.Popen(command, env=environ)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


async def load(gateways: Sequence[Gateway], streams: int, out_tokens: int) -> Cost:
    """Runs all streams at once; a token's cost is of the time when all have begun and none ends yet."""
    answers = [Stream() for _ in range(streams)]

    def num_tokens() -> int:
        return sum(len(answer.frames) for answer in answers)

    def cpu_us() -> tuple[float, ...]:
        return (*map(sum, zip(*(gateway.cpu_us() for gateway in gateways), strict=True)),)

    begun = cpu_us()
    tasks = start(gateways, answers, out_tokens)
    await wait_until(lambda: all(answer.frames for answer in answers), 60)
    first, num_first = cpu_us(), num_tokens()
    await wait_until(lambda: any(len(answer.frames) > out_tokens - 8 for answer in answers), 60)
    last, num_last = cpu_us(), num_tokens()
    await asyncio.gather(*tasks)
    ended = cpu_us()
    user, system = ((last[i] - first[i]) / (num_last - num_first) for i in range(2))
    request = (sum(ended) - sum(begun)) / streams - (user + system) * out_tokens
    return Cost(user, system, request)


def start(
    gateways: Sequence[Gateway], answers: Sequence[Stream], out_tokens: int
) -> list[asyncio.Task[Stream]]:
    """Start a stream into each answer, at each gateway in turn."""
    return [
        asyncio.create_task(
            stream(f"{gateway.url}{gateway.path}", gateway.body(prompt(i), out_tokens), answer)
        )
        for i, (gateway, answer) in enumerate(zip(cycle(gateways), answers, strict=False))
    ]


async def measure(gateways: Sequence[Gateway], broker: Broker, runs: int) -> None:
    ids = token_ids()
    for streams, out_tokens, step_s in LOADS:
        costs = []
        for _ in range(runs):
            async with working(broker.url, model_tokenizer().backend, lambda _: Answer(ids), step_s):
                for gateway in gateways:
                    await wait_until(gateway.is_ready, 60)
                costs.append(await load(gateways, streams, out_tokens))
        show(f"{streams:3d} streams", costs)


async def print_instructions(gateway: Gateway, meter: InstructionMeter, broker: Broker) -> None:
    ids = token_ids()
    worker = FakeWorker(broker.url, model_tokenizer().backend, lambda _: Answer(ids))
    await worker.open()
    await work_until_done(worker, [asyncio.create_task(wait_until(gateway.is_ready, 300))])
    for streams, num_steps in COUNTED_STEPS.items():
        counted = await count_instructions(gateway, meter, worker, streams, num_steps)
        print(f"{streams:3d} streams: {counted:9,.0f} instructions a token", flush=True)
    await worker.close()


async def count_instructions(
    gateway: Gateway, meter: InstructionMeter, worker: FakeWorker, streams: int, num_steps: int
) -> float:
    """Count the instructions of a token; a step begins when all clients have the tokens of the last one."""
    answers = [Stream() for _ in range(streams)]

    async def have_frames(num_frames: Sequence[int]) -> None:
        counts = list(zip(answers, num_frames, strict=True))
        await wait_until(lambda: all(len(answer.frames) >= num for answer, num in counts))

    tasks = start([gateway], answers, num_steps + COUNTED_MARGIN)
    while len(worker.live) < streams:
        await worker.take()
        for task in tasks:
            if task.done():
                task.result()  # raises: it was refused
    await worker.flush()
    await have_frames([1] * streams)
    first = [len(answer.frames) for answer in answers]
    meter.begin()
    for step in range(1, num_steps + 1):
        await worker.flush()
        await have_frames([num + step for num in first])
    counted = meter.end()
    await work_until_done(worker, tasks)
    return counted / (num_steps * streams)


async def work_until_done(worker: FakeWorker, tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Have the worker take requests and run steps until the tasks are done; raises what they raise."""
    while not all(task.done() for task in tasks):
        await worker.take()
        await worker.flush()
    await asyncio.gather(*tasks)


def token_ids() -> list[int]:
    """Ids of text: their pieces are of the usual lengths."""
    return model_tokenizer().backend.encode(" ".join(prompt(i) for i in range(8))).ids


def show(what: str, costs: Sequence[Cost]) -> None:
    user, system, request = (
        statistics.median(getattr(cost, name) for cost in costs) for name in Cost.__slots__
    )
    totals = sorted(cost.token_user + cost.token_system for cost in costs)
    print(
        f"{what}: {user + system:5.1f} µs a token ({user:.1f} user, {system:.1f} system), "
        f"{1e6 / (user + system):6,.0f} tokens/s of a core, "
        f"in single runs {totals[0]:.1f} to {totals[-1]:.1f}; {request:5.0f} µs a request besides",
        flush=True,
    )


def main(runs: int, num_gateways: int, path: str) -> None:
    with ExitStack() as stack:
        broker = stack.enter_context(brokers.running())
        gateways = [stack.enter_context(gateway(broker, path)) for _ in range(num_gateways)]
        uvloop.run(measure(gateways, broker, runs))


def main_counted(path: str) -> None:
    require_valgrind()
    with tempfile.TemporaryDirectory() as name, brokers.running() as broker:
        command = under_callgrind([sys.executable, "-c", LONG_SLICES], Path(name))
        with gateway(broker, path, command, VARIABLES) as counted:
            meter = InstructionMeter(counted.process.pid, Path(name))
            uvloop.run(print_instructions(counted, meter, broker))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--path", choices=(GENERATE_STREAM, COMPLETIONS), default=GENERATE_STREAM)
    parser.add_argument("--instructions", action="store_true")
    args = parser.parse_args()
    if args.instructions:
        main_counted(args.path)
    else:
        main(args.runs, args.gateways, args.path)
