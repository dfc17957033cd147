"""The ASGI application of a gateway: its routes, error handlers and middlewares."""

import contextlib
import logging
from collections.abc import AsyncIterator
from functools import partial
from importlib.metadata import version

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from sse_starlette.sse import AppStatus
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from api.admin import routes_fleet, routes_health, routes_metrics, routes_page, routes_timeline
from api.connection.draining import Draining
from api.connection.limits import LIMITS
from api.event_loop.pace import Turns
from api.heir.answer_socket import give_answer_socket
from api.heir.keeper_channel import KeeperChannel
from api.http.auth import LOCAL_ORIGINS, check_key, check_page
from api.http.error_handlers import error_handlers
from api.http.middleware import MAX_ARRIVALS, Middleware, around, give_request_id, note_arrival
from api.http.openapi import TAGS, build_document, introduction
from api.http.raw_send import keep_raw_send
from api.http.unread import UNREAD
from api.inference.metrics import count_arrival, count_error
from api.lifecycle import Gateway
from api.openai import routes_chat, routes_completions, routes_models
from api.responses import routes_create, routes_stored
from api.resume import routes_requests, routes_resume
from api.resume.inherit import write_inherited
from api.resume.middleware import resume_posts
from api.tgi import routes_generate, routes_info, routes_invocations, routes_tokenize, routes_vertex
from api.vllm import routes_detokenize, routes_version
from common.metrics.aggregate import publishing_metrics
from common.settings.settings import Settings

ROUTES = (
    routes_generate,
    routes_invocations,
    routes_vertex,
    routes_tokenize,
    routes_chat,
    routes_completions,
    routes_create,
    routes_stored,
    routes_resume,
    routes_requests,
    routes_health,
    routes_info,
    routes_version,
    routes_models,
    routes_detokenize,
    routes_fleet,
    routes_page,
    routes_metrics,
    routes_timeline,
)
REFUSED_WHILE_DRAINING = (
    routes_generate,
    routes_invocations,
    routes_vertex,
    routes_chat,
    routes_completions,
    routes_create,
    routes_stored,
    routes_resume,
    routes_health,
)
WITHOUT_KEY = (routes_health, routes_info, routes_version, routes_models, routes_page, routes_metrics)


def build(
    gateway: Gateway, draining: Draining | None = None, channel: KeeperChannel | None = None
) -> ASGIApp:
    """Make the application; the gateway runs from its startup to its shutdown. `channel` leads to the keeper
    of its answers' sockets.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, object]]:
        async with gateway.running(), publishing_metrics(gateway.pool.client):
            yield {UNREAD: gateway.unread, LIMITS: gateway.limits}

    logging.getLogger("sse_starlette").setLevel(logging.INFO)  # below that it logs what it sends
    AppStatus.enable_automatic_graceful_drain = False  # a gateway that drains finishes its answers
    app = FastAPIOffline(  # /docs loads its scripts from this gateway alone
        title="Tokenfleet",
        version=version("tokenfleet"),
        description=introduction(gateway.settings),
        openapi_tags=TAGS,
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url="/api-doc/openapi.json",
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
        exception_handlers=error_handlers(count_error),
    )
    app.openapi = lambda: build_document(app)  # type: ignore[method-assign]
    app.add_api_route("/openapi.json", lambda: build_document(app), include_in_schema=False)
    app.state.pools = gateway.pools
    add_routes(app, gateway.settings, draining or Draining())
    served = add_cors(partial(resume_posts, app), gateway.settings)
    return wrap(
        served, channel or KeeperChannel(None), partial(note_arrival, count_arrival, Turns(MAX_ARRIVALS))
    )


def wrap(app: ASGIApp, channel: KeeperChannel, *inner: Middleware) -> ASGIApp:
    return around(app, keep_raw_send, partial(give_answer_socket, channel), give_request_id, *inner)


def add_routes(app: FastAPI, settings: Settings, draining: Draining) -> None:
    if settings.api_key:
        guarded = [Depends(partial(check_key, settings.api_key)), Depends(HTTPBearer(auto_error=False))]
    else:
        guarded = [Depends(partial(check_page, settings.cors_allow_origin))]
    for routes in ROUTES:
        dependencies = [] if routes in WITHOUT_KEY else guarded
        if routes in REFUSED_WHILE_DRAINING:
            dependencies = [*dependencies, Depends(draining.check)]
        app.include_router(routes.router, dependencies=dependencies)


def add_cors(app: ASGIApp, settings: Settings) -> ASGIApp:
    """Let browsers hand responses to pages of the allowed origins: those of CORS_ALLOW_ORIGIN, else any where
    there is a key, else those of this machine.
    """
    origins = settings.cors_allow_origin or (("*",) if settings.api_key else ())
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_origin_regex=None if origins else LOCAL_ORIGINS,
        allow_methods=["DELETE", "GET", "POST"],
        allow_headers=["*"],
        expose_headers=["*"],
    )


def build_heir(gateway: Gateway, channel: KeeperChannel) -> ASGIApp:
    """Make the application that goes on with answers of other gateways."""
    return wrap(add_cors(partial(write_inherited, gateway.pools), gateway.settings), channel)
