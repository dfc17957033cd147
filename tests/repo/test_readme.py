"""The README and the pages in docs/ are true: the table of settings is the settings, flags exist, links lead
somewhere, and the examples of README.md and docs/generation.md run and print what is shown.

Each block of `sh` or `python` is an example. The block of `text` that follows one is what it prints, in
shape: JSON has the same fields with values of the same types. Blocks of `console` are not run.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from common.settings.fields import SettingFields
from common.settings.flags import FLAGS, OPTIONS, ROWS, SAME, SECTIONS, flag_of, help_texts
from common.settings.settings import Settings
from deploy.cli.table import TABLE
from tests.support import brokers
from tests.support.fleet.fleet import Fleet
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
GENERATION = (ROOT / "docs/generation.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FLAGS_OF_ENGINES = {"gpus", "shm-size", "profile", "scale", "wait", "no-recreate", "no-deps", "rm"}
FLAGS_OF_LAUNCHERS = {"nproc-per-node", "max-restarts", "ntasks-per-node", "gpus-per-node"}
FLAGS_OF_OTHERS = {*FLAGS_OF_ENGINES, *FLAGS_OF_LAUNCHERS, "help", "help-all", "config", "no-", "schema"}
FLAGS_OF_CONTAINERS = {"format", "repo", "user"}  # of docker, and of gh
FLAGS_OF_KUBERNETES = {"all", "for", "from-literal", "replicas", "set", "timeout"}
FLAGS_OF_COMMANDS = {name.lstrip("-") for flag in TABLE["flags"] for name in flag.split()[-1].split("/")}


# --- settings and flags -------------------------------------------------------------------------------------


def tables() -> str:
    """One table for each section of the help: the variable with its default, and what it says."""
    lines = []
    texts = help_texts()
    for name, field in SettingFields.model_fields.items():
        if name in SECTIONS:
            lines += ["", f"## {SECTIONS[name]}", "", "| setting=default | |", "|---|---|"]
        lines.append(f"| `{name.upper()}{shown(field.default)}` | {texts[name]} |")
    return "\n".join(lines[1:])


def shown(default: Any) -> str:
    if default in (None, ()):
        return ""
    return f"={default:_}" if type(default) is int and default >= 100_000 else f"={default}".lower()


def table_of_tgi() -> str:
    """A table of all options of text-generation-inference, as rows of equal answers."""
    lines = ["| option of TGI | here |", "|---|---|"]
    for server, row in ROWS:
        if not server.startswith(("vLLM", "earlier")):
            names, first = [one.name for one in row], row[0]
            target = first.target and f"`{flag_of(first.target)}`"
            outcome = "the same" if first.answer == SAME else target or first.outcome.replace("|", "\\|")
            spell = str if names[0].startswith("-") else flag_of if first.flag else str.upper
            lines.append(f"| {' '.join(f'`{spell(name)}`' for name in names)} | {outcome} |")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("page", "mark", "table"),
    [("docs/settings.md", "settings", tables), ("docs/from-tgi.md", "options", table_of_tgi)],
)
def test_a_table_of_options_is_what_the_command_line_knows(
    page: str, mark: str, table: Callable[[], str]
) -> None:
    found = re.search(rf"<!-- {mark} -->\n(.*)\n<!-- /{mark} -->", (ROOT / page).read_text(), re.DOTALL)
    assert found is not None
    assert found[1] == table(), f"{page} should say:\n{table()}"


def test_every_flag_mentioned_exists() -> None:
    ours = {name.replace("_", "-") for name in (*Settings.model_fields, *FLAGS, *OPTIONS)}
    texts = [README, *(path.read_text() for path in (ROOT / "docs").glob("*.md"))]
    named = set(re.findall(r"(?<![\w-])--([a-z][a-z-]+)", "\n".join(texts)))
    of_tools = FLAGS_OF_OTHERS | FLAGS_OF_CONTAINERS | FLAGS_OF_KUBERNETES
    assert named - ours - of_tools - FLAGS_OF_COMMANDS == {"acl"}


def test_what_the_changelog_adds_is_not_refused() -> None:
    """It is published as the notes of a release."""
    added = (ROOT / "CHANGELOG.md").read_text().partition("### Added")[2].replace("-", "_").upper()
    refused = {name.upper() for name, option in OPTIONS.items() if option.answer == "none" and "_" in name}
    assert refused & set(re.findall(r"[A-Z_]+", added.replace("__", " "))) == set()


def test_every_link_has_a_target() -> None:
    """A link leads to a page, and to its heading if it names one."""
    for page in PAGES:
        links = re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text())
        targets = [(page.parent / link if link else page, anchor) for link, anchor in links]
        assert [str(target) for target, _ in targets if not target.is_file()] == []
        assert [
            (target, anchor) for target, anchor in targets if anchor and anchor not in anchors(target)
        ] == []


def test_tests_of_cards_are_those_that_are_named_and_run() -> None:
    """Nobody runs them in CI: a file that has another name would be missed only on a card."""
    folder = ROOT / "tests/gpu"
    for file, name in re.findall(r"`(test_\w+\.py)::(\w+)`", (folder / "README.md").read_text()):
        assert f"def {name}(" in (folder / file).read_text(), name
    found = re.search(r"for file in (\w+(?: \w+)+); do", (ROOT / "benchmarks/gpu/run.sh").read_text())
    assert found and {f"test_{name}.py" for name in found[1].split()} == {
        path.name for path in folder.glob("test_*.py")
    }


def anchors(page: Path) -> list[str]:
    """The headings of a page, as links name them."""
    headings: list[str] = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


# --- examples -----------------------------------------------------------------------------------------------


def examples() -> Iterator[tuple[str, str, str | None]]:
    """Return language, program and expected output, in the order of the page: a later example may need an
    earlier one.
    """
    blocks = BLOCK.findall(README + GENERATION)
    for (language, program), (next_language, printed) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if language in ("sh", "python"):
            yield language, program, printed if next_language == "text" else None


def shape(value: Any) -> Any:
    """Replace values by their types; a list is replaced by the types that occur in it."""
    if isinstance(value, dict):
        return {name: shape(one) for name, one in value.items()}
    if isinstance(value, list):
        return [one for one, _ in groupby(map(shape, value))]
    return type(value).__name__


def shapes(printed: str) -> list[Any]:
    """Return the shape of each line that is not empty. Consecutive lines of one shape count once, since a
    stream may have any number of frames.
    """
    return [one for one, _ in groupby(line_shape(line) for line in printed.splitlines() if line.strip())]


def line_shape(line: str) -> Any:
    try:
        return shape(json.loads(line.removeprefix("data: ")))
    except ValueError:
        return "text"


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    settings: dict[str, Any] = {"kv_cache_bytes": "64MiB", "threads": 1}  # several would wait for each other
    with brokers.running() as broker, Fleet(**settings, redis_url=brokers.open_port(broker.url)) as fleet:
        yield fleet


REDIS_CLI = f"""#!{sys.executable}
import sys, redis
print(redis.Redis.from_url(sys.argv[2], decode_responses=True).execute_command(*sys.argv[3:]))
"""


def stand_in(fleet: Fleet) -> Path:
    """Make a folder with a `redis-cli`, for machines without one."""
    folder = fleet.directory / "bin"
    folder.mkdir(exist_ok=True)
    (folder / "redis-cli").write_text(REDIS_CLI)
    (folder / "redis-cli").chmod(0o755)
    return folder


def run(fleet: Fleet, language: str, program: str) -> str:
    """Return what an example prints in a shell with the active virtual environment."""
    here = program.replace("http://127.0.0.1:3000", fleet.base_url).replace(
        "redis://127.0.0.1:6379/0", fleet.redis_url
    )
    command = ["bash", "-euo", "pipefail", "-c", here] if language == "sh" else [sys.executable, "-c", here]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}:{stand_in(fleet)}"
    environ = os.environ | {"PATH": path, "PORT": str(fleet.settings["port"])}
    done = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, f"{program}\n{done.stderr}"
    return done.stdout


def test_every_example_runs_and_prints_what_is_shown(fleet: Fleet) -> None:
    for language, program, printed in examples():
        answer = run(fleet, language, program)
        assert answer.strip(), program
        if printed is not None:
            assert shapes(answer) == shapes(printed), program


def test_the_last_lines_of_a_start_have_a_command_that_works(fleet: Fleet) -> None:
    [tried] = re.findall(r"try: +(.*)", fleet.output())
    assert shapes(run(fleet, "sh", tried)) == shapes(run(fleet, *next(examples())[:2]))
    assert f"page: {fleet.base_url} (open it in a browser" in fleet.output()
    assert f"{fleet.base_url}/docs" in fleet.output()
