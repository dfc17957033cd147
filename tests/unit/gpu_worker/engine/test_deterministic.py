"""DETERMINISTIC: in bfloat16 too, the bits of a row are its own, whatever else runs, however its prompt is
cut, and after a resume.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.messages.request import SamplingParams
from common.settings.settings import SettingError, Settings
from gpu_worker.engine.engine import Engine
from gpu_worker.protocol import StartRow
from tests.support.engine import tiny_models
from tests.support.engine.batch_player import Player
from tests.support.engine.reference import prompt_ids
from tests.support.prompts import FEW, PROMPTS

NEW_TOKENS = 12
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "kv_cache_bytes": 2**27,
    "max_batch_prefill_tokens": 256,
    "deterministic": True,
}
SAMPLINGS = [
    None,
    SamplingParams(temperature=1.5, seed=3),
    SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.2, seed=4),
]
ROWS = range(len(FEW))
pytestmark = pytest.mark.usefixtures("library")

Told = tuple[list[int], bytes]
"""The ids of a row, and the bits of their log-probabilities."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    yield Engine(Settings(**SETTINGS))


def player(engine: Engine, prefill_tokens: int = 1000) -> Player:
    return Player(engine, list(range(1, 1 + engine.ready.num_blocks)), prefill_tokens, until=engine.rows.step)


def start(played: Player, rows: Sequence[int], shown: dict[int, list[int]] | None = None) -> list[StartRow]:
    prompts, shown = prompt_ids([PROMPTS[place] for place in FEW]), shown or {}
    return [
        played.start(
            row,
            prompts[row] + shown.get(row, []),
            NEW_TOKENS,
            len(shown.get(row, [])),
            ignore_eos=True,
            sampling=SAMPLINGS[row % len(SAMPLINGS)],
        )
        for row in rows
    ]


def tell(played: Player, starts: Sequence[StartRow]) -> dict[int, Told]:
    num_before, bits = len(played.steps), {one.row: b"" for one in starts}
    ids = played.run(starts)
    for step in played.steps[num_before:]:
        for row, _, _, logprob in step.sampled:
            bits[row] += np.float32(logprob).tobytes()
    return {row: (ids[row], bits[row]) for row in bits}


def play(
    engine: Engine, rows: Sequence[int], prefill_tokens: int = 1000, shown: dict[int, list[int]] | None = None
) -> dict[int, Told]:
    played = player(engine, prefill_tokens)
    return tell(played, start(played, rows, shown))


@pytest.mark.slow
def test_bits_do_not_depend_on_the_batch(engine: Engine) -> None:
    alone = {row: play(engine, [row])[row] for row in ROWS}
    assert play(engine, ROWS) == alone, "batched"
    assert play(engine, ROWS[::-1], prefill_tokens=7) == alone, "chunked, in another order"
    resumed = play(engine, ROWS, shown={row: alone[row][0][: 4 + row] for row in ROWS})
    assert resumed == {row: (ids[4 + row :], bits[4 * (4 + row) :]) for row, (ids, bits) in alone.items()}, (
        "resumed"
    )


@pytest.mark.slow
def test_bits_do_not_depend_on_who_computed_the_blocks(engine: Engine) -> None:
    """Others did: of prompts in chunks, of answers one token a step."""
    played = player(engine, prefill_tokens=7)
    played.kept = set(played.free)
    firsts = tell(played, start(played, ROWS))
    behind = played.start_resumed(ROWS, NEW_TOKENS, base=9, by=100)
    assert any(one.num_cached > len(one.ids) // 4 - 9 for one in behind), "blocks with answers, too"
    assert tell(played, behind) == {
        100 + row: (ids[9:], bits[4 * 9 :]) for row, (ids, bits) in firsts.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 3])
def test_bits_do_not_depend_on_the_number_of_threads(engine: Engine, threads: int) -> None:
    before, expected = torch.get_num_threads(), play(engine, ROWS)
    try:
        other = Engine(Settings(**SETTINGS, threads=threads))
        assert torch.get_num_threads() == threads
        assert play(other, ROWS) == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("family", ["Gemma2", "GPT2"])
def test_models_that_cannot_be_deterministic_are_refused(family: str, tmp_path: Path) -> None:
    tiny_models.save(tmp_path, *tiny_models.FAMILIES[family])
    with pytest.raises(SettingError, match=r"DETERMINISTIC: .*0 of its 3 layers") as caught:
        Engine(
            Settings(
                model_id=str(tmp_path), dtype="float32", kv_cache_bytes=2**23, threads=1, deterministic=True
            )
        )
    assert "\n" not in str(caught.value)
