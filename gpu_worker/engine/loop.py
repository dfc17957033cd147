"""The engine's loops: rank 0 takes commands from the agent, the other ranks take them from rank 0."""

import contextlib
import time

from gpu_worker.engine.engine import Engine
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.protocol import AgentLink, Asleep, LoadProgress, ModelSleeps, StepResult, WakeUp

KEEPALIVE_S = 5.0


def run_leader(engine: Engine, communicator: Communicator, link: AgentLink) -> None:
    """Run steps, and sleep whenever the agent says so, until the agent closes the socket (raises
    PeerClosed).
    """
    while True:
        with contextlib.suppress(ModelSleeps):
            run_steps(engine, communicator, link)
        engine.sleep()
        link.send(Asleep())
        link.receive(WakeUp)
        link.send(engine.wake_up(lambda text: link.send(LoadProgress(text))))


def run_steps(engine: Engine, communicator: Communicator, link: AgentLink) -> None:
    """Run steps until the agent says otherwise (raises ModelSleeps, PeerClosed).

    The launch of a step waits for grants while the step before it runs. If no step can run, the loop waits
    for a grant, or for what a side thread computes. What comes before the wait begins ends the wait, too.
    """
    engine.side_threads.wake = link.wake
    idle_at_s = time.monotonic() + KEEPALIVE_S
    wait_s = 0.0
    while True:
        for command in communicator.broadcast_commands(link.commands(wait_s)):
            if answer := engine.obey(command):
                link.send(answer)
        if (slack_s := engine.slack_s()) > 0:
            wait_s = slack_s
            continue
        step = engine.step()
        now_s = time.monotonic()
        if step is not None:
            link.send(step)
        elif now_s >= idle_at_s:
            idle(engine, link)
        if step is not None or now_s >= idle_at_s:
            idle_at_s = now_s + KEEPALIVE_S
        wait_s = 0.0 if step else idle_at_s - now_s


def idle(engine: Engine, link: AgentLink) -> None:
    """Tell the agent that the engine lives if rows wait for something; prepare for grammars if
    there are no rows.
    """
    if engine.rows.rows:
        link.send(StepResult(engine.collected_step))
    else:
        engine.prepare()


def run_follower(engine: Engine, communicator: Communicator) -> None:
    """Run the same steps as rank 0 until rank 0 ends."""
    while True:
        for command in communicator.receive_commands():
            engine.obey(command)
        engine.step()
