"""GET and DELETE /requests/{id}: the state of a request, and its cancel."""

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from api.http.openapi import RESUME, ErrorResponses, RequestId, error_responses
from api.json import to_json
from api.resume import requests
from api.tgi.response_schemas import ERROR_RESPONSES, ErrorResponse

State = Literal["queued", "running", "finished", "cancelled", "error"]
ERRORS: ErrorResponses = {status: ERROR_RESPONSES[status] for status in (401, 403, 503)}
ERRORS |= error_responses(ErrorResponse, {404: "There is no such request, or it belongs to another API key"})
router = APIRouter(responses=ERRORS, tags=[RESUME])


class ChoiceState(BaseModel):
    """One choice of a request."""

    state: State
    generated_tokens: int


class RequestState(BaseModel):
    """A request that was admitted. It ends when all its choices have ended."""

    id: str
    state: State
    priority: Literal["interactive", "standard", "batch"]
    tenant: str
    created: int = Field(description="Unix time of its admission.")
    prompt_tokens: int
    choices: list[ChoiceState]


@router.get("/requests/{request_id}", summary="Show a request", response_model=RequestState)
async def show_request(request: Request, request_id: RequestId) -> Response:
    """What becomes of a request, at any gateway: of one that runs, or whose stream is kept for a client that
    comes back. Its id is in the header `x-request-id` of a stream.
    """
    own = await requests.find_request(request, request_id)
    return Response(to_json(await requests.show_request(own)), media_type="application/json")


@router.delete("/requests/{request_id}", summary="Cancel a request", response_model=RequestState)
async def cancel_request(request: Request, request_id: RequestId) -> Response:
    """Ends a request, whoever reads its answer: a stream ends with an error. One that has ended stays as it
    is.
    """
    own = await requests.find_request(request, request_id)
    return Response(to_json(await requests.cancel_request(own)), media_type="application/json")
