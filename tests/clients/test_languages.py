"""Clients of other languages' standard libraries, and curl, each with its defaults: Debian's packages
default-jdk-headless, golang-go and curl have them; and those of Node.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.fleet.fleet import Fleet

SOURCES, NODE_SCRIPTS = Path(__file__).parent / "bare", Path(__file__).parent / "node"
MODULES = Path(os.environ.get("CLIENT_MODULES", Path(__file__).parents[2] / ".venv/node/node_modules"))
BODY = '{"inputs":"Hi","parameters":{"max_new_tokens":5}}'
pytestmark = pytest.mark.slow


def needs(program: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not shutil.which(program), reason=f"{program} is not installed")


def run(folder: Path, *command: str, **variables: str) -> str:
    own = {"GOCACHE": str(folder), "GOPATH": str(folder), "GO111MODULE": "off"} | variables
    done = subprocess.run(
        command, cwd=folder, env=os.environ | own, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs("javac")
def test_the_jdk_asks_for_an_upgrade_and_gets_its_answers(fleet: Fleet, tmp_path: Path) -> None:
    run(tmp_path, "javac", "-d", str(tmp_path), str(SOURCES / "Post.java"))
    printed = run(tmp_path, "java", "-cp", str(tmp_path), "Post", fleet.base_url)
    assert printed.splitlines() == ["200 true"] * 6


@needs("go")
def test_go_gets_its_answers(fleet: Fleet, tmp_path: Path) -> None:
    printed = run(tmp_path, "go", "run", str(SOURCES / "post.go"), fleet.base_url)
    assert printed.splitlines() == ["200 true"] * 4


@needs("curl")
@pytest.mark.parametrize("version", ["--http1.0", "--http1.1", "--http2"])
@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
def test_curl_gets_its_answer_in_every_version(fleet: Fleet, tmp_path: Path, version: str, path: str) -> None:
    given = ("-sSNf", "-H", "content-type: application/json", "-d", BODY)
    printed = run(tmp_path, "curl", version, *given, fleet.base_url + path)
    assert '"generated_text":"' in printed
    assert printed[0] in "{d", "a body without the sizes of chunks"


@pytest.mark.skipif(not (shutil.which("node") and MODULES.is_dir()), reason="`make test-all` installs them")
@pytest.mark.parametrize("name", sorted(script.name for script in NODE_SCRIPTS.glob("*.mjs")))
def test_a_client_of_node_passes_its_script(name: str, fleet: Fleet, tmp_path: Path) -> None:
    """openai, @huggingface/inference and the AI SDK, each a script of node's own test runner."""
    (tmp_path / "node_modules").symlink_to(MODULES)
    shutil.copy(NODE_SCRIPTS / name, tmp_path)
    own = {"FLEET": fleet.base_url, "NODE_NO_WARNINGS": "1"}
    run(tmp_path, "node", "--test", "--test-reporter", "tap", name, **own)
