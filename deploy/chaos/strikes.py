"""Strikes: the commands that kill, start again, stop and continue what is under test, by the clock."""

import asyncio
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO

from deploy.cli.client import one_line

COMMAND_TIMEOUT_S = 30.0
SHELL = ("/bin/sh", "-c", 'eval "$CHAOS_COMMAND"')
"""Runs a command that no argument of the shell shows: `pkill -f worker` would kill the shell, too."""
LAST_BYTES = 4096


@dataclass(frozen=True, slots=True)
class StrikePlan:
    """What is done, in turns: `kill` and then `restart`; `pause`, and `unpause` after `pause_s`. An empty
    command is left out.

    Attributes:
        every_s: from one strike to the next. The first comes after half of it.
        most: how many strikes at most.
    """

    kill: str = ""
    restart: str = ""
    pause: str = ""
    unpause: str = ""
    pause_s: float = 3.0
    every_s: float = 20.0
    most: int | None = None

    @property
    def kinds(self) -> Sequence[str]:
        return [kind for kind, command in (("kill", self.kill), ("pause", self.pause)) if command]

    def schedule(self, duration_s: float) -> Iterator[tuple[float, str]]:
        """Yield (seconds after the begin, kind) of each strike."""
        at_s, number = self.every_s / 2, 0
        while self.kinds and at_s < duration_s and (self.most is None or number < self.most):
            yield at_s, self.kinds[number % len(self.kinds)]
            at_s, number = at_s + self.every_s, number + 1


@dataclass(slots=True)
class Strike:
    """One strike. `problem` says why it hit nothing, or what failed after it; empty if all went well."""

    kind: str
    begun_s: float
    problem: str = ""


@dataclass(slots=True)
class Striker:
    """Carries out a plan.

    Attributes:
        started: what `restart` has started, with its output. It may be the server itself, so it goes on after
            us.
    """

    plan: StrikePlan
    strikes: list[Strike] = field(default_factory=list)
    started: list[tuple[Strike, subprocess.Popen[bytes], IO[bytes]]] = field(default_factory=list)

    async def run(self, duration_s: float) -> None:
        """Carry out the strikes of so many seconds. A pause that has begun ends in any case."""
        begun_s = time.monotonic()
        for at_s, kind in self.plan.schedule(duration_s):
            await asyncio.sleep(begun_s + at_s - time.monotonic())
            self.strikes.append(strike := Strike(kind, time.monotonic()))
            await (self.kill if kind == "kill" else self.pause)(strike)

    async def kill(self, strike: Strike) -> None:
        strike.problem = await run_command(self.plan.kill)
        if self.plan.restart:
            self.start(strike)

    def start(self, strike: Strike) -> None:
        output = tempfile.TemporaryFile()  # noqa: SIM115  the process may write to it after us
        process = subprocess.Popen(
            SHELL,
            env=environment(self.plan.restart),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.started.append((strike, process, output))

    async def pause(self, strike: Strike) -> None:
        strike.problem = await run_command(self.plan.pause)
        try:
            await asyncio.sleep(self.plan.pause_s)
        finally:
            problem = await asyncio.shield(run_command(self.plan.unpause))
            strike.problem = strike.problem or problem

    def note_failed_restarts(self) -> None:
        """Write the problems of restarts that have ended with an error to their strikes."""
        for strike, process, output in self.started:
            if process.poll():
                problem = f"restart ended with {process.returncode}: {last_line(output)}"
                strike.problem = strike.problem or problem


async def run_command(command: str) -> str:
    """Run a command of the user. Returns why it failed; empty if it did not."""
    with tempfile.TemporaryFile() as output:
        process = await asyncio.create_subprocess_exec(
            *SHELL,
            env=environment(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                code = await process.wait()
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            return f"`{command}` took more than {COMMAND_TIMEOUT_S:.0f} s"
        return f"`{command}` ended with {code}: {last_line(output)}" if code else ""


def environment(command: str) -> dict[str, str]:
    return os.environ | {"CHAOS_COMMAND": command}


def last_line(output: IO[bytes]) -> str:
    """Return the last line of a file."""
    output.seek(max(0, output.seek(0, os.SEEK_END) - LAST_BYTES))
    lines = output.read().decode(errors="replace").strip().splitlines()
    return one_line(lines[-1]) if lines else "no output"
