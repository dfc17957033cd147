"""Machines that run one worker together: here groups of processes in folders, and in network namespaces, of
their own.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

from tests.support.forks.client import ForkedProcess
from tests.support.waiting import wait_until_sync

OURS, THEIRS = "10.77.0.1", "10.77.0.2"


class Machine:
    """Processes that one command starts on a machine: the command itself, and what it starts.

    Attributes:
        errors: the file of what they log.
    """

    def __init__(self, command: Sequence[str], folder: Path, **settings: Any) -> None:
        variables = {name.upper(): str(value) for name, value in settings.items()}
        self.errors = folder / "stderr"
        with self.errors.open("w") as errors:
            self.command = ForkedProcess(
                command,
                env=os.environ | variables | {"PARENT_PID": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                cwd=folder,
            )

    def engine(self) -> psutil.Process:
        """Wait for the first process of a rank."""
        found: psutil.Process = wait_until_sync(lambda: next(self.titled("tokenfleet engine"), None))
        return found

    def titled(self, title: str) -> Iterator[psutil.Process]:
        for process in psutil.Process(self.command.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has just ended
                if " ".join(process.cmdline()).startswith(title):
                    yield process

    def log(self) -> str:
        return self.errors.read_text()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            print(f"{' '.join(self.command.args)}:\n{self.log()[-5000:]}", file=sys.stderr)  # type: ignore[arg-type]
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.command.pid).children(recursive=True)
        self.command.kill()
        self.command.wait()
        for process in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def tokenfleet(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "deploy.cli", *words]


class Link:
    """A network namespace beside this process's own, and the cable between the two.

    Attributes:
        name: of the namespace; words before a command run it there.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.inside = ["ip", "netns", "exec", name]

    def __enter__(self) -> Self:
        run("ip", "netns", "add", self.name)
        run("ip", "link", "add", f"{self.name}a", "type", "veth", "peer", "name", f"{self.name}b")
        run("ip", "link", "set", f"{self.name}b", "netns", self.name)
        run("ip", "addr", "add", f"{OURS}/24", "dev", f"{self.name}a")
        run("ip", "link", "set", f"{self.name}a", "up")
        run(*self.inside, "ip", "addr", "add", f"{THEIRS}/24", "dev", f"{self.name}b")
        run(*self.inside, "ip", "link", "set", "lo", "up")
        self.heal()
        return self

    def __exit__(self, *_: object) -> None:
        run("ip", "link", "del", f"{self.name}a")
        run("ip", "netns", "del", self.name)

    def cut(self) -> None:
        """Lose all that is sent from now on; neither side is told."""
        run(*self.inside, "ip", "link", "set", f"{self.name}b", "down")

    def heal(self) -> None:
        run(*self.inside, "ip", "link", "set", f"{self.name}b", "up")


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=30)


def can_make_links() -> bool:
    """Whether this process may make network namespaces."""
    try:
        run("ip", "netns", "add", probe := f"probe{os.getpid()}")
        run("ip", "netns", "del", probe)
    except (OSError, subprocess.SubprocessError):
        return False
    return True
