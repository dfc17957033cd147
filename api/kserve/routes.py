"""KServe's routes (the open inference protocol, version 2): health, metadata, …/infer with tensors of texts,
and …/generate and …/generate_stream. Where TGI has the route, the JSON is TGI's.
"""

from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from sse_starlette import EventSourceResponse
from starlette.responses import Response

from api.answers.answer import Rendering
from api.errors import invalid
from api.event_loop import Pace
from api.http import body
from api.http.openapi import KSERVE, event_stream, only
from api.json import to_json
from api.kserve.render import RENDERER, VERSION
from api.kserve.request_schemas import (
    TEXT_OUTPUT,
    InferRequest,
    KServeGenerateRequest,
    KServeParameters,
    generation_params,
)
from api.kserve.response_schemas import (
    ERRORS,
    InferResponse,
    KServeError,
    LiveResponse,
    ModelMetadata,
    ModelReady,
    ServerMetadata,
    TextChunk,
    TextResponse,
)
from api.requests.logits import check_no_logits
from api.requests.on_pool import on_adapter, own_pool, pools_of
from api.requests.params import GenerationParams
from api.requests.pool import Pool
from api.requests.respond import new_answer, submit_and_respond
from api.requests.service_terms import generation_body
from api.requests.validate import validate
from api.tgi.render import check_best_of, with_own_seeds
from common.messages.request import Generate

router = APIRouter(
    responses=only(ERRORS, 400, 401, 403, 404, 408, 413, 415, 422, 424, 429, 500, 503), tags=[KSERVE]
)
info_router = APIRouter(responses=only(ERRORS, 404, 503), tags=[KSERVE])
ready_router = APIRouter(responses=only(ERRORS, 404, 503), tags=[KSERVE])

MODEL = "/v2/models/{model:path}"
VERSIONED = f"{MODEL}/versions/{{model_version}}"
"""Its routes come before those of MODEL, and `ready_router` before `info_router`: names may have slashes."""
ModelName = Annotated[str, Path(description="One that `GET /v1/models` lists.")]
ModelVersion = Annotated[str, Path(description=f"Any: a model has one version, {VERSION}.")]
EXTENSIONS = ["infer", "ready", "generate"]
EXAMPLE = {"text_input": "The capital of France is", "parameters": {"max_tokens": 20}}
INFER_EXAMPLE: dict[str, Any] = {
    "id": "1",
    "inputs": [
        {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["The capital of France is"]}
    ],
    "outputs": [{"name": TEXT_OUTPUT}],
    "parameters": {"max_new_tokens": 20},
}

# --- health and metadata ------------------------------------------------------------------------------------


@info_router.get("/v2/health/live", summary="Whether this gateway runs")
async def kserve_live() -> LiveResponse:
    """Returns 200 as long as the gateway answers."""
    return LiveResponse(live=True)


@ready_router.get("/v2/health/ready", summary="Whether requests would be served")
async def kserve_ready(request: Request) -> LiveResponse:
    """Returns 200 if a worker, a batcher and the broker are live, of this gateway's pool or of another one
    that serves its model; else 503.
    """
    await (await pools_of(request).find(None)).check()
    return LiveResponse(live=True)


@info_router.get("/v2", summary="Server metadata")
async def kserve_server() -> ServerMetadata:
    """Returns the server's name, its version, and what it offers besides inference."""
    extensions = ["health", "models", "metrics", "generate"]
    return ServerMetadata(name="tokenfleet", version=version("tokenfleet"), extensions=extensions)


@ready_router.get(f"{VERSIONED}/ready", summary="Whether a version of a model is ready")
async def kserve_version_ready(
    request: Request, model: ModelName, model_version: ModelVersion
) -> LiveResponse:
    """Returns 200 if a request for the model would be served now, else 503."""
    await (await pools_of(request).find(model)).check()
    return LiveResponse(live=True)


@info_router.get(VERSIONED, summary="Metadata of a version of a model")
async def kserve_version(request: Request, model: ModelName, model_version: ModelVersion) -> ServerMetadata:
    """Returns the model's name and version, and what can be asked of it."""
    await pools_of(request).find(model)
    return ServerMetadata(name=model, version=model_version, extensions=EXTENSIONS)


@ready_router.get(f"{MODEL}/ready", summary="Whether a model is ready")
async def kserve_model_ready(request: Request, model: ModelName) -> ModelReady:
    """Returns 200 if a request for the model would be served now, else 503."""
    await (await pools_of(request).find(model)).check()
    return ModelReady(name=model, ready=True)


@info_router.get(MODEL, summary="Metadata of a model", responses={200: {"model": ModelMetadata}})
async def kserve_model(request: Request, model: ModelName) -> Response:
    """Returns the model's tensors: texts in, texts out."""
    await pools_of(request).find(model)
    tensors = [[{"name": name, "datatype": "BYTES", "shape": [-1]}] for name in ("text_input", TEXT_OUTPUT)]
    fields = {"name": model, "versions": [VERSION], "platform": "pytorch_transformers"}
    return Response(
        to_json(fields | {"inputs": tensors[0], "outputs": tensors[1]}), media_type="application/json"
    )


# --- generation ---------------------------------------------------------------------------------------------


@router.post(
    f"{MODEL}/generate",
    summary="Generate text for KServe",
    openapi_extra=generation_body(KServeGenerateRequest, EXAMPLE),
    responses={200: {"model": TextResponse}},
)
@router.post(f"{VERSIONED}/generate", include_in_schema=False)
async def kserve_generate(request: Request, model: ModelName) -> Response:
    """Returns the whole text when generation has finished."""
    return await generate(request, model, streamed=False)


@router.post(
    f"{MODEL}/generate_stream",
    summary="Generate a stream of texts for KServe",
    openapi_extra=generation_body(KServeGenerateRequest, EXAMPLE),
    responses={200: {"content": event_stream([TextChunk, KServeError])}},
    response_class=EventSourceResponse,
)
@router.post(f"{VERSIONED}/generate_stream", include_in_schema=False)
async def kserve_generate_stream(request: Request, model: ModelName) -> Response:
    """Sends the text that each token adds as a server-sent event. A request that fails midway ends with an
    event that has `error`.
    """
    return await generate(request, model, streamed=True)


@router.post(
    f"{MODEL}/infer",
    summary="Generate texts for tensors of prompts",
    openapi_extra=generation_body(InferRequest, INFER_EXAMPLE),
    responses={200: {"model": InferResponse}},
)
@router.post(f"{VERSIONED}/infer", include_in_schema=False)
async def kserve_infer(request: Request, model: ModelName) -> Response:
    """Returns an output for each input, in their order."""
    parsed = await body.read(request, InferRequest, own_pool(request).max_body_bytes)
    adapter_id = parsed.parameters.adapter_id if parsed.parameters else None
    return await on_adapter(request, adapter_id, model, partial(infer_on, request, parsed))


async def infer_on(request: Request, parsed: InferRequest, pool: Pool) -> Response:
    """Validate and submit the texts, and respond. Raises ApiError."""
    await pool.admission.check()
    parameters = parsed.parameters or KServeParameters()
    prompts, pace = parsed.prompts(), Pace()
    check_number(prompts, pool)
    requests: list[Generate] = []
    for text, field in prompts:
        params = generation_params(text, field, parameters, streamed=False)
        requests += await choices(params, pool, streamed=False)
        await pace.step()
    prefixes = [text if parameters.wants_full_text else "" for text, _ in prompts]
    answer = new_answer(
        request,
        pool,
        requests=requests,
        prefixes=prefixes,
        rendering=Rendering(),
        webhook=parsed.webhook,
    )
    answer = replace(answer, infer=parsed.describe_outputs())
    return await submit_and_respond(request, pool, answer, sum(len(text) for text, _ in prompts), RENDERER)


async def generate(request: Request, model: str, streamed: bool) -> Response:
    """Read, validate, submit and answer a text. Raises ApiError."""
    parsed = await body.read(request, KServeGenerateRequest, own_pool(request).max_body_bytes)
    serve = partial(generate_on, request, parsed, streamed)
    return await on_adapter(request, parsed.parameters.adapter_id, model, serve)


async def generate_on(
    request: Request, parsed: KServeGenerateRequest, streamed: bool, pool: Pool
) -> Response:
    """Validate and submit a text, and respond. Raises ApiError."""
    await pool.admission.check()
    text, parameters = parsed.text_input, parsed.parameters
    answer = new_answer(
        request,
        pool,
        requests=await choices(parsed.generation_params(streamed), pool, streamed),
        prefixes=[text if parameters.wants_full_text else ""],
        rendering=Rendering(details=parameters.wants_details),
        streamed=streamed,
        resume_s=parsed.resume_s,
        detached=parsed.detached,
        webhook=parsed.webhook,
    )
    return await submit_and_respond(request, pool, answer, len(text), RENDERER)


async def choices(params: GenerationParams, pool: Pool, streamed: bool) -> list[Generate]:
    """The requests of one prompt: several with `best_of`. A beam search returns its best text. Raises
    ApiError (422).
    """
    check_no_logits(params)
    check_best_of(params, pool.workers.limits, streamed)
    if params.beams is not None:
        if streamed:
            raise invalid(
                "`beam_width` is served whole on …/generate: its texts come at the end", "beam_width"
            )
        params = replace(params, beams=replace(params.beams, num_returned=1))
    requests = await validate(params, pool.workers.limits, pool.tokenizer, pool.pictures)
    return with_own_seeds(requests) if params.n > 1 else requests


def check_number(prompts: list[tuple[str, str]], pool: Pool) -> None:
    most = pool.workers.limits.max_client_batch_size
    if not 0 < len(prompts) <= most:
        raise invalid(f"`inputs` must have 1 to {most} texts. Given: {len(prompts)}", "inputs")
