"""Format names: how a model's weights, calls and thinking may be written, as settings name it."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from common.settings.types import spelled

CALL_FORMAT_ALIASES = {
    "qwen3_xml": "qwen3_coder",
    "llama4_json": "llama3_json",
    "glm47": "glm45",
    "llama4": "llama4_pythonic",
}
"""Other names of call formats, in vLLM and SGLang."""


def to_method(text: str) -> str:
    """A method's name with dashes. Names of kernels (`awq_marlin`) are those of their method."""
    return text.lower().removesuffix("_marlin").replace("_", "-")


Quantize = Annotated[
    Literal[
        "aqlm",
        "auto-round",
        "awq",
        "bitnet",
        "bitsandbytes",
        "compressed-tensors",
        "eetq",
        "fbgemm-fp8",
        "fouroversix",
        "fp-quant",
        "fp8",
        "gemma",
        "gguf",
        "gptq",
        "higgs",
        "hqq",
        "metal",
        "mxfp4",
        "mxfp8",
        "nvfp4",
        "quanto",
        "quark",
        "sinq",
        "spqr",
        "torchao",
        "vptq",
    ],
    BeforeValidator(to_method),
]
"""Methods that are read without a package of their own, and those that transformers has a quantizer for."""
ToolCallParser = Annotated[
    Literal[
        "hermes",
        "qwen3_coder",
        "seed_oss",
        "llama3_json",
        "llama4_pythonic",
        "pythonic",
        "mistral",
        "deepseek_v3",
        "deepseek_v31",
        "kimi_k2",
        "glm45",
        "openai",
        "granite",
        "nemotron_json",
        "jamba",
        "phi4_mini_json",
        "lfm2",
        "tgi",
    ],
    spelled(CALL_FORMAT_ALIASES),
]
ReasoningParser = Annotated[
    Literal[
        "deepseek_r1",
        "deepseek_v3",
        "qwen3",
        "glm45",
        "hunyuan_a13b",
        "holo2",
        "kimi_k2",
        "minimax_m2",
        "ernie45",
        "nemotron_v3",
        "mistral",
        "seed_oss",
        "none",
    ],
    spelled({}),
]
