"""Script: what the model of a scripted fleet answers in each turn of an agent's task, and where a turn waits
until a process of the fleet is killed. It lies in a folder that workers and the test share.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ASIDE = "A title"
"""What requests beside the task are answered, such as one for a title."""
CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
ANSWERED = r"<\|im_start\|>assistant\n(?=.)"
"""Of each turn of the assistant in a prompt but the one that is to come (template.jinja)."""


@dataclass
class Script:
    """What is answered.

    Attributes:
        answers: one of each turn.
        turns: a pattern; a prompt with n matches is of turn n, and those after the last turn are of the last.
        belongs: a pattern that a prompt of the task has, and others have not.
    """

    answers: Sequence[str]
    turns: str = ANSWERED
    belongs: str = "<tools>"

    def turn(self, prompt: str) -> int | None:
        """The turn of a prompt; None for one beside the task."""
        if not re.search(self.belongs, prompt):
            return None
        return min(len(re.findall(self.turns, prompt)), len(self.answers) - 1)


def call(name: str, **arguments: object) -> str:
    return CALL % (name, json.dumps(arguments))


class ScriptFolder:
    """The folder with a script and the marks of its turns."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, script: Script) -> None:
        """Begin a task: the marks of the one before are gone."""
        for mark in self.path.glob("turn-*"):
            mark.unlink()
        self.put("script", json.dumps(asdict(script)))

    def read(self) -> Script:
        return Script(**json.loads((self.path / "script").read_text()))

    def reach(self, turn: int, worker: str) -> None:
        """Say that this worker has begun to answer in a turn."""
        if self.reached(turn) != worker:
            self.put(f"turn-{turn}", worker)

    def reached(self, turn: int) -> str:
        """The worker that has begun to answer in a turn; empty if none has."""
        mark = self.path / f"turn-{turn}"
        return mark.read_text() if mark.exists() else ""

    def release(self, turn: int) -> None:
        """Let workers go on in a turn."""
        self.put(f"turn-{turn}-struck", "")

    def is_released(self, turn: int) -> bool:
        return (self.path / f"turn-{turn}-struck").exists()

    def put(self, name: str, text: str) -> None:
        """Write a file of which nobody sees a part."""
        new = self.path / f".{name}"
        new.write_text(text)
        new.rename(self.path / name)
