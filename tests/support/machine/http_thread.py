"""An HTTP server of this process, in a thread."""

import contextlib
import threading
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette

from tests.support.waiting import wait_until_sync


@contextlib.contextmanager
def serving_in_thread(app: Starlette, port: int) -> Iterator[None]:
    """Serve an application on 127.0.0.1. The end of the context ends it and its streams."""
    config = uvicorn.Config(app, "127.0.0.1", port, log_level="critical", timeout_graceful_shutdown=0)
    http = uvicorn.Server(config)
    thread = threading.Thread(target=http.run, daemon=True)
    thread.start()
    try:
        wait_until_sync(lambda: http.started)
        yield
    finally:
        http.should_exit = http.force_exit = True
        thread.join(10)
