"""A gateway process: what it runs and in which order, its ASGI application, and its HTTP server, which runs
until SIGTERM.
"""

import contextlib
import logging
import os
import random
import signal
import socket
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import version
from typing import Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline
from sse_starlette.sse import AppStatus
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from api.admin.routes_fleet import metrics_router as metrics
from api.admin.routes_fleet import router as fleet
from api.admin.routes_health import live_router as live
from api.admin.routes_health import page_router as page
from api.admin.routes_health import router as health
from api.admin.routes_manage import adapters_router as adapters
from api.admin.routes_manage import router as manage
from api.admin.routes_usage import router as usage
from api.errors import asks_broker
from api.event_loop import background_task
from api.handover.answer_socket import KeeperChannel, give_answer_socket, inherited_channel
from api.handover.draining import GatewayServer, check_serving
from api.handover.heir import write_inherited
from api.http.auth import LOCAL_ORIGINS, KeyRing, check_admin, check_key
from api.http.body import Repeated
from api.http.connection_limits import Connections, raise_file_limit
from api.http.middleware import ERROR_HANDLERS, AccessLog, around
from api.http.openapi import TAGS, build_document, introduction
from api.http.protocol import UNREADABLE, HttpProtocol
from api.http.sse import CONNECTIONS
from api.jobs.arq_worker import ArqWorker
from api.jobs.batch import router as batches
from api.jobs.batch_run import BatchRunner
from api.jobs.consumer import JobConsumer
from api.jobs.files import open_store
from api.models import detokenize_router as detokenize
from api.models import models_router as models
from api.models import router as tokenize
from api.models import version_router as vllm_version
from api.prompts.tokenizer import ModelTokenizer
from api.protocols.kserve import info_router as kserve_info
from api.protocols.kserve import ready_router as kserve_ready
from api.protocols.messages import router as count_tokens
from api.protocols.responses import read_response, render_response
from api.protocols.stored_responses import router as stored_responses
from api.protocols.table import hint, make_router, protocol_at
from api.protocols.tgi import VERTEX
from api.protocols.tgi import info_router as info
from api.requests.pool import Pool
from api.requests.registry import PoolRegistry
from api.resume.attach import Admitted, ask_broker
from api.resume.rest import check_repeated, replay, resume_posts
from api.resume.rest import router as resume
from api.resume.rest import state_router as requests
from api.webhooks import WebhookSender
from common.broker.client import broker_url
from common.messages.kept_answer import WHOLE_FLEET_VARIABLE
from common.metrics.exposition import publishing_metrics
from common.process.event_loop import collect_garbage
from common.process.startup import configure_process, exit_when_unservable, exporting_spans, start_process
from common.settings.settings import SettingError, Settings


class Gateway:
    """One gateway: its own pool, the registry of pools that clients name, and the consumer of its own pool's
    jobs.
    """

    def __init__(
        self,
        settings: Settings,
        incarnation: str,
        tokenizer: ModelTokenizer,
        lose: Callable[[], bool] | None = None,
    ) -> None:
        """Raises SettingError."""
        self.settings = settings
        self.keys = KeyRing(settings, self.end_requests)
        self.pool = Pool(settings, incarnation, tokenizer, self.keys, lose)
        self.keys.client, self.keys.clock = self.pool.client, self.pool.client.clock
        self.pools = PoolRegistry(self.pool)
        self.access = AccessLog(settings.access_log_rate)
        self.job_consumer = JobConsumer(self.pools, self.access)
        self.webhooks = [
            WebhookSender(self.pool.client.of_pool(name), settings, partial(ended_status, self.pools, name))
            for name in settings.pools
        ]
        self.files = open_store(settings, self.pool.client.clock)
        self.connections = Connections()

    def show_draining(self) -> None:
        """Say in heartbeats that the gateway drains: a batcher that shuts down too then waits for its
        streams.
        """
        self.pool.workers.state = "draining"

    def fail_streams(self) -> None:
        """End the streams of clients with an error, which cancels their requests. Jobs go on at other
        gateways.
        """
        for pool in self.pools.all():
            for stream in list(pool.relay.streams.values()):
                if stream.request.gateway and not (stream.terminal or stream.left):
                    stream.fail("the gateway shut down before the answer was finished", "shutdown")

    def end_requests(self, key_ids: Collection[str]) -> None:
        """End the requests of keys that count no more."""
        for pool in self.pools.all():
            pool.end_requests(key_ids)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Gateway"]:
        """Serve while the context is open. Other pools are closed first, the gateway's own last."""
        await self.keys.refresh()
        jobs = self.job_consumer
        own_loops = [self.keys.run(), jobs.run(), ArqWorker(self.pool.client, self.settings).consume()]
        own_loops += [sender.run() for sender in self.webhooks]
        if self.files:
            own_loops.append(BatchRunner(self.files, jobs).run())
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(background_task(self.connections.watch()))
            await stack.enter_async_context(self.pool.running())
            for loop in own_loops:
                await stack.enter_async_context(background_task(loop))
            stack.push_async_callback(self.pools.aclose)
            for loop in (self.pools.run(), collect_garbage(lambda: len(self.pool.relay.streams))):
                await stack.enter_async_context(background_task(loop))
            yield self


# --- response status ----------------------------------------------------------------------------------------


async def ended_status(pools: PoolRegistry, pool: str, response_id: str) -> str:
    """The status of a response of a pool at the gateway's broker; empty if it is not kept. Raises ApiError
    (503).
    """
    url, request_id = broker_url(pools.own.settings), response_id.removeprefix("resp_")
    found = await ask_broker(pools, url, [pool], request_id)
    if found is None or found[1].response is None:
        return ""
    stored = Admitted(await pools.named(pool), *found[1:])
    stream = await read_response(stored)
    return str((await render_response(stored, stream))["status"]) if stream.terminal else ""


# --- application --------------------------------------------------------------------------------------------


protocols = make_router()
ROUTERS: tuple[tuple[Sequence[Callable[..., Any]], Sequence[APIRouter]], ...] = (
    ((check_serving, check_key, check_repeated), (protocols,)),
    ((check_serving, check_key), (stored_responses, count_tokens, resume, batches)),
    ((check_key,), (tokenize, detokenize, requests)),
    ((check_key, asks_broker), (usage,)),
    ((check_serving,), (health, kserve_ready)),
    ((), (live, info, kserve_info, vllm_version, models, page, metrics)),
    ((check_key, check_admin, asks_broker), (fleet, manage)),
    ((check_key, check_admin), (adapters,)),
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
    gateway: Gateway, channel: KeeperChannel | None = None, refuses: Callable[[], bool] = lambda: False
) -> ASGIApp:
    """Make the application of a gateway, which runs while the application does. `channel` leads to the socket
    keeper; `refuses` says whether new requests are refused.
    """
    app = make_routes(gateway, refuses)
    inner = around(app, partial(write_inherited, gateway.pools), resume_posts)
    return around(
        add_cors(inner, gateway.settings),
        partial(ask_own_path, vertex_paths(app.routes)),
        partial(gateway.access.log_request, protocol_at),
        partial(give_answer_socket, channel or KeeperChannel(None)),
    )


VERTEX_ROUTES = {"AIP_PREDICT_ROUTE": ("POST", VERTEX.path), "AIP_HEALTH_ROUTE": ("GET", "/health")}
"""Variables with a path that Vertex AI asks → the method, and the path of ours that answers."""


def vertex_paths(routes: Sequence[BaseRoute]) -> dict[tuple[str, str], str]:
    """Methods and paths that Vertex AI asks, and none of these routes has → our paths that answer."""
    found = {}
    for name, (method, path) in VERTEX_ROUTES.items():
        asked = os.environ.get(name, "")
        scope = {"type": "http", "method": method, "path": asked, "headers": []}
        if asked and all(route.matches(scope)[0] is not Match.FULL for route in routes):
            found[method, asked] = path
    return found


async def ask_own_path(
    paths: Mapping[tuple[str, str], str], app: ASGIApp, scope: Scope, receive: Receive, send: Send
) -> None:
    """The outermost middleware: give a request of Vertex AI the path that answers it."""
    scope["path"] = paths.get((scope["method"], scope["path"]), scope["path"])
    await app(scope, receive, send)


def make_routes(gateway: Gateway, refuses: Callable[[], bool] = lambda: False) -> FastAPI:
    """The routes of a gateway, without the middlewares."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, object]]:
        async with gateway.running(), publishing_metrics(gateway.pool.client):
            yield {CONNECTIONS: gateway.connections}

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
        exception_handlers={**ERROR_HANDLERS, Repeated: replay},
    )
    app.openapi = lambda: build_document(app)  # type: ignore[method-assign]
    app.add_api_route("/openapi.json", lambda: build_document(app), include_in_schema=False)
    app.state.settings, app.state.keys = gateway.settings, gateway.keys
    app.state.hint = partial(hint, PATHS)
    app.state.pools = gateway.pools
    app.state.access = gateway.access
    app.state.files = gateway.files
    app.state.refuses = refuses
    app.router.routes.extend(checked_routes())
    return app


@cache
def checked_routes() -> list[BaseRoute]:
    """The routes of all gateways of this process, each with its checks, which find the gateway's state in the
    request. They are made whole here: FastAPI would make them while the first request waits.
    """
    parent = APIRouter(generate_unique_id_function=lambda route: route.name)
    for checks, routers in ROUTERS:
        dependencies = [Depends(check, scope="function") for check in checks]
        for router in routers:
            parent.include_router(router, dependencies=dependencies)
    nothing = {"type": "http", "method": "GET", "path": "", "headers": []}
    assert all(route.matches(nothing)[0] is Match.NONE for route in parent.routes)
    return parent.routes


def add_cors(app: ASGIApp, settings: Settings) -> ASGIApp:
    """Let browsers give responses to pages of the allowed origins: those of CORS_ALLOW_ORIGIN; without it all
    origins if a setting gives keys, else those of this machine.
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


# --- server -------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

KEEP_ALIVE_TIMEOUT_S = 620
"""How long a connection without a request is kept: longer than clients and proxies keep theirs."""

CLOSE_S = 3
"""How long connections may take to close once the gateway has drained."""


def main(tokenizer: ModelTokenizer | None = None) -> None:
    """Serve until SIGTERM. Exits with EX_CONFIG if a setting cannot be served.

    Args:
        tokenizer: what `preload` has returned; None: it is loaded.
    """
    with exit_when_unservable():
        own = start_process("api", "g0")
        settings = Settings.read([])
        configure_process(own, settings)
        with exporting_spans(settings, own.incarnation):
            serve(settings, own.incarnation, tokenizer or ModelTokenizer(settings))


def preload(everything: bool) -> ModelTokenizer | None:
    """What a template loads for its copies. Raises SettingError."""
    return ModelTokenizer(Settings.read([])) if everything else None


def serve(settings: Settings, incarnation: str, tokenizer: ModelTokenizer) -> None:
    """Run one gateway. Raises SettingError."""
    raise_file_limit()
    sockets = [shared_listener(settings.listen_host, settings.port), own_listener(settings.gateway_port)]
    gateway = Gateway(settings, incarnation, tokenizer, lossy(os.environ.get("TOKENFLEET_TEST_LOSE", "")))
    channel = inherited_channel()
    config = uvicorn.Config(
        build(gateway, channel, lambda: server.refuses),
        loop="uvloop",
        http=HttpProtocol,
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_TIMEOUT_S,
        timeout_graceful_shutdown=CLOSE_S,
    )
    log.info(
        "%s listens on %s",
        incarnation,
        " and ".join(f"{listener.getsockname()[0]}:{listener.getsockname()[1]}" for listener in sockets),
    )
    # requests that are no HTTP are counted and logged by Connections, many in one line
    logging.getLogger("uvicorn.error").addFilter(lambda record: record.msg != UNREADABLE)
    # uvicorn raises SIGTERM again after a graceful shutdown: that is not a failure.
    signal.signal(signal.SIGTERM, lambda *_: None)
    server = GatewayServer(
        config,
        channel,
        settings.graceful_termination_timeout,
        is_last=WHOLE_FLEET_VARIABLE in os.environ,
        on_start=gateway.show_draining,
        on_timeout=gateway.fail_streams,
    )
    server.run(sockets)


def shared_listener(host: str, port: int) -> socket.socket:
    """Listener on PORT, shared by all gateways of a machine: the kernel spreads connections over them."""
    return bind_listener(host, port, "port", socket.SO_REUSEADDR, socket.SO_REUSEPORT)


def own_listener(port: int) -> socket.socket:
    """Listener on the port of this gateway alone."""
    return bind_listener("127.0.0.1", port, "gateway_port", socket.SO_REUSEADDR)


def bind_listener(host: str, port: int, name: str, *options: int) -> socket.socket:
    """A bound socket. Raises SettingError with the setting `name`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sees TCP and sets TCP_NODELAY.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    for option in options:
        listener.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SettingError(name, f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def lossy(text: str) -> Callable[[], bool] | None:
    """For tests of the relay: a function that says which messages are dropped, a share of all (`0.1` or
    `0.1:seed`); None for an empty text.
    """
    if not text:
        return None
    share, _, seed = text.partition(":")
    chance = random.Random(seed or None)
    return lambda: chance.random() < float(share)
