"""TGI's routes: POST /generate, /generate_stream and / make text of a prompt; GET /info shows the model and
its limits.
"""

import os
from functools import partial
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request
from sse_starlette import EventSourceResponse
from starlette.responses import Response

from api.answers.answer import Rendering
from api.errors import unavailable
from api.http import body
from api.http.openapi import TGI, error_responses, event_stream
from api.json import to_json
from api.requests.on_pool import on_adapter, own_pool
from api.requests.pool import Pool
from api.requests.respond import new_answer, submit_and_respond
from api.requests.service_terms import generation_body
from api.requests.validate import validate
from api.tgi.render import RENDERER, check_best_of, with_own_seeds
from api.tgi.request_schemas import CompatGenerateRequest, GenerateParameters, GenerateRequest
from api.tgi.response_schemas import GENERATE_ERRORS, ErrorResponse, GenerateResponse, Info, StreamResponse
from common.messages.request import EMBED

router = APIRouter(responses=GENERATE_ERRORS, tags=[TGI])
info_router = APIRouter(
    responses=error_responses(ErrorResponse, {503: "No worker has been ready yet"}), tags=[TGI]
)
EXAMPLE = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 20}}
EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": event_stream([StreamResponse, ErrorResponse])}}


@router.post(
    "/generate",
    summary="Generate text",
    openapi_extra=generation_body(GenerateRequest, EXAMPLE),
    responses={200: {"model": GenerateResponse}},
)
async def generate(request: Request) -> Response:
    """Returns the whole text when generation has finished. With `details`, the response has the tokens with
    their log-probabilities, the seed and the finish reason.
    """
    return await respond(request, GenerateRequest, streamed=False)


@router.post(
    "/generate_stream",
    summary="Generate a stream of tokens",
    openapi_extra=generation_body(GenerateRequest, EXAMPLE),
    responses=EVENTS,
    response_class=EventSourceResponse,
)
async def generate_stream(request: Request) -> Response:
    """Sends each token as a server-sent event (`data: {…}`) as soon as it is generated. The last event has
    the whole text in `generated_text`. A request that fails midway ends with an event that has `error`.
    """
    return await respond(request, GenerateRequest, streamed=True)


@router.post(
    "/",
    summary="Generate text, or a stream of tokens",
    openapi_extra=generation_body(CompatGenerateRequest, EXAMPLE),
    responses={200: {"model": list[GenerateResponse], **EVENTS[200]}},
)
async def compat_generate(request: Request) -> Response:
    """Does what /generate_stream does if `stream` is true, else what /generate does, with the response in an
    array of one. The text begins with the prompt unless `return_full_text` is false.
    """
    return await respond(request, CompatGenerateRequest, full_text=True)


async def respond(
    request: Request, shape: type[GenerateRequest], streamed: bool | None = None, full_text: bool = False
) -> Response:
    """Read, validate, submit and answer a request. Raises ApiError.

    Args:
        streamed: None means that the body's field `stream` decides.
        full_text: the default of `return_full_text`.
    """
    parsed = await body.read(request, shape, own_pool(request).max_body_bytes)
    if streamed is None:
        streamed = isinstance(parsed, CompatGenerateRequest) and bool(parsed.stream)
    serve = partial(generate_on, request, parsed, streamed, full_text)
    return await on_adapter(request, parsed.adapter_id, None, serve)


async def generate_on(
    request: Request, parsed: GenerateRequest, streamed: bool, full_text: bool, pool: Pool
) -> Response:
    """Validate and submit the request, and respond. Raises ApiError."""
    parameters = parsed.parameters or GenerateParameters()
    await pool.admission.check()
    params, limits = parsed.generation_params(streamed), pool.workers.limits
    check_best_of(params, limits, streamed)
    requests = await validate(params, limits, pool.tokenizer, pool.pictures)
    requests = with_own_seeds(requests) if params.n > 1 else requests
    if parameters.return_full_text is not None:
        full_text = parameters.return_full_text
    answer = new_answer(
        request,
        pool,
        requests=requests,
        prefixes=[parsed.inputs if full_text else ""],
        rendering=Rendering(details=parameters.wants_details),
        streamed=streamed,
        resume_s=parsed.resume_s,
        detached=parsed.detached,
        webhook=parsed.webhook,
    )
    return await submit_and_respond(request, pool, answer, len(parsed.inputs), RENDERER)


@info_router.get("/info", summary="Model and limits", responses={200: {"model": Info}})
async def info(request: Request) -> Response:
    """Returns the limits of the smallest worker. Once known, they stay when the workers stop."""
    pool = own_pool(request)
    settings, workers = pool.settings, pool.workers
    if not workers.max_total_tokens:
        await workers.refresh_unless_fresh()
    if not workers.max_total_tokens:
        raise unavailable(workers.last_error or "no worker is ready yet")
    limits = workers.limits
    known = Info(
        model_id=settings.model_name,
        model_sha=settings.revision,
        model_pipeline_tag=pipeline_tag(pool),
        max_concurrent_requests=settings.max_concurrent_requests,
        max_best_of=settings.max_best_of,
        max_beam_width=limits.max_beam_width,
        max_stop_sequences=settings.max_stop_sequences,
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        validation_workers=pool.tokenizer.budget.num_threads,
        max_client_batch_size=limits.max_client_batch_size,
        router="tokenfleet",
        version=version("tokenfleet"),
        sha=None,
        adapters=[one.name for one in pool.adapters.registry.ready],
        docker_label=os.environ.get("DOCKER_LABEL"),
    )
    return Response(to_json(known.model_dump(exclude_unset=True)), media_type="application/json")


def pipeline_tag(pool: Pool) -> str:
    """The hub's word for what a model makes."""
    pooling = pool.pooling
    if pooling is None:
        return "image-text-to-text" if pool.shows_pictures else "text-generation"
    return "feature-extraction" if pooling.kind == EMBED else "text-ranking"
