"""Redis keys and channels: the one table of their names and of who may use them, and the times after which
they expire. docs/design/redis.md says what each is for.
"""

from collections.abc import Callable, Iterable, Iterator
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

STARTING = "starting"
"""Kind of the heartbeats of a worker that still loads its model."""
SLEEPER = "sleeper"
"""Kind of the heartbeats of a worker that serves several pools in turns, in each of them."""
OF_NO_POOL = "tf:"
"""How patterns of keys begin that belong to no pool."""


@dataclass(frozen=True)
class KeyPattern:
    """A key or a channel, or many of them with a name in their pattern.

    Attributes:
        pattern: without the pool, unless it belongs to none.
        kind: of its value; `channel` is pub/sub, `prefix` how names begin that scripts make.
        uses: kinds of users (acl.py) that may read and write it.
        reads: those that may only read it.
        adds: those that may only write it.
    """

    pattern: str
    kind: str
    uses: str = ""
    reads: str = ""
    adds: str = ""

    def name(self, keys: "Keys | None", part: str | int = "") -> str:
        """Return the name of a key, with `part` in the place of the name in the pattern."""
        begin, named, rest = self.pattern.partition("{")
        name = f"{begin}{part}{rest.partition('}')[2]}" if named else begin
        if self.pattern.startswith(OF_NO_POOL):
            return name
        assert keys is not None, "a key of a pool"
        return keys.key(name)


class Key(KeyPattern):
    """One key."""

    def __get__(self, keys: "Keys | None", owner: type) -> str:
        return self.name(keys)


class KeyOf(KeyPattern):
    """Keys that have a name in their pattern."""

    def __get__(self, keys: "Keys | None", owner: type) -> Callable[[str | int], str]:
        return lambda part: self.name(keys, part)


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of one pool. The braces are a Redis Cluster hash tag: all keys of a pool are on one shard. Those
    that belong to no pool are there without one, too: `Keys.pools`.

    The broker tries the patterns of a user in the order of the table, so those of every token come first.
    """

    pool: str

    request = KeyOf("request:{request}", "hash", "gateway batcher worker")
    tokens = KeyOf("tokens:{request}", "string", "gateway batcher worker")
    log = KeyOf("log:{worker}", "stream", "batcher worker", "gateway")
    reports = KeyOf("reports:{worker}", "stream", "batcher worker")
    plans = KeyOf("plans:{worker}", "stream", "batcher worker")
    key_use = KeyOf("tf:keys:{key}", "hash", "gateway batcher worker")
    usage = Key("tf:usage", "prefix", "gateway batcher worker")
    usage_hour = KeyOf("tf:usage:hour:{number}", "hash", "gateway batcher worker")
    usage_month = KeyOf("tf:usage:month:{month}", "hash", "gateway batcher worker")
    usage_spent = KeyOf("tf:usage:spent:{month}", "hash", "gateway batcher worker")
    usage_pending = Key("tf:usage:pending", "hash", "gateway batcher worker")
    metrics = Key("metrics", "hash", "gateway batcher worker", "dashboard")

    requests = Key("requests", "stream", "gateway batcher", "worker")
    places = Key("requests:places", "hash", "gateway batcher")
    tenants = KeyOf("tenants:{class}", "sorted set", "gateway")
    control = Key("control", "stream", "gateway batcher worker")
    logits = KeyOf("logits:{request}", "list", "gateway worker")
    picture = KeyOf("picture:{digest}", "string", "gateway", "worker")
    picture_holders = KeyOf("picture:{digest}:holders", "sorted set", "gateway")
    pictures = Key("pictures", "sorted set", "gateway")
    picture_bytes = Key("picture:bytes", "string", "gateway")
    responses = Key("responses", "sorted set", "gateway")
    timeline = Key("timeline", "stream", "batcher", "gateway")
    adapters = Key("adapters", "hash", "gateway batcher worker")
    api_keys = Key("tf:keys", "hash", "gateway operator")

    workers = Key("workers", "sorted set", "batcher worker", "gateway dashboard operator")
    sealed = Key("workers:sealed", "set", "batcher worker")
    worker = KeyOf("worker:{incarnation}", "hash", "batcher worker operator", "gateway dashboard")
    processes = Key("processes", "sorted set", "gateway batcher worker", "dashboard")
    gateway = KeyOf("gateway:{id}", "hash", "gateway", "batcher worker dashboard")
    batchers = KeyOf("batcher:{id}", "hash", "batcher", "gateway worker dashboard")
    starting = KeyOf("starting:{incarnation}", "hash", "worker", "gateway batcher")
    sleeper = KeyOf("sleeper:{incarnation}", "hash", "worker", "gateway batcher")
    waking = Key("waking", "string", "worker")
    batcher = Key("batcher", "string", "batcher", "gateway worker")
    epoch = Key("epoch", "string", "batcher")
    clock = Key("clock", "string", "gateway batcher")
    state = Key("state", "hash", "batcher", "gateway worker dashboard")
    pools = Key("tf:pools", "sorted set", "batcher", "gateway dashboard")
    pool_entries = Key("tf:pools:entries", "hash", "batcher", "gateway")

    submit = Key("submit", "stream", "gateway", adds="service")
    result = KeyOf("result:{job}", "string", "gateway", "service")
    reply = KeyOf("reply:{job}", "stream", "gateway", "service")
    job = KeyOf("job:{job}", "hash", "gateway")
    jobs = Key("jobs", "prefix", "gateway")
    job_set = KeyOf("jobs:{set}", "sorted set", "gateway")
    job_record = KeyOf("jobs:record:{job}", "hash", "gateway")
    job_entries = KeyOf("jobs:entries:{job}", "hash", "gateway")
    batch = KeyOf("batch:{batch}", "hash", "gateway")
    batches = Key("batches", "sorted set", "gateway")
    live_batches = Key("batches:live", "sorted set", "gateway")
    webhooks = Key("webhooks", "sorted set", "gateway batcher worker")
    dead_webhooks = Key("webhooks:dead", "sorted set", "gateway batcher worker")
    webhook_event = KeyOf("webhooks:{event}", "hash", "gateway batcher worker")
    arq_queue = Key("arq:queue", "sorted set", "gateway arq")
    arq_health = KeyOf("arq:queue:{part}", "string", "gateway")

    events = KeyOf("events:{gateway}", "channel", "gateway batcher worker")
    replies = KeyOf("ext:{name}", "channel", "gateway service")

    def key(self, *parts: str) -> str:
        return ":".join((f"tf:{{{self.pool}}}", *parts))

    def process(self, kind: str, name: str) -> str:
        """Return the hash with the last heartbeat of a process of this kind."""
        return self.key(kind, name)


def table() -> Iterator[tuple[str, KeyPattern]]:
    """Yield the name in `Keys` of each row, and the row."""
    yield from ((name, row) for name, row in vars(Keys).items() if isinstance(row, KeyPattern))


def request_keys(keys: Keys, request_ids: Iterable[str]) -> list[str]:
    """Return the hash and the string of each request."""
    return [key for name in request_ids for key in (keys.request(name), keys.tokens(name))]


def parse_stream_id(stream_id: bytes | str) -> tuple[int, int]:
    """Return (milliseconds or epoch, number) of a stream id; such pairs compare in order."""
    text = stream_id.decode() if isinstance(stream_id, bytes) else stream_id
    high, _, low = text.partition("-")
    return int(high), int(low or 0)
