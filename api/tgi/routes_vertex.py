"""POST /vertex: several prompts or chats in one request, as Vertex AI sends them to TGI."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Discriminator, Field, Tag
from starlette.requests import Request
from starlette.responses import Response

from api.errors import ApiError, invalid, quoted
from api.event_loop.offload import offload
from api.event_loop.pace import Pace
from api.http import body
from api.http.openapi import TGI
from api.http.resume_terms import read_terms
from api.inference.fields import Listed, Strict
from api.inference.limits import Limits
from api.inference.params import GenerationParams
from api.inference.pool import Pool
from api.inference.pool_registry import own_pool, pools_of
from api.inference.respond import new_answer, submit_and_respond
from api.inference.validate import validate
from api.openai.chat_params import read_chat
from api.openai.request_schemas import ChatRequest
from api.service.headers import generation_body
from api.tgi.answers import RENDERER, VERTEX
from api.tgi.request_schemas import GenerateRequest
from api.tgi.response_schemas import GENERATE_ERRORS, Predictions
from common.messages.answer import Rendering

router = APIRouter(responses=GENERATE_ERRORS, tags=[TGI])
Instance = GenerateRequest | ChatRequest
EXAMPLE = {"instances": [{"inputs": "The capital of France is", "parameters": {"max_new_tokens": 20}}]}


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


class UninspectedInstances(Strict):
    """The instances before each is read: a hundred thousand of them take a second."""

    instances: list[Any]


@router.post(
    VERTEX,
    summary="Generate several texts",
    openapi_extra=generation_body(VertexRequest, EXAMPLE),
    responses={200: {"model": Predictions}},
)
async def vertex(request: Request) -> Response:
    """Returns a text for each instance. Prompts are sampled, unless `do_sample` is false, as in TGI."""
    pool = own_pool(request)
    data = await body.read_json(request, pool.settings.payload_limit)
    await pool.admission.check()
    limits = pool.workers.limits
    uninspected = await offload(len(data), lambda: body.parse_body(UninspectedInstances, data))
    check_number(uninspected.instances, limits)
    parsed = await offload(len(data), lambda: body.parse_body(VertexRequest, data))
    found, requests, pace = [], [], Pace()
    for i, one in enumerate(parsed.instances):
        params = await read_instance(request, pool, one, i)
        found.append(params)
        requests += await validate(params, limits, pool.tokenizer)
        await pace.step()
    answer = new_answer(
        request, pool, requests=requests, prefixes=[""] * len(requests), rendering=Rendering()
    )
    num_chars = sum(len(params.text or "") for params in found)
    return await submit_and_respond(request, pool, answer, num_chars, RENDERER)


def check_number(instances: Sequence[object], limits: Limits) -> None:
    most = limits.max_client_batch_size
    if not 0 < len(instances) <= most:
        raise invalid(f"`instances` must have 1 to {most} items. Given: {len(instances)}", "instances")


async def read_instance(request: Request, pool: Pool, instance: Instance, i: int) -> GenerationParams:
    """The parameters of one instance. Raises ApiError, which says which one it is."""
    where = f"instances[{i}]"
    try:
        read_terms(request, "", False, instance.resume_s, instance.detached)  # refuses both: nothing streams
        if isinstance(instance, ChatRequest):
            params = await read_messages(request, pool, instance)
        else:
            params = read_prompt(instance)
        if params.n > 1:
            name = params.name("n")
            raise invalid(
                f"`{name}` must be 1: each instance has one prediction. Given: {quoted(params.n)}", name
            )
    except ApiError as error:
        text = f"`{where}`: {error.text}"
        raise ApiError(error.status, error.error_type, text, where, error.code) from error
    return params


def read_prompt(instance: GenerateRequest) -> GenerationParams:
    is_greedy = instance.parameters is not None and instance.parameters.do_sample is False
    return replace(instance.generation_params(streamed=False), do_sample=not is_greedy)


async def read_messages(request: Request, pool: Pool, chat: ChatRequest) -> GenerationParams:
    chat.check()
    if chat.stream:
        raise invalid("`stream` must be false: the answer has all predictions", "stream")
    if await pools_of(request).find(chat.model) is not pool:
        raise invalid(f"`model` must be this fleet's own. Given: {quoted(chat.model)}", "model")
    return (await read_chat(chat, pool)).params
