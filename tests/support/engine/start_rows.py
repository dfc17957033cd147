"""Rows as an agent starts them, with the stopping parameters beside the others."""

from collections.abc import Sequence
from typing import Any

from common.messages.records import pack_ids
from common.messages.request import BeamParams, SamplingParams, StoppingParams
from gpu_worker.protocol import StartRow


def start_row(
    row: int,
    ids: Sequence[int],
    max_new_tokens: int,
    base: int = 0,
    blocks: Sequence[int] = (),
    sampling: SamplingParams | None = None,
    top_n_tokens: int = 0,
    prompt_logprobs: int | None = None,
    num_cached: int = 0,
    class_index: int = 0,
    logits: tuple[int, int, str] | None = None,
    beams: BeamParams | None = None,
    adapter: str = "",
    pictures: Sequence[tuple[int, int, str, bytes]] = (),
    **stopping: Any,
) -> StartRow:
    """`stopping` are the other fields of `StoppingParams`."""
    return StartRow(
        row,
        pack_ids(ids),
        base,
        pack_ids(blocks),
        StoppingParams(max_new_tokens, **stopping),
        sampling,
        top_n_tokens,
        prompt_logprobs,
        num_cached,
        class_index,
        logits,
        beams,
        adapter,
        pictures,
    )
