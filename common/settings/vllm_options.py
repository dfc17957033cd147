"""Options of vLLM that are no settings of ours."""

from common.settings import vllm_names as names
from common.settings.option import ANY, NONE, OFF, ON, Option, options
from common.settings.tgi_options import CHUNKED, NO_LORA, NO_TRACES, OWN_ATTENTION, OWN_TOKENIZER

BY_LLGUIDANCE = "structured output is by llguidance, with bounded white space"
NO_CONTENT = "the content of requests is never logged"
NO_IMAGES = "models take text only"
EDIT_CONFIG = "edit the config.json in the model's directory"
CAPTURES = "graphs are captured for up to MAX_BATCH_SIZE rows; ENFORCE_EAGER turns them off"
IN_PYTHON = "code of yours is not loaded into the processes"
PROXY_TLS = "TLS is for a proxy in front"
OTHER_MACHINES = "workers of other machines are started there: `tokenfleet worker` with REDIS_URL"
BLOCKS = "KV_CACHE_BYTES says how large the cache is"
READ_AS_THEY_ARE = "weights are read from .safetensors files, and the start says how far it is"
NO_MAMBA = "models with states in place of attention are not served"
EXPERTS = "ranks share the experts as the model's plan says (NUM_SHARD)"
ONLY_NGRAMS = "no other model proposes tokens; SPECULATE finds them in the row itself (n-grams)"
IN_METRICS = "metrics are in /metrics, not in the log"
ONE_WORKERS_RANKS = "one sequence is computed by the ranks of one worker (NUM_SHARD)"
AHEAD = "steps are granted ahead (HORIZON)"
OWN_VERSION = "`system_fingerprint` has this server's version"
ENDS_LOGGED = "the log has a line for the end of each generation, and none for other requests"

VLLM = (
    # model
    Option("tokenizer", NONE, OWN_TOKENIZER, same_as="model_id"),
    *options("tokenizer_mode renderer_num_workers", ("auto",), OWN_TOKENIZER),
    *options("tokenizer_revision code_revision", NONE, "REVISION holds for all files of a model"),
    Option("hf_overrides", ("{}",), EDIT_CONFIG),
    Option("hf_config_path", NONE, EDIT_CONFIG),
    Option("config_format", ("auto", "hf"), "config.json is Hugging Face's"),
    Option("model_impl", ("auto", "transformers"), "models are those of transformers"),
    *options("task runner convert", ("auto", "generate", "none"), "models generate text"),
    Option("chat_template_content_format", ("auto", "string"), "templates get the content as one text"),
    Option("response_role", ("assistant",), "answers are the assistant's"),
    *options("logits_processors logits_processor_pattern middleware worker_extension_cls", NONE, IN_PYTHON),
    Option("worker_cls", ("auto",), IN_PYTHON),
    Option("additional_config", ("{}",), "there are no plugins of platforms"),
    Option("omni", OFF, "models take and give text only", bool),
    *options("pooler_config override_pooler_config", NONE, "models generate text"),
    Option("override_attention_dtype", NONE, "attention has the type of the model (DTYPE)"),
    # what is not built
    Option("enable_lora", OFF, NO_LORA, bool),
    *options("lora_modules default_mm_loras qlora_adapter_name_or_path", NONE, NO_LORA),
    *options("max_loras max_lora_rank max_cpu_loras lora_extra_vocab_size", ANY, NO_LORA, int),
    *options("lora_dtype lora_target_modules long_lora_scaling_factors", ANY, NO_LORA),
    *options("fully_sharded_loras enable_lora_bias", ANY, NO_LORA, bool),
    Option("enable_prompt_adapter", OFF, NO_LORA, bool),
    *options(
        "speculative_config speculative_model num_speculative_tokens ngram_prompt_lookup_max "
        "ngram_prompt_lookup_min",
        NONE,
        ONLY_NGRAMS,
    ),
    Option("enable_auto_tool_choice", ANY, "the model decides whenever a request has tools", bool),
    Option("exclude_tools_when_tool_choice_none", ON, "the prompt has no tools that may not be called", bool),
    Option("tool_parser_plugin", NONE, IN_PYTHON),
    Option("tool_server", NONE, "the client calls the tools"),
    Option("guided_decoding_backend", ANY, BY_LLGUIDANCE, known=names.GUIDED_BACKENDS),
    Option("structured_outputs_config", ANY, BY_LLGUIDANCE),
    Option("reasoning_parser_plugin", NONE, IN_PYTHON),
    Option("reasoning_config", NONE, "thinking is not cut; its marks are the chat template's"),
    Option("enable_reasoning", ANY, "reasoning is apart from content (REASONING_PARSER)", bool),
    *options("otlp_traces_endpoint collect_detailed_traces", NONE, NO_TRACES),
    *options(
        "kv_transfer_config kv_events_config ec_transfer_config weight_transfer_config",
        NONE,
        "weights and KV caches stay where they are",
    ),
    Option("profiler_config", NONE, "profilers are attached from outside"),
    Option("enable_return_routed_experts", OFF, "answers have tokens, not experts", bool),
    Option("enable_sleep_mode", OFF, "a worker that is not needed is stopped", bool),
    *options(
        "limit_mm_per_prompt mm_processor_kwargs mm_processor_cache_gb media_io_kwargs",
        ANY,
        NO_IMAGES,
    ),
    *options(
        "mm_encoder_tp_mode mm_processor_cache_type mm_shm_cache_max_object_size_mb video_pruning_rate "
        "allowed_local_media_path allowed_media_domains",
        ANY,
        NO_IMAGES,
    ),
    *options(
        "disable_mm_preprocessor_cache language_model_only skip_mm_profiling interleave_mm_strings "
        "enable_mm_embeds mm_encoder_only disable_chunked_mm_input",
        ANY,
        NO_IMAGES,
        bool,
    ),
    Option("default_chat_template_kwargs", NONE, "requests give their own `chat_template_kwargs`"),
    Option("trust_request_chat_template", OFF, "a chat template is the server's (CHAT_TEMPLATE)", bool),
    Option("skip_tokenizer_init", OFF, "gateways turn text into tokens", bool),
    Option("enable_prompt_embeds", OFF, "prompts are texts or token ids", bool),
    Option("tokens_only", OFF, "every route is served", bool),
    Option("logprobs_mode", ("raw_logprobs",), "log-probabilities of /v1 are the model's own"),
    Option("rope_theta", NONE, EDIT_CONFIG, float),
    Option("scheduler_cls", NONE, IN_PYTHON),
    *options(
        "model_loader_extra_config ignore_patterns safetensors_load_strategy pt_load_map_location",
        ANY,
        READ_AS_THEY_ARE,
    ),
    Option("use_tqdm_on_load", ANY, READ_AS_THEY_ARE, bool),
    # machines and ranks
    Option(
        "pipeline_parallel_size",
        (1,),
        "layers are not split between GPUs (pipeline parallel); their weights are (NUM_SHARD)",
        int,
    ),
    Option("distributed_executor_backend", ("mp", "uni"), "each rank is a process (NUM_SHARD)"),
    Option("enable_expert_parallel", ANY, EXPERTS, bool),
    Option("disable_custom_all_reduce", ANY, "ranks sum by NCCL, without kernels of our own", bool),
    Option("max_parallel_loading_workers", ANY, "each rank reads its own part of the weights", int),
    *options("nnodes node_rank", NONE, OTHER_MACHINES, int),
    *options("data_parallel_address data_parallel_rpc_port data_parallel_backend", NONE, OTHER_MACHINES),
    *options(
        "data_parallel_size_local data_parallel_start_rank data_parallel_rank", NONE, OTHER_MACHINES, int
    ),
    *options("headless worker_use_ray ray_workers_use_nsight", OFF, OTHER_MACHINES, bool),
    Option("data_parallel_supervisor_port", NONE, OTHER_MACHINES, int),
    *options(
        "data_parallel_hybrid_lb data_parallel_external_lb",
        ANY,
        "a batcher spreads requests over all workers, on whatever machine",
        bool,
    ),
    *options(
        "decode_context_parallel_size prefill_context_parallel_size",
        (1,),
        ONE_WORKERS_RANKS,
        int,
    ),
    *options("dcp_kv_cache_interleave_size cp_kv_cache_interleave_size", ANY, ONE_WORKERS_RANKS, int),
    Option("dcp_comm_backend", ANY, ONE_WORKERS_RANKS, known=("ag_rs", "a2a")),
    Option("disable_nccl_for_dp_synchronization", ANY, "workers do not wait for each other", bool),
    Option(
        "distributed_timeout_seconds",
        ANY,
        "a worker that hangs is replaced (STEP_TIMEOUT_S, WORKER_TTL_S)",
        float,
    ),
    *options("enable_eplb enable_dbo ubatch_size enable_elastic_ep", ANY, EXPERTS, bool),
    Option("eplb_config", ANY, EXPERTS),
    Option("all2all_backend", ANY, EXPERTS, known=names.ALL_TO_ALL),
    Option("expert_placement_strategy", ANY, EXPERTS, known=("linear", "round_robin")),
    Option("moe_backend", ANY, EXPERTS, known=names.MOE_BACKENDS),
    *options("mamba_ssm_cache_dtype mamba_cache_dtype", ANY, NO_MAMBA, known=names.STATE_DTYPES),
    Option("mamba_cache_mode", ANY, NO_MAMBA, known=("all", "align", "none")),
    Option("mamba_block_size", ANY, NO_MAMBA, int),
    Option("mamba_backend", ANY, NO_MAMBA, known=("triton", "flashinfer", "cpu")),
    Option("numa_bind", ANY, "the operating system places processes", bool),
    # memory
    Option("swap_space", ANY, "nothing is swapped: what is preempted is computed again", float),
    Option("preemption_mode", ("recompute",), "nothing is swapped: what is preempted is computed again"),
    *options("cpu_offload_gb kv_offloading_size", (0.0,), "weights and caches stay on the device", float),
    Option("num_gpu_blocks_override", NONE, BLOCKS, int),
    Option("kv_offloading_backend", ANY, "caches stay on the device", known=("native", "lmcache")),
    Option("offload_backend", ANY, "weights stay on the device", known=("auto", "uva", "prefetch")),
    Option("prefix_caching_hash_algo", ANY, "blocks are named by BLAKE2b", known=names.HASHES),
    Option("kv_sharing_fast_prefill", ANY, "every layer computes the whole prompt", bool),
    Option("calculate_kv_scales", OFF, "scales of an 8-bit KV cache are the checkpoint's, or 1", bool),
    # scheduling and speed
    Option("seed", (0,), "a seed belongs to a request", int),
    Option(
        "scheduling_policy",
        ("fcfs", "priority"),
        "by `priority` where requests have it, those of one class and tenant first come, first served",
    ),
    *options(
        "max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold", ANY, CHUNKED, int
    ),
    *options("num_scheduler_steps num_lookahead_slots", ANY, AHEAD, int),
    Option("async_scheduling", ANY, AHEAD, bool),
    Option("stream_interval", ANY, "each token is sent as soon as it is there", int),
    Option("linear_backend", ANY, "each device has its own products", known=names.LINEAR_BACKENDS),
    *options("compilation_config cudagraph_capture_sizes cuda_graph_sizes kernel_config", ANY, CAPTURES),
    Option("optimization_level", ANY, CAPTURES, known=("0", "1", "2", "3")),
    Option("performance_mode", ANY, CAPTURES, known=("balanced", "interactivity", "throughput")),
    *options(
        "max_seq_len_to_capture max_context_len_to_capture max_cudagraph_capture_size", ANY, CAPTURES, int
    ),
    *options("attention_backend mm_encoder_attn_backend", ANY, OWN_ATTENTION, known=names.ATTENTION_BACKENDS),
    Option("attention_config", ANY, OWN_ATTENTION),
    Option("flash_attn_version", ANY, OWN_ATTENTION, known=("2", "3", "4")),
    Option(
        "enable_flashinfer_autotune", ANY, "FlashInfer compiles its kernels when they are first used", bool
    ),
    Option("scheduler_delay_factor", ANY, "requests start as soon as there is room", float),
    Option("tokenizer_pool_size", ANY, "each gateway tokenizes by itself; NUM_GATEWAYS adds more", int),
    *options(
        "multi_step_stream_outputs disable_async_output_proc scheduler_reserve_full_isl",
        ANY,
        AHEAD,
        bool,
    ),
    *options(
        "disable_cascade_attn disable_hybrid_kv_cache_manager use_v2_block_manager",
        ANY,
        OWN_ATTENTION,
        bool,
    ),
    Option("disable_sliding_window", OFF, "a model's windows are as its config says", bool),
    Option("disable_frontend_multiprocessing", ANY, "gateways are processes (NUM_GATEWAYS)", bool),
    # HTTP and logs
    *options(
        "enable_log_requests disable_log_requests enable_log_outputs enable_log_deltas", ANY, NO_CONTENT, bool
    ),
    Option("max_log_len", ANY, NO_CONTENT, int),
    *options(
        "disable_log_stats aggregate_engine_logging cudagraph_metrics kv_cache_metrics enable_mfu_metrics",
        ANY,
        IN_METRICS,
        bool,
    ),
    Option("kv_cache_metrics_sample", ANY, IN_METRICS, float),
    Option("show_hidden_metrics_for_version", ANY, "no metric is hidden"),
    *options("disable_uvicorn_access_log disable_access_log", ANY, ENDS_LOGGED, bool),
    Option("enable_request_id_headers", ON, "every response has the header x-request-id", bool),
    Option("enable_prompt_tokens_details", ANY, "usage always has them", bool),
    Option("fingerprint_mode", ("full", "hash"), OWN_VERSION, known=names.FINGERPRINTS),
    Option("fingerprint_value", NONE, OWN_VERSION),
    Option("enable_server_load_tracking", ANY, "the load is in /metrics", bool),
    Option("return_tokens_as_token_ids", OFF, "tokens are texts", bool),
    Option("enable_force_include_usage", OFF, "`stream_options` asks for usage", bool),
    Option("allowed_origins", ('["*"]',), "give each as --cors-allow-origin"),
    *options("allowed_methods allowed_headers", ('["*"]',), "all are allowed"),
    Option("allow_credentials", OFF, "browsers send no credentials to other origins", bool),
    *options("root_path uds", NONE, "paths and sockets are for a proxy in front"),
    *options("ssl_keyfile ssl_certfile ssl_ca_certs", NONE, PROXY_TLS),
    Option("ssl_cert_reqs", (0,), PROXY_TLS, int),
    Option("enable_ssl_refresh", ANY, PROXY_TLS, bool),
    Option("ssl_ciphers", ANY, PROXY_TLS),
    Option("log_config_file", NONE, "LOG_LEVEL and JSON_OUTPUT say how logs are written"),
    Option("log_error_stack", ANY, "the log has the traceback of every crash", bool),
    Option("disable_access_log_for_endpoints", ANY, ENDS_LOGGED),
    Option("disable_fastapi_docs", OFF, "/docs is there", bool),
    Option("enable_offline_docs", ANY, "/docs needs nothing from elsewhere", bool),
    Option("enable_tokenizer_info_endpoint", OFF, "/info has what is known of the model", bool),
    Option("enable_per_request_metrics", ANY, "headers of answers have their times", bool),
    *options("h11_max_header_count h11_max_incomplete_event_size", ANY, "HTTP is not parsed by h11", int),
)
