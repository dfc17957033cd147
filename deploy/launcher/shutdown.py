"""Shutdown: a first signal drains the fleet, a second one ends it at once."""

import asyncio
import logging
import signal

from common.broker.client import ERRORS
from common.broker.pool_client import PoolClient
from common.process.event_loop import run_until_one_ends
from common.process.logs import plural
from deploy.launcher.fleet import LocalFleet
from deploy.launcher.supervised_process import stop

log = logging.getLogger(__name__)

SHORT_STOP_S = 3.0
LAST_WORDS_S = 5.0
"""How long a process may take to end when its time to drain is over."""
ONE_REQUEST_S = 0.5
"""Signals within this time of the first are one request to end."""
COUNT_TIMEOUT_S = 1.0


class FleetEnded(Exception):
    """The fleet has to end. `str()` is the reason, empty if it has been logged already."""

    def __init__(self, exit_code: int, reason: str = "") -> None:
        super().__init__(reason)
        self.exit_code = exit_code


async def end_on_signals(fleet: LocalFleet) -> None:
    """Wait for SIGTERM or SIGINT, then drain the fleet until it is drained or a second signal comes. Raises
    FleetEnded.
    """
    signalled = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signalled.set)
    await signalled.wait()
    await run_until_one_ends(drain(fleet), end_at_second_signal(signalled))
    raise FleetEnded(0)


async def end_at_second_signal(signalled: asyncio.Event) -> None:
    """Raises FleetEnded at a second signal. A signal to our whole process group often comes twice, because a
    parent (make, timeout, systemd) passes it on: the two count as one.
    """
    await asyncio.sleep(ONE_REQUEST_S)
    signalled.clear()
    await signalled.wait()
    raise FleetEnded(1, "a second signal: the fleet ends without waiting for requests")


async def drain(fleet: LocalFleet) -> None:
    """Stop gateways when their requests are finished, then batchers and workers, then the broker.

    A machine that shuts down may have signalled them as well. Answers that gateways have handed over by then
    go to their successors first.
    """
    await fleet.keeper.wait_for_heirs()
    fleet.is_ending = True
    fleet.keeper.close()  # first: a gateway without it finishes its answers itself
    timeout_s = fleet.settings.graceful_termination_timeout
    log.info("%s", waits_for(await count_live(fleet), timeout_s))
    await stop([*fleet.gateways, *fleet.jobs], timeout_s + LAST_WORDS_S)
    rest_s = SHORT_STOP_S if fleet.is_whole else timeout_s + LAST_WORDS_S
    await stop([*fleet.batchers, *fleet.workers], rest_s)
    await stop(fleet.brokers, SHORT_STOP_S)


def waits_for(num_requests: int | None, timeout_s: float) -> str:
    """Say what the shutdown waits for."""
    if num_requests == 0:
        return "no request runs: the fleet ends"
    found = "running requests" if num_requests is None else plural(num_requests, "request")
    return (
        f"waiting up to {timeout_s:.0f} s for {found} to finish; new ones get 503."
        " Signal again (Ctrl-C) to end now"
    )


async def count_live(fleet: LocalFleet) -> int | None:
    """Count the requests that wait or run. None: the broker does not answer."""
    if not any(process.pid for process in fleet.ours):
        return 0
    try:
        async with asyncio.timeout(COUNT_TIMEOUT_S), PoolClient.connect(fleet.settings) as pool:
            return int(await pool.redis.xlen(pool.keys.requests))
    except (*ERRORS, TimeoutError):
        return None
