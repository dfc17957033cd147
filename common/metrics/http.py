"""METRICS_PORT: `GET /metrics` of one process: its own counts, memory and processor time."""

import http.server
import socket
import socketserver
import threading

from common.metrics.exposition import CONTENT_TYPE, render_own
from common.settings.settings import SettingError, Settings

CLIENT_TIMEOUT_S = 10.0
"""A client that sends nothing for so long is disconnected."""


def start_metrics_server(settings: Settings) -> None:
    """Serve from a thread until the process ends. Raises SettingError if the port is taken."""
    if not settings.metrics_port:
        return

    class MetricsHandler(http.server.BaseHTTPRequestHandler):
        timeout = CLIENT_TIMEOUT_S

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

    class MetricsServer(socketserver.ThreadingTCPServer):  # http.server's own class asks the DNS first
        address_family = socket.AF_INET6 if ":" in settings.listen_host else socket.AF_INET
        allow_reuse_address = daemon_threads = True

    try:
        server = MetricsServer((settings.listen_host, settings.metrics_port), MetricsHandler)
    except OSError as error:
        raise SettingError(
            "metrics_port",
            f"cannot listen on {settings.listen_host}:{settings.metrics_port}: {error.strerror}",
        ) from error
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
