"""METRICS_PORT: what one process has counted itself, and what the system says of it, as `GET /metrics`."""

import http.server
import socket
import socketserver
import threading

from common.metrics.exposition import CONTENT_TYPE, render_own
from common.settings.settings import SettingError, Settings

SILENCE_S = 10.0
"""After which a client that says nothing is left."""


def start_metrics_server(settings: Settings) -> None:
    """Answers from a thread until the process ends. Raises SettingError when the port is taken."""
    if not settings.metrics_port:
        return

    class Answer(http.server.BaseHTTPRequestHandler):
        timeout = SILENCE_S

        def do_GET(self) -> None:
            if self.path.split("?")[0] != "/metrics":
                self.send_error(404)
                return
            body = render_own(settings.pool)
            self.send_response(200)
            self.send_header("content-type", CONTENT_TYPE)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(socketserver.ThreadingTCPServer):  # http.server's own asks the DNS for our name first
        address_family = socket.AF_INET6 if ":" in settings.listen_host else socket.AF_INET
        allow_reuse_address = daemon_threads = True

    try:
        server = Server((settings.listen_host, settings.metrics_port), Answer)
    except OSError as error:
        raise SettingError(
            "metrics_port",
            f"cannot listen on {settings.listen_host}:{settings.metrics_port}: {error.strerror}",
        ) from error
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
