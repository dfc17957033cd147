"""Batcher processes beside a broker of the test, without launcher."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def batcher(url: str, name: str = "b0", **settings: str) -> Iterator[subprocess.Popen[bytes]]:
    environ = {
        **os.environ,
        "REDIS_URL": url,
        "PROCESS_NAME": name,
        "HEARTBEAT_S": "0.1",
        "WORKER_TTL_S": "1",
        **settings,
    }
    process = subprocess.Popen([sys.executable, "-P", "-m", "batcher"], env=environ)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
