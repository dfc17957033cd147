"""Options of text-generation-inference and vLLM that are no settings of ours: other names for a setting, and
fixed answers.
"""

from dataclasses import replace

from common.settings.tgi_options import TGI
from common.settings.vllm_options import VLLM

OPTIONS = {option.name: option for option in (*TGI, *(replace(option, variable=False) for option in VLLM))}

IMPLIED = {("cuda_graphs", "0"): ("enforce_eager", "true")}
"""An option and its value → the setting of ours that it gives a value."""

ALIASES = {"max_input_length": "max_input_tokens", "prometheus_port": "metrics_port"}
"""Of TGI: as flags and as variables."""

FLAG_ALIASES = {
    "logger_level": "log_level",  # of TGI's server
    "model": "model_id",
    "tensor_parallel_size": "num_shard",
    "data_parallel_size": "num_workers",
    "api_server_count": "num_gateways",
    "max_model_len": "max_total_tokens",
    "gpu_memory_utilization": "cuda_memory_fraction",
    "max_num_seqs": "max_batch_size",
    "max_num_batched_tokens": "max_batch_prefill_tokens",
    "max_logprobs": "max_top_n_tokens",
    "host": "hostname",
    "enable_prefix_caching": "prefix_caching",
    "enable_chunked_prefill": "prefill_chunking",
    "quantization": "quantize",
    "download_dir": "huggingface_hub_cache",
    "uvicorn_log_level": "log_level",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "shutdown_timeout": "graceful_termination_timeout",
}

VARIABLE_ALIASES = {
    "omp_num_threads": "threads",
    "hf_model_id": "model_id",  # these are SageMaker's
    "hf_model_revision": "revision",
    "hf_model_quantize": "quantize",
    "hf_model_trust_remote_code": "trust_remote_code",
    "sm_num_gpus": "num_shard",
    "sagemaker_bind_to_port": "port",
}

SHORT = {
    "-p": "port",
    "-e": "env",
    "-tp": "num_shard",
    "-dp": "num_workers",
    "-q": "quantize",
    "-pp": "pipeline_parallel_size",
    "-dcp": "decode_context_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-ep": "enable_expert_parallel",
    "-dpa": "data_parallel_address",
    "-dpb": "data_parallel_backend",
    "-dpe": "data_parallel_external_lb",
    "-dph": "data_parallel_hybrid_lb",
    "-dpl": "data_parallel_size_local",
    "-dpn": "data_parallel_rank",
    "-dpp": "data_parallel_rpc_port",
    "-dpr": "data_parallel_start_rank",
    "-n": "nnodes",
    "-r": "node_rank",
    "-asc": "num_gateways",
    "-ac": "attention_config",
    "-cc": "compilation_config",
    "-sc": "speculative_config",
    "-O": "optimization_level",
}
