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
    assert (settings.port, settings.num_workers, settings.num_gateways, settings.redis_url) == (
        5000,
        3,
        1,
        None,
    )


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


OUT_OF_RANGE = [
    ("PORT", "0", "less than 1"),
    ("PORT", "70000", "more than 65535"),
    ("MAX_STOP_SEQUENCES", "-1", "less than 0"),
    ("REQUEST_TIMEOUT_S", "inf", "more than 604800"),
    ("MAX_TOTAL_TOKENS", "1", "less than 2"),
    ("MAX_CONCURRENT_REQUESTS", "1" + 18 * "0", "more than 9007199254740992"),
    ("MAX_BATCH_SIZE", "8193", "more than 8192"),
    ("CUDA_MEMORY_FRACTION", "1.5", "more than 1"),
    ("KV_CACHE_BYTES", "0", "less than 1"),
    ("WORKER_TTL_S", "0.9", "less than twice HEARTBEAT_S (0.5)"),
]
WEIGHT = "is not a tenant and a weight of 0.01 to 1000, as alice=4"


@pytest.mark.parametrize(
    ("argv", "environ", "line"),
    [
        (["--port", "abc"], {}, "PORT: 'abc' is not a whole number"),
        (
            [],
            {"KV_CACHE_BYTES": "3X"},
            "KV_CACHE_BYTES: '3X' is not a whole number; units are as in 4k or 64MiB",
        ),
        (
            ["--max-input-tokens", "100", "--max-total-tokens", "100"],
            {},
            "MAX_INPUT_TOKENS: 100 is not less than MAX_TOTAL_TOKENS (100), which counts new tokens, too",
        ),
        (
            ["--max-input-tokens", "9", "--max-batch-total-tokens", "9"],
            {},
            "MAX_INPUT_TOKENS: 9 is not less than MAX_BATCH_TOTAL_TOKENS (9), which counts new tokens, too",
        ),
        ([], {"DEBUG_KV": "perhaps"}, "DEBUG_KV: 'perhaps' is not true or false"),
        ([], {"REQUEST_TIMEOUT_S": "nan"}, "REQUEST_TIMEOUT_S: 'nan' is not a number"),
        (["--dtype", "int3"], {}, "DTYPE: 'int3' is not one of auto, float32, float16, bfloat16"),
        (
            [],
            {"COMPUTE_TYPE": "a\r\nb: c"},
            "COMPUTE_TYPE: cannot be sent as a header: it must be printable ASCII",
        ),
        *[
            ([], {"TENANT_WEIGHTS": f"bob=2,{word}"}, f"TENANT_WEIGHTS: {word!r} {WEIGHT}")
            for word in ("alice", "alice=0", "=2", "alice=1e9")
        ],
        (
            ["--port", "80", "org/model", "other"],
            {},
            "ARGUMENTS: 'other' is not expected; the model is 'org/model'",
        ),
        (
            ["org/model", "--model", "other"],
            {},
            "ARGUMENTS: 'org/model' and --model both name a model",
        ),
        (["--port"], {}, "--port: expected one argument"),
        *[([], {name: text}, f"{name}: {text} is {limit}") for name, text, limit in OUT_OF_RANGE],
    ],
)
def test_what_cannot_be_read_is_refused_by_name(argv: list[str], environ: dict[str, str], line: str) -> None:
    with pytest.raises(SettingError) as refusal:
        Settings.read(argv, environ)
    assert str(refusal.value) == line


@pytest.mark.parametrize(
    ("hostname", "host"),
    [("0.0.0.0", "0.0.0.0"), ("::1", "::1"), ("localhost", "127.0.0.1"), ("3f2a90c1b7de", "0.0.0.0")],
)
def test_a_machines_name_listens_everywhere(hostname: str, host: str) -> None:
    assert Settings(hostname=hostname).listen_host == host


def test_environ_gives_a_child_the_same_settings() -> None:
    flags = [
        "--debug-kv",
        "--threads",
        "2",
        "--redis-url",
        "redis://h",
        "--request-timeout-s",
        "1.5",
        "--cors-allow-origin",
        "a, b",
    ]
    settings = Settings.read(flags, {})
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


# --- ranges -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Invalid JSON"),
        ("[]", "Input should be an object"),
        ('{"eos_token_id": 1}', "`eos_token_id`: Extra inputs are not permitted"),
        (
            '{"max_new_tokens": 0}',
            "`max_new_tokens`: Input should be greater than or equal to 1",
        ),
        ('{"temperature": NaN}', "`temperature`: Input should be a finite number"),
    ],
)
def test_what_cannot_replace_a_default_is_refused(text: str, words: str) -> None:
    with pytest.raises(SettingError, match=f"^OVERRIDE_GENERATION_CONFIG: {words}"):
        Settings.read(["--override-generation-config", text], {})


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


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("a=x/y", "b=x/z", "b=x/w"), "MODELS: 'b' is the name of two models: give one another name"),
        (("smollm2", "default=x/z"), "MODELS: 'default' is the name of two models"),
        (("smollm2", "b="), "MODELS: 'b=' is not a model, or a name and a model"),
        (("smollm2", "b{}=x"), "MODELS: 'b{}=x' is not a model"),
        (("smollm2", "b=x", "--nnodes", "2"), "MODELS: a worker on several machines (NNODES 2) serves one"),
    ],
)
def test_models_that_cannot_be_served_are_refused_by_name(words: tuple[str, ...], line: str) -> None:
    with pytest.raises(SettingError) as error:
        read("--models", *words)
    assert str(error.value).startswith(line)


# --- lora ---------------------------------------------------------------------------------------------------

SQL, HUB = AdapterSource("sql", "/adapters/sql"), AdapterSource("org/legal", "org/legal@main")


@pytest.mark.parametrize(
    "words",
    [
        ["--lora-adapters", "sql=/adapters/sql,org/legal@main"],
        ["--lora-modules", "sql=/adapters/sql", "org/legal@main"],
        [
            "--lora-modules",
            '{"name": "sql", "path": "/adapters/sql", "base_model_name": "m"}',
            '{"name": "org/legal", "path": "org/legal@main"}',
        ],
    ],
)
def test_adapters_are_named_as_in_tgi_and_in_vllm(words: list[str]) -> None:
    settings = Settings.read(words, {})
    assert settings.adapters == [SQL, HUB]
    assert Settings.read([], settings.environ()).adapters == [SQL, HUB], "and so by child processes"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a b=/x", "'a b=/x' is not an adapter, as sql=/adapters/sql"),
        ("sql=", "'sql=' is not an adapter"),
        ("org/a@", "'org/a@' has no revision after the @"),
        ("a@b@c", "'a@b@c' has no revision after the @"),
        ("a=/x,a=/y", "'a' is the name of two adapters"),
    ],
)
def test_a_text_that_is_no_adapter_is_refused(text: str, words: str) -> None:
    with pytest.raises(SettingError, match=f"^LORA_ADAPTERS: {words}"):
        Settings.read(["--lora-adapters", text], {})


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


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("--speculative-config {", "Invalid JSON"),
        ("--speculative-config []", "Input should be an object"),
        ('--speculative-config {"tokens":3}', "`tokens`: Extra inputs are not permitted"),
        ('--speculative-config {"method":"mtp","model":"m"}', "method mtp is not served; these are: ngram"),
        ('--speculative-config {"method":"eagle3"}', "eagle3 needs a model"),
        ('--speculative-config {"method":"ngram","model":"m"}', "ngram has no model"),
        ("--speculative-config {}", "an object without a method needs a model"),
        ('--speculative-config {"method":"ngram"}', "ngram needs num_speculative_tokens, 1 to 15"),
        ('--speculative-config {"model":3}', "`model`: Input should be a valid string"),
        (
            '-sc {"method":"suffix","num_speculative_tokens":16}',
            "`num_speculative_tokens`: Input should be less than or equal to 15",
        ),
        (
            '-sc {"method":"suffix","suffix_decoding_min_token_prob":2}',
            "`suffix_decoding_min_token_prob`: Input should be less than or equal to 1",
        ),
        ('-sc {"method":"suffix","num_speculative_tokens":true}', "Input should be a valid integer"),
        ('--speculate 3 -sc {"model":"m","num_speculative_tokens":4}', "is 4, and SPECULATE is 3"),
        (
            '-sc {"method":"ngram","num_speculative_tokens":4,"prompt_lookup_min":9}',
            "prompt_lookup_min is more than prompt_lookup_max",
        ),
        (
            '-sc {"model":"m"} --pipeline-parallel-size 2',
            "cannot be combined with PIPELINE_PARALLEL_SIZE",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(words: str, cause: str) -> None:
    with pytest.raises(SettingError, match=r"(?i)speculative_config") as error:
        Settings.read(words.split(), {})
    assert cause in str(error.value)


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
    '--hf-overrides {"rope_theta":1}': 'HF_OVERRIDES: {"rope_theta":1} is not served: edit the config',
    "--kv-cache-dtype int8": "KV_CACHE_DTYPE: 'int8' is not one of auto, fp8_e4m3, fp8_e5m2",
    "--omni --port 80": "OMNI: true is not served: models take and give text only",
    '-sc {"method":"mtp"}': "SPECULATIVE_CONFIG: method mtp is not served; these are: ngram",
    "-sc.method suffix": "SPECULATIVE_CONFIG: Invalid JSON",
    "-dcp 4": "DECODE_CONTEXT_PARALLEL_SIZE: 4 is not served: one sequence",
    "--reasoning-config {}": "REASONING_CONFIG: {} is not served: thinking is not cut",
    "--fingerprint-mode none": "FINGERPRINT_MODE: none is not served: `system_fingerprint` has",
    "--mamba-block-size x": "MAMBA_BLOCK_SIZE: ",
    "-q exl2": "QUANTIZE: exl2 is not served: ExLlamaV2's layout of weights is not read",
    '--override-generation-config {"n":2}': "OVERRIDE_GENERATION_CONFIG: `n`: Extra inputs are not permitted",
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
AIP_HTTP_PORT=8080 AIP_PREDICT_ROUTE=/vertex AIP_PREDICT_ROUTE=/v1/chat/completions AIP_HEALTH_ROUTE=/health
""".split()

VARIABLES_NOT_SERVED = """
PREFILL_CHUNKING=0 TGI_WIGGLE_ROOM=0.9
ROCM_USE_FLASH_ATTN_V2_TRITON=1 ROCM_USE_CUSTOM_PAGED_ATTN=1 ROCM_USE_SKINNY_GEMM=1 XPU_MEMORY_FRACTION=0.5
AIP_PREDICT_ROUTE=/predict AIP_HEALTH_ROUTE=/alive
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


@pytest.mark.parametrize("word", SHOWN)
def test_help_and_version_are_shown(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        Settings.read([word], {})
    assert capsys.readouterr().out


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


def test_variables_that_are_not_served_are_refused_with_the_reason() -> None:
    for pair in VARIABLES_NOT_SERVED:
        name, _, value = pair.partition("=")
        with pytest.raises(SettingError, match=rf"^{name}: {value} is not served: \w+"):
            Settings.read([], {name: value})


def test_a_secret_is_not_repeated() -> None:
    with pytest.raises(SettingError, match=r"^NGROK_AUTHTOKEN: … is not served: tunnels are not built"):
        Settings.read([], {"NGROK_AUTHTOKEN": "secret"})
