"""An engine process: `python -m gpu_worker.engine --fd N`, settings in the environment, a socket to the agent as file N."""

import argparse
import contextlib
import gc
import logging
import os
import signal
import socket
import sys

import setproctitle

from common import logs
from common.lifeline import die_with_parent
from common.settings import SettingError, Settings
from gpu_worker.door import Failure, Progress
from gpu_worker.engine.link import Gone, Link

log = logging.getLogger(__name__)


def main() -> None:
    die_with_parent()
    setproctitle.setproctitle(f"tokenfleet engine {os.environ.get('WORKER_NAME', 'w0')}")
    for number in (signal.SIGINT, signal.SIGTERM):  # the agent decides when the engine ends
        signal.signal(number, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="python -m gpu_worker.engine")
    parser.add_argument("--fd", type=int, required=True, help="inherited stream socket to the agent")
    link = Link(socket.socket(fileno=parser.parse_args().fd))
    try:
        serve(link)
    except Gone:
        leave(0)
    except SettingError as error:
        fail(link, Failure(error.name, error.cause))
    except BaseException as error:
        log.critical("the engine crashed", exc_info=True)
        fail(link, Failure("", repr(error)))


def serve(link: Link) -> None:
    settings = Settings.read([], os.environ)
    logs.set_up(f"{os.environ.get('WORKER_NAME', 'w0')} engine", settings.log_level, settings.json_output)
    gc.disable()  # collections while torch and transformers are imported take a fifth of the start
    from gpu_worker.engine.engine import Engine  # seconds: after the socket is ours and bad settings were said
    from gpu_worker.engine.loop import run

    engine = Engine(settings, lambda text: link.send(Progress(text)))
    gc.freeze()
    gc.enable()
    link.send(engine.ready)
    run(engine, link)


def fail(link: Link, failure: Failure) -> None:
    with contextlib.suppress(Gone):
        link.send(failure)
    leave(1)


def leave(status: int) -> None:
    """At once: nobody waits for memory to be given back in order."""
    sys.stderr.flush()
    os._exit(status)
