"""OpenAI's Responses API: what a body asks for. The conversation is that of the previous response, then the
input, in which references are resolved.

Fields that this server does not support are refused by name. Unknown names are ignored.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import orjson
from pydantic import Field, ValidationError, WithJsonSchema
from starlette.requests import Request

from api.answers.answer import HttpAnswer, ResponseParts
from api.answers.logprobs import chat_logprobs
from api.answers.scanner import CallArguments, ContentDelta, ReasoningDelta, is_json_text
from api.errors import ApiError, cut, failed, invalid, not_one_of, quoted, refuse, text_of
from api.event_loop import offload
from api.http.body import UnsupportedFields, reject_unsupported, schema_error
from api.http.openapi import Shape, event_stream
from api.json import to_json
from api.prompts.pictures import is_data, unknown_part
from api.prompts.pictures import read_part as picture_source
from api.protocols.chat import (
    CHARS_OF_MESSAGE,
    CHAT_NAMES,
    EFFORT,
    MAX_TOOLS,
    TEMPLATE_VARIABLES,
    ChatRequest,
    Effort,
    FunctionSchema,
    chat_of,
    format_of,
    read_other,
)
from api.protocols.choices import Event, EventRenderer, Logprobs, Part
from api.protocols.openai import CHAT_COMPLETIONS
from api.protocols.openai_bodies import MAX_TOKENS, TGI_FIELDS, openai_fields
from api.protocols.protocol import Context
from api.requests.fields import (
    Labels,
    Listed,
    ServedFields,
    Strict,
    Whole,
    object_schema,
    optional,
    with_one_error,
)
from api.resume import attach
from api.resume.attach import Admitted, find_own
from api.streams.stream import Stream
from api.webhooks import RESPONSE, WebhookField
from common.ids import ITEM_ID, RESPONSE_ID
from common.messages.events import Terminal
from common.messages.request import SamplingParams
from common.settings.ranges import least

Item = dict[str, Any]
ROLES = ("user", "system", "developer", "assistant")
LOGPROBS = "message.output_text.logprobs"
UNSUPPORTED: UnsupportedFields = {
    **dict.fromkeys(("access_programs", "background_options", "conversation", "image", "moderation"), ()),
    **dict.fromkeys(("previous_input_messages", "prompt", "prompt_cache_options"), ()),
    **dict.fromkeys(("beam_search_diversity_rate", "diversity"), (0.0,)),
    **dict.fromkeys(("early_stopping", "use_beam_search"), (False,)),
    "beam_width": (1,),
    "context_management": ([],),
    "length_penalty": (1.0,),
}
"""Fields that are refused by name."""
HINTS = ("guided_decoding_backend", "modalities", "reasoning_effort", "request_id")
"""Other routes' fields that have no effect here, as clients may send them to every route."""

Included = Literal[
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "reasoning.encrypted_content",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
]
TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
"""Types of content parts that have a `text`."""
FORMATS = ("text", "json_object", "json_schema")
BUILT_IN_TOOLS = (
    *("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11"),
    *("image_generation", "code_interpreter", "file_search", "mcp", "tool_search", "custom"),
    *("computer", "computer_use_preview", "local_shell", "shell", "apply_patch"),
)
"""Types of tools that no model here can call: OpenAI's servers run them, or its models have learnt them.
Agents declare them to every model.
"""
AnyTool = Annotated[dict[str, Any], WithJsonSchema(object_schema(("function", "namespace", *BUILT_IN_TOOLS)))]
TEXT = {"type": "string"}
PART_SCHEMA = {
    "anyOf": [
        object_schema(TEXT_PARTS, "text", text=TEXT),
        object_schema(["refusal"], "refusal", refusal=TEXT),
        object_schema(["input_image"], "image_url"),
    ]
}
PARTS = {"type": "array", "items": PART_SCHEMA}
CONTENT = {"anyOf": [TEXT, PARTS]}
REASONING = {"anyOf": [PARTS, {"type": "null"}]}
CALLED = {"call_id": TEXT, "name": TEXT, "arguments": TEXT}
ITEM_SCHEMA: Any = {
    "anyOf": [
        object_schema(["message", None], "role", "content", role={"enum": [*ROLES]}, content=CONTENT),
        object_schema(["function_call"], *CALLED, **CALLED),
        object_schema(["function_call_output"], "call_id", "output", call_id=TEXT, output=CONTENT),
        object_schema(["reasoning"], summary=REASONING, content=REASONING),
        object_schema(["item_reference", None], "id", id=TEXT),
    ]
}
Input = Annotated[
    str | Listed[Annotated[dict[str, Any], WithJsonSchema(ITEM_SCHEMA)]],
    with_one_error("Input should be a string or a list of items"),
]


class ResponseStreamOptions(Strict):
    include_obfuscation: Literal[False] | None = optional("Only false is supported: events have no padding.")


class TextOptions(Strict):
    format: Annotated[dict[str, Any], WithJsonSchema(object_schema(FORMATS))] | None = optional(
        'What the text must look like: `{"type": "json_schema", "name": …, "schema": …}`, '
        '`{"type": "json_object"}` or `{"type": "text"}`.'
    )
    verbosity: str | None = optional("Has no effect.")


class ReasoningOptions(Strict):
    effort: Effort | None = EFFORT
    summary: Literal["auto", "concise", "detailed"] | None = optional(
        "With any value, the reasoning is shown as its own summary."
    )


class ResponsesRequest(ServedFields):
    """The body of /v1/responses, with the sampling parameters of vLLM. Null and absent mean the default.

    `user`, `safety_identifier`, `prompt_cache_key` and other labels have no effect.
    """

    input: Input = Field(
        description="A text, or the items of a conversation: messages, calls of functions and their outputs, "
        "references to items of stored responses. For models that see, a part may be a picture: `input_image`"
        " with `image_url`, a URL.",
        json_schema_extra={"minItems": 1},
    )
    instructions: str | None = optional("A system message before the conversation, for this response only.")
    webhook: WebhookField | None = None
    max_output_tokens: int | None = least(1, MAX_TOKENS)
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = optional(
        "Keep the response, so that it can be retrieved and continued. Default: true."
    )
    background: bool | None = optional(
        "Respond at once; the response is made without a client, and retrieved. Default: false."
    )
    previous_response_id: str | None = optional("A stored response whose conversation goes on with `input`.")
    metadata: Labels | None = optional("Up to 16 labels; the response has them, too.")
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include_reasoning: bool | None = optional("Return the reasoning. Default: true.")
    chat_template_kwargs: dict[str, Any] | None = TEMPLATE_VARIABLES
    tools: Listed[AnyTool] | None = optional(
        'Functions that the model may call: `{"type": "function", "name": …, "parameters": …}`. '
        'Those of a `{"type": "namespace", "name": …, "tools": […]}` are called with its name, too. '
        "Tools that only OpenAI's servers or models have (`web_search`, …) are left out of the prompt.",
        max_length=MAX_TOOLS,
    )
    tool_choice: str | dict[str, Any] | None = optional(
        "`auto` (the default): the model decides. `none`: no calls. `required`: one call at "
        'least. `{"type": "function", "name": …}`: one call of this function. '
        '`{"type": "allowed_tools", "mode": "auto", "tools": […]}`: only these.'
    )
    parallel_tool_calls: bool | None = None
    max_tool_calls: Whole | None = optional("Has no effect: no tool is built in.")
    truncation: Literal["disabled"] | None = optional(
        "`disabled`: an input that does not fit into the context is refused."
    )
    include: Listed[Included] | None = optional(
        "Additional parts of the output; no tool is built in to have any."
    )
    top_logprobs: int | None = least(
        0, f"The number of likeliest tokens to report; `include` must have `{LOGPROBS}`."
    )
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    user: str | None = None

    @property
    def detached(self) -> bool:
        """Whether nobody waits for it."""
        return bool(self.background)

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in (self.include or [])

    def check(self) -> None:
        """Raises ApiError for unsupported fields and contradictions."""
        others = openai_fields().union(TGI_FIELDS).difference(HINTS)
        reject_unsupported(self.model_extra or {}, UNSUPPORTED, others)
        refuse(
            (
                self.background and not self.is_stored,
                "`background` needs `store`: true, so that the response can be retrieved",
            ),
            (
                self.background and self.resume_s is not None,
                "`background` waits for no client: leave `resume_s` out",
                "resume_s",
            ),
            (
                self.stream_options is not None and not self.stream,
                "`stream_options` is only allowed with `stream`: true",
            ),
            (self.top_logprobs and not self.has_logprobs, f"`top_logprobs` needs `{LOGPROBS}` in `include`"),
        )


# --- input items --------------------------------------------------------------------------------------------


ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
"""Types of items → the prefixes of their ids."""


def read_item(given: Mapping[str, Any], name: str, request_id: str, i: int, sees: bool) -> Item:
    """The item in position `i` of `input`, complete; a reference stays as it is. Raises ApiError.

    Args:
        sees: whether the model sees pictures.
    """
    kind = kind_of(given)
    if kind == "item_reference":
        return {"type": kind, "id": text_of(given, "id", name)}
    if kind not in ID_PREFIXES:
        raise not_one_of(f"{name}.type", (*ID_PREFIXES, "item_reference"), kind)
    if given.get("id") is not None:
        text_of(given, "id", name)
    head = {
        "id": given.get("id") or item_id(ID_PREFIXES[kind], request_id, f"i{i}"),
        "type": kind,
        "status": "completed",
    }
    match kind:
        case "message":
            return head | read_message(given, name, sees)
        case "function_call":
            of_namespace = ("namespace",) if given.get("namespace") is not None else ()
            keys = ("call_id", *of_namespace, "name", "arguments")
            return head | {key: text_of(given, key, name) for key in keys}
        case "function_call_output":
            output = given.get("output")
            if not isinstance(output, str):
                output = read_parts(output, f"{name}.output", "input_text", sees)
            return head | {"call_id": text_of(given, "call_id", name), "output": output}
        case _:  # reasoning, without its encrypted content, which cannot be read here
            lists = {"summary": "summary_text", "content": "reasoning_text"}
            return head | {
                key: read_parts(given.get(key) or [], f"{name}.{key}", kind) for key, kind in lists.items()
            }


def kind_of(given: Mapping[str, Any]) -> str:
    """The type of an item; messages and references may leave it out."""
    kind = given.get("type")
    if kind is None:
        return "message" if "role" in given or "content" in given else "item_reference"
    return kind if isinstance(kind, str) else repr(kind)


def read_message(given: Mapping[str, Any], name: str, sees: bool) -> Item:
    role = given.get("role")
    if role not in ROLES:
        raise not_one_of(f"{name}.role", ROLES, role)
    content, kind = given.get("content"), "output_text" if role == "assistant" else "input_text"
    if isinstance(content, str):
        return {"role": role, "content": [new_part(content, kind)]}
    return {"role": role, "content": read_parts(content, f"{name}.content", kind, sees)}


def read_parts(given: Any, name: str, kind: str, sees: bool = False) -> list[dict[str, Any]]:
    """The parts of a content; all texts become parts of the type `kind`. Raises ApiError."""
    if not isinstance(given, list) or not all(isinstance(part, dict) for part in given):
        raise invalid(f"`{name}` must be a text or a list of parts")
    return [read_part(part, f"{name}[{i}]", kind, sees) for i, part in enumerate(given)]


def read_part(given: Mapping[str, Any], name: str, kind: str, sees: bool) -> dict[str, Any]:
    if given.get("type") == "refusal":
        return new_part(text_of(given, "refusal", name), kind)
    if sees and given.get("type") == "input_image" and kind == "input_text":
        url = picture_source(given, name).url
        return {"type": "input_image", "image_url": url, "detail": given.get("detail") or "auto"}
    if given.get("type") not in TEXT_PARTS:
        raise unknown_part(given.get("type"), name, name, sees)
    return new_part(text_of(given, "text", name), kind)


def new_part(text: str, kind: str) -> dict[str, Any]:
    return {"type": kind, "text": text} | ({"annotations": []} if kind == "output_text" else {})


def join_text(content: str | Sequence[Mapping[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def chat_content(content: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """A content as a chat's message has it: a text, or parts where there are pictures."""
    if isinstance(content, str) or not any(part["type"] == "input_image" for part in content):
        return join_text(content)
    return [
        {"type": "image_url", "image_url": {"url": part["image_url"], "detail": part["detail"]}}
        if part["type"] == "input_image"
        else {"type": "text", "text": part["text"]}
        for part in content
    ]


# --- the response, as /docs describes it --------------------------------------------------------------------


ITEM = {
    "id": "msg_5f0f8c0e_0",
    "type": ("message", "function_call", "function_call_output", "reasoning"),
    ...: ...,
}
RESPONSE_SHAPE = Shape(
    "ResponseObject",
    {
        "id": "resp_5f0f8c0e",
        "object": "response",
        "created_at": 1764000000,
        "status": ("completed", "queued", "in_progress", "incomplete", "failed", "cancelled"),
        "error": (None, {"code": "server_error", "message": "Request failed during generation"}),
        "incomplete_details": (None, {"reason": "max_output_tokens"}),
        "model": "SmolLM2",
        "output": [ITEM],
        "usage": (
            {
                "input_tokens": 12,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": 20,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": 32,
            },
            None,
        ),
        "metadata": {},
        "tools": [{}],
        "tool_choice": ("auto", {}),
        "parallel_tool_calls": True,
        ...: ...,
    },
)
RESPONSE_EVENT = Shape(
    "ResponseEvent", {"type": "response.output_text.delta", "sequence_number": 4, ...: ...}
)


class ItemForm(NamedTuple):
    """A kind of items.

    Attributes:
        id_prefix: of its items.
        texts, parts: what events call its text, and its part; a call has no part.
        part_type: of its part.
        place: where events say that its part is.
    """

    id_prefix: str
    texts: str
    parts: str = ""
    part_type: str = ""
    place: Mapping[str, int] = {}


MESSAGE, CALL = "message", "function_call"
FORMS = {
    MESSAGE: ItemForm("msg", "output_text", "content_part", "output_text", {"content_index": 0}),
    "reasoning": ItemForm("rs", "reasoning_text", "content_part", "reasoning_text", {"content_index": 0}),
    "summary": ItemForm(
        "rs", "reasoning_summary_text", "reasoning_summary_part", "summary_text", {"summary_index": 0}
    ),
    CALL: ItemForm("fc", "function_call_arguments"),
}
"""Kinds of items: the answer's text; reasoning, and reasoning as its own summary, where the client asked for
one; a call of a function, whose text is the arguments in JSON.
"""


def item_id(prefix: str, request_id: str, position: int | str) -> str:
    """Id of an item; its position is a number in the output, or `i` and a number in the input."""
    return f"{prefix}_{request_id}_{position}"


def shown_logprobs(part: Part, logprobs: Logprobs) -> dict[str, Any]:
    return {"logprobs": logprobs} if part.kind == MESSAGE else {}


def content_of(part: Part) -> Item:
    """The only part of an item's content."""
    of_message = {"annotations": [], "logprobs": [*part.logprobs]} if part.kind == MESSAGE else {}
    return {"type": FORMS[part.kind].part_type, **of_message, "text": part.text}


# --- the response -------------------------------------------------------------------------------------------


ENDS = {"completed": "response.completed", "incomplete": "response.incomplete"}
"""Last events by status; any other end is a failure."""
SUPERSEDED = "superseded"
"""Error type of a stream that another reader has taken."""
SHOWN_TIERS = {"interactive": "priority", "standard": "default", "batch": "flex"}
"""Classes → the service tiers that a response shows."""
ERROR_CODES = {408: "timeout", 424: "server_error"}
"""`error.code` of a response that failed, by the status of its error; others are faults of the request."""


def response_id(request_id: str) -> str:
    return f"resp_{request_id}"


def fields_of(answer: HttpAnswer) -> Any:
    """The fields of the object that say what was requested: `store` and `background` among them."""
    assert answer.response is not None
    return orjson.loads(answer.response.fields)


def is_stored(answer: HttpAnswer) -> bool:
    """Whether it is a response that can be retrieved and continued."""
    return answer.response is not None and fields_of(answer)["store"]


class ResponseObjectRenderer(EventRenderer):
    """Renders one response, piece by piece.

    Attributes:
        fields: as of `fields_of`.
        called: functions of namespaces, as the model calls them → what an item says of them.
        num_shown: tokens whose log-probabilities were shown; others have not shown any text yet.
    """

    has_sequence = True

    def __init__(self, answer: HttpAnswer, streams: Sequence[Stream]) -> None:
        super().__init__(answer, streams)
        self.fields = fields_of(answer)
        reasoning = "summary" if self.fields["reasoning"]["summary"] else "reasoning"
        self.kinds = {ContentDelta: MESSAGE, ReasoningDelta: reasoning, CallArguments: CALL}
        self.called = {
            flat_name(tool): {key: tool[key] for key in ("namespace", "name")}
            for tool in flat_tools(self.fields["tools"]).values()
            if tool.get("namespace") and "name" in tool
        }
        self.num_shown = 0

    # --- events ---------------------------------------------------------------------------------------------

    def render_first_chunks(self) -> list[Event]:
        status = "queued" if self.fields["background"] else "in_progress"
        kinds = ["created", "queued"] if self.fields["background"] else ["created"]
        first = [{"type": f"response.{kind}", "response": self.render(status)} for kind in kinds]
        return [*first, {"type": "response.in_progress", "response": self.render("in_progress")}]

    def new_logprobs(self) -> Logprobs:
        begin, self.num_shown = self.num_shown, self.choice.num_tokens
        has_logprobs = self.answer.rendering.logprobs
        return chat_logprobs(self.stream, range(begin, self.num_shown)) if has_logprobs else []

    def render_last_chunks(self) -> list[Event]:
        """The end of the last item, an empty message if there is none, and that of the response."""
        opened = [] if self.parts else self.begin(MESSAGE)
        ended = self.finish("completed" if self.status == "completed" else "incomplete")
        return [*opened, *ended, {"type": ENDS[self.status], "response": self.render()}]

    def render_failure(self, failure: Terminal) -> Event:
        if failure.error_type == SUPERSEDED:
            return {"type": "error", "code": SUPERSEDED, "message": failure.error, "param": None}
        if self.parts:
            self.parts[-1].status = "incomplete"
        return {"type": "response.failed", "response": self.render()}

    # --- items ----------------------------------------------------------------------------------------------

    def begun(self, part: Part) -> list[Event]:
        added = self.item_event(part, "added", [])
        return [added, self.part_event(part, "added")] if FORMS[part.kind].parts else [added]

    def added(self, part: Part, text: str, logprobs: Logprobs) -> list[Event]:
        return [self.text_event(part, "delta", delta=text) | shown_logprobs(part, logprobs)]

    def ended(self, part: Part) -> list[Event]:
        """The arguments of an incomplete call are never done: clients would run the call."""
        if part.kind == CALL and not is_json_text(part.text):
            part.status = "incomplete"
        done: list[Event] = []
        if part.kind != CALL:
            text = self.text_event(part, "done", text=part.text) | shown_logprobs(part, part.logprobs)
            done = [text, self.part_event(part, "done")]
        elif part.status == "completed":
            name = self.shown_name(part)["name"]
            done = [self.text_event(part, "done", name=name, arguments=part.text)]
        return [*done, self.item_event(part, "done", [content_of(part)])]

    def item_event(self, part: Part, what: str, content: list[Item]) -> Event:
        item = self.render_item(part, content)
        return {"type": f"response.output_item.{what}", "output_index": part.index, "item": item}

    def text_event(self, part: Part, what: str, /, **more: Any) -> Event:
        form = FORMS[part.kind]
        head = {"type": f"response.{form.texts}.{what}", "item_id": self.id_of(part)}
        return {**head, "output_index": part.index, **form.place, **more}

    def part_event(self, part: Part, what: str) -> Event:
        kind = {"type": f"response.{FORMS[part.kind].parts}.{what}"}
        return self.text_event(part, what, part=content_of(part)) | kind

    def render_item(self, part: Part, content: list[Item]) -> Item:
        """An item as it is now, with this content, which a call does not have."""
        head = {"id": self.id_of(part), "type": part.kind, "status": part.status}
        match part.kind:
            case "message":
                return head | {"content": content, "role": "assistant"}
            case "function_call":
                return head | {"arguments": part.text, "call_id": part.call[0], **self.shown_name(part)}
        field = "content" if part.kind == "reasoning" else "summary"
        own = {"summary": [], "content": [], field: content}
        return head | {"type": "reasoning", **own, "encrypted_content": None}

    def shown_name(self, call: Part) -> dict[str, str]:
        return self.called.get(call.call[1], {"name": call.call[1]})

    def id_of(self, part: Part) -> str:
        return item_id(FORMS[part.kind].id_prefix, self.answer.request_id, part.index)

    # --- the object -----------------------------------------------------------------------------------------

    @property
    def status(self) -> str:
        terminal = self.stream.terminal
        if terminal is None:
            return "in_progress" if self.stream.ids or self.stream.worker else "queued"
        if self.stream.finished:
            is_cut = self.choice.is_within_call or self.choice.finish_reason == "length"
            return "incomplete" if is_cut else "completed"
        return "cancelled" if terminal.reason == "cancelled" else "failed"

    def render(self, status: str = "") -> dict[str, Any]:
        """The response as it is now, or as it would be in another status."""
        status = status or self.status
        terminal = self.stream.terminal
        is_cut = status == "incomplete" and terminal is not None and terminal.known_reason == "length"
        incomplete = {"reason": "max_output_tokens"} if is_cut else None
        error = None
        if status == "failed" and terminal is not None:
            cause = failed(terminal)
            code = ERROR_CODES.get(cause.status, "invalid_prompt")
            error = {"code": code, "message": cause.text}
        return {
            "id": response_id(self.answer.request_id),
            "object": "response",
            "created_at": self.answer.created_s,
            "status": status,
            "error": error,
            "incomplete_details": incomplete,
            "model": self.answer.model,
            "output": [self.render_item(part, [content_of(part)]) for part in self.parts],
            **self.fields,
            "service_tier": SHOWN_TIERS[self.answer.requests[0].class_name],
            "usage": self.usage() if status in ENDS else None,
        }

    def usage(self) -> dict[str, Any]:
        """Token counts; of the generated tokens, only those that were taken."""
        parser, num_reasoning = self.parser, 0
        if parser is not None and parser.reading.reasoning:
            num_reasoning = parser.num_reasoning_tokens
        num_input, num_output = self.answer.num_prompt_tokens, self.choice.num_tokens
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": self.stream.num_cached, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": num_input + num_output,
        }


# --- conversation -------------------------------------------------------------------------------------------


def input_of(answer: HttpAnswer) -> list[Item]:
    """The items of the conversation before a response, then its own input items."""
    assert answer.response is not None
    return [*orjson.loads(answer.response.before), *orjson.loads(answer.response.items)]


async def find_response(request: Request, response_id: str) -> Admitted | None:
    """The response with this id, if it was created with this request's API key. Raises ApiError (503)."""
    matched = RESPONSE_ID.fullmatch(response_id)
    admitted = await find_own(request, matched[1]) if matched else None
    return admitted if admitted is not None and is_stored(admitted.answer) else None


async def read_response(stored: Admitted) -> Stream:
    """The response's stream, with what is committed so far. Raises ApiError (503)."""
    [stream] = await attach.read_committed(stored)
    return stream


async def render_response(stored: Admitted, stream: Stream) -> dict[str, Any]:
    """The response object with what is committed so far."""
    renderer = ResponseObjectRenderer(stored.answer, [stream])
    return await offload(stream.num_records, renderer.render_so_far)


async def read_output(stored: Admitted) -> list[Item] | None:
    """The output of a response; None if it has not finished, or has failed."""
    rendered = await render_response(stored, await read_response(stored))
    return rendered["output"] if rendered["status"] in ("completed", "incomplete") else None


async def resolve_references(request: Request | None, items: list[Item]) -> list[Item]:
    """The items; each reference is replaced by the item that it names. Raises ApiError, also for one in a
    job.
    """
    by_request: dict[str, dict[str, Item]] = {}
    resolved = []
    for i, item in enumerate(items):
        if item["type"] == "item_reference":
            if request is None:
                name = f"input[{i}].type"
                raise invalid(f"`{name}`: references to items are not served in a batch")
            matched = ITEM_ID.fullmatch(item["id"])
            request_id = matched[1] if matched else ""
            if request_id not in by_request:
                stored = await find_response(request, response_id(request_id))
                found = [*input_of(stored.answer), *(await read_output(stored) or [])] if stored else []
                by_request[request_id] = {item["id"]: item for item in found}
            if item["id"] not in by_request[request_id]:
                name = f"input[{i}].id"
                raise invalid(f"`{name}`: there is no stored item {quoted(item['id'])}")
            item = by_request[request_id][item["id"]]
        resolved.append(item)
    return resolved


# --- as a chat ----------------------------------------------------------------------------------------------


PREVIOUS = "previous_response_id"
RESPONSE_NAMES = {
    **CHAT_NAMES,
    "prompt": "input",
    r"messages.*": "input",
    "max_new_tokens": "max_output_tokens",
    r"(tools\[\d+\])\.function(.*)": r"\1\2",
    r"reasoning_effort": "reasoning.effort",
    r"response_format(\.json_schema)?(.*)": r"text.format\2",
}
"""Patterns of names of a chat's fields and parameters → what they are called in a response."""


def to_chat(body: ResponsesRequest, items: Sequence[Item]) -> ChatRequest:
    """The body of a chat with the parameters of a response and these items. Raises ApiError."""
    messages = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    for item in items:
        add_item(messages, item)
    return chat_of(
        body,
        messages,
        to_functions(body),
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.has_logprobs,
        top_logprobs=body.top_logprobs,
        add_generation_prompt=True,
        tool_choice=body.tool_choice,
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=format_of(body.text.format if body.text else None, "text.format", FORMATS),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        include_reasoning=body.include_reasoning,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def flat_name(called: Mapping[str, Any]) -> str:
    """What the model calls a function by; those of a namespace have its name before their own."""
    namespace = called.get("namespace")
    return f"{namespace}__{called['name']}" if namespace else str(called["name"])


def flat_tools(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The tools by their places; those of a namespace have its name as `namespace`. Raises ApiError."""
    found: dict[str, Mapping[str, Any]] = {}
    for i, tool in enumerate(tools):
        place = f"tools[{i}]"
        if tool.get("type") != "namespace":
            found[place] = tool
            continue
        name, inner = text_of(tool, "name", place), tool.get("tools")
        if not isinstance(inner, list) or not all(isinstance(one, dict) for one in inner):
            raise invalid(f"`{place}.tools` must be a list of tools")
        found |= {f"{place}.tools[{j}]": {**one, "namespace": name} for j, one in enumerate(inner)}
    if len(found) > MAX_TOOLS:
        raise invalid(f"`tools` must have at most {MAX_TOOLS} tools, those of namespaces among them")
    return found


def to_functions(body: ResponsesRequest) -> list[FunctionSchema]:
    """The functions among the tools. Raises ApiError, also if another is forced."""
    functions = []
    for name, tool in flat_tools(body.tools or []).items():
        kind = tool.get("type")
        if kind in BUILT_IN_TOOLS:
            continue
        if kind != "function":
            words = f"must be function: no tool is built in. Given: {quoted(kind)}"
            raise invalid(f"`{name}.type` {words}")
        given = {key: tool[key] for key in ("name", "description", "parameters", "strict") if key in tool}
        if isinstance(tool.get("name"), str):
            given["name"] = flat_name(tool)
        try:
            functions.append(FunctionSchema.model_validate(given))
        except ValidationError as error:
            raise schema_error(error, name) from error
    kind = body.tool_choice.get("type") if isinstance(body.tool_choice, dict) else None
    is_built_in = f"`tool_choice` forces a tool of the type {quoted(kind)}: none is built in"
    refuse(
        (kind in BUILT_IN_TOOLS, is_built_in, "tool_choice"),
        (
            body.tools and not functions and body.tool_choice == "required",
            "`tool_choice` forces a call, but none of `tools` is a function",
        ),
    )
    return functions


def add_item(messages: list[dict[str, Any]], item: Item) -> None:
    """Add an item to the last message, or as a new one. Reasoning, text and calls of one answer are one."""
    match item["type"]:
        case "function_call_output":
            content = chat_content(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        case "function_call":
            function = {"name": flat_name(item), "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        case "reasoning":
            text = join_text(item["content"] or item["summary"])
            messages.append({"role": "assistant", "content": "", "reasoning_content": text})
        case _:
            last = messages[-1] if messages else {}
            is_reasoning = "reasoning_content" in last and not last["content"] and "tool_calls" not in last
            if item["role"] == "assistant" and is_reasoning:  # it is only reasoning so far
                last["content"] = join_text(item["content"])
            else:
                messages.append({"role": item["role"], "content": chat_content(item["content"])})


# --- the row ------------------------------------------------------------------------------------------------


NOT_IN_JOBS = ("background", "previous_response_id")
"""Fields that need a response which is stored."""


async def read_response_body(body: ResponsesRequest, context: Context) -> HttpAnswer:
    """What a body asks for. Of a job nothing is stored, so it begins no conversation and goes on with none.
    Raises ApiError.
    """
    pool, request, answer_id = context.pool, context.request, context.answer_id
    if request is None:
        for name in NOT_IN_JOBS:
            if getattr(body, name):
                raise invalid(f"`{name}` is not served in a batch, which stores no response")
        answer_id = hashlib.blake2b(answer_id.encode(), digest_size=16).hexdigest()
    before, previous_id = [], body.previous_response_id
    if request is not None and previous_id is not None:
        if (stored := await find_response(request, previous_id)) is None:
            text = f"Previous response with id '{cut(previous_id)}' not found."
            raise ApiError(422, "validation", text, PREVIOUS, "previous_response_not_found")
        if (output := await read_output(stored)) is None:
            raise invalid(f"`{PREVIOUS}`: that response is not completed")
        before = [*input_of(stored.answer), *output]
    size = CHARS_OF_MESSAGE * len(body.input) if isinstance(body.input, list) else 0
    sees = pool.tokenizer.pictures is not None
    given = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    if not given:
        raise invalid("`input` cannot be empty")
    items = await offload(
        size, lambda: [read_item(one, f"input[{i}]", answer_id, i, sees) for i, one in enumerate(given)]
    )
    items = await resolve_references(request, items)
    contents = [item.get("content") or item.get("output") for item in items]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    has_data = any(part["type"] == "input_image" and is_data(part["image_url"]) for part in parts)
    if request is not None and has_data:
        refuse(
            (body.store, "`store` must be false beside pictures as data: URLs; they are not stored"),
            (body.background, "`background` stores the response: give pictures as https: URLs"),
        )
    if request is None or has_data:
        body = body.model_copy(update={"store": False})
    all_items = [*before, *items]
    asked = await offload(CHARS_OF_MESSAGE * len(all_items), lambda: to_chat(body, all_items))
    params = await read_other(asked, pool, RESPONSE_NAMES)
    fields = response_fields(body, params.sampling)
    response = ResponseParts(to_json(fields), to_json(before), to_json(items))
    return await context._replace(answer_id=answer_id).ask([params], response=response)


ECHOED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key"),
    *("safety_identifier", "user"),
)
"""Fields of the body that the response has as they are."""


def response_fields(body: ResponsesRequest, sampling: SamplingParams) -> dict[str, Any]:
    """The fields of the response object that say what was requested; its tier is known with the answer."""
    form, reasoning = body.text and body.text.format, body.reasoning or ReasoningOptions()
    return {
        **{name: getattr(body, name) for name in ECHOED},
        "background": bool(body.background),
        "completed_at": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "service_tier": None,
        "store": body.is_stored,
        "temperature": sampling.temperature,
        "text": {"format": form or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": body.truncation or "disabled",
    }


RESPONSES = CHAT_COMPLETIONS._replace(
    path="/v1/responses",
    name="create_response",
    span="responses",
    body=ResponsesRequest,
    read=read_response_body,
    renderer=ResponseObjectRenderer,
    job="response",
    prompt=["input"],
    in_jobs=False,
    event=RESPONSE,
    example={"input": "Why is the sky blue?", "max_output_tokens": 100},
    summary="Create a response",
    description=(
        "Generates the next items of a conversation. With `stream`, they come as typed events with sequence "
        "numbers. With `background`, the response is queued, and outlives every process of the fleet."
    ),
    whole=RESPONSE_SHAPE,
    events=event_stream([RESPONSE_EVENT]),
)
