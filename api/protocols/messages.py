"""Anthropic's Messages API: POST /v1/messages, and /v1/messages/count_tokens."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field, TypeAdapter, ValidationError, WithJsonSchema
from pydantic_core import from_json
from starlette.responses import Response

from api.answers.answer import HttpAnswer
from api.answers.scanner import CallArguments, ContentDelta, Delta, ReasoningDelta
from api.errors import anthropic, failed, invalid, not_one_of, quoted, refuse, text_of
from api.event_loop import offload
from api.http.body import UnsupportedFields, read, reject_unsupported, schema_error
from api.http.openapi import ANTHROPIC, CAUSES, Shape, answer, error_responses, event_stream, json_body
from api.json import json_response
from api.models import shown_prompt
from api.protocols.chat import (
    CHARS_OF_MESSAGE,
    CHAT_NAMES,
    FUNCTION_NAME,
    MAX_TOOLS,
    REASONING_SWITCHES,
    TEMPLATE_VARIABLES,
    ChatRequest,
    FunctionSchema,
    chat_of,
    format_of,
    read_other,
)
from api.protocols.choices import Event, EventRenderer, Logprobs, Part
from api.protocols.openai_bodies import openai_fields
from api.protocols.protocol import Context, Protocol
from api.requests.fields import (
    Listed,
    ServedFields,
    StopText,
    Strict,
    object_schema,
    optional,
    with_one_error,
)
from api.requests.pool import Pool
from api.requests.service_terms import pool_for, pools_of, read_service, read_terms, request_id
from api.requests.validate import GenerationParams
from api.webhooks import WebhookField
from common.messages.events import Terminal
from common.settings.ranges import least

# --- responses, for /docs -----------------------------------------------------------------------------------


MESSAGE = Shape(
    "MessageObject",
    {
        "id": "msg_5f0f8c0e",
        "type": "message",
        "role": "assistant",
        "model": "SmolLM2",
        "content": [
            {"type": ("text", "thinking", "tool_use"), "text?": "Because air scatters blue light.", ...: ...}
        ],
        "stop_reason": ("end_turn", "max_tokens", "stop_sequence", "tool_use", None),
        "stop_sequence": (None, "###"),
        "usage": {
            "input_tokens": 12,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 20,
            "service_tier": ("standard", "priority", "batch"),
            ...: ...,
        },
        ...: ...,
    },
)
EVENTS = (
    *("message_start", "ping", "message_delta", "message_stop", "error"),
    *("content_block_start", "content_block_delta", "content_block_stop"),
)
MESSAGE_EVENT = Shape("MessageEvent", {"type": EVENTS, ...: ...})
ANTHROPIC_ERROR = Shape(
    "AnthropicError", {"type": "error", "error": {"type": "api_error", "message": "Internal error"}}
)
ERROR_RESPONSES = error_responses(
    ANTHROPIC_ERROR,
    CAUSES
    | {
        400: "The body is not JSON, or a field is wrong or not supported",
        500: "Internal error, or the request failed during generation",
    },
)
"""All error responses by status."""

UNSUPPORTED: UnsupportedFields = {"container": (), "mcp_servers": ([],)}
"""Fields that are refused by name."""

FORMAT_SCHEMA = object_schema(["json_schema"], "schema", schema={"type": ["object", "string"]})
SchemaFormat = Annotated[dict[str, Any], WithJsonSchema(FORMAT_SCHEMA)]
USERS = ("text", "image", "document", "tool_result", "tool_reference")
ASSISTANTS = ("text", "thinking", "redacted_thinking", "tool_use")
"""Types of the blocks of a user's and of an assistant's turn."""
TEXT_BLOCKS = "Input should be a string or a list of blocks, each an object with a `type`"


class InputBlock(Strict, extra="allow"):
    """A block of a content. `cache_control` and `citations` have no effect."""

    type: str = Field(json_schema_extra={"enum": [*dict.fromkeys((*USERS, *ASSISTANTS))]})
    text: str | None = None
    source: dict[str, Any] | None = optional(
        'Of an `image`: `{"type": "base64", "media_type": …, "data": …}` or '
        '`{"type": "url", "url": …}`; of a `document`: `{"type": "text", "data": …}`.'
    )
    id: str | None = optional("Of a `tool_use`, as a message had it.")
    name: str | None = optional("Of a `tool_use`: the tool.")
    input: dict[str, Any] | None = optional("Of a `tool_use`: the arguments.")
    tool_name: str | None = optional("Of a `tool_reference`: the tool that a search found.")
    tool_use_id: str | None = optional("Of a `tool_result`: the call's `id`.")
    content: Any = optional("Of a `tool_result`: a text, or blocks.")
    thinking: str | None = optional("Of a `thinking` block: the reasoning.")


Content = Annotated[str | Listed[InputBlock], with_one_error(TEXT_BLOCKS)]


class InputMessage(Strict, extra="allow"):
    role: Literal["user", "assistant", "system"]
    content: Content


class ClientTool(Strict, extra="allow"):
    """A tool. Only those with an `input_schema` can be called: tools that Anthropic's servers run, and those
    whose schema Anthropic's models have learnt, are left out of the prompt.
    """

    type: str | None = None
    name: str | None = Field(default=None, pattern=FUNCTION_NAME)
    description: str | None = None
    input_schema: dict[str, Any] | None = optional("JSON schema of the arguments, an object's.")
    strict: bool | None = optional("Arguments match the schema, whatever `tool_choice` says.")

    @property
    def is_callable(self) -> bool:
        return self.type in (None, "custom")


class ChosenTool(Strict, extra="allow"):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = optional("Whether there is at most one call. Default: false.")


class ThinkingOptions(Strict, extra="allow"):
    """Whether the model reasons first, if its template can say so. `budget_tokens` has no effect."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]


class OutputConfig(Strict, extra="allow"):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = optional(
        "How much the model reasons, if its template can say so."
    )
    format: SchemaFormat | None = optional(
        'What the text must look like: `{"type": "json_schema", "schema": …}`.'
    )


class CountTokensRequest(ServedFields):
    """The body of /v1/messages/count_tokens. Null and absent mean the default.

    `metadata`, `cache_control`, `context_management`, `speed` and other labels and hints have no effect.
    """

    messages: Listed[InputMessage] = Field(
        description="The chat so far. Turns of the same role in a row are one turn; a last turn of the "
        "assistant is continued.",
        min_length=1,
    )
    system: Content | None = optional("The system prompt: a text, or blocks of it.")
    tools: Listed[ClientTool] | None = optional("Tools that the model may call.", max_length=MAX_TOOLS)
    tool_choice: ChosenTool | None = optional(
        '`{"type": "auto"}` (the default): the model decides. `none`: no calls. `any`: one call '
        'at least. `{"type": "tool", "name": …}`: one call of this tool.'
    )
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = TEMPLATE_VARIABLES
    output_format: SchemaFormat | None = optional("The older name of `output_config.format`.")
    stop_sequences: Listed[StopText] | None = optional(
        "Stop strings: the text ends before the first of them that appears."
    )

    def check(self) -> None:
        """Raises ApiError for unsupported fields and contradictions."""
        reject_unsupported(self.model_extra or {}, UNSUPPORTED, openai_fields() - {"max_tokens"})
        is_twice = self.output_format and self.output_config and self.output_config.format
        refuse((is_twice, "`output_format` means the same as `output_config.format`, which is given, too"))


class MessagesRequest(CountTokensRequest):
    """The body of /v1/messages. Null and absent mean the default.

    `metadata`, `cache_control`, `context_management`, `speed` and other labels and hints have no effect.
    """

    max_tokens: int = least(
        1, "The most tokens to generate; no more than the model's context leaves.", default=...
    )
    webhook: WebhookField | None = None


# --- as a chat ----------------------------------------------------------------------------------------------


FORMAT = r"response_format\.json_schema(.*)"
MESSAGE_NAMES = {
    **CHAT_NAMES,
    "stop": "stop_sequences",
    r"messages.*": "messages",
    r"tools\.(.*)\.parameters": r"tools.\1.input_schema",
    r"reasoning_effort": "output_config.effort",
    FORMAT: r"output_config.format\1",
}
"""Patterns of names of a chat's fields and parameters → what they are called here."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
BLOCKS: TypeAdapter[list[InputBlock]] = TypeAdapter(Listed[InputBlock])

NamedBlock = tuple[str, InputBlock]
"""A block with the name of its field."""
ChatPart = dict[str, Any]


async def read_messages(body: CountTokensRequest, pool: Pool) -> GenerationParams:
    """The parameters of the chat that a body asks for. Raises ApiError."""
    chat = await offload(CHARS_OF_MESSAGE * len(body.messages), lambda: to_chat(body))
    older = {} if body.output_format is None else {FORMAT: r"output_format\1"}
    read = await read_other(chat, pool, MESSAGE_NAMES | older)
    return replace(read, cuts_to_room=True)


def to_chat(body: CountTokensRequest) -> ChatRequest:
    """The body of a chat with the parameters and messages of this one. Raises ApiError."""
    messages, choice, output = to_messages(body), body.tool_choice, body.output_config or OutputConfig()
    form, place = body.output_format, "output_format"
    if form is None:
        form, place = output.format, "output_config.format"
    continues = messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    if continues and choice is not None and choice.type in ("any", "tool"):
        text = "`tool_choice` cannot force a call where the last of `messages` is the assistant's to continue"
        raise invalid(text, "tool_choice")
    return chat_of(
        body,
        messages,
        to_functions(body.tools or []),
        response_format=format_of(form, place, ["json_schema"]),
        max_tokens=body.max_tokens if isinstance(body, MessagesRequest) else None,
        stop=body.stop_sequences,
        continue_final_message=continues,
        tool_choice=to_choice(choice, body.tools or []) if choice is not None else None,
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        **reasoning_fields(body),
    )


def reasoning_fields(body: CountTokensRequest) -> dict[str, Any]:
    """The chat's fields for `thinking`, `output_config.effort` and variables of the template; without them
    the model does as it is used to.
    """
    thinking, variables = body.thinking, body.chat_template_kwargs or {}
    effort: str | None = body.output_config.effort if body.output_config is not None else None
    if thinking is not None and thinking.type == "disabled":
        effort = "none"
    elif thinking is not None and effort is None:
        variables = dict.fromkeys(REASONING_SWITCHES, True) | variables
    return {"reasoning_effort": effort, "chat_template_kwargs": variables}


# --- tools --------------------------------------------------------------------------------------------------


def to_functions(tools: Sequence[ClientTool]) -> list[FunctionSchema]:
    """The tools that can be called. Raises ApiError."""
    found = []
    for i, tool in enumerate(tools):
        if not tool.is_callable:
            continue
        for name, value in (("name", tool.name), ("input_schema", tool.input_schema)):
            if value is None:
                raise invalid(f"`tools[{i}].{name}` is required")
        given: dict[str, Any] = {"name": tool.name, "description": tool.description, "strict": tool.strict}
        found.append(FunctionSchema(**given, parameters=tool.input_schema))
    return found


def to_choice(choice: ChosenTool, tools: Sequence[ClientTool]) -> str | dict[str, Any]:
    """The choice in the shape of chats. Raises ApiError if it forces a tool that cannot be called."""
    if choice.type != "tool":
        if choice.type == "any" and tools and not any(tool.is_callable for tool in tools):
            text = "`tool_choice` forces a call, but none of `tools` has an `input_schema` to call it by"
            raise invalid(text, "tool_choice")
        return CHOICES[choice.type]
    if choice.name is None:
        raise invalid("`tool_choice.name` is required")
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


NEEDED = {
    "text": ["text"],
    "tool_use": ["id", "name", "input"],
    "tool_result": ["tool_use_id"],
    "tool_reference": ["tool_name"],
}
"""Types of blocks → the fields that they must have."""


def named_blocks(content: str | Sequence[InputBlock], name: str) -> list[NamedBlock]:
    """The blocks of a content. Raises ApiError for one that lacks a field."""
    if isinstance(content, str):
        return [(name, InputBlock(type="text", text=content))]
    named = [(f"{name}[{i}]", block) for i, block in enumerate(content)]
    for place, block in named:
        for field in NEEDED.get(block.type, ()):
            if getattr(block, field) is None:
                raise invalid(f"`{place}.{field}` is required")
    return named


def system_text(blocks: Iterable[NamedBlock]) -> str:
    """The text of a system prompt. Raises ApiError."""
    texts = []
    for name, block in blocks:
        if block.type != "text":
            raise not_one_of(f"{name}.type", ["text"], block.type)
        texts.append(block.text)
    return "\n".join(text for text in texts if text)


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
    given = block.content
    if given is None or isinstance(given, str):
        return {"role": "tool", "tool_call_id": block.tool_use_id, "content": given or ""}
    try:
        inner = BLOCKS.validate_python(given, strict=True)
    except ValidationError as error:
        raise invalid(f"`{name}.content`: {schema_error(error).text}") from error
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
                text += block.text or ""
            case "thinking":
                thinking += block.thinking or ""
            case "redacted_thinking":
                pass  # only Anthropic can read it
            case "tool_use":
                called = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": called})
            case _:
                raise not_one_of(f"{name}.type", ASSISTANTS, block.type)
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["reasoning_content"] = thinking
    return message | ({"tool_calls": calls} if calls else {})


def to_part(block: InputBlock, name: str) -> ChatPart:
    """A block of a user's turn, or of a result, as a part of a chat's content. Raises ApiError."""
    source: Mapping[str, Any] = block.source or {}
    match block.type, source.get("type"):
        case "text", _:
            return {"type": "text", "text": block.text}
        case "tool_reference", _:
            return {"type": "text", "text": block.tool_name}
        case "document", "text":
            return {"type": "text", "text": text_of(source, "data", f"{name}.source")}
        case "image", "url":
            return {"type": "image_url", "image_url": {"url": text_of(source, "url", f"{name}.source")}}
        case "image", "base64":
            kind, data = (text_of(source, key, f"{name}.source") for key in ("media_type", "data"))
            return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
        case ("image" | "document") as kind, _:
            allowed = ["base64", "url"] if kind == "image" else ["text"]
            raise not_one_of(f"{name}.source.type", allowed, source.get("type"))
    raise not_one_of(f"{name}.type", USERS, block.type)


def join_parts(parts: Iterable[ChatPart]) -> str | list[ChatPart]:
    """A content: one text, or where there are pictures the parts. Texts in a row are lines of one text."""
    joined: list[ChatPart] = []
    for part in parts:
        if joined and part["type"] == joined[-1]["type"] == "text":
            joined[-1] = {"type": "text", "text": f"{joined[-1]['text']}\n{part['text']}"}
        else:
            joined.append(part)
    if all(part["type"] == "text" for part in joined):
        return "".join(part["text"] for part in joined)
    return joined


# --- answers ------------------------------------------------------------------------------------------------


SHOWN_TIERS = {"interactive": "priority", "standard": "standard", "batch": "batch"}
"""Classes → the service tiers that a message shows."""
DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Kinds of blocks → the type of what is added to them, and the field that has it."""


class MessageRenderer(EventRenderer):
    """Renders one message, piece by piece, of blocks: `text`, `thinking` and `tool_use`."""

    kinds: Mapping[type[Delta], str] = {
        ContentDelta: "text",
        ReasoningDelta: "thinking",
        CallArguments: "tool_use",
    }

    # --- events ---------------------------------------------------------------------------------------------

    def render_first_chunks(self) -> list[Event]:
        return [{"type": "message_start", "message": self.render()}, {"type": "ping"}]

    def render_failure(self, failure: Terminal) -> Event:
        return anthropic(failed(failure))[1]

    def render_last_chunks(self) -> list[Event]:
        ended = self.finish("completed")
        end = {"type": "message_delta", "delta": self.ending(), "usage": self.usage()}
        return [*ended, end, {"type": "message_stop"}]

    def begun(self, part: Part) -> list[Event]:
        return [block_event(part, "start", content_block=self.render_block(part))]

    def added(self, part: Part, text: str, logprobs: Logprobs) -> list[Event]:
        kind, field = DELTAS[part.kind]
        return [block_event(part, "delta", delta={"type": kind, field: text})] if text else []

    def ended(self, part: Part) -> list[Event]:
        signed: list[Event] = []
        if part.kind == "thinking":
            delta = {"type": "signature_delta", "signature": self.signature(part)}
            signed = [block_event(part, "delta", delta=delta)]
        return [*signed, block_event(part, "stop")]

    def signature(self, part: Part) -> str:
        """Of reasoning that has ended. Anthropic's clients send back only reasoning that has one."""
        return "" if part.status == "in_progress" else f"{self.answer.request_id}.{part.index}"

    def render_block(self, part: Part) -> dict[str, Any]:
        """The block so far. Arguments that were cut have what is complete in them."""
        match part.kind:
            case "text":
                own: dict[str, Any] = {"text": part.text}
            case "thinking":
                own = {"thinking": part.text, "signature": self.signature(part)}
            case _:
                own = {"id": part.call[0], "name": part.call[1], "input": {}}
                with contextlib.suppress(ValueError):  # as Anthropic's own client reads those of a stream
                    own["input"] = from_json(part.text or "{}", allow_partial=True)
        return {"type": part.kind, **own}

    # --- the object -----------------------------------------------------------------------------------------

    def render(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self.answer.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.answer.model,
            "content": [self.render_block(part) for part in self.parts],
            **self.ending(),
            "usage": self.usage(),
        }

    def ending(self) -> dict[str, Any]:
        """Why the message has ended; null until then."""
        reason = self.stop_reason()
        stop = self.choice.stop_reason if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": stop}

    def stop_reason(self) -> str | None:
        reason, terminal = self.choice.finish_reason, self.stream.terminal
        if terminal is None or reason is None or reason == "tool_calls":
            return reason and "tool_use"
        if terminal.reason == "stop_sequence" and isinstance(self.choice.stop_reason, str):
            return "stop_sequence"
        return "max_tokens" if reason == "length" or self.choice.is_within_call else "end_turn"

    def usage(self) -> dict[str, Any]:
        """Token counts; of the generated tokens, only those that were taken. Before the first of them nobody
        knows what was cached, so a stream that is rendered again does not say it there either.
        """
        has_begun = self.choice.ended or self.choice.num_tokens
        num_cached = self.stream.num_cached if has_begun else 0
        return {
            "input_tokens": self.answer.num_prompt_tokens - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": self.choice.num_tokens,
            "service_tier": SHOWN_TIERS[self.answer.requests[0].class_name],
        }


def block_event(part: Part, what: str, **more: Any) -> Event:
    return {"type": f"content_block_{what}", "index": part.index, **more}


# --- routes -------------------------------------------------------------------------------------------------


router = APIRouter(responses=ERROR_RESPONSES, tags=[ANTHROPIC])
EXAMPLE = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}


async def read_message(body: MessagesRequest, context: Context) -> HttpAnswer:
    """What a body asks for. Raises ApiError."""
    return await context.ask([await read_messages(body, context.pool)])


MESSAGES = Protocol(
    path="/v1/messages",
    name="create_message",
    span="messages",
    operation="chat",
    body=MessagesRequest,
    read=read_message,
    renderer=MessageRenderer,
    error=anthropic,
    resumable=True,
    job="message",
    prompt=["messages"],
    tag=ANTHROPIC,
    errors=ERROR_RESPONSES,
    example={**EXAMPLE, "max_tokens": 100},
    summary="Create a message",
    description="Generates the assistant's next turn. With `stream`, it comes as Anthropic's typed events.",
    whole=MESSAGE,
    events=event_stream([MESSAGE_EVENT]),
)


@router.post(
    "/v1/messages/count_tokens",
    summary="Count the tokens of a message",
    openapi_extra=json_body(CountTokensRequest, EXAMPLE),
    responses=answer(Shape("TokenCount", {"input_tokens": 12})),
)
async def count_tokens(request: Request) -> Response:
    """Counts the tokens of the prompt that the same body makes at /v1/messages; nothing is generated."""
    body = await read(request, CountTokensRequest, pools_of(request).max_body_bytes)
    pool = await pool_for(request, body.model)
    read_service(request, body.priority, body.service_tier)
    read_terms(request, request_id(request), True, body.resume_s, None)
    prompt = await shown_prompt(await read_messages(body, pool), pool)
    ids = await pool.tokenizer.encode_prompt(prompt, add_special_tokens=False)
    return json_response({"input_tokens": len(ids)})
