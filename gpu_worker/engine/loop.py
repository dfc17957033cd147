"""The loops of engine processes: of rank 0, which hears the agent, and of the others, which do the same."""

from gpu_worker.engine.agent_link import AgentLink
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.protocol import StepResult

KEEPALIVE_S = 5.0


def run_leader(engine: Engine, communicator: Communicator, link: AgentLink) -> None:
    """Until the agent is gone (`link` raises Gone). Rows that wait for blocks or steps are no reason to be
    silent for long.
    """
    wait_s = 0.0
    while True:
        for grant in communicator.broadcast(link.grants(wait_s)):
            engine.apply(grant)
        step = engine.step()
        if step is not None:
            link.send(step)
        elif wait_s and engine.rows.rows:
            link.send(StepResult(engine.collected_step))
        wait_s = 0.0 if step else KEEPALIVE_S


def run_follower(engine: Engine, communicator: Communicator) -> None:
    """Until rank 0 is gone (`ranks` raises Gone)."""
    while True:
        for grant in communicator.receive():
            engine.apply(grant)
        engine.step()
