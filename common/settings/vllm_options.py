"""Options of vLLM that are no settings of ours."""

from common.settings.option import ANY, NONE, OFF, ON, Option, options
from common.settings.tgi_options import (
    CHUNKED,
    NO_LORA,
    NO_SPECULATION,
    NO_TRACES,
    OWN_TOKENIZER,
)

NO_GUIDES = "structured output is not built yet"
NO_CONTENT = "the content of requests is never logged"
NO_IMAGES = "models take text only"
CAPTURES = "graphs are captured for up to MAX_BATCH_SIZE rows; ENFORCE_EAGER turns them off"
PROXY_TLS = "TLS is for a proxy in front"
OTHER_MACHINES = "workers of other machines are started there: `tokenfleet worker` with REDIS_URL"
BLOCKS = "KV_CACHE_BYTES says how large the cache is"
IN_PYTHON = "code of yours is not loaded into the processes"

VLLM = (
    # model
    Option("tokenizer", NONE, OWN_TOKENIZER, same_as="model_id"),
    *options("tokenizer_mode renderer_num_workers", ("auto",), OWN_TOKENIZER),
    *options("tokenizer_revision code_revision", NONE, "REVISION holds for all files of a model"),
    *options("hf_overrides hf_config_path", NONE, "edit the config.json in the model's directory"),
    Option("config_format", ("auto", "hf"), "config.json is Hugging Face's"),
    Option("model_impl", ("auto", "transformers"), "models are those of transformers"),
    *options("task runner convert", ("auto", "generate", "none"), "models generate text"),
    Option("chat_template_content_format", ("auto", "string"), "templates get the content as one text"),
    Option("response_role", ("assistant",), "answers are the assistant's"),
    Option("logits_processors", NONE, IN_PYTHON),
    Option("middleware", NONE, IN_PYTHON),
    Option("worker_extension_cls", NONE, IN_PYTHON),
    # what is not built
    Option("enable_lora", OFF, NO_LORA, bool),
    Option("lora_modules", NONE, NO_LORA),
    *options("max_loras max_lora_rank max_cpu_loras", ANY, NO_LORA, int),
    Option("fully_sharded_loras", ANY, NO_LORA, bool),
    *options("speculative_config speculative_model num_speculative_tokens", NONE, NO_SPECULATION),
    Option("enable_auto_tool_choice", ANY, "the model decides whenever a request has tools", bool),
    Option("exclude_tools_when_tool_choice_none", ON, "the prompt has no tools that may not be called", bool),
    Option("tool_parser_plugin", NONE, IN_PYTHON),
    Option("tool_server", NONE, "the client calls the tools"),
    *options("guided_decoding_backend structured_outputs_config", NONE, NO_GUIDES),
    Option("reasoning_parser_plugin", NONE, IN_PYTHON),
    Option("enable_reasoning", ANY, "reasoning is apart from content (REASONING_PARSER)", bool),
    *options("otlp_traces_endpoint collect_detailed_traces", NONE, NO_TRACES),
    *options("kv_transfer_config kv_events_config", NONE, "KV caches stay where they are computed"),
    Option("enable_sleep_mode", OFF, "a worker that is not needed is stopped", bool),
    *options(
        "limit_mm_per_prompt mm_processor_kwargs mm_processor_cache_gb media_io_kwargs",
        ANY,
        NO_IMAGES,
    ),
    *options("disable_mm_preprocessor_cache language_model_only skip_mm_profiling", ANY, NO_IMAGES, bool),
    # machines and ranks
    Option(
        "pipeline_parallel_size",
        (1,),
        "layers are not split between GPUs (pipeline parallel); their weights are (NUM_SHARD)",
        int,
    ),
    Option("distributed_executor_backend", ("mp", "uni"), "each rank is a process (NUM_SHARD)"),
    Option(
        "enable_expert_parallel", ANY, "ranks share the experts as the model's plan says (NUM_SHARD)", bool
    ),
    Option("disable_custom_all_reduce", ANY, "ranks sum by NCCL, without kernels of our own", bool),
    Option("max_parallel_loading_workers", ANY, "each rank reads its own part of the weights", int),
    *options("nnodes node_rank", NONE, OTHER_MACHINES, int),
    *options("data_parallel_address data_parallel_rpc_port data_parallel_backend", NONE, OTHER_MACHINES),
    *options("headless worker_use_ray", OFF, OTHER_MACHINES, bool),
    # memory
    Option("swap_space", ANY, "nothing is swapped: what is preempted is computed again", float),
    Option("preemption_mode", ("recompute",), "nothing is swapped: what is preempted is computed again"),
    *options("cpu_offload_gb kv_offloading_size", (0.0,), "weights and caches stay on the device", float),
    Option("num_gpu_blocks_override", NONE, BLOCKS, int),
    Option("calculate_kv_scales", OFF, "the KV cache has the type of the model (DTYPE)", bool),
    # scheduling and speed
    Option("seed", (0,), "a seed belongs to a request", int),
    Option("scheduling_policy", ("fcfs",), "requests are served first come, first served"),
    *options(
        "max_num_partial_prefills max_long_partial_prefills long_prefill_token_threshold", ANY, CHUNKED, int
    ),
    *options("num_scheduler_steps stream_interval", ANY, "steps are granted ahead (HORIZON)", int),
    Option("async_scheduling", ANY, "steps are granted ahead (HORIZON)", bool),
    *options("attention_backend mm_encoder_attn_backend", ANY, "each device has its own attention kernels"),
    *options("compilation_config optimization_level cudagraph_capture_sizes", ANY, CAPTURES),
    *options("max_seq_len_to_capture max_cudagraph_capture_size", ANY, CAPTURES, int),
    *options(
        "disable_cascade_attn disable_hybrid_kv_cache_manager use_v2_block_manager",
        ANY,
        "each device has its own attention kernels",
        bool,
    ),
    Option("disable_sliding_window", OFF, "a model's windows are as its config says", bool),
    Option("disable_frontend_multiprocessing", ANY, "gateways are processes (NUM_GATEWAYS)", bool),
    # HTTP and logs
    *options("enable_log_requests disable_log_requests enable_log_outputs", ANY, NO_CONTENT, bool),
    Option("max_log_len", ANY, NO_CONTENT, int),
    Option("disable_log_stats", ANY, "figures are in /metrics, not in the log", bool),
    *options("disable_uvicorn_access_log disable_access_log", ANY, "requests are counted, not logged", bool),
    Option("enable_request_id_headers", ON, "every response has the header x-request-id", bool),
    Option("enable_prompt_tokens_details", ANY, "no part of a prompt comes from a cache", bool),
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
)
