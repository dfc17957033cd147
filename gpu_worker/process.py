"""The worker process: starts the engine, runs the agent, and seals its own logs when it ends.

On a machine without its rank 0 it is a follower: it starts the ranks of this machine, and ends with them. It
needs no broker: rank 0 tells its ranks what to do.

A worker that is a copy of a template has imported what its engine needs, and perhaps loaded the model. It
copies itself to make the engine's processes, and makes no other use of that.

GPU claims: locks that keep workers on one machine, or in containers that share a folder, from taking the same
GPU.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import uvloop

from common.metrics import exposition
from common.process import logs
from common.process.launch import ForkedProcess
from common.process.logs import plural
from common.process.machine import visible_gpus
from common.process.startup import (
    READY,
    ProcessIdentity,
    configure_process,
    exit_when_unservable,
    start_process,
)
from common.rank import RankInfo, machine_ranks
from common.settings.settings import SettingError, Settings
from gpu_worker.agent.engine_client import EngineClient, EngineDied, RankProcess
from gpu_worker.engine import process as engine_process
from gpu_worker.engine.process import Preloaded
from gpu_worker.swapping.swapper import Swapper

log = logging.getLogger(__name__)


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
        numbers = ", ".join(str(info.rank) for info in ranks)
        log.info("rank %s of %d: ready for rank 0", numbers, ranks[0].world_size)
        await engine.run_steps(lambda _: None)  # ranks above 0 send none
    except EngineDied as error:
        if any(rank.process.returncode == 0 for rank in engine.ranks):
            log.info("the worker has ended")
            return 0
        log.error("%s", error)
        return 1
    finally:
        engine.kill()
    return 0


preload = engine_process.preload
"""What a template loads for its copies."""


def fork_engines(preloaded: Preloaded, count: int) -> list[tuple[int, socket.socket]]:
    """Copy this process, which has no thread and no event loop yet → the process id of each engine, and the
    socket to it.
    """
    forked: list[tuple[int, socket.socket]] = []
    own = str(os.getpid())
    for _ in range(count):
        ours, theirs = socket.socketpair()
        forked.append((os.fork(), ours))
        if not forked[-1][0]:
            for _, channel in forked:
                channel.close()
            os.environ["PARENT_PID"] = own
            engine_process.start(theirs, preloaded)
            os._exit(0)
        theirs.close()
    return forked


def own_ranks(settings: Settings) -> list[RankInfo]:
    """The ranks that this process starts: the one that a launcher has made it, or all of this machine. Raises
    SettingError.
    """
    launched = RankInfo.read(os.environ)
    if launched.world_size == 1:
        return machine_ranks(settings, num_ranks(settings))
    if launched.world_size != (settings.num_ranks if settings.num_shard else launched.world_size):
        cause = f"{settings.num_ranks} ranks, but {launched.world_size} ranks were started"
        raise SettingError("num_shard", f"{cause} (by torchrun, MPI or Slurm)")
    return [launched]


async def run(settings: Settings, own: ProcessIdentity, forked: Sequence[tuple[int, socket.socket]]) -> int:
    """Run this worker's processes of this machine, with the engines that were forked → the exit status."""
    preloaded = [await RankProcess.open(ForkedProcess(pid), channel) for pid, channel in forked]
    ranks = own_ranks(settings)
    environ = {"WORKER_NAME": own.name, "WORKER_INCARNATION": own.incarnation}
    if RankInfo.read(os.environ).world_size == 1 and (gpus := claim(settings, len(ranks))):
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)  # torchrun has chosen the GPUs of its ranks
    if ranks[0].rank:
        logs.set_up(own.name, settings.log_level, settings.json_output, own.incarnation)
        exposition.start_metrics_server(settings, READY.is_set)
        return await follow(settings, environ, ranks, preloaded)
    configure_process(own, settings)
    return await Swapper(settings, own, environ, ranks, preloaded).run()


def main(preloaded: Preloaded | None = None) -> None:
    """Run a worker; on a machine without its rank 0 only the ranks there.

    Args:
        preloaded: in a copy of a template, what `preload` has returned.
    """
    identity = start_process("worker", "w0")
    with exit_when_unservable():
        settings = Settings.read([])
        forked = fork_engines(preloaded, len(own_ranks(settings))) if preloaded else []
        sys.exit(uvloop.run(run(settings, identity, forked)))


def num_ranks(settings: Settings) -> int:
    """Return how many ranks run the model together. Raises SettingError."""
    if settings.num_shard is None and settings.sharded:
        stages, count = settings.pipeline_parallel_size, len(usable_gpus(settings)) * settings.nnodes
        if count >= max(2, stages):
            return count - count % stages
        raise SettingError(
            "sharded",
            f"true, but this worker sees {plural(count, 'GPU')}; NUM_SHARD says how many ranks run without",
        )
    return settings.num_ranks


def usable_gpus(settings: Settings) -> list[str]:
    return visible_gpus() if settings.device != "cpu" else []


def claim(settings: Settings, count: int) -> dict[str, IO[str]]:
    """Claim `count` GPUs → the lock of each by its UUID; a lock holds as long as its file is open. Empty on a
    machine without GPUs.

    Workers that take only a part of a GPU's memory (CUDA_MEMORY_FRACTION) share the GPU, as many as fit.

    Raises:
        SettingError: too few GPUs are left, or the locks cannot be taken.
    """
    gpus = usable_gpus(settings)
    if not gpus:
        return {}  # with DEVICE=cuda the engine reports the fault
    if count > len(gpus):
        here = " on each machine (NNODES)" if settings.nnodes > 1 else ""
        cause = f"{here}, but this worker sees {plural(len(gpus), 'GPU')}"
        raise SettingError("num_shard", f"{count}{cause}")
    folder = Path(settings.gpu_locks)
    held: dict[str, IO[str]] = {}
    for place in range(int(1 / settings.cuda_memory_fraction)):
        for gpu in gpus:
            if (
                len(held) < count
                and gpu not in held
                and (lock := lock_file(folder / f"{gpu}.{place}")) is not None
            ):
                held[gpu] = lock
    if len(held) == count:
        return held
    for lock in held.values():
        lock.close()
    taken = f"{len(gpus) - len(held)} of {plural(len(gpus), 'GPU')}"
    raise SettingError("device", f"other workers of this machine hold {taken} (locks in {folder})")


def lock_file(path: Path) -> IO[str] | None:
    """Lock a file → the open file, or None if another process holds the lock. The system releases the lock
    when its process ends. Raises SettingError.
    """
    try:
        make_lock(path)
        file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))
    except OSError as error:
        raise SettingError("gpu_locks", f"{path} cannot be used as a lock: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def make_lock(path: Path) -> None:
    """Make a file that every user of this machine may lock, and its folder, unless they exist. A symbolic
    link is not followed. Raises OSError.
    """
    if not path.parent.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o1777)
    with contextlib.suppress(FileExistsError):
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        os.fchmod(handle, 0o644)
        os.close(handle)
