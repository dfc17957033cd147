"""GET /info: the model and its limits, as in TGI."""

import os
from importlib.metadata import version

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.errors import unavailable
from api.http.openapi import TGI, error_responses
from api.inference.pool_registry import own_pool
from api.json import to_json
from api.tgi.response_schemas import ErrorResponse, Info

router = APIRouter(
    responses=error_responses(ErrorResponse, {503: "No worker has been ready yet"}), tags=[TGI]
)


@router.get("/info", summary="Model and limits", responses={200: {"model": Info}})
async def info(request: Request) -> Response:
    """Returns the limits of the smallest worker. Once known, they stay when the workers stop."""
    pool = own_pool(request)
    settings, fleet = pool.settings, pool.workers
    if not fleet.max_total_tokens:
        await fleet.refresh_unless_fresh()
    if not fleet.max_total_tokens:
        raise unavailable(fleet.last_error or "no worker is ready yet")
    limits = fleet.limits
    known = Info(
        model_id=settings.model_name,
        model_sha=settings.revision,
        model_pipeline_tag="text-generation",
        max_concurrent_requests=settings.max_concurrent_requests,
        max_best_of=settings.max_best_of,
        max_stop_sequences=settings.max_stop_sequences,
        max_input_tokens=limits.max_input_tokens,
        max_total_tokens=limits.max_total_tokens,
        validation_workers=settings.num_gateways,
        max_client_batch_size=limits.max_client_batch_size,
        router="tokenfleet",
        version=version("tokenfleet"),
        sha=None,
        docker_label=os.environ.get("DOCKER_LABEL"),
    )
    return Response(to_json(known.model_dump()), media_type="application/json")
