"""WorkerPace: as many steps are granted as grants take to come, within memory, and stops come at once."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.scheduling.pace import CACHE_PARTS, LAUNCHED_STEPS, LEAST_HORIZON, WorkerPace, horizon
from batcher.scheduling.replica import WorkerLimits
from common.messages.plan import Report
from tests.support.scheduling.late_pool import LatePool

MOST = WorkerLimits().max_horizon
MANY = 10**6


@pytest.mark.parametrize(
    ("trip_steps", "slots_per_row", "steps"),
    [
        (0, MANY, 32),
        (14, MANY, 32),
        (15, MANY, 34),
        (100, MANY, 204),
        (200, MANY, MOST),
        (100, 8 * 60, 60),  # an eighth of the cache
        (100, 8 * 10, 32),
        (0, 1, 32),
    ],
)
def test_half_of_the_steps_granted_last_as_long_as_a_grant_takes(
    trip_steps: int, slots_per_row: int, steps: int
) -> None:
    assert horizon(MOST, trip_steps, slots_per_row) == steps
    assert horizon(5, trip_steps, slots_per_row) == 5, "HORIZON"


@given(most=st.integers(1, 10**4), trip_steps=st.integers(0, 10**4), slots_per_row=st.integers(0, 10**6))
def test_what_is_granted_keeps_within_memory_and_setting(
    most: int, trip_steps: int, slots_per_row: int
) -> None:
    steps = horizon(most, trip_steps, slots_per_row)
    assert min(most, LEAST_HORIZON) <= steps <= most
    assert steps <= LEAST_HORIZON or CACHE_PARTS * steps <= slots_per_row
    assert steps <= horizon(most, trip_steps + 1, slots_per_row)
    is_bounded = steps == most or CACHE_PARTS * (steps + 1) > slots_per_row
    assert is_bounded or steps // 2 >= trip_steps + LAUNCHED_STEPS


def learnt(*round_trips: float) -> WorkerPace:
    pace = WorkerPace()
    pace.add(Report(1, 1, 1, 1, step_times=[(10, 10, 0, 20.0)]), 10)
    for ms in round_trips:
        pace.add(Report(1, 1, 1, 1, round_trips=[ms]), 0)
    return pace


def test_a_late_round_trip_counts_until_many_have_been_shorter() -> None:
    assert learnt().late_trip_steps == 0
    assert learnt(10.0, 31.0, *[10.0] * 5).late_trip_steps == 15
    assert learnt(10.0, 31.0, *[10.0] * 500).late_trip_steps == 5
    assert learnt(10.0, 31.0, *[10.0] * 500).trip_ms == pytest.approx(10.0)


def test_round_trips_that_cannot_be_are_ignored() -> None:
    """A report is what another process wrote."""
    assert learnt(10.0, -1.0, 0.0, math.inf, math.nan) == learnt(10.0)


def test_ends_are_counted_by_the_steps_in_which_they_come() -> None:
    pace = learnt(16.0)
    for step in range(1, 1001):
        ended = [(step, "length", 5)] if step % 10 == 0 else []
        pace.add(Report(1, 1, 1, step, ended=ended), 1)
    assert pace.ends_per_trip == pytest.approx(0.1 * (8 + LAUNCHED_STEPS), rel=0.1)


@pytest.mark.parametrize("late", [0, 20, 50])
def test_the_engine_is_never_idle_however_late_plans_and_reports_are(late: int) -> None:
    pool = LatePool(late, WorkerLimits(max_batch_size=16), num_blocks=8192)
    pool.run(500)
    assert 0 not in pool.run(500)


def test_a_horizon_that_does_not_follow_leaves_holes() -> None:
    pool = LatePool(20, WorkerLimits(max_batch_size=16, max_horizon=32), num_blocks=8192)
    pool.run(500)
    assert pool.run(500)[0] > 50


@settings(max_examples=15)
@given(late=st.integers(0, 60), num_blocks=st.integers(80, 1500), eos_chance=st.floats(0.002, 0.1))
def test_blocks_granted_ahead_stay_within_an_eighth_of_the_cache(
    late: int, num_blocks: int, eos_chance: float
) -> None:
    limits = WorkerLimits(max_batch_size=16)
    pool = LatePool(late, limits, num_blocks, eos_chance)
    for _ in range(100):
        pool.run(2)
        replica = pool.replica
        rows = max(1, replica.num_running)
        assert replica.horizon <= max(LEAST_HORIZON, 16 * num_blocks // CACHE_PARTS // rows)
        assert replica.pool.num_free >= 0


def test_a_cancel_stops_a_row_as_soon_as_its_plan_is_there_however_much_is_granted() -> None:
    late = 40
    pool = LatePool(late, WorkerLimits(max_batch_size=16), num_blocks=8192, eos_chance=0)
    pool.run(600)
    assert pool.replica.horizon > 4 * late
    number, row = next(iter(pool.worker.rows.items()))
    pool.pool.scheduler.cancel(row.start.request.request_id, "client")
    pool.run(late + 1)
    assert number not in pool.worker.rows
