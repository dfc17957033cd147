"""POST /requests/{id}/replay: computes an answer that is kept once more, and compares both."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.errors import ApiError, cut, invalid
from api.event_loop import offload
from api.http.middleware import request_id as own_request_id
from api.http.openapi import RESUME, ErrorResponses, RequestId, error_responses, only
from api.json import to_json
from api.receipts.render import render_receipt
from api.receipts.schemas import ReplayedAnswer
from api.receipts.terms import receipt_terms
from api.requests.pool import Pool
from api.requests.respond import owner_of
from api.requests.service_terms import SERVICE_HEADERS, on_terms
from api.resume import attach
from api.resume.attach import Admitted, find_own
from api.resume.routes_requests import unknown_request
from api.streams.describe_answer import describe_answer
from api.streams.http_response import wait_until_finished
from api.streams.stream import Stream
from api.tgi.response_schemas import ERROR_RESPONSES, ErrorResponse
from common.messages.answer import HttpAnswer, Rendering, ResumeTerms
from common.receipts.compare import NO_RECEIPT, compare_receipts, compare_tokens, reasons_against

ROUTE = "/generate"
"""A replay is admitted as an answer of this route: nobody reads it but its own gateway."""
ERRORS: ErrorResponses = only(ERROR_RESPONSES, 401, 403, 408, 422, 424, 429, 503)
ERRORS |= error_responses(
    ErrorResponse,
    {
        404: "There is no such answer, its time is over, or it belongs to another API key",
        409: "The answer has not finished",
    },
)
router = APIRouter(responses=ERRORS, tags=[RESUME])


@router.post(
    "/requests/{request_id}/replay",
    summary="Compute an answer again",
    response_model=ReplayedAnswer,
    openapi_extra={"parameters": SERVICE_HEADERS},
)
async def replay_answer(request: Request, request_id: RequestId) -> Response:
    """Computes an answer that is kept once more, from the same prompt ids with the same parameters and seed,
    and compares the tokens and the receipts of both. `reasons` says why tokens may differ; without one they
    must not. A replay is a request like any other: it waits, and counts in usage and limits.
    """
    admitted = await find_own(request, request_id)
    if admitted is None:
        raise unknown_request(request_id)
    pool, then = admitted.pool, admitted.answer
    old = await read_finished(admitted)
    await pool.admission.check()
    now = answer_again(request, pool, then)
    new = await pool.admission.submit_all(now)
    try:
        await wait_until_finished(new, request)
        num_records = sum(stream.num_records for stream in (*old, *new))
        body = await offload(num_records, lambda: to_json(render_replay(then, old, now, new)))
    finally:
        for stream in new:
            pool.admission.release(stream)
    return Response(body, media_type="application/json")


async def read_finished(admitted: Admitted) -> list[Stream]:
    """The streams of an answer's choices. Raises ApiError: 503, and 409 if one of them has not finished."""
    streams = await attach.read_committed(*admitted)
    if not all(stream.finished for stream in streams):
        why = "has not finished: only finished answers are replayed"
        raise ApiError(409, "conflict", f"The answer {cut(admitted.answer.request_id)} {why}")
    return streams


def answer_again(request: Request, pool: Pool, then: HttpAnswer) -> HttpAnswer:
    """The answer to the same requests, on the terms of the client that asks for the replay. Raises ApiError
    (422).
    """
    own_id = own_request_id(request)
    requests = [replace(choice, receipt=True, num_shown=0) for choice in then.choices()]
    if requests[0].pooling or requests[0].beams:
        raise invalid("`request_id` must be that of an answer of sampled tokens", "request_id")
    return describe_answer(
        request_id=own_id,
        route=ROUTE,
        streamed=False,
        model=then.model,
        requests=on_terms(request, requests, pool.settings),
        prefixes=then.prefixes,
        rendering=Rendering(),
        terms=ResumeTerms(owner_of(request, own_id)),
        receipt=receipt_terms(requests, ROUTE, pool.tokenizer),
    )


def render_replay(
    then: HttpAnswer, old: Sequence[Stream], now: HttpAnswer, new: Sequence[Stream]
) -> dict[str, Any]:
    """What both have in common, and why they may differ."""
    receipt = render_receipt(now, new)
    choices = [
        {"index": i, **compare_tokens(before.ids, after.ids)}
        for i, (before, after) in enumerate(zip(old, new, strict=True))
    ]
    differences, reasons = [], [NO_RECEIPT]
    if then.receipt is not None:
        former = render_receipt(then, old)
        differences = compare_receipts(former, receipt)
        reasons = reasons_against(former, receipt, differences)
    return {
        "id": then.request_id,
        "equal": all(choice["equal"] for choice in choices),
        "exact": not reasons,
        "reasons": reasons,
        "choices": choices,
        "differences": differences,
        "receipt": receipt,
    }
