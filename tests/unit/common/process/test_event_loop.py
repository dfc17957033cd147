"""Beats: tasks with the same interval, or a part of it, wake together, and never twice for one beat."""

import pytest

from common.process.event_loop import until_beat


@pytest.mark.parametrize(
    ("now_s", "interval_s", "left_s"),
    [
        (1000.2, 0.5, 0.3),
        (1000.0, 0.5, 0.5),
        (1000.499, 0.5, 0.501),  # the timer for 1000.5 was early
        (1000.2, 1.0, 0.8),
        (1000.2, 0.05, 0.05),
    ],
)
def test_a_beat_is_a_multiple_of_the_interval(
    now_s: float, interval_s: float, left_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("common.process.event_loop.time.monotonic", lambda: now_s)
    assert until_beat(interval_s) == pytest.approx(left_s)
