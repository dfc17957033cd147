"""Coding agents and frameworks of agents, unmodified: each does a task of three turns, whose calls it runs,
while a process of the fleet is killed in each turn.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.coding_agents.fleet import KILLED, AgentFleet, Striker
from tests.support.coding_agents.programs import (
    DONE,
    LANGGRAPH,
    LITELLM,
    OPEN_WEBUI,
    PRINTED,
    PROGRAMS,
    Program,
    running,
)
from tests.support.coding_agents.script import Script
from tests.support.machine.ports import free_port
from tests.support.waiting import wait_until_sync

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
            pytest.skip(f"{program.folder} has no {program.command[0]} (docs/clients.md installs it)")


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
