"""Find in which formats a model writes calls and reasoning, from its chat template and its vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass

from api.tool_calls.formats.harmony import HARMONY
from api.tool_calls.formats.table import CALL_FORMATS, CallFormat
from api.tool_calls.reasoning import REASONING_FORMATS, ReasoningFormat


@dataclass(frozen=True, slots=True)
class Signs:
    """What shows that a model writes in a format.

    Attributes:
        texts: all of them stand in the template.
        token: a token of the vocabulary that shows it where the template does not.
    """

    format: str
    texts: tuple[str, ...]
    token: str | None = None


CALL_SIGNS = (
    Signs(HARMONY, ("<|channel|>",), "<|channel|>"),
    Signs("kimi_k2", ("<|tool_call_begin|>",), "<|tool_call_begin|>"),
    Signs("deepseek_v3", ("<｜tool▁sep｜>", "```json")),
    Signs("deepseek_v31", ("<｜tool▁sep｜>",), "<｜tool▁sep｜>"),
    Signs("glm45", ("<arg_key>",), "<arg_key>"),
    Signs("seed_oss", ("<seed:tool_call>",)),
    Signs("qwen3_coder", ("<function=", "<parameter=")),
    Signs("lfm2", ("<|tool_call_start|>",)),
    Signs("lfm2", ("<|tool_list_start|>",)),
    Signs("nemotron_json", ("<TOOLCALL>",)),
    Signs("granite", ("<|tool_call|>",)),
    Signs("jamba", ("<tool_calls>",)),
    Signs("phi4_mini_json", ("functools",)),
    Signs("hermes", ("<tool_call>",)),
    Signs("mistral", ("[TOOL_CALLS]",), "[TOOL_CALLS]"),
    Signs("llama4_pythonic", ("func_name1(", "<|header_start|>")),
    Signs("pythonic", ("func_name1(",)),
    Signs("llama3_json", ('"parameters": ', "ipython")),
)
"""The first one that fits is the model's format."""
REASONING_SIGNS = (
    Signs("mistral", ("[THINK]",)),
    Signs("seed_oss", ("<seed:think>",)),
    Signs("glm45", ("<think>", "<arg_key>")),
    Signs("kimi_k2", ("<think>", "<|tool_call_begin|>")),
    Signs("deepseek_v3", ("</think>", "<｜Assistant｜>", "thinking")),
    Signs("deepseek_r1", ("</think>", "<｜Assistant｜>")),
    Signs("qwen3", ("<think>",)),
    Signs("qwen3", ("</think>",)),
)
OTHER_THINKING = ("<response>", "<|channel|>")
"""Templates with these texts mean another way to think by `<think>`, or have none beside their calls."""


def find_call_format(template: str, id_of: Callable[[str], int | None]) -> CallFormat | None:
    """The format in which a model writes calls; None if its template has no tools, or another format."""
    if "tools" not in template:
        return None
    found = (
        signs.format
        for signs in CALL_SIGNS
        if fits(signs, template) or (signs.token and id_of(signs.token) is not None)
    )
    return next((CALL_FORMATS[name] for name in found), None)


def find_reasoning_format(template: str) -> ReasoningFormat | None:
    """The format in which a model thinks; None if it does not, or by its format of calls."""
    if any(text in template for text in OTHER_THINKING):
        return None
    found = (signs.format for signs in REASONING_SIGNS if fits(signs, template))
    return next((REASONING_FORMATS[name] for name in found), None)


def fits(signs: Signs, template: str) -> bool:
    return all(text in template for text in signs.texts)
