"""OpenAI's routes, with the additions of vLLM and TGI: POST /v1/chat/completions and /v1/completions, and
GET /v1/models and /v1/models/{name} for the models that a request can name.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from api.errors import asking_broker, invalid
from api.event_loop import Pace
from api.grammar.compile import describes_json
from api.http.openapi import OPENAI
from api.openai.params import from_completion, read_chat, read_prompts
from api.openai.render import echoed_prompt
from api.openai.request_schemas import ChatRequest, CompletionRequest
from api.openai.respond import respond
from api.openai.response_schemas import (
    ERROR_RESPONSES,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    CompletionChunk,
    Model,
    ModelList,
    response_or_chunks,
)
from api.requests.logits import check_size
from api.requests.params import Limits
from api.requests.pool_registry import pool_and_body, pools_of
from api.requests.service_terms import generation_body
from api.requests.validate import validate, with_truncate

router = APIRouter(responses=ERROR_RESPONSES, tags=[OPENAI])
models_router = APIRouter(tags=[OPENAI])
CHAT_EXAMPLE = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 100}
COMPLETION_EXAMPLE = {"prompt": "The capital of France is", "max_tokens": 20}
STARTED_S = int(time.time())
"""Unix time at which this gateway started; it stands for the creation time of its models."""


@router.post(
    "/v1/chat/completions",
    summary="Create a chat completion",
    openapi_extra=generation_body(ChatRequest, CHAT_EXAMPLE),
    responses=response_or_chunks(ChatCompletion, ChatCompletionChunk),
)
async def chat_completions(request: Request) -> Response:
    """Generates the assistant's next message. With `stream`, it comes as server-sent events, a chunk for each
    token, and ends with `data: [DONE]`.
    """
    pool, body = await pool_and_body(request, ChatRequest)
    await pool.admission.check()
    chat = await read_chat(body, pool)
    requests = await validate(chat.params, pool.workers.limits, pool.tokenizer)
    num_chars = len(chat.params.text or "")
    return await respond(request, pool, body, requests, num_chars, [chat.prefix], chat.rendering)


@router.post(
    "/v1/completions",
    summary="Create a completion",
    openapi_extra=generation_body(CompletionRequest, COMPLETION_EXAMPLE),
    responses=response_or_chunks(Completion, CompletionChunk),
)
async def completions(request: Request) -> Response:
    """Continues one prompt or several. `choices` has the `n` choices of the first prompt, then those of the
    next. With `stream`, they come as server-sent events, a chunk for each token, and end with `data: [DONE]`.
    """
    pool, completion = await pool_and_body(request, CompletionRequest)
    await pool.admission.check()
    limits, tokenizer = pool.workers.limits, pool.tokenizer
    prompts = read_prompts(completion.prompt)
    check_num_prompts(prompts, limits)
    all_params = from_completion(completion.with_defaults(tokenizer.sampling_defaults), prompts)
    requests, prefixes, pace = [], [], Pace()
    for params in (with_truncate(params, limits) for params in all_params):
        choices = await validate(params, limits, tokenizer)
        requests += choices
        prefixes.append(echoed_prompt(completion, params, choices[0], tokenizer))
        await pace.step()
    check_size(requests, limits.settings)
    num_chars = sum(len(params.text or "") for params in all_params)
    rendering = replace(completion.rendering, is_json=describes_json(completion.grammar()))
    return await respond(request, pool, completion, requests, num_chars, prefixes, rendering)


def check_num_prompts(prompts: Sequence[object], limits: Limits) -> None:
    if len(prompts) > limits.max_client_batch_size:
        raise invalid(
            f"`prompt` supports up to {limits.max_client_batch_size} prompts. Given: {len(prompts)}", "prompt"
        )


@models_router.get("/v1/models/", include_in_schema=False)
@models_router.get(
    "/v1/models", summary="List models", responses={200: {"model": ModelList}, 503: ERROR_RESPONSES[503]}
)
async def list_models(request: Request) -> dict[str, Any]:
    """Lists the model of this pool, and those of other pools that have a live worker."""
    pools = pools_of(request)
    settings = pools.own.settings
    async with asking_broker():
        others = await pools.names_of_others()
    names = (*(settings.served_model_name or (settings.model_id,)), *others)
    return {"object": "list", "data": [render_model(name) for name in names]}


@models_router.get(
    "/v1/models/{name:path}",
    summary="Retrieve a model",
    responses={200: {"model": Model}, 404: ERROR_RESPONSES[404], 503: ERROR_RESPONSES[503]},
)
async def retrieve_model(
    request: Request, name: Annotated[str, Path(description="One that `GET /v1/models` lists.")]
) -> dict[str, Any]:
    """Returns one of the models that GET /v1/models lists; 404 for others."""
    pool = await pools_of(request).find(name)
    return render_model(pool.settings.model_name)


def render_model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": STARTED_S, "owned_by": name}
