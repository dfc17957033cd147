"""Sequence numbers of the messages that one process publishes, counted for each channel.

The last number is repeated for a while, so a subscriber notices that the last message was lost.
"""

import time
from collections.abc import Iterator

from common.messages.codec import encode
from common.messages.events import Events

REPEAT_S = 0.5
REPEATED_FOR_S = 10.0
SILENT_S = REPEAT_S / 2
"""A channel that had a message since is not repeated: the next message shows the gap as well."""


class ChannelSequences:
    """The channels that `source` publishes to; a channel is idle after REPEATED_FOR_S without a message."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.last_number: dict[str, int] = {}
        self.last_flush: dict[str, int] = {}
        self.published_s: dict[str, float] = {}

    def next_number(self, channel: str, flush: int = 0) -> int:
        """The number of the next message on `channel`, from 1, which goes out with this flush."""
        self.last_number[channel] = self.last_number.get(channel, 0) + 1
        self.last_flush[channel] = flush
        self.published_s[channel] = time.monotonic()
        return self.last_number[channel]

    def repeated_messages(self, silent_s: float = 0.0) -> Iterator[tuple[str, bytes]]:
        """(channel, payload) for each channel that is not idle, but had no message for `silent_s`: an
        empty one with its last number.
        """
        now_s = time.monotonic()
        for channel, published_s in list(self.published_s.items()):
            if published_s < now_s - REPEATED_FOR_S:
                del self.published_s[channel]
            elif published_s <= now_s - silent_s:
                number, flush = self.last_number[channel], self.last_flush[channel]
                yield channel, encode(Events(self.source, number, flush=flush))
