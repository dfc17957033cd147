"""The capacity that a worker announces."""

from pathlib import Path
from typing import Any

import pytest

from common.messages.records import pack_ids
from common.settings.settings import SettingError, Settings
from gpu_worker.loading import capacity
from gpu_worker.protocol import Ready

READY = Ready("m", "float32", "cpu", 16, 100, 64, 2048, pack_ids([2]))


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"max_batch_total_tokens": 15}, "MAX_BATCH_TOTAL_TOKENS: 15 is less than one block of 16 tokens"),
        (
            {"max_total_tokens": 1601},
            "MAX_TOTAL_TOKENS: 1601 is more than the 1600 tokens that context and KV cache allow",
        ),
        (
            {"max_input_tokens": 800, "max_batch_total_tokens": 700},
            "MAX_INPUT_TOKENS: 800 is more than the 687 tokens that",
        ),
        (
            {"max_input_tokens": 1600},  # no room for a new token
            "MAX_INPUT_TOKENS: 1600 is more than the 1599 tokens that",
        ),
    ],
)
def test_limits_above_the_capacity_are_refused(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(SettingError, match=line):
        capacity(Settings(**settings), READY, "w0", "w0-1", Path("m"))


def test_max_batch_total_tokens_bounds_the_capacity() -> None:
    worker = capacity(Settings(max_batch_total_tokens=700), READY, "w0", "w0-1", Path("m"))
    assert (worker.num_blocks, worker.max_total_tokens) == (43, 688)
