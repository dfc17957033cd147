"""The compose stack for all modules of this folder. Grafana is left out: nothing depends on it."""

from collections.abc import Iterator

import pytest

from tests.support.compose.stack import (
    SERVICE_IMAGES,
    SERVICES,
    Stack,
    image_sizes,
    is_unreachable,
    make_missing,
    run,
    why_no_engine,
)
from tests.support.machine.ports import free_port

SETTINGS = {"KV_CACHE_BYTES": "256MiB", "THREADS": "1", "WORKER_GRACE_S": "600"}
"""Streams wait for a worker, which takes minutes to start on a busy machine."""


@pytest.fixture(scope="package")
def stack() -> Iterator[Stack]:
    """The stack: images are built, nothing runs, and there are no volumes."""
    if why := why_no_engine():
        pytest.skip(why)
    assert run(["sh", "deploy/make_secrets.sh"]).returncode == 0
    make_missing(SERVICE_IMAGES)
    stack = Stack("tokenfleet-test", PORT=str(free_port()), **SETTINGS)
    built = stack.compose("build", "api", "cpu_worker", timeout_s=2000)
    if built.returncode and is_unreachable(built.stderr):
        pytest.skip(f"base images cannot be had: {built.stderr.strip().splitlines()[-1]}")
    assert built.returncode == 0, built.stderr[-3000:]
    print("images:", image_sizes())
    stack.compose("down", "-v", "--remove-orphans")
    try:
        yield stack
    finally:
        stack.compose("down", "-v", "--remove-orphans", "-t", "5")


@pytest.fixture
def serving(stack: Stack) -> Stack:
    """The stack with one of each service running, whatever an earlier test has changed."""
    stack.must("up", "-d", "--no-build", "--wait", *SERVICES)
    return stack
