"""MaskBench's cases: real JSON schemas, each with instances that are valid and invalid.

They are no part of this repository: https://github.com/guidance-ai/jsonschemabench, cloned with or without a
work tree.
"""

import json
import random
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = "maskbench/data"


@dataclass(frozen=True, slots=True)
class Case:
    """A schema and its instances.

    Attributes:
        instances: (value, whether it satisfies the schema).
    """

    name: str
    schema: Any
    instances: Sequence[tuple[Any, bool]]


def read_cases(directory: Path, count: int, seed: int) -> Iterator[Case]:
    """Some cases of the clone, chosen by the seed."""
    git = ["git", "-C", str(directory)]
    listed = subprocess.check_output([*git, "ls-tree", "-r", "--name-only", "HEAD", FOLDER], text=True)
    names = sorted(name for name in listed.splitlines() if name.endswith(".json"))
    if not names:
        raise SystemExit(f"{directory} has no {FOLDER}")
    random.Random(seed).shuffle(names)
    for name in names[:count]:
        shown = subprocess.run([*git, "show", f"HEAD:{name}"], stdout=subprocess.PIPE, check=False)
        if shown.returncode:  # git says why: a clone may lack its largest files
            continue
        case = json.loads(shown.stdout)
        instances = [(test["data"], test["valid"]) for test in case.get("tests", [])]
        yield Case(name.removeprefix(f"{FOLDER}/"), case["schema"], instances)
