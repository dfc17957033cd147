"""Sockets of a launcher, in a directory for its user alone (0700): it says which fleet it runs, and takes
orders such as `tokenfleet roll`.

Who connects to the first socket is sent a RunningFleet as JSON. An order is a JSON object in one line; the
answer is lines for people, and the last one is `done`, or `failed:` and why.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common.settings.settings import SettingError

log = logging.getLogger(__name__)

PREFIX = "tokenfleet-launcher-"
SOCKET, RECORD = "control", "fleet"
ANSWER_S = 2.0
"""How long a launcher may take to say what it runs. One that is stopped never says it."""
BEING_MADE_S = 60.0
"""A directory younger than this may not have its lock yet, so it is not removed as abandoned."""
DONE, FAILED = "done", "failed: "
MAX_ORDER_BYTES = 2**16

Say = Callable[[str], None]
Order = dict[str, Any]


class RunningFleet(NamedTuple):
    """What a launcher runs.

    Attributes:
        folder: the current folder of the command that started it.
        title: that command, as `tokenfleet serve`.
        url: of its gateways; "" if it has none.
        redis_url, directory_url, pool: its settings.
    """

    pid: int
    folder: str
    title: str
    url: str
    redis_url: str
    directory_url: str
    pool: str


class OrderFailed(Exception):
    """An order could not be carried out; `str()` says why, and what holds now."""


@contextlib.asynccontextmanager
async def listening(
    fleet: RunningFleet, carry_out: Callable[[Order, Say], Awaitable[None]]
) -> AsyncIterator[None]:
    """Say which fleet this is, and take orders, while the context is open. `carry_out` may raise OrderFailed
    and SettingError.
    """

    async def on_question(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(json.dumps(fleet._asdict()).encode())
            await writer.drain()
        writer.close()

    async def on_order(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def say(line: str) -> None:
            log.info("%s", line)
            writer.write(f"{line}\n".encode())

        with contextlib.suppress(OSError, ValueError):  # whoever ordered has gone, or sent no order
            order = json.loads(await reader.readline())
            try:
                await carry_out(order, say)
            except (OrderFailed, SettingError) as error:
                log.error("%s", error)
                writer.write(f"{FAILED}{error}\n".encode())
            else:
                writer.write(f"{DONE}\n".encode())
            await writer.drain()
        writer.close()

    remove_abandoned(PREFIX)
    with contextlib.ExitStack() as stack:
        try:
            name = f"{PREFIX}{os.getpid()}-"
            temporary = tempfile.TemporaryDirectory(prefix=name, ignore_cleanup_errors=True)
            directory = Path(stack.enter_context(temporary))
            stack.enter_context(locked(directory))
            for on_connection, name in ((on_question, RECORD), (on_order, SOCKET)):
                server = await asyncio.start_unix_server(
                    on_connection, directory / name, limit=MAX_ORDER_BYTES
                )
                stack.callback(server.close)
        except OSError as error:
            log.warning("commands such as `tokenfleet roll` do not find this fleet: %s", error)
            stack.close()
        yield


def running_fleets() -> list[RunningFleet]:
    """What the launchers of this user on this machine run, by process id."""
    found = [ask(directory) for directory in own_directories(PREFIX)]
    return sorted(fleet for fleet in found if fleet is not None)


def current_folder() -> str:
    """The folder of this process; "" if it is no more."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def own_directories(prefix: str) -> list[Path]:
    """Temporary directories of this user. A name proves nothing: anybody may make such a directory."""
    found = []
    for directory in sorted(Path(tempfile.gettempdir()).glob(f"{prefix}*")):
        with contextlib.suppress(OSError):
            status = directory.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                found.append(directory)
    return found


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold a directory's lock, which ends with this process: cleaners of temporary files leave a locked
    directory alone. Raises OSError where another process holds it.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def remove_abandoned(prefix: str) -> None:
    """Remove the directories of launchers that were killed. Those of the last release hold no lock."""
    for directory in own_directories(prefix):
        with contextlib.suppress(OSError):
            if time.time() - directory.stat().st_mtime >= BEING_MADE_S and ask(directory) is None:
                with locked(directory):
                    shutil.rmtree(directory)


def ask(directory: Path) -> RunningFleet | None:
    """What a launcher runs; None if it has ended, or does not answer."""
    with contextlib.suppress(OSError, ValueError, LookupError), socket.socket(socket.AF_UNIX) as client:
        client.settimeout(ANSWER_S)
        client.connect(str(directory / RECORD))
        with client.makefile("rb") as answer:
            found = json.loads(answer.read())
            return RunningFleet(**{name: found[name] for name in RunningFleet._fields})
    return None


def directory_of(pid: int) -> Path:
    """The directory of the launcher with this process id. Raises SettingError."""
    found = own_directories(f"{PREFIX}{pid}-")
    if not found:
        raise SettingError("--pid", f"{pid} is no launcher of this user")
    return max(found, key=lambda one: one.stat().st_mtime)


async def order(pid: int, order: Order, say: Say) -> None:
    """Give the launcher with this process id an order, and pass on what it says. Raises OrderFailed."""
    try:
        reader, writer = await asyncio.open_unix_connection(directory_of(pid) / SOCKET)
    except OSError as error:
        raise OrderFailed(f"the launcher does not answer: {error}") from error
    writer.write(json.dumps(order).encode() + b"\n")
    last = ""
    while line := (await reader.readline()).decode().rstrip("\n"):
        if line != DONE and not line.startswith(FAILED):
            say(line)
        last = line
    writer.close()
    if last.startswith(FAILED):
        raise OrderFailed(last.removeprefix(FAILED))
    if last != DONE:
        raise OrderFailed("the launcher ended before it was done")
