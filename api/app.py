"""The ASGI application of a gateway: its routes, and how errors are answered."""

import contextlib
from collections.abc import AsyncIterator

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from api.admin import routes_fleet, routes_health, routes_metrics, routes_page, routes_timeline
from api.errors import ApiError, handle_api_error, handle_crash, handle_disconnect, handle_http_error
from api.http.auth import check_key
from api.http.openapi import TAGS, build_document, introduction
from api.http.request_id import RequestIdMiddleware
from api.inference.metrics import MetricsMiddleware
from api.inference.pool import Pool
from api.openai import routes_chat, routes_completions, routes_models
from api.tgi import routes_generate as routes_generate
from api.tgi import routes_info, routes_tokenize
from common.metrics.aggregate import publishing_metrics
from common.settings.settings import Settings


def build(pool: Pool) -> ASGIApp:
    """The application; the gateway runs from its start-up to its shutdown."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with pool.running(), publishing_metrics(pool.redis, pool.workers.keys):
            yield

    app = FastAPIOffline(  # /docs asks nobody else for its scripts
        title="Tokenfleet",
        description=introduction(pool.settings),
        openapi_tags=TAGS,
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url="/api-doc/openapi.json",
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
    )
    app.openapi = lambda: build_document(app)  # type: ignore[method-assign]
    app.state.gateway = pool
    keyed = [Depends(check_key), Depends(HTTPBearer(auto_error=False))] if pool.settings.api_key else []
    app.include_router(routes_generate.router, dependencies=keyed)
    app.include_router(routes_tokenize.router, dependencies=keyed)
    app.include_router(routes_chat.router, dependencies=keyed)
    app.include_router(routes_completions.router, dependencies=keyed)
    app.include_router(routes_health.router)
    app.include_router(routes_info.router)
    app.include_router(routes_models.router)
    app.include_router(routes_fleet.router, dependencies=keyed)
    app.include_router(routes_page.router)
    app.include_router(routes_metrics.router)
    app.include_router(routes_timeline.router, dependencies=keyed)
    app.add_exception_handler(ApiError, handle_api_error)
    app.add_exception_handler(HTTPException, handle_http_error)
    app.add_exception_handler(ClientDisconnect, handle_disconnect)
    app.add_exception_handler(Exception, handle_crash)
    return RequestIdMiddleware(MetricsMiddleware(cors(app, pool.settings)))


def cors(app: ASGIApp, settings: Settings) -> ASGIApp:
    """Answers that a browser may hand to pages of other origins."""
    origins = settings.cors_allow_origin or ("*",)
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"], expose_headers=["*"]
    )
