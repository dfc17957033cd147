"""Startup: every process refuses to start without a broker, and names the setting."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["api", "batcher", "gpu_worker", "api.jobs.arq_worker"])
def test_a_process_without_a_broker_names_the_setting(module: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    ended = subprocess.run(
        [sys.executable, "-P", "-m", module], env=environ, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == os.EX_CONFIG and ended.stderr.startswith(
        "tokenfleet: REDIS_URL: is not set"
    ), ended.stderr
