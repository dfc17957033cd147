"""LaunchPace: a launch waits for grants nearly as long as the step before it runs, the device for none."""

import random

import pytest

from gpu_worker.engine.in_flight import LaunchPace

STEP_S = 0.01


class Device:
    """A device that computes a step in STEP_S, and a host that is late by up to `late_s` wherever it waits.

    Attributes:
        idle_s: how long no step ran.
        leads_s: how long before the end of a step the next one was launched, of each.
        started_s, prefill_tokens: of the step that runs.
    """

    def __init__(self, late_s: float) -> None:
        self.late_s = late_s
        self.draw = random.Random(1)
        self.pace = LaunchPace()
        self.now_s, self.free_s = 100.0, 100.0 + STEP_S
        self.started_s, self.prefill_tokens = 100.0, 0
        self.idle_s = 0.0
        self.leads_s: list[float] = []

    def step(self, prefill_tokens: int = 0, step_s: float = STEP_S, read_late_s: float = 0.0) -> None:
        """Launch a step that takes `step_s`, and read the one before it."""
        self.now_s += max(0.0, self.pace.slack_s(self.now_s)) + self.draw.uniform(0.0, self.late_s)
        launched_s = self.now_s
        self.leads_s.append(self.free_s - self.now_s)
        self.pace.on_launch(is_late=self.now_s >= self.free_s)
        end_s, began_s = self.free_s, max(self.now_s, self.free_s)
        self.idle_s += began_s - end_s
        self.free_s = began_s + step_s
        self.now_s = max(self.now_s, end_s) + read_late_s
        self.pace.on_read(self.started_s, self.now_s, self.prefill_tokens)
        self.started_s, self.prefill_tokens = launched_s, prefill_tokens


@pytest.mark.parametrize("late", [0.0, 0.05, 0.3])
def test_a_launch_waits_for_most_of_a_step_and_the_device_does_not_wait(late: float) -> None:
    device = Device(late * STEP_S)
    for _ in range(2000):
        device.step()
    leads_s, idle_s = device.leads_s[1000:], device.idle_s
    assert sum(leads_s) / len(leads_s) < (late + 0.2) * STEP_S
    assert idle_s < 0.01 * 2000 * STEP_S


def test_nothing_waits_before_the_length_of_a_step_is_known() -> None:
    assert LaunchPace().slack_s(100.0) <= 0


def test_a_long_step_or_one_that_is_read_late_makes_no_other_late() -> None:
    device = Device(0.0)
    for turn in range(2000):
        is_long = turn % 20 == 10
        device.step(500 * is_long, STEP_S * (10 if is_long else 1), STEP_S / 2 if turn % 20 == 0 else 0.0)
    assert device.idle_s < 0.02 * (device.now_s - 100.0)
