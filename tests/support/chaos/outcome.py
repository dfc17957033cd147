"""Outcome: what came of a run of kills, in words."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.chaos.attack import Attack
from tests.support.chaos.crowd import Tally
from tests.support.chaos.engine import NUM_BLOCKS
from tests.support.chaos.figures import MIB, Holdings, describe_pauses, find_pauses

COUNTS = {"gateway": 2, "batcher": 2, "agent": 3, "engine": 3, "jobs": 2}
NUM_LONGEST = 8


@dataclass(frozen=True)
class Plan:
    """What a run does.

    Attributes:
        num_cases: different requests of each kind.
        num_blocks: of the KV cache of an engine without a model; with few of them rows are preempted.
        counts: processes by kind.
        spared: kinds of processes and ways to hit them that are left out.
        every_s: mean time between two strikes.
        loss: share of the messages of subscriptions that are lost.
        step_ms: of an engine without a model; None runs the model.
        stopped_grace_s: STOPPED_GRACE_S; with 0 the stopped go on, with what they held.
    """

    seed: int = 1
    kills: int = 100
    num_streams: int = 64
    every_s: float = 2.5
    num_tokens: int = 200
    num_cases: int = 16
    num_blocks: int = NUM_BLOCKS
    spared: Sequence[str] = ()
    loss: float = 0.05
    counts: Mapping[str, int] = field(default_factory=lambda: COUNTS)
    step_ms: float | None = 40.0
    speculate: int = 0
    stopped_grace_s: float = 0.5
    log_to: Path | None = None


@dataclass
class Outcome:
    """The result of a run; `wrong` is empty if all is well.

    Attributes:
        interrupted: whether the run was told to end early: then what is left over was not looked at.
        resumes: how often requests were resumed, by cause.
    """

    tally: Tally
    attack: Attack
    interrupted: bool = False
    num_dropped: int = 0
    resumes: Counter[str] = field(default_factory=Counter)
    before: Holdings | None = None
    after: Holdings | None = None
    keys: Counter[str] = field(default_factory=Counter)
    left_over: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        return [*self.tally.wrong, *(f"{name} never came back" for name in self.attack.lost), *self.left_over]


def describe(plan: Plan, outcome: Outcome) -> str:
    tally, attack = outcome.tally, outcome.attack
    pauses = find_pauses(tally.choices, attack.struck, plan.stopped_grace_s or math.inf)
    lines = [
        f"seed {plan.seed}: {attack.hits.total()} kills, {len(attack.struck)} strikes: {counts(attack.hits)}",
        f"pauses, with {plan.counts['agent']} workers, of which a strike hits two at most:",
        *(f"  {line}" for line in describe_pauses(pauses)),
        "the longest pauses:",
        *(f"  {pause}" for pause in pauses[:NUM_LONGEST]),
        f"messages lost: {outcome.num_dropped}",
        f"requests resumed: {counts(outcome.resumes)}",
        f"answers checked: {tally.whole.total()} ({counts(tally.whole)}); {tally.num_tokens} tokens",
        f"of these, streams that broke off and went on: {tally.resumed.total()} ({counts(tally.resumed)})",
        f"cut by a gateway's death, right so far, and asked again: {tally.cut.total()} ({counts(tally.cut)})",
        f"refused and asked again: {tally.refused.total()} ({counts(tally.refused)})",
        f"keys: {counts(outcome.keys)}",
        *describe_holdings(outcome),
        *(f"wrong: {text}" for text in outcome.wrong),
        "interrupted: what is left over was not looked at" if outcome.interrupted else "",
        f"{time.strftime('%F %X')}, {plan.num_streams} streams, {attack.hits.total()} kills: "
        f"{tally.whole.total()} answers, {tally.num_tokens} tokens: {tally.num_lost} lost, {tally.num_added} "
        f"repeated or foreign; processes that never came back {len(attack.lost)}; wrong {len(outcome.wrong)}",
    ]
    return "\n".join(filter(None, lines))


def describe_holdings(outcome: Outcome) -> list[str]:
    before, after = outcome.before, outcome.after
    if not (before and after):
        return []
    return [
        f"handles, before → after: {changes(before.handles, after.handles, 1)}",
        f"MiB, before → after: {changes(before.memory, after.memory, MIB)}",
    ]


def counts(found: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(found.items()))


def changes(before: dict[str, int], after: dict[str, int], unit: int) -> str:
    return ", ".join(
        f"{kind} {before.get(kind, 0) // unit} → {after[kind] // unit}" for kind in sorted(after)
    )
