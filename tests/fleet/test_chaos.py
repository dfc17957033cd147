"""Thirty kills, one in three with another at once, under streams of every kind: no token is lost or repeated,
every process comes back, and nothing is left over.
"""

from benchmarks.chaos import Plan, describe, run

PLAN = Plan(
    seed=30,
    kills=30,
    num_streams=32,
    every_s=1.0,
    num_tokens=100,
    num_cases=4,
    step_ms=25.0,
    spared=["set-back"],
)


async def test_thirty_kills_cost_no_token() -> None:
    outcome = await run(PLAN)
    assert not outcome.wrong, describe(PLAN, outcome)
