"""Chats: messages and tools as clients send them, as chat templates expect them, and rendered by the model's
template; the choice among the tools, and the grammar of the answer: it is reasoning first, then structured
output or calls.

A model whose template has no tools gets them as text at the beginning of the system message: a small model
calls better than with the tools at the end, and the next turn of a chat begins with the same tokens. Requests
with TGI's `tool_prompt` get them where TGI puts them, at the end of the last message.
"""

import contextlib
import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Annotated, Any, Literal

from pydantic import Field

from api.answers.answer import HttpAnswer, Reading
from api.answers.call_formats import CALL_FORMATS, HARMONY, REASONING_FORMATS
from api.answers.scanner import Tool
from api.errors import ApiError, cut, invalid, quoted, refuse
from api.event_loop import offload
from api.grammar.compile import COMPILED, Grammar, compile_grammar, type_of
from api.grammar.force import answer_source, call_grammar
from api.json import parse_text
from api.prompts.chat_template import (
    OWN_VARIABLES,
    PICTURE,
    ChatTemplate,
    Message,
    Rendered,
    rendered_text,
    template_error,
)
from api.prompts.pictures import PICTURE_TYPES, PictureSource, is_picture, read_part, unknown_part
from api.prompts.tokenizer import ModelTokenizer
from api.protocols.openai_bodies import NAMES, OpenAIRequest
from api.protocols.protocol import Context
from api.requests.fields import Listed, SamplingFields, Strict, optional, with_one_error
from api.requests.pool import Pool
from api.requests.validate import GenerationParams, check_generates
from common.process.logs import warn_once
from common.settings.ranges import least

log = logging.getLogger(__name__)

MAX_TOOLS = 1024
FUNCTION_NAME = "^[A-Za-z0-9_.:/-]{1,128}$"
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
CHOICES = ("none", "auto", "required")


TOOL_PROMPT = (
    "Given the functions available, please respond with a JSON for a function call with its proper arguments "
    "that best answers the given prompt. Respond in the format {name: function name, parameters: dictionary "
    "of argument name and its value}.Do not use variables."
)
"""TGI's own, to the letter."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
REASONING_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates turn reasoning on and off."""

EFFORT: Any = optional("How much the model thinks first, if its template can say so; with `none` not at all.")
TEMPLATE_VARIABLES: Any = optional("Additional variables for the chat template, such as `enable_thinking`.")
TextOrObject = Annotated[str | dict[str, Any], with_one_error("Input should be a string or an object")]
CHAT_NAMES = {**NAMES, "prompt": "messages", "top_n_tokens": "top_logprobs"}
"""`GenerationParams` → the names of a chat's fields, where they differ."""
CHARS_OF_MESSAGE = 40
"""Rendering one message takes about as long as tokenizing this number of characters."""
BILLING_HEADER = re.compile(r"\Ax-anthropic-billing-header:[^\n]*(\n+|$)")
"""What Claude Code begins its system prompt with: a line, or a part of its own, whose values change with each
request, so that prompts would have no common prefix. Proxies send it on to other APIs.
"""
PROMPT_END_CHARS = 200
"""The end of the prompt in which reasoning may have begun."""

# --- body ---------------------------------------------------------------------------------------------------


class FunctionSchema(Strict, extra="allow"):
    name: str = Field(pattern=FUNCTION_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = optional(
        "JSON schema of the arguments, an object's. Default: it has none."
    )
    strict: bool | None = optional("Arguments match the schema, whatever `tool_choice` says.")
    arguments: dict[str, Any] | None = optional("TGI's other name of `parameters`.")


class ToolSchema(Strict, extra="allow"):
    type: Literal["function"]
    function: FunctionSchema


class ContentPart(Strict, extra="allow"):
    """A part of a message's content: a text, or for models that see a picture; in an assistant's message it
    may be a `refusal`.
    """

    type: str = Field(json_schema_extra={"enum": ["text", "refusal", *PICTURE_TYPES]})
    text: str | None = None
    refusal: str | None = None
    image_url: str | dict[str, Any] | None = optional(
        '`{"url": …}`, the URL of a picture (`data:image/…;base64,…`, or `https:` where the '
        "server allows its host); `detail` has no effect."
    )


Content = Annotated[
    str | Listed[ContentPart],
    with_one_error("Input should be a string, or a list of parts, each an object with a `type`"),
]


class EarlierFunction(Strict, extra="allow"):
    name: str
    arguments: TextOrObject | None = optional("The JSON text of an object, or the object itself.")


class EarlierCall(Strict, extra="allow"):
    """A call of a tool that the assistant made."""

    id: str | None = None
    type: str | None = None
    function: EarlierFunction


class ChatMessage(Strict, extra="allow"):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = optional(
        "A text, or parts that make up one text. Null where the assistant only called tools."
    )
    name: str | None = optional("The author's name, for the chat template.")
    tool_calls: Listed[EarlierCall] | None = optional(
        "The assistant's calls of tools, as a response had them."
    )
    tool_call_id: str | None = optional("With the role `tool`: the `id` of the call whose result this is.")
    function_call: EarlierFunction | None = optional(
        "The older form of `tool_calls`; its result has the role `function`."
    )
    reasoning_content: str | None = optional("The assistant's reasoning, for templates that repeat it.")
    reasoning: str | None = optional("The same.")
    refusal: str | None = optional("The assistant's refusal, as a response had it in place of `content`.")

    @property
    def has_calls(self) -> bool:
        return bool(self.tool_calls or self.function_call)


class ChatRequest(OpenAIRequest):
    """The body of /v1/chat/completions."""

    messages: Listed[ChatMessage] = Field(description="The chat so far.", min_length=1)
    max_completion_tokens: int | None = least(1, "The newer name of `max_tokens`.")
    logprobs: bool | None = optional("Return each token with its log-probability. Default: false.")
    top_logprobs: int | None = least(
        0, "With `logprobs`: the number of most likely tokens to return at each position."
    )
    add_generation_prompt: bool | None = optional(
        "End the prompt with the beginning of a new assistant message. Default: true unless the "
        "last message is continued; false continues it, if it is the assistant's and calls no tools."
    )
    continue_final_message: bool | None = optional(
        "Continue the last message. Default: false; with CONTINUE_FINAL_MESSAGE true, if it is "
        "the assistant's and calls no tools."
    )
    chat_template_kwargs: dict[str, Any] | None = TEMPLATE_VARIABLES
    tools: Listed[ToolSchema] | None = optional("Functions that the model may call.", max_length=MAX_TOOLS)
    tool_choice: TextOrObject | None = optional(
        "`auto` (the default): the model decides. `none`: no calls. `required`: one call at "
        'least. `{"type": "function", "function": {"name": …}}`: one call of this function. '
        '`{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": […]}}`: only these.'
    )
    parallel_tool_calls: bool | None = optional("Whether there may be several calls. Default: true.")
    functions: Listed[FunctionSchema] | None = optional(
        "OpenAI's older form of `tools`; the answer has a `function_call`.", max_length=MAX_TOOLS
    )
    function_call: TextOrObject | None = optional("OpenAI's older form of `tool_choice`.")
    tool_prompt: str | None = optional(
        f"TGI's text after the tools. Default, for a model whose template has no tools: {TOOL_PROMPT}"
    )
    reasoning_effort: Effort | None = EFFORT
    include_reasoning: bool | None = optional("Return the reasoning. Default: true.")

    def check(self) -> None:
        """Raises ApiError for unsupported fields and contradictions."""
        super().check()
        most, newer = self.max_tokens, self.max_completion_tokens
        refuse(
            (
                None not in (most, newer) and most != newer,
                "`max_tokens` and `max_completion_tokens` differ: give one of them",
                "max_completion_tokens",
            ),
            (self.top_logprobs and not self.logprobs, "`top_logprobs` needs `logprobs`: true"),
        )


# --- tools --------------------------------------------------------------------------------------------------


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


def choose(
    functions: Sequence[FunctionSchema], choice: str | Mapping[str, Any] | None, field: str, choice_field: str
) -> ToolChoice | None:
    """The choice among functions; None where none may be called. Raises ApiError.

    Args:
        field, choice_field: the fields that have the functions and the choice.
    """
    found = tools_of(functions, field)
    if not functions and choice not in (None, "none", "auto"):
        raise invalid(f"`{choice_field}` is only allowed with `{field}`")
    if not functions or choice == "none":
        return None
    if choice in (None, "auto"):
        return found
    if choice == "required":
        return replace(found, is_forced=True)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)  # the Responses API has the fields beside `type`
        return allow_tools(found, allowed, f"{choice_field}.allowed_tools")
    tool = tool_of(found.callable, choice, choice_field)
    return replace(found, callable=(tool,), is_forced=True, is_named=True)


def allow_tools(found: ToolChoice, allowed: Any, field: str) -> ToolChoice:
    """The choice `{"mode": …, "tools": […]}`. Raises ApiError."""
    mode = allowed.get("mode", "auto") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required"):
        raise invalid(f"`{field}.mode` must be auto or required")
    listed = allowed.get("tools")
    if not isinstance(listed, list) or not listed:
        raise invalid(f"`{field}.tools` must be a list of tools that is not empty")
    tools = [tool_of(found.callable, one, f"{field}.tools[{i}]") for i, one in enumerate(listed)]
    callable = tuple({tool.name: tool for tool in tools}.values())
    return replace(found, callable=callable, is_forced=mode == "required")


def tool_of(tools: Sequence[Tool], choice: Any, field: str) -> Tool:
    """The tool with a name, or with that in `{"type": "function", "function": {"name": …}}`. The Responses
    API has it beside `type`. Raises ApiError.
    """
    name = choice
    if isinstance(choice, Mapping) and choice.get("type", "function") == "function":
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        words = f'must be one of {", ".join(CHOICES)}, or `{{"type": "function", "function": {{"name": …}}}}`'
        raise invalid(f"`{field}` {words}")
    named = {tool.name: tool for tool in tools}
    if name not in named:
        raise invalid(f"`{field}` names {quoted(name)}, which is not among {cut(', '.join(named))}")
    return named[name]


def tools_of(functions: Sequence[FunctionSchema], field: str) -> ToolChoice:
    """The functions as tools, all of which may be called. Raises ApiError."""
    tools: dict[str, Tool] = {}
    shown = []  # as chat templates expect tools
    for one in functions:
        if one.name in tools:
            raise invalid(f"`{field}` has the name {quoted(one.name)} twice")
        parameters = one.parameters or one.arguments or NO_PARAMETERS
        kind = parameters.get("type", "object")
        if "object" not in (kind if isinstance(kind, list) else [kind]):
            place = f"{field}.{one.name}.parameters"
            words = f"must be the JSON schema of an object. Given the type: {quoted(kind)}"
            raise invalid(f"`{place}` {words}")
        tools[one.name] = Tool(one.name, parameters, bool(one.strict))
        about = {} if one.description is None else {"description": one.description}
        function = {"name": one.name, **about, "parameters": parameters}
        shown.append({"type": "function", "function": function})
    return ToolChoice(shown, tuple(tools.values()))


def tool_choice(body: ChatRequest) -> ToolChoice | None:
    """The tools that the answer may or must call; None for none. Raises ApiError."""
    older = [name for name in ("functions", "function_call") if getattr(body, name)]
    newer = [name for name in ("tools", "tool_choice") if getattr(body, name)]
    if older and newer:
        raise invalid(f"`{older[0]}` and `{newer[0]}` exclude each other")
    if not older:
        functions = [tool.function for tool in body.tools or []]
        found = choose(functions, body.tool_choice, "tools", "tool_choice")
        return found and replace(found, parallel=body.parallel_tool_calls is not False)
    choice = body.function_call
    if isinstance(choice, Mapping):
        choice = {"type": "function", "function": choice}
    elif choice not in (None, "none", "auto"):
        raise invalid("`function_call` must be none, auto, or an object with a `name`")
    found = choose(body.functions or [], choice, "functions", "function_call")
    return found and replace(found, parallel=False, is_older=True)


def continues_last_message(body: ChatRequest, by_default: bool) -> bool:
    """Whether the model continues the last message. Raises ApiError for contradicting fields.

    Args:
        by_default: the answer if no field says it.
    """
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid("`continue_final_message` and `add_generation_prompt` exclude each other")
    if body.continue_final_message is not None:
        return body.continue_final_message
    last = body.messages[-1]
    continues = by_default if body.add_generation_prompt is None else not body.add_generation_prompt
    return continues and last.role == "assistant" and not last.has_calls


# --- messages -----------------------------------------------------------------------------------------------


def template_messages(messages: Sequence[ChatMessage], sees: bool = False) -> list[dict[str, Any]]:
    """Messages with the keys that templates know: arguments of calls are objects, and the older forms of
    calls and results are the newer ones. Raises ApiError.

    Args:
        sees: whether the model sees pictures: each is a mark in the content.
    """
    numbers = accumulate(one.has_calls for one in messages)
    return [
        template_message(one, f"messages[{i}]", f"call{number:05}", sees)
        for i, (one, number) in enumerate(zip(messages, numbers, strict=True))
    ]


def template_message(one: ChatMessage, name: str, call_id: str, sees: bool) -> dict[str, Any]:
    """A message as chat templates expect it. Raises ApiError.

    Args:
        call_id: id of a call without one, and of its result: the same for both.
    """
    if one.has_calls and one.role != "assistant":
        field = "tool_calls" if one.tool_calls else "function_call"
        raise invalid(f"`{name}.{field}` is for the role `assistant`")
    found: dict[str, Any] = {"role": "tool" if one.role == "function" else one.role}
    content, reasoning = one.content, one.reasoning_content or one.reasoning
    if content is None and one.role == "assistant":
        content = "" if (one.has_calls or reasoning) and one.refusal is None else one.refusal
    found["content"] = join_parts(content, f"{name}.content", one.role, sees)
    if one.name is not None:
        found["name"] = one.name
    if reasoning:
        found |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if one.tool_calls:
        found["tool_calls"] = [template_call(call.function, call.id or call_id) for call in one.tool_calls]
    elif one.function_call:
        found["tool_calls"] = [template_call(one.function_call, call_id)]
    if found["role"] == "tool":
        found["tool_call_id"] = one.tool_call_id or call_id
    return found


def template_call(function: EarlierFunction, call_id: str) -> dict[str, Any]:
    """A call as chat templates expect it. Arguments that are no object, such as those of a call that was cut,
    are none: the chat goes on.
    """
    arguments: Any = function.arguments
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):
            arguments = parse_text(arguments)
    called = {"name": function.name, "arguments": arguments if isinstance(arguments, dict) else {}}
    return {"id": call_id, "type": "function", "function": called}


def join_parts(content: str | list[ContentPart] | None, name: str, role: str, sees: bool = False) -> str:
    """The text of a message's content, whose parts are joined. The system's have no BILLING_HEADER. Raises
    ApiError.
    """
    if content is None:
        raise invalid(f"`{name}` is required")
    if isinstance(content, str):
        texts = [content]
    else:
        texts = [part_text(part, f"{name}[{i}]", name, role, sees) for i, part in enumerate(content)]
    return "".join(BILLING_HEADER.sub("", text) if role == "system" else text for text in texts)


def part_text(part: ContentPart, place: str, name: str, role: str, sees: bool) -> str:
    field = "refusal" if role == "assistant" and part.type == "refusal" else "text"
    if sees and is_picture(part.type):
        return PICTURE
    if part.type != field:
        raise unknown_part(part.type, place, name, sees)
    text: str | None = getattr(part, field)
    if text is None:
        raise invalid(f"`{place}.{field}` is required", name)
    return text


def picture_sources(messages: Sequence[ChatMessage]) -> list[PictureSource]:
    """Where the pictures of messages are, in their order. Raises ApiError."""
    return [
        read_part(part.model_dump(exclude_none=True), f"messages[{i}].content[{j}]")
        for i, message in enumerate(messages)
        if isinstance(message.content, list)
        for j, part in enumerate(message.content)
        if is_picture(part.type)
    ]


# --- prompt -------------------------------------------------------------------------------------------------


def render_prompt(
    body: ChatRequest, tools: ToolChoice | None, continues: bool, tokenizer: ModelTokenizer
) -> Rendered:
    """The text that the model continues. Raises ApiError (422) for errors of the template, too.

    Args:
        tools: None where none may be called.
        continues: the last message is continued.
    """
    template, variables = tokenizer.chat_template, body.chat_template_kwargs or {}
    messages: Sequence[Message] = template_messages(body.messages, sees=tokenizer.pictures is not None)
    if continues and tools is not None and tools.is_forced:
        raise invalid("`continue_final_message` and a forced `tool_choice` exclude each other", "tool_choice")
    if template is None:
        raise template_error("this model has no chat template: use /v1/completions or /generate")
    for name in OWN_VARIABLES:
        if name in variables:
            raise invalid(f"`chat_template_kwargs` cannot have `{name}`")
    variables = reasoning_variables(body.reasoning_effort, variables, template)
    if "developer" not in template.source:
        messages = [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]
    listed: Sequence[Mapping[str, Any]] | None = None
    text = ""
    if tools is not None:
        template, text = template.for_tools, body.tool_prompt or ""
        listed = tools.tools if template.takes_tools else None
        if listed is None:
            words = "the prompt has them as text, before the first message"
            warn_once(log, f"the chat template has no tools: {words}")
            shown = json.dumps(tools.tools, ensure_ascii=False, separators=(",", ":"))
            text = f"{shown}\n{text or TOOL_PROMPT}"
    messages = in_turns(known_calls(messages, template), template)
    if text:
        messages = with_text(messages, text, bool(body.tool_prompt), template)
    guard = tokenizer.controls.guard_for([messages, variables, listed], template.source)
    if guard is not None:
        try:
            messages, variables, listed = tokenizer.controls.guarded([messages, variables, listed], guard)
        except RecursionError as error:
            raise template_error("the messages are nested too deeply") from error
    if continues:
        return rendered_text(template.render_open(messages, variables, listed), guard)
    begins_next = body.add_generation_prompt is not False
    return rendered_text(template.render(messages, begins_next, variables, listed), guard)


def in_turns(messages: Sequence[Message], template: ChatTemplate) -> Sequence[Message]:
    """Messages in an order that the template takes. Where only the first may be the system's, its messages
    at the beginning are one. What it says later is added to the turn before, or is a turn of the user after
    the assistant's, so that the next prompt of the chat begins alike. Users' messages in a row are one where
    the template wants user and assistant in turns.
    """
    turns: list[list[Message]] = []
    for one in messages:
        before, role = turns[-1][0]["role"] if turns else "", one["role"]
        if role in ("system", "developer") and not template.takes_later_system:
            joins = before not in ("", "assistant")
            if before or not template.takes_system:
                one = {**one, "role": "user"}
        else:
            joins = role == before == "user" and not template.takes_users_in_a_row
        if joins:
            turns[-1].append(one)
        else:
            turns.append([one])
    return [{**turn[0], "content": "\n\n".join(one["content"] for one in turn)} for turn in turns]


def with_text(
    messages: Sequence[Message], text: str, at_end: bool, template: ChatTemplate
) -> Sequence[Message]:
    """Messages with a text: at the end of the last one that is not the assistant's, as TGI adds it, or at the
    beginning of the system message, or of the first user message where the template has no system messages.
    If there is no such message, the text is one.
    """
    if at_end:
        place = max((i for i, one in enumerate(messages) if one["role"] != "assistant"), default=-1)
    else:
        role, among = ("system", messages[:1]) if template.takes_system else ("user", messages)
        found = next((i for i, one in enumerate(among) if one["role"] == role), None)
        if found is None:
            return [{"role": role, "content": text}, *messages]
        place = found
    changed = [*messages]
    content = changed[place]["content"]
    texts = (content, text) if at_end else (text, content)
    changed[place] = {**changed[place], "content": "\n---\n".join(texts)}
    return changed


# --- earlier calls ------------------------------------------------------------------------------------------


def known_calls(messages: Sequence[Message], template: ChatTemplate) -> Sequence[Message]:
    """Messages whose calls and results are in a form that the template knows. For one without calls each is a
    line of JSON, as TOOL_PROMPT asks for it, and results come from the user: those in a row are one message,
    because templates expect user and assistant in turns.
    """
    if "tool_calls" in template.source:
        texts = template.wants_text_arguments
        return [with_text_arguments(one) if texts and "tool_calls" in one else one for one in messages]
    plain: list[Message] = []
    for are_results, run in groupby(messages, lambda one: one["role"] == "tool"):
        if are_results:
            plain.append({"role": "user", "content": "\n".join(one["content"] for one in run)})
        else:
            plain += map(plain_message, run)
    return plain


def with_text_arguments(message: Message) -> Message:
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def plain_message(message: Message) -> Message:
    calls = [
        json.dumps({"name": called["name"], "parameters": called["arguments"]}, ensure_ascii=False)
        for called in (one["function"] for one in message.get("tool_calls", []))
    ]
    lines = [message["content"]] * bool(message["content"]) + calls
    return {**message, "content": "\n".join(lines)} if calls else message


# --- reasoning ----------------------------------------------------------------------------------------------


def reasoning_variables(
    effort: str | None, variables: Mapping[str, Any], template: ChatTemplate
) -> dict[str, Any]:
    """A client's variables, with those that its `reasoning_effort` gives a value."""
    if effort is None:
        return dict(variables)
    values = {"reasoning_effort": effort} | dict.fromkeys(REASONING_SWITCHES, effort != "none")
    return {name: value for name, value in values.items() if name in template.variables} | dict(variables)


# --- grammar ------------------------------------------------------------------------------------------------


def reading_beside(grammar: Grammar | None, tools: ToolChoice | None, reading: Reading) -> Reading:
    """How an answer is read when the client gives a grammar beside tools: it is calls, or what the grammar
    describes. If that is an object with the very properties of a call without a mark, the answer is never a
    call.
    """
    if grammar is None or tools is None or tools.is_forced or reading.calls == HARMONY:
        return reading
    form = CALL_FORMATS.get(reading.calls)
    if form is not None and form.keys and grammar.kind == "json":
        properties = json.loads(grammar.text).get("properties")
        if isinstance(properties, dict) and all(key in properties for key in form.keys):
            return replace(reading, calls="")
    return replace(reading, is_either=True)


async def answer_grammar(
    grammar: Grammar | None, tools: ToolChoice | None, reading: Reading | None, tokenizer: ModelTokenizer
) -> Grammar | None:
    """What the answer must look like: calls of tools, or what `grammar` describes; None for anything. Raises
    ApiError.
    """
    if reading is None:
        return grammar
    form, reasoning = CALL_FORMATS.get(reading.calls), REASONING_FORMATS.get(reading.reasoning)
    ids, calls, text = tokenizer.special_tokens, "", ""
    if tools is not None and form is not None:
        must_call = tools.is_forced or grammar is not None  # all other answers are those of `grammar`
        may_repeat = tools.parallel and not tools.is_named
        calls = await call_grammar(form, tools.callable, ids, must_call, may_repeat)
    if grammar is not None and not (tools is not None and tools.is_forced):
        text = await compile_grammar(grammar, tokenizer)
    if not calls and not text:
        return None
    source = answer_source(calls, text, form, reasoning, reading.prompt_end, ids)
    return Grammar(COMPILED, source, grammar.field if grammar is not None and text else "tools")


# --- parameters ---------------------------------------------------------------------------------------------


async def read_chat(body: ChatRequest, pool: Pool) -> GenerationParams:
    """The parameters of a chat. Raises ApiError."""
    check_generates(pool.workers.limits)
    tools, tokenizer = tool_choice(body), pool.tokenizer
    reasons = pool.reasoning_format is not None or pool.call_format.name == HARMONY
    if body.reasoning_effort not in (None, "none") and not reasons:
        # frameworks send one to every model
        warn_once(log, f"`reasoning_effort` has no effect: {pool.settings.model_name} does not reason")
    continues = continues_last_message(body, pool.settings.continue_final_message)
    size = CHARS_OF_MESSAGE * (len(body.messages) + (len(tools.tools) if tools else 0))
    prompt = await offload(size, lambda: render_prompt(body, tools, continues, tokenizer))
    asked = body.grammar()
    reading = None if continues else new_reading(body, asked, pool, tools, prompt.text[-PROMPT_END_CHARS:])
    can_force = tokenizer.takes_grammars and not pool.settings.disable_grammar_support
    may_force = tools is None or tools.is_promised or can_force
    rendering = body.rendering(asked, reading=reading, logprobs=bool(body.logprobs))
    last, newer, prefix = body.messages[-1], body.max_completion_tokens, ""
    if body.echo and last.role == "assistant":  # the message that the model continues
        prefix = join_parts(last.content or "", "", last.role)
    return body.prompt_params(
        CHAT_NAMES if newer is None else CHAT_NAMES | {"max_new_tokens": "max_completion_tokens"},
        tokenizer.sampling_defaults,
        grammar=await answer_grammar(asked, tools if may_force else None, reading, tokenizer),
        rendering=rendering,
        prompt=prompt,
        pictures=picture_sources(body.messages),
        add_special_tokens=bool(body.add_special_tokens),
        prompt_logprobs=rendering.prompt_tops,
        prefix=prefix,
    )


def chat_of(
    body: SamplingFields, messages: Sequence[Message], functions: Sequence[FunctionSchema], **own: Any
) -> ChatRequest:
    """The body of a chat with the parameters of one of another API, these functions as its tools, and with
    fields of its `own`.
    """
    own |= {name: getattr(body, name) for name in SamplingFields.model_fields}
    tools = [ToolSchema(type="function", function=one) for one in functions]
    return ChatRequest(messages=[ChatMessage(**one) for one in messages], tools=tools, **own)


def format_of(form: Mapping[str, Any] | None, place: str, kinds: Collection[str]) -> dict[str, Any] | None:
    """A chat's `response_format` for that of another API, which is one of these. Raises ApiError."""
    return None if form is None else {"type": type_of(form, kinds, place), "json_schema": form}


async def read_other(chat: ChatRequest, pool: Pool, names: Mapping[str, str]) -> GenerationParams:
    """The parameters of a chat that was made of the body of another API. Raises ApiError.

    Args:
        names: patterns of names of a chat's fields and parameters → what they are called in that API.
    """
    try:
        return replace(await read_chat(chat, pool), names=names)
    except ApiError as error:
        error.rename(names)
        raise


def new_reading(
    body: ChatRequest, asked: Grammar | None, pool: Pool, tools: ToolChoice | None, prompt_end: str
) -> Reading | None:
    """How the answer is read; None if all of it is content."""
    calls = pool.call_format.name if tools or pool.call_format.name == HARMONY else ""
    reasoning = pool.reasoning_format.name if pool.reasoning_format else ""
    if not (calls or reasoning):
        return None
    reading = Reading(
        calls=calls,
        reasoning=reasoning,
        prompt_end=prompt_end,
        tools=[(one.name, json.dumps(one.parameters)) for one in tools.callable] if tools else [],
        is_named=bool(tools and tools.is_named),
        parallel=tools is None or tools.parallel,
        is_older=bool(tools and tools.is_older),
        shows_reasoning=body.include_reasoning is not False,
    )
    return reading_beside(asked, tools, reading)


async def read_chat_completion(body: ChatRequest, context: Context) -> HttpAnswer:
    """What a body of /v1/chat/completions asks for. Raises ApiError."""
    return await context.ask([await read_chat(body, context.pool)])
