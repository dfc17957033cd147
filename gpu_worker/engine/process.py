"""The engine process, one for each rank of a worker: `python -m gpu_worker.engine N`, or a copy of a worker
that is itself a copy of a template.

Settings and the rank (torchrun's variables) are in the environment; a copy waits for them. File N is a socket
to the process that has started this one: the agent, or on a machine without rank 0 its follower. Ranks above
0 say how they load, that they are ready, and why they failed.
"""

import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

import setproctitle

from common.model_files import no_progress
from common.process import logs, machine
from common.process.launch import die_with_parent
from common.rank import RankInfo
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.parallel.rendezvous import RankLinks, RankLost, RendezvousFailed, connect_ranks
from gpu_worker.protocol import AgentLink, Begin, EngineFailure, LoadProgress, PeerClosed, WorkerEnds

log = logging.getLogger(__name__)

SPIN_COUNT = ("GOMP_SPINCOUNT", "2000")
"""OpenMP threads that wait for each other sleep soon. On cores shared with other processes, a spinning thread
would keep the thread that it waits for from running. OpenMP reads it when torch is imported.
"""
CUDA_ERROR_NOT_INITIALIZED = 3
LOSS_TIMEOUT_S = 1.0
"""How long an error of a collective operation waits for the news that a rank is lost."""


def main() -> None:
    start(socket.socket(fileno=int(sys.argv[1])))


def start(channel: socket.socket, preloaded: "Preloaded | None" = None) -> None:
    """Serve the process at the other end of the socket until it closes that."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):  # the agent decides when the engine ends
        signal.signal(number, signal.SIG_IGN)
    link = AgentLink(channel)
    try:
        if preloaded is not None:
            setproctitle.setproctitle("tokenfleet engine")
            os.environ.update(link.receive(Begin).variables)
        setproctitle.setproctitle(f"tokenfleet engine {os.environ.get('WORKER_NAME', 'w0')}")
        serve(link, preloaded.model if preloaded else None)
    except PeerClosed:
        exit_now(0)
    except RankLost as lost:
        end_with(link, lost)
    except RendezvousFailed as error:
        report_failure(link, EngineFailure("", str(error)))
    except SettingError as error:
        report_failure(link, EngineFailure(error.name, error.cause))
    except BaseException as error:
        log.critical("the engine crashed", exc_info=True)
        report_failure(link, EngineFailure("", repr(error)))


class Preloaded(NamedTuple):
    """What a process has that may become an engine: its modules, and the model if that is loaded."""

    model: Any


def preload(everything: bool) -> Preloaded:
    """Import all that an engine needs, and load the model if `everything` is wanted. GPUs are not touched,
    since it is not known yet which of them may be used. Raises SettingError.
    """
    prepare_import()
    import torch

    import gpu_worker.engine.loop  # noqa: F401  it imports everything
    from gpu_worker.engine.drafting.load_draft import load_draft
    from gpu_worker.engine.model.load import load
    from gpu_worker.engine.parallel.communicator import SINGLE_RANK

    check_cuda_is_unused()
    if not everything:
        return Preloaded(None)
    torch.set_num_threads(1)  # others would not be in a copy, nor that of progress bars
    import_module("tqdm").tqdm.monitor_interval = 0
    loaded = load(Settings.read([]), no_progress, SINGLE_RANK, load_draft)
    machine.return_memory()
    return Preloaded(loaded)


def prepare_import() -> None:
    os.environ.setdefault(*SPIN_COUNT)
    gc.disable()  # collections while torch and transformers are imported take a fifth of the start


def check_cuda_is_unused() -> None:
    """Raises RuntimeError if an import has initialised CUDA: the driver reads CUDA_VISIBLE_DEVICES only
    then.
    """
    with contextlib.suppress(OSError):  # no driver
        count = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count)) != CUDA_ERROR_NOT_INITIALIZED:
            raise RuntimeError("an import has initialised CUDA")


def serve(link: AgentLink, loaded: Any) -> None:
    """Serve with the model `loaded`; load one if it is None."""
    settings, info = Settings.read([], os.environ), RankInfo.read(os.environ)
    name = f"{os.environ.get('WORKER_NAME', 'w0')} engine{f' rank {info.rank}' if info.rank else ''}"
    logs.set_up(name, settings.log_level, settings.json_output, os.environ.get("WORKER_INCARNATION", ""))
    if info.world_size == 1:
        return run(settings, info, link, loaded, None)
    if not info.is_local:
        link.send(LoadProgress(f"waiting for all {info.world_size} ranks at {info.address}:{info.port}"))
    links = connect_ranks(
        info, peer_timeout_s=settings.worker_ttl_s, num_stages=settings.pipeline_parallel_size
    )
    links.watch(lambda lost: end_with(link, lost))
    try:
        run(settings, info, link, loaded, links)
    except WorkerEnds:
        links.say_end()
        raise
    except RuntimeError as error:  # of gloo or NCCL, if another rank has ended
        if lost := links.wait_for_loss(LOSS_TIMEOUT_S):
            raise lost from error
        raise


def run(settings: Settings, info: RankInfo, link: AgentLink, loaded: Any, links: RankLinks | None) -> None:
    """Load the model unless it is `loaded`, and run steps until the agent or rank 0 ends."""
    prepare_import()
    # this takes seconds: bad settings are reported before that
    from gpu_worker.engine.engine import Engine
    from gpu_worker.engine.loop import run_follower, run_leader
    from gpu_worker.engine.parallel.communicator import Communicator

    communicator = Communicator(info, links, settings.pipeline_parallel_size)
    engine = Engine(settings, lambda text: link.send(LoadProgress(text)), communicator, loaded)
    gc.freeze()
    gc.enable()
    machine.return_memory()
    link.send(engine.ready)
    if info.rank:
        run_follower(engine, communicator)
    else:
        run_leader(engine, communicator, link)


def end_with(link: AgentLink, lost: RankLost) -> NoReturn:
    """End this rank since another one is lost, or since rank 0 ends the worker."""
    if lost.is_end:
        exit_now(0)
    report_failure(link, EngineFailure("", str(lost)))


def report_failure(link: AgentLink, failure: EngineFailure) -> NoReturn:
    with contextlib.suppress(PeerClosed):
        link.send(failure)
    exit_now(1)


def exit_now(status: int) -> NoReturn:
    """End the process at once: freeing memory in order would take long."""
    sys.stderr.flush()
    os._exit(status)
