"""A primary and its replica behind one address, as behind a proxy that follows the primary."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import redis

from deploy.launcher.embedded_broker import embedded
from tests.support import brokers
from tests.support.broker.sentinels import end_with, listen
from tests.support.machine.ports import free_port
from tests.support.runahead.slow_proxy import pump
from tests.support.waiting import wait_until_sync


@dataclass
class Replicated:
    """A proxy that stays with a connection where it led when it was opened.

    Attributes:
        urls: of the primary, and of its replica.
        ports: where they listen; the proxy leads to the first.
    """

    urls: list[str]
    ports: list[int]
    server: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0), backlog=128))

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.server.getsockname()[1]}/0"

    def serve(self) -> None:
        """Returns when the server is closed."""
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self.server.accept()
                theirs = socket.create_connection(("127.0.0.1", self.ports[0]))
                for side in (ours, theirs):
                    side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                pump(ours, theirs, 0.0)
                pump(theirs, ours, 0.0)

    def fail_over(self) -> None:
        """The two change their roles; then the proxy leads to the new primary."""
        with redis.Redis.from_url(self.urls[0]) as old, redis.Redis.from_url(self.urls[1]) as new:
            old.execute_command("FAILOVER")
            wait_until_sync(lambda: new.info("replication")["role"] == "master")
        self.urls.reverse()
        self.ports.reverse()


@contextlib.contextmanager
def replicated() -> Iterator[Replicated]:
    with embedded() as first, embedded() as second, contextlib.ExitStack() as stack:
        ports = [free_port(), free_port()]
        end_with(stack, brokers.start(first, *listen(ports[0])))
        end_with(stack, brokers.start(second, *listen(ports[1]), "--replicaof", "127.0.0.1", str(ports[0])))
        with redis.Redis.from_url(second.url) as replica:
            wait_until_sync(lambda: replica.info("replication")["master_link_status"] == "up")
        service = Replicated([first.url, second.url], ports)
        stack.callback(service.server.close)
        threading.Thread(target=service.serve, daemon=True).start()
        yield service
