"""Routes of Anthropic's Messages API: POST /v1/messages, and /v1/messages/count_tokens."""

from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.anthropic.chat_request import read_messages
from api.anthropic.render import RENDERER
from api.anthropic.request_schemas import CountTokensRequest, MessagesRequest
from api.anthropic.response_schemas import ERROR_RESPONSES, MessageEvent, MessageObject, TokenCount
from api.http.middleware import request_id
from api.http.openapi import ANTHROPIC, event_stream, json_body
from api.json import to_json
from api.openai.routes_vllm import shown_prompt
from api.requests.on_pool import on_pool, pool_for, read_body
from api.requests.pool import Pool
from api.requests.respond import new_answer, read_terms, submit_and_respond
from api.requests.service_terms import generation_body, on_terms
from api.requests.validate import validate

router = APIRouter(responses=ERROR_RESPONSES, tags=[ANTHROPIC])
EXAMPLE = {"messages": [{"role": "user", "content": "Why is the sky blue?"}]}


@router.post(
    "/v1/messages",
    summary="Create a message",
    openapi_extra=generation_body(MessagesRequest, {**EXAMPLE, "max_tokens": 100}),
    responses={200: {"model": MessageObject, "content": event_stream([MessageEvent])}},
)
async def create_message(request: Request) -> Response:
    """Generates the assistant's next turn. With `stream`, it comes as Anthropic's typed events."""
    body = await read_body(request, MessagesRequest)
    return await on_pool(request, body.model, partial(create_on, request, body))


async def create_on(request: Request, body: MessagesRequest, pool: Pool) -> Response:
    """Validate and submit the chat, and respond. Raises ApiError."""
    await pool.admission.check()
    chat = await read_messages(body, pool)
    requests = await validate(chat.params, pool.workers.limits, pool.tokenizer, pool.pictures)
    answer = new_answer(
        request,
        pool,
        requests=requests,
        prefixes=[chat.prefix],
        rendering=chat.rendering,
        streamed=bool(body.stream),
        resume_s=body.resume_s,
        priority=body.priority,
        service_tier=body.tier,
        webhook=body.webhook,
    )
    return await submit_and_respond(request, pool, answer, len(chat.params.text or ""), RENDERER)


@router.post(
    "/v1/messages/count_tokens",
    summary="Count the tokens of a message",
    openapi_extra=json_body(CountTokensRequest, EXAMPLE),
    responses={200: {"model": TokenCount}},
)
async def count_tokens(request: Request) -> Response:
    """Counts the tokens of the prompt that the same body makes at /v1/messages; nothing is generated."""
    body = await read_body(request, CountTokensRequest)
    pool = await pool_for(request, body.model)
    on_terms(request, [], pool.settings, body.priority, body.tier)
    read_terms(request, request_id(request), True, body.resume_s, None)
    prompt = await shown_prompt((await read_messages(body, pool)).params, pool)
    ids = await pool.tokenizer.encode_prompt(prompt, add_special_tokens=False)
    return Response(to_json({"input_tokens": len(ids)}), media_type="application/json")
