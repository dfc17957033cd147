"""When the engine sends its steps: those of few rows that decode in short steps together, others at once."""

import socket
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common.messages.plan import Plan
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.loop import FEW_ROWS, MAX_HELD_MS, run_steps
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.protocol import SAMPLE, AgentLink, PeerClosed, StepResult

SHORT_MS = 0.4 * MAX_HELD_MS
NO_STEP = None


def step(*, rows: int = 1, ms: float = SHORT_MS, **fields: Any) -> StepResult:
    """A step in which each row gets a token."""
    samples = b"".join(SAMPLE.pack(row, 0, 7, -0.5) for row in range(rows))
    return StepResult(1, samples, duration_ms=ms, **fields)


PLAN = Plan(1, 1, 100, 64)


class Sent(AgentLink):
    """The engine's end of a socket. Before each step there is a plan or none; after the last the agent is
    gone.
    """

    def __init__(self, plans: Sequence[Plan | None]) -> None:
        ours, self.agent = socket.socketpair()
        super().__init__(ours)
        self.plans = iter(plans)
        self.sizes: list[int] = []

    def commands(self, wait_s: float) -> Any:
        try:
            plan = next(self.plans)
        except StopIteration:
            raise PeerClosed from None
        return [plan] if plan else []

    def send(self, *frames: Any) -> None:
        super().send(*frames)
        self.sizes.append(len(frames))


def sizes_of(steps: Sequence[StepResult | None], *, rows: int = 1, plan_before: int = -1) -> list[int]:
    """How many steps are sent at a time, when there are `rows` rows and these steps run."""
    results = iter(steps)
    engine = SimpleNamespace(
        rows=SimpleNamespace(rows=dict.fromkeys(range(rows))),
        side_threads=SimpleNamespace(wake=None),
        obey=lambda command: None,
        slack_s=lambda: 0.0,
        step=lambda: next(results),
    )
    link = Sent([PLAN if number == plan_before else None for number in range(len(steps))])
    communicator = cast(Communicator, SimpleNamespace(broadcast_commands=list))
    with link.channel, link.agent, pytest.raises(PeerClosed):
        run_steps(cast(Engine, engine), communicator, link)
    return link.sizes


def test_short_steps_of_few_rows_are_sent_together() -> None:
    assert sizes_of([step()] * 9) == [3, 3, 3]
    assert sizes_of([step(rows=FEW_ROWS)] * 3, rows=FEW_ROWS) == [3]
    assert sizes_of([step(ms=1.1 * MAX_HELD_MS)] * 3) == [1, 1, 1]
    assert sizes_of([step(rows=FEW_ROWS + 1)] * 3, rows=FEW_ROWS + 1) == [1, 1, 1]


@pytest.mark.parametrize(
    "fields", [{"prefilled": [(1, 5)]}, {"ended": [(1, "length", 3)]}, {"released": [(1, 5)]}]
)
def test_what_somebody_waits_for_is_sent_at_once(fields: dict[str, Any]) -> None:
    assert sizes_of([step(), step(**fields), step(**fields)]) == [2, 1]


def test_tokens_do_not_wait_for_a_prompt_or_for_a_step_that_cannot_run() -> None:
    speculated = StepResult(1, 2 * step().samples, duration_ms=SHORT_MS)
    assert sizes_of([step(), speculated], rows=2) == [1, 1], "a row without a token computes its prompt"
    assert sizes_of([step(), step(), step(prefilled=[(2, 5)])], plan_before=2) == [2, 1]
    assert sizes_of([step(), NO_STEP]) == [1]
    assert sizes_of([StepResult(1, num_encoded=1)] * 2, rows=0) == [1, 1]
