"""Jobs of other services and of arq clients on a whole fleet: the examples of docs/ are true."""

import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from common.broker.keys import Keys
from tests.support import brokers
from tests.support.fleet.fleet import Fleet
from tests.support.waiting import wait_until_sync

ROOT = Path(__file__).parents[3]
KEYS = Keys("default")


def console_blocks(page: str, heading: str) -> list[str]:
    section = (ROOT / "docs" / page).read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"```console\n(.*?)```", section, re.DOTALL)


def looks_like(expected: str, printed: str) -> bool:
    """Compare two texts: `…` stands for anything, and ids of entries in `submit` may differ."""
    pattern = re.escape(expected.strip()).replace("…", ".*").replace("1760000000000\\-", r"\d+\-")
    return re.fullmatch(re.sub(r"(\\d\+\\-)\d", r"\1\\d+", pattern), printed.strip(), re.DOTALL) is not None


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="no redis-cli on this machine")
def test_the_redis_cli_session_of_the_docs_is_true(fleet: Fleet, tmp_path: Path) -> None:
    cli = ["redis-cli", "--no-raw", "-u", brokers.open_port(fleet.redis_url)]
    listeners_output = tmp_path / "heard"

    def is_printed(text: str) -> bool:
        return looks_like(f"…{text.strip()}…", listeners_output.read_text())

    with listeners_output.open("w") as out:
        listeners: list[subprocess.Popen[bytes]] = []
        try:
            for block in console_blocks("jobs.md", "A job over Redis"):
                if not block.startswith("> "):
                    wait_until_sync(partial(is_printed, block))
                for step in block.split("> ")[1:] if block.startswith("> ") else []:
                    command, _, expected = step.partition("\n")
                    if command.startswith("SUBSCRIBE"):
                        listeners.append(subprocess.Popen([*cli, *shlex.split(command)], stdout=out))
                        wait_until_sync(partial(is_printed, expected))
                        continue

                    def printed(command: str = command) -> str:
                        return subprocess.run(
                            [*cli, *shlex.split(command)], capture_output=True, text=True, check=True
                        ).stdout

                    output = wait_until_sync(lambda: "(nil)" not in (text := printed()) and text)
                    assert looks_like(expected, output), f"{command}\n{output}"
        finally:
            for listener in listeners:
                listener.kill()
                listener.wait()


def test_the_first_arq_example_of_the_docs_is_true(fleet: Fleet, tmp_path: Path) -> None:
    code, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "jobs.md").read_text(), re.DOTALL)
    example = tmp_path / "example.py"
    example.write_text(code.replace("redis://127.0.0.1:6379/0", fleet.redis_url))
    done = subprocess.run(
        [sys.executable, example], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    generated, chatted = done.stdout.splitlines()[:2]
    assert generated == "{'generated_text': ' Paris.'}"
    assert chatted
