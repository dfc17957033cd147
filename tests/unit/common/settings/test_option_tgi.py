"""Every line of the help pages of text-generation-inference is served, or refused by its name with the
reason; so are its variables.
"""

import re

import pytest

from common.settings.flags import OPTIONS, ROWS, flag_of
from common.settings.flags import VARIABLES as OTHER_NAMES
from common.settings.settings import SettingError, Settings

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

VARIABLES = """
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
    for pair in VARIABLES:
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
