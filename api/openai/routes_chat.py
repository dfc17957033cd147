"""POST /v1/chat/completions: as in OpenAI's API, with the additions of vLLM and TGI."""

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.http.openapi import OPENAI, json_body
from api.inference.validate import validate
from api.openai import chat_prompt
from api.openai.accept import accept
from api.openai.params import from_chat
from api.openai.request_schemas import ChatRequest
from api.openai.respond import respond
from api.openai.response_schemas import (
    ERROR_RESPONSES,
    ChatCompletion,
    ChatCompletionChunk,
    response_or_chunks,
)

router = APIRouter(responses=ERROR_RESPONSES, tags=[OPENAI])
EXAMPLE = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 100}


@router.post(
    "/v1/chat/completions",
    summary="Create a chat completion",
    openapi_extra=json_body(ChatRequest, EXAMPLE),
    responses=response_or_chunks(ChatCompletion, ChatCompletionChunk),
)
async def chat_completions(request: Request) -> Response:
    """Generates the assistant's next message. With `stream`, it comes as server-sent events, a chunk for each
    token, and ends with `data: [DONE]`.
    """
    arrived_s = time.monotonic()
    pool, chat = await accept(request, ChatRequest)
    await pool.admission.check()
    prompt = await chat_prompt.chat_prompt_text(chat, pool.tokenizer.chat_template)
    requests = await validate(from_chat(chat, prompt), pool.workers.limits, pool.tokenizer)
    return await respond(
        request,
        pool,
        chat,
        requests,
        len(prompt),
        [chat_prompt.echoed_message(chat)],
        arrived_s,
    )
