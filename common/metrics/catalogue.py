"""The metrics catalogue: name, help, labels and buckets of every metric; counters and histograms are cheap
enough for every step, gauges are read on request.

Metrics named `tgi_…` are TGI's, with its types, labels and buckets, so that its dashboards work. Metrics
named `tokenfleet_…` are our own and have the label `pool`, which `exposition.py` adds, because a process
serves one pool. prometheus_client makes the text there, but counts here: every second a process adds its
changes to the pool's sums. So changes must be cheap to find, and many equal values (the rows of a step) as
cheap as one.
"""

from bisect import bisect_left
from collections import Counter as Counts
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Literal

from common.messages.request import SERVICE_CLASSES
from common.settings.speculation import (
    DRAFT_MODEL,
    EAGLE3,
    GRAMMAR,
    MAX_SPECULATED,
    MEDUSA,
    MLP_SPECULATOR,
    NGRAM,
    SUFFIX,
)

INFINITY = float("inf")
SUM = "sum"
TOTAL = -INFINITY
"""The key of the sum of all values, among the bounds of a histogram's buckets."""
SEPARATOR = "|"
DURATION_S = (*(0.00015 * 1.5**i for i in range(35)), INFINITY)

Labels = tuple[str, ...]
Kind = Literal["counter", "histogram", "gauge"]


@dataclass(slots=True, eq=False)
class Metric:
    """A metric of the catalogue: a gauge, read on request, unless a class below says more.

    Attributes:
        labels: name of each label → its known values. A series with known values is shown as 0 before it is
            first counted.
    """

    name: str
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    kind: Kind = field(init=False, default="gauge")

    def field(self, labels: Labels, part: str = "") -> str:
        """The field of one value of one series in the pool's hash."""
        return SEPARATOR.join((self.name, *labels, part))


@dataclass(slots=True, eq=False)
class Counter(Metric):
    kind: Kind = field(init=False, default="counter")
    values: dict[Labels, float] = field(init=False, default_factory=lambda: defaultdict(float))

    def add(self, amount: float = 1, *labels: str) -> None:
        self.values[labels] += amount

    def fields(self) -> Iterator[tuple[str, float]]:
        for labels, value in list(self.values.items()):  # a copy: counting goes on while a thread renders it
            yield self.field(labels), value


@dataclass(slots=True, eq=False)
class Histogram(Metric):
    """Counts values by the smallest bound that they do not exceed. Buckets are not cumulative, so that
    histograms with different bounds can be added.

    Attributes:
        bounds: ascending; the last one is infinite.
    """

    bounds: tuple[float, ...] = (INFINITY,)
    kind: Kind = field(init=False, default="histogram")
    series: dict[Labels, dict[float, float]] = field(
        init=False, default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )

    def observe(self, value: float, *labels: str, times: int = 1) -> None:
        """Count a value `times` times."""
        parts = self.series[labels]
        parts[self.bounds[bisect_left(self.bounds, value)]] += times
        parts[TOTAL] += value * times

    def observe_all(self, values: Sequence[float], *labels: str) -> None:
        """Count each of the values."""
        parts = self.series[labels]
        for place, times in Counts(map(bisect_left, repeat(self.bounds), values)).items():
            parts[self.bounds[place]] += times
        parts[TOTAL] += sum(values)

    def fit(self, limit: int) -> None:
        """Set the bounds to a hundred equal steps up to `limit`."""
        if self.bounds[-2:-1] != (float(limit),):
            self.bounds = (*(limit * i / 100 for i in range(1, 101)), INFINITY)

    def fields(self) -> Iterator[tuple[str, float]]:
        for labels, parts in list(self.series.items()):
            for bound, number in list(parts.items()):
                yield self.field(labels, SUM if bound == TOTAL else repr(bound)), number


@dataclass(slots=True, eq=False)
class Duration(Histogram):
    """Counts times in seconds, as its help says after what is given here."""

    bounds: tuple[float, ...] = DURATION_S

    def __post_init__(self) -> None:
        self.help += ", in seconds"


POOL = "pool"
METHODS = {"method": ("prefill", "decode")}
PROPOSERS = {"method": (NGRAM, SUFFIX, DRAFT_MODEL, MEDUSA, MLP_SPECULATOR, EAGLE3, GRAMMAR)}
CLASSES = {"class": SERVICE_CLASSES}
SIZES = (*map(float, range(1, 1025)), INFINITY)
SKIPPED = (*map(float, range(16)), INFINITY)
"""SPECULATE is 15 at most."""
REASONS = ("length", "eos_token", "stop_sequence", "budget", "cancelled", "error")
FAILURES = (
    *("overloaded", "unavailable", "validation", "template"),
    *("incomplete", "generation", "timeout", "dropped"),
)

# Requests, counted by gateways. Durations are in seconds, as in TGI.
REQUEST_COUNT = Counter("tgi_request_count", "Number of requests received")
REQUEST_SUCCESS = Counter("tgi_request_success", "Number of requests that succeeded")
REQUEST_FAILURE = Counter(
    "tgi_request_failure", "Number of requests that failed, by cause", {"err": FAILURES}
)
REQUEST_DURATION = Duration("tgi_request_duration", "Time from a request's arrival to its end")
VALIDATION_DURATION = Duration(
    "tgi_request_validation_duration", "Time from a request's arrival to the queue"
)
QUEUE_DURATION = Duration("tgi_request_queue_duration", "Time in the queue")
INFERENCE_DURATION = Duration("tgi_request_inference_duration", "Time on workers")
TIME_PER_TOKEN = Duration(
    "tgi_request_mean_time_per_token_duration", "Mean inference time per generated token"
)
INPUT_LENGTH = Histogram("tgi_request_input_length", "Prompt length, in tokens")
MAX_NEW_TOKENS = Histogram("tgi_request_max_new_tokens", "Maximum number of new tokens of a request")
GENERATED_TOKENS = Histogram("tgi_request_generated_tokens", "Number of generated tokens of a request")
SKIPPED_TOKENS = Histogram(
    "tgi_request_skipped_tokens",
    "Number of tokens that a row got in one step beyond its own, by speculation",
    bounds=SKIPPED,
)

# Steps, counted by workers. TGI calls a step a batch.
BATCH_NEXT_SIZE = Histogram(
    "tgi_batch_next_size", "Number of requests that start on a worker in one step", bounds=SIZES
)
BATCH_COUNT = Counter(
    "tgi_batch_inference_count", "Number of steps; a step that computes prompt tokens is a prefill", METHODS
)
BATCH_SUCCESS = Counter("tgi_batch_inference_success", "Number of steps that were completed", METHODS)
BATCH_FAILURE = Counter(
    "tgi_batch_inference_failure", "Number of steps during which the engine ended", METHODS
)
BATCH_DURATION = Duration("tgi_batch_inference_duration", "Time of a step, detokenization included", METHODS)
BATCH_FORWARD = Duration("tgi_batch_forward_duration", "Time of a step in the engine", METHODS)
BATCH_DECODE = Duration("tgi_batch_decode_duration", "Time to detokenize a step", METHODS)
BATCH_FILTER = Duration(
    "tgi_batch_filter_duration", "Time to publish a step's tokens and finished requests", METHODS
)
BATCH_CONCAT_DURATION = Duration(
    "tgi_batch_concat_duration", "Time to pass new requests to a running engine", {"method": ("decode",)}
)
BATCH_CONCAT = Counter(
    "tgi_batch_concat",
    "Number of times that prompts joined a running batch, by reason",
    {"reason": ("backpressure", "wait_exceeded", "chunking")},
)

# The present state, read from the broker.
QUEUE_SIZE = Metric("tgi_queue_size", "Number of requests in the queue")
BATCH_SIZE = Metric("tgi_batch_current_size", "Number of running requests")
ADAPTER_ROWS = Metric(
    "tokenfleet_adapter_running_requests", "Number of running requests with a LoRA adapter", {"adapter": ()}
)
ADAPTER_WAITING = Metric(
    "tokenfleet_adapter_waiting_requests", "Number of waiting requests with a LoRA adapter", {"adapter": ()}
)
MAX_LORAS = Metric("tokenfleet_max_loras", "Number of LoRA adapters that the rows of one step may have")
BATCH_MAX_TOKENS = Metric(
    "tgi_batch_current_max_tokens", "Tokens in the KV blocks that running requests hold"
)
BATCH_TOTAL_TOKENS = Metric("tgi_batch_total_tokens", "Tokens in all KV blocks in use")
MAX_TOTAL_TOKENS = Metric("tgi_batch_max_total_tokens", "Capacity of all KV caches, in tokens")

# Our own.
FIRST_TOKEN = Duration(
    "tokenfleet_time_to_first_token_seconds", "Time from admission to the first token at the gateway", CLASSES
)
TOKEN_LATENCY = Duration(
    "tokenfleet_inter_token_latency_seconds", "Time between tokens at the gateway, pauses included", CLASSES
)
PREFILL_DURATION = Duration(
    "tokenfleet_request_prefill_seconds",
    "Time of a finished request from its start on a worker to its first token",
)
DECODE_DURATION = Duration(
    "tokenfleet_request_decode_seconds", "Time of a finished request from its first token to its last"
)
DECODE_PER_TOKEN = Duration(
    "tokenfleet_request_decode_seconds_per_token", "Mean time between the tokens of a finished request"
)
LONGEST_CHOICE = Histogram(
    "tokenfleet_answer_longest_choice_tokens", "Number of tokens of the longest choice of an answer"
)
REQUESTS = Counter(
    "tokenfleet_requests", "Number of requests that ended, by reason", CLASSES | {"reason": REASONS}
)
TOKENS = Counter("tokenfleet_generated_tokens", "Number of tokens sampled by workers")
PREFILLED_TOKENS = Counter(
    "tokenfleet_prefilled_tokens", "Number of prompt tokens computed, those of resumed requests included"
)
PROPOSED_TOKENS = Counter(
    "tokenfleet_proposed_tokens",
    "Number of tokens proposed by speculation, and by grammars that allow no other, by method",
    PROPOSERS,
)
PROPOSALS = Counter(
    "tokenfleet_proposals", "Number of times that tokens were proposed for a row, by method", PROPOSERS
)
ACCEPTED_AT = Counter(
    "tokenfleet_accepted_tokens_at",
    "Number of right proposals, by their place after the row's own token",
    {"position": tuple(map(str, range(MAX_SPECULATED)))},
)
ACCEPTED_TOKENS = Counter(
    "tokenfleet_accepted_tokens",
    "Number of those that were right: they came without a step of their own",
    PROPOSERS,
)
PREFIX_QUERIES = Counter(
    "tokenfleet_prefix_cache_queries",
    "Number of tokens of starting requests that were looked up in the cache",
)
PREFIX_HITS = Counter("tokenfleet_prefix_cache_hits", "Number of those whose KV the cache had")
RESUMES = Counter(
    "tokenfleet_request_resumes",
    "Number of times that a request was resumed, by cause",
    CLASSES | {"cause": ("died", "preempted", "takeover")},
)
PLANS = Counter("tokenfleet_plans", "Number of plans sent to workers")
WORKERS_LOST = Counter("tokenfleet_workers_lost", "Number of workers that ended without being told to")
MODEL_SWAP = Duration(
    "tokenfleet_model_swap_seconds",
    "Time in which a worker woke this pool's model, from memory or from disk",
    {"from": ("memory", "disk")},
)
UNDECODABLE = Counter(
    "tokenfleet_undecodable_entries", "Number of stream entries and plans that could not be decoded"
)
KV_USAGE = Metric("tokenfleet_kv_cache_usage_ratio", "Fraction of all KV blocks in use")
LIVE_REQUESTS = Metric("tokenfleet_live_requests", "Number of requests that wait or run")
UNFINISHED_JOBS = Metric(
    "tokenfleet_unfinished_jobs", "Number of jobs in the stream `submit` that have no answer yet"
)
BROKER_MEMORY = Metric(
    "tokenfleet_broker_memory_ratio",
    "Fraction of its memory that Redis uses: of maxmemory, or else of its machine's",
)
WORKERS = Metric(
    "tokenfleet_workers",
    "Number of live workers, by state",
    {"state": ("starting", "ready", "draining", "asleep")},
)
BATCHERS = Metric(
    "tokenfleet_batchers",
    "Number of live batchers, by state; one is active",
    {"state": ("active", "standby")},
)
UNREAD_CUT = Counter(
    "tokenfleet_unread_answers_cut",
    "Number of clients that were cut off because they did not read, by limit",
    {"reason": ("timeout", "bytes")},
)
CONNECTIONS_CUT = Counter(
    "tokenfleet_connections_cut",
    "Number of connections that were cut off or made way for others, by limit",
    {"reason": ("address", "total", "reserved", "head", "body", "size", "drain", "protocol")},
)
USED_TOKENS = Counter(
    "tokenfleet_used_tokens",
    "Number of committed tokens of this calendar month, by tenant and model, as GET /usage counts them",
    {"tenant": (), "model": (), "kind": ()},
)
POOL_REQUESTS = Counter(
    "tokenfleet_pool_requests",
    "Number of requests that this pool's gateways have sent to each pool, by model",
    {"model": (), "to": ()},
)
BATCH_LINES = Counter(
    "tokenfleet_batch_lines",
    "Number of requests of batches that were answered, by outcome",
    {"outcome": ("completed", "failed")},
)
WEBHOOKS = Counter(
    "tokenfleet_webhook_attempts",
    "Number of attempts to deliver an event of a webhook, by outcome; dead events are given up",
    {"outcome": ("delivered", "failed", "dead")},
)
WEBHOOKS_WAITING = Metric(
    "tokenfleet_webhook_events_waiting", "Number of events of webhooks that are not delivered yet"
)
WEBHOOKS_DEAD = Metric("tokenfleet_webhook_events_dead", "Number of events of webhooks that were given up")
POOL_UP = Metric(
    "tokenfleet_pool_up",
    "Whether a pool of the directory has a live batcher and worker, as this gateway knows it: 1 or 0",
    {"to": ()},
)
POOL_WAITING = Metric(
    "tokenfleet_pool_waiting_requests", "Number of waiting requests of a pool of the directory", {"to": ()}
)
POOL_DEPTH = Metric(
    "tokenfleet_pool_depth_ratio",
    "Number of live requests of a pool of the directory for each row that its workers can run",
    {"to": ()},
)
BROKER_UP = Metric("tokenfleet_broker_up", "Whether this gateway could read the broker: 1 or 0")

TABLE: tuple[Metric, ...] = tuple(value for value in list(vars().values()) if isinstance(value, Metric))
BY_NAME = {metric.name: metric for metric in TABLE}
COUNTED = tuple(metric for metric in TABLE if isinstance(metric, Counter | Histogram))
