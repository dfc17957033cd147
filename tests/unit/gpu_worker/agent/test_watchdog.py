"""The watchdog alone, with a clock and a run delay that are set."""

from dataclasses import dataclass

import pytest

from gpu_worker.agent.watchdog import EngineStuck, Watchdog


@dataclass
class Machine:
    """A clock, and how long the engine waited for a core."""

    now_s: float = 100.0
    delay_s: float = 0.0
    timeout_s: float = 60.0
    is_busy: bool = True

    def watchdog(self) -> Watchdog:
        return Watchdog(lambda: self.timeout_s, lambda: self.is_busy, lambda: self.delay_s)

    def run(self, watchdog: Watchdog, seconds: int, starved: float = 0.0) -> None:
        """Checks once a second; of each, the engine waits `starved` for a core."""
        for _ in range(seconds):
            self.now_s += 1
            self.delay_s += starved
            watchdog.check()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr("time.monotonic", lambda: made.now_s)
    return made


def test_no_step_for_longer_than_the_timeout_raises(machine: Machine) -> None:
    watchdog = machine.watchdog()
    machine.run(watchdog, 60)
    with pytest.raises(EngineStuck, match="no step and no answer for 61 s"):
        machine.run(watchdog, 1)


def test_a_step_resets_the_time(machine: Machine) -> None:
    watchdog = machine.watchdog()
    machine.run(watchdog, 59)
    watchdog.reset()
    machine.run(watchdog, 59)


def test_an_engine_without_work_is_never_stuck(machine: Machine) -> None:
    watchdog = machine.watchdog()
    machine.is_busy = False
    machine.run(watchdog, 1000)


def test_the_time_without_work_does_not_count_once_there_is_some(machine: Machine) -> None:
    watchdog = machine.watchdog()
    machine.is_busy = False
    machine.run(watchdog, 1000)
    machine.is_busy = True
    machine.run(watchdog, 60)


def test_the_timeout_is_read_at_each_check(machine: Machine) -> None:
    watchdog = machine.watchdog()
    machine.timeout_s = 1000.0
    machine.run(watchdog, 100)
    machine.timeout_s = 10.0
    with pytest.raises(EngineStuck):
        machine.run(watchdog, 1)


def test_an_engine_that_waits_for_a_core_is_not_stuck(machine: Machine) -> None:
    watchdog = machine.watchdog()
    machine.run(watchdog, 500, starved=0.95)
    with pytest.raises(EngineStuck):
        machine.run(watchdog, 101, starved=0.95)


def test_an_agent_that_was_stopped_reads_its_steps_first(machine: Machine) -> None:
    watchdog = machine.watchdog()
    machine.now_s += 600
    watchdog.check()
