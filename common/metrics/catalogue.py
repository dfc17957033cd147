"""Every metric of the fleet: name, labels, buckets, in this one table.

Names that begin with `tgi_` are TGI's, with its types, labels and buckets, so that its dashboards fill. What
carries a pool or a class is ours; the label `pool` is added where the text is worded, for a process serves
one pool.
"""

from common.metrics.primitives import INFINITY, Counter, Gauge, Histogram, Metric, Summary, exponential

POOL = "pool"
METHODS = {"method": ("prefill", "decode")}
CLASSES = {"class": ("default",)}
DURATION_S = exponential(0.00015, 1.5, 35)
LATENCY_S = (
    0.001,
    0.0025,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1,
    2.5,
    5,
    10,
    INFINITY,
)
FIRST_TOKEN_S = (
    0.005,
    0.01,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1,
    1.5,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    INFINITY,
)
SIZES = (*map(float, range(1, 1025)), INFINITY)
REASONS = ("length", "eos_token", "stop_sequence", "cancelled", "error")
FAILURES = ("overloaded", "validation", "incomplete", "generation", "dropped", "template")

# Requests, counted by gateways.
REQUEST_COUNT = Counter("tgi_request_count", "Requests received")
REQUEST_SUCCESS = Counter("tgi_request_success", "Generations that finished")
REQUEST_FAILURE = Counter("tgi_request_failure", "Requests that did not, by cause", {"err": FAILURES})
REQUEST_DURATION = Histogram(
    "tgi_request_duration", "From its arrival to the end of a request, in seconds", bounds=DURATION_S
)
VALIDATION_DURATION = Histogram(
    "tgi_request_validation_duration", "From arrival to the queue, in seconds", bounds=DURATION_S
)
QUEUE_DURATION = Histogram(
    "tgi_request_queue_duration", "From the queue to a worker, in seconds", bounds=DURATION_S
)
INFERENCE_DURATION = Histogram("tgi_request_inference_duration", "On workers, in seconds", bounds=DURATION_S)
TIME_PER_TOKEN = Histogram(
    "tgi_request_mean_time_per_token_duration", "Inference over tokens, in seconds", bounds=DURATION_S
)
INPUT_LENGTH = Histogram("tgi_request_input_length", "Tokens of a prompt")
MAX_NEW_TOKENS = Histogram("tgi_request_max_new_tokens", "New tokens that a request may have")
GENERATED_TOKENS = Histogram("tgi_request_generated_tokens", "Tokens that a request was given")
SKIPPED_TOKENS = Summary(
    "tgi_request_skipped_tokens", "Speculated tokens that were right; nothing is speculated"
)

# Batches, counted by workers.
BATCH_NEXT_SIZE = Histogram("tgi_batch_next_size", "Requests that start on a worker together", bounds=SIZES)
BATCH_COUNT = Counter(
    "tgi_batch_inference_count", "Steps; one that computes any prompt is a prefill", METHODS
)
BATCH_SUCCESS = Counter("tgi_batch_inference_success", "Steps that were completed", METHODS)
BATCH_FAILURE = Counter("tgi_batch_inference_failure", "Steps under which an engine ended", METHODS)
BATCH_DURATION = Histogram(
    "tgi_batch_inference_duration", "A step and its text, in seconds", METHODS, DURATION_S
)
BATCH_FORWARD = Histogram(
    "tgi_batch_forward_duration", "A step in the engine, in seconds", METHODS, DURATION_S
)
BATCH_DECODE = Histogram(
    "tgi_batch_decode_duration", "From a step's ids to text, in seconds", METHODS, DURATION_S
)
BATCH_FILTER = Histogram(
    "tgi_batch_filter_duration", "To publish tokens and ends, in seconds", METHODS, DURATION_S
)
BATCH_CONCAT_DURATION = Histogram(
    "tgi_batch_concat_duration",
    "To hand requests to a running engine, in seconds",
    {"method": ("decode",)},
    DURATION_S,
)
BATCH_CONCAT = Counter(
    "tgi_batch_concat",
    "Requests joined a running batch, by reason",
    {"reason": ("backpressure", "wait_exceeded", "chunking")},
)

# What is, read from the broker.
QUEUE_SIZE = Gauge("tgi_queue_size", "Requests that wait")
BATCH_SIZE = Gauge("tgi_batch_current_size", "Requests that run")
BATCH_MAX_TOKENS = Gauge(
    "tgi_batch_current_max_tokens", "Tokens that the running requests may grow to without another KV block"
)
BATCH_TOTAL_TOKENS = Gauge("tgi_batch_total_tokens", "The same: tokens of all KV blocks in use")
MAX_TOTAL_TOKENS = Gauge("tgi_batch_max_total_tokens", "Tokens that all KV caches hold")

# Ours.
FIRST_TOKEN = Histogram(
    "tokenfleet_time_to_first_token_seconds",
    "From admission to the first token at a gateway",
    CLASSES,
    FIRST_TOKEN_S,
)
TOKEN_LATENCY = Histogram(
    "tokenfleet_inter_token_latency_seconds",
    "From token to token at a gateway, pauses included",
    CLASSES,
    LATENCY_S,
)
REQUESTS = Counter("tokenfleet_requests", "Requests that ended, by reason", CLASSES | {"reason": REASONS})
TOKENS = Counter("tokenfleet_generated_tokens", "Tokens sampled by workers")
PREFILLED_TOKENS = Counter(
    "tokenfleet_prefilled_tokens", "Tokens computed as prompts, those of resumed requests included"
)
RESUMES = Counter(
    "tokenfleet_request_resumes",
    "Requests that went on in another row, by cause",
    CLASSES | {"cause": ("died", "preempted", "takeover")},
)
GRANTS = Counter("tokenfleet_grants", "Plans that workers were given")
WORKERS_LOST = Counter("tokenfleet_workers_lost", "Workers whose life ended, by whatever cause")
UNDECODABLE = Counter("tokenfleet_undecodable_entries", "Entries and plans that could not be read")
KV_USAGE = Gauge("tokenfleet_kv_cache_usage_ratio", "Share of all KV blocks that is in use")
LIVE_REQUESTS = Gauge("tokenfleet_live_requests", "Requests that wait or run")
WORKERS = Gauge(
    "tokenfleet_workers",
    "Workers that show signs of life, by state",
    {"state": ("starting", "ready", "draining")},
)
BROKER_UP = Gauge("tokenfleet_broker_up", "Whether the gateway that answers could read the broker")

TABLE: tuple[Metric, ...] = tuple(value for value in list(vars().values()) if isinstance(value, Metric))
BY_NAME = {metric.name: metric for metric in TABLE}
COUNTED = tuple(metric for metric in TABLE if isinstance(metric, Counter | Histogram))


def service_class(priority: str) -> str:
    """The value of the label `class`."""
    return priority or "default"
