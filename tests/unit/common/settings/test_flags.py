"""Flags of vLLM: each command line starts a fleet, or is refused by the flag that stands in the way."""

from pathlib import Path
from typing import Any

import pytest

from common.settings.flags import ANY, FLAGS, OPTIONS, ROWS, SAME, SHORT, VARIABLES, unheeded
from common.settings.settings import SettingError, Settings

# --- flags --------------------------------------------------------------------------------------------------

SERVED = """
--tensor-parallel-size 2 --max-model-len 32768 --gpu-memory-utilization 0.95
--max_model_len 4096 --max_num_seqs=64 --tensor_parallel_size 2
--dtype bfloat16 --max-model-len auto --enable-log-requests
--max-model-len 8192 --disable-log-requests --enforce-eager
--no-enable-prefix-caching --no-enforce-eager --async-scheduling
--limit-mm-per-prompt image=2 --max-model-len 8k
--limit-mm-per-prompt {"image":2} --served-model-name gpt-4o gpt-4o-mini --api-key token
-O3 --attention-backend FLASHINFER --guided-decoding-backend xgrammar:disable-any-whitespace
-O 2 --compilation-config {"level":3}
-cc {"mode":3} --max-num-batched-tokens 8192 --max-num-partial-prefills 4
--swap-space 16 --disable-log-stats --trust-remote-code
--api-server-count 4 --data-parallel-size 2 --port 8000 --host 0.0.0.0
--generation-config auto --override-generation-config {"temperature":0.6} --seed 0 --task generate
--runner generate --convert none --config-format hf --tokenizer-mode auto
--pipeline-parallel-size 1 -tp 4 --distributed-executor-backend mp
--enable-expert-parallel --disable-custom-all-reduce --max-parallel-loading-workers 2
--kv-cache-dtype auto --block-size 16 --max-seq-len-to-capture 8192 --uvicorn-log-level warning
--max-logprobs 10 --enable-request-id-headers --disable-uvicorn-access-log --max-log-len 100
--num-scheduler-steps 8 --enable-chunked-prefill --scheduling-policy fcfs --use-v2-block-manager
--limit-mm-per-prompt.image 5 --limit_mm_per_prompt.video=1 --structured-outputs-config.backend xgrammar
--guided-decoding-backend xgrammar --attention-config.backend FLASH_ATTN --cuda-graph-sizes 512
--mm-encoder-tp-mode data --mm-processor-cache-type shm --interleave-mm-strings --allowed-local-media-path /
--enable-lora --lora-modules sql=/adapters/sql {"name":"de","path":"o/de"} --max-loras 4 --max-lora-rank 8
--enable-eplb --eplb-config {"window_size":1000} --all2all-backend deepep_low_latency --moe-backend marlin
--data-parallel-hybrid-lb --decode-context-parallel-size 1 --numa-bind --performance-mode throughput
--mamba-ssm-cache-dtype float32 --mamba-cache-mode align --logprobs-mode raw_logprobs
--tokenizer-pool-size 4 --multi-step-stream-outputs true --scheduler-delay-factor 0.0 --num-lookahead-slots 0
--model-loader-extra-config {} --safetensors-load-strategy prefetch --use-tqdm-on-load
--kv-offloading-backend native --prefix-caching-hash-algo sha256 --shutdown-timeout 30
--h11-max-header-count 256 --disable-access-log-for-endpoints /health --enable-offline-docs
--quantization awq_marlin --dtype half --hf-overrides {}
--quantization compressed_tensors --tool-call-parser qwen3_xml --reasoning-parser none
--enable-flashinfer-autotune --scheduler-reserve-full-isl --disable-async-output-proc
-cc.pass_config.fuse_rope_kvcache true -O.mode 3 -ac.backend=TRITON_ATTN -ep -asc 2 -dph -dcp 1
--linear-backend flashinfer_cutlass --mamba-backend flashinfer --load-format fastsafetensors
--disable_chunked_mm_input --worker-cls auto --fingerprint-mode hash --offload-backend auto --lora-dtype auto
--linear-backend flashinfer-b12x --moe-backend Batched-Triton --mamba-backend CPU --offload-backend uva
--guided-decoding-backend lm-format-enforcer:no-fallback
-sc.method suffix --speculative_config.num-speculative-tokens=5
--kv-cache-memory-bytes 4GiB --load-format safetensors --revision main --download-dir /models
""".strip().splitlines()

REFUSED = {
    '--hf-overrides {"rope_theta":1}': 'HF_OVERRIDES: {"rope_theta":1} is not served: edit the config',
    "--kv-cache-dtype int8": "KV_CACHE_DTYPE: 'int8' is not one of auto, fp8_e4m3, fp8_e5m2",
    "--omni --port 80": "OMNI: true is not served: models take and give text only",
    "-sc.method mtp": "SPECULATIVE_CONFIG: method mtp is not served; these are: ngram",
    "-dcp 4": "DECODE_CONTEXT_PARALLEL_SIZE: 4 is not served: one sequence",
    "--reasoning-config {}": "REASONING_CONFIG: {} is not served: thinking is not cut",
    "--attention-backend NOPE": "ATTENTION_BACKEND: NOPE is not one of auto, flash_attn,",
    "--mamba-cache-mode some": "MAMBA_CACHE_MODE: some is not one of all, align, none",
    "--mamba-backend cuda": "MAMBA_BACKEND: cuda is not one of triton, flashinfer, cpu",
    "--linear-backend cublas": "LINEAR_BACKEND: cublas is not one of auto, cutlass,",
    "--offload-backend disk": "OFFLOAD_BACKEND: disk is not one of auto, uva, prefetch",
    "--fingerprint-mode half": "FINGERPRINT_MODE: half is not one of full, hash, custom, none",
    "--fingerprint-mode none": "FINGERPRINT_MODE: none is not served: `system_fingerprint` has",
    "-O9": "OPTIMIZATION_LEVEL: 9 is not one of 0, 1, 2, 3",
    "--flash-attn-version 9": "FLASH_ATTN_VERSION: 9 is not one of 2, 3, 4",
    "--mamba-block-size x": "MAMBA_BLOCK_SIZE: ",
    "-q exl2": "QUANTIZE: exl2 is not served: ExLlamaV2's layout of weights is not read",
    '--override-generation-config {"n":2}': 'OVERRIDE_GENERATION_CONFIG: {"n":2} must be an object with',
    "--load-format mistral": "LOAD_FORMAT: 'mistral' is not one of auto, dummy",
    "--enable-prompt-adapter": "ENABLE_PROMPT_ADAPTER: true is not served: prompt adapters",
    "--enable-lora --lora-modules a=/b a=/c": "LORA_ADAPTERS: 'a' is the name of two adapters",
    '--lora-modules {"name":1': '--lora-modules: {"name":1 is not served: an adapter in JSON is as',
    "--speculative_config {}": "SPECULATIVE_CONFIG: an object without a method needs a model",
    "--default-chat-template-kwargs {}": "DEFAULT_CHAT_TEMPLATE_KWARGS: {} is not served: requests give",
    "--data-parallel-size-local 4": "DATA_PARALLEL_SIZE_LOCAL: 4 is not served: workers of other machines",
    "--scheduler-cls a.b": "SCHEDULER_CLS: a.b is not served: code of yours",
    "--enable-tokenizer-info-endpoint": "ENABLE_TOKENIZER_INFO_ENDPOINT: true is not served: /info",
    "--frobnicate.part 3": "--frobnicate.part: unknown flag; --help lists them",
    "--ssl-keyfile /key": "SSL_KEYFILE: /key is not served: TLS is for a proxy",
    "--logits-processors a.b": "LOGITS_PROCESSORS: a.b is not served: code of yours",
    "--no-enable-chunked-prefill": "--enable-chunked-prefill: false is not served: prompts are",
    "--max-model-length 3": "--max-model-length: unknown flag; the nearest is --max-model-len",
    "--tensor-parallel 3": "--tensor-parallel: unknown flag; the nearest is --tensor-parallel-size",
    "--tool-call-parser-plugin a": "the nearest is --tool-parser-plugin",
    "--deploy-config a": "--deploy-config: unknown flag; the nearest is --eplb-config",
    "--cfg-parallel-size 2": "--cfg-parallel-size: unknown flag; --help lists them",
    "--no-port": "--no-port: unknown flag",
    "--config /missing.yaml": "--config: '/missing.yaml' cannot be read",
}


def test_command_lines_of_vllm_are_served() -> None:
    for line in SERVED:
        Settings.read(line.split(), {})


def test_command_lines_that_are_not_served_are_refused_by_the_flag() -> None:
    for line, words in REFUSED.items():
        with pytest.raises(SettingError) as refusal:
            Settings.read(line.split(), {})
        assert words in str(refusal.value)


def test_underscores_in_a_flag_are_dashes_and_those_of_a_value_stay() -> None:
    settings = Settings.read(["--served_model_name", "my_model", "--pool=my_pool"], {})
    assert (settings.served_model_name, settings.pool) == (("my_model",), "my_pool")


def test_a_file_of_flags_gives_what_the_command_line_does_not(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "model: org/model\nport: 12312\nserved-model-name: [a, b]\nmax_model_len: 8k\nenforce-eager: true\n"
        "hostname: 127.0.0.1\n"
    )
    for words in (["--config", str(file)], [f"--config={file}"]):
        settings = Settings.read([*words, "--port", "80"], {})
        assert (settings.model_id, settings.port, settings.served_model_name) == ("org/model", 80, ("a", "b"))
        assert (settings.max_total_tokens, settings.enforce_eager) == (8000, True)
    file.write_text("- port")
    with pytest.raises(SettingError, match=r"^--config: .* is not a mapping of flags to values"):
        Settings.read(["--config", str(file)], {})


def test_a_flag_that_changes_nothing_is_named_with_the_reason() -> None:
    found = unheeded(["-O3", "--swap-space", "4", "--port", "80", "--seed", "0"])
    assert sorted(found) == [
        "--optimization-level changes nothing: graphs are captured for up to MAX_BATCH_SIZE rows; "
        "ENFORCE_EAGER turns them off",
        "--swap-space changes nothing: nothing is swapped: what is preempted is computed again",
    ]


# --- option -------------------------------------------------------------------------------------------------

PATH = "/some/path"


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--model", "org/model"], "model_id", "org/model"),
        (["--max-model-len", "512"], "max_total_tokens", 512),
        (["--host", "127.0.0.1"], "hostname", "127.0.0.1"),
        (["--gpu-memory-utilization", "0.9"], "cuda_memory_fraction", 0.9),
        (["--download-dir", PATH], "huggingface_hub_cache", PATH),
        (["--load-format", "dummy"], "load_format", "dummy"),
        (["--dtype", "half"], "dtype", "float16"),
        (["--served-model-name", "mine"], "served_model_name", ("mine",)),
        (["--served-model-name", "a", "b", "--port", "80"], "served_model_name", ("a", "b")),
        (["--trust-remote-code"], "trust_remote_code", True),
        (["--tensor-parallel-size=1", "--seed", "0", "--disable-log-requests"], "num_workers", 1),
        (["--cuda-graphs", "0"], "enforce_eager", True),
        (["--cuda-graphs", "1,2,4,8,16,32"], "enforce_eager", False),
        (
            ["--enable-chunked-prefill", "--no-enable-prefix-caching", "--swap-space", "4", "--port", "80"],
            "port",
            80,
        ),
        (["--model", "org/model", "--tokenizer", "org/model"], "model_id", "org/model"),
        (["--logger-level", "WARNING"], "log_level", "warning"),
        (["-p", "8080", "-tp", "1"], "port", 8080),
        (["-e"], "port", 3000),
        (["--no-enable-prefix-caching"], "prefix_caching", False),
        (["--cors-allow-origin", "a", "--cors-allow-origin", "b"], "cors_allow_origin", ("a", "b")),
        (["--response-ttl-s", "60"], "answer_ttl_s", 60.0),
        (["--preload-worker", "false"], "preload", False),
        (["--sharded", "--port", "80"], "sharded", True),
        (["-g", "5"], "graceful_termination_timeout", 5.0),
        (["--tokenizer", "org/model"], "tokenizer_name", "org/model"),
    ],
)
def test_flags_of_others_mean_ours(argv: list[str], name: str, value: Any) -> None:
    assert getattr(Settings.read(argv, {}), name) == value


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--seed", "7"], "SEED: 7 is not served: a seed belongs to a request"),
        (["--max-model-len", "1"], "--max-model-len: 1 is less than 2"),
        (["--max-input-length", "5", "--max-input-tokens", "6"], "means the same as"),
        (["--validation-workers", "0"], "VALIDATION_WORKERS: 0 is less than 1"),
        (["--rope-scaling", "linear"], "ROPE_SCALING: linear needs ROPE_FACTOR"),
        (["--demo"], "DEMO: "),
        (["--max-batches", "7"], "MAX_BATCHES: 7 is not served: 10,000 batches are kept"),
        (["--metrics-names", "vllm"], "METRICS_NAMES: vllm is not served: vLLM's names are recording rules"),
    ],
)
def test_what_is_refused_bears_the_name_that_the_person_said(argv: list[str], line: str) -> None:
    with pytest.raises(SettingError) as refusal:
        Settings.read(argv, {})
    assert line in str(refusal.value)


def test_our_own_variable_wins_over_anothers_name_for_it() -> None:
    assert Settings.read([], {"THREADS": "3", "OMP_NUM_THREADS": "2"}).threads == 3
    assert Settings.read([], {"MODEL_ID": "ours", "HF_MODEL_ID": "theirs"}).model_id == "ours"
    assert Settings.read(["--max-input-length", "5"], {"MAX_INPUT_TOKENS": "6"}).max_input_tokens == 5


def test_vllms_names_are_no_variables() -> None:
    """A HOST or SEED in somebody's environment speaks to others."""
    assert (
        Settings.read([], {"HOST": "h", "SEED": "7", "TOKENIZER": "t", "MODEL": "m", "ENV": "production"})
        == Settings()
    )


def test_every_name_is_answered_once() -> None:
    fields, options = set(Settings.model_fields), set(OPTIONS)
    assert not fields & options
    assert not (fields | options) & {*FLAGS, *VARIABLES}
    meant = {*FLAGS.values(), *VARIABLES.values(), *SHORT.values()}
    assert meant <= fields | options
    listed = [one for _, row in ROWS for one in row]
    assert len(listed) == len({one.name for one in listed})
    assert {one.name for one in listed if one.answer == SAME} <= fields
    assert any(option.accepts is ANY for option in OPTIONS.values())
