"""A pool whose workers hold all the rows they can, as it stands in Redis when its batcher dies; and workers
that answer the next batcher for it.
"""

import asyncio
import itertools
import random
from collections import defaultdict
from dataclasses import dataclass, field

import msgpack
from redis.asyncio import Redis

from common.broker import worker_scripts
from common.broker.lua import run_script
from common.messages.codec import VERSION, decode, encode
from common.messages.plan import HeldRow, Plan, Report, WorkerDied
from common.messages.records import RECORD, pack_floats, pack_ids
from common.messages.request import Generate, StoppingParams
from tests.support.broker_state import KEYS, make_capacity, send_heartbeat

NUM_PROMPT, BLOCKS_OF_ROW = 128, 14
LOGPROB = pack_floats([-0.5])


@dataclass
class FullPool:
    """`rows` requests on each of `workers` workers, with `flushes` tokens of each in the worker's log.

    Attributes:
        first_plans: time in s, by Redis, at which each worker got the first plan behind the takeover.
        starts: attempts that plans started, by request.
    """

    redis: Redis
    workers: int
    rows: int
    flushes: int
    first_plans: dict[str, float] = field(default_factory=dict)
    starts: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    @property
    def names(self) -> list[str]:
        return [f"w{number}-1" for number in range(self.workers)]

    def requests(self, worker: str) -> list[str]:
        return [f"{worker}:{row}" for row in range(1, self.rows + 1)]

    def ids(self, request_id: str) -> list[int]:
        return random.Random(request_id).choices(range(300, 30_000), k=self.flushes)

    async def fill(self) -> None:
        for worker in self.names:
            await self.open_worker(worker)
            await self.queue_requests(worker)
            await self.write_log(worker)

    async def open_worker(self, worker: str) -> None:
        await run_script(self.redis, worker_scripts.create_logs(KEYS, worker, owner=worker))
        await self.send_heartbeat(worker)

    async def send_heartbeat(self, worker: str) -> None:
        capacity = make_capacity(worker, num_blocks=(self.rows + 1) * (BLOCKS_OF_ROW + 4))
        await send_heartbeat(self.redis, worker, capacity=encode(capacity))

    async def queue_requests(self, worker: str) -> None:
        prompt_ids = pack_ids(range(300, 300 + NUM_PROMPT))
        async with self.redis.pipeline(transaction=False) as pipe:
            for request_id in self.requests(worker):
                stopping = StoppingParams(1000, ignore_eos=True)
                pipe.xadd(
                    KEYS.requests, {"generate": encode(Generate(request_id, "d", prompt_ids, stopping))}
                )
                state = {
                    "digest": "d",
                    "worker": worker,
                    "attempt": 1,
                    "base": 0,
                    "crash_count": 0,
                    "width": 1,
                }
                pipe.hset(KEYS.request(request_id), mapping=state)
            await pipe.execute()

    async def write_log(self, worker: str) -> None:
        """Write a log as plain maps: making a million messages would take longer than reading them."""
        ids = {request_id: self.ids(request_id) for request_id in self.requests(worker)}
        async with self.redis.pipeline(transaction=False) as pipe:
            for flush in range(self.flushes):
                tokens = [
                    {"id": name, "a": 1, "i": flush, "t": pack_ids([ids[name][flush]]), "l": LOGPROB}
                    | {"x": [], "ti": b"", "tl": b"", "ss": 0}
                    for name in ids
                ]
                entry = msgpack.packb({"v": VERSION, "s": worker, "q": 0, "t": tokens})
                pipe.xadd(KEYS.log(worker), {"entry": entry}, id=f"{flush + 1}-0")
            await pipe.execute()

    async def kill(self, workers: list[str]) -> None:
        """Report all workers as dead, as their launchers would."""
        for worker in workers:
            await self.redis.delete(KEYS.worker(worker))
            await self.redis.xadd(KEYS.control, {"died": encode(WorkerDied(worker))})

    async def answer(self, workers: list[str]) -> None:
        """Answer takeovers for workers, and note their plans, until it is cancelled."""
        last_ids = {KEYS.plans(worker): "0" for worker in workers}
        sequences = {worker: itertools.count(self.flushes + 1) for worker in workers}
        while True:
            for stream, entries in await self.redis.xread(last_ids, block=100):  # type: ignore[arg-type]
                worker = stream.decode().removeprefix(KEYS.plans(""))
                for entry_id, fields in entries:
                    last_ids[stream.decode()] = entry_id.decode()
                    await self.on_plan(worker, decode(Plan, fields[b"plan"]), next(sequences[worker]))
            await asyncio.sleep(0)

    async def on_plan(self, worker: str, plan: Plan, sequence: int) -> None:
        if plan.takeover:
            report = Report(
                sequence,
                plan.epoch,
                1,
                self.flushes,
                takeover=True,
                held=self.held(worker),
                last_row=self.rows,
            )
            await self.redis.xadd(KEYS.reports(worker), {"report": encode(report)}, id=f"{sequence}-0")
            return
        if worker not in self.first_plans:
            seconds, microseconds = await self.redis.time()
            self.first_plans[worker] = seconds + microseconds / 1e6
        for start in plan.starts:
            self.starts[start.request.request_id].append(start.attempt)

    def held(self, worker: str) -> list[HeldRow]:
        if worker not in self.names:
            return []
        return [
            HeldRow(row, name, 1, 0, self.flushes, self.blocks(row), kv_len=NUM_PROMPT, step=1)
            for row, name in enumerate(self.requests(worker), 1)
        ]

    def blocks(self, row: int) -> bytes:
        return pack_ids(range(1 + (row - 1) * BLOCKS_OF_ROW, 1 + row * BLOCKS_OF_ROW))

    async def lease_s(self) -> float:
        """Return when the lease was taken: the epoch is that time, in µs by Redis."""
        return int(await self.redis.get(KEYS.epoch) or 0) / 1e6

    def records(self, request_id: str) -> bytes:
        return b"".join(RECORD.pack(token_id, -0.5) for token_id in self.ids(request_id))
