"""`tokenfleet usage`: the table that it prints."""

import pytest

from deploy.cli.admin import usage_table
from deploy.cli.client import print_lines

NUMBERS = {
    "requests": 2,
    "prompt_tokens": 1200,
    "cached_tokens": 0,
    "completion_tokens": 34,
    "speculated_tokens": 0,
    "total_tokens": 1234,
}


def test_a_line_for_each_group_and_one_for_all(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"key": "k1", "model": "", **NUMBERS}
    print_lines(usage_table({"group_by": ["key", "model"], "data": [row], "total": NUMBERS}))
    head, line, last = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["key", "model", "requests"]
    assert line.split() == ["k1", "-", "2", "1,200", "0", "34", "0", "1,234"]
    assert last.split()[0] == "total"
