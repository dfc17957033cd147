"""The adapters of an engine: which are known, whose weights are in memory of the host, and which are on the
device.

The device has MAX_LORAS slots; a step has no more adapters than that (batch/adapters.py). What a slot has is
replaced, least recently used first, between two steps, and never while the next step needs it. The host keeps
the weights of MAX_CPU_LORAS adapters; others are read again when rows want them.

All ranks obey the same commands and launch the same steps, so their slots are the same.
"""

import logging
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from common.adapters import AdapterFault
from common.settings.settings import Settings
from gpu_worker.engine.adapters.layers import AdapterLayers
from gpu_worker.engine.adapters.weights import Packed, read_adapter, stamp_of
from gpu_worker.engine.batch.adapters import Adapter
from gpu_worker.engine.batch.row import RowSlice, StepPart, step_of
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.protocol import AdapterAnswer, SetAdapter

log = logging.getLogger(__name__)

KEPT_OF_EACH_SLOT = 4
"""The default of MAX_CPU_LORAS: so many times MAX_LORAS."""


class AdapterCache(StepPart):
    """The adapters of an engine.

    Attributes:
        known: by name; rows that start may have these.
        host: weights in memory of the host, least recently used first.
        used: adapters on the device, least recently used first.
    """

    failure = "adapter"

    def __init__(self, layers: AdapterLayers | None, settings: Settings, communicator: Communicator) -> None:
        self.layers = layers
        self.num_slots = settings.max_loras if layers else 0
        self.num_kept = (settings.max_cpu_loras or KEPT_OF_EACH_SLOT * self.num_slots) if layers else 0
        self.communicator = communicator
        self.known: dict[str, Adapter] = {}
        self.host: dict[Adapter, Packed] = {}
        self.used: dict[Adapter, None] = {}

    def obey(self, command: SetAdapter, in_use: Iterable[Adapter]) -> AdapterAnswer:
        """Load or unload an adapter; rows go on with those `in_use`."""
        if command.path:
            answer = self.load(command.name, Path(command.path))
        else:
            self.known.pop(command.name, None)
            answer = AdapterAnswer(command.name)
        self.forget_all_but({*self.known.values(), *in_use})
        return answer

    def load(self, name: str, folder: Path) -> AdapterAnswer:
        """Load an adapter on all ranks, or on none."""
        adapter = Adapter(name, str(folder))
        weights, cause = self.read_on_all_ranks(adapter)
        if weights is None:
            log.warning("adapter %s is refused: %s", name, cause)
            return AdapterAnswer(name, cause)
        self.known[name] = adapter
        self.keep(adapter, weights)
        log.info("adapter %s is loaded", name)
        return AdapterAnswer(name)

    def read_on_all_ranks(self, adapter: Adapter) -> tuple[Packed | None, str]:
        """What this rank has of an adapter, if all can read theirs; else None, and the first cause. One that
        was read before must have the files of then.
        """
        weights, cause, folder = None, "", Path(adapter.folder)
        try:
            if self.layers is None:
                raise AdapterFault("this worker takes no adapters (ENABLE_LORA)")
            stamp = stamp_of(folder)
            if adapter.stamp not in ((), stamp):
                raise AdapterFault(f"{folder} has changed since it was loaded")
            adapter.stamp = stamp
            weights = read_adapter(folder, self.layers)
        except AdapterFault as fault:
            cause = str(fault)
        except Exception as error:  # whatever is in the files of others, the worker goes on
            log.warning("adapter %s", folder, exc_info=True)
            cause = f"{folder} cannot be read: {getattr(error, 'strerror', None) or repr(error)}"
        cause = next(filter(None, self.communicator.exchange(cause)), "")
        return (None if cause else weights), cause

    def keep(self, adapter: Adapter, weights: Packed) -> None:
        """Keep weights in memory of the host, in place of those least recently used."""
        self.host.pop(adapter, None)
        self.host[adapter] = weights
        while len(self.host) > self.num_kept:
            del self.host[next(iter(self.host))]

    def forget_all_but(self, needed: Collection[Adapter]) -> None:
        """Forget adapters that no row can have any more."""
        for adapter in {*self.host, *self.used} - {*needed}:
            self.host.pop(adapter, None)
            self.used.pop(adapter, None)
            adapter.slot = -1

    def prepare(self, rows: Any, slices: Sequence[RowSlice]) -> Sequence[RowSlice]:
        """Put the adapters of the step on the device; without those that cannot be read any more."""
        asked = dict.fromkeys(part.row.adapter for part in step_of(slices).others if part.row.adapter)
        lost = {adapter for adapter in asked if not self.bring(adapter, asked)}
        return slices if not lost else [part for part in slices if part.row.adapter not in lost]

    def bring(self, adapter: Adapter, needed: Collection[Adapter]) -> bool:
        """Put an adapter into a slot, unless it has one: a free one, or that of an adapter that the step does
        not need → whether its weights can be read.
        """
        if adapter.slot < 0:
            weights = self.host.get(adapter)
            if weights is None:  # all ranks read it again, or none does
                weights, cause = self.read_on_all_ranks(adapter)
                if weights is None:
                    log.error("adapter %s cannot be read again: %s", adapter.name, cause)
                    return False
            self.keep(adapter, weights)
            if len(self.used) < self.num_slots:
                adapter.slot = min({*range(self.num_slots)} - {other.slot for other in self.used})
            else:
                oldest = next(other for other in self.used if other not in needed)
                adapter.slot, oldest.slot = oldest.slot, -1
                del self.used[oldest]
            assert self.layers
            self.layers.place(adapter.slot, weights)
        self.used.pop(adapter, None)
        self.used[adapter] = None
        return True
