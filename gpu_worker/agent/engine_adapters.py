"""Engine adapters: which LoRA adapters an engine has, and how a worker follows the registry of its pool."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from common.adapter_registry import AdapterRegistry, change_registry, read_newer
from common.adapters import AdapterFault, HeldAdapters, PoolAdapter, digest_of, find_folder, read_config
from common.broker.client import FailureLog
from common.broker.pool_client import ChangeRefused, PoolClient
from common.process.event_loop import until_beat
from gpu_worker.agent.engine_client import EngineClient
from gpu_worker.protocol import SetAdapter

log = logging.getLogger(__name__)

NOTE_TIMEOUT_S = 2.0


@dataclass(slots=True)
class EngineAdapters:
    """What an engine has.

    Attributes:
        loaded: keys of adapters with which rows may start.
        refused: key → the record that was refused, and why. Another record of the key is tried again.
    """

    loaded: set[str] = field(default_factory=set)
    refused: dict[str, tuple[PoolAdapter, str]] = field(default_factory=dict)

    @property
    def message(self) -> HeldAdapters:
        causes = [(key, one.added_ms, cause) for key, (one, cause) in self.refused.items()]
        return HeldAdapters(sorted(self.loaded), causes)

    def missing(self, registry: AdapterRegistry) -> list[PoolAdapter]:
        """Return the adapters that the engine is still to load."""
        tried = {(key, one.added_ms) for key, (one, _) in self.refused.items()}
        return [
            one
            for key, one in registry.adapters.items()
            if key not in self.loaded and (key, one.added_ms) not in tried
        ]


@dataclass(eq=False)
class AdapterFollower:
    """Has the engine load what the registry has, and unload what it has no more once no row has it.

    Attributes:
        registry: as it was read last.
        loading: what the engine loads now.
        used: returns the keys of adapters that rows have.
        note_change: called when the engine has answered.
    """

    pool: PoolClient
    engine: EngineClient
    adapters: EngineAdapters
    interval_s: float
    used: Callable[[], Collection[str]]
    note_change: Callable[[], None]
    registry: AdapterRegistry = field(default_factory=AdapterRegistry)
    loading: PoolAdapter | None = None

    async def run(self) -> None:
        """Never returns."""
        failures = FailureLog(log, "reading the adapters")
        while True:
            with failures.caught():
                await self.read()
                await self.follow()
            await asyncio.sleep(until_beat(self.interval_s))

    async def read(self) -> None:
        """Read the registry if it has changed. A broker that has lost it gets it back from a gateway: until
        then it stands as it was.
        """
        found = await read_newer(self.pool, self.registry)
        if found.version:
            self.registry = found

    async def follow(self) -> None:
        """Load what is missing, then unload what nobody wants."""
        adapters = self.adapters
        for adapter in adapters.missing(self.registry):
            await self.load(adapter)
        gone = [key for key in adapters.refused if key not in self.registry.adapters]
        for key in gone:
            del adapters.refused[key]
        if self.registry.version:
            kept = {*self.registry.adapters, *self.used()}
            for key in [key for key in adapters.loaded if key not in kept]:
                await self.unload(key)

    async def load(self, adapter: PoolAdapter) -> None:
        adapters, key = self.adapters, adapter.key
        try:
            if adapter.failure:
                raise AdapterFault(adapter.failure)
            folder = await asyncio.to_thread(find_own_folder, adapter)
            self.loading = adapter
            command = SetAdapter(key, str(folder), adapter.path, adapter.digest)
            cause = (await self.engine.ask(command)).cause
            self.loading = None
        except AdapterFault as fault:
            cause = str(fault)
        if cause:
            adapters.refused[key] = adapter, cause
            log.error("the adapter %s is refused: %s", adapter.name, cause)
        else:
            adapters.refused.pop(key, None)
            adapters.loaded.add(key)
            log.info("the adapter %s is loaded", key)
        self.note_change()

    async def note_end(self, cause: Exception) -> None:
        """Note why the engine has ended. If it was loading an adapter that has ended another one before, no
        worker tries that again: the next engine would end, too.
        """
        if (adapter := self.loading) is None:
            return
        failure = f"an engine ended while it loaded {adapter.name}: {cause}"
        log.error("%s", failure)
        failures = FailureLog(log, "noting the adapter that failed")
        with failures.caught(), contextlib.suppress(ChangeRefused):  # others change it all the time
            async with asyncio.timeout(NOTE_TIMEOUT_S):
                await change_registry(self.pool, lambda found: found.with_failure(adapter, failure))

    async def unload(self, key: str) -> None:
        self.adapters.loaded.discard(key)  # first: no row may start with it from here on
        self.note_change()
        await self.engine.ask(SetAdapter(key))
        log.info("the adapter %s is unloaded", key)


def find_own_folder(adapter: PoolAdapter) -> Path:
    """Return the folder of an adapter of the registry on this machine. Raises AdapterFault if it has other
    files.
    """
    folder, _ = find_folder(adapter.path)
    read_config(folder)
    if digest_of(folder) != adapter.digest:
        raise AdapterFault(f"{folder} has other files than when it was loaded: load it again")
    return folder
