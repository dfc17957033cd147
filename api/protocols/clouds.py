"""Routes of cloud platforms: POST /invocations, which SageMaker sends to TGI and vLLM, and POST /vertex,
which Vertex AI sends to TGI: several prompts or chats.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Discriminator, Field, Tag
from starlette.responses import Response
from starlette.types import Message

from api.answers.answer import Rendering
from api.errors import ApiError, invalid, quoted
from api.event_loop import Pace, offload
from api.http import body
from api.http.openapi import TGI
from api.protocols.openai import chat_completions, completions
from api.protocols.openai_bodies import ChatRequest, read_chat
from api.protocols.tgi import (
    EVENTS,
    EXAMPLE,
    RENDERER,
    VERTEX,
    CompatGenerateRequest,
    GenerateRequest,
    compat_generate,
)
from api.requests.fields import Listed, Strict
from api.requests.logits import check_no_logits
from api.requests.on_pool import (
    adapter_of,
    allowed_adapter,
    check_adapter_id,
    on_pool,
    own_pool,
    pools_of,
)
from api.requests.params import GenerationParams, Limits
from api.requests.pool import Pool
from api.requests.respond import new_answer, read_terms, submit_and_respond, with_adapter
from api.requests.service_terms import generation_body
from api.requests.validate import validate
from api.tgi.response_schemas import GENERATE_ERRORS, GenerateResponse, Predictions
from api.webhooks.field import WebhookField

router = APIRouter(responses=GENERATE_ERRORS, tags=[TGI])
Route = Callable[[Request], Awaitable[Response]]
ROUTES: dict[str, tuple[str, Route]] = {
    "inputs": ("/", compat_generate),
    "messages": ("/v1/chat/completions", chat_completions),
    "prompt": ("/v1/completions", completions),
}
"""For /invocations: the field by which a body is recognised → the path and the route that answer it."""
VERTEX_EXAMPLE = {"instances": [{"inputs": "The capital of France is", "parameters": {"max_new_tokens": 20}}]}
Instance = GenerateRequest | ChatRequest


@router.post(
    "/invocations",
    summary="Generate as another route does",
    openapi_extra=generation_body(CompatGenerateRequest, EXAMPLE),
    responses={200: {"model": list[GenerateResponse], **EVENTS[200]}},
)
async def invocations(request: Request) -> Response:
    """A body with `inputs` is answered as by `/`, one with `messages` as by `/v1/chat/completions`, one with
    `prompt` as by `/v1/completions`. Errors are TGI's.
    """
    data = await body.read_json(request, own_pool(request).max_body_bytes)
    names = await body.names_in(data)
    path, route = next((ROUTES[name] for name in ROUTES if name in names), ROUTES["inputs"])
    return await route(readdressed(request, path, data))


def readdressed(request: Request, path: str, data: bytes) -> Request:
    """The request at another path; its body, which has been read, can be read again."""
    unread: list[Message] = [{"type": "http.request", "body": data, "more_body": False}]

    async def receive() -> Message:
        return unread.pop() if unread else await request.receive()

    return Request({**request.scope, "path": path, "raw_path": path.encode()}, receive)


def kind_of(instance: Any) -> str:
    return "chat" if isinstance(instance, Mapping) and "messages" in instance else "prompt"


class VertexRequest(Strict):
    """The body of /vertex."""

    instances: Listed[
        Annotated[
            Annotated[GenerateRequest, Tag("prompt")] | Annotated[ChatRequest, Tag("chat")],
            Discriminator(kind_of),
        ]
    ] = Field(
        description="Each is a body of `/generate`, or of `/v1/chat/completions`.",
        json_schema_extra={"minItems": 1},
    )
    webhook: WebhookField | None = None


class UninspectedInstances(Strict):
    """The body before its instances are validated: their number is checked first, because validating a
    hundred thousand of them takes a second.
    """

    instances: list[Any]


@router.post(
    VERTEX,
    summary="Generate several texts",
    openapi_extra=generation_body(VertexRequest, VERTEX_EXAMPLE),
    responses={200: {"model": Predictions}},
)
async def vertex(request: Request) -> Response:
    """Returns a text for each instance. Prompts are sampled, unless `do_sample` is false, as in TGI."""
    data = await body.read_json(request, own_pool(request).max_body_bytes)
    return await on_pool(request, None, partial(predict_on, request, data))


async def predict_on(request: Request, data: bytes, pool: Pool) -> Response:
    """Validate and submit the instances, and respond. Raises ApiError."""
    await pool.admission.check()
    limits = pool.workers.limits
    uninspected = await offload(len(data), lambda: body.parse_body(UninspectedInstances, data))
    check_number(uninspected.instances, limits)
    parsed = await offload(len(data), lambda: body.parse_body(VertexRequest, data))
    all_params, requests, pace = [], [], Pace()
    for i, one in enumerate(parsed.instances):
        params, adapter = await read_instance(request, pool, one, i)
        all_params.append(params)
        found = await validate(params, limits, pool.tokenizer, pool.pictures)
        requests += with_adapter(found, adapter)
        await pace.step()
    answer = new_answer(
        request,
        pool,
        requests=requests,
        prefixes=[""] * len(requests),
        rendering=Rendering(),
        webhook=parsed.webhook,
    )
    num_chars = sum(len(params.text or "") for params in all_params)
    return await submit_and_respond(request, pool, answer, num_chars, RENDERER)


def check_number(instances: Sequence[object], limits: Limits) -> None:
    max_items = limits.max_client_batch_size
    if not 0 < len(instances) <= max_items:
        raise invalid(f"`instances` must have 1 to {max_items} items. Given: {len(instances)}", "instances")


async def read_instance(
    request: Request, pool: Pool, instance: Instance, i: int
) -> tuple[GenerationParams, str]:
    """The parameters of one instance, and the key of its adapter. Raises ApiError that names the instance."""
    where = f"instances[{i}]"
    try:
        read_terms(request, "", False, instance.resume_s, instance.detached)  # refuses both fields
        if instance.webhook is not None:
            raise invalid("`webhook` stands beside `instances`: one event tells the end of all", "webhook")
        if isinstance(instance, ChatRequest):
            params, num_texts = await read_messages(request, pool, instance), instance.n or 1
        else:
            params = read_prompt(instance)
            num_texts = params.n
        adapter = await instance_adapter(request, pool, instance)
        check_no_logits(params)
        if num_texts > 1:
            name = params.name("n")
            raise invalid(
                f"`{name}` must be 1: each instance has one prediction. Given: {quoted(num_texts)}", name
            )
    except ApiError as error:
        text = f"`{where}`: {error.text}"
        raise ApiError(error.status, error.error_type, text, where, error.code) from error
    if params.beams is not None:
        params = replace(params, beams=replace(params.beams, num_returned=1))
    return params, adapter


async def instance_adapter(request: Request, pool: Pool, instance: Instance) -> str:
    """The key of the adapter that an instance names; empty for none. Raises ApiError."""
    if isinstance(instance, ChatRequest):
        name = adapter_of(pools_of(request), instance.model)
        return await allowed_adapter(request, pool, name) if name else ""
    if instance.adapter_id is None:
        return ""
    await check_adapter_id(request, instance.adapter_id)
    return await allowed_adapter(request, pool, instance.adapter_id)


def read_prompt(instance: GenerateRequest) -> GenerationParams:
    params = instance.generation_params(streamed=False)
    is_greedy = instance.parameters is not None and instance.parameters.do_sample is False
    return params if params.beams else replace(params, do_sample=not is_greedy)


async def read_messages(request: Request, pool: Pool, chat: ChatRequest) -> GenerationParams:
    chat.check()
    if chat.stream:
        raise invalid("`stream` must be false: the answer has all predictions", "stream")
    pools = pools_of(request)
    if not pools.means_own(chat.model):
        await pools.find(chat.model)  # raises, if there is no such model
        raise invalid(f"`model` must be this fleet's own. Given: {quoted(chat.model)}", "model")
    return (await read_chat(chat, pool)).params
