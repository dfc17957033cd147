"""GET /health and /ping: whether a request would be accepted now. Open to everybody."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from api.errors import ApiError
from api.inference.pool import pool_of
from api.tgi.response_schemas import ERROR_RESPONSES

router = APIRouter(responses={503: ERROR_RESPONSES[503]})


@router.head("/ping", include_in_schema=False)
@router.head("/health", include_in_schema=False)
@router.get("/ping", response_class=Response, name="ping")
@router.get("/health", response_class=Response)
async def health(request: Request) -> Response:
    """An empty answer where all is well."""
    try:
        await pool_of(request).admission.check()
    except ApiError as error:
        raise ApiError(503, "healthcheck", f"unhealthy: {error.text}") from error
    return Response()
