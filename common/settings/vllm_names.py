"""Names that vLLM knows: values of its options, old and new, in small letters."""

ATTENTION_BACKENDS = tuple(
    "auto flash_attn flash_attn_diffkv flash_attn_vllm_v1 flashinfer flashinfer_vllm_v1 triton_attn "
    "triton_attn_vllm_v1 flex_attention tree_attn torch_sdpa torch_sdpa_vllm_v1 xformers cpu_attn turboquant "
    "rocm_attn rocm_flash rocm_aiter_fa rocm_aiter_unified_attn rocm_aiter_mla rocm_aiter_triton_mla "
    "rocm_aiter_mla_sparse flash_attn_mla flashmla flashmla_sparse flashmla_vllm_v1 flashinfer_mla "
    "flashinfer_mla_sparse cutlass_mla triton_mla triton_mla_sparse triton_mla_vllm_v1 xpu_mla_sparse "
    "dual_chunk_flash_attn differential_flash_attn pallas pallas_vllm_v1 ipex no_attention custom".split()
)
MOE_BACKENDS = tuple(
    "auto triton triton_unfused batched_triton deep_gemm deep_gemm_mega_moe cutlass flashinfer_trtllm "
    "flashinfer_cutlass flashinfer_cutedsl flashinfer_b12x b12x marlin humming aiter flydsl hpc "
    "emulation".split()
)
LINEAR_BACKENDS = tuple(
    "auto cutlass flashinfer_cutlass flashinfer_cutedsl flashinfer_trtllm flashinfer_cudnn flashinfer_b12x "
    "b12x marlin humming triton deep_gemm torch aiter machete fbgemm conch exllama emulation xpu "
    "xpu_woq".split()
)
ALL_TO_ALL = tuple(
    "naive pplx deepep_high_throughput deepep_low_latency deepep_v2 mori mori_high_throughput "
    "mori_low_latency nixl_ep allgather_reducescatter flashinfer_all2allv flashinfer_nvlink_two_sided "
    "flashinfer_nvlink_one_sided".split()
)
GUIDED_BACKENDS = ("auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer")
HASHES = ("builtin", "sha256", "sha256_cbor", "sha256_cbor_64bit", "xxhash", "xxhash_cbor")
STATE_DTYPES = ("auto", "float32", "float16", "bfloat16")
FINGERPRINTS = ("full", "hash", "custom", "none")
