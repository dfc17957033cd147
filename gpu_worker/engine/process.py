"""The engine process, one for each rank of a worker: `python -m gpu_worker.engine --fd N [--preload]`.

Settings and the rank (torchrun's variables) are in the environment. File N is a socket to the agent; ranks
above 0 send nothing through it but why they failed. A rank that torchrun starts on another machine has no
agent and no socket. With --preload the process imports everything, with --load it loads the model, too; then
it waits for the variables of the worker that it becomes a part of.
"""

import argparse
import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
from typing import Any, NoReturn

import setproctitle

from common.model_files import no_progress
from common.process import logs
from common.process.parent_death import die_with_parent
from common.process.preload import LOAD_FLAG, PRELOAD_FLAG
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.agent_link import AgentLink
from gpu_worker.protocol import EngineFailure, LoadProgress, PeerClosed
from gpu_worker.rank import RankInfo

log = logging.getLogger(__name__)

SPIN_COUNT = ("GOMP_SPINCOUNT", "2000")
"""OpenMP threads that wait for each other sleep soon. On cores shared with other processes, a spinning thread
would keep the thread that it waits for from running. OpenMP reads it when torch is imported.
"""
CUDA_ERROR_NOT_INITIALIZED = 3


def main() -> None:
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):  # the agent decides when the engine ends
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="python -m gpu_worker.engine")
    parser.add_argument("--fd", type=int, help="inherited stream socket to the agent")
    parser.add_argument(
        PRELOAD_FLAG, action="store_true", help="import everything, then wait for the variables"
    )
    parser.add_argument(LOAD_FLAG, action="store_true", help="load the model before, too (on CPU, one rank)")
    flags = parser.parse_args()
    link = AgentLink(socket.socket(fileno=flags.fd)) if flags.fd is not None else None
    try:
        loaded = preload(link, flags.load) if flags.preload and link is not None else None
        setproctitle.setproctitle(f"tokenfleet engine {os.environ.get('WORKER_NAME', 'w0')}")
        serve(link, loaded)
    except PeerClosed:
        exit_now(0)
    except SettingError as error:
        report_failure(link, EngineFailure(error.name, error.cause))
    except BaseException as error:
        log.critical("the engine crashed", exc_info=True)
        report_failure(link, EngineFailure("", repr(error)))


def preload(link: AgentLink, loads_model: bool) -> Any:
    """Import all that an engine needs, and wait for its variables → the model if it is to be loaded, else
    None. GPUs are not touched, since it is not known yet which of them may be used. Raises PeerClosed,
    SettingError.
    """
    setproctitle.setproctitle("tokenfleet engine preloaded")
    prepare_import()
    import gpu_worker.engine.loop  # noqa: F401  it imports everything
    from gpu_worker.engine.model.load import load
    from gpu_worker.engine.parallel.communicator import SINGLE_RANK

    check_cuda_is_unused()
    loaded = load(Settings.read([], os.environ), no_progress, SINGLE_RANK) if loads_model else None
    link.send(LoadProgress("preloaded"))
    os.environ.update(link.receive_variables().variables)
    return loaded


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


def serve(link: AgentLink | None, loaded: Any) -> None:
    """Serve with the model `loaded`; load one if it is None."""
    settings, info = Settings.read([], os.environ), RankInfo.read(os.environ)
    name = f"{os.environ.get('WORKER_NAME', 'w0')} engine{f' rank {info.rank}' if info.rank else ''}"
    logs.set_up(name, settings.log_level, settings.json_output, os.environ.get("WORKER_INCARNATION", ""))
    prepare_import()
    from gpu_worker.engine.engine import Engine  # takes seconds: bad settings are reported before that
    from gpu_worker.engine.loop import run_follower, run_leader
    from gpu_worker.engine.parallel.communicator import Communicator
    from gpu_worker.engine.pipeline import PipelineEngine

    communicator = Communicator(info, settings.pipeline_parallel_size)
    leads = link if info.rank == 0 else None
    engine = (PipelineEngine if communicator.num_stages > 1 else Engine)(
        settings,
        (lambda text: leads.send(LoadProgress(text))) if leads else no_progress,
        communicator,
        loaded,
    )
    gc.freeze()
    gc.enable()
    if leads is None:
        run_follower(engine, communicator)
    else:
        leads.send(engine.ready)
        run_leader(engine, communicator, leads)


def report_failure(link: AgentLink | None, failure: EngineFailure) -> None:
    with contextlib.suppress(PeerClosed):
        if link:
            link.send(failure)
        else:
            log.critical("%s: %s", failure.setting.upper(), failure.cause)
    exit_now(1)


def exit_now(status: int) -> NoReturn:
    """End the process at once: freeing memory in order would take long."""
    sys.stderr.flush()
    os._exit(status)
