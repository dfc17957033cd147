"""OpenAI's routes, with the additions of vLLM and TGI: POST /v1/chat/completions and /v1/completions."""

from functools import partial

from fastapi import APIRouter, Request
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
    response_or_chunks,
)
from api.requests.on_pool import on_pool, read_body
from api.requests.pool import Pool
from api.requests.service_terms import generation_body
from api.requests.validate import validate

router = APIRouter(responses=ERROR_RESPONSES, tags=[OPENAI])
CHAT_EXAMPLE = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 100}
COMPLETION_EXAMPLE = {"prompt": "The capital of France is", "max_tokens": 20}


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
