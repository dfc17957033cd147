"""Free ports of this machine, for servers that tests start."""

import contextlib
import random
import socket

PORTS = range(20_000, 32_000)
"""Ports below those that the kernel hands out. A client that retries a server during its restart could
otherwise connect to itself.
"""


def free_port() -> int:
    for port in random.sample(PORTS, len(PORTS)):
        if is_free(port):
            return port
    raise OSError(f"no free port in {PORTS}")


def is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
        return True
    return False
