"""When an event that was not delivered is sent again."""

import pytest

from api.webhooks.schedule import JITTER, WAITS_S, next_wait_s

DAY_S = 86_400.0


@pytest.mark.parametrize("num_failures", range(1, len(WAITS_S) + 3))
def test_each_failure_waits_its_time_and_the_last_one_repeats(num_failures: int) -> None:
    expected = WAITS_S[min(num_failures, len(WAITS_S)) - 1]
    assert next_wait_s(num_failures, 0.0, DAY_S, lambda: 0.5) == expected


@pytest.mark.parametrize(("chance", "factor"), [(0.0, 1 - JITTER), (1.0, 1 + JITTER)])
def test_a_wait_is_a_little_shorter_or_longer(chance: float, factor: float) -> None:
    assert next_wait_s(2, 0.0, DAY_S, lambda: chance) == pytest.approx(WAITS_S[1] * factor)


def test_the_last_attempt_is_at_the_end_of_its_time_and_then_the_event_is_dead() -> None:
    assert next_wait_s(6, DAY_S - 60, DAY_S, lambda: 0.5) == 60
    assert next_wait_s(7, DAY_S, DAY_S, lambda: 0.5) is None
