"""Adapters: what the active batcher does for the registry of LoRA adapters. It knows all live requests, so it
says when an adapter that was unloaded may go.
"""

import contextlib
import logging
import time
from collections.abc import Collection, Iterable, Iterator

from batcher.scheduling.scheduler import Scheduler
from batcher.scheduling.sequence import Sequence
from common.adapter_registry import AdapterChangeError, AdapterRegistry, change_registry, read_newer
from common.adapters import LEAVING, LOADING, READY
from common.broker.keys import ADAPTERS_TTL_MS
from common.broker.pool_client import PoolClient

log = logging.getLogger(__name__)

LINGER_S = 3.0
"""An adapter that nobody uses is kept for this time: a gateway may not know yet that it was unloaded."""
LOAD_TIMEOUT_S = 900.0
"""An adapter that is still loaded after this time is taken back: its gateway has died."""


class AdapterKeeper:
    """Forgets adapters that were unloaded, and finds requests whose adapter is gone.

    Attributes:
        registry: as it was read last.
        since_s: key of each adapter that waits for its end → monotonic time of the first look at which no
            request used it, or at which it was being loaded.
    """

    def __init__(self, pool: PoolClient) -> None:
        self.pool = pool
        self.registry = AdapterRegistry()
        self.since_s: dict[tuple[str, str], float] = {}

    @property
    def names(self) -> list[str]:
        """The names of the adapters that requests may name."""
        return [one.name for one in self.registry.ready]

    async def look(self, scheduler: Scheduler) -> list[str]:
        """Forget what is due, and return the ids of requests that no worker will ever compute."""
        found = await read_newer(self.pool, self.registry)
        if not found.version:
            return []  # a gateway writes it again
        await self.pool.redis.pexpire(self.pool.keys.adapters, ADAPTERS_TTL_MS)
        self.registry = found
        sequences = scheduler.sequences.values()
        used = {sequence.request.adapter for sequence in sequences} - {""}
        if gone := self.overdue(used):
            log.info("adapters that are gone: %s", ", ".join(gone))
            with contextlib.suppress(AdapterChangeError):  # others change it all the time
                self.registry = await change_registry(
                    self.pool, lambda found: found.forgetting(still_due(found, gone))
                )
        held = {key for replica in scheduler.replicas.values() for key in replica.adapters}
        return [sequence.request_id for sequence in lost(sequences, held, self.registry)] if used else []

    def overdue(self, used: Collection[str]) -> list[str]:
        """Return the keys of adapters that have waited for their end for long enough."""
        now_s = time.monotonic()
        waiting = {
            (key, one.state)
            for key, one in self.registry.adapters.items()
            if one.state == LOADING or (one.state == LEAVING and key not in used)
        }
        self.since_s = {one: self.since_s.get(one, now_s) for one in waiting}
        linger_s = {LEAVING: LINGER_S, LOADING: LOAD_TIMEOUT_S}
        return [key for (key, state), since_s in self.since_s.items() if now_s - since_s >= linger_s[state]]


def still_due(registry: AdapterRegistry, keys: Iterable[str]) -> Iterator[str]:
    """Yield those of the keys whose adapters have not been loaded again meanwhile."""
    return (key for key in keys if key in registry.adapters and registry.adapters[key].state != READY)


def lost(
    sequences: Iterable[Sequence], held: Collection[str], registry: AdapterRegistry
) -> Iterator[Sequence]:
    """Yield the waiting requests whose adapter is in no worker, and in the registry no more, or failed."""
    for sequence in sequences:
        adapter = sequence.request.adapter
        if adapter and sequence.waiting and adapter not in held:
            known = registry.adapters.get(adapter)
            if known is None or known.failure:
                yield sequence
