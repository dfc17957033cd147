"""FailureLog: what is said of a step that fails again and again while the broker is away."""

import contextlib
import logging
import time
from collections.abc import Iterator

from common.broker.client import ERRORS, describe_error
from common.plural import plural

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0


class FailureLog:
    """Logs each new cause at once, then what repeats at growing intervals with its count, and the end.

    A step that goes on for as long as it does not fail has no other success than a minute without failures.

    Attributes:
        step: what fails, as in "reading plans".
        causes: those that have been logged since the step last succeeded.
        count: failures since then; none where there was none.
        since_s, last_s: monotonic times of the first of them, and of the last.
        due_s: when a repeated cause is logged again.
    """

    def __init__(self, log: logging.Logger, step: str) -> None:
        self.log = log
        self.step = step
        self.causes: set[str] = set()
        self.count = 0
        self.since_s = 0.0
        self.last_s = 0.0
        self.due_s = 0.0

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """The context of one attempt: an error of the broker is logged and goes no further, and the first
        success after one is logged. Where an attempt ends with `return` or `continue`, what stands behind the
        context is for failures only.
        """
        try:
            yield
        except ERRORS as error:
            self.failed(error)
        else:
            self.succeeded()

    def failed(self, error: Exception) -> None:
        """Count a failure."""
        cause = describe_error(error)
        now_s = time.monotonic()
        if self.count and now_s - self.last_s > MAX_PAUSE_S:
            self.forget()
        if not self.count:
            self.since_s = now_s
        self.last_s = now_s
        self.count += 1
        if cause not in self.causes:
            self.causes.add(cause)
            self.log.warning("%s failed, trying again: %s", self.step, cause)
            self.due_s = max(self.due_s, now_s + FIRST_PAUSE_S)
        elif now_s >= self.due_s:
            age_s = now_s - self.since_s
            self.log.warning("%s has failed %d times in %.0f s: %s", self.step, self.count, age_s, cause)
            self.due_s = now_s + min(max(age_s, FIRST_PAUSE_S), MAX_PAUSE_S)

    def succeeded(self) -> None:
        """Say that it is over, if the step had failed."""
        if not self.count:
            return
        age_s = time.monotonic() - self.since_s
        count = plural(self.count, "failure")
        self.log.info("%s has succeeded again, after %s in %.1f s", self.step, count, age_s)
        self.forget()

    def forget(self) -> None:
        self.causes.clear()
        self.count = 0
        self.due_s = 0.0
