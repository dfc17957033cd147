"""Processes of the fleet that a fork server starts (tests/support/forks/server.py), with the interface of
those that the interpreter starts. Elsewhere than on Linux, and where a variable differs that is read by an
import, the interpreter starts them.
"""

import asyncio
import ctypes
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.support.source_tree import python_path

PR_SET_CHILD_SUBREAPER = 36
MAX_BYTES = 2**17
ANSWER_S = 600.0  # the first engine waits for the imports
READY = b"ready"
AT_IMPORT = ("HF_", "HUGGINGFACE", "TRANSFORMERS_", "TORCH", "OMP_", "GOMP_", "MKL_", "LD_", "XDG_")
"""Prefixes of variables that imported modules read."""
MODULES = {
    *("api", "batcher", "deploy.cli", "gpu_worker", "gpu_worker.engine"),
    "deploy.launcher.template",
    *("tests.support.chaos.launcher", "tests.support.chaos.worker", "tests.support.chaos.engine"),
    *("tests.support.fleet.fake_fleet", "tests.support.forks.command"),
    "tests.support.engine.multi_rank_engine",
}
ORIGINAL = asyncio.create_subprocess_exec


@dataclass(frozen=True, slots=True)
class Start:
    """A process to start.

    Attributes:
        parent: whose child it is to be.
        numbers: of its files, in the order in which they come.
    """

    module: str
    arguments: Sequence[str]
    environ: Mapping[str, str]
    directory: str
    parent: int
    numbers: Sequence[int]
    new_session: bool


@dataclass(frozen=True, slots=True)
class ForkServer:
    """The socket to a fork server."""

    sock: socket.socket
    lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self, start: Start, files: Sequence[int]) -> int:
        """Start a process. Returns the process id of a child of ours. Meanwhile orphans below us become our
        children.
        """
        with self.lock:
            prctl = ctypes.CDLL(None).prctl
            prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self.sock, [json.dumps(asdict(start)).encode()], files)
                self.sock.settimeout(ANSWER_S)
                return int(self.sock.recv(MAX_BYTES))
            finally:
                prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


SERVERS: list[ForkServer] = []
"""The fork server of this process, once it has one."""
AT_START: dict[str, str] = {}
"""The variables that the fork server had during its imports. A copy has its original's."""


def server() -> ForkServer:
    """Return the fork server of this process, and start it if needed. That takes seconds, so start it before
    an event loop runs.
    """
    if not SERVERS:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [sys.executable, "-P", "-m", "tests.support.forks", str(theirs.fileno())]
            AT_START.update(os.environ)
            environ = AT_START | {"PYTHONPATH": python_path()}
            subprocess.Popen(words, env=environ, pass_fds=[theirs.fileno()], start_new_session=True)
        assert ours.recv(MAX_BYTES) == READY, "the fork server ended"
        SERVERS.append(ForkServer(ours))
    return SERVERS[0]


def can_fork(words: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether a copy of the fork server is the same as the process that these words start."""
    runs_module = words[:1] == [sys.executable] and "-m" in words[1:3]
    if sys.platform != "linux" or not runs_module or words[words.index("-m") + 1] not in MODULES:
        return False
    return read_by_imports(environ) == read_by_imports(AT_START or os.environ)


def read_by_imports(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(AT_IMPORT)}


class ForkedProcess(subprocess.Popen[Any]):
    """A process with the interface of Popen. The interpreter starts those that cannot be forked."""

    def _execute_child(self, *arguments: Any) -> None:
        begin = super()._execute_child  # type: ignore[misc]
        given = inspect.signature(begin).bind(*arguments).arguments
        words = [os.fspath(word) for word in given["args"]]
        environ = os.environ if given["env"] is None else given["env"]
        if not can_fork(words, environ):
            begin(*arguments)
            return
        place = words.index("-m") + 1
        ends = {0: given["p2cread"], 1: given["c2pwrite"], 2: given["errwrite"]}
        files = {number: number if end == -1 else end for number, end in ends.items()}
        files |= {number: number for number in given["pass_fds"]}
        start = Start(
            module=words[place],
            arguments=words[place + 1 :],
            environ=dict(environ),
            directory=os.fspath(given["cwd"] or os.getcwd()),
            parent=os.getpid(),
            numbers=list(files),
            new_session=given["start_new_session"],
        )
        self.pid = server().start(start, list(files.values()))
        self._child_created = True
        names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in names))  # type: ignore[attr-defined]


class AwaitedProcess:
    """A forked process with the interface of asyncio's; it has no pipes."""

    def __init__(self, process: ForkedProcess) -> None:
        self.process = process
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.poll()

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    async def wait(self) -> int:
        if self.returncode is None:
            handle = os.pidfd_open(self.pid)
            loop, ended = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(handle, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(handle)
                os.close(handle)
        return self.process.wait()


async def create_subprocess_exec(*words: str, **options: Any) -> AwaitedProcess | asyncio.subprocess.Process:
    """Replacement of asyncio's function that forks processes of the fleet."""
    if can_fork(list(words), options.get("env") or os.environ):
        return AwaitedProcess(await asyncio.to_thread(lambda: ForkedProcess(words, **options)))
    return await ORIGINAL(*words, **options)
