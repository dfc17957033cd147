"""The rules of all formats that calls can be forced in."""

from collections.abc import Callable, Mapping

from api.structured_output.lark import Lark
from api.tool_calls.forcing.json_rules import (
    fenced_sections,
    list_after,
    list_between,
    llama_calls,
    mistral_calls,
    named_sections,
    numbered_sections,
    objects_between,
    tgi_call,
)
from api.tool_calls.forcing.offer import CallsRule, Offer
from api.tool_calls.forcing.tagged_rules import functions_between, glm_calls, python_list
from api.tool_calls.formats.sections import DEEPSEEK, KIMI

RULES: Mapping[str, Callable[[Lark, Offer], CallsRule]] = {
    "hermes": objects_between("<tool_call>", "</tool_call>"),
    "qwen3_coder": functions_between("<tool_call>", "</tool_call>"),
    "seed_oss": functions_between("<seed:tool_call>", "</seed:tool_call>"),
    "llama3_json": llama_calls,
    "llama4_pythonic": python_list("<|python_start|>", "<|python_end|>"),
    "pythonic": python_list("", ""),
    "lfm2": python_list("<|tool_call_start|>", "<|tool_call_end|>"),
    "mistral": mistral_calls,
    "deepseek_v3": fenced_sections(DEEPSEEK),
    "deepseek_v31": named_sections(DEEPSEEK),
    "kimi_k2": numbered_sections(KIMI),
    "glm45": glm_calls,
    "granite": list_between("<|tool_call|>"),
    "nemotron_json": list_between("<TOOLCALL>", "</TOOLCALL>"),
    "jamba": list_between("<tool_calls>", "</tool_calls>"),
    "phi4_mini_json": list_after("functools"),
    "tgi": tgi_call,
}
"""By the names of formats; Harmony has a grammar of its own."""
