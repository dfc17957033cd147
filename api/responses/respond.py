"""Respond: the last step of creating a response. It submits the request, and sends events, the whole
response, or with `background` the queued one.
"""

from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from api.answers.answer import HttpAnswer, ResponseParts
from api.json import to_json
from api.openai.params import ChatParams
from api.openai.responses_items import Item
from api.openai.responses_object import RENDERER, ResponseObjectRenderer
from api.requests.pool import Pool
from api.requests.respond import first_headers, new_answer, submit, submit_and_respond
from api.responses.request_schemas import ResponsesRequest
from common.messages.request import Generate, SamplingParams
from common.webhooks import RESPONSE

SHOWN_TIERS = {"interactive": "priority", "standard": "default", "batch": "flex"}
"""Classes → the service tiers that a response shows."""


async def respond(request: Request, pool: Pool, answer: HttpAnswer) -> Response:
    """Submit the request, and respond. Raises ApiError."""
    if answer.streamed or not answer.terms.detached:
        return await submit_and_respond(request, pool, answer, 0, RENDERER)
    [stream] = await submit(pool, answer)
    rendered = ResponseObjectRenderer(answer, stream).render("queued")
    pool.admission.release(stream, 0, answer.terms.keep_s)
    return Response(to_json(rendered), 200, first_headers(pool.settings, 0, [stream]), "application/json")


def describe_response(
    request: Request,
    pool: Pool,
    body: ResponsesRequest,
    chat: ChatParams,
    requests: list[Generate],
    before: list[Item],
    items: list[Item],
) -> HttpAnswer:
    """The answer, as it is kept: to the items `before` and the input `items`. Raises ApiError."""
    streamed, background = bool(body.stream), bool(body.background)
    answer = new_answer(
        request,
        pool,
        requests=requests,
        prefixes=[""],
        rendering=chat.rendering,
        streamed=streamed or background,
        resume_s=body.resume_s,
        detached=background,
        priority=body.priority,
        service_tier=body.service_tier,
        webhook=body.webhook,
        kind=RESPONSE,
    )
    fields = response_fields(body, chat.params.sampling, answer.requests[0].class_name)
    stored_ms = round(1000 * pool.settings.answer_ttl_s) if body.is_stored else 0
    return replace(
        answer,
        streamed=streamed,
        terms=replace(answer.terms, stored_ms=stored_ms),
        response=ResponseParts(to_json(fields), to_json(before), to_json(items)),
    )


def response_fields(body: ResponsesRequest, sampling: SamplingParams, service_class: str) -> dict[str, Any]:
    """The fields of the response object that say what was requested."""
    form = body.text.format if body.text is not None else None
    reasoning = body.reasoning
    return {
        "background": bool(body.background),
        "completed_at": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning else None,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": SHOWN_TIERS[service_class],
        "store": body.is_stored,
        "temperature": sampling.temperature,
        "text": {"format": form or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }
