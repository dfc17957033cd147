"""Waits: what a benchmark puts in the place of a step's event answers what the engine asks of events."""

from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.step_times.waits import Waits
from gpu_worker.engine.in_flight import InFlightStep


class Event:
    """Has happened."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def test_a_timed_step_can_be_asked_whether_it_is_done() -> None:
    in_flight = object.__new__(InFlightStep)
    in_flight.copied = Event()  # type: ignore[assignment]
    engine: Any = SimpleNamespace(
        loaded=SimpleNamespace(device=torch.device("cpu")), launch=None, sample=lambda launched: in_flight
    )
    waits = Waits(engine)
    assert engine.sample(None).is_done and not waits.waits_s
    engine.sample(None).copied.synchronize()
    assert waits.waits_s
