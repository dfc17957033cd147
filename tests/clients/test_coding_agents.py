"""Codex and Claude Code, unmodified: a task of three turns whose calls they run. Their prompts are longer
than the bundled model's context, so the worker is a scripted one.
"""

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from common.messages.records import unpack_ids
from common.messages.request import Generate
from deploy.launcher.embedded_broker import Broker
from tests.integration.api.test_tools import HERMES
from tests.support.fleet.gateways import ready, serving
from tests.support.fleet.scripted_worker import Answer, FakeWorker, at_work
from tests.support.tokenizer import TOKENIZER, ids

pytestmark = pytest.mark.slow
CODEX = os.environ.get("CODEX") or shutil.which("codex")
CLAUDE = os.environ.get("CLAUDE") or shutil.which("claude")
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
CONFIG = """model = "smollm2"
model_provider = "fleet"
[model_providers.fleet]
name = "fleet"
base_url = "{url}/v1"
wire_api = "responses"
"""
COMMANDS = ("echo one > first", "cp first second")


class RoomyWorker(FakeWorker):
    """A worker with room for the prompts of agents."""

    max_total_tokens = 100_000

    async def announce(self, state: str = "ready", num_blocks: int = 8192) -> None:
        await super().announce(state, num_blocks)


async def run(command: Sequence[str], home: Path, variables: dict[str, str]) -> str:
    """What an agent prints while it does its task."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=home,
        env=os.environ | {"HOME": str(home)} | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    printed, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, printed.decode()
    return printed.decode()


async def run_codex(url: str, home: Path) -> str:
    (home / "config.toml").write_text(CONFIG.format(url=url))
    options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return await run([str(CODEX), "exec", *options, "Do it."], home, {"CODEX_HOME": str(home)})


async def run_claude_code(url: str, home: Path) -> str:
    variables = {
        "CLAUDE_CONFIG_DIR": str(home),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": "smollm2",
        "ANTHROPIC_SMALL_FAST_MODEL": "smollm2",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return await run([str(CLAUDE), "-p", "Do it.", "--allowedTools", "Bash"], home, variables)


@pytest.mark.parametrize(
    ("agent", "tool", "argument"),
    [
        pytest.param(
            run_codex,
            "exec_command",
            "cmd",
            marks=pytest.mark.skipif(not CODEX, reason="CODEX names no program (npm: @openai/codex, 424 MB)"),
        ),
        pytest.param(
            run_claude_code,
            "Bash",
            "command",
            marks=pytest.mark.skipif(
                not CLAUDE, reason="CLAUDE names no program (npm: @anthropic-ai/claude-code)"
            ),
        ),
    ],
)
async def test_a_task_of_three_turns(
    broker: Broker, tmp_path: Path, agent: Any, tool: str, argument: str
) -> None:
    turns: list[Generate] = []

    def answer(request: Generate) -> Answer:
        prompt = TOKENIZER.decode(unpack_ids(request.prompt_ids), skip_special_tokens=False)
        assert "x-anthropic-billing-header" not in prompt
        turns.append(request)
        done = len(turns) - 1
        text = (
            CALL % (tool, json.dumps({argument: COMMANDS[done]})) if done < len(COMMANDS) else "All is done."
        )
        return Answer(ids(text))

    async with at_work(RoomyWorker(broker.url, TOKENIZER, answer)), serving(broker.url, **HERMES) as served:
        gateway, client = served
        await ready(gateway)
        printed = await agent(str(client.base_url).rstrip("/"), tmp_path)
    assert (tmp_path / "second").read_text() == "one\n"
    assert "All is done." in printed and "failed to decode" not in printed and len(turns) == 3
