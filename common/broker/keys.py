"""Every Redis key and channel, built here and nowhere else. The braces are a Redis Cluster hash tag: a pool
lives on one shard.
"""

from dataclasses import dataclass

SEALED = "18446744073709551615-18446744073709551615"
"""The highest stream id there is: after an entry with it nothing can be appended."""

STREAMS_TTL_MS = 3_600_000
"""Plans, reports and logs of a worker that shows no signs of life any more."""
TOKENS_TTL_MS = 86_400_000
"""Committed tokens of a request that never got a terminal: as long as the longest deadline."""
JOB_TTL_MS = 86_400_000
"""What is known of a job that has not ended."""
RESULT_TTL_MS = 3_600_000
"""The answer to a job, its frames, and what is known of it, after its end."""
METRICS_TTL_MS = 7 * 86_400_000
"""The figures of a pool in which nothing happens any more."""

POOLS = "tf:pools"
"""Sorted set: pool → time of its batcher's last sign of life, in s; those of an hour ago are gone. The one
key that is of no pool.
"""


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
    def processes(self) -> str:
        """Sorted set: kind:name of every process that is no worker → Redis time of its last sign of life, in
        ms.
        """
        return self.key("processes")

    @property
    def batcher(self) -> str:
        return self.key("batcher")

    @property
    def state(self) -> str:
        """Hash: what the active batcher holds, in figures, for dashboards and people."""
        return self.key("state")

    @property
    def metrics(self) -> str:
        """Hash: what all processes of the pool have counted, dead ones included; a field is built by
        `Metric.field`.
        """
        return self.key("metrics")

    @property
    def timeline(self) -> str:
        """Stream: what happened to requests, for whoever asks; the batcher's words."""
        return self.key("timeline")

    @property
    def epoch(self) -> str:
        return self.key("epoch")

    def worker(self, incarnation: str) -> str:
        return self.process("worker", incarnation)

    def process(self, kind: str, name: str) -> str:
        """Hash: what a gateway, batcher, worker or job worker says of itself."""
        return self.key(kind, name)

    def gateway(self, gateway: str) -> str:
        return self.process("gateway", gateway)

    def plans(self, incarnation: str) -> str:
        return self.key("plans", incarnation)

    def reports(self, incarnation: str) -> str:
        return self.key("reports", incarnation)

    def log(self, incarnation: str) -> str:
        return self.key("log", incarnation)

    def tokens(self, request_id: str) -> str:
        return self.key("tokens", request_id)

    def request(self, request_id: str) -> str:
        return self.key("request", request_id)

    def result(self, request_id: str) -> str:
        return self.key("result", request_id)

    @property
    def submit(self) -> str:
        """Stream: jobs of other services, in JSON."""
        return self.key("submit")

    def job(self, job_id: str) -> str:
        """Hash: what has been answered of a job."""
        return self.key("job", job_id)

    def reply(self, job_id: str) -> str:
        """Stream: the frames of a job that asked for them so."""
        return self.key("reply", job_id)

    def channel(self, name: str) -> str:
        """Pub/sub channel of another service; `name` begins with `ext:`."""
        return self.key(name)

    @property
    def arq_queue(self) -> str:
        """Sorted set: arq's queue."""
        return self.key("arq", "queue")

    def events(self, gateway: str) -> str:
        return self.key("events", gateway)
