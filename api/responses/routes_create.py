"""POST /v1/responses: as in OpenAI's Responses API."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.event_loop.offload import offload
from api.http.openapi import OPENAI, event_stream
from api.http.request_id import request_id
from api.inference.pool_registry import pool_and_body
from api.inference.validate import validate
from api.openai.chat_params import CHARS_OF_MESSAGE
from api.openai.response_schemas import ERROR_RESPONSES
from api.responses.chat_request import read_params
from api.responses.conversation import read_conversation, resolve_references
from api.responses.input_items import read_items
from api.responses.request_schemas import ResponsesRequest
from api.responses.respond import describe_response, respond
from api.responses.response_schemas import ResponseEvent, ResponseObject
from api.service.headers import generation_body

router = APIRouter(responses=ERROR_RESPONSES, tags=[OPENAI])
EXAMPLE = {"input": "Why is the sky blue?", "max_output_tokens": 100}


@router.post(
    "/v1/responses",
    summary="Create a response",
    openapi_extra=generation_body(ResponsesRequest, EXAMPLE),
    responses={200: {"model": ResponseObject, "content": event_stream([ResponseEvent])}},
)
async def create_response(request: Request) -> Response:
    """Generates the next items of a conversation. With `stream`, they come as typed events with sequence
    numbers. With `background`, the response is queued, and outlives every process of the fleet.
    """
    pool, asked = await pool_and_body(request, ResponsesRequest)
    await pool.admission.check()
    before = await read_conversation(request, asked.previous_response_id)
    size = CHARS_OF_MESSAGE * len(asked.input) if isinstance(asked.input, list) else 0
    items = await offload(size, lambda: read_items(asked.input, request_id(request)))
    items = await resolve_references(request, items)
    chat = await read_params(asked, [*before, *items], pool)
    requests = await validate(chat.params, pool.workers.limits, pool.tokenizer)
    answer = describe_response(request, pool, asked, chat, requests, before, items)
    return await respond(request, pool, answer)
