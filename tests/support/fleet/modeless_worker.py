"""A worker without a model, in this process: the real agent over the engine of tests/support/chaos."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from common.broker.pool_client import PoolClient
from common.messages.plan import Plan, WorkerCapacity
from common.settings.settings import Settings
from gpu_worker.agent.agent import Agent
from gpu_worker.agent.engine_client import EngineClient, StepsHandler
from gpu_worker.agent.state import AgentState
from tests.support.chaos.engine import BLOCK_SIZE, ScriptedEngine
from tests.support.tokenizer import TOKENIZER

TTL_S = 60.0
"""Longer than a busy machine keeps a test from its core. A test in which a worker dies sets its own value."""


class ModelessEngine(ScriptedEngine, EngineClient):
    """The engine, as its agent sees it. Set `draining`, and the worker drains as at SIGTERM; `serving` is its
    agent's task.
    """

    draining: asyncio.Event
    serving: asyncio.Task[None]

    def __init__(self, step_s: float, **options: Any) -> None:
        EngineClient.__init__(self, [])
        ScriptedEngine.__init__(self, step_s, **options)
        self.granted = asyncio.Event()

    def send(self, plan: Plan) -> None:
        self.apply(plan)
        self.granted.set()

    async def run_steps(self, handle: StepsHandler) -> None:
        while True:
            await self.pause()
            if (step := self.step()) is not None:
                handle([step])
            else:
                self.granted.clear()
                await self.granted.wait()

    async def pause(self) -> None:
        """Wait between two steps."""
        await asyncio.sleep(self.step_s)

    def compute(self, duration_s: float) -> None:
        """Its time was the pause."""


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
    engine = ModelessEngine(step_s, prefix_caching=False)
    sizes = (BLOCK_SIZE, num_blocks, 512, 8192)
    worker = WorkerCapacity(f"{name}-1", name, "m", "float32", *sizes, standby=True)
    own: dict[str, Any] = {"pool": pool, "max_batch_size": max_batch_size}
    settings = Settings(redis_url=url, heartbeat_s=0.2, worker_ttl_s=TTL_S, **own)
    agent = Agent(settings, PoolClient.connect(settings), engine, AgentState(TOKENIZER), worker)
    engine.draining = agent.state.draining
    engine.serving = asyncio.create_task(serve(agent))
    try:
        yield engine
    finally:
        failed = engine.serving.done()
        engine.serving.cancel()
        await asyncio.wait([engine.serving])
        await agent.pool.redis.aclose()
    if failed:  # not in place of what the caller has raised
        engine.serving.result()


async def serve(agent: Agent) -> None:
    """Serve as a worker's process does. Whenever its streams are gone it goes on as the next incarnation.
    When it has drained, its log is sealed.
    """
    await agent.run()
    await agent.seal("drained")
