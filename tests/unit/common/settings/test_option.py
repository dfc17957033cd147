"""Every option of text-generation-inference works or is refused by name with the reason; vLLM's common flags
mean ours.
"""

import re
from typing import Any

import pytest

from common.settings.flags import flag_parser
from common.settings.option import ANY, OTHERS, TABLE, read_rows
from common.settings.settings import SettingError, Settings

PATH = "/some/path"
TGI_DEFAULTS = """
--max-concurrent-requests 128
--max-best-of 2
--max-stop-sequences 4
--max-top-n-tokens 5
--max-input-tokens 1024
--max-input-length 1024
--max-total-tokens 2048
--waiting-served-ratio 1.2
--max-batch-prefill-tokens 4096
--max-batch-total-tokens 16000
--max-waiting-tokens 20
--max-batch-size 64
--hostname 0.0.0.0
--port 3000
--prometheus-port 9000
--master-shard-uds-path /tmp/text-generation-server-0
--tokenizer-config-path /some/tokenizer_config.json
--revision main
--trust-remote-code false
--validation-workers 2
--api-key secret
--json-output false
--otlp-endpoint http://collector:4317
--otlp-service-name text-generation-inference.router
--cors-allow-origin https://a.example
--ngrok false
--disable-grammar-support false
--max-client-batch-size 4
--usage-stats on
--payload-limit 2000000
--max-image-fetch-size 1073741824
--model-id bigscience/bloom-560m
--sharded false
--num-shard 1
--speculate 0
--speculate 2
--dtype float16
--waiting-served-ratio 0.3
--cuda-graphs 1,2,4,8,16,32
--shard-uds-path /tmp/text-generation-server
--master-addr localhost
--master-port 29500
--huggingface-hub-cache /data
--disable-custom-kernels false
--cuda-memory-fraction 1.0
--rope-scaling linear
--rope-factor 2.0
--watermark-gamma 0.5
--watermark-delta 2.0
--enable-prefill-logprobs false
--enable-prefill-logprobs true
--graceful-termination-timeout 90
--uds-path /tmp/text-generation-server
--kv-cache-dtype fp8_e4m3fn
--kv-cache-dtype fp8_e5m2
"""
"""Flags of router, launcher and server with their defaults, or with a value where the default is none. All
are variables, too.
"""

NOT_SERVED = """
--cuda-graphs 1,2
--weights-cache-override /data
--ngrok true
--ngrok-edge edge
--tokenizer-name bigscience/bloom
--lora-adapters a,b=/path
"""

VARIABLES = """
LOG_LEVEL=info LOG_LEVEL=warn LOG_LEVEL=debug,hyper=info
LOG_COLORIZE=1 COMPUTE_TYPE=gpu HF_TOKEN=t HUGGING_FACE_HUB_TOKEN=t
HF_API_TOKEN=t HUGGINGFACE_HUB_CACHE=/data HF_HOME=/data HF_HUB_OFFLINE=1
HF_HUB_ENABLE_HF_TRANSFER=1 HF_HUB_USER_AGENT_ORIGIN=here
ATTENTION=paged ATTENTION=flashinfer ATTENTION=flashdecoding USE_FLASH_ATTENTION=true REQUEST_LOGPROBS=1
PREFIX_CACHING=0 PREFILL_CHUNKING=1 CUDA_GRAPHS=0
DISABLE_EXLLAMA=1 EXLLAMA_VERSION=2 OMP_NUM_THREADS=2 PYTORCH_TUNABLEOP_ENABLED=1 DEBUG=1 RANK=1 WORLD_SIZE=2
CUDA_VISIBLE_DEVICES=0 NVIDIA_VISIBLE_DEVICES=all ZE_AFFINITY_MASK=0
HF_MODEL_ID=org/model HF_MODEL_REVISION=main SM_NUM_GPUS=4 HF_MODEL_TRUST_REMOTE_CODE=true
SAGEMAKER_BIND_TO_PORT=8080
""".split()

VARIABLES_NOT_SERVED = """
PREFILL_CHUNKING=0 TGI_WIGGLE_ROOM=0.9
ROCM_USE_FLASH_ATTN_V2_TRITON=1 ROCM_USE_CUSTOM_PAGED_ATTN=1 ROCM_USE_SKINNY_GEMM=1 XPU_MEMORY_FRACTION=0.5
""".split()


def lines(text: str) -> list[tuple[str, str]]:
    return [(flag, value) for flag, value in (line.split() for line in text.strip().splitlines())]


def variable(flag: str) -> str:
    return flag.removeprefix("--").upper().replace("-", "_")


@pytest.mark.parametrize(("flag", "value"), lines(TGI_DEFAULTS))
def test_a_default_of_tgi_is_served_as_flag_and_as_variable(flag: str, value: str) -> None:
    companion = {"ROPE_FACTOR": "2"} if flag == "--rope-scaling" else {}
    assert Settings.read([flag, value], companion) == Settings.read([f"{flag}={value}"], companion)
    assert Settings.read([flag, value], companion) == Settings.read([], {variable(flag): value} | companion)


@pytest.mark.parametrize(("flag", "value"), lines(NOT_SERVED))
def test_what_is_not_served_is_refused_with_the_reason(flag: str, value: str) -> None:
    for argv, environ in (([flag, value], {}), ([], {variable(flag): value})):
        with pytest.raises(
            SettingError, match=rf"^{variable(flag)}: {re.escape(value)} is not served: \w+"
        ) as refusal:
            Settings.read(argv, environ)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("pair", VARIABLES)
def test_a_variable_without_a_flag_is_served(pair: str) -> None:
    name, _, value = pair.partition("=")
    assert name.lower() in {
        *Settings.model_fields,
        *OTHERS.variables,
        *(option.name for option in OTHERS.options.values() if option.variable),
    }
    Settings.read([], {name: value})


@pytest.mark.parametrize("pair", VARIABLES_NOT_SERVED)
def test_a_variable_that_is_not_served_is_refused_with_the_reason(pair: str) -> None:
    name, _, value = pair.partition("=")
    with pytest.raises(SettingError, match=rf"^{name}: {value} is not served: \w+"):
        Settings.read([], {name: value})


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--model", "org/model"], "model_id", "org/model"),
        (["--max-model-len", "512"], "max_total_tokens", 512),
        (["--host", "127.0.0.1"], "hostname", "127.0.0.1"),
        (["--gpu-memory-utilization", "0.9"], "cuda_memory_fraction", 0.9),
        (["--max-num-seqs", "8"], "max_batch_size", 8),
        (["--max-num-batched-tokens", "256"], "max_batch_prefill_tokens", 256),
        (["--data-parallel-size", "2"], "num_workers", 2),
        (["--download-dir", PATH], "huggingface_hub_cache", PATH),
        (["--load-format", "safetensors"], "load_format", "auto"),
        (["--load-format", "dummy"], "load_format", "dummy"),
        (["--dtype", "half"], "dtype", "float16"),
        (["--served-model-name", "mine"], "served_model_name", ("mine",)),
        (["--served-model-name", "a", "b", "--port", "80"], "served_model_name", ("a", "b")),
        (["--api-key", "secret"], "api_key", "secret"),
        (["--trust-remote-code"], "trust_remote_code", True),
        (["--tensor-parallel-size=1", "--seed", "0", "--disable-log-requests"], "num_workers", 1),
        (["--enforce-eager"], "enforce_eager", True),
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
        (["--scheduling-policy", "priority"], "port", 3000),
        (["--enable-prefix-caching"], "prefix_caching", True),
        (["--no-enable-prefix-caching"], "prefix_caching", False),
        (["--cors-allow-origin", "a", "--cors-allow-origin", "b"], "cors_allow_origin", ("a", "b")),
    ],
)
def test_flags_of_others_mean_ours(argv: list[str], name: str, value: Any) -> None:
    assert getattr(Settings.read(argv, {}), name) == value


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--seed", "7"], "SEED: 7 is not served: a seed belongs to a request"),
        (["--seed", "x"], "SEED: 'x' is not a whole number"),
        (["--max-model-len", "1"], "--max-model-len: 1 is less than 2"),
        (["--max-input-length", "5", "--max-input-tokens", "6"], "means the same as"),
        (
            ["--tensor-paralel-size", "2"],
            "--tensor-paralel-size: unknown flag; the nearest is --tensor-parallel-size",
        ),
        (["--validation-workers", "many"], "VALIDATION_WORKERS: 'many' is not a whole number"),
        (["--rope-scaling", "linear"], "ROPE_SCALING: linear needs ROPE_FACTOR"),
        (["--demo"], "DEMO: "),
    ],
)
def test_what_is_refused_bears_the_name_that_the_person_said(argv: list[str], line: str) -> None:
    with pytest.raises(SettingError) as refusal:
        Settings.read(argv, {})
    assert line in str(refusal.value)


def test_a_secret_is_not_repeated() -> None:
    with pytest.raises(SettingError, match=r"^NGROK_AUTHTOKEN: … is not served: tunnels are not built"):
        Settings.read([], {"NGROK_AUTHTOKEN": "secret"})


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
    fields, options = set(Settings.model_fields), set(OTHERS.options)
    assert not fields & options
    assert not (fields | options) & {*OTHERS.flags, *OTHERS.variables}
    meant = {*OTHERS.flags.values(), *OTHERS.variables.values(), *OTHERS.short.values()}
    assert meant <= fields | options
    rows = read_rows(TABLE.read_text(encoding="utf-8"))
    names = [word.partition(":")[0] for _, words, *_ in rows for word in words.split()]
    assert len(names) == len({*names})
    assert all(option.same_as in fields | {""} for option in OTHERS.options.values())


def test_the_help_says_what_becomes_of_each() -> None:
    text = " ".join(flag_parser("tokenfleet serve", everything=True).format_help().split())
    assert "--max-image-fetch-size X accepted: no image is ever fetched" in text
    assert "--ngrok-edge X refused: tunnels are not built" in text
    assert any(option.accepts is ANY for option in OTHERS.options.values())
    assert "--validation-workers X accepted: a gateway tokenizes" in text
