"""Coding agents and frameworks of agents, unmodified: each does a task of three turns, whose calls it runs,
while a process of the fleet is killed in each turn.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.coding_agents.fleet import KILLED, AgentFleet, Striker
from tests.support.coding_agents.programs import DONE, PROGRAMS, Program
from tests.support.coding_agents.script import Script

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]


@pytest.fixture(scope="module")
def agent_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AgentFleet]:
    fleet = AgentFleet(tmp_path_factory.mktemp("script"))
    fleet.folder.write(Script([DONE]))
    with fleet:
        yield fleet


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_an_agent_does_its_task(agent_fleet: AgentFleet, program: Program, tmp_path: Path) -> None:
    if not program.executable:
        pytest.skip(f"{program.folder} has no {program.command[0]} (docs/clients.md installs it)")
    with Striker(agent_fleet, program.script) as striker:
        printed = program.run(agent_fleet.base_url, tmp_path)
        print(printed)
    assert DONE in printed and len(striker.killed) == len(KILLED)
    assert (tmp_path / "second").read_text() == "one\n"
