"""Chat request: the body of Anthropic's Messages API as the body of a chat.

A turn of Anthropic's holds blocks; a chat has a message for each result of a tool, and one for the rest.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from pydantic import TypeAdapter, ValidationError

from api.anthropic.request_schemas import (
    ChosenTool,
    ClientTool,
    CountTokensRequest,
    InputBlock,
    MessagesRequest,
)
from api.errors import ApiError, invalid, quoted, renamed
from api.event_loop import offload
from api.grammar.compile import Grammar
from api.grammar.read import read_named_schema
from api.http.body import schema_error
from api.openai.params import CHARS_OF_MESSAGE, CHAT_NAMES, ChatParams, read_chat
from api.openai.request_schemas import ChatRequest
from api.requests.chat_prompt import REASONING_SWITCHES, ChatMessage
from api.requests.fields import Listed, SamplingFields
from api.requests.pool import Pool
from api.requests.tools import FunctionSchema, ToolSchema

MESSAGE_NAMES = {**CHAT_NAMES, "stop": "stop_sequences"}
"""`GenerationParams` → the names of Anthropic's fields, where they differ."""
FIELD_OF_CHAT = {
    r"messages.*": "messages",
    r"tools\.(.*)\.parameters": r"tools.\1.input_schema",
    r"reasoning_effort": "output_config.effort",
}
"""Patterns of fields of a chat → what they are called here."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
BILLING_HEADER = re.compile(r"x-anthropic-billing-header:[^\n]*(\n+|$)")
"""What Claude Code begins its system prompt with: a line, or a block of its own, whose values change with
each request.
"""
BLOCKS: TypeAdapter[list[InputBlock]] = TypeAdapter(Listed[InputBlock])

NamedBlock = tuple[str, InputBlock]
"""A block with the name of its field."""
Part = dict[str, Any]


async def read_messages(body: CountTokensRequest, pool: Pool) -> ChatParams:
    """The parameters of the chat that a body asks for. Raises ApiError."""
    chat = await offload(CHARS_OF_MESSAGE * len(body.messages), lambda: to_chat(body))
    try:
        read = await read_chat(chat, pool, text_grammar(body))
    except ApiError as error:
        raise renamed(error, FIELD_OF_CHAT) from error
    pictures = [replace(one, field="messages") for one in read.params.pictures]
    params = replace(read.params, names=MESSAGE_NAMES, pictures=pictures, cuts_to_room=True)
    return replace(read, params=params)


def to_chat(body: CountTokensRequest) -> ChatRequest:
    """The body of a chat with the parameters and messages of this one. Raises ApiError."""
    messages = to_messages(body)
    choice = body.tool_choice
    shared = {name: getattr(body, name) for name in SamplingFields.model_fields}
    continues = bool(messages) and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    if continues and choice is not None and choice.type in ("any", "tool"):
        text = "`tool_choice` cannot force a call where the last of `messages` is the assistant's to continue"
        raise invalid(text, "tool_choice")
    return ChatRequest(
        messages=[ChatMessage(**one) for one in messages],
        max_tokens=body.max_tokens if isinstance(body, MessagesRequest) else None,
        stop=body.stop_sequences,
        continue_final_message=continues,
        tools=to_tools(body.tools or []) or None,
        tool_choice=to_choice(choice, body.tools or []) if choice is not None else None,
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        **reasoning_fields(body),
        **shared,
    )


def text_grammar(body: CountTokensRequest) -> Grammar | None:
    """What the text must look like; None for any text. Raises ApiError."""
    form = body.output_config.format if body.output_config is not None else None
    if form is None:
        return None
    if form.get("type") != "json_schema":
        name = "output_config.format.type"
        raise invalid(f"`{name}` must be json_schema. Given: {quoted(form.get('type'))}", name)
    return read_named_schema(form, "output_config.format")


def reasoning_fields(body: CountTokensRequest) -> dict[str, Any]:
    """The chat's fields for `thinking` and `output_config.effort`; without both the model does as it is
    used to.
    """
    thinking, effort = body.thinking, body.output_config.effort if body.output_config is not None else None
    if thinking is not None and thinking.type == "disabled":
        return {"reasoning_effort": "none"}
    if thinking is None or effort is not None:
        return {"reasoning_effort": effort}
    return {"chat_template_kwargs": dict.fromkeys(REASONING_SWITCHES, True)}


# --- tools --------------------------------------------------------------------------------------------------


def to_tools(tools: Sequence[ClientTool]) -> list[ToolSchema]:
    """The tools that can be called, in the shape of chats. Raises ApiError."""
    found = []
    for i, tool in enumerate(tools):
        if not tool.is_callable:
            continue
        for name, value in (("name", tool.name), ("input_schema", tool.input_schema)):
            if value is None:
                raise invalid(f"`tools[{i}].{name}` is required", f"tools[{i}].{name}")
        function = FunctionSchema(
            name=tool.name or "",
            description=tool.description,
            parameters=tool.input_schema,
            strict=tool.strict,
        )
        found.append(ToolSchema(type="function", function=function))
    return found


def to_choice(choice: ChosenTool, tools: Sequence[ClientTool]) -> str | dict[str, Any]:
    """The choice in the shape of chats. Raises ApiError if it forces a tool that cannot be called."""
    if choice.type != "tool":
        if choice.type == "any" and tools and not any(tool.is_callable for tool in tools):
            text = "`tool_choice` forces a call, but none of `tools` has an `input_schema` to call it by"
            raise invalid(text, "tool_choice")
        return CHOICES[choice.type]
    if choice.name is None:
        raise invalid("`tool_choice.name` is required", "tool_choice.name")
    if any(tool.name == choice.name and not tool.is_callable for tool in tools):
        text = (
            f"`tool_choice` forces {quoted(choice.name)}, a tool that cannot be called here: it is built in"
        )
        raise invalid(text, "tool_choice")
    return {"type": "function", "function": {"name": choice.name}}


# --- messages -----------------------------------------------------------------------------------------------


def to_messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    """The messages of the chat. Raises ApiError."""
    system = system_text(named_blocks(body.system or "", "system"))
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    named = [(f"messages[{i}].content", one) for i, one in enumerate(body.messages)]
    for role, turns in groupby(named, lambda turn: turn[1].role):
        blocks = [block for name, turn in turns for block in named_blocks(turn.content, name)]
        match role:
            case "user":
                messages += user_messages(blocks)
            case "assistant":
                messages.append(assistant_message(blocks))
            case _:
                messages.append({"role": "system", "content": system_text(blocks)})
    return messages


def named_blocks(content: str | Sequence[InputBlock], name: str) -> list[NamedBlock]:
    if isinstance(content, str):
        return [(name, InputBlock(type="text", text=content))]
    return [(f"{name}[{i}]", block) for i, block in enumerate(content)]


def system_text(blocks: Iterable[NamedBlock]) -> str:
    """The text of a system prompt, without Claude Code's changing line, so that prompts have a common prefix.
    Raises ApiError.
    """
    texts = []
    for name, block in blocks:
        if block.type != "text":
            raise unknown_block(block, name, "text")
        text = text_of(block, name)
        texts.append(BILLING_HEADER.sub("", text, count=1) if starts_with_billing(text) else text)
    return "\n".join(text for text in texts if text)


def starts_with_billing(text: str) -> bool:
    return BILLING_HEADER.match(text) is not None


def user_messages(blocks: Iterable[NamedBlock]) -> list[dict[str, Any]]:
    """The messages of a user's turn: each result of a tool is one, and so are the blocks between results.
    Raises ApiError.
    """
    messages: list[dict[str, Any]] = []
    for is_result, run in groupby(blocks, lambda named: named[1].type == "tool_result"):
        if is_result:
            messages += [tool_message(block, name) for name, block in run]
        else:
            messages.append(
                {"role": "user", "content": join_parts(to_part(block, name) for name, block in run)}
            )
    return messages or [{"role": "user", "content": ""}]


def tool_message(block: InputBlock, name: str) -> dict[str, Any]:
    if block.tool_use_id is None:
        raise invalid(f"`{name}.tool_use_id` is required", f"{name}.tool_use_id")
    given = block.content
    if given is None or isinstance(given, str):
        return {"role": "tool", "tool_call_id": block.tool_use_id, "content": given or ""}
    try:
        inner = BLOCKS.validate_python(given, strict=True)
    except ValidationError as error:
        raise invalid(f"`{name}.content`: {schema_error(error).text}", f"{name}.content") from error
    parts = (to_part(one, inner_name) for inner_name, one in named_blocks(inner, f"{name}.content"))
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": join_parts(parts)}


def assistant_message(blocks: Iterable[NamedBlock]) -> dict[str, Any]:
    """The message of an assistant's turn. Its texts follow each other as the model wrote them. Raises
    ApiError.
    """
    text, thinking, calls = "", "", []
    for name, block in blocks:
        match block.type:
            case "text":
                text += text_of(block, name)
            case "thinking":
                thinking += block.thinking or ""
            case "redacted_thinking":
                pass  # only Anthropic can read it
            case "tool_use":
                calls.append(to_call(block, name))
            case _:
                raise unknown_block(block, name, "text, thinking, redacted_thinking, tool_use")
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["reasoning_content"] = thinking
    return message | ({"tool_calls": calls} if calls else {})


def to_call(block: InputBlock, name: str) -> dict[str, Any]:
    for field in ("id", "name", "input"):
        if getattr(block, field) is None:
            raise invalid(f"`{name}.{field}` is required", f"{name}.{field}")
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def to_part(block: InputBlock, name: str) -> Part:
    """A block of a user's turn, or of a result, as a part of a chat's content. Raises ApiError."""
    source: Mapping[str, Any] = block.source or {}
    match block.type, source.get("type"):
        case "text", _:
            return {"type": "text", "text": text_of(block, name)}
        case "document", "text":
            return {"type": "text", "text": source_value(source, "data", name)}
        case "image", "url":
            return {"type": "image_url", "image_url": {"url": source_value(source, "url", name)}}
        case "image", "base64":
            kind, data = (source_value(source, key, name) for key in ("media_type", "data"))
            return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
        case ("image" | "document") as kind, _:
            allowed = "base64, url" if kind == "image" else "text"
            field = f"{name}.source.type"
            raise invalid(f"`{field}` must be one of {allowed}. Given: {quoted(source.get('type'))}", field)
    raise unknown_block(block, name, "text, image, document, tool_result")


def source_value(source: Mapping[str, Any], key: str, name: str) -> str:
    value = source.get(key)
    if not isinstance(value, str):
        raise invalid(f"`{name}.source.{key}` must be a string", f"{name}.source.{key}")
    return value


def join_parts(parts: Iterable[Part]) -> str | list[Part]:
    """A content: one text, or where there are pictures the parts. Texts in a row are lines of one text."""
    joined: list[Part] = []
    for part in parts:
        if joined and part["type"] == joined[-1]["type"] == "text":
            joined[-1] = {"type": "text", "text": f"{joined[-1]['text']}\n{part['text']}"}
        else:
            joined.append(part)
    if all(part["type"] == "text" for part in joined):
        return "".join(part["text"] for part in joined)
    return joined


def text_of(block: InputBlock, name: str) -> str:
    if block.text is None:
        raise invalid(f"`{name}.text` is required", f"{name}.text")
    return block.text


def unknown_block(block: InputBlock, name: str, allowed: str) -> ApiError:
    field = f"{name}.type"
    return invalid(f"`{field}` must be one of {allowed}. Given: {quoted(block.type)}", field)
