"""Messages of a chat: as clients send them, and as chat templates expect them."""

import json
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal

from pydantic import Field

from api.errors import invalid, quoted
from api.inference.fields import Listed, Strict, with_one_error


class ContentPart(Strict, extra="allow", json_schema_extra={"required": ["type", "text"]}):
    """A part of a message's content, a text; in an assistant's message it may be a `refusal`."""

    type: str = Field(json_schema_extra={"enum": ["text"]})
    text: str | None = Field(default=None, json_schema_extra={"type": "string"})
    refusal: str | None = None


Content = Annotated[
    str | Listed[ContentPart],
    with_one_error("Input should be a string, or a list of parts, each an object with a `type`"),
]
Arguments = Annotated[str | dict[str, Any], with_one_error("Input should be a string or an object")]


class EarlierFunction(Strict, extra="allow"):
    name: str
    arguments: Arguments | None = Field(
        default=None, description="The JSON text of an object, or the object itself."
    )


class EarlierCall(Strict, extra="allow"):
    """A call of a tool that the assistant made."""

    id: str | None = None
    type: str | None = None
    function: EarlierFunction


class ChatMessage(Strict, extra="allow"):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = Field(
        default=None,
        description="A text, or parts that make up one text. Null where the assistant only called tools.",
    )
    name: str | None = Field(default=None, description="The author's name, for the chat template.")
    tool_calls: Listed[EarlierCall] | None = Field(
        default=None, description="The assistant's calls of tools, as a response had them."
    )
    tool_call_id: str | None = Field(
        default=None, description="With the role `tool`: the `id` of the call whose result this is."
    )
    function_call: EarlierFunction | None = Field(
        default=None, description="The older form of `tool_calls`; its result has the role `function`."
    )
    reasoning_content: str | None = Field(
        default=None, description="The assistant's reasoning, for templates that repeat it."
    )
    reasoning: str | None = Field(default=None, description="The same.")
    refusal: str | None = Field(
        default=None, description="The assistant's refusal, as a response had it in place of `content`."
    )

    @property
    def has_calls(self) -> bool:
        return bool(self.tool_calls or self.function_call)


def template_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages with the keys that templates know: arguments of calls are objects, and the older forms of
    calls and results are the newer ones. Raises ApiError.
    """
    numbers = accumulate(one.has_calls for one in messages)
    return [
        template_message(one, f"messages[{i}]", f"call{number:05}")
        for i, (one, number) in enumerate(zip(messages, numbers, strict=True))
    ]


def template_message(one: ChatMessage, name: str, call_id: str) -> dict[str, Any]:
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
    found["content"] = join_parts(content, f"{name}.content", may_refuse=one.role == "assistant")
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
    called = {"name": function.name, "arguments": parse_arguments(function.arguments)}
    return {"id": call_id, "type": "function", "function": called}


def parse_arguments(arguments: str | dict[str, Any] | None) -> Any:
    """Arguments as an object; a text that is no JSON (a model wrote it) stays as it is."""
    if not arguments:
        return {}
    if isinstance(arguments, dict):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def join_parts(content: str | list[ContentPart] | None, name: str, may_refuse: bool = False) -> str:
    """The text of a message's content, whose parts are joined. Raises ApiError."""
    if content is None:
        raise invalid(f"`{name}` is required", name)
    if isinstance(content, str):
        return content
    return "".join(part_text(part, f"{name}[{i}]", may_refuse, name) for i, part in enumerate(content))


def part_text(part: ContentPart, name: str, may_refuse: bool, field: str) -> str:
    """The text of a part. Raises ApiError, which has the name of the whole `field`."""
    is_refusal = may_refuse and part.type == "refusal"
    if part.type != "text" and not is_refusal:
        raise invalid(f"`{name}` is of type {quoted(part.type)}: this model takes text only", field)
    text = part.refusal if is_refusal else part.text
    if text is None:
        raise invalid(f"`{name}.{'refusal' if is_refusal else 'text'}` is required", field)
    return text
