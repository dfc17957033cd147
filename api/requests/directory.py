"""Directory monitor: what a gateway knows of all pools, as it last read it."""

import asyncio
import logging
import time

from api.requests.monitors import Monitor
from common.broker.client import CONNECT_TIMEOUT_S, ERRORS, FailureLog, describe_error
from common.broker.directory import TTL_S, DirectoryClient, KnownPool
from common.process.event_loop import until_beat
from common.settings.settings import Settings

log = logging.getLogger(__name__)


class DirectoryMonitor(Monitor):
    """Reads the directory at every heartbeat interval. While its broker is away, what was read last stands:
    pools that gateways know are served on.

    Attributes:
        pools: by name.
        weights: model → pool → weight, of models whose requests are shared out by weight.
        last_error: why the last read failed; empty if it succeeded.
        is_new: set by every read.
    """

    def __init__(self, client: DirectoryClient, settings: Settings) -> None:
        super().__init__()
        self.client = client
        self.interval_s = settings.heartbeat_s
        self.pools: dict[str, KnownPool] = {}
        self.weights: dict[str, dict[str, float]] = {}
        self.last_error = "not connected to the directory yet"
        self.failures = FailureLog(log, "reading the directory of pools")
        self.is_new = asyncio.Event()

    async def run(self) -> None:
        """Never returns."""
        while True:
            await self.refresh()
            await asyncio.sleep(until_beat(self.interval_s))

    async def refresh(self) -> None:
        """Read once."""
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                found = await self.client.read()
        except ERRORS as error:
            self.last_error = describe_error(error)
            self.failures.failed(error)
        else:
            self.last_error = ""
            self.failures.succeeded()
            self.pools = merge(self.pools, found.pools, began_s - self.checked_s)
            self.weights = found.weights
            self.checked_s = began_s
            self.is_new.set()


def merge(known: dict[str, KnownPool], found: dict[str, KnownPool], passed_s: float) -> dict[str, KnownPool]:
    """The pools that were just found, and those known before, which have become older: a directory whose
    broker was replaced has none until they write again.
    """
    older = {name: pool._replace(age_s=pool.age_s + passed_s) for name, pool in known.items()}
    return {name: pool for name, pool in (older | found).items() if pool.age_s <= TTL_S}
