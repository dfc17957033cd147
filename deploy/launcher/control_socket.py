"""Control socket: where a launcher takes orders of its user, such as `tokenfleet roll`.

It lies in a directory for this user alone (0700). An order is a JSON object in one line. The answer is lines
for people; the last one is `done`, or `failed:` and why.
"""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from common.settings.settings import SettingError

log = logging.getLogger(__name__)

PREFIX = "tokenfleet-launcher-"
SOCKET = "control"
DONE, FAILED = "done", "failed: "
MAX_ORDER_BYTES = 2**16

Say = Callable[[str], None]
Order = dict[str, Any]


class OrderFailed(Exception):
    """An order could not be carried out; `str()` says why, and what holds now."""


@contextlib.asynccontextmanager
async def listening(carry_out: Callable[[Order, Say], Awaitable[None]]) -> AsyncIterator[None]:
    """Take orders while the context is open. `carry_out` may raise OrderFailed and SettingError."""

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

    try:
        directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        server = await asyncio.start_unix_server(on_order, directory / SOCKET, limit=MAX_ORDER_BYTES)
    except OSError as error:
        log.warning("`tokenfleet roll` cannot reach this fleet: %s", error)
        yield
        return
    try:
        yield
    finally:
        server.close()
        shutil.rmtree(directory, ignore_errors=True)


def sockets() -> dict[int, Path]:
    """Return process id → socket of each launcher of this user that runs on this machine."""
    found = {}
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):
            status = directory.lstat()
            pid = int(directory.name.removeprefix(PREFIX).split("-")[0])
            os.kill(pid, 0)
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                found[pid] = directory / SOCKET
    return found


async def order(path: Path, order: Order, say: Say) -> None:
    """Give a launcher an order, and pass on what it says. Raises OrderFailed."""
    try:
        reader, writer = await asyncio.open_unix_connection(path)
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
