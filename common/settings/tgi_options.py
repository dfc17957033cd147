"""Options of text-generation-inference that are no settings of ours."""

from common.settings.option import ANY, NONE, OFF, ON, Option, options

RANKS_FIND = "the ranks of one machine find each other by themselves; torchrun says where those of several do"
BY_TORCHRUN = "set by torchrun for a worker whose ranks run on several machines (NUM_SHARD for those of one)"
CHUNKED = "prompts are computed in chunks beside the running requests, so none of both waits for the other"
NO_TRACES = "traces are not built yet; metrics are (METRICS_PORT)"
NO_NGROK = "tunnels are not built; put a proxy in front"
NO_LORA = "adapters are not built yet; merge the adapter into the model"
OWN_TOKENIZER = "a model's tokenizer is its own; tokenizer.json stands beside its weights"
BY_HUB = "read by huggingface_hub"
OWN_ATTENTION = "each device has its own attention kernels"

TGI = (
    # launcher and router
    Option(
        "validation_workers",
        ANY,
        "a gateway tokenizes short prompts at once and long ones in threads; NUM_GATEWAYS adds more",
        int,
    ),
    Option(
        "cuda_graphs",
        ("0", "1,2,4,8,16,32"),
        "graphs are captured for up to MAX_BATCH_SIZE rows, for none with ENFORCE_EAGER, which 0 means",
    ),
    *options(
        "shard_uds_path master_shard_uds_path uds_path",
        ANY,
        "agent and engine of a worker share a socket without a name",
    ),
    Option("master_addr", ANY, RANKS_FIND),
    Option("master_port", ANY, RANKS_FIND, int),
    Option("weights_cache_override", NONE, "give the directory with the weights as MODEL_ID"),
    Option("disable_custom_kernels", ANY, "TGI's kernels for BLOOM and GPT-NeoX are not part of this", bool),
    Option("otlp_endpoint", NONE, NO_TRACES),
    Option(
        "otlp_service_name",
        ("text-generation-inference.router", "text-generation-inference.server"),
        NO_TRACES,
    ),
    Option("ngrok", OFF, NO_NGROK, bool),
    Option("ngrok_authtoken", NONE, NO_NGROK, secret=True),
    Option("ngrok_edge", NONE, NO_NGROK),
    Option("env", ANY, "prints what `tokenfleet doctor` finds, then starts", bool, variable=False),
    Option("lora_adapters", NONE, NO_LORA),
    Option("usage_stats", ("on", "no-stack", "off"), "nothing about the use is ever sent anywhere"),
    Option(
        "enable_prefill_logprobs",
        ANY,
        "log-probabilities of a prompt are computed for requests that ask for them",
        bool,
    ),
    Option("tokenizer_name", NONE, OWN_TOKENIZER, same_as="model_id"),
    Option("max_image_fetch_size", ANY, "no image is ever fetched: models take text only", int),
    # variables without a flag
    Option("log_colorize", ANY, "lines of logs have no colours", flag=False),
    *options(
        "hf_token hugging_face_hub_token hf_home hf_hub_offline hf_hub_user_agent_origin",
        ANY,
        BY_HUB,
        flag=False,
    ),
    Option("hf_api_token", ANY, "given to huggingface_hub as HF_TOKEN", flag=False),
    Option("hf_hub_enable_hf_transfer", ANY, "huggingface_hub has its own fast transfers", flag=False),
    *options("attention use_flash_attention", ANY, OWN_ATTENTION, flag=False),
    Option("prefill_chunking", ON, CHUNKED, bool, flag=False),
    Option("tgi_wiggle_room", NONE, "KV_CACHE_BYTES says how large the cache is", flag=False),
    Option("request_logprobs", ANY, "log-probabilities are always computed", flag=False),
    *options(
        "disable_exllama exllama_version",
        ANY,
        "GPTQ weights are multiplied by kernels of our own",
        flag=False,
    ),
    *options(
        "rocm_use_flash_attn_v2_triton rocm_use_custom_paged_attn rocm_use_skinny_gemm",
        NONE,
        "AMD GPUs are not served",
        flag=False,
    ),
    *options(
        "pytorch_tunableop_enabled pytorch_tunableop_tuning pytorch_tunableop_tuned_file",
        ANY,
        "read by torch",
        flag=False,
    ),
    Option("xpu_memory_fraction", NONE, "Intel GPUs are not served", flag=False),
    Option("debug", ANY, "a worker of one rank has no process group that could be faked", flag=False),
    Option("rank", ANY, BY_TORCHRUN, int, flag=False),
    Option("world_size", ANY, BY_TORCHRUN, int, flag=False),
    Option("cuda_visible_devices", ANY, "read by CUDA", flag=False),
    Option("nvidia_visible_devices", ANY, "read by the container's runtime", flag=False),
    Option("ze_affinity_mask", ANY, "read by the driver of Intel GPUs, which are not served", flag=False),
)
