"""Coding agents and frameworks of agents, unmodified: each does a task of three turns, whose calls it runs,
while a process of the fleet is killed in each turn.

Each agent is installed in a folder of its own within the folder that CODING_AGENTS names, as
`python3 -m venv agents/langgraph && agents/langgraph/bin/pip install langgraph langchain-openai` or
`mkdir -p agents/opencode && cd agents/opencode && npm install opencode-ai`. `codex` is `@openai/codex`,
`claude` `@anthropic-ai/claude-code`, `continue` `@continuedev/cli`. Those that are not there are skipped.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from tests.support.coding_agents.fleet import KILLED, AgentFleet, Striker
from tests.support.coding_agents.script import Script, call
from tests.support.machine.ports import free_port
from tests.support.waiting import wait_until_sync

FOLDER = Path(os.environ.get("CODING_AGENTS", "agents"))
SCRIPTS = Path(__file__).parent / "agents"
TIMEOUT_S = 120
COMMANDS = ("echo one > first", "cp first second")
DONE = "All is done."
PRINTED = "printed"
FLEET = "http://fleet"
"""In configurations and words; the fleet's URL takes its place."""


@dataclass(frozen=True)
class Program:
    """An agent.

    Attributes:
        name: of its folder.
        command: its words, the first of them a path within the folder.
        script: what it is answered.
        files: of its home, which is the folder of its task as well.
        variables: of its environment.
        prints: whether the last answer is in what it prints.
        leaves: the files that the task leaves, with their contents.
    """

    name: str
    command: Sequence[str]
    script: Script
    files: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    prints: bool = True
    leaves: Mapping[str, str] = field(default_factory=lambda: {"second": "one\n"})

    @property
    def folder(self) -> Path:
        return FOLDER.absolute() / self.name

    @property
    def executable(self) -> str | None:
        """Its path; None if it is not installed."""
        word = self.command[0]
        return shutil.which(self.folder / word if "/" in word else word) if self.folder.is_dir() else None

    def start(self, url: str, home: Path, *words: str) -> subprocess.Popen[bytes]:
        """Start it in `home`, with more words. It prints to a file `printed` there."""

        def filled(text: str) -> str:
            return text.replace(FLEET, url)

        for name, text in self.files.items():
            (home / name).write_text(filled(text))
        if (modules := self.folder / "node_modules").exists():
            (home / "node_modules").symlink_to(modules)
        own = {"HOME": str(home), "PWD": str(home), "FLEET": url, "NO_COLOR": "1", "OPENAI_API_KEY": "none"}
        environ = {key: os.environ[key] for key in ("PATH", "LANG", "TMPDIR") if key in os.environ}
        with (home / PRINTED).open("w") as printed:
            return subprocess.Popen(
                [str(self.executable), *map(filled, self.command[1:]), *words],
                cwd=home,
                env=environ | own | {name: filled(text) for name, text in self.variables.items()},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, url: str, home: Path) -> str:
        """Do the task in `home` → what it prints. Raises AssertionError if it fails."""
        with running(self.start(url, home)) as process:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(TIMEOUT_S)
            printed = (home / PRINTED).read_text()
            assert process.returncode == 0, f"{self.name} ended with {process.returncode}:\n{printed}"
        return printed


@contextlib.contextmanager
def running(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """A process and its children, which are killed in the end."""
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def commands(tool: str, **others: object) -> list[str]:
    """Calls that write one file and copy it."""
    return [call(tool, command=command, **others) for command in COMMANDS]


def python(name: str, script: Script, *words: str) -> Program:
    """A framework, run by a script in tests/clients/agents."""
    path = SCRIPTS / f"{name.replace('-', '_')}_agent.py"
    quiet = {"CREWAI_DISABLE_TELEMETRY": "true", "OTEL_SDK_DISABLED": "true", "CREWAI_TESTING": "true"}
    return Program(name, ["bin/python", str(path), *words], script, variables=quiet)


CALLS = Script([*commands("bash"), DONE])
OPENCODE = {
    "$schema": "https://opencode.ai/config.json",
    "provider": {
        "fleet": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{FLEET}/v1", "apiKey": "none"},
            "models": {"smollm2": {"limit": {"context": 100_000, "output": 4_000}}},
        }
    },
}
CONTINUE = f"""name: fleet
version: 1.0.0
schema: v1
models:
  - name: fleet
    provider: openai
    model: smollm2
    apiBase: {FLEET}/v1
    apiKey: none
    roles: [chat]
    capabilities: [tool_use]
"""
PROXY = f"""model_list:
  - model_name: smollm2
    litellm_params: {{model: openai/smollm2, api_base: {FLEET}/v1, api_key: none}}
"""
CODEX = f"""model = "smollm2"
model_provider = "fleet"
[model_providers.fleet]
name = "fleet"
base_url = "{FLEET}/v1"
wire_api = "responses"
"""
CLAUDE = {
    "CLAUDE_CONFIG_DIR": ".",
    "ANTHROPIC_BASE_URL": FLEET,
    "ANTHROPIC_AUTH_TOKEN": "none",
    "ANTHROPIC_MODEL": "smollm2",
    "ANTHROPIC_SMALL_FAST_MODEL": "smollm2",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}
PROGRAMS = [
    Program(
        "codex",
        [
            *("node_modules/.bin/codex", "exec", "--skip-git-repo-check"),
            *("--dangerously-bypass-approvals-and-sandbox", "Do it."),
        ],
        Script([*(call("exec_command", cmd=command) for command in COMMANDS), DONE]),
        {"config.toml": CODEX},
        {"CODEX_HOME": "."},
    ),
    Program(
        "claude",
        ["node_modules/.bin/claude", "-p", "Do it.", "--allowedTools", "Bash"],
        Script([*commands("Bash"), DONE]),
        variables=CLAUDE,
    ),
    Program(
        "opencode",
        ["node_modules/.bin/opencode", "run", "--model", "fleet/smollm2", "Do it."],
        Script([*commands("bash", description="It does it."), DONE]),
        {"opencode.json": json.dumps(OPENCODE)},
        {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
    ),
    Program(
        "continue",
        ["node_modules/.bin/cn", "-p", "--auto", "--config", "config.yaml", "Do it."],
        Script([*commands("Bash"), DONE]),
        {"config.yaml": CONTINUE},
        {"CONTINUE_TELEMETRY_ENABLED": "0"},
    ),
    Program(
        "aider",
        [
            *("bin/aider", "--model", "openai/smollm2", "--openai-api-base", f"{FLEET}/v1"),
            *("--openai-api-key", "none", "--yes-always", "--no-git", "--edit-format", "whole"),
            *("--no-check-update", "--no-show-model-warnings", "--analytics-disable", "--no-detect-urls"),
            *("--auto-test", "--test-cmd", "grep -q three first", "--message", "Do it.", "first"),
        ],
        Script(
            [f"A step.\n\nfirst\n```\n{text}\n```" for text in ("one", "two", "three")],
            turns="A step",
            belongs="first",
        ),
        prints=False,
        leaves={"first": "three\n"},
    ),
    Program(
        "ai",
        ["node", "ai_agent.mjs"],
        CALLS,
        {"ai_agent.mjs": (SCRIPTS / "ai_agent.mjs").read_text()},
    ),
    python("langgraph", CALLS),
    python("pydantic-ai", CALLS),
    python("crewai", CALLS),
    python("smolagents", Script([*commands("bash"), call("final_answer", answer=DONE)])),
    python("openhands", Script([*commands("terminal"), call("finish", message=DONE)])),
]
LANGGRAPH = next(program for program in PROGRAMS if program.name == "langgraph")
LITELLM = Program(
    "litellm",
    ["bin/litellm", "--config", "config.yaml", "--host", "127.0.0.1"],
    CALLS,
    {"config.yaml": PROXY},
    {"LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"},
)
OPEN_WEBUI = Program(
    "open-webui",
    ["bin/open-webui", "serve", "--host", "127.0.0.1"],
    Script(["One.", "Two.", DONE], belongs="It is turn"),
    variables={
        "OPENAI_API_BASE_URL": f"{FLEET}/v1",
        "ENABLE_OLLAMA_API": "False",
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "none",
        "OFFLINE_MODE": "True",
        "RAG_EMBEDDING_ENGINE": "openai",  # it would load a model for it
        "DATA_DIR": "data",
    },
)


pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]
START_S = 150.0


@pytest.fixture(scope="module")
def agent_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentFleet]:
    fleet = AgentFleet(tmp_path_factory.mktemp("script"))
    fleet.folder.write(Script([DONE]))
    with fleet:
        yield fleet


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_an_agent_does_its_task(agent_fleet: AgentFleet, program: Program, tmp_path: Path) -> None:
    skip_without(program)
    do_task(agent_fleet, program, agent_fleet.base_url, tmp_path)


def test_an_agent_does_its_task_through_litellms_proxy(agent_fleet: AgentFleet, tmp_path: Path) -> None:
    skip_without(LITELLM, LANGGRAPH)
    with serving(LITELLM, agent_fleet, tmp_path, "/health/liveliness") as url:
        (home := tmp_path / "agent").mkdir()
        do_task(agent_fleet, LANGGRAPH, url, home)


def test_a_chat_in_open_webui(agent_fleet: AgentFleet, tmp_path: Path) -> None:
    """Its server is asked as its page asks it."""
    skip_without(OPEN_WEBUI)
    messages: list[dict[str, str]] = []
    with (
        serving(OPEN_WEBUI, agent_fleet, tmp_path, "/health") as url,
        httpx.Client(base_url=url, timeout=90) as client,
    ):
        user = client.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()
        client.headers["authorization"] = f"Bearer {user['token']}"
        assert "smollm2" in [model["id"] for model in client.get("/api/models").json()["data"]]
        with Striker(agent_fleet, OPEN_WEBUI.script) as striker:
            for i in range(3):
                messages.append({"role": "user", "content": f"It is turn {i}."})
                body = {"model": "smollm2", "messages": messages, "stream": True}
                answer = client.post("/api/chat/completions", json=body)
                text = "".join(texts(answer.text))
                messages.append({"role": "assistant", "content": text})
    assert [message["content"] for message in messages[1::2]] == OPEN_WEBUI.script.answers
    assert len(striker.killed) == len(KILLED)


def texts(stream: str) -> Iterator[str]:
    """The pieces of text in OpenAI's chunks."""
    for line in stream.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                yield choice["delta"].get("content") or ""


@contextlib.contextmanager
def serving(program: Program, fleet: AgentFleet, folder: Path, health: str) -> Iterator[str]:
    """A server in front of the fleet → its URL."""
    (home := folder / program.name).mkdir()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with running(program.start(fleet.base_url, home, "--port", str(port))) as process:
        wait_until_sync(lambda: process.poll() is not None or is_alive(f"{url}{health}"), START_S)
        assert process.poll() is None, (home / PRINTED).read_text()
        yield url


def skip_without(*programs: Program) -> None:
    for program in programs:
        if not program.executable:
            pytest.skip(f"{program.folder} has no {program.command[0]}")


def do_task(fleet: AgentFleet, program: Program, url: str, home: Path) -> None:
    with Striker(fleet, program.script) as striker:
        printed = program.run(url, home)
    print(printed)
    assert DONE in printed or not program.prints
    assert len(striker.killed) == len(KILLED)
    for name, text in program.leaves.items():
        assert (home / name).read_text() == text


def is_alive(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=5).status_code == 200
    return False
