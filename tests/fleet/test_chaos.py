"""Kills, one in three with another at once, under streams of every kind: no token is lost or repeated,
every process comes back, and nothing is left over.
"""

import pytest

from benchmarks.chaos import run
from tests.support.chaos.outcome import Plan, describe

WITHOUT_MODEL = Plan(
    seed=30,
    kills=30,
    num_streams=32,
    every_s=1.0,
    num_tokens=100,
    num_cases=4,
    step_ms=25.0,
    stopped_grace_s=0.0,
)
WITH_MODEL = Plan(
    seed=6,
    kills=6,
    num_streams=12,
    num_tokens=60,
    num_cases=2,
    step_ms=None,
    counts={"gateway": 2, "batcher": 1, "agent": 2, "engine": 2, "jobs": 1},
    spared=("stop",),
)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [WITHOUT_MODEL, WITH_MODEL], ids=["without a model", "with the model"])
async def test_kills_cost_no_token(plan: Plan) -> None:
    outcome = await run(plan)
    assert not outcome.wrong, describe(plan, outcome)
