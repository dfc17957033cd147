"""POST /generate and /generate_stream, as TGI has them."""

import asyncio
import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from api import body
from api.errors import CLIENT_GONE, encode, failed
from api.gateway import Gateway, gateway_of
from api.schemas_tgi import GenerateRequest
from api.sse import TokenStream, token
from api.stream import Stream
from api.validate import Wanted, validate

router = APIRouter()
BODY: dict[str, Any] = {"requestBody": {"required": True, "content": {"application/json": {"schema": GenerateRequest.model_json_schema()}}}}


@router.post("/generate_stream", openapi_extra=BODY)
async def generate_stream(request: Request) -> Response:
    """Tokens as server-sent events, one frame each; the last one carries the whole text."""
    gateway = gateway_of(request)
    details, wanted = await accept(request, gateway)
    stream = await gateway.desk.submit(wanted)
    return TokenStream(stream, details, prompt_headers(gateway, wanted), gateway.desk.leave)


@router.post("/generate", openapi_extra=BODY)
async def generate(request: Request) -> Response:
    """The whole text at once."""
    begun_s = time.monotonic()
    gateway = gateway_of(request)
    details, wanted = await accept(request, gateway)
    stream = await gateway.desk.submit(wanted)
    try:
        await ended_or_abandoned(stream, request)
    finally:
        gateway.desk.leave(stream)
    if stream.terminal is None:
        return Response(status_code=CLIENT_GONE)
    if not stream.finished:
        raise failed(stream.terminal)
    headers = prompt_headers(gateway, wanted) | time_headers(stream, begun_s)
    return Response(encode(answer(stream, details)), 200, headers, "application/json")


async def accept(request: Request, gateway: Gateway) -> tuple[bool, Wanted]:
    """Whether details are wanted, and what else. Raises Refusal."""
    asked = await body.read(request, GenerateRequest, gateway.settings.payload_limit)
    await gateway.desk.check()
    wanted = await validate(asked, gateway.fleet.limits, gateway.vocabulary)
    return bool(asked.parameters and asked.parameters.details), wanted


async def ended_or_abandoned(stream: Stream, request: Request) -> None:
    """Returns when the stream has ended or its client is gone."""
    tasks = {asyncio.create_task(stream.ended.wait()), asyncio.create_task(abandoned(request))}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


async def abandoned(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def answer(stream: Stream, details: bool) -> dict[str, Any]:
    assert stream.terminal is not None
    if not details:
        return {"generated_text": stream.text}
    about = {
        "finish_reason": stream.terminal.reason,
        "generated_tokens": stream.num_tokens,
        "seed": None,
        "prefill": [],
        "tokens": [token(stream, i) for i in range(stream.num_tokens)],
    }
    return {"generated_text": stream.text, "details": about}


def prompt_headers(gateway: Gateway, wanted: Wanted) -> dict[str, str]:
    known = {"x-compute-type": gateway.settings.compute_type} if gateway.settings.compute_type else {}
    return known | {"x-compute-characters": str(wanted.num_chars)}


def time_headers(stream: Stream, begun_s: float) -> dict[str, str]:
    """Waiting and prefill count as the time in the queue: a gateway sees the first token, not the first step."""
    total_s = stream.ended_s - begun_s
    inference_s = stream.ended_s - stream.first_token_s
    milliseconds = {
        "x-total-time": total_s,
        "x-validation-time": stream.begun_s - begun_s,
        "x-queue-time": stream.first_token_s - stream.begun_s,
        "x-inference-time": inference_s,
        "x-time-per-token": inference_s / max(1, stream.num_tokens),
    }
    return {name: str(round(1000 * value)) for name, value in milliseconds.items()} | {
        "x-compute-time": f"{total_s:.6f}",
        "x-prompt-tokens": str(len(stream.prompt_ids)),
        "x-generated-tokens": str(stream.num_tokens),
    }
