"""GET /health and /ping: 200 if a request would be served now. No API key is needed."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.admin.health import check_health
from api.errors import ApiError
from api.http.openapi import HEALTH
from api.inference.pool_registry import own_pool
from api.tgi.response_schemas import ERROR_RESPONSES

router = APIRouter(responses={503: ERROR_RESPONSES[503]}, tags=[HEALTH])


@router.head("/ping", include_in_schema=False)
@router.head("/health", include_in_schema=False)
@router.get("/ping", response_class=Response, name="ping", summary="Health check (same as /health)")
@router.get("/health", response_class=Response, summary="Health check")
async def health(request: Request) -> Response:
    """Returns 200 with an empty body if a worker, a batcher and the broker are there and work, else 503."""
    try:
        await check_health(own_pool(request))
    except ApiError as error:
        raise ApiError(503, "healthcheck", f"unhealthy: {error.text}") from error
    return Response()
