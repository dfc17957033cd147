"""Chaos fleet: a fleet whose broker can be set back, and whose gateways lose messages."""

import contextlib
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tests.support.chaos.engine import BLOCKS, NUM_BLOCKS, STEP_MS
from tests.support.chaos.launcher import ADDRESS, DIRECTORY, PROXY_URL
from tests.support.chaos.proxy import LossyProxy, running_proxy
from tests.support.fleet.fleet import Fleet
from tests.support.machine.ports import free_port

ROOT = Path(__file__).parents[3]


class ChaosFleet(Fleet):
    """`step_ms`, `num_blocks`: of engines without a model; None runs the real ones. Its gateways reach the
    broker through `proxy`, unless it has none.
    """

    command = ("tests.support.chaos.launcher",)

    def __init__(
        self,
        step_ms: float | None,
        num_blocks: int = NUM_BLOCKS,
        has_proxy: bool = True,
        **settings: Any,
    ) -> None:
        preload_worker = None if step_ms is None else False
        preloads = {"preload_worker": preload_worker, "preload_gateway": None}
        super().__init__(**{"pythonpath": ROOT} | preloads | settings)
        self.proxy_port = free_port()
        self.settings |= {
            DIRECTORY: self.directory,
            PROXY_URL: f"redis://127.0.0.1:{self.proxy_port}/0" if has_proxy else None,
            STEP_MS: step_ms,
            BLOCKS: num_blocks,
        }

    @property
    def broker(self) -> dict[str, Any]:
        """Return URL, socket and files of the broker."""
        found: dict[str, Any] = json.loads((self.directory / ADDRESS).read_text())
        return found

    @property
    def redis_url(self) -> str:
        """The URL of the broker itself, whether or not it runs."""
        return str(self.settings.get("redis_url") or self.broker["url"])

    @contextlib.asynccontextmanager
    async def proxy(self, draw: random.Random) -> AsyncIterator[LossyProxy]:
        """Run a proxy between gateways and broker while the context is open. It drops nothing at first."""

        def address() -> str:
            return str(self.broker["socket"])

        async with running_proxy(self.proxy_port, address, draw) as proxy:
            yield proxy
