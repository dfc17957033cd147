"""DETERMINISTIC: the bits of a row are its own, whatever else runs, however its prompt is cut, and after a
resume; on CUDA every step goes through one graph of a fixed shape.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from common.messages.request import SamplingParams
from common.settings.settings import Settings
from gpu_worker.engine.engine import Engine
from tests.support.engine.batch_player import Player, player
from tests.support.engine.reference import prompt_ids
from tests.support.engine.tiny_engine import NEW_TOKENS, play_rows, prompts
from tests.support.prompts import FEW, PROMPTS

NUM_NEW = 12
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


PARAMS: dict[int, dict[str, Any]] = {row: {"sampling": SAMPLINGS[row % len(SAMPLINGS)]} for row in ROWS}


def told(played: Player, of: Sequence[int], by: int = 0) -> dict[int, Told]:
    """What rows were told, of which `played` has others that are higher `by` so much."""
    bits: dict[int, bytes] = dict.fromkeys(of, b"")
    for step in played.steps:
        for row, _, _, logprob in step.sampled:
            if row - by in bits:
                bits[row - by] += np.float32(logprob).tobytes()
    return {row: (played.ids[row + by], bits[row]) for row in of}


def play(
    engine: Engine,
    rows: Sequence[int],
    prefill_tokens: int = 1000,
    shown: dict[int, list[int]] | None = None,
    tiny: bool = False,
) -> dict[int, Told]:
    texts = prompts() if tiny else prompt_ids([PROMPTS[place] for place in FEW])
    new_tokens = NEW_TOKENS if tiny else NUM_NEW
    fresh = {row: texts[row] for row in rows}
    return told(play_rows(engine, fresh, prefill_tokens, new_tokens, shown, params=PARAMS), rows)


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
    texts = prompt_ids([PROMPTS[place] for place in FEW])
    played.run([played.start(row, texts[row], NUM_NEW, ignore_eos=True, **PARAMS[row]) for row in ROWS])
    behind = played.start_resumed(ROWS, NUM_NEW, base=9, by=100)
    assert any(one.num_cached > len(one.ids) // 4 - 9 for one in behind), "blocks with answers, too"
    played.run(behind)
    assert told(played, ROWS, by=100) == {
        row: (ids[9:], bits[4 * 9 :]) for row, (ids, bits) in told(played, ROWS).items()
    }
