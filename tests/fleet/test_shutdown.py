"""A machine shuts down: every process of `tokenfleet serve` gets SIGTERM at once, the broker, too."""

import asyncio
import contextlib

import psutil
import pytest

from tests.support.chaos.launcher import ChaosFleet
from tests.support.fleet.fleet import have_ended, is_of_fleet
from tests.support.load import Load
from tests.support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow

NUM_STREAMS, NUM_TOKENS = 8, 100
STEP_MS = 20.0
NUM_PROCESSES = 7
"""Number of processes: the broker, two of each other kind, and an engine for each worker."""


@pytest.mark.parametrize("launcher_is", ["first", "last", "late"])
async def test_sigterm_to_every_process_at_once_finishes_streams(launcher_is: str) -> None:
    fleet = ChaosFleet(STEP_MS, num_gateways=2, num_batchers=2, num_workers=2)
    fleet.start()
    try:
        await asyncio.to_thread(fleet.ready)
        await wait_until(lambda: len(fleet.pids()) == NUM_PROCESSES and fleet.workers_ready() == 2)
        await shut_down(fleet, launcher_is)
    finally:
        fleet.kill()


async def shut_down(fleet: ChaosFleet, launcher_is: str) -> None:
    load = Load(fleet, NUM_TOKENS, NUM_STREAMS)
    await load.progress(6)
    # its fork servers stay, which no machine has: a gateway that ends early needs a successor
    everybody = [process for process in fleet.processes() if is_of_fleet(process)]
    assert len(everybody) > 9
    gateways = [psutil.Process(pid) for name, pid in fleet.pids().items() if name in ("g0", "g1")]
    for process in everybody if launcher_is == "first" else everybody[1:]:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended with another one
            process.terminate()
    if launcher_is == "late":
        await wait_until(lambda: have_ended(gateways))
    if launcher_is != "first":
        fleet.launcher.terminate()
    await load.whole()
    assert await asyncio.to_thread(fleet.launcher.wait, PATIENCE_S) == 0, fleet.errors()
    await wait_until(lambda: have_ended(everybody))
    assert "Traceback" not in fleet.errors()
    assert launcher_is != "first" or "starts again" not in fleet.errors()
