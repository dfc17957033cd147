"""GET /health and /ping: 200 if a request would be served now. GET /: the web page for browsers, and TGI's
health check for other clients. No API key is needed.
"""

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

from api.errors import ApiError
from api.http.openapi import HEALTH
from api.requests.pool_registry import own_pool
from api.tgi.response_schemas import ERROR_RESPONSES, ErrorResponse

router = APIRouter(responses={503: ERROR_RESPONSES[503]}, tags=[HEALTH])
page_router = APIRouter(tags=[HEALTH])
PAGE_FILES = {path.name: path for path in (Path(__file__).parents[1] / "page").iterdir()}
PAGE_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}


@router.head("/ping", include_in_schema=False)
@router.head("/health", include_in_schema=False)
@router.get("/ping", response_class=Response, name="ping", summary="Health check (same as /health)")
@router.get("/health", response_class=Response, summary="Health check")
async def health(request: Request) -> Response:
    """Returns 200 with an empty body if a worker, a batcher and the broker are live, else 503."""
    try:
        await own_pool(request).check()
    except ApiError as error:
        raise ApiError(503, "healthcheck", f"unhealthy: {error.text}") from error
    return Response()


@page_router.head("/", include_in_schema=False)
@page_router.get(
    "/",
    summary="Web page, or health check",
    response_class=Response,
    responses={503: {"model": ErrorResponse}},
)
async def page_or_health(request: Request) -> Response:
    """Returns the web page if the client accepts `text/html`, else what /health returns."""
    if "text/html" in request.headers.get("accept", ""):
        return FileResponse(PAGE_FILES["page.html"], headers=PAGE_HEADERS | {"vary": "accept"})
    return await health(request)


@page_router.get("/page/{name}", include_in_schema=False)
async def page_file(name: str) -> Response:
    """Returns a file of the page."""
    if name not in PAGE_FILES:
        raise HTTPException(404)
    return FileResponse(PAGE_FILES[name], headers=PAGE_HEADERS)
