"""Clients of Node: openai, @huggingface/inference and the AI SDK, each a script of node's own test runner."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.fleet.fleet import Fleet

SCRIPTS = Path(__file__).parent / "node"
MODULES = Path(os.environ.get("CLIENT_MODULES", Path(__file__).parents[2] / ".venv/node/node_modules"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("node") and MODULES.is_dir()), reason="`make test-all` installs them"
    ),
]


@pytest.mark.parametrize("name", sorted(script.name for script in SCRIPTS.glob("*.mjs")))
def test_a_client_of_node_passes_its_script(name: str, fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(MODULES)
    shutil.copy(SCRIPTS / name, tmp_path)
    own = {"FLEET": fleet.base_url, "NODE_NO_WARNINGS": "1"}
    command = ["node", "--test", "--test-reporter", "tap", name]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | own, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
