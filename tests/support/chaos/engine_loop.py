"""Engine loop: what gpu_worker/engine/loop.py does for an engine, for those without a model or torch."""

from typing import Protocol

from gpu_worker.engine.agent_link import AgentLink
from gpu_worker.engine.batch.rows import Rows
from gpu_worker.protocol import Grant, StepResult

KEEPALIVE_S = 5.0


class SteppedEngine(Protocol):
    """An engine without a model."""

    rows: Rows

    def apply(self, grant: Grant) -> None: ...

    def slack_s(self) -> float: ...

    def step(self) -> StepResult | None: ...


def run(engine: SteppedEngine, link: AgentLink) -> None:
    """Run steps until the agent closes the socket (raises PeerClosed)."""
    wait_s = 0.0
    while True:
        for grant in link.grants(wait_s):
            engine.apply(grant)
        if (slack_s := engine.slack_s()) > 0:
            wait_s = slack_s
            continue
        step = engine.step()
        if step is not None:
            link.send(step)
        elif wait_s and engine.rows.rows:
            link.send(StepResult(engine.rows.step))
        wait_s = 0.0 if step else KEEPALIVE_S
