"""Settings: flags, variables, defaults; models, adapters, speculation; what is refused is named.
Flags of vLLM: each command line starts a fleet, or is refused by the flag that stands in the way.
Every line of the help pages of text-generation-inference is served, or refused by its name with the
reason; so are its variables.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from common.settings.fields import AdapterSource
from common.settings.flags import (
    ANY,
    FLAGS,
    OPTIONS,
    ROWS,
    SAME,
    SHORT,
    VARIABLES,
    flag_of,
    flag_parser,
    help_texts,
    unheeded,
)
from common.settings.flags import VARIABLES as OTHER_NAMES
from common.settings.settings import SettingError, Settings
from common.settings.speculation import Speculation

# --- settings -----------------------------------------------------------------------------------------------


def test_a_flag_wins_over_its_variable_and_a_variable_over_the_default() -> None:
    environ = {"PORT": "4000", "NUM_WORKERS": "3", "REDIS_URL": ""}
    settings = Settings.read(["--port", "5000"], environ)
    assert (settings.port, settings.num_workers, settings.num_gateways) == (5000, 3, 1)
    assert settings.redis_url is None


@pytest.mark.parametrize("place", [0, 2, 5])
def test_the_model_is_a_word_at_any_place(place: int, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("model-id: other\nnum-workers: 3")
    words = ["--port", "80", "--sharded=false", "--config", str(file)]
    settings = Settings.read([*words[:place], "org/model", *words[place:]])
    assert (settings.model_id, settings.port, settings.num_workers) == ("org/model", 80, 3)


@pytest.mark.parametrize(
    ("text", "number"),
    [("512MiB", 2**29), ("1GiB", 2**30), ("2gb", 2 * 10**9), ("1.5 KiB", 1536), ("1_000", 1000), ("7", 7)],
)
def test_sizes_may_have_units(text: str, number: int) -> None:
    assert Settings.read([], {"KV_CACHE_BYTES": text}).kv_cache_bytes == number


@pytest.mark.parametrize(
    ("hostname", "host"),
    [("0.0.0.0", "0.0.0.0"), ("::1", "::1"), ("localhost", "127.0.0.1"), ("3f2a90c1b7de", "0.0.0.0")],
)
def test_a_machines_name_listens_everywhere(hostname: str, host: str) -> None:
    assert Settings(hostname=hostname).listen_host == host


def test_environ_gives_a_child_the_same_settings() -> None:
    flags = "--debug-kv --threads 2 --redis-url redis://h --request-timeout-s 1.5 --cors-allow-origin a,b"
    settings = Settings.read(flags.split(), {})
    assert settings.cors_allow_origin == ("a", "b")
    assert Settings.read([], settings.environ()) == settings


def test_every_setting_has_a_flag_and_a_help_text() -> None:
    text = flag_parser("tokenfleet", everything=True).format_help()
    texts = help_texts()
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')} " in text
        assert texts[name]


@pytest.mark.parametrize("key", ["sésame", "two\nlines", "a\ttab"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key: str) -> None:
    with pytest.raises(SettingError) as refused:
        Settings.read([], {"API_KEY": key})
    assert str(refused.value).startswith("API_KEY: cannot be sent as a header: it must be printable ASCII")
    assert key.strip() not in str(refused.value)


# --- settings models ----------------------------------------------------------------------------------------


def read(*words: str) -> Settings:
    return Settings.read(words, {})


def test_models_are_pools_by_their_names() -> None:
    settings = read("--models", "Qwen/Qwen3-0.6B", "small=/models/tiny", "/models/x.gguf")
    assert settings.model_id == "Qwen/Qwen3-0.6B"
    assert settings.pools == ("default", "small", "x")
    assert settings.other_models == {"small": "/models/tiny", "x": "/models/x.gguf"}
    assert settings.scale_to_zero


def test_a_name_of_the_first_model_is_one_that_requests_may_use() -> None:
    assert read("--models", "fast=smollm2", "b=x/z").served_model_name == ("fast",)


def test_another_model_has_its_own_settings() -> None:
    """What belongs to MODEL_ID does not reach it, in a child process either."""
    settings = read("--models", "smollm2", "b=x/z", "--max-total-tokens", "512", "--num-workers", "2")
    other = settings.of_pool("b")
    assert (other.pool, other.model_id, other.served_model_name) == ("b", "x/z", ("b",))
    assert other.max_total_tokens is None and other.models == () and other.num_workers == 2
    assert Settings.read([], settings.environ() | other.environ()) == other
    assert settings.of_pool("default") is settings


# --- lora ---------------------------------------------------------------------------------------------------

SQL, HUB = AdapterSource("sql", "/adapters/sql"), AdapterSource("org/legal", "org/legal@main")


@pytest.mark.parametrize(
    "words",
    [
        "--lora-adapters sql=/adapters/sql,org/legal@main",
        "--lora-modules sql=/adapters/sql org/legal@main",
        '--lora-modules {"name":"sql","path":"/adapters/sql","base_model_name":"m"} '
        '{"name":"org/legal","path":"org/legal@main"}',
    ],
)
def test_adapters_are_named_as_in_tgi_and_in_vllm(words: str) -> None:
    settings = Settings.read(words.split(), {})
    assert settings.adapters == [SQL, HUB]
    assert Settings.read([], settings.environ()).adapters == [SQL, HUB], "and so by child processes"


# --- speculation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", ("", 0, "")),
        ("--speculate 3", ("ngram", 3, "")),
        ('--speculative-config {"method":"ngram","num_speculative_tokens":5}', ("ngram", 5, "")),
        ('-sc {"model":"[ngram]","num_speculative_tokens":5}', ("ngram", 5, "")),
        ('--speculative-config {"method":"suffix"}', ("suffix", 15, "")),
        ('--speculate 3 --speculative-config {"method":"suffix"}', ("suffix", 3, "")),
        ('--speculative-config {"model":"tiny","num_speculative_tokens":4}', ("", 4, "tiny")),
        ('--speculative-config {"method":"medusa","model":"heads"}', ("medusa", 0, "heads")),
        ('--speculative-config {"model":"tiny","method":null}', ("", 0, "tiny")),
    ],
)
def test_both_spellings_are_read(words: str, expected: tuple[str, int, str]) -> None:
    found = Settings.read(words.split(), {}).speculation
    assert (found.method, found.num_tokens, found.model) == expected
    assert bool(found) == bool(words)


def test_a_value_of_vllm_replaces_its_default() -> None:
    config = '{"method":"suffix","suffix_decoding_max_tree_depth":9,"suffix_decoding_min_token_prob":0.5}'
    found = Settings.read(["--speculative-config", config], {}).speculation
    changed = {"suffix_decoding_max_tree_depth": 9, "suffix_decoding_min_token_prob": 0.5}
    assert found == Speculation(method="suffix").model_copy(update=changed | {"num_tokens": 15})


# --- flags --------------------------------------------------------------------------------------------------

SERVED = """
--tensor-parallel-size 2 --max-model-len 32768 --gpu-memory-utilization 0.95
--max_model_len 4096 --max_num_seqs=64 --tensor_parallel_size 2
--dtype bfloat16 --max-model-len auto --enable-log-requests
--max-model-len 8192 --disable-log-requests --enforce-eager
--no-enable-prefix-caching --no-enforce-eager --async-scheduling
--max-model-len 8k
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
--kv-cache-memory-bytes 4GiB --load-format safetensors --revision main --download-dir /models
""".strip().splitlines()

REFUSED = {
    "--port abc": "PORT: 'abc' is not a whole number",
    "KV_CACHE_BYTES=3X": "KV_CACHE_BYTES: '3X' is not a whole number; units are as in 4k or 64MiB",
    "--max-input-tokens 9 --max-total-tokens 9": "MAX_INPUT_TOKENS: 9 is not less than MAX_TOTAL_TOKENS (9)",
    "--max-input-tokens 9 --max-batch-total-tokens 9": "MAX_INPUT_TOKENS: * MAX_BATCH_TOTAL_TOKENS (9)",
    "DEBUG_KV=perhaps": "DEBUG_KV: 'perhaps' is not true or false",
    "REQUEST_TIMEOUT_S=nan": "REQUEST_TIMEOUT_S: 'nan' is not a number",
    "--dtype int3": "DTYPE: 'int3' is not one of auto, float32, float16, bfloat16",
    "COMPUTE_TYPE=a\r\nb": "COMPUTE_TYPE: cannot be sent as a header: it must be printable ASCII",
    "TENANT_WEIGHTS=bob=2,alice": "TENANT_WEIGHTS: 'alice' is not a tenant and a weight of 0.01 to 1000, as",
    "TENANT_WEIGHTS=bob=2,alice=0": "TENANT_WEIGHTS: 'alice=0' is not a tenant and a weight of 0.01 to",
    "TENANT_WEIGHTS=bob=2,=2": "TENANT_WEIGHTS: '=2' is not a tenant and a weight of 0.01 to 1000, as",
    "TENANT_WEIGHTS=bob=2,alice=1e9": "TENANT_WEIGHTS: 'alice=1e9' is not a tenant and a weight of 0.01 to",
    "--port 80 org/model other": "ARGUMENTS: 'other' is not expected; the model is 'org/model'",
    "org/model --model other": "ARGUMENTS: 'org/model' and --model both name a model",
    "--port": "--port: expected one argument",
    "PORT=0": "PORT: 0 is less than 1",
    "PORT=70000": "PORT: 70000 is more than 65535",
    "MAX_STOP_SEQUENCES=-1": "MAX_STOP_SEQUENCES: -1 is less than 0",
    "REQUEST_TIMEOUT_S=inf": "REQUEST_TIMEOUT_S: inf is more than 604800",
    "MAX_TOTAL_TOKENS=1": "MAX_TOTAL_TOKENS: 1 is less than 2",
    "MAX_CONCURRENT_REQUESTS=1000000000000000000": "MAX_CONCURRENT_REQUESTS: * is more than 9007199254740992",
    "MAX_BATCH_SIZE=8193": "MAX_BATCH_SIZE: 8193 is more than 8192",
    "CUDA_MEMORY_FRACTION=1.5": "CUDA_MEMORY_FRACTION: 1.5 is more than 1",
    "KV_CACHE_BYTES=0": "KV_CACHE_BYTES: 0 is less than 1",
    "WORKER_TTL_S=0.9": "WORKER_TTL_S: 0.9 is less than twice HEARTBEAT_S (0.5)",
    "--override-generation-config {": "OVERRIDE_GENERATION_CONFIG: Invalid JSON",
    "--override-generation-config []": "OVERRIDE_GENERATION_CONFIG: Input should be an object",
    '--override-generation-config {"max_new_tokens":0}': "OVERRIDE_GENERATION_CONFIG: * or equal to 1",
    '--override-generation-config {"temperature":NaN}': "OVERRIDE_GENERATION_CONFIG: * a finite number",
    "--models a=x/y b=x/z b=x/w": "MODELS: 'b' is the name of two models: give one another name, as other=b",
    "--models smollm2 default=x/z": "MODELS: 'default' is the name of two models: give one another name, as",
    "--models smollm2 b=": "MODELS: 'b=' is not a model, or a name and a model as small=Qwen/Qwen3-0.6B",
    "--models smollm2 b{}=x": "MODELS: 'b{}=x' is not a model, or a name and a model as",
    "--models smollm2 b=x --nnodes 2": "MODELS: a worker on several machines (NNODES 2) serves one model",
    "--lora-adapters a\tb=/x": "LORA_ADAPTERS: 'a\\tb=/x' is not an adapter, as sql=/adapters/sql",
    "--lora-adapters sql=": "LORA_ADAPTERS: 'sql=' is not an adapter, as sql=/adapters/sql, org/adapter or",
    "--lora-adapters org/a@": "LORA_ADAPTERS: 'org/a@' has no revision after the @",
    "--lora-adapters a@b@c": "LORA_ADAPTERS: 'a@b@c' has no revision after the @",
    "--lora-adapters a=/x,a=/y": "LORA_ADAPTERS: 'a' is the name of two adapters",
    "-sc {": "SPECULATIVE_CONFIG: Invalid JSON",
    "-sc []": "SPECULATIVE_CONFIG: Input should be an object",
    '-sc {"tokens":3}': "SPECULATIVE_CONFIG: `tokens`: Extra inputs are not permitted",
    '-sc {"method":"eagle3"}': "SPECULATIVE_CONFIG: eagle3 needs a model",
    '-sc {"method":"ngram","model":"m"}': "SPECULATIVE_CONFIG: ngram has no model. Given: m",
    '-sc {"method":"ngram"}': "SPECULATIVE_CONFIG: ngram needs num_speculative_tokens, 1 to 15",
    '-sc {"model":3}': "SPECULATIVE_CONFIG: `model`: Input should be a valid string",
    '-sc {"method":"suffix","num_speculative_tokens":16}': "SPECULATIVE_CONFIG: * less than or equal to 15",
    '-sc {"method":"suffix","suffix_decoding_min_token_prob":2}': "SPECULATIVE_CONFIG: * or equal to 1",
    '-sc {"method":"suffix","num_speculative_tokens":true}': "SPECULATIVE_CONFIG: * a valid integer",
    '--speculate 3 -sc {"model":"m","num_speculative_tokens":4}': "SPECULATIVE_CONFIG: * SPECULATE is 3",
    '-sc {"method":"ngram","prompt_lookup_min":9} --speculate 4': "* prompt_lookup_min is more than",
    '-sc {"model":"m"} --pipeline-parallel-size 2': "SPECULATIVE_CONFIG: * PIPELINE_PARALLEL_SIZE",
    '--hf-overrides {"rope_theta":1}': 'HF_OVERRIDES: {"rope_theta":1} is not served: edit the config.json',
    "--kv-cache-dtype int8": "KV_CACHE_DTYPE: 'int8' is not one of auto, fp8_e4m3, fp8_e5m2",
    "--omni --port 80": "OMNI: true is not served: models take and give text only",
    '-sc {"method":"mtp"}': "SPECULATIVE_CONFIG: method mtp is not served; these are: ngram, suffix",
    "-sc.method suffix": "SPECULATIVE_CONFIG: Invalid JSON: expected value at line 1 column 1",
    "-dcp 4": "DECODE_CONTEXT_PARALLEL_SIZE: 4 is not served: one sequence is computed by the ranks of one",
    "--reasoning-config {}": "REASONING_CONFIG: {} is not served: thinking is not cut; its marks are the",
    "--fingerprint-mode none": "FINGERPRINT_MODE: none is not served: `system_fingerprint` has this",
    "--mamba-block-size x": "MAMBA_BLOCK_SIZE: 'x' is not a whole number",
    "-q exl2": "QUANTIZE: exl2 is not served: ExLlamaV2's layout of weights is not read; checkpoints of",
    '--override-generation-config {"n":2}': "OVERRIDE_GENERATION_CONFIG: `n`: Extra inputs are not permitted",
    "--load-format mistral": "LOAD_FORMAT: 'mistral' is not one of auto, dummy",
    "--enable-prompt-adapter": "ENABLE_PROMPT_ADAPTER: true is not served: prompt adapters are not served",
    "--enable-lora --lora-modules a=/b a=/c": "LORA_ADAPTERS: 'a' is the name of two adapters",
    '--lora-modules {"name":1': '--lora-modules: {"name":1 is not served: an adapter in JSON is as {"name":',
    "--speculative_config {}": "SPECULATIVE_CONFIG: an object without a method needs a model",
    "--default-chat-template-kwargs {}": "DEFAULT_CHAT_TEMPLATE_KWARGS: {} is not served: requests give",
    "--data-parallel-size-local 4": "DATA_PARALLEL_SIZE_LOCAL: 4 is not served: workers of other machines",
    "--scheduler-cls a.b": "SCHEDULER_CLS: a.b is not served: code of yours is not loaded into the processes",
    "--enable-tokenizer-info-endpoint": "ENABLE_TOKENIZER_INFO_ENDPOINT: true is not served: /info has what",
    "--frobnicate.part 3": "--frobnicate.part: unknown flag; --help lists them",
    "--ssl-keyfile /key": "SSL_KEYFILE: /key is not served: TLS is for a proxy in front",
    "--logits-processors a.b": "LOGITS_PROCESSORS: a.b is not served: code of yours is not loaded into the",
    "--no-enable-chunked-prefill": "--enable-chunked-prefill: false is not served: prompts are computed in",
    "--max-model-length 3": "--max-model-length: unknown flag; the nearest is --max-model-len",
    "--tensor-parallel 3": "--tensor-parallel: unknown flag; the nearest is --tensor-parallel-size",
    "--tool-call-parser-plugin a": "--tool-call-parser-plugin: * is --tool-parser-plugin",
    "--deploy-config a": "--deploy-config: unknown flag; the nearest is --eplb-config",
    "--cfg-parallel-size 2": "--cfg-parallel-size: unknown flag; --help lists them",
    "--no-port": "--no-port: unknown flag; --help lists them",
    "--config /missing.yaml": "--config: '/missing.yaml' cannot be read: [Errno 2] No such file or",
    "--seed 7": "SEED: 7 is not served: a seed belongs to a request",
    "--max-model-len 1": "--max-model-len: 1 is less than 2",
    "--max-input-length 5 --max-input-tokens 6": "* means the same as",
    "--validation-workers 0": "VALIDATION_WORKERS: 0 is less than 1",
    "--rope-scaling linear": "ROPE_SCALING: linear needs ROPE_FACTOR",
    "--demo": "DEMO: lets everybody who sees the page kill processes: it is for HOSTNAME=127.0.0.1 only",
    "HOSTNAME=192.0.2.1 --demo": "DEMO: lets everybody who sees the page kill",
    "HOSTNAME=some-machine --demo": "DEMO: lets everybody who sees the page kill",
    "--max-batches 7": "MAX_BATCHES: 7 is not served: 10,000 batches are kept",
    "--metrics-names vllm": "METRICS_NAMES: vllm is not served: vLLM's names are recording rules of",
    "PREFILL_CHUNKING=0": "PREFILL_CHUNKING: 0 is not served: prompts are computed in chunks beside the",
    "TGI_WIGGLE_ROOM=0.9": "TGI_WIGGLE_ROOM: 0.9 is not served: KV_CACHE_BYTES says how large the cache is",
    "ROCM_USE_CUSTOM_PAGED_ATTN=1": "ROCM_USE_CUSTOM_PAGED_ATTN: 1 is not served: AMD GPUs are not served",
    "ROCM_USE_SKINNY_GEMM=1": "ROCM_USE_SKINNY_GEMM: 1 is not served: AMD GPUs are not served",
    "XPU_MEMORY_FRACTION=0.5": "XPU_MEMORY_FRACTION: 0.5 is not served: Intel GPUs are not served",
    "NGROK_AUTHTOKEN=secret": "NGROK_AUTHTOKEN: … is not served: tunnels are not built; put a proxy in front",
    "ROCM_USE_FLASH_ATTN_V2_TRITON=1": "ROCM_USE_FLASH_ATTN_V2_TRITON: 1 is not served: ",
}
"""What stands in the way of a command line, of which variables come first; * stands for any words."""


def test_command_lines_of_vllm_are_served() -> None:
    for line in SERVED:
        Settings.read(line.split(), {})


def test_what_is_not_served_is_refused_by_the_name_that_the_person_said() -> None:
    for line, words in REFUSED.items():
        pairs = [word.partition("=") for word in line.split(" ")]
        environ = {name: value for name, _, value in pairs if re.fullmatch("[A-Z][A-Z0-9_]*", name) and value}
        argv = ["".join(pair) for pair in pairs if pair[0] not in environ]
        with pytest.raises(SettingError) as refusal:
            Settings.read(argv, environ)
        assert re.match(re.escape(words).replace(r"\*", ".*"), str(refusal.value)), line


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
        (["--served_model_name=my_model"], "served_model_name", ("my_model",)),
        (["--debug-kv"], "debug_kv", True),
        (["--debug-kv", "off"], "debug_kv", False),
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
        (["--log-level", "text_generation_router=debug,hyper=warn"], "log_level", "debug"),
        (["--log-level", "hyper=debug, WARN"], "log_level", "warning"),
        (["--log-level", "off"], "log_level", "error"),
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


def test_our_own_variable_wins_over_anothers_name_for_it() -> None:
    assert Settings.read([], {"THREADS": "3", "OMP_NUM_THREADS": "2"}).threads == 3
    assert Settings.read([], {"MODEL_ID": "ours", "HF_MODEL_ID": "theirs"}).model_id == "ours"
    assert Settings.read([], {"VLLM_API_KEY": "auto"}).api_key == "auto"  # no fleet is open for a word
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
    assert any(option.accepts == ANY for option in OPTIONS.values())


# --- option tgi ---------------------------------------------------------------------------------------------

LAUNCHER = """
--model-id bigscience/bloom-560m
--revision refs/pr/2
--validation-workers 2
--sharded true
--sharded false
--num-shard 2
--quantize awq
--quantize compressed-tensors
--quantize eetq
--quantize exl2 : ExLlamaV2's layout of weights is not read
--quantize gptq
--quantize marlin : weights packed for Marlin's kernel are not read
--quantize bitsandbytes
--quantize bitsandbytes-nf4
--quantize bitsandbytes-fp4
--quantize fp8
--speculate 2
--dtype float16
--dtype bfloat16
--kv-cache-dtype fp8_e4m3fn
--kv-cache-dtype fp8_e5m2
--trust-remote-code
--max-concurrent-requests 128
--max-best-of 2
--max-stop-sequences 4
--max-top-n-tokens 5
--max-input-tokens 1024
--max-input-length 1024
--max-total-tokens 2048
--waiting-served-ratio 0.3
--max-batch-prefill-tokens 4096
--max-batch-total-tokens 16000
--max-waiting-tokens 20
--max-batch-size 64
--cuda-graphs 1,2,4,8,16,32
--cuda-graphs 0
--cuda-graphs 1,2 : graphs are captured for up to MAX_BATCH_SIZE rows
--hostname 0.0.0.0
-p 3000
--port 3000
--prometheus-port 9000
--shard-uds-path /tmp/text-generation-server
--master-addr localhost
--master-port 29500
--huggingface-hub-cache /data
--weights-cache-override /data : give the directory with the weights as MODEL_ID
--disable-custom-kernels
--cuda-memory-fraction 1.0
--rope-scaling linear --rope-factor 2.0
--rope-factor 2.0
--json-output
--otlp-endpoint http://collector:4317
--otlp-service-name text-generation-inference.router
--cors-allow-origin https://a.example
--api-key secret
--watermark-gamma 0.5
--watermark-delta 2.0
--ngrok : tunnels are not built
--ngrok-authtoken secret : tunnels are not built
--ngrok-edge edge : tunnels are not built
--tokenizer-config-path /some/tokenizer_config.json
--disable-grammar-support
-e
--env
--max-client-batch-size 4
--lora-adapters repo/adapter1,name=/path
--usage-stats on
--usage-stats off
--usage-stats no-stack
--payload-limit 2000000
--enable-prefill-logprobs
-g 90
--graceful-termination-timeout 90
-h
--help
-V
--version
"""
"""The lines of `text-generation-launcher --help` with values that they name; after a colon the reason why one
is refused.
"""
OTHERS_PAGES = """
--waiting-served-ratio 1.2
--master-shard-uds-path /tmp/text-generation-server-0
--tokenizer-name bigscience/bloom
--messages-api-enabled
--max-image-fetch-size 1073741824
--uds-path /tmp/text-generation-server
--logger-level INFO
--otlp-service-name text-generation-inference.server
--sharded
--no-sharded
--no-trust-remote-code
--no-json-output
"""
"""Lines that the pages of `text-generation-router` and `text-generation-server serve` have besides."""
SHOWN = ("-h", "--help", "-V", "--version")
WITHOUT_VARIABLE = ("-p", "-e", "--env", "-g", "--logger-level", *SHOWN)

TGI_VARIABLES = """
LOG_LEVEL=info LOG_LEVEL=warn LOG_LEVEL=debug,hyper=info
LOG_COLORIZE=1 COMPUTE_TYPE=gpu HF_TOKEN=t HUGGING_FACE_HUB_TOKEN=t
HF_API_TOKEN=t HUGGINGFACE_HUB_CACHE=/data HF_HOME=/data HF_HUB_OFFLINE=1
HF_HUB_ENABLE_HF_TRANSFER=1 HF_HUB_USER_AGENT_ORIGIN=here
ATTENTION=paged ATTENTION=flashinfer ATTENTION=flashdecoding USE_FLASH_ATTENTION=true REQUEST_LOGPROBS=1
PREFIX_CACHING=0 USE_PREFIX_CACHING=true PREFILL_CHUNKING=1 CUDA_GRAPHS=0
DISABLE_EXLLAMA=1 EXLLAMA_VERSION=2 OMP_NUM_THREADS=2 PYTORCH_TUNABLEOP_ENABLED=1
PYTORCH_TUNABLEOP_TUNING=1 PYTORCH_TUNABLEOP_TUNING_AFTER_WARMUP=1 PYTORCH_TUNABLEOP_SEQLENS=2,4
DEBUG=1 RANK=1 WORLD_SIZE=2 DOCKER_LABEL=3.3.7 GIT_SHA=db931fcf
CUDA_VISIBLE_DEVICES=0 NVIDIA_VISIBLE_DEVICES=all ZE_AFFINITY_MASK=0
HF_MODEL_ID=org/model HF_MODEL_REVISION=main SM_NUM_GPUS=4 HF_MODEL_TRUST_REMOTE_CODE=true
SAGEMAKER_BIND_TO_PORT=8080
AIP_HTTP_PORT=8080 AIP_PREDICT_ROUTE=/v1/endpoints/1/deployedModels/2:predict AIP_HEALTH_ROUTE=/health
""".split()


def lines_of(page: str) -> list[str]:
    return page.strip().splitlines()


def flags_in(page: str) -> set[str]:
    return {word for line in lines_of(page) for word in line.split(" : ")[0].split() if word.startswith("--")}


def variables_of(words: list[str]) -> dict[str, str]:
    """The variables that say what flags say."""
    found: dict[str, str] = {}
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--").upper().replace("-", "_")
            found[name] = "true"
        else:
            found[name] = word
    return found


@pytest.mark.parametrize("page", [LAUNCHER, OTHERS_PAGES], ids=["launcher", "others"])
def test_each_line_of_a_help_page_is_served_or_refused_by_its_name(page: str) -> None:
    """So is its variable, which means the same."""
    for line in lines_of(page):
        words, _, reason = line.partition(" : ")
        argv = words.split()
        has_variable = argv[0] not in WITHOUT_VARIABLE and not argv[0].startswith("--no-")
        if line in SHOWN:
            continue
        if not reason:
            found = Settings.read(argv, {})
            assert not has_variable or found == Settings.read([], variables_of(argv)), line
            continue
        name = argv[0].removeprefix("--").upper().replace("-", "_")
        inputs: list[tuple[list[str], dict[str, str]]] = [(argv, {}), ([], variables_of(argv))]
        for given in inputs:
            with pytest.raises(
                SettingError, match=f"^{name}: .* is not served: {re.escape(reason)}"
            ) as refusal:
                Settings.read(*given)
            assert "\n" not in str(refusal.value)


def test_the_table_of_options_has_every_flag_of_the_help_pages() -> None:
    rows = [row for server, row in ROWS if not server.startswith(("vLLM", "earlier"))]
    listed = {
        one.name if one.name[0] == "-" else flag_of(one.name) for row in rows for one in row if one.flag
    }
    pages = flags_in(LAUNCHER) | flags_in(OTHERS_PAGES)
    own_help = {"--help", "--version"}
    assert {flag for flag in pages - listed - own_help if not flag.startswith("--no-")} == set()
    assert {flag for flag in listed if flag.startswith("--")} - pages == set()


def test_variables_without_a_flag_are_served() -> None:
    known = {option.name for option in OPTIONS.values() if option.variable}
    for pair in TGI_VARIABLES:
        name, _, value = pair.partition("=")
        assert name.lower() in {*Settings.model_fields, *OTHER_NAMES, *known}
        Settings.read([], {name: value})
