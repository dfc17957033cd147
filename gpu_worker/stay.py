"""Stay: a worker's time in one pool, over one engine, in one incarnation or several."""

import asyncio
import logging

from common.broker import process_scripts
from common.broker.client import ERRORS, describe_error
from gpu_worker.agent.agent import Agent

log = logging.getLogger(__name__)

SEAL_TIMEOUT_S = 2.0


class Stay:
    """One stay. `agent`: of the incarnation that serves now."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent

    async def run(self) -> None:
        """Serve until the worker is drained. If the streams are gone, it goes on as the next incarnation.
        Raises Sealed, EngineDied, EngineStuck.
        """
        while not await self.agent.run():
            self.agent = await self.agent.next_incarnation()
            log.warning("the same engine goes on as incarnation %s", self.incarnation)

    @property
    def incarnation(self) -> str:
        return self.agent.worker.incarnation

    async def seal(self, why: str) -> None:
        """Seal the logs, so that batcher and gateways learn at once that the stay has ended."""
        pool = self.agent.pool
        try:
            async with asyncio.timeout(SEAL_TIMEOUT_S):
                await pool.run(process_scripts.seal(pool.keys, self.incarnation, why=why))
        except (*ERRORS, TimeoutError) as error:
            log.warning("not sealed: %s", describe_error(error))
