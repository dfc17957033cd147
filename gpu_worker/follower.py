"""The follower: the process of a worker on a machine without its rank 0. It starts the ranks of this machine,
and ends with them. It needs no broker: rank 0 tells its ranks what to do.
"""

import asyncio
import logging
import signal
from collections.abc import Mapping, Sequence

from common.metrics import exposition
from common.process import logs
from common.process.startup import READY, ProcessIdentity
from common.rank import RankInfo
from common.settings.settings import Settings
from gpu_worker.agent.engine_client import EngineClient, EngineDied, RankProcess
from gpu_worker.protocol import StepResult

log = logging.getLogger(__name__)


def configure_follower(own: ProcessIdentity, settings: Settings) -> None:
    """Set up logging, and serve this process's metrics. Raises SettingError."""
    logs.set_up(own.name, settings.log_level, settings.json_output, own.incarnation)
    exposition.start_metrics_server(settings, READY.is_set)


async def follow(
    settings: Settings,
    environ: Mapping[str, str],
    ranks: Sequence[RankInfo],
    preloaded: Sequence[RankProcess] = (),
) -> int:
    """Run the ranks until they end → the exit status: 0 if rank 0 has ended the worker in order. Raises
    SettingError.

    SIGTERM waits GRACEFUL_TERMINATION_TIMEOUT for that: when all machines are told to end, the requests that
    run are finished.
    """
    engine = await EngineClient.start({**settings.environ(), **environ}, ranks, preloaded)
    loop = asyncio.get_running_loop()
    grace_s = settings.graceful_termination_timeout
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, loop.call_later, grace_s, engine.kill)
    try:
        await engine.ready(log.info)
        READY.set()
        log.info("%s of %d: ready for rank 0", describe(ranks), ranks[0].world_size)
        await engine.run_steps(ignore)
    except EngineDied as error:
        if engine.has_ended_in_order:
            log.info("the worker has ended")
            return 0
        log.error("%s", error)
        return 1
    finally:
        engine.kill()
    return 0


def describe(ranks: Sequence[RankInfo]) -> str:
    return "rank " + ", ".join(str(info.rank) for info in ranks)


def ignore(steps: Sequence[StepResult]) -> None:
    """Ranks above 0 send no steps."""
