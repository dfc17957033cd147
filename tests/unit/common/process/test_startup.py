"""Every process refuses to start with a setting it cannot serve: one line, which names it."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.forks.client import ForkedProcess

# --- startup ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["api", "batcher", "gpu_worker", "api.jobs.arq_worker"])
def test_a_process_without_a_broker_names_the_setting(module: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
    process = ForkedProcess([sys.executable, "-P", "-m", module], env=environ, stderr=subprocess.PIPE)
    _, said = process.communicate()
    assert process.returncode == os.EX_CONFIG and said.startswith(b"tokenfleet: REDIS_URL: is not set"), said


# --- startup refusal ----------------------------------------------------------------------------------------

REFUSED = """
from common.process import logs
from common.process.startup import exit_when_unservable
from common.settings.settings import SettingError, Settings
with exit_when_unservable():
    {before}
    Settings.read([])
"""


def said_by(before: str = "pass", **variables: str) -> str:
    environ = os.environ | {"MAX_BATCH_SIZE": "none"} | variables
    code = REFUSED.format(before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ)
    assert done.returncode == os.EX_CONFIG
    [line] = done.stderr.splitlines()
    return line


def test_a_refused_setting_is_one_line() -> None:
    assert said_by().startswith("tokenfleet: MAX_BATCH_SIZE: ")


@pytest.mark.parametrize(
    ("before", "variables", "process"),
    [
        ("pass", {"INCARNATION": "w0-1", "PROCESS_NAME": "w0"}, "w0"),
        ('logs.set_up("supervisor of w0", "info", as_json=True)', {}, "supervisor of w0"),
    ],
)
def test_it_is_a_line_of_the_log_as_json(before: str, variables: dict[str, str], process: str) -> None:
    """Before logging is set up and after."""
    line = json.loads(said_by(before, JSON_OUTPUT="true", **variables))
    assert line["message"].startswith("MAX_BATCH_SIZE: ")
    assert (line["level"], line["process"]) == ("ERROR", process) and line["host"]
    assert line["incarnation"].startswith(variables.get("INCARNATION", f"{process}-"))
