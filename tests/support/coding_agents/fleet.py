"""A whole fleet for coding agents: the launcher, a gateway, a batcher and two workers that answer as a script
says. `python -m tests.support.coding_agents.fleet serve` is its launcher.
"""

import os
import signal
import sys
import threading
from pathlib import Path

from deploy.cli.main import main
from deploy.launcher import launcher
from tests.support.coding_agents.script import Script, ScriptFolder
from tests.support.fleet.fleet import Fleet

MODULE = "tests.support.coding_agents.fleet"
TEMPLATE = Path(__file__).parent / "template.jinja"
KILLED = ("worker", "g0", "b0")
"""What is killed in the first turn, the second, …; then again. `worker` is the one that answers."""


class AgentFleet(Fleet):
    """A fleet with a folder for its script."""

    command = (MODULE, "serve")

    def __init__(self, folder: Path) -> None:
        super().__init__(
            num_workers=2,
            preload=True,
            chat_template=TEMPLATE,
            tool_call_parser="hermes",
            agent_script=folder,
            pythonpath=Path(__file__).parents[3],
        )
        self.folder = ScriptFolder(folder)


class Striker:
    """Kills a process in each turn of a task, once its answer has begun. `killed`: their names so far."""

    def __init__(self, fleet: AgentFleet, script: Script) -> None:
        self.fleet, self.num_turns = fleet, len(script.answers)
        self.killed: list[str] = []
        fleet.folder.write(script)
        self.thread = threading.Thread(target=self.strike_all, daemon=True)
        self.ended = threading.Event()

    def strike_all(self) -> None:
        for turn in range(self.num_turns):
            while not (worker := self.fleet.folder.reached(turn)):
                if self.ended.wait(0.01):
                    return
            self.strike(turn, worker)

    def strike(self, turn: int, worker: str) -> None:
        name = KILLED[turn % len(KILLED)].replace("worker", worker)
        pid = self.fleet.pid(name)
        os.kill(pid, signal.SIGKILL)
        self.killed.append(name)
        self.fleet.folder.release(turn)
        self.fleet.restarted(name, pid)

    def __enter__(self) -> "Striker":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()


if __name__ == "__main__":
    launcher.MODULES["worker"] = "tests.support.coding_agents.worker"
    del launcher.TEMPLATES["worker"]
    sys.exit(main())
