"""The process of a template: it has imported what processes of a fleet import, and starts them as copies of
itself.

It runs as `python -P -m deploy.launcher.template KIND MODULE …`, and is asked through its standard input, one
message after another. Each module has `main`. One that has `preload(everything)` loads what its process has
before it knows its name: everything, or only what is imported late. `main` gets what that returns.
"""

import gc
import importlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import setproctitle

from common.process.launch import die_with_parent
from common.process.startup import exit_when_unservable

MAX_BYTES, MAX_FILES = 2**18, 8
DONE, FAILED = b"done", b"failed"
"""Answers, besides the process id of a copy."""
NICENESS = 10
"""Beside busy threads the loading has a tenth of a core; at 19 it had hardly any, and never ended."""
END_OF_THREADS_S = 5.0

Loaded = dict[ModuleType, tuple[Any]]


def main() -> None:
    """Copy this process until the launcher ends. A copy runs `main` of its module."""
    with exit_when_unservable():
        module, loaded = serve(*sys.argv[1:])
    module.main(*loaded.get(module, ()))


def serve(kind: str, *names: str) -> tuple[ModuleType, Loaded]:
    """Answer the launcher. Returns in copies: the module, and all that is loaded. Raises SettingError."""
    die_with_parent()
    setproctitle.setproctitle(f"tokenfleet template-{kind}")
    channel = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    gc.disable()  # collections while torch and transformers are imported take a fifth of the start
    modules = {name: importlib.import_module(name) for name in names}
    loaded = preload(modules.values(), everything=False)
    channel.send(DONE)
    while True:
        message, files, *_ = socket.recv_fds(channel, MAX_BYTES, MAX_FILES)
        if not message:
            sys.exit()
        if not (start := json.loads(message)):
            loaded = preload_aside(modules.values())
            setproctitle.setproctitle(f"tokenfleet preloaded-{kind}")
            channel.send(DONE)
        elif copy(channel):
            channel.close()
            os.environ.clear()
            os.environ.update(start["environ"])
            os.environ.update(zip(start["handles"], map(str, files), strict=True))
            gc.enable()
            return modules[start["module"]], loaded
        for file in files:
            os.close(file)


def preload(modules: Collection[ModuleType], everything: bool) -> Loaded:
    return {module: (module.preload(everything),) for module in modules if hasattr(module, "preload")}


def preload_aside(modules: Collection[ModuleType]) -> Loaded:
    """Load everything in a thread of low priority, since a process cannot raise its own again. Returns once
    all threads that this has begun have ended: a copy would not have them. Raises SettingError.
    """
    num_threads = count_threads()
    with ThreadPoolExecutor(1, initializer=give_way) as executor:
        loaded = executor.submit(preload, modules, everything=True).result()
    end_s = time.monotonic() + END_OF_THREADS_S
    while count_threads() > num_threads:
        if time.monotonic() > end_s:
            sys.exit("what was loaded has threads, which a copy would not have")
        time.sleep(0.01)
    return loaded


def count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def give_way() -> None:
    own = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + NICENESS)


def copy(channel: socket.socket) -> bool:
    """Copy this process, by way of one that ends at once: the copy becomes a child of the launcher, and tells
    that its process id. Returns whether this is the copy.
    """
    launcher = os.getppid()
    gc.freeze()
    try:
        middle = os.fork()
    except OSError:  # no memory
        channel.send(FAILED)
        return False
    if middle:
        os.waitpid(middle, 0)
        return False
    middle = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == middle:
        time.sleep(0.001)
    if os.getppid() != launcher:
        os._exit(1)
    os.setsid()
    channel.send(b"%d" % os.getpid())
    return True


if __name__ == "__main__":
    main()
