"""Silence: workers that have a heartbeat, and do not say what they owe the batcher.

A worker owes an answer to a takeover. While it has rows it owes reports, at least one a second however long a
step takes, and these show the plans that it has seen. Its agent says all that, not its engine: for an engine
that hangs, or computes or compiles for long, there is the agent's own watchdog.
"""

from collections.abc import Mapping

Debt = tuple[str, str]
"""A worker, and what it owes."""
SILENT_S = 10.0
"""A worker that has been silent for so long is called that."""
LOST_S = 60.0
"""One that has been silent for so long is sealed. Its agent gives a connection that hangs up before that, and
may write the logits of many tokens before the next report.
"""


class Silence:
    """For how long each worker has been silent.

    Attributes:
        since: each debt, with what was last heard of it, and when.
    """

    def __init__(self) -> None:
        self.since: dict[Debt, tuple[int, float]] = {}

    def look(self, debts: Mapping[Debt, int], now_s: float) -> None:
        """Note what is owed now, with what was last heard of it. A debt of which something else was heard
        begins anew.
        """
        last = self.since
        self.since = {
            debt: last[debt] if debt in last and last[debt][0] == heard else (heard, now_s)
            for debt, heard in debts.items()
        }

    def workers(self, seconds: float, now_s: float) -> set[str]:
        """Return the workers that have been silent for so long."""
        return {worker for (worker, _), (_, since_s) in self.since.items() if now_s - since_s >= seconds}
