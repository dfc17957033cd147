"""Spawn: starts a process of the fleet, with its end of the channel to the socket keeper where it has one."""

import asyncio
import contextlib
import os
import signal
import socket
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence

from common.messages.kept_answer import HANDLE_VARIABLE

OpenChannel = Callable[[], socket.socket]
"""Makes a channel for one run of a gateway to the socket keeper."""


async def spawn(
    command: Sequence[str], environ: Mapping[str, str], stdin: int, open_channel: OpenChannel | None
) -> Process:
    """Start a process that leads a session of its own; `environ` comes on top of ours. Raises OSError."""
    with open_channel() if open_channel else contextlib.nullcontext() as channel:
        handles = [channel.fileno()] if channel else []
        own = {HANDLE_VARIABLE: str(channel.fileno())} if channel else {}
        return await asyncio.create_subprocess_exec(
            *command, env=os.environ | environ | own, pass_fds=handles, stdin=stdin, start_new_session=True
        )


def kill_group(process: Process) -> None:
    """End now what is left of a spawned process and of those that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
