"""Apart: runs the compiler of grammars in a process of its own. A client's grammar may need any amount of
stack, memory and time; beyond the limits it ends that process, and is refused. The gateway goes on.
"""

import asyncio
import contextlib
import functools
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, TypeVar

import setproctitle

from api.errors import ApiError, cut, internal_error, invalid

Result = TypeVar("Result")

STACK_BYTES = 64 * 2**20
"""With it some 4,000 definitions of objects, or 20,000 rules, may lead from one to the next."""
MEMORY_BYTES = 2**30
CPU_S = 10
"""Processor time of one compilation; a schema of a few hundred definitions takes some 0.1 s."""
LIMITS = f"{CPU_S} s, {MEMORY_BYTES >> 20} MiB of memory or {STACK_BYTES >> 20} MiB of stack"


def cannot_compile(field: str, cause: str) -> ApiError:
    """The error for a grammar that cannot be compiled; `cause` may be llguidance's."""
    return invalid(f"`{field}` cannot be compiled: {cut(cause)}", field)


# --- in the gateway -----------------------------------------------------------------------------------------


CALLER = ThreadPoolExecutor(1, thread_name_prefix="compile-grammars")
"""One call at a time."""


@functools.cache
def start() -> tuple["subprocess.Popen[bytes]", Connection]:
    """Start the process."""
    ours, theirs = Pipe()
    command = [sys.executable, "-P", "-m", "api.grammar.apart", str(theirs.fileno())]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
    theirs.close()
    return process, ours


@functools.lru_cache(maxsize=256)
def outcome(field: str, work: Callable[..., Any], args: tuple[Any, ...]) -> tuple[bool, Any]:
    """Whether `work` has a result, and the result; else text and field of its ApiError."""
    if start()[0].poll() is not None:
        start.cache_clear()
    process, connection = start()
    try:
        connection.send((work, args))
        answer: tuple[bool, Any] = connection.recv()
    except (EOFError, OSError):
        connection.close()
        if (status := process.wait()) >= 0:  # not by a signal
            raise internal_error(f"The compiler of grammars has failed with status {status}") from None
        error = cannot_compile(field, f"it takes more than {LIMITS}")
        return False, (error.text, field)
    return answer


async def run_apart(field: str, work: Callable[..., Result], *args: Any) -> Result:
    """The result of `work`, a function of a module. Raises its ApiError, and one (422) with the name of the
    field if it takes more than LIMITS.
    """
    loop = asyncio.get_running_loop()
    has_result, found = await loop.run_in_executor(CALLER, outcome, field, work, args)
    if not has_result:
        raise invalid(*found)
    result: Result = found
    return result


# --- in the process of its own ------------------------------------------------------------------------------


def answer_calls(connection: Connection) -> None:
    """Answer calls until the gateway ends."""
    while True:
        try:
            work, args = connection.recv()
        except EOFError:
            return
        used_s = resource.getrusage(resource.RUSAGE_SELF)
        limit_s = int(used_s.ru_utime + used_s.ru_stime) + 1 + CPU_S
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        try:
            answer = True, work(*args)
        except ApiError as error:
            answer = False, (error.text, error.param)
        except (MemoryError, RecursionError):
            os.abort()
        connection.send(answer)


def main() -> None:
    setproctitle.setproctitle("tokenfleet grammars")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the gateway's end is ours
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
        # before the gateway, where a container's memory ends first
        Path("/proc/self/oom_score_adj").write_text("1000")
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=answer_calls, args=(Connection(int(sys.argv[1])),))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
