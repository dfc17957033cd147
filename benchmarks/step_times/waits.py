"""Waits of an engine's steps, which benchmarks/engine.py prints: of the host for the device, when it reads a
step, and of the device for the host, between launches.
"""

import time
from itertools import pairwise
from typing import Any

import torch

from gpu_worker.engine.engine import Engine
from gpu_worker.engine.in_flight import InFlightStep, LaunchedStep


class DeviceClock:
    """Times of the device's work: CUDA events; on CPU, where the host computes, the host's clock."""

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


class TimedEvent:
    """Wraps the event of a step in flight, and records how long the host waits for it."""

    def __init__(self, event: Any, waits_s: list[float]) -> None:
        self.event = event
        self.waits_s = waits_s

    def synchronize(self) -> None:
        began = time.perf_counter()
        self.event.synchronize()
        self.waits_s.append(time.perf_counter() - began)

    def query(self) -> bool:
        """Tell whether the device has come to it."""
        return bool(self.event.query())


class Waits:
    """Measures the steps that an engine runs from now on.

    A forward and a sampling are one stretch of device work each, uploads included; between two stretches the
    device is idle. Idle time within a forward that the host launches kernel by kernel counts as work.
    """

    def __init__(self, engine: Engine) -> None:
        self.clock = DeviceClock(engine.loaded.device)
        self.launch = engine.launch
        self.sample = engine.sample
        self.stretches: list[tuple[Any, Any]] = []
        self.waits_s: list[float] = []
        engine.launch = self.timed_launch  # type: ignore[method-assign]
        engine.sample = self.timed_sample  # type: ignore[method-assign]

    def clear(self) -> None:
        self.stretches = []
        self.waits_s = []

    def timed_launch(self, before: InFlightStep | None = None) -> LaunchedStep | None:
        begin = self.clock.now()
        launched = self.launch(before)
        if launched:
            self.stretches.append((begin, self.clock.now()))
        return launched

    def timed_sample(self, launched: LaunchedStep | None) -> InFlightStep | None:
        begin = self.clock.now()
        in_flight = self.sample(launched)
        if in_flight:
            self.stretches.append((begin, self.clock.now()))
            if in_flight.copied:
                in_flight.copied = TimedEvent(in_flight.copied, self.waits_s)  # type: ignore[assignment]
        return in_flight

    def describe(self, steps: int) -> str:
        """Describes the waits of steps that have all been read."""
        idle_ms = (
            sum(self.clock.between_ms(end, begin) for (_, end), (begin, _) in pairwise(self.stretches))
            / steps
        )
        return (
            f"the host waits {sum(self.waits_s) / steps * 1e3:.2f} ms of a step, the device {idle_ms:.2f} ms"
        )
