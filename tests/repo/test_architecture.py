"""ARCHITECTURE.md and docs/design/ are about this tree: what they name exists, every folder is named, and the
table of keys is `common/broker/keys.py`.
"""

import re
from pathlib import Path

from common import ids
from common.broker.keys import table as table_of_keys
from tests.support.source_tree import ROOT

ARCHITECTURE = ROOT / "ARCHITECTURE.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
DESIGN = sorted((ROOT / "docs/design").glob("*.md"))
NAME = re.compile(r"`([\w./-]+\.(?:py|lua|md|yml|html|toml)|[\w./-]*Dockerfile[\w.]*)`")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def table(text: str, head: str) -> list[list[str]]:
    """Return the cells of each row of the table that begins with `head`."""
    return [row.split("|")[1:-1] for row in text[text.index(head) :].split("\n\n")[0].splitlines()[2:]]


def test_every_file_that_is_named_exists() -> None:
    for page in (ARCHITECTURE, CONTRIBUTING, *DESIGN):
        named = set(NAME.findall(page.read_text()))
        assert named and [one for one in sorted(named) if not (ROOT / one).is_file()] == [], page


def test_the_table_of_ids_is_the_ids() -> None:
    """Each pattern of an id is in the table, with tests that exist."""
    rows = table((ROOT / "docs/security.md").read_text(), "| id |")
    named = {
        word for row in rows for word in re.findall(r"[A-Z]+(?:_[A-Z]+)+|TENANT|CHANNEL|REVISION", row[1])
    }
    assert named == {name for name, value in vars(ids).items() if isinstance(value, re.Pattern)}
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    wanted = [name for row in rows for name in re.findall(r"`(test_\w+)`", row[3])]
    assert [name for name in wanted if f"def {name}(" not in tests] == []
    assert all("`test_" in row[3] for row in rows)


def kind(name: str) -> str:
    """The kind of a key: `plans:{}` of `plans:{worker}`."""
    return re.sub(r"\{\w*\}", "{}", name)


def kinds_in_the_table() -> set[str]:
    rows = table((ROOT / "docs/design/redis.md").read_text(), "| key | kind |")
    return {kind(name) for row in rows for name in re.findall(r"`([^`]+)`", row[0])}


def kinds_in_the_code() -> set[str]:
    return {kind(row.pattern) for _, row in table_of_keys() if row.kind != "prefix"}


def test_the_table_of_keys_is_the_keys() -> None:
    assert kinds_in_the_table() == kinds_in_the_code()
