"""The ASGI application of a gateway: its routes, error handlers and middlewares."""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from functools import cache, partial
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from sse_starlette.sse import AppStatus
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp

from api.admin.routes_adapters import router as adapters
from api.admin.routes_fleet import router as fleet
from api.admin.routes_health import live_router as live
from api.admin.routes_health import page_router as page
from api.admin.routes_health import router as health
from api.admin.routes_manage import router as manage
from api.admin.routes_metrics import router as metrics
from api.admin.routes_usage import router as usage
from api.event_loop import Turns
from api.handover.answer_socket import give_answer_socket
from api.handover.draining import Draining, check_serving
from api.handover.keeper_channel import KeeperChannel
from api.http.access_log import AccessLog
from api.http.auth import LOCAL_ORIGINS, check_admin, check_key
from api.http.connection_limits import LIMITS
from api.http.error_handlers import error_handlers
from api.http.idempotency import Repeated
from api.http.middleware import MAX_ARRIVALS, Middleware, around, give_request_id, note_arrival
from api.http.openapi import TAGS, build_document, introduction
from api.http.request_trace import trace_request
from api.http.sse import keep_raw_send
from api.http.unread import UNREAD
from api.jobs.routes_batches import router as batches
from api.lifecycle import Gateway
from api.models import router as models
from api.protocols.kserve import info_router as kserve_info
from api.protocols.kserve import ready_router as kserve_ready
from api.protocols.messages import router as count_tokens
from api.protocols.stored_responses import router as stored_responses
from api.protocols.table import hint, make_router, protocol_at
from api.protocols.tgi import info_router as info
from api.protocols.tokenize import detokenize_router as detokenize
from api.protocols.tokenize import router as tokenize
from api.protocols.tokenize import version_router as vllm_version
from api.requests.metrics import count_arrival, count_error
from api.resume.inherit import write_inherited
from api.resume.replay import check_repeated, replay
from api.resume.routes_requests import router as requests
from api.resume.routes_resume import resume_posts
from api.resume.routes_resume import router as resume
from api.resume.routes_streams import router as streams
from common import tracing
from common.metrics.exposition import publishing_metrics
from common.settings.settings import Settings

protocols = make_router()
ROUTERS: tuple[tuple[Sequence[Callable[..., Any]], Sequence[APIRouter]], ...] = (
    ((check_serving, check_key, check_repeated), (protocols,)),
    ((check_serving, check_key), (stored_responses, count_tokens, resume, streams, batches)),
    ((check_key,), (tokenize, detokenize, requests, usage)),
    ((check_serving,), (health, kserve_ready)),
    ((), (live, info, kserve_info, vllm_version, models, page, metrics)),
    ((check_key, check_admin), (fleet, manage, adapters)),
)
"""Checks of each request, and the routers whose requests they check: a route is found in this order."""
PATHS = [
    route.path
    for _, routers in ROUTERS
    for router in routers
    for route in router.routes
    if isinstance(route, APIRoute) and route.include_in_schema
]
"""Described paths, in order."""


def build(
    gateway: Gateway, draining: Draining | None = None, channel: KeeperChannel | None = None
) -> ASGIApp:
    """Make the application of a gateway, which runs while the application does. `channel` leads to the socket
    keeper.
    """

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, object]]:
        async with gateway.running(), publishing_metrics(gateway.pool.client):
            yield {UNREAD: gateway.unread, LIMITS: gateway.limits}

    logging.getLogger("sse_starlette").setLevel(logging.INFO)  # at DEBUG it logs every event
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
        exception_handlers={**error_handlers(count_error), Repeated: partial(replay, count_error)},
    )
    app.openapi = lambda: build_document(app)  # type: ignore[method-assign]
    app.add_api_route("/openapi.json", lambda: build_document(app), include_in_schema=False)
    app.state.settings, app.state.keys = gateway.settings, gateway.keys
    app.state.hint = partial(hint, PATHS)
    app.state.pools = gateway.pools
    app.state.access = gateway.access
    app.state.files = gateway.files
    app.state.draining = draining or Draining()
    app.router.routes.extend(checked_routes(gateway.settings.has_keys))
    served = add_cors(partial(resume_posts, app), gateway.settings)
    traced = [trace_request] if tracing.is_on() else []
    arrival = partial(note_arrival, count_arrival, Turns(MAX_ARRIVALS))
    return wrap(served, channel or KeeperChannel(None), gateway.access, *traced, arrival)


def wrap(app: ASGIApp, channel: KeeperChannel, access: AccessLog, *inner: Middleware) -> ASGIApp:
    outer = (
        keep_raw_send,
        partial(give_answer_socket, channel),
        partial(give_request_id, protocol_at),
        access.log_request,
    )
    return around(app, *outer, *inner)


@cache
def checked_routes(has_keys: bool) -> list[BaseRoute]:
    """The routes of all gateways of this process, each with its checks, which find the gateway's state in the
    request. They are made whole here: FastAPI would make them while the first request waits.
    """
    parent = APIRouter(generate_unique_id_function=lambda route: route.name)
    for checks, routers in ROUTERS:
        dependencies = [Depends(check) for check in checks]
        if has_keys and check_key in checks:
            dependencies.append(Depends(HTTPBearer(auto_error=False)))  # for /docs
        for router in routers:
            parent.include_router(router, dependencies=dependencies)
    nothing = {"type": "http", "method": "GET", "path": "", "headers": []}
    assert all(route.matches(nothing)[0] is Match.NONE for route in parent.routes)
    return parent.routes


def add_cors(app: ASGIApp, settings: Settings) -> ASGIApp:
    """Let browsers give responses to pages of the allowed origins: those of CORS_ALLOW_ORIGIN; without it all
    origins if a setting gives keys, else those of this machine.
    """
    origins = settings.cors_allow_origin or (("*",) if settings.has_keys else ())
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_origin_regex=None if origins else LOCAL_ORIGINS,
        allow_methods=["DELETE", "GET", "POST"],
        allow_headers=["*"],
        expose_headers=["*"],
    )


def build_heir(gateway: Gateway, channel: KeeperChannel) -> ASGIApp:
    """Make the application that continues answers of other gateways."""
    return wrap(add_cors(partial(write_inherited, gateway.pools), gateway.settings), channel, gateway.access)
