"""Coding agents and frameworks of agents, unmodified: each does a task of three turns, whose calls it runs,
while a process of the fleet is killed in each turn.
"""

import contextlib
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.coding_agents.fleet import KILLED, AgentFleet, Striker
from tests.support.coding_agents.programs import DONE, LANGGRAPH, LITELLM, PROGRAMS, Program, running
from tests.support.coding_agents.script import Script
from tests.support.machine.ports import free_port
from tests.support.waiting import wait_until_sync

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]


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
    (home := tmp_path / "proxy").mkdir()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with running(LITELLM.start(agent_fleet.base_url, home, "--port", str(port))):
        wait_until_sync(lambda: is_alive(f"{url}/health/liveliness"), 120)
        (home := tmp_path / "agent").mkdir()
        do_task(agent_fleet, LANGGRAPH, url, home)


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
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
        return bool(answer.status == 200)
    return False
