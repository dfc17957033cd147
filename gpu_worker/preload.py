"""Preload: a worker process that has imported everything, as have its engine's processes, and perhaps loaded
the model, and waits until the launcher says which worker it becomes.
"""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Sequence

import setproctitle

from common.process.preload import ACCEPTED, READY, detach_stdin
from gpu_worker.agent.engine_client import RankProcess
from gpu_worker.protocol import LoadProgress


async def wait_for_place(num_ranks: int, flags: Sequence[str]) -> list[RankProcess]:
    """Start the processes of `num_ranks` ranks with these flags, and return them when this process has its
    place in the fleet: its variables are in the environment then. Exits when the launcher or a rank ends
    before.
    """
    launcher = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    reader, writer = await asyncio.open_unix_connection(sock=launcher)
    ranks = [await RankProcess.start({}, flags) for _ in range(num_ranks)]
    for rank in ranks:
        if not isinstance(frame := await rank.link.receive(), LoadProgress):
            sys.exit(f"an engine cannot be preloaded: {frame}")
    setproctitle.setproctitle("tokenfleet preloaded")
    writer.write(READY)
    line = await first_line(reader, ranks)
    if not line:
        sys.exit(0)
    os.environ.update(json.loads(line))
    writer.write(ACCEPTED)
    await writer.drain()
    writer.close()
    detach_stdin()
    return ranks


async def first_line(reader: asyncio.StreamReader, ranks: list[RankProcess]) -> bytes:
    """Return the launcher's line, empty when the launcher or a rank ended."""
    line = asyncio.create_task(reader.readline())
    ends = [asyncio.create_task(rank.process.wait()) for rank in ranks]
    await asyncio.wait([line, *ends], return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    return line.result() if line.done() else b""
