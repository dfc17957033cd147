"""POST /generate, /generate_stream and /: text from a prompt, as in TGI."""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from sse_starlette import EventSourceResponse
from starlette.responses import Response

from api.answer import describe_answer
from api.http import body, whole
from api.http.headers import prompt_headers
from api.http.openapi import TGI, event_stream, generation_body
from api.http.request_id import request_id
from api.http.resume_terms import read_terms
from api.http.sse import TokenStream, sse_frames
from api.http.state import own_pool
from api.inference.pool import Pool
from api.inference.validate import validate
from api.service.headers import on_terms
from api.tgi import best_of
from api.tgi.best_of import render_whole
from api.tgi.render import StreamBodies
from api.tgi.request_schemas import CompatGenerateRequest, GenerateParameters, GenerateRequest
from api.tgi.response_schemas import GENERATE_ERRORS, GenerateResponse, StreamResponse
from common.messages.answer import HttpAnswer, Rendering

router = APIRouter(responses=GENERATE_ERRORS, tags=[TGI])

EXAMPLE = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 20}}
EVENTS: dict[int | str, dict[str, Any]] = {200: {"content": event_stream(StreamResponse)}}


@dataclass(frozen=True, slots=True)
class AcceptedRequest:
    """A valid request of one of the routes.

    Attributes:
        arrived_s: monotonic time of its arrival.
        answer: with a request for each of the `best_of` texts.
        num_chars: length of the prompt in characters.
    """

    request: Request
    pool: Pool
    arrived_s: float
    answer: HttpAnswer
    num_chars: int

    @property
    def rendering(self) -> tuple[str, bool]:
        """The beginning of the whole text, before what is generated; whether the response has details."""
        return self.answer.prefix(0), self.answer.rendering.details


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
    return await respond_with_whole(await accept(request, GenerateRequest, streamed=False))


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
    return await respond_with_stream(await accept(request, GenerateRequest, streamed=True))


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
    call = await accept(request, CompatGenerateRequest, full_text=True)
    return await respond_with_stream(call) if call.answer.streamed else await respond_with_whole(call)


async def accept(
    request: Request, shape: type[GenerateRequest], streamed: bool | None = None, full_text: bool = False
) -> AcceptedRequest:
    """Read and validate a request. Raises ApiError.

    Args:
        streamed: None means that the body's field `stream` decides.
        full_text: the default of `return_full_text`.
    """
    arrived_s, pool = time.monotonic(), own_pool(request)
    parsed = await body.read(request, shape, pool.settings.payload_limit)
    parameters = parsed.parameters or GenerateParameters()
    await pool.admission.check()
    if streamed is None:
        streamed = isinstance(parsed, CompatGenerateRequest) and bool(parsed.stream)
    params, limits = parsed.generation_params(streamed), pool.workers.limits
    best_of.check(params, limits, streamed)
    requests = await validate(params, limits, pool.tokenizer)
    requests = best_of.with_own_seeds(requests) if params.n > 1 else requests
    requests = on_terms(request, requests, pool.settings)
    if parameters.return_full_text is not None:
        full_text = parameters.return_full_text
    prefix = parsed.inputs if full_text else ""
    own_id = request_id(request)
    answer = describe_answer(
        own_id,
        request.url.path,
        streamed,
        pool.settings.model_name,
        requests,
        [prefix],
        Rendering(details=parameters.wants_details),
        read_terms(request, own_id, streamed, parsed.resume_s, parsed.detached),
    )
    return AcceptedRequest(request, pool, arrived_s, answer, len(parsed.inputs))


async def respond_with_stream(call: AcceptedRequest) -> Response:
    admission = call.pool.admission
    [stream] = await admission.submit_all(call.answer)
    headers = prompt_headers(call.pool.settings, call.num_chars)
    frames = sse_frames(call.answer, StreamBodies(stream, *call.rendering))
    return TokenStream(call.answer, frames, [stream], headers, admission.release)


async def respond_with_whole(call: AcceptedRequest) -> Response:
    """Wait for all texts and return the best."""
    admission = call.pool.admission
    streams = await admission.submit_all(call.answer)
    headers = prompt_headers(call.pool.settings, call.num_chars)
    render = partial(render_whole, call.answer, streams, call.arrived_s)
    own_id = request_id(call.request)
    return await whole.respond_with_whole(call.request, own_id, streams, headers, render, admission.release)
