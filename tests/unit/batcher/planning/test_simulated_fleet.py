"""Simulated fleets: the real scheduler and simulated workers keep the arithmetic of step costs."""

from dataclasses import replace

import pytest

from batcher.planning.load_trace import TracedRequest, draw_trace
from batcher.planning.simulated_fleet import SimulatedFleet
from batcher.planning.step_costs import StepCosts
from batcher.scheduling.replica import WorkerLimits

COSTS = StepCosts(8.0, 0.5, 0.25, 3.0, 16, 1000, 2048, 256, "a fleet", 500)


def play(trace: list[TracedRequest], workers: int = 1, costs: StepCosts = COSTS) -> SimulatedFleet:
    fleet = SimulatedFleet(costs, workers, WorkerLimits(max_batch_size=costs.max_batch_size))
    fleet.play(trace)
    return fleet


def test_a_request_alone_takes_its_prefill_and_its_steps() -> None:
    fleet = play([TracedRequest(0.0, 100, 40)])
    assert fleet.firsts_ms == pytest.approx([8 + 0.5 + 25 + 3])
    assert fleet.gaps_ms == pytest.approx([8.5] * 39)
    assert fleet.utilisation == pytest.approx(1.0)


def test_a_step_takes_longer_with_more_rows() -> None:
    fleet = play([TracedRequest(0.0, 10, 50) for _ in range(4)])
    assert max(fleet.gaps_ms[10:40]) == pytest.approx(8 + 4 * 0.5)


def test_requests_are_divided_among_workers() -> None:
    fleet = play([TracedRequest(0.0, 10, 50) for _ in range(4)], workers=2)
    assert max(fleet.gaps_ms[10:40]) == pytest.approx(8 + 2 * 0.5)
    assert all(worker.busy_ms > 0 for worker in fleet.workers.values())


@pytest.mark.parametrize("num_blocks", [1000, 40], ids=["roomy", "rows are preempted"])
@pytest.mark.parametrize("workers", [1, 3])
def test_every_request_gets_all_its_tokens(num_blocks: int, workers: int) -> None:
    trace = draw_trace(30.0, 4.0, 100, 60, spread=0.8, seed=1)
    fleet = play(trace, workers, replace(COSTS, num_blocks=num_blocks))
    assert [len(fleet.token_ms[f"r{i}"]) for i in range(len(trace))] == [one.output_tokens for one in trace]
    assert not fleet.refused
    assert 0 < fleet.utilisation <= 1


def test_a_request_that_fits_no_cache_is_refused() -> None:
    trace = [TracedRequest(0.0, 40 * 16, 10), TracedRequest(0.0, 10, 10)]
    fleet = play(trace, costs=replace(COSTS, num_blocks=40))
    assert fleet.refused == ["r0"]
    assert len(fleet.token_ms["r1"]) == 10


def test_an_urgent_request_waits_less_than_batch_work() -> None:
    batch = [TracedRequest(0.0, 400, 60, "batch") for _ in range(8)]
    costs = replace(COSTS, max_batch_size=2)
    fleet = play([*batch, TracedRequest(1.0, 50, 5, "interactive")], costs=costs)
    assert fleet.token_ms["r8"][0] < max(times[0] for times in fleet.token_ms.values()) / 2
