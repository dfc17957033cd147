"""python deploy/lock.py: writes deploy/requirements.lock, the versions that `make` and the images install.

They are those of this environment. What is not installed in it, such as what only workers on a GPU need,
keeps the version that it had.
"""

import re
from importlib.metadata import distributions
from pathlib import Path

LOCK = Path(__file__).with_name("requirements.lock")
HEAD = "# Written by deploy/lock.py (`make lock`); pip takes it as constraints."
OURS = ("tokenfleet", "pip")


def name_of(text: str) -> str:
    return re.sub(r"[-_.]+", "-", text).lower()


def read_lock(text: str) -> dict[str, str]:
    """Name → version of each line."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    pins = (line.partition("==") for line in lines if line)
    return {name_of(name): version for name, _, version in pins}


def installed() -> dict[str, str]:
    """Name → version, without the part that says for which index it was built."""
    found = {name_of(one.metadata["Name"]): one.version.partition("+")[0] for one in distributions()}
    return {name: version for name, version in found.items() if name not in OURS}


def render(pins: dict[str, str]) -> str:
    return "\n".join([HEAD, *(f"{name}=={pins[name]}" for name in sorted(pins)), ""])


if __name__ == "__main__":
    LOCK.write_text(render(read_lock(LOCK.read_text()) | installed()))
