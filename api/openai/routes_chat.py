"""POST /v1/chat/completions, as OpenAI has it, with what vLLM and TGI add."""

import time
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.http.openapi import json_body
from api.inference.validate import validate
from api.openai import chat_prompt
from api.openai.accept import accept
from api.openai.params import from_chat
from api.openai.render_chat import ChatCompletionRenderer
from api.openai.request_schemas import ChatRequest
from api.openai.respond import respond
from api.openai.response_schemas import (
    ERROR_RESPONSES,
    ChatCompletion,
    ChatCompletionChunk,
    response_or_chunks,
)

router = APIRouter(responses=ERROR_RESPONSES)


@router.post(
    "/v1/chat/completions",
    openapi_extra=json_body(ChatRequest),
    responses=response_or_chunks(ChatCompletion, ChatCompletionChunk),
)
async def chat_completions(request: Request) -> Response:
    """The assistant's next message, as a stream of chunks with `stream`, else as a whole."""
    begun_s = time.monotonic()
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
        [chat_prompt.echoed_message(chat)] * len(requests),
        partial(ChatCompletionRenderer, chat),
        begun_s,
    )
