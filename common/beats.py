"""Beats: instants at which the tasks of a process do what they do at intervals, so that one wake is enough.

A wake costs some 100 µs where caches are cold, and a process has a dozen such tasks.
"""

import time


def until_beat(interval_s: float) -> float:
    """Seconds until the monotonic clock shows a multiple of the interval, at least a tenth of it: a timer may
    be early.
    """
    left_s = interval_s - time.monotonic() % interval_s
    return left_s if left_s > interval_s / 10 else left_s + interval_s
