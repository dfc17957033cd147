"""Gateway process: its listeners, and its HTTP server, which runs until SIGTERM."""

import logging
import os
import random
import signal
import socket
import sys
from collections.abc import Callable

import setproctitle
import uvicorn
from starlette.types import ASGIApp

from api.app import build, build_heir
from api.handover.draining import Draining, DrainingServer
from api.handover.heir import Heir
from api.handover.keeper_channel import inherited_channel
from api.http.connection_limits import raise_file_limit
from api.http.protocol import UNREADABLE, HttpProtocol, InheritedConnection
from api.lifecycle import Gateway
from api.prompts.tokenizer import ModelTokenizer
from api.requests.pool import load_tokenizer
from common.messages.kept_answer import WHOLE_FLEET_VARIABLE
from common.process import launch, logs
from common.process.launch import PRELOAD_FLAG, wait_for_place
from common.process.startup import configure_process, exit_when_unservable, exporting_spans, start_process
from common.settings.settings import SettingError, Settings

log = logging.getLogger(__name__)

KEEP_ALIVE_TIMEOUT_S = 620
"""How long a connection without a request is kept: longer than clients and proxies keep theirs."""

PRELOADED = "preloaded-api"
CLOSE_S = 3
"""How long connections may take to close once the gateway has drained."""


def main() -> None:
    """Serve until SIGTERM; with `--preload` wait first until this process has a place in the fleet. Exits
    with EX_CONFIG if a setting cannot be served.
    """
    with exit_when_unservable():
        preloaded = preload() if sys.argv[1:] == [PRELOAD_FLAG] else None
        own = start_process("api", "g0")
        settings = Settings.read([])
        configure_process(own, settings)
        with exporting_spans(settings, own.incarnation):
            serve(settings, own.incarnation, preloaded or load_tokenizer(settings))


def preload() -> ModelTokenizer:
    """Load the tokenizer, and return it when this process has a place in the fleet. Raises SettingError."""
    launch.die_with_parent()
    settings = Settings.read([])
    logs.set_up(PRELOADED, settings.log_level, settings.json_output)
    tokenizer = load_tokenizer(settings)
    setproctitle.setproctitle(f"tokenfleet {PRELOADED}")
    wait_for_place()
    return tokenizer


def serve(settings: Settings, incarnation: str, tokenizer: ModelTokenizer) -> None:
    """Run one gateway. Raises SettingError."""
    raise_file_limit()
    sockets = [shared_listener(settings.listen_host, settings.port), own_listener(settings.gateway_port)]
    gateway = Gateway(settings, incarnation, tokenizer, lossy(os.environ.get("TOKENFLEET_TEST_LOSE", "")))
    draining = Draining(gateway.show_draining, gateway.fail_streams, WHOLE_FLEET_VARIABLE in os.environ)
    channel = inherited_channel()
    config = uvicorn.Config(
        build(gateway, draining, channel),
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
    # requests that are no HTTP are counted and logged by ConnectionLimits, many in one line
    logging.getLogger("uvicorn.error").addFilter(lambda record: record.msg != UNREADABLE)
    # uvicorn raises SIGTERM again after a graceful shutdown: that is not a failure.
    signal.signal(signal.SIGTERM, lambda *_: None)
    server = GatewayServer(config, draining, settings.graceful_termination_timeout, channel)
    server.heir_app = build_heir(gateway, channel)
    server.run(sockets)


class GatewayServer(DrainingServer):
    """A server that also continues answers of other gateways; `heir_app` writes them."""

    heir_app: ASGIApp

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        heir = Heir(self.new_connection, self.server_state, self.heir_app, self.channel)
        self.channel.listen(heir.inherit)

    def new_connection(self) -> InheritedConnection:
        return InheritedConnection(self.config, self.server_state, self.lifespan.state)


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
