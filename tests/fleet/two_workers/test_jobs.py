"""Jobs of other services and of arq clients on a whole fleet: the examples of docs/ are true."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.support import brokers
from tests.support.fleet.fleet import Fleet
from tests.support.waiting import wait_until_sync

ROOT = Path(__file__).parents[3]


def console_blocks(page: str, heading: str) -> list[str]:
    section = (ROOT / "docs" / page).read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"```console\n(.*?)```", section, re.DOTALL)


def looks_like(expected: str, printed: str) -> bool:
    """Compare two texts: `…` stands for anything, and ids of entries in `submit` may differ."""
    pattern = re.escape(expected.strip()).replace("…", ".*").replace("1760000000000\\-", r"\d+\-")
    return re.fullmatch(re.sub(r"(\\d\+\\-)\d", r"\1\\d+", pattern), printed.strip(), re.DOTALL) is not None


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="no redis-cli on this machine")
def test_the_redis_cli_session_of_the_docs_is_true(fleet: Fleet) -> None:
    cli = ["redis-cli", "--no-raw", "-u", brokers.open_port(fleet.redis_url)]

    def answer(command: str) -> str | None:
        words = [*cli, *shlex.split(command)]
        text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        return None if "(nil)" in text else text

    steps = [
        step for block in console_blocks("jobs.md", "A job over Redis") for step in block.split("> ")[1:]
    ]
    assert len(steps) >= 4
    for step in steps:
        command, _, expected = step.partition("\n")
        output = wait_until_sync(partial(answer, command))
        assert looks_like(expected, output), f"{command}\n{output}"


def test_batches_need_no_setting(fleet: Fleet, tmp_path: Path) -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": asked}
    (tmp_path / "asked.jsonl").write_text(json.dumps(line))
    names = [str(tmp_path / name) for name in ("asked.jsonl", "answers.jsonl")]
    words = ["batch", names[0], "-o", names[1], "--url", fleet.base_url]
    command = [sys.executable, "-m", "deploy.cli", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "answers.jsonl").read_text())["custom_id"] == "a"


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
