"""The prefill budget: TGI's WAITING_SERVED_RATIO and MAX_WAITING_TOKENS beside the target for the gaps."""

from dataclasses import replace

import pytest

from batcher.scheduling.pace import StepTimes
from batcher.scheduling.plan_builder import mixed_prefill_tokens, next_plan, whole_steps_reason
from batcher.scheduling.replica import WorkerLimits
from tests.unit.batcher.scheduling.test_replica import make_replica, make_sequence

SLOW = StepTimes(decode_steps=10, decode_ms=200.0, tokens=100, added_ms=100.0)
"""A decode step takes 20 ms, and each token of a prompt 1 ms more."""


@pytest.mark.parametrize(
    ("ratio", "num_prompts", "num_decoding", "whole"),
    [(0.3, 3, 10, True), (0.3, 2, 10, False), (1.2, 11, 10, False), (1.2, 12, 10, True), (0.0, 1, 9, True)],
)
def test_prompts_take_whole_steps_where_they_are_so_many_for_each_row_that_decodes(
    ratio: float, num_prompts: int, num_decoding: int, whole: bool
) -> None:
    limits = WorkerLimits(waiting_served_ratio=ratio)
    assert whole_steps_reason(limits, [0] * num_prompts, num_decoding) == ("backpressure" if whole else "")


@pytest.mark.parametrize(("age", "whole"), [(19, False), (20, True), (90, True)])
def test_a_prompt_whole_steps_reason_once_it_has_waited_for_so_many(age: int, whole: bool) -> None:
    assert whole_steps_reason(WorkerLimits(max_waiting_tokens=20), [3, age], 100) == (
        "wait_exceeded" if whole else ""
    )


def test_without_prompts_or_without_the_settings_nothing_is_whole() -> None:
    both = WorkerLimits(waiting_served_ratio=0.0, max_waiting_tokens=0)
    assert not whole_steps_reason(both, [], 5)
    assert not whole_steps_reason(WorkerLimits(), [1000] * 9, 1)


def test_a_prompt_that_stands_by_is_not_counted() -> None:
    replica = make_replica(num_blocks=100)
    replica.limits = WorkerLimits(max_batch_size=1, inter_token_target_ms=50.0, max_waiting_tokens=0)
    replica.pace.times = SLOW
    replica.on_prefilled(replica.start(make_sequence(16)), 16, 1)
    replica.start(make_sequence(16))
    assert mixed_prefill_tokens(replica) == 30


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


def test_the_first_prompts_of_a_worker_join_nothing() -> None:
    replica = make_replica(num_blocks=100)
    replica.limits = WorkerLimits(waiting_served_ratio=0.0)
    next_plan(replica, 1, [replica.start(make_sequence(16))])
    assert replica.joins == ""
