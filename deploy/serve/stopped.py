"""Stopped processes: ends those of the fleet that were stopped (SIGSTOP) and do not go on.

A stopped process answers nobody and keeps what it holds until its heartbeat or lease expires. Whoever is
stopped is certain in /proc, however loaded the machine is; so it need not be waited for.
"""

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass

from deploy.serve.family import PROC, family
from deploy.serve.fleet import LocalFleet

log = logging.getLogger(__name__)

NUM_LOOKS = 5
"""So many looks in a row must find one stop. They are counted, not seconds: while the launcher itself was
stopped, nobody could go on before it looked again.
"""
STOPPED = b"T"
"""By a signal; `t` is held by a debugger, which is left alone."""


@dataclass(frozen=True, slots=True)
class Stop:
    """One stop of a process: it has had so much processor time, and gets none before it goes on."""

    pid: int
    started_ticks: int
    cpu_ticks: int


def read_stop(pid: int) -> Stop | None:
    """The stop of a process that is stopped; elsewhere than on Linux nobody is seen to be."""
    try:
        line = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    fields = line[line.rindex(b")") + 2 :].split()
    if fields[0] != STOPPED:
        return None
    return Stop(pid, int(fields[19]), int(fields[11]) + int(fields[12]))


async def end_stopped(fleet: LocalFleet) -> None:
    """End every process of which a part stays stopped for STOPPED_GRACE_S, with all that it has started."""
    grace_s = fleet.settings.stopped_grace_s
    seen: Counter[Stop] = Counter()
    while grace_s:
        await asyncio.sleep(grace_s / NUM_LOOKS)
        found = {
            stop: process for process in fleet.all for pid in family(process.pid) if (stop := read_stop(pid))
        }
        seen = Counter({stop: seen[stop] + 1 for stop in found})
        for stop, process in found.items():
            if seen[stop] == NUM_LOOKS:
                log.warning("%s is ended: process %d was stopped, and does not go on", process.name, stop.pid)
                process.kill()
