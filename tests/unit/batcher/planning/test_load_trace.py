"""Load traces in each of the forms that are read."""

from pathlib import Path

import pytest

from batcher.planning.load_trace import TracedRequest, draw_trace, read_trace
from common.settings.settings import SettingError


def read(path: Path, *lines: str) -> list[TracedRequest]:
    (path / "trace").write_text("\n".join(lines) + "\n")
    return read_trace(path / "trace")


def test_json_lines_are_read_in_order_of_arrival(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        '{"arrival_s": 12.5, "prompt_tokens": 100, "output_tokens": 20}',
        '{"arrival_s": 10, "prompt_tokens": 7, "output_tokens": 3, "class": "batch", "tenant": "a"}',
    )
    assert found == [TracedRequest(0.0, 7, 3, "batch", "a"), TracedRequest(2500.0, 100, 20)]


def test_azures_csv_is_read(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:17:03.9799600,4808,10",
        "2023-11-16 18:17:04.0319600,3180,8",
    )
    assert [(one.prompt_tokens, one.output_tokens) for one in found] == [(4808, 10), (3180, 8)]
    assert found[1].arrival_ms == pytest.approx(52.0, abs=0.01)


def test_mooncakes_lines_are_read(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        '{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}',
        '{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46]}',
    )
    assert found == [TracedRequest(0.0, 6955, 52), TracedRequest(3053.0, 6472, 26)]


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (['{"arrival_s": 1, "prompt_tokens": 5}'], "line 1 of .*: the field 'output_tokens' is missing"),
        (['{"arrival_s": 1, "prompt_tokens": 0, "output_tokens": 1}'], "at least one prompt token"),
        (['{"arrival_s": 1, "prompt_tokens": 1, "output_tokens": 1, "class": "x"}'], "class 'x' is none of"),
        (["a,b", "1,2"], "neither JSON lines nor Azure's CSV"),
        (["TIMESTAMP,ContextTokens,GeneratedTokens", "2023,1"], "line 2"),
        ([""], "has no request"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, lines: list[str], why: str) -> None:
    with pytest.raises(SettingError, match=f"--trace: .*{why}"):
        read(tmp_path, *lines)


def test_drawn_requests_have_the_rate_and_the_lengths_asked_for() -> None:
    found = draw_trace(20.0, 100.0, 100, 10, spread=0.5, seed=1)
    assert len(found) == pytest.approx(2000, rel=0.1)
    assert {50 <= one.prompt_tokens <= 150 and 5 <= one.output_tokens <= 15 for one in found} == {True}
    assert found == draw_trace(20.0, 100.0, 100, 10, spread=0.5, seed=1)
