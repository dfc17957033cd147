"""POST /v1/chat/completions, as OpenAI has it, with what vLLM and TGI add."""

import time
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.http.openapi import takes
from api.inference.validate import validate
from api.openai import chat_prompt
from api.openai.accept import accept
from api.openai.params import from_chat
from api.openai.render_chat import ChatAnswer
from api.openai.request_schemas import ChatRequest
from api.openai.respond import serve
from api.openai.response_schemas import REFUSALS, ChatCompletion, ChatCompletionChunk, answers

router = APIRouter(responses=REFUSALS)


@router.post(
    "/v1/chat/completions",
    openapi_extra=takes(ChatRequest),
    responses=answers(ChatCompletion, ChatCompletionChunk),
)
async def chat_completions(request: Request) -> Response:
    """The assistant's next message, as a stream of chunks with `stream`, else as a whole."""
    begun_s = time.monotonic()
    gateway, chat = await accept(request, ChatRequest)
    await gateway.desk.check()
    prompt = await chat_prompt.prompt(chat, gateway.vocabulary.chat_template)
    wanted = await validate(from_chat(chat, prompt), gateway.fleet.limits, gateway.vocabulary)
    return await serve(
        request,
        gateway,
        chat,
        wanted,
        [chat_prompt.echoed(chat)] * len(wanted),
        partial(ChatAnswer, chat),
        begun_s,
    )
