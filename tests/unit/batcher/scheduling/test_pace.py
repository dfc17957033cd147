"""Pace: how many steps are granted ahead, and how much prefill goes beside decode, from what reports say."""

import random
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.scheduling.plan_builder import mixed_prefill_tokens, next_plan
from batcher.scheduling.replica import CACHE_PARTS, LEAST_HORIZON, StepTimes, WorkerLimits, WorkerPace
from benchmarks.batcher.timed_pool import Load, StepCosts, TimedPool
from common.messages.plan import Report
from tests.support.fleet.simulated_pool import LatePool, make_replica, make_sequence

# --- pace ---------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("late", [0, 20, 50])
def test_the_engine_is_never_idle_however_late_plans_and_reports_are(late: int) -> None:
    pool = LatePool(late, WorkerLimits(max_batch_size=16), num_blocks=8192)
    pool.run_ticks(500)
    assert 0 not in pool.run_ticks(500)


@settings(max_examples=15)
@given(late=st.integers(0, 60), num_blocks=st.integers(80, 1500), eos_chance=st.floats(0.002, 0.1))
def test_blocks_granted_ahead_stay_within_an_eighth_of_the_cache(
    late: int, num_blocks: int, eos_chance: float
) -> None:
    limits = WorkerLimits(max_batch_size=16)
    pool = LatePool(late, limits, num_blocks, eos_chance)
    for _ in range(100):
        pool.run_ticks(2)
        replica = pool.replica
        rows = max(1, replica.num_running)
        assert replica.horizon <= max(LEAST_HORIZON, 16 * num_blocks // CACHE_PARTS // rows)
        assert replica.pool.num_free >= 0


def test_a_cancel_stops_a_row_as_soon_as_its_plan_is_there_however_much_is_granted() -> None:
    late = 40
    pool = LatePool(late, WorkerLimits(max_batch_size=16), num_blocks=8192, eos_chance=0)
    pool.run_ticks(600)
    assert pool.replica.horizon > 4 * late
    number, row = next(iter(pool.worker.live.items()))
    pool.scheduler.cancel(row.request.request_id, "client")
    pool.run_ticks(late + 1)
    assert number not in pool.worker.live


# --- pace step times ----------------------------------------------------------------------------------------

MOST_TOKENS = 512


def learnt_times(*step_times: tuple[int, int, int, float]) -> StepTimes:
    times = StepTimes()
    times.add(step_times)
    return times


@pytest.mark.parametrize(
    ("target_ms", "tokens"),
    [
        (50.0, 120),  # 20 ms decode, 30 ms are left for 0.25 ms each
        (100.0, 320),
        (21.0, 20),  # a quarter of that at least
        (5.0, 20),
        (1000.0, MOST_TOKENS),
        (0.0, MOST_TOKENS),
    ],
)
def test_prefill_takes_what_decode_leaves_of_the_target(target_ms: float, tokens: int) -> None:
    assert learnt_times((1, 1, 0, 20.0), (1, 1, 100, 45.0)).prefill_tokens(target_ms, MOST_TOKENS) == tokens


def test_sixteen_tokens_go_beside_decode_however_slow_a_worker_is() -> None:
    times = learnt_times((1, 1, 0, 20.0), (1, 1, 1, 500.0))
    assert times.prefill_tokens(25.0, MOST_TOKENS) == 16
    assert times.prefill_tokens(25.0, 8) == 8, "unless a step has fewer at most"


def test_noise_does_not_wear_the_budget_down() -> None:
    """On a loaded machine a step takes up to four times as long, and a few tokens add less than that."""
    draw, times, budgets = random.Random(1), StepTimes(), []
    for _ in range(2000):
        tokens = times.prefill_tokens(2 * times.step_ms, MOST_TOKENS)
        times.add([(1, 1, 0, 20.0 * draw.uniform(1, 4))])
        times.add([(1, 1, tokens, (20.0 + 0.25 * tokens) * draw.uniform(1, 4))])
        budgets.append(tokens)
    # 50 ms a decode step: as much is left, for 0.625 ms each
    assert 60 < statistics.median(budgets[200:]) < 110


# --- plan builder prefill budget ----------------------------------------------------------------------------

SLOW = StepTimes(decode_steps=10, decode_ms=200.0, tokens=100, added_ms=100.0)
"""A decode step takes 20 ms, and each token of a prompt 1 ms more."""


def test_a_prompt_waits_from_when_it_has_a_place() -> None:
    """Until then rows of its worker decode, and could not have let it in."""
    replica = make_replica(num_blocks=100)
    replica.limits = WorkerLimits(max_batch_size=1, inter_token_target_ms=50.0, max_waiting_tokens=20)
    replica.pace.times = SLOW
    first = replica.start(make_sequence(16))
    replica.on_prefilled(first, 16, 1)
    replica.start(make_sequence(16))
    other = replica.start(make_sequence(16))
    replica.step = 100
    assert mixed_prefill_tokens(replica) == 30
    replica.end_row(first)
    replica.limits = replace(replica.limits, max_batch_size=2)
    replica.on_prefilled(other, 16, 101)
    budgets = []
    for replica.step in (119, 120):
        budgets.append(mixed_prefill_tokens(replica))
    assert budgets == [30, 64]


def test_an_answer_that_was_interrupted_is_computed_again_in_whole_steps() -> None:
    """Until then it stands still, which is worse than a longer step of those that run."""
    replica = make_replica(num_blocks=100)
    replica.limits = WorkerLimits(inter_token_target_ms=50.0)
    replica.pace.times = SLOW
    replica.on_prefilled(replica.start(make_sequence(16)), 16, 1)
    interrupted = make_sequence(16)
    interrupted.base = 3
    row = replica.start(interrupted)
    replica.start(make_sequence(16))
    assert mixed_prefill_tokens(replica) == 64
    replica.on_prefilled(row, 19, 2)
    assert mixed_prefill_tokens(replica) == 30


@pytest.mark.parametrize(
    ("limits", "budgets", "joins"),
    [
        (WorkerLimits(inter_token_target_ms=50.0), [30, 30], ["chunking", ""]),
        (WorkerLimits(inter_token_target_ms=50.0, waiting_served_ratio=1.0), [64, 64], ["backpressure", ""]),
        (WorkerLimits(inter_token_target_ms=50.0, waiting_served_ratio=1.2), [30, 30], ["chunking", ""]),
        (
            WorkerLimits(inter_token_target_ms=50.0, max_waiting_tokens=16),
            [30, 64],
            ["chunking", "wait_exceeded"],
        ),
    ],
)
def test_a_plan_grants_whole_steps_beside_the_target(
    limits: WorkerLimits, budgets: list[int], joins: list[str]
) -> None:
    """One row decodes, another's prompt waits; the second plan comes 16 steps after its start."""
    replica = make_replica(num_blocks=100)
    replica.limits, replica.pace.times = limits, SLOW
    replica.on_prefilled(replica.start(make_sequence(16)), 16, 1)
    row = replica.start(make_sequence(16))
    plans, reasons = [next_plan(replica, 1, [row])], [replica.joins]
    replica.step = 16
    plans.append(next_plan(replica, 1, []))
    reasons.append(replica.joins)
    assert [plan and plan.mixed_prefill_tokens for plan in plans] == budgets
    assert reasons == joins


# --- pace load ----------------------------------------------------------------------------------------------

SLOW_PROMPTS = StepCosts("", step_ms=7.5, row_ms=0.55, token_ms=0.3, prefill_tokens=2048)
TOGETHER = Load("", streams=32, requests=64, in_tokens=128)
APART = Load("", streams=32, requests=96, in_tokens=128, spread=0.5)
LONG = Load("", streams=8, requests=16, in_tokens=1309)
MANY_ROWS = Load("", streams=256, requests=300, in_tokens=256, spread=0.8)


def test_no_answer_stands_still_for_longer_than_the_longest_step_at_256_rows() -> None:
    pool, costs = TimedPool(SLOW_PROMPTS, MANY_ROWS, 0.0), SLOW_PROMPTS
    pool.play()
    longest = max(decoded for decoded, _ in pool.step_tokens) * costs.row_ms + costs.step_ms
    longest += costs.prefill_tokens * costs.token_ms
    gaps = [later - sooner for times in pool.token_ms.values() for sooner, later in pairwise(times)]
    assert max(gaps) <= longest, "a row that decodes has a token in every step"


@pytest.mark.parametrize("target_ms", [60.0])
@pytest.mark.parametrize("load", [TOGETHER, APART, LONG], ids=["together", "apart", "long"])
def test_a_target_that_a_user_set_bounds_every_step_once_times_are_known(
    load: Load, target_ms: float
) -> None:
    pool = TimedPool(SLOW_PROMPTS, load, target_ms)
    pool.play()
    mixed = [
        SLOW_PROMPTS.step_ms + SLOW_PROMPTS.row_ms * decoded + SLOW_PROMPTS.token_ms * prefilled
        for decoded, prefilled in pool.step_tokens[20:]
        if decoded and prefilled
    ]
    assert mixed
    # the time of decode alone is a mean, of more or fewer rows
    assert max(mixed) < target_ms + SLOW_PROMPTS.row_ms * load.streams
