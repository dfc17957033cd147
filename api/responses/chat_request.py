"""Chat request: a response's conversation as the body of a chat. The conversation is that of the previous
response, then the input, in which references are resolved.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request

from api.errors import ApiError, cut, invalid, quoted, renamed
from api.event_loop import offload
from api.grammar.compile import Grammar
from api.grammar.read import ANY_OBJECT, read_named_schema
from api.http.body import schema_error
from api.openai.params import CHARS_OF_MESSAGE, CHAT_NAMES, ChatParams, read_chat
from api.openai.request_schemas import ChatRequest
from api.openai.responses_items import Item
from api.openai.responses_object import response_id
from api.requests.chat_prompt import ChatMessage
from api.requests.fields import SamplingFields
from api.requests.pool import Pool
from api.requests.tools import ToolSchema
from api.responses.input_items import chat_content, join_text
from api.responses.request_schemas import ResponsesRequest
from api.responses.stored import StoredResponse, find_response, read_response, render_response
from common.ids import ITEM_ID

PREVIOUS = "previous_response_id"
RESPONSE_NAMES = {**CHAT_NAMES, "text": "input", "max_new_tokens": "max_output_tokens"}
"""`GenerationParams` → the names of the fields of a response, where they differ."""
FIELD_OF_CHAT = {
    r"messages.*": "input",
    r"(tools\[\d+\])\.function(.*)": r"\1\2",
    r"reasoning_effort": "reasoning.effort",
}
"""Patterns of fields of a chat → what they are called in a response."""

BUILT_IN_TOOLS = (
    *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
    *("image_generation", "code_interpreter", "file_search", "mcp", "namespace", "tool_search", "custom"),
    *("computer", "computer_use_preview", "local_shell", "shell", "apply_patch"),
)
"""Types of tools that no model here can call: OpenAI's servers run them, or its models have learnt them.
Agents declare them to every model.
"""

# --- conversation -------------------------------------------------------------------------------------------


async def read_conversation(request: Request, previous_id: str | None) -> list[Item]:
    """The items of the conversation up to the end of the previous response. Raises ApiError."""
    if previous_id is None:
        return []
    stored = await find_response(request, previous_id)
    if stored is None:
        text = f"Previous response with id '{cut(previous_id)}' not found."
        raise ApiError(422, "validation", text, PREVIOUS, "previous_response_not_found")
    output = await read_output(stored)
    if output is None:
        raise invalid(f"`{PREVIOUS}`: that response is not completed", PREVIOUS)
    return [*stored.input, *output]


async def read_output(stored: StoredResponse) -> list[Item] | None:
    """The output of a response; None if it has not finished, or has failed."""
    rendered = await render_response(stored, await read_response(stored))
    return rendered["output"] if rendered["status"] in ("completed", "incomplete") else None


async def resolve_references(request: Request, items: list[Item]) -> list[Item]:
    """The items; each reference is replaced by the item that it names. Raises ApiError."""
    by_request: dict[str, dict[str, Item]] = {}
    resolved = []
    for i, item in enumerate(items):
        if item["type"] == "item_reference":
            matched = ITEM_ID.fullmatch(item["id"])
            request_id = matched[1] if matched else ""
            if request_id not in by_request:
                by_request[request_id] = await read_all_items(request, request_id)
            if item["id"] not in by_request[request_id]:
                name = f"input[{i}].id"
                raise invalid(f"`{name}`: there is no stored item {quoted(item['id'])}", name)
            item = by_request[request_id][item["id"]]
        resolved.append(item)
    return resolved


async def read_all_items(request: Request, request_id: str) -> dict[str, Item]:
    """All items of a stored response by id; none if there is no such response. Raises ApiError."""
    stored = await find_response(request, response_id(request_id))
    if stored is None:
        return {}
    return {item["id"]: item for item in (*stored.input, *(await read_output(stored) or []))}


# --- chat ---------------------------------------------------------------------------------------------------


async def read_params(body: ResponsesRequest, items: Sequence[Item], pool: Pool) -> ChatParams:
    """The parameters of a response to the items of a conversation. Raises ApiError."""
    try:
        chat = await offload(CHARS_OF_MESSAGE * len(items), lambda: to_chat(body, items))
        read = await read_chat(chat, pool, text_grammar(body))
    except ApiError as error:
        raise renamed(error, FIELD_OF_CHAT) from error
    pictures = [replace(one, field="input") for one in read.params.pictures]
    return replace(read, params=replace(read.params, names=RESPONSE_NAMES, pictures=pictures))


def to_chat(body: ResponsesRequest, items: Sequence[Item]) -> ChatRequest:
    """The body of a chat with the parameters of a response and these items. Raises ApiError."""
    shared = {name: getattr(body, name) for name in SamplingFields.model_fields}
    return ChatRequest(
        messages=[ChatMessage(**one) for one in to_messages(body.instructions, items)],
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.has_logprobs,
        top_logprobs=body.top_logprobs,
        add_generation_prompt=True,
        tools=to_tools(body),
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning is not None else None,
        **shared,
    )


def to_tools(body: ResponsesRequest) -> list[ToolSchema]:
    """The functions among the tools, in the shape of chats. Raises ApiError, also if another is forced."""
    named = [(f"tools[{i}]", tool) for i, tool in enumerate(body.tools or [])]
    functions = [to_tool(tool, name) for name, tool in named if tool.get("type") not in BUILT_IN_TOOLS]
    if (kind := forced_kind(body.tool_choice)) in BUILT_IN_TOOLS:
        raise invalid(
            f"`tool_choice` forces a tool of the type {quoted(kind)}: none is built in", "tool_choice"
        )
    if named and not functions and body.tool_choice == "required":
        raise invalid("`tool_choice` forces a call, but none of `tools` is a function", "tool_choice")
    return functions


def forced_kind(choice: str | Mapping[str, Any] | None) -> object:
    """The type of the tool that a client chose."""
    return choice.get("type") if isinstance(choice, Mapping) else None


def to_tool(tool: Mapping[str, Any], name: str) -> ToolSchema:
    """A tool in the shape of chats. Raises ApiError."""
    if tool.get("type") != "function":
        kind = tool.get("type")
        raise invalid(
            f"`{name}.type` must be function: no tool is built in. Given: {quoted(kind)}", f"{name}.type"
        )
    function = {key: tool[key] for key in ("name", "description", "parameters", "strict") if key in tool}
    try:
        return ToolSchema.model_validate({"type": "function", "function": function})
    except ValidationError as error:
        found = schema_error(error)
        param = f"{name}.{(found.param or '').removeprefix('function.')}"
        raise invalid(f"`{param}`: {error.errors()[0]['msg']}", param) from error


def to_messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """The messages for the model's template. Reasoning, text and calls of one answer are one message."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        add_item(messages, item)
    for message in messages:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
    return messages


def add_item(messages: list[dict[str, Any]], item: Item) -> None:
    """Add an item to the last message, or as a new one."""
    match item["type"]:
        case "function_call_output":
            content = chat_content(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        case "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        case "reasoning":
            text = join_text(item["content"] or item["summary"])
            messages.append({"role": "assistant", "content": None, "reasoning_content": text})
        case _ if item["role"] == "assistant" and messages and is_only_reasoning(messages[-1]):
            messages[-1]["content"] = join_text(item["content"])
        case _:
            messages.append({"role": item["role"], "content": chat_content(item["content"])})


def is_only_reasoning(message: Mapping[str, Any]) -> bool:
    return message["content"] is None and "tool_calls" not in message


def text_grammar(body: ResponsesRequest) -> Grammar | None:
    """What the text must look like; None for any text. Raises ApiError."""
    form = body.text.format if body.text is not None else None
    if form is None:
        return None
    match form.get("type"):
        case "text":
            return None
        case "json_object":
            return Grammar("json", ANY_OBJECT, "text.format")
        case "json_schema":
            return read_named_schema(form, "text.format")
        case kind:
            name = "text.format.type"
            allowed = "text, json_object, json_schema"
            raise invalid(f"`{name}` must be one of {allowed}. Given: {quoted(kind)}", name)
