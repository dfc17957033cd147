"""Every Redis key and channel, built here and nowhere else. The braces are a Redis Cluster hash tag: a pool lives on one shard."""

from dataclasses import dataclass

SEALED = "18446744073709551615-18446744073709551615"
"""The highest stream id there is: after an entry with it nothing can be appended."""

STREAMS_TTL_MS = 3_600_000
"""Plans, reports and logs of a worker that shows no signs of life any more."""
TOKENS_TTL_MS = 86_400_000
"""Committed tokens of a request that never got a terminal: as long as the longest deadline."""


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one pool. Owner, bound and expiry of each stand in ARCHITECTURE.md."""

    pool: str

    def key(self, *parts: str) -> str:
        return ":".join((f"tf:{{{self.pool}}}", *parts))

    @property
    def requests(self) -> str:
        return self.key("requests")

    @property
    def requests_bytes(self) -> str:
        return self.key("requests", "bytes")

    @property
    def control(self) -> str:
        return self.key("control")

    @property
    def workers(self) -> str:
        """Sorted set: incarnation → Redis time of its last sign of life, in ms."""
        return self.key("workers")

    @property
    def batcher(self) -> str:
        return self.key("batcher")

    @property
    def state(self) -> str:
        """Hash: what the active batcher holds, in figures, for dashboards and people."""
        return self.key("state")

    @property
    def epoch(self) -> str:
        return self.key("epoch")

    def worker(self, incarnation: str) -> str:
        return self.key("worker", incarnation)

    def gateway(self, gateway: str) -> str:
        return self.key("gateway", gateway)

    def plans(self, incarnation: str) -> str:
        return self.key("plans", incarnation)

    def reports(self, incarnation: str) -> str:
        return self.key("reports", incarnation)

    def log(self, incarnation: str) -> str:
        return self.key("log", incarnation)

    def tokens(self, request_id: str) -> str:
        return self.key("tokens", request_id)

    def home(self, request_id: str) -> str:
        return self.key("home", request_id)

    def result(self, request_id: str) -> str:
        return self.key("result", request_id)

    def events(self, gateway: str) -> str:
        return self.key("events", gateway)
