"""Preload: the words between a launcher and a process that has imported what it needs, and waits to be used.

Launcher, gateways and workers share them, so they have a file of their own. The process has a socket to the
launcher as its standard input. It says READY when it has imported everything, and with LOAD_FLAG has loaded
the model; the launcher then sends the variables that make it one process of the fleet, and it answers
ACCEPTED.
"""

import json
import os
import socket
import sys
from collections.abc import Mapping

PRELOAD_FLAG = "--preload"
LOAD_FLAG = "--load"
WEIGHTS_VARIABLE = "WEIGHT_STORE"
"""Names the file descriptor, which engines inherit, of the memory that they share."""
READY = b"ready\n"
ACCEPTED = b"accepted\n"


def shared_handles(environ: Mapping[str, str]) -> list[int]:
    """Return the file descriptor that WEIGHTS_VARIABLE names, which a child process inherits; or nothing."""
    handle = environ.get(WEIGHTS_VARIABLE)
    return [int(handle)] if handle else []


def encode_variables(variables: Mapping[str, str]) -> bytes:
    """One line, a JSON object."""
    return json.dumps(dict(variables)).encode() + b"\n"


def wait_for_place() -> None:
    """Say READY, and return when this process has its place in the fleet: its variables are in the
    environment then. Exits when the launcher ends before.
    """
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as launcher:
        launcher.sendall(READY)
        line = launcher.makefile("rb").readline()
        if not line:
            sys.exit(0)
        os.environ.update(json.loads(line))
        launcher.sendall(ACCEPTED)
    detach_stdin()


def detach_stdin() -> None:
    """Close the socket that was standard input: no process of a fleet reads any."""
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
