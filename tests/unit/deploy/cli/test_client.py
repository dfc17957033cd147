"""What commands print where the output is no terminal."""

import pytest
from rich.table import Table

from deploy.cli.client import print_lines


def test_lines_for_a_pipe_are_not_folded_and_have_no_spaces_at_their_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    long = "word " * 30
    table.add_row("a", "ok")
    table.add_row("b", long)
    print_lines("title", table)
    assert capsys.readouterr().out == f"title\na  ok\nb  {long.rstrip()}\n"
