"""Stream times: when what came of a stream, by the monotonic clock, and the latencies that follow."""

import time

from common.metrics import catalogue


class StreamTimes:
    """Times of one stream, which begins when this is made.

    Attributes:
        service_class: of its request.
        heard_s, last_event_s: of the last event, and of the last event or fill.
        placed_s: when it started on a worker; of the first token, if that event was lost.
        first_token_s, token_s, ended_s: first token, last token and end; like `placed_s` 0 before that.
    """

    def __init__(self, service_class: str) -> None:
        self.service_class = service_class
        self.started_s = time.monotonic()
        self.heard_s = self.started_s
        self.last_event_s = self.started_s
        self.placed_s = 0.0
        self.first_token_s = 0.0
        self.token_s = 0.0
        self.ended_s = 0.0

    def note_event(self) -> None:
        self.heard_s = self.last_event_s = time.monotonic()

    def note_start(self, since_start_s: float) -> None:
        """Note that a worker started the request so long ago."""
        self.placed_s = max(self.started_s, time.monotonic() - since_start_s)

    def note_tokens(self, num_new: int) -> None:
        """Observe the latency of new tokens; those that come together share their time."""
        if self.first_token_s:
            latency_s = (self.last_event_s - self.token_s) / num_new
            catalogue.TOKEN_LATENCY.observe(latency_s, self.service_class, times=num_new)
        else:
            self.placed_s = self.placed_s or self.last_event_s
            self.first_token_s = self.last_event_s
            catalogue.FIRST_TOKEN.observe(self.last_event_s - self.started_s, self.service_class)
        self.token_s = self.last_event_s
