"""Forecasts: figures of each size of a fleet, and which of them hold targets."""

from batcher.planning.forecast import FleetTargets, forecasts, percentile
from batcher.planning.load_trace import draw_trace
from batcher.planning.step_costs import StepCosts

COSTS = StepCosts(8.0, 0.5, 0.25, 3.0, 16, 1000, 2048, 256, "a fleet", 500)


def test_a_percentile_is_one_of_the_values() -> None:
    assert [percentile([1.0, 2.0, 3.0, 4.0], q) for q in (0.25, 0.5, 0.51, 0.99)] == [1.0, 2.0, 3.0, 4.0]
    assert percentile([], 0.5) == 0


def test_a_larger_fleet_is_faster_less_busy_and_dearer() -> None:
    trace = draw_trace(12.0, 10.0, 200, 60, spread=0.5, seed=1)
    one, two, three = forecasts(COSTS, trace, 3, cost_per_worker_hour=2.0)
    assert one.first_token_p99_ms > two.first_token_p99_ms > three.first_token_p99_ms
    assert one.gap_p99_ms > three.gap_p99_ms
    assert one.utilisation > two.utilisation > three.utilisation
    assert [it.cost_per_hour for it in (one, two, three)] == [2.0, 4.0, 6.0]
    targets = FleetTargets(first_token_p99_ms=two.first_token_p99_ms)
    assert [it.holds(targets) for it in (one, two, three)] == [False, True, True]
    assert one.holds(FleetTargets()), "no target is held by any fleet"
