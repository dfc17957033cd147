"""LaunchPace: when a step is launched behind the one that runs, and how long steps take.

A step is launched before the one before it is read, so that the device does not wait for the host. What is
granted behind the launch waits for a step more. So the launch waits for grants until the step that runs is
nearly over.
"""

from dataclasses import dataclass

LATE = 1 / 8
IN_TIME = 1 / 512
"""By so much of a step the next launches come sooner behind one that was late, so that the device had nothing
to do, and later behind one in time: one in 64 is late, by little.
"""
LEAST_LEAD = 1 / 16
LONGER = 1.02
"""A step is taken to last so many times as long as the one before at most: what the host reads late says
nothing of the next.
"""


@dataclass(slots=True)
class LaunchPace:
    """Tells when the next step is launched.

    Attributes:
        step_s: what a step without prefill takes; 0 while that is not known.
        lead: share of it that is left when the next step is launched.
        read_s: monotonic time at which a step was read last: the one behind it has begun by then.
    """

    step_s: float = 0.0
    lead: float = 1.0
    read_s: float = 0.0

    def slack_s(self, now_s: float) -> float:
        """How long the launch behind the step that runs may wait."""
        return self.read_s + (1 - self.lead) * self.step_s - now_s

    def launch(self, is_late: bool) -> None:
        """A step is launched behind one that runs, or has run by then: that is late."""
        self.lead = min(1.0, self.lead + LATE) if is_late else max(LEAST_LEAD, self.lead - IN_TIME)

    def read(self, started_s: float, now_s: float, prefill_tokens: int) -> float:
        """A step that was launched at `started_s` is read → its duration in s; where it overlaps with the one
        before, the time that it adds.
        """
        duration_s = now_s - max(started_s, self.read_s)
        self.read_s = now_s
        if not prefill_tokens:
            self.step_s = min(duration_s, LONGER * self.step_s) if self.step_s else duration_s
        return duration_s
