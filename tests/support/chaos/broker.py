"""Broker that can be set back: `python -m tests.support.chaos.broker NOTE COMMAND …` cuts the broker's files
to the sizes in the file NOTE, if there is one, then becomes COMMAND.

The append-only file only grows, so what it was a second ago is its first bytes: a copy needs no copying.
"""

import json
import os
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

CUT_TO = "broker-cut-to.json"
KEPT_S = 3.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the broker's files at a time, with its list of files, which changes at each rewrite."""

    at_s: float
    manifest: str
    sizes: dict[str, int]


@dataclass
class FileHistory:
    """The sizes of the broker's files in the last seconds.

    Attributes:
        directory: of the broker's files.
    """

    directory: Path
    history: deque[Sizes] = field(default_factory=deque)

    def note(self) -> None:
        manifest = "".join(path.read_text() for path in sorted(self.directory.glob("*.manifest")))
        sizes = {path.name: path.stat().st_size for path in self.directory.glob("*.aof")}
        self.history.append(Sizes(time.monotonic(), manifest, sizes))
        while self.history[0].at_s < time.monotonic() - KEPT_S:
            self.history.popleft()

    def sizes_before(self, seconds: float) -> dict[str, int]:
        """Return the newest sizes of at least this age. If the files were rewritten since, return the oldest
        after that.
        """
        self.note()
        same = [one for one in self.history if one.manifest == self.history[-1].manifest]
        old = [one for one in same if one.at_s <= time.monotonic() - seconds]
        return (old[-1] if old else same[0]).sizes


def cut_files(note: Path) -> None:
    """Cut the files to the sizes in `note`, once."""
    for name, size in json.loads(note.read_text()).items():
        os.truncate(name, size)
    note.unlink()


if __name__ == "__main__":
    if (note := Path(sys.argv[1])).exists():
        cut_files(note)
    os.execvp(sys.argv[2], sys.argv[2:])
