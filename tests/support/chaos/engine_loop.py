"""Engine loop: what gpu_worker/engine/loop.py does for an engine, for those without a model or torch."""

import contextlib
import time
from typing import Protocol

from gpu_worker.engine.agent_link import AgentLink
from gpu_worker.engine.batch.rows import Rows
from gpu_worker.protocol import Asleep, Grant, ModelSleeps, Ready, StepResult, WakeUp
from tests.support.adapters.scripted import ScriptedAdapters

KEEPALIVE_S = 5.0


class SteppedEngine(Protocol):
    """An engine without a model."""

    rows: Rows
    adapters: ScriptedAdapters

    def apply(self, grant: Grant) -> None: ...

    def slack_s(self) -> float: ...

    def step(self) -> StepResult | None: ...


def run(engine: SteppedEngine, link: AgentLink, ready: Ready, wake_s: float = 0.0) -> None:
    """Run steps, and sleep when told to, until the agent closes the socket (raises PeerClosed)."""
    while True:
        with contextlib.suppress(ModelSleeps):
            run_steps(engine, link)
        assert not engine.rows.rows
        link.send(Asleep())
        link.receive(WakeUp)
        time.sleep(wake_s)
        link.send(ready)


def run_steps(engine: SteppedEngine, link: AgentLink) -> None:
    """Run steps until the agent says otherwise (raises ModelSleeps, PeerClosed)."""
    wait_s = 0.0
    while True:
        for command in link.commands(wait_s):
            if isinstance(command, Grant):
                engine.apply(command)
            else:
                link.send(engine.adapters.obey(command))
        if (slack_s := engine.slack_s()) > 0:
            wait_s = slack_s
            continue
        step = engine.step()
        if step is not None:
            link.send(step)
        elif wait_s and engine.rows.rows:
            link.send(StepResult(engine.rows.step))
        wait_s = 0.0 if step else KEEPALIVE_S
