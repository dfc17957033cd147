"""GET /health, /ping and /readyz: 200 if a request would be served now. GET /livez: 200 while this gateway
runs. GET /load: how many requests it has. GET /: the web page for browsers, and TGI's health check for other
clients. No API key is needed.
"""

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

from api.errors import ApiError
from api.handover.draining import check_serving
from api.http.auth import check_admin, check_key
from api.http.middleware import AccessLog
from api.http.openapi import HEALTH, TGI_ERRORS, ErrorResponse, Shape, answer, error_responses
from api.json import fresh_json
from api.requests.service_terms import pools_of

SERVER_LOAD = Shape("ServerLoad", {"server_load": 3})
router = APIRouter(responses={503: TGI_ERRORS[503]}, tags=[HEALTH])
live_router = APIRouter(tags=[HEALTH])
page_router = APIRouter(tags=[HEALTH])
PAGE = Path(__file__).parents[1] / "page"
PAGE_FILES = {path.relative_to(PAGE).as_posix(): path for path in PAGE.rglob("*.*")}
PAGE_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}
HIDES_FLEET = "x-fleet-hidden"
HIDDEN = (
    "The proxy at this address shows no processes: they are not public. Open a gateway itself to see them."
)


@router.head("/ping", include_in_schema=False)
@router.head("/health", include_in_schema=False)
@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", response_class=Response, name="readyz", summary="Readiness probe (same as /health)")
@router.get("/ping", response_class=Response, name="ping", summary="Health check (same as /health)")
@router.get("/health", response_class=Response, summary="Health check")
async def health(request: Request) -> Response:
    """Returns 200 with an empty body if a worker, a batcher and the broker are live, of this gateway's pool
    or of another one that serves its model; else 503.
    """
    try:
        await (await pools_of(request).find(None)).check()
    except ApiError as error:
        raise ApiError(503, "healthcheck", f"unhealthy: {error.text}") from error
    return Response()


@live_router.head("/livez", include_in_schema=False)
@live_router.get("/livez", response_class=Response, summary="Liveness probe")
async def livez() -> Response:
    """Returns 200 with an empty body as long as this gateway answers, whatever the broker and the workers do:
    an orchestrator that restarts gateways by it leaves them alone while Redis is away.
    """
    return Response()


@live_router.get(
    "/load", summary="Requests of this gateway", responses=answer(SERVER_LOAD), response_model=None
)
async def load(request: Request) -> dict[str, int]:
    """Returns the number of requests for tokens that this gateway has now, from their arrival to the last
    byte of their answers, as vLLM's /load does. Other gateways have their own.
    """
    access: AccessLog = request.app.state.access
    return {"server_load": access.load}


@page_router.head("/", include_in_schema=False)
@page_router.get(
    "/",
    summary="Web page, or health check",
    response_class=Response,
    responses=error_responses(ErrorResponse, {503: "Unhealthy"}),
)
async def page_or_health(request: Request) -> Response:
    """Returns the web page if the client accepts `text/html`, else what /health returns."""
    if "text/html" in request.headers.get("accept", ""):
        return FileResponse(PAGE_FILES["page.html"], headers=PAGE_HEADERS | {"vary": "accept"})
    await check_serving(request)
    return await health(request)


@page_router.get("/page/access", include_in_schema=False)
async def page_access(request: Request) -> Response:
    """Returns what the page may ask with its key: the status that `/fleet` would have, and why; and whether
    there are keys. The page asks here first, as browsers report each refusal as an error.
    """
    try:
        await check_key(request)
        await check_admin(request)
        if HIDES_FLEET in request.headers:
            raise ApiError(404, "not_found", HIDDEN)
    except ApiError as error:
        return fresh_json({"status": error.status, "text": error.text})
    return fresh_json({"status": 200, "has_keys": not request.app.state.keys.is_open})


@page_router.get("/page/{name:path}", include_in_schema=False)
async def page_file(name: str) -> Response:
    """Returns a file of the page."""
    if name not in PAGE_FILES:
        raise HTTPException(404)
    return FileResponse(PAGE_FILES[name], headers=PAGE_HEADERS)
