"""Sources: what this gateway has heard of each process that publishes to it."""

from common.messages.events import Events

MAX_SOURCES = 4096
"""Sources that are remembered, on each channel: those heard last."""


class Sources:
    """The last message of each source on each channel.

    Attributes:
        last: (source, channel) → (its sequence number, its flush), those heard last at the end.
    """

    def __init__(self) -> None:
        self.last: dict[tuple[str, str], tuple[int, int]] = {}

    def note(self, events: Events, channel: str) -> int | None:
        """Note a message. Returns None, or if messages before it were lost, the flush after which they came.

        A message without events repeats the last number. A source may be silent for as long as it likes.
        """
        key = events.source, channel
        number, flush = self.last.pop(key, (0, 0))
        self.last[key] = max(number, events.sequence), max(flush, events.flush)
        if len(self.last) > MAX_SOURCES:
            del self.last[next(iter(self.last))]
        has_events = bool(events.tokens or events.terminals)
        return flush if events.sequence > number + has_events else None

    def last_flush(self, source: str, channel: str) -> int:
        """The flush of the last message from `source` on `channel`; 0 if there was none."""
        return self.last.get((source, channel), (0, 0))[1]
