"""A worker without a model: the real agent, over an engine whose next token follows from all before it."""

import asyncio
import contextlib
import zlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from common.broker.pool_client import PoolClient
from common.messages.plan import WorkerCapacity
from common.messages.records import pack_ids, unpack_ids
from common.settings.settings import Settings
from gpu_worker.agent.agent import Agent
from gpu_worker.agent.engine_client import EngineClient, StepsHandler
from gpu_worker.agent.row_text import RowTable
from gpu_worker.agent.state import AgentState
from gpu_worker.engine.batch.rows import Rows
from gpu_worker.protocol import Grant, StepResult
from gpu_worker.stay import Stay
from tests.support.tokenizer import TOKENIZER

BLOCK_SIZE = 16
TTL_S = 60.0
"""Longer than a busy machine keeps a test from its core. A test in which a worker dies sets its own value."""


def next_id(ids: Sequence[int]) -> int:
    return 300 + zlib.crc32(pack_ids(ids)) % 30_000


def generate(prompt: Sequence[int], count: int) -> list[int]:
    """Return the tokens of a request that nothing interrupts."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_id(ids))
    return ids[len(prompt) :]


class ModelessEngine(EngineClient):
    """An engine without a model, with rows as the real engine keeps them. It asserts that no two rows own a
    block.

    Attributes:
        ids: of each row, prompt and tokens.
        owners: row by block.
        num_starts: rows that ever started.
        most_rows: in one step.
        draining: of its agent: set it, and the worker drains as at SIGTERM.
        serving: its agent's task.
    """

    draining: asyncio.Event
    serving: asyncio.Task[None]

    def __init__(self, step_s: float) -> None:
        super().__init__([])
        self.step_s = step_s
        self.token_ms = 1.0
        self.rows = Rows(BLOCK_SIZE, eos_ids=())
        self.ids: dict[int, list[int]] = {}
        self.owners: dict[int, int] = {}
        self.num_starts = 0
        self.most_rows = 0
        self.granted = asyncio.Event()

    def send(self, grant: Grant) -> None:
        for start in grant.starts:
            assert start.row not in self.ids, "row numbers go on"
            self.ids[start.row] = unpack_ids(start.ids)
            self.num_starts += 1
        for row, blocks in [*grant.blocks, *((start.row, start.blocks) for start in grant.starts)]:
            if row in self.rows.rows or row in self.ids:
                self.own(row, unpack_ids(blocks))
        self.rows.apply(grant)
        self.granted.set()

    def own(self, row: int, blocks: list[int]) -> None:
        assert not self.owners.keys() & set(blocks), "a block belongs to one row"
        self.owners |= dict.fromkeys(blocks, row)

    async def run_steps(self, handle: StepsHandler) -> None:
        while True:
            await self.pause()
            if (step := self.run_step()) is not None:
                handle([step])
            else:
                self.granted.clear()
                await self.granted.wait()

    async def pause(self) -> None:
        """Wait between two steps."""
        await asyncio.sleep(self.step_s)

    def sample(self, row: int) -> int:
        return next_id(self.ids[row])

    def run_step(self) -> StepResult | None:
        slices = self.rows.launch()
        self.most_rows = max(self.most_rows, len(slices))
        sampled = [one.row.number for one in slices if one.samples]
        ids = [self.sample(number) for number in sampled]
        for number, token_id in zip(sampled, ids, strict=True):
            self.ids[number].append(token_id)
        self.rows.collect(slices, ids, [-0.5] * len(ids))
        result = self.rows.take_result()
        for number, _ in result.released:
            self.owners = {block: row for block, row in self.owners.items() if row != number}
        if not slices and not result:
            return None
        return result.build(self.rows.step, 1.0)


@contextlib.asynccontextmanager
async def modeless_worker(
    url: str,
    name: str,
    num_blocks: int = 1000,
    step_s: float = 0.02,
    max_batch_size: int = 256,
    pool: str = "default",
) -> AsyncIterator[ModelessEngine]:
    """A worker that serves while the context is open."""
    engine = ModelessEngine(step_s)
    sizes = (BLOCK_SIZE, num_blocks, 512, 8192)
    worker = WorkerCapacity(f"{name}-1", name, "m", "float32", *sizes, standby=True)
    own: dict[str, Any] = {"pool": pool, "max_batch_size": max_batch_size}
    settings = Settings(redis_url=url, heartbeat_s=0.2, worker_ttl_s=TTL_S, **own)
    agent = Agent(settings, PoolClient.connect(settings), engine, AgentState(RowTable(TOKENIZER)), worker)
    engine.draining = agent.state.draining
    engine.serving = asyncio.create_task(serve(agent))
    try:
        yield engine
    finally:
        failed = engine.serving.done()
        engine.serving.cancel()
        await asyncio.wait([engine.serving])
        await agent.pool.redis.aclose()
        if failed:
            engine.serving.result()


async def serve(agent: Agent) -> None:
    """Serve as a worker's process does. Whenever its streams are gone it goes on as the next incarnation.
    When it has drained, its log is sealed.
    """
    stay = Stay(agent)
    await stay.run()
    await stay.seal("drained")
