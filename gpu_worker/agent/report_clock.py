"""ReportClock: when the batcher must hear how far the rows are, and how long its next grant takes."""

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class ReportClock:
    """Tells when a report is due, and measures how long the grant takes that answers it.

    Attributes:
        due_step: once this step is completed a report is due, so that the next grant comes in time.
        reported_step: the last step that a report had.
        due_s: monotonic time at which the report was due whose grant has not come; 0 where none is.
        round_trips: how long grants took from there, in ms, since the last report.
    """

    due_step: int = 0
    reported_step: int = 0
    due_s: float = 0.0
    round_trips: list[float] = field(default_factory=list)

    def is_due(self, step: int) -> bool:
        return step >= self.due_step > self.reported_step

    def complete(self, step: int) -> None:
        """The engine has completed a step."""
        if self.is_due(step) and not self.due_s:
            self.due_s = time.monotonic()

    def report(self, step: int) -> list[float]:
        """A report says that so many steps are completed → its round trips."""
        self.reported_step = step
        trips, self.round_trips = self.round_trips, []
        return trips

    def grant(self, due_step: int) -> None:
        """The engine has a grant; the next report is due at `due_step`."""
        if self.due_s and due_step > self.due_step:
            self.round_trips.append((time.monotonic() - self.due_s) * 1e3)
            self.due_s = 0.0
        self.due_step = due_step

    def stop_waiting(self) -> None:
        """No grant is waited for: no row is held, or a new batcher asks first what is."""
        self.due_s = 0.0
