"""Fork server: a process that has imported what processes of the fleet import, and starts them as copies of
itself: tens of milliseconds, where an engine's imports take seconds.

A copy is a child of the process that asked for it, and does what `python -P -m MODULE` does from there on,
with the arguments, variables, files and the session that it was given. One that starts others has a fork
server of its own, a copy made before anything else. The side that asks is tests/support/forks/client.py.
"""

import asyncio
import fcntl
import gc
import importlib
import json
import os
import runpy
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import NoReturn

import setproctitle

from tests.support.forks import client
from tests.support.forks.client import MAX_BYTES, Start

MAX_FILES = 64
HIGH_FD = 200
"""Files that came are kept from here on while they are put in their places."""

FLEET = ("deploy.cli.command_line", "api.app", "batcher.process", "gpu_worker.process")
ENGINE = ("gpu_worker.engine.process", "gpu_worker.engine.loop", "transformers.models.llama.modeling_llama")
CHAOS = ("tests.support.chaos.launcher", "tests.support.chaos.engine")
IMPORTS = {
    "gpu_worker.engine": ENGINE,
    "deploy.cli": ENGINE,
    "deploy.launcher.template": ENGINE,
    "tests.support.engine.multi_rank_engine": ENGINE,
    "tests.support.forks.command": ("deploy.cli.admin",),
    "tests.support.chaos.launcher": CHAOS,
}
"""What is imported, beside FLEET, before a module's first copy is made: what it imports, and those that it
starts.
"""
STARTS_OTHERS = ("deploy.cli", "gpu_worker", "tests.support.chaos.launcher", "tests.support.chaos.worker")


def begin(sock: socket.socket) -> NoReturn:
    """Import what all processes need, say so, and serve."""
    setproctitle.setproctitle("tokenfleet forks")  # before the first copy, which would not find its place
    client.AT_START.update(os.environ)
    import_all(FLEET)
    sock.send(client.READY)
    serve(sock)


def import_all(modules: Iterable[str]) -> None:
    for module in modules:
        importlib.import_module(module)


def serve(sock: socket.socket) -> NoReturn:
    """Start processes until nobody can ask any more."""
    while True:
        content, files, _, _ = socket.recv_fds(sock, MAX_BYTES, MAX_FILES)
        if not content:
            os._exit(0)
        start = Start(**json.loads(content))
        import_all(IMPORTS.get(start.module, ()))
        gc.freeze()
        if (between := os.fork()) == 0:
            middle = os.getpid()
            if os.fork():
                os._exit(0)  # the copy has another parent then
            while os.getppid() == middle:
                time.sleep(0.001)
            become(start, sock, files)
        os.waitpid(between, 0)
        for file in files:
            os.close(file)


def become(start: Start, sock: socket.socket, files: Sequence[int]) -> NoReturn:
    """Make this copy of the server the process that the interpreter would start, and run it."""
    if os.getppid() != start.parent:
        os._exit(1)  # who asked has ended
    if start.new_session:
        os.setsid()
    os.chdir(start.directory)
    sock.send(b"%d" % os.getpid())
    sock.detach()
    place_files(files, start.numbers)
    open_streams()
    os.environ.clear()
    os.environ.update(start.environ)
    tempfile.tempdir = None  # that of TMPDIR, and not what this server has found
    sys.argv[1:] = start.arguments
    if start.module in STARTS_OTHERS:
        start_server()
    run(start.module)


def place_files(files: Sequence[int], numbers: Sequence[int]) -> None:
    """Give files their numbers, and close all others."""
    high = [fcntl.fcntl(file, fcntl.F_DUPFD, HIGH_FD) for file in files]
    os.closerange(0, HIGH_FD)
    for file, number in zip(high, numbers, strict=True):
        os.dup2(file, number, inheritable=True)
    os.closerange(HIGH_FD, max(high) + 1)


def open_streams() -> None:
    """Open the standard streams anew: the server's own remember whether their files can seek."""
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)


def start_server() -> None:
    """Start a fork server of this process, for the processes that it starts itself."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork():
        theirs.close()
        client.SERVERS.append(client.ForkServer(ours))
        asyncio.create_subprocess_exec = client.create_subprocess_exec  # type: ignore[assignment]
    else:
        ours.close()
        serve(theirs)


def run(module: str) -> NoReturn:
    """Do what `python -m` does."""
    if not hasattr(sys.modules.get(module), "__path__"):
        sys.modules.pop(module, None)  # it would be run a second time, which runpy warns of
    gc.enable()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()
