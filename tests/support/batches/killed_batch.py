"""Killed batch: a batch whose gateways, batchers and workers are killed all the while, beside the same one
undisturbed, by the unmodified `openai` package.
"""

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import psutil
from openai import APIConnectionError, APIStatusError, AsyncOpenAI
from openai.types import Batch

from common.broker.client import connect
from deploy.launcher.embedded_broker import Broker
from tests.support.machine.killed_gateways import KilledGateways
from tests.support.machine.killed_pool import KilledPool

CHAT: Any = "/v1/chat/completions"
WINDOW: Any = "best_effort"
ENDED = ("completed", "failed", "expired", "cancelled")
STEP_S = 0.005
"""Of the engines, which have no model."""


@dataclass(frozen=True)
class BatchPlan:
    """What a run does; `every_s`: mean time between two kills."""

    lines: int = 2000
    kills: int = 12
    every_s: float = 2.0
    seed: int = 1
    num_workers: int = 2


@dataclass
class BatchOutcome:
    """What came of both batches.

    Attributes:
        kills: by kind, while the second one ran.
        wrong: what differs from what was asked for, or from the undisturbed batch.
        took_s: of both.
        largest_mib: memory of the largest gateway, twice a second.
        digest: of the second one's output, without ids and times.
    """

    kills: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    took_s: list[float] = field(default_factory=list)
    largest_mib: list[int] = field(default_factory=list)
    digest: str = ""


class KilledBatch:
    """The processes of a run. `output`: of the batch that ended last, without ids and times."""

    def __init__(self, plan: BatchPlan, broker: Broker, pool: KilledPool, files: Path) -> None:
        self.plan = plan
        self.pool = pool
        self.draw = random.Random(plan.seed)
        quiet = {"LOG_LEVEL": "error"}  # nobody reads what the gateways log
        self.gateways = KilledGateways(broker, 0, lambda: 0, FILES_DIR=str(files), **quiet)
        self.outcome = BatchOutcome(kills=pool.kills)
        self.ended = asyncio.Event()

    async def run(self) -> list[bytes]:
        """Return the lines of the output of a batch."""
        self.ended.clear()
        await self.gateways.until_healthy()
        began_s = asyncio.get_running_loop().time()
        batch = await self.create()
        last = await self.until_ended(batch.id)
        self.ended.set()
        self.outcome.took_s.append(asyncio.get_running_loop().time() - began_s)
        await self.gateways.until_healthy()
        async with openai_client(self.gateways.urls[0]) as client:
            content = await client.files.content(last.output_file_id or "")
            return [without_ids(line) for line in content.content.splitlines()]

    async def create(self) -> Batch:
        content = b"".join(json.dumps(line_of(number)).encode() + b"\n" for number in range(self.plan.lines))
        async with openai_client(self.gateways.urls[0]) as client:
            file = await client.files.create(file=("in.jsonl", content), purpose="batch")
            return await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window=WINDOW)

    async def until_ended(self, batch_id: str) -> Batch:
        """The batch when it has ended, asked for at any gateway that lives."""
        for url in self.addresses():
            self.outcome.largest_mib.append(max(resident_mib(one.pid) for one in self.gateways.processes))
            with contextlib.suppress(APIConnectionError, APIStatusError):
                async with openai_client(url) as client:
                    if (batch := await client.batches.retrieve(batch_id)).status in ENDED:
                        return batch
            await asyncio.sleep(0.5)
        raise AssertionError

    def addresses(self) -> Iterator[str]:
        while True:
            yield from self.gateways.urls

    async def kill_until_ended(self) -> None:
        """Kill at random: half of the kills are workers, a quarter each batchers and gateways."""
        while not self.ended.is_set() and self.outcome.kills.total() < self.plan.kills:
            await asyncio.sleep(self.draw.uniform(0.0, 2 * self.plan.every_s))
            drawn = self.draw.random()
            if drawn < 0.25:
                await asyncio.to_thread(self.gateways.kill, self.draw.randrange(2))
                self.outcome.kills["gateway"] += 1
            elif drawn < 0.5:
                await self.pool.kill_batcher(self.draw.choice(list(self.pool.batchers)))
            else:
                await self.pool.kill_worker(self.draw.choice(list(self.pool.workers)))

    def compare(self, calm: list[bytes], killed: list[bytes]) -> None:
        numbers = [json.loads(line)["custom_id"] for line in killed]
        expected = [line_of(number)["custom_id"] for number in range(self.plan.lines)]
        if numbers != expected:
            self.outcome.wrong.append(
                f"{len(numbers)} lines in place of {len(expected)}, or in another order"
            )
        differ = [number for number, pair in enumerate(zip(calm, killed, strict=False)) if len({*pair}) > 1]
        if differ:
            self.outcome.wrong.append(f"{len(differ)} lines differ, the first is {differ[0]}")
        self.outcome.digest = sha256(b"\n".join(killed)).hexdigest()


@contextlib.asynccontextmanager
async def openai_client(url: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def line_of(number: int) -> dict[str, Any]:
    """One of 40 chats."""
    chat = {
        "messages": [{"role": "user", "content": "Count. " * (number % 40 + 1)}],
        "max_tokens": 4 + number % 7,
    }
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": chat}


def without_ids(line: bytes) -> bytes:
    """The line, in which ids, and the time of the answer, are empty: they are those of the batch."""
    answer = json.loads(line)
    body = answer["response"]["body"]
    answer["id"] = answer["response"]["request_id"] = body["id"] = body["created"] = ""
    return json.dumps(answer).encode()


def resident_mib(pid: int) -> int:
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).memory_info().rss / 2**20)
    return 0


async def run(plan: BatchPlan, broker: Broker, files: Path) -> BatchOutcome:
    """Run the batch undisturbed, then again under kills, and compare."""
    async with connect(broker.url) as redis:
        pool = KilledPool(broker.url, redis, plan.num_workers, STEP_S, num_blocks=4000)
        async with pool.running():
            killed = KilledBatch(plan, broker, pool, files)
            try:
                calm = await killed.run()
                kills = asyncio.create_task(killed.kill_until_ended())
                disturbed = await killed.run()
                await kills
            finally:
                killed.gateways.stop()
            killed.compare(calm, disturbed)
            return killed.outcome
