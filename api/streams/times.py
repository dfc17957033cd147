"""Times of a stream, and the latencies that follow from them."""

import time
from collections import defaultdict

from common.metrics import catalogue

UNCOUNTED: defaultdict[str, list[float]] = defaultdict(list)
"""Service class → latencies of tokens that `count_latencies` has yet to count: those of a message are counted
together, which takes half the time.
"""


def count_latencies() -> None:
    """Count the latencies that `StreamTimes.note_next` has noted."""
    for service_class, latencies_s in UNCOUNTED.items():
        if latencies_s:
            catalogue.TOKEN_LATENCY.observe_all(latencies_s, service_class)
            latencies_s.clear()


class StreamTimes:
    """Monotonic times of one stream, which begins when this is made, and the latencies that follow from them.

    Attributes:
        service_class: of its request.
        heard_s, last_event_s: the last event; the last event or fill.
        placed_s: its start on a worker; if that event was lost, the first token.
        first_token_s, token_s, ended_s: first token, last token, end. These and `placed_s` are 0 until then.
    """

    def __init__(self, service_class: str) -> None:
        self.service_class = service_class
        self.uncounted = UNCOUNTED[service_class]
        self.started_s = time.monotonic()
        self.heard_s = self.started_s
        self.last_event_s = self.started_s
        self.placed_s = 0.0
        self.first_token_s = 0.0
        self.token_s = 0.0
        self.ended_s = 0.0

    def note_event(self) -> None:
        self.heard_s = self.last_event_s = time.monotonic()

    def note_next(self, now_s: float) -> None:
        """Note an event with one token, which is not the first."""
        self.heard_s = self.last_event_s = now_s
        self.uncounted.append(now_s - self.token_s)
        self.token_s = now_s

    def note_start(self, since_start_s: float) -> None:
        """Note that a worker started the request `since_start_s` ago."""
        self.placed_s = max(self.started_s, time.monotonic() - since_start_s)

    def note_tokens(self, num_new: int) -> None:
        """Observe the latency of new tokens; tokens that come together share the time since the last one."""
        if self.first_token_s:
            latency_s = (self.last_event_s - self.token_s) / num_new
            catalogue.TOKEN_LATENCY.observe(latency_s, self.service_class, times=num_new)
        else:
            self.placed_s = self.placed_s or self.last_event_s
            self.first_token_s = self.last_event_s
            catalogue.FIRST_TOKEN.observe(self.last_event_s - self.started_s, self.service_class)
        self.token_s = self.last_event_s
