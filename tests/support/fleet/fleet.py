"""A whole fleet, started as a person would: `tokenfleet serve` in a process of its own, on a free port."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
import redis

from common.broker.keys import Keys
from deploy.launcher.embedded_broker import Broker
from tests.support.machine.ports import free_port
from tests.support.waiting import wait_until_sync

READY_S = 240.0
LAST_WORDS = 10_000


class Fleet:
    """`with Fleet(num_workers=2, kv_cache_bytes="64MiB") as fleet:` starts it and returns when it is ready;
    leaving kills all of it.

    Settings are those of `common.settings.settings`, by name. Inside `async with` the same happens.

    Attributes:
        base_url: of the gateways, without a slash at the end.
        redis_url: of the broker, embedded or as given.
        launcher: the process of `tokenfleet serve`.
        command: what runs it, as words after `python -P -m`.
        start_process: starts it; in tests, a fork server does (tests/conftest.py).
    """

    command: tuple[str, ...] = ("deploy.cli", "serve")
    start_process: type[subprocess.Popen[Any]] = subprocess.Popen

    def __init__(self, **settings: Any) -> None:
        own = {"hostname": "127.0.0.1", "port": free_port(), "preload": False}
        self.settings: dict[str, Any] = own | settings
        self.base_url = f"http://127.0.0.1:{self.settings['port']}"
        self.directory = Path(tempfile.mkdtemp(prefix="tokenfleet-test-"))

    def start(self) -> "Fleet":
        """Start `tokenfleet serve` without waiting."""
        variables = {name.upper(): str(value) for name, value in self.settings.items() if value is not None}
        command = [sys.executable, "-P", "-m", *self.command]
        environ = os.environ | variables | {"PARENT_PID": str(os.getpid())}
        with (self.directory / "stdout").open("w") as out, (self.directory / "stderr").open("w") as error:
            self.launcher = self.start_process(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=error
            )
        self.known = {self.launcher.pid: psutil.Process(self.launcher.pid)}
        return self

    def ready(self, timeout_s: float = READY_S) -> "Fleet":
        """Wait until the launcher says that the fleet serves. Raises AssertionError with its last lines if it
        ends.
        """
        wait_until_sync(
            lambda: self.launcher.poll() is not None or "/generate_stream" in self.output() + self.errors(),
            timeout_s,
        )
        assert self.launcher.poll() is None, (
            f"`tokenfleet serve` ended with {self.launcher.returncode}:\n{self.errors()}"
        )
        return self

    def kill(self) -> None:
        """End every process of the fleet now."""
        self.processes()
        self.launcher.kill()
        self.launcher.wait()
        _, alive = psutil.wait_procs(list(self.known.values()), timeout=3)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended since
                process.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def output(self) -> str:
        return (self.directory / "stdout").read_text()

    def errors(self) -> str:
        """Return what all processes of the fleet have logged as errors."""
        return (self.directory / "stderr").read_text()

    @property
    def redis_url(self) -> str:
        if self.settings.get("redis_url"):
            return str(self.settings["redis_url"])
        return url_of(psutil.Process(self.pid("broker")))

    def processes(self) -> list[psutil.Process]:
        """The launcher and all its living descendants."""
        launcher = self.known[self.launcher.pid]
        everybody = [launcher, *launcher.children(recursive=True)] if launcher.is_running() else []
        self.known |= {process.pid: process for process in everybody}
        return everybody

    def pids(self) -> dict[str, int]:
        """Process ids by name: `broker`, `g0`, `b0`, `w0` … A process that only starts has no name yet."""
        return {
            name: child.pid
            for child in psutil.Process(self.launcher.pid).children()
            if (name := name_of(child))
        }

    def pid(self, name: str) -> int:
        """Return the process id of `w0`, once it exists."""
        return int(wait_until_sync(lambda: self.pids().get(name)))

    def engines(self, worker: str) -> list[psutil.Process]:
        """Return the ranks of a worker, in order: its children without the fork server."""
        children = psutil.Process(self.pid(worker)).children()
        ranks = [child for child in children if is_of_fleet(child)]
        return sorted(ranks, key=lambda process: process.pid)

    def preloaded(self, kind: str = "worker") -> int:
        """Return the process id of the template that has loaded what workers, or gateways, have; 0 without
        one.
        """
        children = psutil.Process(self.launcher.pid).children()
        loaded = ["tokenfleet", f"preloaded-{kind}"]
        return next((child.pid for child in children if title(child) == loaded), 0)

    def workers_ready(self) -> int:
        """Return the number of workers that the batcher has taken over and gives rows to."""
        with redis.Redis.from_url(self.redis_url) as client:
            return int(client.hget(Keys("default").state, "workers") or 0)

    def restarted(self, name: str, old_pid: int, timeout_s: float = READY_S) -> int:
        """Wait for the successor of a process that ended. Returns its pid."""
        end_s = time.monotonic() + timeout_s
        return int(
            wait_until_sync(
                lambda: (pid := self.pids().get(name)) != old_pid and pid, end_s - time.monotonic()
            )
        )

    def __enter__(self) -> Self:
        self.start()
        try:
            self.ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            print(self.errors()[-LAST_WORDS:], file=sys.stderr)
        refused = self.refused() if error is None else []
        self.kill()
        assert not refused, "processes lack rights (common/broker/acl.py)"

    def refused(self) -> list[str]:
        """What processes had no right to at the embedded broker, since its start, as `worker: +xadd`. Each
        process has the rights of its kind alone. Empty if there is no such broker, or it has ended.
        """
        is_own = not self.settings.get("redis_url") and self.launcher.poll() is None
        broker = self.pids().get("broker") if is_own else None
        if not broker:
            return []
        with redis.Redis.from_url(url_of(psutil.Process(broker))) as client:
            log: Any = client.acl_log()
        return [
            f"{one['username']}: {one['object']} ({one['context']})" for one in log if one["reason"] != "auth"
        ]

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


def name_of(process: psutil.Process) -> str:
    """Return `w0` for a process titled `tokenfleet worker w0`, `broker` for the broker, else nothing."""
    with contextlib.suppress(psutil.Error):
        if process.name() == "valkey-server":
            return "broker"
    words = title(process)
    return words[2] if len(words) == 3 and words[0] == "tokenfleet" else ""


def url_of(broker: psutil.Process) -> str:
    """Return the URL of an embedded broker, once it listens."""
    [path] = wait_until_sync(lambda: {one.laddr for one in broker.net_connections(kind="unix") if one.laddr})
    return Broker(Path(path).parent).url


def is_alive(process: psutil.Process) -> bool:
    """Whether a process has not ended. A zombie has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def have_ended(processes: Iterable[psutil.Process]) -> bool:
    return not any(map(is_alive, processes))


def is_of_fleet(process: psutil.Process) -> bool:
    """Whether a process runs and is not a fork server of tests."""
    return title(process) not in ([], ["tokenfleet", "forks"])


def title(process: psutil.Process) -> list[str]:
    """Return the words that `ps` shows of a process; empty if it has ended."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline()).split()
    return []
