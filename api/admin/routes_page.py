"""GET /: the page for a browser, TGI's health for everybody else. The page's files are in `api/page/`."""

from pathlib import Path

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, Response

from api.admin.routes_health import health
from api.tgi.response_schemas import ErrorResponse

router = APIRouter()
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
@router.get("/", response_class=Response, responses={503: {"model": ErrorResponse}})
async def page_or_health(request: Request) -> Response:
    """The page for a browser; for everybody else as /health."""
    if "text/html" in request.headers.get("accept", ""):
        return FileResponse(FILES["page.html"], headers=HEADERS | {"vary": "accept"})
    return await health(request)


@router.get("/page/{name}", include_in_schema=False)
async def page_file(name: str) -> Response:
    """What the page is made of."""
    if name not in FILES:
        raise HTTPException(404)
    return FileResponse(FILES[name], headers=HEADERS)
