"""Chat prompt: a chat's messages as clients send them, as chat templates expect them, and rendered with the
tools by the model's template.

A model whose template has no tools gets them as TGI puts them: as text at the end of the last message.
"""

import contextlib
import functools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import Field

from api.errors import invalid, quoted
from api.json import parse_text
from api.prompts.chat_template import OWN_VARIABLES, ChatTemplate, template_error
from api.prompts.control_texts import ControlTexts, Rendered, rendered_text
from api.prompts.picture_marks import MARK
from api.prompts.pictures import PictureSource, is_picture, read_part, unknown_part
from api.requests.fields import Listed, Strict, optional, with_one_error
from api.requests.tools import ToolChoice

log = logging.getLogger(__name__)

Message = Mapping[str, Any]
TOOL_PROMPT = (
    "Given the functions available, please respond with a JSON for a function call with its proper arguments "
    "that best answers the given prompt. Respond in the format {name: function name, parameters: dictionary "
    "of argument name and its value}.Do not use variables."
)
"""TGI's own, to the letter."""
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
REASONING_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates turn reasoning on and off."""

IMAGE_URL_SCHEMA: Any = {"anyOf": [{"type": "object", "required": ["url"]}, {"type": "null"}]}

OF_KINDS: Any = [
    {"required": ["text"], "properties": {"type": {"const": "text"}}},
    {"required": ["image_url"], "properties": {"type": {"const": "image_url"}}},
]


class ContentPart(Strict, extra="allow", json_schema_extra={"required": ["type"], "anyOf": OF_KINDS}):
    """A part of a message's content: a text, or for models that see a picture; in an assistant's message it
    may be a `refusal`.
    """

    type: str = Field(json_schema_extra={"enum": ["text", "image_url"]})
    text: str | None = Field(default=None, json_schema_extra={"type": "string"})
    refusal: str | None = None
    image_url: str | dict[str, Any] | None = optional(
        '`{"url": …}`, the URL of a picture (`data:image/…;base64,…`, or `https:` where the '
        "server allows its host); `detail` has no effect.",
        IMAGE_URL_SCHEMA,
    )


Content = Annotated[
    str | Listed[ContentPart],
    with_one_error("Input should be a string, or a list of parts, each an object with a `type`"),
]
Arguments = Annotated[str | dict[str, Any], with_one_error("Input should be a string or an object")]


class EarlierFunction(Strict, extra="allow"):
    name: str
    arguments: Arguments | None = optional("The JSON text of an object, or the object itself.")


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
        raise invalid(f"`{name}.{field}` is for the role `assistant`", f"{name}.{field}")
    found: dict[str, Any] = {"role": "tool" if one.role == "function" else one.role}
    content = one.content
    if content is None and one.role == "assistant":
        content = "" if one.has_calls and one.refusal is None else one.refusal
    found["content"] = join_parts(content, f"{name}.content", one.role == "assistant", sees)
    if one.name is not None:
        found["name"] = one.name
    if reasoning := one.reasoning_content or one.reasoning:
        found |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if one.tool_calls:
        found["tool_calls"] = [template_call(call.function, call.id or call_id) for call in one.tool_calls]
    elif one.function_call:
        found["tool_calls"] = [template_call(one.function_call, call_id)]
    if found["role"] == "tool":
        found["tool_call_id"] = one.tool_call_id or call_id
    return found


def template_call(function: EarlierFunction, call_id: str) -> dict[str, Any]:
    arguments: Any = function.arguments or {}
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # a text that cannot be read as JSON stays as it is
            arguments = parse_text(arguments)
    called = {"name": function.name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": called}


def join_parts(
    content: str | list[ContentPart] | None, name: str, may_refuse: bool = False, sees: bool = False
) -> str:
    """The text of a message's content, whose parts are joined. Raises ApiError."""
    if content is None:
        raise invalid(f"`{name}` is required", name)
    if isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        place, is_refusal = f"{name}[{i}]", may_refuse and part.type == "refusal"
        if sees and is_picture(part.type):
            texts.append(MARK)
            continue
        if part.type != "text" and not is_refusal:
            raise unknown_part(part.type, place, name, sees)
        if (text := part.refusal if is_refusal else part.text) is None:
            raise invalid(f"`{place}.{'refusal' if is_refusal else 'text'}` is required", name)
        texts.append(text)
    return "".join(texts)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """What a prompt is rendered from.

    Attributes:
        messages: as `template_messages` makes them.
        tools: None where none may be called.
        tool_prompt: text after the tools; TGI's field.
        variables: a client's own ones, for the template.
        add_generation_prompt: whether the prompt ends with the beginning of the next message.
        continues_final_message: the last message is continued.
    """

    messages: Sequence[Message]
    tools: ToolChoice | None = None
    tool_prompt: str | None = None
    variables: Mapping[str, Any]
    add_generation_prompt: bool = True
    continues_final_message: bool = False


def render_prompt(chat: Chat, template: ChatTemplate | None, controls: ControlTexts) -> Rendered:
    """The text that the model continues. Raises ApiError (422) for errors of the template, too."""
    if not chat.messages:
        raise invalid("`messages` cannot be empty", "messages")
    if template is None:
        raise template_error("this model has no chat template: use /v1/completions or /generate")
    for name in OWN_VARIABLES:
        if name in chat.variables:
            raise invalid(f"`chat_template_kwargs` cannot have `{name}`", "chat_template_kwargs")
    messages: Sequence[Message] = chat.messages
    if "developer" not in template.source:
        messages = [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]
    if chat.tools is not None:
        template = template.for_tools
    messages = known_calls(messages, template)
    tools = None
    if chat.tools is not None:
        messages = [*messages]
        others = [i for i, one in enumerate(messages) if one["role"] != "assistant"]
        place = others[-1] if others else len(messages) - 1
        text = f"\n---\n{chat.tool_prompt}" if chat.tool_prompt else ""
        if not template.takes_tools:
            note_missing_tools()
            shown = json.dumps(chat.tools.tools, ensure_ascii=False, separators=(",", ":"))
            text = f"\n---\n{shown}\n{chat.tool_prompt or TOOL_PROMPT}"
        messages[place] = {**messages[place], "content": messages[place]["content"] + text}
        tools = chat.tools.tools if template.takes_tools else None
    variables, guard = chat.variables, controls.guard_for([messages, chat.variables, tools], template.source)
    if guard is not None:
        try:
            messages, variables, tools = controls.guarded([messages, variables, tools], guard)
        except RecursionError as error:
            raise template_error("the messages are nested too deeply") from error
    if chat.continues_final_message:
        return rendered_text(template.render_open(messages, variables, tools), guard)
    return rendered_text(template.render(messages, chat.add_generation_prompt, variables, tools), guard)


@functools.cache
def note_missing_tools() -> None:
    log.warning("the chat template has no tools: the prompt has them as text, after the last message")


# --- earlier calls ------------------------------------------------------------------------------------------


def known_calls(messages: Sequence[Message], template: ChatTemplate) -> Sequence[Message]:
    """Messages whose calls and results are in a form that the template knows."""
    if not any("tool_calls" in one or one["role"] == "tool" for one in messages):
        return messages
    if "tool_calls" not in template.source:
        return join_results([plain_message(one) for one in messages])
    if template.wants_text_arguments:
        return [
            {**one, "tool_calls": [with_text_arguments(call) for call in one["tool_calls"]]}
            if "tool_calls" in one
            else one
            for one in messages
        ]
    return messages


def with_text_arguments(call: Message) -> Message:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def plain_message(message: Message) -> Message:
    """A message for a template without calls: each is a line of JSON, as TOOL_PROMPT asks for it; a result
    comes from the user.
    """
    if message["role"] == "tool":
        return {"role": "user", "content": message["content"], "is_result": True}
    calls = [
        json.dumps({"name": called["name"], "parameters": called["arguments"]}, ensure_ascii=False)
        for called in (one["function"] for one in message.get("tool_calls", []))
    ]
    lines = [message["content"]] * bool(message["content"]) + calls
    return {**message, "content": "\n".join(lines)} if calls else message


def join_results(messages: Sequence[Message]) -> list[Message]:
    """Results in a row are one message: templates expect user and assistant in turns."""
    joined: list[Message] = []
    for one in messages:
        if joined and "is_result" in one and "is_result" in joined[-1]:
            joined[-1] = {**one, "content": joined[-1]["content"] + "\n" + one["content"]}
        else:
            joined.append(one)
    return joined


# --- reasoning ----------------------------------------------------------------------------------------------


def reasoning_variables(
    effort: str | None, variables: Mapping[str, Any], template: ChatTemplate | None
) -> dict[str, Any]:
    """A client's variables, with those that its `reasoning_effort` gives a value. Raises ApiError."""
    known = template.variables if template else frozenset()
    if effort is None:
        return dict(variables)
    if effort not in EFFORTS:
        raise invalid(
            f"`reasoning_effort` must be one of {', '.join(EFFORTS)}. Given: {quoted(effort)}",
            "reasoning_effort",
        )
    values = {"reasoning_effort": effort} | dict.fromkeys(REASONING_SWITCHES, effort != "none")
    return {name: value for name, value in values.items() if name in known} | dict(variables)
