"""Choice of the model that a worker serves next: a pure function of what waits, and of what swaps take.

A worker serves one model at a time. A turn is its time with one of them. A turn that is asked for by others
ends when nobody asks for its own model any more, or when it has lasted several times as long as a swap: so
swaps take a bounded share of the time. A deadline that would pass ends it sooner.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

IDLE_SWAPS = 0.1
"""A turn ends early when its model was not asked for this share of what swaps take."""
LEAST_SWAPS = 1.0
"""A turn that a deadline ends early lasts as long as the swaps for it: they take half of the time."""
TURN_SWAPS = 4.0
"""A turn lasts this many times as long as the swaps for it: they take a fifth of the time."""
MAX_SHARE = 4.0
"""A turn whose own model has more waiting tokens than the next one's is longer, up to this many times."""
MIN_TURN_S = 1.0
DUE_MARGIN_S = 1.0
"""A request must start this long before its deadline to have an answer."""


@dataclass(frozen=True, slots=True)
class PoolDemand:
    """What one model is asked for.

    Attributes:
        num_waiting: requests that no worker computes.
        waiting_tokens: tokens that they may take, prompts and answers.
        waited_s: how long some have waited without a break since this worker left.
        due_s: time until the first of their deadlines.
        num_rows: requests that workers compute.
        num_workers: workers that serve the model now.
        swap_s: how long it takes to wake the model.
        can_wake: False while it has just failed to.
    """

    pool: str
    num_waiting: int = 0
    waiting_tokens: int = 0
    waited_s: float = 0.0
    due_s: float = math.inf
    num_rows: int = 0
    num_workers: int = 0
    swap_s: float = 0.0
    can_wake: bool = True


@dataclass(frozen=True, slots=True)
class ModelTurn:
    """A worker's time with the model that it serves now.

    Attributes:
        lasted_s: how long it has been serving it.
        idle_s: how long it has had nothing to do: no rows, and nothing waits.
    """

    own: PoolDemand
    lasted_s: float
    idle_s: float


def choose(turn: ModelTurn, others: Sequence[PoolDemand]) -> str | None:
    """The pool to serve next, or None: the turn goes on."""
    asked = [other for other in others if wants_worker(turn, other)]
    if not asked:
        return None
    first = min(asked, key=lambda other: urgency(turn, other, len(others)))
    return first.pool if turn.lasted_s >= turn_s(turn, first) else None


def choose_first(pools: Sequence[PoolDemand]) -> str | None:
    """The pool that a worker serves first: of those that wait for one, the one that has waited longest."""
    asked = [pool for pool in pools if pool.num_waiting and pool.can_wake and not pool.num_workers]
    return max(asked, key=lambda pool: pool.waited_s).pool if asked else None


def wants_worker(turn: ModelTurn, other: PoolDemand) -> bool:
    """Whether another model needs this worker. One that has workers needs another only for requests that
    have waited for longer than a swap, and only one that has nothing else to do.
    """
    if not other.num_waiting or not other.can_wake:
        return False
    return not other.num_workers or (is_idle(turn, other) and other.waited_s > other.swap_s)


def turn_s(turn: ModelTurn, other: PoolDemand) -> float:
    """How long the turn lasts if another model is next."""
    both_s = turn.own.swap_s + other.swap_s
    if is_idle(turn, other):
        return 0.0
    share = turn.own.waiting_tokens / max(1, other.waiting_tokens)
    whole_s = max(MIN_TURN_S, TURN_SWAPS * both_s) * min(max(share, 1.0), MAX_SHARE)
    return max(MIN_TURN_S, LEAST_SWAPS * both_s) if is_due(turn, other, whole_s) else whole_s


def is_idle(turn: ModelTurn, other: PoolDemand) -> bool:
    """Whether the turn's own model is not asked for any more. A client that asks again at once is waited for,
    since a swap back and forth would take longer.
    """
    return turn.idle_s >= IDLE_SWAPS * (turn.own.swap_s + other.swap_s) and not is_busy(turn.own)


def is_busy(pool: PoolDemand) -> bool:
    return bool(pool.num_rows or pool.num_waiting)


def is_due(turn: ModelTurn, other: PoolDemand, whole_s: float) -> bool:
    """Whether a deadline of another model passes if the turn lasts `whole_s`, and does not if it ends now."""
    start_s = other.swap_s + DUE_MARGIN_S
    left_s = max(0.0, whole_s - turn.lasted_s)
    return start_s < other.due_s < start_s + left_s


def urgency(turn: ModelTurn, other: PoolDemand, num_others: int) -> tuple[bool, bool, float]:
    """Sorts models: those that have waited for longer than a turn of each other one takes come first, then
    those whose deadline would pass, then those that have waited longest.
    """
    whole_s = max(MIN_TURN_S, TURN_SWAPS * (turn.own.swap_s + other.swap_s))
    is_starved = other.waited_s > num_others * (whole_s + other.swap_s)
    return not is_starved, not is_due(turn, other, MAX_SHARE * whole_s), -other.waited_s
