"""The learnt target under loads: the scheduler, and the engine's choice of prompts, in simulated time."""

from itertools import pairwise

import pytest

from benchmarks.batcher.timed_pool import Load, StepCosts, TimedPool

SLOW_PROMPTS = StepCosts("", step_ms=7.5, row_ms=0.55, token_ms=0.3, prefill_tokens=2048)
FAST_PROMPTS = StepCosts("", step_ms=6.0, row_ms=0.25, token_ms=0.06, prefill_tokens=2048)
GPU = StepCosts("", step_ms=5.0, row_ms=0.025, token_ms=0.015, prefill_tokens=8192)
TOGETHER = Load("", streams=32, requests=64, in_tokens=128)
APART = Load("", streams=32, requests=96, in_tokens=128, spread=0.5)
LONG = Load("", streams=8, requests=16, in_tokens=1309)
MANY = Load("", streams=256, requests=300, in_tokens=256, spread=0.8)


@pytest.mark.parametrize("load", [TOGETHER, APART, LONG], ids=["together", "apart", "long"])
@pytest.mark.parametrize("costs", [SLOW_PROMPTS, FAST_PROMPTS], ids=["slow", "fast"])
def test_no_tail_is_longer_than_without_a_target(costs: StepCosts, load: Load) -> None:
    learnt = TimedPool(costs, load, None).play()
    free = TimedPool(costs, load, 0.0).play()
    assert learnt.first_token_p99_ms <= 1.02 * free.first_token_p99_ms
    assert learnt.gap_p99_ms <= 1.05 * free.gap_p99_ms
    assert learnt.tokens_per_s >= 0.97 * free.tokens_per_s


def test_where_prompts_come_one_by_one_answers_go_on_evenly() -> None:
    load = Load("", streams=32, requests=100, in_tokens=400, spread=0.8, per_s=2.0)
    learnt, free = TimedPool(SLOW_PROMPTS, load, None).play(), TimedPool(SLOW_PROMPTS, load, 0.0).play()
    assert learnt.gap_p99_ms < 0.8 * free.gap_p99_ms
    assert learnt.first_token_p99_ms <= 1.02 * free.first_token_p99_ms


@pytest.mark.parametrize("costs", [SLOW_PROMPTS, GPU], ids=["cpu", "gpu"])
def test_neither_prompts_nor_answers_starve_at_256_rows(costs: StepCosts) -> None:
    pool = TimedPool(costs, MANY, None)
    learnt, free = pool.play(), TimedPool(costs, MANY, 0.0).play()
    assert learnt.first_token_p99_ms <= 1.02 * free.first_token_p99_ms
    assert learnt.tokens_per_s >= 0.97 * free.tokens_per_s
    longest = max(decoded for decoded, _ in pool.step_tokens) * costs.row_ms + costs.step_ms
    longest += costs.prefill_tokens * costs.token_ms
    gaps = [later - sooner for times in pool.token_ms.values() for sooner, later in pairwise(times)]
    assert max(gaps) <= longest, "a row that decodes has a token in every step"


@pytest.mark.parametrize("target_ms", [60.0, 100.0])
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
