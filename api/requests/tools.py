"""Tools: the functions that a model may call, the choice among them, and the grammar of a chat's answer: it
is reasoning first, then structured output or calls.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from api.answers.answer import Reading
from api.answers.call_formats import CALL_FORMATS, HARMONY, REASONING_FORMATS
from api.answers.scanner import Tool
from api.errors import cut, invalid, quoted
from api.grammar.apart import run_apart
from api.grammar.check import can_begin
from api.grammar.compile import CompiledGrammar, Grammar, compile_grammar
from api.grammar.force import CallChoice, after_thinking, call_grammar, either
from api.prompts.tokenizer import ModelTokenizer
from api.requests.fields import Strict, optional

MAX_TOOLS = 128
FUNCTION_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
CHOICES = ("none", "auto", "required")


class FunctionSchema(Strict, extra="allow"):
    name: str = Field(json_schema_extra={"pattern": f"^{FUNCTION_NAME.pattern}$"})
    description: str | None = None
    parameters: dict[str, Any] | None = optional(
        "JSON schema of the arguments, an object's. Default: it has none."
    )
    strict: bool | None = optional("Arguments match the schema, whatever `tool_choice` says.")
    arguments: dict[str, Any] | None = optional("TGI's other name of `parameters`.")


class ToolSchema(Strict, extra="allow", json_schema_extra={"required": ["type", "function"]}):
    type: str = Field(json_schema_extra={"enum": ["function"]})
    function: FunctionSchema | None = Field(default=None, json_schema_extra={"type": "object"})


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tools of a request, and which calls of them the answer may or must have.

    Attributes:
        tools: all of them, as the prompt shows them.
        callable: those that may be called.
        is_forced: the answer is calls of them, and nothing else.
        is_named: the client chose the function.
        parallel: whether there may be several calls.
        is_older: the request has `functions`, so the answer has a `function_call`.
    """

    tools: Sequence[Mapping[str, Any]]
    callable: tuple[Tool, ...]
    is_forced: bool = False
    is_named: bool = False
    parallel: bool = True
    is_older: bool = False

    @property
    def is_promised(self) -> bool:
        """Whether calls are right in any case: one is required, or a function is strict."""
        return self.is_forced or any(tool.strict for tool in self.callable)


def read_tools(
    tools: Sequence[ToolSchema] | None, choice: str | Mapping[str, Any] | None, parallel: bool | None
) -> ToolChoice | None:
    """The choice among `tools`; None where none may be called. Raises ApiError."""
    functions = []
    for i, tool in enumerate(tools or []):
        name = f"tools[{i}]"
        if tool.type != "function":
            raise invalid(f"`{name}.type` must be function. Given: {quoted(tool.type)}", f"{name}.type")
        if tool.function is None:
            raise invalid(f"`{name}.function` is required", f"{name}.function")
        functions.append(tool.function)
    found = choose(functions, choice, "tools", "tool_choice")
    return found and replace(found, parallel=parallel is not False)


def read_functions(
    functions: Sequence[FunctionSchema] | None, choice: str | Mapping[str, Any] | None
) -> ToolChoice | None:
    """The choice in OpenAI's older fields, `functions` and `function_call`. Raises ApiError."""
    if isinstance(choice, Mapping):
        choice = {"type": "function", "function": choice}
    elif choice not in (None, "none", "auto"):
        raise invalid("`function_call` must be none, auto, or an object with a `name`", "function_call")
    found = choose(functions or [], choice, "functions", "function_call")
    return found and replace(found, parallel=False, is_older=True)


def choose(
    functions: Sequence[FunctionSchema], choice: str | Mapping[str, Any] | None, field: str, choice_field: str
) -> ToolChoice | None:
    """The choice among functions; None where none may be called. Raises ApiError.

    Args:
        field, choice_field: the fields that have the functions and the choice.
    """
    tools = {tool.name: tool for tool in check_functions(functions, field)}
    if not tools and choice not in (None, "none", "auto"):
        raise invalid(f"`{choice_field}` is only allowed with `{field}`", choice_field)
    if not tools or choice == "none":
        return None
    shown = []  # as chat templates expect tools
    for one in functions:
        about = {} if one.description is None else {"description": one.description}
        function = {"name": one.name, **about, "parameters": parameters_of(one)}
        shown.append({"type": "function", "function": function})
    found = ToolChoice(shown, tuple(tools.values()))
    if choice in (None, "auto"):
        return found
    if choice == "required":
        return replace(found, is_forced=True)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)  # the Responses API has the fields beside `type`
        return allow_tools(found, tools, allowed, f"{choice_field}.allowed_tools")
    name = choice if isinstance(choice, str) else name_of(choice, choice_field)
    return replace(found, callable=(find_tool(tools, name, choice_field),), is_forced=True, is_named=True)


def allow_tools(found: ToolChoice, tools: Mapping[str, Tool], allowed: Any, field: str) -> ToolChoice:
    """The choice `{"mode": …, "tools": […]}`. Raises ApiError."""
    mode = allowed.get("mode", "auto") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required"):
        raise invalid(f"`{field}.mode` must be auto or required", f"{field}.mode")
    listed = allowed.get("tools")
    if not isinstance(listed, list) or not listed:
        raise invalid(f"`{field}.tools` must be a list of tools that is not empty", f"{field}.tools")
    names = [name_of(one, f"{field}.tools[{i}]") for i, one in enumerate(listed)]
    may_call = tuple(find_tool(tools, name, f"{field}.tools") for name in dict.fromkeys(names))
    return replace(found, callable=may_call, is_forced=mode == "required")


def name_of(choice: Any, field: str) -> str:
    """The name in `{"type": "function", "function": {"name": …}}`. The Responses API has it beside `type`.
    Raises ApiError.
    """
    if isinstance(choice, Mapping) and choice.get("type", "function") == "function":
        function = choice.get("function", choice)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            return str(function["name"])
    words = f'must be one of {", ".join(CHOICES)}, or `{{"type": "function", "function": {{"name": …}}}}`'
    raise invalid(f"`{field}` {words}", field)


def find_tool(tools: Mapping[str, Tool], name: str, field: str) -> Tool:
    if name not in tools:
        raise invalid(f"`{field}` names {quoted(name)}, which is not among {cut(', '.join(tools))}", field)
    return tools[name]


def check_functions(functions: Sequence[FunctionSchema], field: str) -> list[Tool]:
    """The functions as tools. Raises ApiError."""
    if len(functions) > MAX_TOOLS:
        raise invalid(f"`{field}` supports up to {MAX_TOOLS} functions. Given: {len(functions)}", field)
    names: set[str] = set()
    for one in functions:
        if not FUNCTION_NAME.fullmatch(one.name):
            words = "must have names of 1 to 128 letters, digits and _ . : / -"
            raise invalid(f"`{field}` {words}. Given: {quoted(one.name)}", field)
        if one.name in names:
            raise invalid(f"`{field}` has the name {quoted(one.name)} twice", field)
        names.add(one.name)
        kind = parameters_of(one).get("type", "object")
        if "object" not in (kind if isinstance(kind, list) else [kind]):
            parameters = f"{field}.{one.name}.parameters"
            words = f"must be the JSON schema of an object. Given the type: {quoted(kind)}"
            raise invalid(f"`{parameters}` {words}", parameters)
    return [Tool(one.name, parameters_of(one), bool(one.strict)) for one in functions]


def parameters_of(function: FunctionSchema) -> Mapping[str, Any]:
    return function.parameters or function.arguments or NO_PARAMETERS


ANY_NAME = '{"any name'


async def reading_beside(
    grammar: Grammar | None, tools: ToolChoice | None, reading: Reading, tokenizer: ModelTokenizer
) -> Reading:
    """How an answer is read when the client gives a grammar beside tools: it is calls, or what the grammar
    describes. If the grammar describes the very object that a call without a mark is, the answer is never a
    call. Raises ApiError.
    """
    if grammar is None or tools is None or tools.is_forced or reading.calls == HARMONY:
        return reading
    form = CALL_FORMATS.get(reading.calls)
    heads = [head % json.dumps(tool.name) for head in (form.heads if form else ()) for tool in tools.callable]
    if heads:
        source = await compile_grammar(replace(grammar, closed=True), tokenizer)
        if await run_apart(grammar.field, names_of_call, source, tuple(heads), tokenizer.size):
            return replace(reading, calls="")
    return replace(reading, is_either=True)


@functools.lru_cache(maxsize=64)
def names_of_call(source: str, heads: tuple[str, ...], size: int) -> bool:
    """Whether objects of a grammar may begin as calls do, but not with any other name."""
    return not can_begin(source, ANY_NAME, size) and any(can_begin(source, head, size) for head in heads)


async def answer_grammar(
    grammar: Grammar | None, tools: ToolChoice | None, reading: Reading | None, tokenizer: ModelTokenizer
) -> Grammar | CompiledGrammar | None:
    """What the answer must look like: calls of tools, or what `grammar` describes; None for anything. Raises
    ApiError.
    """
    if reading is None:
        return grammar
    form, reasoning = CALL_FORMATS.get(reading.calls), REASONING_FORMATS.get(reading.reasoning)
    prompt, calls = reading.prompt_end, ""
    if tools is not None and form is not None:
        must_call = tools.is_forced or grammar is not None  # all other answers are those of `grammar`
        choice = CallChoice(must_call, tools.parallel and not tools.is_named)
        ids = tokenizer.special_tokens
        calls = await call_grammar(form, tools.callable, choice, ids, reasoning, prompt)
    if grammar is None or (tools is not None and tools.is_forced):
        return CompiledGrammar(calls, "tools") if calls else None
    source = await compile_grammar(grammar, tokenizer)
    text = after_thinking(source, reasoning, prompt, tokenizer.special_tokens, form)
    return CompiledGrammar(either(calls, text) if calls else text, grammar.field)
