"""Routes of cloud platforms: POST /invocations, which SageMaker sends to TGI and vLLM, and POST /vertex,
which Vertex AI sends to TGI: several prompts or chats.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag
from starlette.requests import Request

from api.errors import ApiError, invalid, quoted, tgi
from api.event_loop import Pace, offload
from api.http.body import parse_body
from api.http.openapi import TGI, TGI_ERRORS, Shape, only
from api.json import to_json
from api.protocols.openai import CHAT_COMPLETIONS, COMPLETIONS
from api.protocols.openai_bodies import ChatRequest, read_chat
from api.protocols.protocol import Asked, Context, Protocol, Renderer, WholeBody
from api.protocols.tgi import COMPAT_GENERATE, GENERATE_ERRORS, GenerateRequest
from api.requests.fields import Listed, Strict
from api.requests.on_pool import allowed_adapter, check_adapter_id, pools_of
from api.requests.pool import Pool
from api.requests.respond import read_terms, with_adapter
from api.requests.validate import GenerationParams, check_no_logits
from api.streams.beams import all_outputs
from api.webhooks import WebhookField

PREDICTIONS = Shape("Predictions", {"predictions": [" Paris."]})
INSTANCE_BYTES = 1000
"""Validating an instance takes about as long as reading this many bytes."""
VERTEX_EXAMPLE = {"instances": [{"inputs": "The capital of France is", "parameters": {"max_new_tokens": 20}}]}
Instance = GenerateRequest | ChatRequest


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
    webhook: WebhookField | None = None


async def read_vertex(body: UninspectedInstances, context: Context) -> Asked:
    """What the instances ask for. Prompts are sampled, unless `do_sample` is false, as in TGI. Raises
    ApiError.
    """
    request = context.request
    assert request is not None
    number, most = len(body.instances), context.pool.workers.limits.max_client_batch_size
    if not 0 < number <= most:
        raise invalid(f"`instances` must have 1 to {most} items. Given: {number}", "instances")
    data = to_json({"instances": body.instances})
    parsed = await offload(INSTANCE_BYTES * number, lambda: parse_body(VertexRequest, data))
    requests, num_chars, pace = [], 0, Pace()
    for i, one in enumerate(parsed.instances):
        params, adapter = await read_instance(request, context.pool, one, i)
        num_chars += len(params.text or "")
        requests += with_adapter(await context.validate(params), adapter)
        await pace.step()
    return Asked(requests, [""] * len(requests), num_chars=num_chars)


class PredictionsRenderer(Renderer):
    def whole(self) -> WholeBody:
        outputs = all_outputs(self.streams)
        body = to_json({"predictions": [output.text for output in outputs]})
        return body, sum(output.num_tokens for output in outputs)


async def read_instance(
    request: Request, pool: Pool, instance: Instance, i: int
) -> tuple[GenerationParams, str]:
    """The parameters of one instance, and the key of its adapter. Raises ApiError that names the instance."""
    where = f"instances[{i}]"
    try:
        instance.check()
        read_terms(request, "", False, instance.resume_s, instance.detached)  # refuses both fields
        if instance.webhook is not None:
            raise invalid("`webhook` stands beside `instances`: one event tells the end of all", "webhook")
        if isinstance(instance, ChatRequest):
            params, num_texts = await read_messages(request, pool, instance), instance.n or 1
        else:
            params = instance.generation_params(streamed=False)
            is_greedy = instance.parameters is not None and instance.parameters.do_sample is False
            params = params if params.beams else replace(params, do_sample=not is_greedy)
            num_texts = params.n
        if isinstance(instance, ChatRequest):
            adapter_id: str | None = pools_of(request).resolve(instance.model).adapter
        elif (adapter_id := instance.adapter_id) is not None:
            await check_adapter_id(request, adapter_id)
        adapter = await allowed_adapter(request, pool, adapter_id)
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


async def read_messages(request: Request, pool: Pool, chat: ChatRequest) -> GenerationParams:
    if chat.stream:
        raise invalid("`stream` must be false: the answer has all predictions", "stream")
    pools = pools_of(request)
    if pools.own.settings.pool not in pools.resolve(chat.model).pools:
        await pools.find(chat.model)  # raises, if there is no such model
        raise invalid(f"`model` must be this fleet's own. Given: {quoted(chat.model)}", "model")
    return (await read_chat(chat, pool)).params


VERTEX = Protocol(
    path="/vertex",
    name="vertex",
    span="vertex_compatibility",
    body=UninspectedInstances,
    shown_body=VertexRequest,
    read=read_vertex,
    renderer=PredictionsRenderer,
    error=tgi,
    streams=False,
    tag=TGI,
    errors=GENERATE_ERRORS | only(TGI_ERRORS, 404),
    example=VERTEX_EXAMPLE,
    summary="Generate several texts",
    description=(
        "Returns a text for each instance. Prompts are sampled, unless `do_sample` is false, as in TGI."
    ),
    whole=PREDICTIONS,
)
INVOCATIONS = COMPAT_GENERATE._replace(
    path="/invocations",
    name="invocations",
    span="generate",
    resumable=False,
    by_field={"inputs": COMPAT_GENERATE, "messages": CHAT_COMPLETIONS, "prompt": COMPLETIONS},
    summary="Generate as another route does",
    description=(
        "A body with `inputs` is answered as by `/`, one with `messages` as by `/v1/chat/completions`, one "
        "with `prompt` as by `/v1/completions`. Errors are TGI's."
    ),
)
