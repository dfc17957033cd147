"""Who waits for whom in an engine's steps: the host for the device, in the read of a step, or the device for
the host, between launches.
"""

import time
from itertools import pairwise
from typing import Any

import torch

from gpu_worker.engine.engine import Engine
from gpu_worker.engine.in_flight import InFlightStep, LaunchedStep


class Moments:
    """Points in the device's own time; on CPU, where the host computes, in the host's."""

    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between_ms(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) if self.on_cuda else (end - begin) * 1e3


class Read:
    """Stands for a flight's event, and notes how long the host waits for it."""

    def __init__(self, event: Any, waits_s: list[float]) -> None:
        self.event, self.waits_s = event, waits_s

    def synchronize(self) -> None:
        began = time.perf_counter()
        self.event.synchronize()
        self.waits_s.append(time.perf_counter() - began)


class Waits:
    """Watches an engine's steps from now on.

    A forward and a choice are one stretch of device work each, uploads included; what lies between two
    stretches is idle. What is idle within a forward that the host launches kernel by kernel counts as work.
    """

    def __init__(self, engine: Engine) -> None:
        self.moments = Moments(engine.loaded.device)
        self.launch, self.sample = engine.launch, engine.sample
        self.clear()
        engine.launch = self.launched  # type: ignore[method-assign]
        engine.sample = self.chosen  # type: ignore[method-assign]

    def clear(self) -> None:
        self.stretches, self.waits_s = list[tuple[Any, Any]](), list[float]()

    def launched(self, before: InFlightStep | None = None) -> LaunchedStep | None:
        begin = self.moments.now()
        launched = self.launch(before)
        if launched:
            self.stretches.append((begin, self.moments.now()))
        return launched

    def chosen(self, launched: LaunchedStep | None) -> InFlightStep | None:
        begin = self.moments.now()
        flight = self.sample(launched)
        if flight:
            self.stretches.append((begin, self.moments.now()))
            if flight.copied:
                flight.copied = Read(flight.copied, self.waits_s)  # type: ignore[assignment]
        return flight

    def told(self, steps: int) -> str:
        """Of steps that have all been read."""
        idle_ms = (
            sum(self.moments.between_ms(end, begin) for (_, end), (begin, _) in pairwise(self.stretches))
            / steps
        )
        return (
            f"the host waits {sum(self.waits_s) / steps * 1e3:.2f} ms of a step, the device {idle_ms:.2f} ms"
        )
