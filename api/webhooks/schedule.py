"""Schedule: when an event that was not delivered is sent again."""

from collections.abc import Callable

WAITS_S = (5, 300, 1800, 7200, 18_000, 36_000)
"""After each failure, as Standard Webhooks recommends; the last one repeats."""
JITTER = 0.2
"""Waits are up to this much shorter or longer: events that failed together do not come together again."""
LAST_WAIT_S = 1.0
"""An event whose time is over sooner is not sent again."""


def next_wait_s(num_failures: int, age_s: float, retry_s: float, chance: Callable[[], float]) -> float | None:
    """Seconds until an event is sent again; None if it is dead. The last attempt is at the end of its time.

    Args:
        num_failures: including the last one.
        age_s: time since its first attempt was due.
        retry_s: the time for which it is sent again.
        chance: gives numbers from 0 to 1.
    """
    left_s = retry_s - age_s
    if left_s < LAST_WAIT_S:
        return None
    wait_s = WAITS_S[min(num_failures, len(WAITS_S)) - 1]
    return min(left_s, wait_s * (1 + JITTER * (2 * chance() - 1)))
