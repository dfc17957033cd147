"""The rules of all formats that calls can be forced in."""

from collections.abc import Mapping
from functools import partial

from api.tool_calls.forcing.json_rules import (
    fenced_sections,
    list_after,
    list_between,
    llama_calls,
    mistral_calls,
    named_sections,
    objects_between,
    tgi_call,
)
from api.tool_calls.forcing.offer import Rule
from api.tool_calls.forcing.tagged_rules import functions_between, glm_calls, python_list
from api.tool_calls.formats.sections import DEEPSEEK, KIMI
from api.tool_calls.formats.tagged import END_TOOL_CALL, TOOL_CALL

NUMBER = '":" /[0-9]{1,2}/'
"""Kimi numbers the calls of an answer."""
RULES: Mapping[str, Rule] = {
    "hermes": partial(objects_between, TOOL_CALL, END_TOOL_CALL),
    "qwen3_coder": partial(functions_between, TOOL_CALL, END_TOOL_CALL),
    "seed_oss": partial(functions_between, "<seed:tool_call>", "</seed:tool_call>"),
    "llama3_json": llama_calls,
    "llama4_pythonic": partial(python_list, "<|python_start|>", "<|python_end|>"),
    "pythonic": partial(python_list, "", ""),
    "lfm2": partial(python_list, "<|tool_call_start|>", "<|tool_call_end|>"),
    "mistral": mistral_calls,
    "deepseek_v3": partial(fenced_sections, DEEPSEEK),
    "deepseek_v31": partial(named_sections, DEEPSEEK, "", ""),
    "kimi_k2": partial(named_sections, KIMI, "functions.", NUMBER),
    "glm45": glm_calls,
    "granite": partial(list_between, "<|tool_call|>", ""),
    "nemotron_json": partial(list_between, "<TOOLCALL>", "</TOOLCALL>"),
    "jamba": partial(list_between, "<tool_calls>", "</tool_calls>"),
    "phi4_mini_json": partial(list_after, "functools"),
    "tgi": tgi_call,
}
"""By the names of formats; Harmony has a grammar of its own."""
