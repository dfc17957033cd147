"""The engine's loops: rank 0 takes commands from the agent, the other ranks take them from rank 0."""

import contextlib
import time
from collections.abc import Sequence

from gpu_worker.engine.engine import Engine
from gpu_worker.engine.parallel.communicator import Communicator
from gpu_worker.protocol import AgentLink, Asleep, LoadProgress, ModelSleeps, StepResult, WakeUp

KEEPALIVE_S = 5.0
MAX_HELD_MS = 6.0
"""A client does not notice that a token comes this much later."""
FEW_ROWS = 8


def may_wait(steps: Sequence[StepResult], num_rows: int) -> bool:
    """Whether these steps may be sent with the next one. To send and publish one costs the engine, the agent,
    the broker and the gateway about the same whether it has one token or ten, so while few rows decode in
    short steps, a step waits for further ones. One that computed a prompt, or ended a row, does not wait;
    nor does it for a step that computes a prompt.
    """
    newest = steps[-1]
    return (
        0 < num_rows == len({row for row, *_ in newest.sampled}) <= FEW_ROWS
        and sum(step.duration_ms for step in steps) <= MAX_HELD_MS
        and not (newest.prefilled or newest.ended or newest.released)
    )


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
    held: list[StepResult] = []
    while True:
        commands = communicator.broadcast_commands(link.commands(wait_s))
        if commands and held:  # the next step may take long
            link.send(*held)
            held.clear()
        for command in commands:
            if answer := engine.obey(command):
                link.send(answer)
        if (slack_s := engine.slack_s()) > 0:
            wait_s = slack_s
            continue
        step = engine.step()
        now_s = time.monotonic()
        if step is not None:
            held.append(step)
        elif now_s >= idle_at_s:
            idle(engine, link)
        if held and not (step is not None and may_wait(held, len(engine.rows.rows))):
            link.send(*held)
            held.clear()
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
