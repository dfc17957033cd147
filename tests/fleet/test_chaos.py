"""Kills, one in three with another at once, under streams of every kind: no token is lost or repeated,
every process comes back, and nothing is left over.
"""

import math
from dataclasses import replace
from itertools import islice

import pytest

from benchmarks.chaos import run
from tests.support.chaos.attack import KINDS, Hit, Strike, draw_strikes, targets_of
from tests.support.chaos.clients import Choice
from tests.support.chaos.outcome import COUNTS, Plan, describe, find_pauses

PLAN = Plan(
    seed=30,
    num_streams=32,
    every_s=1.0,
    num_tokens=100,
    num_cases=4,
    step_ms=25.0,
    stopped_grace_s=0.0,
)


@pytest.mark.slow
async def test_kills_cost_no_token() -> None:
    plan = replace(PLAN, kills=30)
    outcome = await run(plan)
    assert not outcome.wrong, describe(plan, outcome)


def test_a_seed_repeats_its_strikes_and_all_pairs_come() -> None:
    def strikes() -> list[str]:
        return list(map(str, islice(draw_strikes(7, targets_of(COUNTS), 1.0), 300)))

    assert strikes() == strikes()
    drawn = list(islice(draw_strikes(7, targets_of(COUNTS), 1.0), 300))
    pairs = {tuple(sorted(hit.kind for hit in strike.hits)) for strike in drawn if len(strike.hits) == 2}
    num_kinds = len(KINDS)
    assert len(pairs) == num_kinds * (num_kinds + 1) // 2 - 1  # there is one broker
    hits = [hit for strike in drawn for hit in strike.hits]
    assert 0.1 < sum(hit.way == "stop" for hit in hits) / len(hits) < 0.3
    assert {hit.way for hit in hits if hit.kind == "broker"} == {"kill", "set-back", "cut", "stop"}


def test_a_pause_belongs_to_the_stop_that_lasts_into_it() -> None:
    struck = [
        (10.0, Strike(0, (Hit("broker", "broker", "stop", 4.0),))),
        (12.0, Strike(0, (Hit("agent", "w0", "kill"), Hit("batcher", "b0", "kill")))),
        (20.0, Strike(0, (Hit("batcher", "b1", "kill"),))),
        (22.0, Strike(0, (Hit("engine", "w1", "kill"),))),
    ]

    def label(begin_s: float, end_s: float, longest_stop_s: float = math.inf) -> str:
        [pause] = find_pauses([("greedy 0", Choice(times_s=[begin_s, end_s]))], struck, longest_stop_s)
        return pause.label

    assert label(11.5, 14.5) == label(13.9, 14.5) == "broker stop"
    assert label(11.5, 14.5, longest_stop_s=1.0) == "agent kill + batcher kill", "the launcher ended the stop"
    assert label(14.1, 15.0) == label(14.1, 19.0) == "agent kill + batcher kill"
    assert label(14.1, 21.0) == "batcher kill"
    assert label(20.2, 24.0) == "batcher kill", "its last token came just after the strike"
    assert label(21.0, 24.0) == "engine kill"
    [chain] = find_pauses([("greedy 0", Choice(times_s=[9.5, 20.5]))], struck, math.inf)
    assert str(chain).endswith("(broker stop, then 2 more)")
