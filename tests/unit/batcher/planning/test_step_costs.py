"""Step costs: learnt from counts, written and read."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.planning.step_costs import StepCosts, StepCounts, fit
from common.settings.settings import SettingError

COSTS = StepCosts(8.0, 0.5, 0.25, 3.0, 16, 1000, 2048, 256, "a fleet", 500)


def counts(steps: float, tokens: float, prompt_tokens: float) -> StepCounts:
    ms = COSTS.step_ms * steps + COSTS.row_ms * tokens + COSTS.prompt_token_ms * prompt_tokens
    return StepCounts(steps, tokens, prompt_tokens, ms)


def test_costs_are_found_from_intervals_under_different_loads() -> None:
    intervals = [counts(200, 200, 300), counts(150, 1200, 900), counts(180, 400, 0), counts(0, 0, 0)]
    assert fit(intervals) == pytest.approx((8.0, 0.5, 0.25))


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 3000), st.integers(0, 5000)), min_size=1))
def test_no_cost_is_negative(loads: list[tuple[int, int, int]]) -> None:
    """Also where the loads do not tell costs apart. A step always has one."""
    step_ms, row_ms, prompt_token_ms = fit([counts(*load) for load in loads])
    assert step_ms > 0
    assert min(row_ms, prompt_token_ms) >= 0


def test_without_different_loads_all_time_is_that_of_steps() -> None:
    assert fit([counts(100, 400, 0), counts(50, 200, 0)]) == pytest.approx((10.0, 0.0, 0.0))


def test_a_cost_that_would_be_negative_is_none() -> None:
    intervals = [replace(counts(100, 100, 0), ms=900.0), replace(counts(100, 900, 0), ms=880.0)]
    step_ms, row_ms, _ = fit(intervals)
    assert row_ms == 0
    assert step_ms == pytest.approx(8.9)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    COSTS.write(tmp_path / "costs")
    assert StepCosts.read(tmp_path / "costs") == COSTS


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"step_ms": "x"}'], ids=["empty", "list", "nothing", "text"]
)
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "costs").write_text(content)
    with pytest.raises(SettingError, match=r"--step-times: .*costs is no file of `--save`"):
        StepCosts.read(tmp_path / "costs")
    with pytest.raises(SettingError, match="cannot be read"):
        StepCosts.read(tmp_path / "nothing")
