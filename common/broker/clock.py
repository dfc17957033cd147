"""Broker clock: Unix time as the broker of a pool tells it. Whatever several processes compare (deadlines,
expiries, ages) is told by it: a machine's own clock may be wrong. `time.time()` is for logs and traces alone.
"""

import time


class BrokerClock:
    """The broker's clock, extrapolated from the last look at it.

    Attributes:
        offset_s: that clock minus the monotonic one; None before the first look.
    """

    def __init__(self) -> None:
        self.offset_s: float | None = None

    def note(self, now_s: float) -> None:
        """Note what the broker has just said."""
        self.offset_s = now_s - time.monotonic()

    def now_s(self) -> float:
        """Unix time; by this machine's clock before the first look."""
        return time.time() if self.offset_s is None else time.monotonic() + self.offset_s
