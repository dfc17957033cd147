"""Requirements: what the images and `make` install. Needs nothing but Python, as images run it first.

python requirements.py [EXTRA …]   prints the dependencies in pyproject.toml
python requirements.py --lock      writes requirements.lock: the versions in this environment

What is not installed in this environment, such as packages for GPUs only, keeps its version in the lock.
"""

import re
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path

LOCK = Path(__file__).with_name("requirements.lock")
HEAD = "# Written by `make lock` (deploy/requirements.py); pip takes it as constraints."
NOT_LOCKED = ("tokenfleet", "pip")


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    project = tomllib.loads(pyproject.read_text())["project"]
    return [
        *project["dependencies"],
        *(line for extra in extras for line in project["optional-dependencies"][extra]),
    ]


def normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(text: str) -> dict[str, str]:
    """Return name → version of each line."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    pins = (line.partition("==") for line in lines if line)
    return {normalize(name): version for name, _, version in pins}


def installed() -> dict[str, str]:
    """Return name → version. What follows a `+` is left out: it names a build, such as `cpu`."""
    found = {normalize(one.metadata["Name"]): one.version.partition("+")[0] for one in distributions()}
    return {name: version for name, version in found.items() if name not in NOT_LOCKED}


def render(pins: dict[str, str]) -> str:
    return "\n".join([HEAD, *(f"{name}=={pins[name]}" for name in sorted(pins)), ""])


if __name__ == "__main__":
    if sys.argv[1:] == ["--lock"]:
        LOCK.write_text(render(read_lock(LOCK.read_text()) | installed()))
    else:
        print("\n".join(requirements(Path("pyproject.toml"), sys.argv[1:])))
