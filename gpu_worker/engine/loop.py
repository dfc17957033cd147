"""The engine's loops: rank 0 takes grants from the agent, the other ranks follow rank 0."""

from gpu_worker.engine.agent_link import AgentLink
from gpu_worker.engine.engine import Engine
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.protocol import StepResult

KEEPALIVE_S = 5.0
COMPILE_WAIT_S = 0.002
"""Until it is seen that a row's grammar is compiled."""


def run_leader(engine: Engine, communicator: Communicator, link: AgentLink) -> None:
    """Run steps until the agent closes the socket (raises PeerClosed). The launch of a step waits for grants
    while the one before it runs. While rows wait for blocks or steps, an empty step every five seconds tells
    the agent that the engine lives. An engine that has been idle for so long prepares for grammars.
    """
    wait_s = 0.0
    while True:
        for grant in communicator.broadcast(link.grants(wait_s)):
            engine.apply(grant)
        if (slack_s := engine.slack_s()) > 0:
            wait_s = slack_s
            continue
        step = engine.step()
        if step is not None:
            link.send(step)
        elif wait_s == KEEPALIVE_S and engine.rows.rows:
            link.send(StepResult(engine.collected_step))
        elif wait_s == KEEPALIVE_S:
            engine.matchers.prepare()
        wait_s = 0.0 if step else COMPILE_WAIT_S if engine.rows.waits_for_grammar else KEEPALIVE_S


def run_follower(engine: Engine, communicator: Communicator) -> None:
    """Run the same steps as rank 0 until that ends (raises PeerClosed)."""
    while True:
        for grant in communicator.receive():
            engine.apply(grant)
        engine.step()
