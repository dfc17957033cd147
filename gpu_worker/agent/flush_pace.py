"""Flush pace: where few rows decode in short steps, a flush has the tokens of two steps.

A flush costs the broker, the agent and the gateway about the same whether it has one token or ten.
"""

from gpu_worker.agent.outbox import Outbox

MAX_STEPS = 2
MAX_WAIT_S = 0.005
"""Who reads a stream does not notice that a token comes so much later."""
FEW_ROWS = 8


def may_wait(outbox: Outbox, num_rows: int, step_ms: float) -> bool:
    """Whether a flush of the outbox may wait for the tokens of another step, if steps take `step_ms`. First
    tokens and ends do not wait, nor does what the batcher must learn of.
    """
    return (
        0 < outbox.num_steps < MAX_STEPS
        and not outbox.needs_report
        and num_rows <= FEW_ROWS
        and 0 < step_ms <= 1000 * MAX_WAIT_S
    )
