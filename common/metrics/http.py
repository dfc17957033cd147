"""METRICS_PORT: `GET /metrics` of one process, its own counts, memory and time, and its `GET /health`."""

import http.server
import logging
import socket
import socketserver
import sys
import threading
from collections.abc import Callable

from common.metrics.exposition import CONTENT_TYPE, render_own
from common.settings.settings import SettingError, Settings

log = logging.getLogger(__name__)

CLIENT_TIMEOUT_S = 10.0
"""A client that sends nothing for so long is disconnected."""


def start_metrics_server(settings: Settings, is_ready: Callable[[], bool]) -> None:
    """Serve from a thread until the process ends. Raises SettingError if the port is taken."""
    if not settings.metrics_port:
        return

    class MetricsHandler(http.server.BaseHTTPRequestHandler):
        timeout = CLIENT_TIMEOUT_S

        def do_GET(self) -> None:
            match self.path.split("?")[0]:
                case "/metrics":
                    self.respond(200, CONTENT_TYPE, render_own(settings.pool))
                case "/health" if is_ready():
                    self.respond(200, "text/plain", b"ready\n")
                case "/health":
                    self.respond(503, "text/plain", b"not ready yet\n")
                case _:
                    self.send_error(404)

        def respond(self, status: int, content_type: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", content_type)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class MetricsServer(socketserver.ThreadingTCPServer):  # http.server's own class asks the DNS first
        address_family = socket.AF_INET6 if ":" in settings.listen_host else socket.AF_INET
        allow_reuse_address = daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """A line of the log, where socketserver prints a traceback. A client may leave at any time."""
            if not isinstance(sys.exception(), (ConnectionError, TimeoutError)):
                log.exception("the answer to %s failed", client_address)

    try:
        server = MetricsServer((settings.listen_host, settings.metrics_port), MetricsHandler)
    except OSError as error:
        raise SettingError(
            "metrics_port",
            f"cannot listen on {settings.listen_host}:{settings.metrics_port}: {error.strerror}",
        ) from error
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
