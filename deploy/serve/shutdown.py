"""Shutdown: a first signal drains the fleet, a second one ends it now."""

import asyncio
import logging
import signal

from common.broker.client import ERRORS, connect
from common.broker.keys import Keys
from common.settings.settings import Settings
from deploy.serve.fleet import LocalFleet
from deploy.serve.supervised_process import stop

log = logging.getLogger(__name__)

SHORT_STOP_S = 3.0
LAST_WORDS_S = 5.0
"""How long a process may take to end when its time to drain is over."""
ONE_REQUEST_S = 0.5
COUNT_TIMEOUT_S = 1.0


class FleetEnded(Exception):
    """The fleet has to end. `str()` is the reason, empty where it has been logged already."""

    def __init__(self, exit_code: int, reason: str = "") -> None:
        super().__init__(reason)
        self.exit_code = exit_code


async def end_on_signals(fleet: LocalFleet) -> None:
    """Drains the fleet at the first SIGTERM or SIGINT, until it is drained or a second one comes. Raises
    FleetEnded.
    """
    signalled = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, signalled.set)
    await signalled.wait()
    drained = asyncio.create_task(drain(fleet))
    again = asyncio.create_task(second_signal(signalled))
    try:
        await asyncio.wait((drained, again), return_when=asyncio.FIRST_COMPLETED)
        raise FleetEnded(0 if drained.done() else 1)
    finally:
        drained.cancel()
        again.cancel()


async def second_signal(signalled: asyncio.Event) -> None:
    """Returns at a second signal. A signal to our whole group is often followed by the same one from a parent
    that passes it on (make, timeout, systemd): these are one.
    """
    await asyncio.sleep(ONE_REQUEST_S)
    signalled.clear()
    await signalled.wait()


async def drain(fleet: LocalFleet) -> None:
    """Stops gateways when their requests are finished, then batchers and workers, then the broker.

    They may have been told to end as well, by a machine that shuts down. What gateways have handed over
    before the launcher was told goes to their successors first.
    """
    await fleet.keeper.wait_for_heirs()
    fleet.is_ending = True
    fleet.keeper.close()  # first: a gateway without it finishes its answers itself
    timeout_s = fleet.settings.graceful_termination_timeout
    log.info(
        "waiting up to %.0f s for %s to finish; new ones get 503. Signal again (Ctrl-C) to end now",
        timeout_s,
        await live_requests(fleet.settings),
    )
    await stop([*fleet.gateways, *fleet.jobs], timeout_s + LAST_WORDS_S)
    rest_s = SHORT_STOP_S if fleet.is_whole else timeout_s + LAST_WORDS_S
    await stop([*fleet.batchers, *fleet.workers], rest_s)
    await stop(fleet.brokers, SHORT_STOP_S)


async def live_requests(settings: Settings) -> str:
    """`3 requests`, queued and running; `running requests` where the broker does not answer."""
    assert settings.redis_url is not None
    try:
        async with asyncio.timeout(COUNT_TIMEOUT_S), connect(settings.redis_url) as redis:
            count = await redis.xlen(Keys(settings.pool).requests)
    except (*ERRORS, TimeoutError):
        return "running requests"
    return f"{count} request{'s' * (count != 1)}"
