"""Rows with adapters, played on an engine in this process."""

from pathlib import Path
from typing import Any

from gpu_worker.protocol import AdapterAnswer, LoadAdapter
from tests.support.adapters.tiny_adapters import expected_ids
from tests.support.engine.batch_player import player
from tests.support.engine.tiny_engine import prompts

COUNT = 12


def load_adapters(engine: Any, folders: dict[str, Path]) -> None:
    for name, folder in folders.items():
        assert engine.obey(LoadAdapter(name, str(folder))) == AdapterAnswer(name)


def play(
    engine: Any, rows: dict[int, tuple[list[int], str]], prefill_tokens: int = 1000, base: int = 0
) -> dict[int, list[int]]:
    """The ids of rows, each a prompt and an adapter's name, beyond their first `base`."""
    played = player(engine, prefill_tokens)
    starts = [
        played.start(row, ids, COUNT, base, ignore_eos=True, adapter=name)
        for row, (ids, name) in rows.items()
    ]
    return played.run(starts)


def check_adapters(
    engine: Any, model: Any, folders: dict[str, Path], names: list[str], base: int = 5
) -> None:
    """Rows of these adapters ("" is none) and every prompt have the ids that they should: alone, batched,
    chunked and resumed.
    """
    by_name = {
        name: expected_ids(model, folders.get(name), prompts(), COUNT) for name in dict.fromkeys(names)
    }
    rows, expected = {}, {}
    for number, name in enumerate(names):
        for place, prompt in enumerate(prompts()):
            rows[10 * number + place] = (prompt, name)
            expected[10 * number + place] = by_name[name][place]
    assert {row: play(engine, {row: one})[row] for row, one in list(rows.items())[:6]} == {
        row: expected[row] for row in list(rows)[:6]
    }, "alone"
    assert play(engine, rows) == expected, "batched"
    assert play(engine, rows, prefill_tokens=7) == expected, "chunked"
    resumed = {row: (ids + expected[row][:base], name) for row, (ids, name) in rows.items()}
    assert play(engine, resumed, base=base) == {row: ids[base:] for row, ids in expected.items()}, "resumed"
