"""POST /v1/chat/completions: as in OpenAI's API, with the additions of vLLM and TGI."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.http.openapi import OPENAI
from api.inference.pool_registry import pool_and_body
from api.inference.validate import validate
from api.openai.chat_params import read_chat
from api.openai.request_schemas import ChatRequest
from api.openai.respond import respond
from api.openai.response_schemas import (
    ERROR_RESPONSES,
    ChatCompletion,
    ChatCompletionChunk,
    response_or_chunks,
)
from api.service.headers import generation_body

router = APIRouter(responses=ERROR_RESPONSES, tags=[OPENAI])
EXAMPLE = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 100}


@router.post(
    "/v1/chat/completions",
    summary="Create a chat completion",
    openapi_extra=generation_body(ChatRequest, EXAMPLE),
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
