"""Tests mirror modules: tests/unit/common/broker/test_client.py is about common/broker/client.py."""

from tests.repo import unfinished
from tests.support.source_tree import ROOT

UNIT = ROOT / "tests" / "unit"
BEHAVIOURS: dict[str, str] = {}
"""Files that are about what several modules do together."""


def test_unit_tests_have_the_name_of_their_module() -> None:
    found = {path.relative_to(UNIT).as_posix() for path in UNIT.rglob("test_*.py")}
    homeless = {name for name in found if not (ROOT / name.replace("test_", "", 1)).is_file()}
    assert homeless - set(unfinished.UNIT_TESTS) == set(BEHAVIOURS)


def test_every_test_file_lies_in_a_room() -> None:
    files = (ROOT / "tests").rglob("test_*.py")
    rooms = {path.relative_to(ROOT / "tests").parts[0] for path in files}
    assert rooms == {"unit", "integration", "fleet", "gpu", "repo"}
