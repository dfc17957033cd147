"""Redis keys and channels: all names are built here and nowhere else; and the times after which they expire.

The braces are a Redis Cluster hash tag: all keys of a pool are on one shard.
"""

from collections.abc import Iterable
from dataclasses import dataclass

SEALED = "18446744073709551615-18446744073709551615"
"""The highest stream id there is: after an entry with it nothing can be appended."""

STREAMS_TTL_MS = 7 * 86_400_000
"""Of plans, reports and logs, after the worker's last heartbeat."""
TOKENS_TTL_MS = 7 * 86_400_000
"""Of committed tokens, if the request never gets a terminal; a shorter jump of the clock loses none."""
JOB_TTL_MS = 7 * 86_400_000
"""Of the state of a job that has not ended."""
RESULT_TTL_MS = 3_600_000
"""Of result, frames and state of a job that has ended."""
LEASE_S = 2.0
"""Of the active batcher's lease, which is renewed several times in that time."""
METRICS_TTL_MS = 7 * 86_400_000
"""Of a pool's metrics, after they were last counted."""
BATCH_TTL_MS = 30 * 86_400_000
"""Of a batch, after its last change."""
ADAPTERS_TTL_MS = 7 * 86_400_000
"""Of a pool's registry of adapters, after its batcher last looked at it."""

POOLS = "tf:pools"
"""Sorted set: pool → Redis time at which its batcher last wrote to the directory, in s; members leave after
an hour. This and the next two are the directory, and belong to no pool.
"""
POOL_ENTRIES = "tf:pools:entries"
"""Hash: pool → what its batcher says of it."""
MODEL_SHARES = "tf:models"
"""Hash: model name → the pools that get its requests, with their weights."""
STARTING = "starting"
"""Kind of the heartbeats of a worker that still loads its model."""
API_KEYS = "tf:keys"
"""Hash: key id → record of an API key; `version` changes with each. A key counts in all pools."""
USAGE = "tf:usage"
"""How the names of all keys of usage begin: they belong to no pool."""


def usage_hour(number: int | str) -> str:
    """Hash: what was used in an hour, by its number since 1970; `usage.lua` builds the same names."""
    return f"{USAGE}:hour:{number}"


def usage_month(month: str) -> str:
    """Hash: what was used in a month, by its name, as 2026-11."""
    return f"{USAGE}:month:{month}"


def usage_spent(month: str) -> str:
    """Hash: tokens that each API key has used in a month."""
    return f"{USAGE}:spent:{month}"


def usage_pending() -> str:
    """Hash: tokens that live requests of each API key with a budget have set aside."""
    return f"{USAGE}:pending"


SLEEPER = "sleeper"
"""Kind of the heartbeats of a worker that serves several pools in turns, in each of them."""


def pool_of(key: str) -> str:
    """The pool that a key or a channel belongs to."""
    return key.removeprefix("tf:{").rpartition("}:")[0]


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of one pool. docs/design/redis.md lists writer, reader, bound and expiry of each."""

    pool: str

    def key(self, *parts: str) -> str:
        return ":".join((f"tf:{{{self.pool}}}", *parts))

    @property
    def pools(self) -> str:
        return POOLS

    @property
    def pool_entries(self) -> str:
        return POOL_ENTRIES

    @property
    def model_shares(self) -> str:
        return MODEL_SHARES

    @property
    def api_keys(self) -> str:
        return API_KEYS

    def key_use(self, key_id: str) -> str:
        """Hash: live requests of an API key in each pool, and what is left of its rates."""
        return f"{API_KEYS}:{key_id}"

    @property
    def usage(self) -> str:
        """How the names of the keys of usage begin; `usage.lua` adds the rest."""
        return USAGE

    @property
    def requests(self) -> str:
        return self.key("requests")

    @property
    def places(self) -> str:
        """Hash: what live requests take: how many of each class and tenant, their tokens and bytes."""
        return self.key("requests", "places")

    def tenants(self, service_class: str) -> str:
        """Sorted set: tenants that have asked of late → Redis time, in ms; members begin with a weight."""
        return self.key("tenants", service_class)

    @property
    def control(self) -> str:
        return self.key("control")

    @property
    def workers(self) -> str:
        """Sorted set: incarnation → Redis time of its last heartbeat, in ms."""
        return self.key("workers")

    @property
    def sealed(self) -> str:
        """Set: incarnations that are sealed, and whose other keys are not deleted yet."""
        return self.key("workers", "sealed")

    @property
    def processes(self) -> str:
        """Sorted set: kind:name of every process but workers → Redis time of its last heartbeat, in ms."""
        return self.key("processes")

    @property
    def batcher(self) -> str:
        return self.key("batcher")

    @property
    def state(self) -> str:
        """Hash: counts of what the active batcher holds, for dashboards and people."""
        return self.key("state")

    @property
    def metrics(self) -> str:
        """Hash: metrics of all processes, dead ones included; `Metric.field` builds the fields."""
        return self.key("metrics")

    @property
    def adapters(self) -> str:
        """Hash: the pool's LoRA adapters by key, `version`, which changes with each, and `seeded`."""
        return self.key("adapters")

    @property
    def timeline(self) -> str:
        """Stream: what happened to requests; the batcher writes it for people."""
        return self.key("timeline")

    @property
    def epoch(self) -> str:
        return self.key("epoch")

    @property
    def clock(self) -> str:
        """String: milliseconds that the pool's active batchers have counted; deadlines are told by it."""
        return self.key("clock")

    def worker(self, incarnation: str) -> str:
        return self.process("worker", incarnation)

    def process(self, kind: str, name: str) -> str:
        """Hash: the last heartbeat of a gateway, batcher, worker or job worker."""
        return self.key(kind, name)

    def gateway(self, gateway: str) -> str:
        return self.process("gateway", gateway)

    def starting(self, incarnation: str) -> str:
        return self.process(STARTING, incarnation)

    def sleeper(self, incarnation: str) -> str:
        """Hash: the model that a worker serves here in its turn, whether it sleeps, and what a swap takes."""
        return self.process(SLEEPER, incarnation)

    @property
    def waking(self) -> str:
        """String: the worker that wakes the pool's model: others leave it to that one."""
        return self.key("waking")

    def plans(self, incarnation: str) -> str:
        return self.key("plans", incarnation)

    def reports(self, incarnation: str) -> str:
        return self.key("reports", incarnation)

    def log(self, incarnation: str) -> str:
        return self.key("log", incarnation)

    def tokens(self, request_id: str) -> str:
        return self.key("tokens", request_id)

    def logits(self, request_id: str) -> str:
        """List: logits of the request's newest attempt, in pieces, in order."""
        return self.key("logits", request_id)

    def request(self, request_id: str) -> str:
        """Hash: state of one request: who asked, which worker holds it, its cancel and its terminal."""
        return self.key("request", request_id)

    def picture(self, digest: str) -> str:
        """String: the bytes of a picture, for all live requests that have it in their prompts."""
        return self.key("picture", digest)

    @property
    def pictures(self) -> str:
        """Sorted set: digest and size of each picture → Redis time at which it expires, in ms."""
        return self.key("pictures")

    def picture_holders(self, digest: str) -> str:
        """Sorted set: live request with the picture → Redis time at which it has ended for sure, in ms."""
        return self.key("picture", digest, "holders")

    def result(self, job_id: str) -> str:
        """String: the answer to a job, as JSON."""
        return self.key("result", job_id)

    @property
    def responses(self) -> str:
        """Sorted set: request of each stored response → Redis time at which it has expired, in s."""
        return self.key("responses")

    @property
    def submit(self) -> str:
        """Stream: jobs of other services, as JSON."""
        return self.key("submit")

    def job(self, job_id: str) -> str:
        """Hash: state of a job: its digest, its cancel, and how many frames were sent where."""
        return self.key("job", job_id)

    @property
    def jobs(self) -> str:
        """How the names of the keys of jobs' records begin; `job_records.lua` adds the rest."""
        return self.key("jobs")

    def job_set(self, name: str) -> str:
        """Sorted set: jobs that are `live`, `scheduled`, `dead` or `ended` → since when, or until when they
        wait, in ms.
        """
        return self.key("jobs", name)

    def job_record(self, job_id: str) -> str:
        """Hash: what people see of a job."""
        return self.key("jobs", "record", job_id)

    def job_entries(self, job_id: str) -> str:
        """Hash: where a job's answer goes → its entry in `submit`, or the fields of one that left it."""
        return self.key("jobs", "entries", job_id)

    def reply(self, job_id: str) -> str:
        """Stream: the frames of a job with `"reply": "stream"`."""
        return self.key("reply", job_id)

    def batch(self, batch_id: str) -> str:
        """Hash: state of a batch: who may write it, how far it is, and what is committed of its files."""
        return self.key("batch", batch_id)

    @property
    def batches(self) -> str:
        """Sorted set: owner/id of each batch → when it was made, in ms."""
        return self.key("batches")

    @property
    def live_batches(self) -> str:
        """Sorted set: owner/id of each batch that has not ended → its deadline, in ms."""
        return self.key("batches", "live")

    @property
    def webhooks(self) -> str:
        """Sorted set: event of a webhook that is not delivered → when it is sent next, in ms."""
        return self.key("webhooks")

    @property
    def dead_webhooks(self) -> str:
        """Sorted set: event that was given up → since when, in ms."""
        return self.key("webhooks", "dead")

    def webhook_event(self, event_id: str) -> str:
        """Hash: to whom an event goes, and what became of it; `webhooks.lua` builds the same name."""
        return self.key("webhooks", event_id)

    def channel(self, name: str) -> str:
        """Pub/sub channel of another service; `name` begins with `ext:`."""
        return self.key(name)

    @property
    def arq_queue(self) -> str:
        """Sorted set: arq's queue."""
        return self.key("arq", "queue")

    def events(self, gateway: str) -> str:
        return self.key("events", gateway)


def request_keys(keys: Keys, request_ids: Iterable[str]) -> list[str]:
    """Return the hash and the string of each request."""
    return [key for name in request_ids for key in (keys.request(name), keys.tokens(name))]


def parse_stream_id(stream_id: bytes | str) -> tuple[int, int]:
    """Return (milliseconds or epoch, number) of a stream id; such pairs compare in order."""
    text = stream_id.decode() if isinstance(stream_id, bytes) else stream_id
    high, _, low = text.partition("-")
    return int(high), int(low or 0)
