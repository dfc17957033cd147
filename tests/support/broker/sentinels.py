"""A primary, its replica and a sentinel that watches them."""

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import redis

from deploy.launcher.embedded_broker import Broker, embedded
from tests.support import brokers
from tests.support.machine.ports import free_port
from tests.support.waiting import wait_until_sync

SERVICE = "fleet"
CONFIG = """
port {port}
unixsocket {socket}
bind 127.0.0.1
dir {directory}
logfile sentinel.log
sentinel monitor {service} 127.0.0.1 {primary} 1
sentinel down-after-milliseconds {service} 1000
sentinel failover-timeout {service} 10000
"""


@dataclass
class Watched:
    """Attributes:
    url: how clients find the primary, by way of a sentinel that is away and one that is not.
    primary: the process that is the primary at first.
    """

    url: str
    primary: subprocess.Popen[bytes]

    def fail_over(self) -> None:
        """Kill the primary; after a while the replica takes its place."""
        self.primary.kill()
        self.primary.wait()


@contextlib.contextmanager
def watched() -> Iterator[Watched]:
    with (
        embedded() as first,
        embedded() as second,
        embedded() as own,
        contextlib.ExitStack() as stack,
    ):
        first_port, second_port, own_port = free_port(), free_port(), free_port()
        primary = brokers.start(first, *listen(first_port))
        end_with(stack, primary)
        replicates = ["--replicaof", "127.0.0.1", str(first_port)]
        end_with(stack, brokers.start(second, *listen(second_port), *replicates))
        end_with(stack, start_sentinel(own, own_port, first_port))
        with redis.Redis.from_url(own.url) as sentinel:
            wait_until_sync(lambda: watches(sentinel))
        url = f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{own_port}/{SERVICE}"
        yield Watched(url, primary)


def end_with(stack: contextlib.ExitStack, process: subprocess.Popen[bytes]) -> None:
    stack.callback(process.wait)
    stack.callback(process.kill)


def listen(port: int) -> list[str]:
    """Options with which a broker also listens on a port of 127.0.0.1."""
    return ["--bind", "127.0.0.1", "--port", str(port)]


def start_sentinel(own: Broker, port: int, primary: int) -> subprocess.Popen[bytes]:
    config = own.directory / "sentinel.conf"
    config.write_text(
        CONFIG.format(
            port=port, socket=own.socket_path, directory=own.directory, primary=primary, service=SERVICE
        )
    )
    words = brokers.command(own)
    words = words[: words.index("--port") - 1]  # the server, without the options and users of a broker
    process = brokers.spawn([*words, str(config), "--sentinel"], {})
    wait_until_sync(lambda: process.poll() is not None or brokers.answers(own.url))
    return process


def watches(sentinel: redis.Redis) -> bool:
    """Whether the sentinel knows the replica, and the replica has all that the primary has."""
    states: list[dict[str, str]] = sentinel.sentinel_slaves(SERVICE)  # type: ignore[no-untyped-call]
    return [(one["flags"], one["master-link-status"]) for one in states] == [("slave", "ok")]
