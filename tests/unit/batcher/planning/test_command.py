"""`tokenfleet plan`: its answer, and its flags."""

import json
from pathlib import Path

import pytest

from batcher.planning.command import main
from batcher.planning.step_costs import StepCosts
from common.settings.settings import SettingError

COSTS = StepCosts(8.0, 0.5, 0.25, 3.0, 16, 1000, 2048, 256, "a fleet", 500)
LOAD = ["--rps", "12", "--prompt-tokens", "200", "--output-tokens", "60", "--duration", "10"]


@pytest.fixture
def step_times(tmp_path: Path) -> list[str]:
    COSTS.write(tmp_path / "costs")
    return ["--step-times", str(tmp_path / "costs")]


def test_the_smallest_fleet_that_holds_the_targets_is_named(
    step_times: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*step_times, *LOAD, "--max-workers", "3", "--json"]) == 0
    sizes = json.loads(capsys.readouterr().out)["fleets"]
    target = ["--first-token-p99", str(sizes[1]["first_token_p99_ms"])]
    assert main([*step_times, *LOAD, *target, "--max-workers", "3", "--cost-per-worker-hour", "2"]) == 0
    out = capsys.readouterr().out
    assert "2 workers hold first token p99 of" in out
    assert "a step takes 8 ms, 0.5 ms more for each row" in out


def test_targets_that_no_fleet_holds_end_with_1(
    step_times: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*step_times, *LOAD, "--gap-p99", "1", "--max-workers", "2"]) == 1
    assert "no fleet of this size holds gap p99 of 1 ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (LOAD, "--from"),
        (["--step-times", "x", "--from", "http://x", *LOAD], "--from"),
        (["--step-times", "x", "--rps", "2"], "--rps"),
        (["--step-times", "x", "--trace", "y", "--rps", "2"], "--trace"),
        (["--step-times", "x", *LOAD, "--gap-p99", "0"], "--gap-p99"),
        (["--step-times", "x", *LOAD, "--spread", "1"], "--spread"),
        (["--step-times", "x", *LOAD, "--max-workers", "0"], "--max-workers"),
        (["--from", "redis://x", *LOAD], "--from"),
    ],
)
def test_a_wrong_flag_is_named(flags: list[str], name: str) -> None:
    with pytest.raises(SettingError) as error:
        main(flags)
    assert error.value.name == name
