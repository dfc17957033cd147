"""Outage: the time for which this process cannot use its broker, as its log says it."""

import logging
import time

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 5.0
MAX_PAUSE_S = 60.0
"""Times between two log lines about the same outage."""
SETTLED_S = 1.0
"""Time without a failure after which a success ends an outage. In a partial outage some steps succeed."""


class Outage:
    """One line when an outage begins, its failures at growing intervals, and one line when it is over,
    however many steps of this process fail meanwhile.

    Attributes:
        count: failures of all steps since it began; 0 while there is no outage.
        since_s, last_s: monotonic times of the first and the last of them.
        due_s: monotonic time from which its failures are logged again.
    """

    def __init__(self) -> None:
        self.count = 0
        self.since_s = 0.0
        self.last_s = 0.0
        self.due_s = 0.0

    def failed(self, step: str, cause: str) -> None:
        """Count a failure of a step, as in "reading plans"."""
        now_s = time.monotonic()
        if now_s - self.last_s > MAX_PAUSE_S:
            self.count = 0
        if not self.count:
            self.since_s, self.due_s = now_s, now_s + FIRST_PAUSE_S
            log.warning("outage of the broker, everything is tried again: %s: %s", step, cause)
        self.count += 1
        self.last_s = now_s
        if now_s >= self.due_s:
            age_s = now_s - self.since_s
            log.warning(
                "outage of the broker for %.0f s, %d failures: %s: %s", age_s, self.count, step, cause
            )
            self.due_s = now_s + min(age_s, MAX_PAUSE_S)

    def succeeded(self) -> None:
        """Note that the broker has answered. It ends the outage if nothing has failed for SETTLED_S."""
        if self.count and time.monotonic() - self.last_s >= SETTLED_S:
            age_s = self.last_s - self.since_s
            log.info("outage of the broker is over after %.1f s, %d failures", age_s, self.count)
            self.count = 0


OUTAGE = Outage()
"""That of this process."""
