"""OpenAI's routes, with the additions of vLLM and TGI: POST /v1/chat/completions and /v1/completions, and
GET /v1/models and /v1/models/{name} for the models that a request can name.
"""

import time
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from starlette.responses import Response

from api.http.openapi import OPENAI
from api.openai.completions import read_completion
from api.openai.params import read_chat
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
from api.requests.on_pool import on_pool, pools_of, read_body
from api.requests.pool import Pool
from api.requests.service_terms import generation_body
from api.requests.validate import validate
from common.messages.adapters import PoolAdapter

router = APIRouter(responses=ERROR_RESPONSES, tags=[OPENAI])
models_router = APIRouter(tags=[OPENAI])
CHAT_EXAMPLE = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 100}
COMPLETION_EXAMPLE = {"prompt": "The capital of France is", "max_tokens": 20}
NO_CATALOGUE: list[Any] = []
"""The field `models`, without which Codex reads no list of models. It is a catalogue of OpenAI's own models
with their system prompts; Codex uses its defaults for a model that is not in it.
"""
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
    body = await read_body(request, ChatRequest)
    return await on_pool(request, body.model, partial(complete_chat, request, body))


async def complete_chat(request: Request, body: ChatRequest, pool: Pool) -> Response:
    """Validate and submit a chat, and respond. Raises ApiError."""
    await pool.admission.check()
    chat = await read_chat(body, pool)
    requests = await validate(chat.params, pool.workers.limits, pool.tokenizer, pool.pictures)
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
    body = await read_body(request, CompletionRequest)
    return await on_pool(request, body.model, partial(complete_prompts, request, body))


async def complete_prompts(request: Request, completion: CompletionRequest, pool: Pool) -> Response:
    """Validate and submit the prompts, and respond. Raises ApiError."""
    await pool.admission.check()
    read = await read_completion(completion, pool)
    return await respond(
        request, pool, completion, read.requests, read.num_chars, read.prefixes, read.rendering
    )


@models_router.get("/v1/models/", include_in_schema=False)
@models_router.get(
    "/v1/models", summary="List models", responses={200: {"model": ModelList}, 503: ERROR_RESPONSES[503]}
)
async def list_models(request: Request) -> dict[str, Any]:
    """Lists the model of this pool, those of other pools that have a live worker, those whose requests are
    shared out by weight, and LoRA adapters.
    """
    pools = pools_of(request)
    models = [render_model(name, pools.task_of(name)) for name in pools.served_names()]
    adapters = [render_adapter(*one) for one in pools.served_adapters()]
    return {"object": "list", "data": models + adapters, "models": NO_CATALOGUE}


@models_router.get(
    "/v1/models/{name:path}",
    summary="Retrieve a model",
    responses={200: {"model": Model}, 404: ERROR_RESPONSES[404], 503: ERROR_RESPONSES[503]},
)
async def retrieve_model(
    request: Request, name: Annotated[str, Path(description="One that `GET /v1/models` lists.")]
) -> dict[str, Any]:
    """Returns one of the models that GET /v1/models lists; 404 for others."""
    pools = pools_of(request)
    pool = await pools.find(name)
    if adapter := pool.adapters.find(name):
        return render_adapter(adapter, pool.settings.model_name)
    return render_model(pools.shown_name(name), pool.task)


def render_model(name: str, task: str = "") -> dict[str, Any]:
    kind = {"task": task} if task else {}
    return {"id": name, "object": "model", "created": STARTED_S, "owned_by": name, **kind}


def render_adapter(adapter: PoolAdapter, parent: str) -> dict[str, Any]:
    """An adapter as vLLM lists it; `parent` is its model."""
    shown = render_model(adapter.name) | {"created": adapter.added_ms // 1000, "owned_by": parent}
    return shown | {"root": adapter.path, "parent": parent}
