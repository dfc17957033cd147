"""The loop of an engine process."""

from gpu_worker.door import Step
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.link import Link

SIGN_OF_LIFE_S = 5.0


def run(engine: Engine, link: Link) -> None:
    """Until the agent is gone (`link` raises Gone). Rows that wait for blocks or steps are no reason to be silent for long."""
    wait_s = 0.0
    while True:
        for grant in link.grants(wait_s):
            engine.apply(grant)
        step = engine.step()
        wait_s = 0.0 if step else SIGN_OF_LIFE_S
        if step is None and engine.rows.rows:
            step = Step(engine.rows.step)
        if step is not None:
            link.send(step)
