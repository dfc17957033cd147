"""The loop of an engine process."""

from gpu_worker.engine.engine import Engine
from gpu_worker.engine.link import Link


def run(engine: Engine, link: Link) -> None:
    """Until the agent is gone (`link` raises Gone)."""
    idle = False
    while True:
        for grant in link.grants(wait=idle):
            engine.apply(grant)
        step = engine.step()
        idle = step is None
        if step is not None:
            link.send(step)
