"""Counts the instructions that a process executes, with valgrind's callgrind: unlike CPU time, the count does
not depend on what else the machine does. The kernel's instructions are not counted.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

VARIABLES = {"PYTHONHASHSEED": "0", "HOST": "callgrind"}
"""Variables of a process that is counted: two runs have nearly the same count, and vgdb finds the process."""


def require_valgrind() -> None:
    """End the process if valgrind is missing."""
    if not shutil.which("valgrind") or not shutil.which("vgdb"):
        sys.exit("Counting instructions needs valgrind and vgdb: install your system's package `valgrind`")


def under_callgrind(command: list[str], folder: Path) -> list[str]:
    """Return the command with which the instructions of another can be counted; `folder` gets the counts by
    function, for callgrind_annotate. The process runs at a fifth of its speed, and at a fiftieth while it is
    counted.
    """
    counts = f"--callgrind-out-file={folder}/counts"
    return ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no", counts, *command]


class InstructionMeter:
    """Counts the instructions of a process that was started by `under_callgrind` with `VARIABLES`."""

    def __init__(self, pid: int, folder: Path) -> None:
        self.pid = pid
        self.folder = folder

    def begin(self) -> None:
        self.tell("instrumentation on")

    def end(self) -> float:
        """Return the number of instructions since `begin`."""
        self.tell("dump")
        self.tell("instrumentation off")
        newest = max(self.folder.glob("counts.*"), key=os.path.getmtime)
        [total] = [line for line in newest.read_text().splitlines() if line.startswith("summary:")]
        return float(total.split()[1])

    def tell(self, request: str) -> None:
        command = ["vgdb", f"--pid={self.pid}", request]
        subprocess.run(command, check=True, capture_output=True, env=os.environ | VARIABLES)
