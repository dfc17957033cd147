"""StepTimes: what is learnt of steps, and how much prefill a step has beside decode."""

import random
import statistics

import pytest

from batcher.scheduling.pace import StepTimes
from batcher.scheduling.plan_builder import next_plan
from batcher.scheduling.replica import WorkerLimits
from batcher.scheduling.scheduler import Scheduler
from common.messages.plan import Report
from tests.unit.batcher.scheduling.test_replica import make_replica, make_sequence

MOST = 512


def learnt(*step_times: tuple[int, int, int, float]) -> StepTimes:
    times = StepTimes()
    times.add(step_times)
    return times


def test_decode_and_what_each_token_of_a_prompt_adds_are_told_apart() -> None:
    times = learnt((10, 10, 0, 200.0), (4, 4, 100, 130.0), (2, 0, 200, 100.0))
    assert times.step_ms == pytest.approx(20)
    assert times.added_ms / times.tokens == pytest.approx(0.5), "beside rows that decode, and alone"


@pytest.mark.parametrize(
    ("target_ms", "tokens"),
    [
        (50.0, 120),  # 20 ms decode, 30 ms are left for 0.25 ms each
        (100.0, 320),
        (21.0, 20),  # a quarter of that at least
        (5.0, 20),
        (1000.0, MOST),
        (0.0, MOST),
    ],
)
def test_prefill_takes_what_decode_leaves_of_the_target(target_ms: float, tokens: int) -> None:
    assert learnt((1, 1, 0, 20.0), (1, 1, 100, 45.0)).prefill_tokens(target_ms, MOST) == tokens


@pytest.mark.parametrize("step_times", [[], [(1, 1, 0, 20.0)], [(1, 0, 100, 50.0)]])
def test_what_is_not_known_bounds_nothing(step_times: list[tuple[int, int, int, float]]) -> None:
    assert learnt(*step_times).prefill_tokens(25.0, MOST) == MOST


def test_sixteen_tokens_go_beside_decode_however_slow_a_worker_is() -> None:
    times = learnt((1, 1, 0, 20.0), (1, 1, 1, 500.0))
    assert times.prefill_tokens(25.0, MOST) == 16
    assert times.prefill_tokens(25.0, 8) == 8, "unless a step has fewer at most"


def test_noise_does_not_wear_the_budget_down() -> None:
    """On a loaded machine a step takes up to four times as long, and a few tokens add less than that."""
    draw, times, budgets = random.Random(1), StepTimes(), []
    for _ in range(2000):
        tokens = times.prefill_tokens(2 * times.step_ms, MOST)
        times.add([(1, 1, 0, 20.0 * draw.uniform(1, 4))])
        times.add([(1, 1, tokens, (20.0 + 0.25 * tokens) * draw.uniform(1, 4))])
        budgets.append(tokens)
    # 50 ms a decode step: as much is left, for 0.625 ms each
    assert 60 < statistics.median(budgets[200:]) < 110


def test_figures_that_cannot_be_are_ignored() -> None:
    """A report is what another process wrote."""
    times = learnt((1, 1, 0, 20.0), (1, 1, 100, 70.0))
    before = times.prefill_tokens(50.0, MOST)
    times.add([(0, 0, 0, 5.0), (-1, 0, 5, 5.0), (1, 1, -5, 5.0), (1, 1, 0, -1.0)])
    assert times.prefill_tokens(50.0, MOST) == before


def test_newer_steps_count_more() -> None:
    times = learnt((100, 100, 0, 2000.0), (10, 10, 1000, 700.0))
    times.add([(100, 100, 0, 4000.0)])
    assert 36 < times.step_ms < 40


def test_a_plan_follows_the_target_once_reports_carry_times() -> None:
    replica = make_replica(num_blocks=100)
    replica.limits = WorkerLimits(inter_token_target_ms=30.0)
    scheduler = Scheduler(replica.limits, 1)
    scheduler.replicas["w1"] = replica
    replica.start(make_sequence(16))
    plan = next_plan(replica, 1, [])
    assert plan and plan.mixed_prefill_tokens == plan.prefill_tokens == 64
    times = [(5, 5, 0, 100.0), (1, 1, 64, 36.0)]
    scheduler.apply_report("w1", Report(1, 1, 1, 20, step_times=times))
    plan = next_plan(replica, 1, [])
    assert plan and (plan.mixed_prefill_tokens, plan.prefill_tokens) == (40, 64)


@pytest.mark.parametrize(
    ("step_ms", "tokens"),
    [
        (10.0, 360),  # 100 ms, of which decode leaves 90, for 0.25 ms each
        (50.0, 400),  # 150 ms, three times as long as decode
        (100.0, 800),
        (600.0, 2048),
    ],
)
def test_a_learnt_target_is_a_tenth_of_a_second_or_three_decode_steps(step_ms: float, tokens: int) -> None:
    assert learnt((1, 1, 0, step_ms), (1, 1, 100, step_ms + 25)).prefill_tokens(None, 2048) == tokens


@pytest.mark.parametrize(("target_ms", "may_exceed"), [(None, True), (0.0, False), (30.0, False)])
def test_a_worker_may_exceed_the_learnt_target_and_none_that_was_set(
    target_ms: float | None, may_exceed: bool
) -> None:
    replica = make_replica(num_blocks=100)
    replica.limits = WorkerLimits(inter_token_target_ms=target_ms)
    replica.start(make_sequence(16))
    plan = next_plan(replica, 1, [])
    assert plan and plan.may_exceed == may_exceed
