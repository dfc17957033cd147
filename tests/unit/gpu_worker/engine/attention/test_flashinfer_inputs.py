"""When the rows of a step are split for the sake of a long one, and the room that takes."""

import numpy as np
import pytest

from gpu_worker.engine.attention.flashinfer import (
    OWN_PARTS,
    SPLIT_PARTS,
    scratch_bytes,
    splits_rows,
    told_processors,
)

H200 = 132


@pytest.mark.parametrize(
    ("lengths", "kv_heads", "is_split"),
    [
        ([32_000] + [500] * 64, 8, True),
        ([32_000] * 65, 8, False),
        ([500] * 65, 8, False),
        ([32_000], 8, True),
        ([2_000], 8, False),
        ([32_000] + [500] * 2, 8, True),
        ([8_000] + [500] * 255, 8, False),
        ([32_000] + [500] * 64, 1, True),
        ([1] * 256, 8, False),
    ],
    ids=["one long", "all long", "all short", "alone", "one short", "few", "many", "one K head", "nothing"],
)
def test_rows_are_split_for_the_sake_of_a_long_one(lengths: list[int], kv_heads: int, is_split: bool) -> None:
    assert splits_rows(np.array(lengths, np.int32), kv_heads, H200) == is_split


def test_xqa_splits_by_the_processors_that_it_is_told_of() -> None:
    """It gives each row and K head as many programs as there are processors for it."""
    assert told_processors(65, 8, H200, False) // (65 * 8) == 1
    assert told_processors(65, 8, H200, True) // (65 * 8) == SPLIT_PARTS
    assert told_processors(1, 8, H200, False) // 8 == OWN_PARTS, "short rows have no empty parts to merge"
    assert told_processors(1, 1, H200, True) == H200, "a long one has all processors"


def test_scratch_has_room_for_all_parts() -> None:
    """Of 256 rows of Llama-8B in MiB; where XQA splits by itself there are no more parts than processors."""
    assert scratch_bytes(256, 8, 4, 128, H200) // 2**20 == 20
    assert scratch_bytes(1, 1, 32, 256, H200) == H200 * (32 * 256 * 2 + 256)
