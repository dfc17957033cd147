"""Adapter monitor: the LoRA adapters of a pool, as a gateway last read them."""

import asyncio
import logging
import time
from collections.abc import Sequence

from common.adapter_registry import (
    AdapterChangeError,
    AdapterRegistry,
    change_registry,
    read_registry,
    read_version,
)
from common.adapters import PoolAdapter
from common.broker.client import CONNECT_TIMEOUT_S, ERRORS, FailureLog
from common.broker.heartbeat import ADAPTERS_SINCE, Readers
from common.broker.pool_client import PoolClient
from common.process.event_loop import until_beat

log = logging.getLogger(__name__)

FRESH_S = 0.05


class AdapterMonitor:
    """Reads the registry of adapters at an interval, when it has changed. A broker that has lost it gets it
    back, so that requests that it has lost, too, go on.

    Attributes:
        seeds: adapters of LORA_ADAPTERS, until the registry has them.
        registry: as it was read last.
        checked_s: monotonic time of the last read.
        is_passed_on: whether all gateways and batchers pass on the adapter of a request. Those of an earlier
            release would leave it out.
    """

    def __init__(self, client: PoolClient, seeds: Sequence[PoolAdapter], interval_s: float) -> None:
        self.client = client
        self.seeds = seeds
        self.interval_s = interval_s
        self.registry = AdapterRegistry()
        self.checked_s = 0.0
        self.readers = Readers(client)
        self.is_passed_on = True
        self.lock = asyncio.Lock()
        self.failures = FailureLog(log, "reading the adapters")

    def find(self, name: str | None) -> PoolAdapter | None:
        """The adapter that requests get by this name."""
        return self.registry.named(name) if name else None

    async def run(self) -> None:
        """Never returns."""
        while True:
            await self.refresh()
            await asyncio.sleep(until_beat(self.interval_s))

    async def refresh(self) -> None:
        """Read once."""
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self.read()
        except ERRORS as error:
            self.failures.failed(error)
        except AdapterChangeError as error:
            log.error("the adapters of LORA_ADAPTERS are not added: %s", error)
        else:
            self.failures.succeeded()
        self.checked_s = time.monotonic()

    async def refresh_unless_fresh(self) -> None:
        """Refresh, unless that was done within FRESH_S."""
        async with self.lock:
            if time.monotonic() - self.checked_s > FRESH_S:
                await self.refresh()

    async def read(self) -> None:
        """Raises one of ERRORS; AdapterChangeError if settings have too many adapters."""
        version, known, seeds = await read_version(self.client), self.registry, self.seeds
        if not version and known.version:
            log.warning("the broker has lost the registry of adapters, and gets it back")
            await change_registry(self.client, known.restored)
        if seeds:
            await change_registry(self.client, lambda found: found.seeded_with(seeds))
            self.seeds = ()
        if seeds or version != known.version:
            self.registry = await read_registry(self.client)
        if self.registry.adapters:
            self.is_passed_on = await self.readers.lowest_version() >= ADAPTERS_SINCE
