"""GET /: the web page for browsers, TGI's health check for other clients. The page's files are in
`api/page/`.
"""

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

from api.admin.routes_health import health
from api.http.openapi import HEALTH
from api.tgi.response_schemas import ErrorResponse

router = APIRouter(tags=[HEALTH])
FILES = {path.name: path for path in (Path(__file__).parents[1] / "page").iterdir()}
POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
)
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
}


@router.head("/", include_in_schema=False)
@router.get(
    "/",
    summary="Web page, or health check",
    response_class=Response,
    responses={503: {"model": ErrorResponse}},
)
async def page_or_health(request: Request) -> Response:
    """Returns the web page if the client accepts `text/html`, else what /health returns."""
    if "text/html" in request.headers.get("accept", ""):
        return FileResponse(FILES["page.html"], headers=HEADERS | {"vary": "accept"})
    return await health(request)


@router.get("/page/{name}", include_in_schema=False)
async def page_file(name: str) -> Response:
    """Returns a file of the page."""
    if name not in FILES:
        raise HTTPException(404)
    return FileResponse(FILES[name], headers=HEADERS)
