"""Prints how many requests a second the batcher can take from start to end, with a real broker between it and
all others: `python -m benchmarks.batcher.through_broker [--workers 64] [--lives 20000]`.

A batcher process, a broker, and this process, which is gateways and workers at once: full pools as in
benchmarks.batcher.lives, each request admitted by the gateways' script, each row started by a plan that was
read, each report an entry. Beside the rate by the clock stand the CPU times of batcher and broker for a life:
on shared cores, the three processes slow each other down. Exit status 1 below LEAST_LIVES by the batcher's
CPU time.
"""

import argparse
import asyncio
import itertools
import random
import sys
import time

import psutil
import uvloop
from redis.asyncio import Redis

from benchmarks.batcher.lives import MAX_ANSWER, NUM_BLOCKS, NUM_ROWS, PROMPT_TOKENS, CostlessWorker
from common.broker import request_scripts
from common.broker.client import connect
from common.broker.committed import in_slices
from common.broker.keys import Keys
from common.broker.lua import load_script
from common.messages.block_hashes import HASH_BYTES, HASHED_TOKENS, root_hash
from common.messages.codec import decode, encode
from common.messages.plan import Plan, Report
from common.messages.records import pack_ids
from common.messages.request import Generate, StoppingParams
from tests.support import brokers
from tests.support.broker_state import make_capacity, start_worker
from tests.support.fleet.batchers import batcher

LEAST_LIVES = 3000.0
WORKERS_A_TURN = 8
TERMINAL_TTL_MS = 60_000
KEYS = Keys("default")


class RemoteWorker(CostlessWorker):
    """A worker that costs nothing, and knows the requests of its rows."""

    def __init__(self, name: str, draw: random.Random) -> None:
        super().__init__(draw)
        self.name = name
        self.epoch = 0
        self.plan = 0
        self.names: dict[int, str] = {}

    def obey(self, plan: Plan) -> Report | None:
        """Apply a plan. Return the answer to a takeover."""
        self.epoch, self.plan = plan.epoch, plan.number
        if plan.takeover:
            self.sequence += 1
            return Report(self.sequence, plan.epoch, plan.number, self.step, takeover=True)
        self.names |= {start.row: start.request.request_id for start in plan.starts}
        self.apply(plan)
        return None


class Pool:
    """Gateways and workers, which keep `num_workers` × NUM_ROWS requests alive."""

    def __init__(self, redis: Redis, num_workers: int) -> None:
        self.redis = redis
        self.draw = random.Random(num_workers)
        self.workers = {f"w{i}-1": RemoteWorker(f"w{i}-1", self.draw) for i in range(num_workers)}
        self.turns = itertools.cycle(list(in_slices(list(self.workers.values()), WORKERS_A_TURN)))
        self.last_ids = {KEYS.plans(name): "0" for name in self.workers}
        self.prompt = pack_ids(range(PROMPT_TOKENS))
        self.numbers = itertools.count()
        self.num_ended = 0

    async def open(self) -> None:
        await self.redis.script_load(load_script("admit"))
        await self.redis.set(KEYS.gateway("g"), 1)
        for name in self.workers:
            capacity = make_capacity(name, NUM_BLOCKS, name=name, prefix_caching=True)
            await start_worker(self.redis, name, encode(capacity))
        for _ in self.workers:
            await self.send([], NUM_ROWS)

    def request(self) -> Generate:
        hashes = root_hash("") + self.draw.randbytes(PROMPT_TOKENS // HASHED_TOKENS * HASH_BYTES)
        stopping = StoppingParams(MAX_ANSWER)
        name = f"r{next(self.numbers)}"
        return Generate(name, "d", self.prompt, stopping, gateway="g", block_hashes=hashes)

    async def send(self, reports: list[tuple[RemoteWorker, Report]], num_new: int) -> None:
        """Write reports, the terminals of the rows that ended, and new requests."""
        async with self.redis.pipeline(transaction=False) as pipe:
            for worker, report in reports:
                for row, _, _ in report.ended:
                    key = KEYS.request(worker.names.pop(row))
                    pipe.hset(key, "terminal", "eos_token")
                    pipe.pexpire(key, TERMINAL_TTL_MS)
                entry = {"report": encode(report)}
                pipe.xadd(KEYS.reports(worker.name), entry, id=f"{report.sequence}-0", maxlen=100)  # type: ignore[arg-type]
            for _ in range(num_new):
                request = self.request()
                call = request_scripts.admit(
                    KEYS,
                    request,
                    payload=encode(request),
                    answer=b"",
                    weight=1.0,
                    max_requests=10**9,
                    max_tokens=None,
                    max_bytes=10**12,
                )
                pipe.execute_command(*call.command)
            await pipe.execute()

    async def turn(self) -> None:
        """Read plans, and let some workers run a step."""
        reports: list[tuple[RemoteWorker, Report]] = []
        for stream, entries in await self.redis.xread(self.last_ids, block=1):  # type: ignore[arg-type]
            worker = self.workers[stream.decode().removeprefix(KEYS.plans(""))]
            self.last_ids[stream.decode()] = entries[-1][0].decode()
            answers = [worker.obey(decode(Plan, fields[b"plan"])) for _, fields in entries]
            reports += [(worker, answer) for answer in answers if answer is not None]
        for worker in next(self.turns):
            if (report := worker.run()) is not None:
                reports.append((worker, report))
        num_ended = sum(len(report.ended) for _, report in reports)
        self.num_ended += num_ended
        await self.send(reports, num_ended)

    async def run(self, num_lives: int) -> None:
        until = self.num_ended + num_lives
        while self.num_ended < until:
            await self.turn()


async def measure(num_workers: int, num_lives: int) -> float:
    """Return the batcher's CPU time for a life, in s."""
    with brokers.running() as broker:
        redis = connect(broker.url)
        info = await redis.info("server")
        pool = Pool(redis, num_workers)
        await pool.open()
        with batcher(broker.url, WORKER_TTL_S="60", HEARTBEAT_S="0.5", LOG_LEVEL="warning") as process:
            await pool.run(num_workers * NUM_ROWS)
            measured = {"batcher": process.pid, "broker": int(info["process_id"]), "the others": None}
            processes = {name: psutil.Process(pid) for name, pid in measured.items()}
            before = {name: cpu_s(one) for name, one in processes.items()}
            began, began_s = pool.num_ended, time.monotonic()
            await pool.run(num_lives)
            lives, wall_s = pool.num_ended - began, time.monotonic() - began_s
            spent = {name: cpu_s(one) - before[name] for name, one in processes.items()}
        await redis.aclose()
    shares = ", ".join(
        f"{name} {seconds / lives * 1e6:.0f} µs ({seconds / wall_s:.0%})" for name, seconds in spent.items()
    )
    print(
        f"{num_workers} workers × {NUM_ROWS} rows: {lives / wall_s:,.0f} lives/s by the clock, "
        f"{lives / spent['batcher']:,.0f} by the batcher's CPU; CPU of a life: {shares}"
    )
    return spent["batcher"] / lives


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--lives", type=int, default=20_000)
    args = parser.parse_args()
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    with runner:
        return int(runner.run(measure(args.workers, args.lives)) > 1 / LEAST_LIVES)


if __name__ == "__main__":
    sys.exit(main())
