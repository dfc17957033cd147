"""PoolClock: the clock that deadlines are told by: milliseconds that the pool's active batchers counted.

It goes on with this process' monotonic clock from where the last holder of the lease left it, so no jump of
the broker's clock, or of a host's, moves a deadline. Time in which no batcher was active does not count.
"""

import time


class PoolClock:
    """Shows `start_ms` when it is made, and goes on from there."""

    def __init__(self, start_ms: int) -> None:
        self.offset_ms = start_ms - time.monotonic() * 1000

    def now_ms(self) -> int:
        return round(time.monotonic() * 1000 + self.offset_ms)
