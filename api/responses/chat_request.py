"""Chat request: the conversation of a response, as a body of /v1/chat/completions would have it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from api.chat.messages import ChatMessage
from api.errors import ApiError, invalid
from api.inference.fields import SamplingFields
from api.inference.params import GenerationParams
from api.inference.tokenizer import ModelTokenizer
from api.openai.accept import fill_defaults
from api.openai.chat_params import render_chat
from api.openai.params import CHAT_NAMES, from_chat
from api.openai.request_schemas import ChatRequest
from api.response_object.items import Item
from api.responses.input_items import join_text
from api.responses.request_schemas import ResponsesRequest
from api.structured_output.grammar import Grammar
from api.structured_output.shapes import ANY_OBJECT, schema_grammar

NAMES = {**CHAT_NAMES, "text": "input", "max_new_tokens": "max_output_tokens"}


async def read_params(
    body: ResponsesRequest, items: Sequence[Item], tokenizer: ModelTokenizer
) -> GenerationParams:
    """The parameters of a response to the items of a conversation. Raises ApiError."""
    chat = fill_defaults(to_chat(body, items), tokenizer.sampling_defaults)
    try:
        _, prompt = await render_chat(chat, None, tokenizer.chat_template)
    except ApiError as error:
        if (error.param or "").startswith("messages"):
            error.param = "input"
        raise
    return replace(from_chat(chat, prompt), grammar=text_grammar(body), names=NAMES)


def to_chat(body: ResponsesRequest, items: Sequence[Item]) -> ChatRequest:
    """The body with the names of chats. Raises ApiError."""
    check_tools(body)
    shared = {name: getattr(body, name) for name in SamplingFields.model_fields}
    return ChatRequest(
        messages=[ChatMessage(**one) for one in to_messages(body.instructions, items)],
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.has_logprobs,
        top_logprobs=body.top_logprobs,
        add_generation_prompt=True,
        **shared,
    )


def to_messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """The messages for the model's template. Raises ApiError."""
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    for i, item in enumerate(items):
        if item["type"] in ("function_call", "function_call_output"):
            raise invalid(f"`input[{i}].type`: `{item['type']}` is not supported yet", f"input[{i}].type")
        if item["type"] == "message":
            messages.append({"role": item["role"], "content": join_text(item["content"])})
    return messages


def check_tools(body: ResponsesRequest) -> None:
    if body.tools:
        raise invalid("`tools` is not supported yet", "tools")
    if body.tool_choice not in (None, "none", "auto"):
        raise invalid("`tool_choice` is not supported yet", "tool_choice")
    if body.reasoning is not None and body.reasoning.effort not in (None, "none"):
        raise invalid("`reasoning.effort` is not supported yet", "reasoning.effort")


def text_grammar(body: ResponsesRequest) -> Grammar | None:
    """What the text must look like. Raises ApiError."""
    form = body.text.format if body.text is not None else None
    if form is None:
        return None
    match form.get("type"):
        case "text":
            return None
        case "json_object":
            return Grammar("json", ANY_OBJECT, "text.format")
        case "json_schema" if "schema" in form:
            return schema_grammar(form["schema"], "text.format.schema")
        case "json_schema":
            raise invalid("`text.format.schema` is required", "text.format.schema")
        case kind:
            allowed = "text, json_object, json_schema"
            raise invalid(
                f"`text.format.type` must be one of {allowed}. Given: {kind!r:.40}", "text.format.type"
            )
