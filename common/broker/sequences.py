"""Sequence numbers of what one process publishes, per channel; the last one is repeated for a while, so that
a lost last message shows.
"""

import time
from collections.abc import Iterator

from common.messages.codec import encode
from common.messages.events import Events

REPEAT_S = 0.5
REPEATED_FOR_S = 10.0


class ChannelSequences:
    """The channels that `source` publishes to. The last number is repeated until nothing was said for
    REPEATED_FOR_S.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self.last: dict[str, int] = {}
        self.spoken_at: dict[str, float] = {}

    def number(self, channel: str) -> int:
        """The number of the next message on `channel`, from 1."""
        self.last[channel] = self.last.get(channel, 0) + 1
        self.spoken_at[channel] = time.monotonic()
        return self.last[channel]

    def repeats(self) -> Iterator[tuple[str, bytes]]:
        """(channel, payload) that repeat the last number of each channel in use."""
        quiet_since = time.monotonic() - REPEATED_FOR_S
        for channel, spoken_at in list(self.spoken_at.items()):
            if spoken_at < quiet_since:
                del self.spoken_at[channel]
            else:
                yield channel, encode(Events(self.source, self.last[channel]))
