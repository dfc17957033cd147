"""Prefill: the chunks of prompts that a step computes, and in which order."""

from collections.abc import Iterator, Sequence

from gpu_worker.engine.batch.row import Row
from gpu_worker.engine.batch.row_slice import RowSlice

PATIENCE = 16
"""Steps that compute nothing of a prompt which has room, behind which it comes before all others."""


def place_in_line(row: Row) -> tuple[int, int]:
    """The smaller is computed first: the more urgent, then the prompt of which less is left. Where it is the
    same, the row that started first.
    """
    if row.num_passed >= PATIENCE:
        return -1, 0
    return row.priority, len(row.ids) - row.kv_len


def chunks(prompts: Sequence[Row], block_size: int, tokens_left: int, scores_left: int) -> Iterator[RowSlice]:
    """Yield chunks of at most `tokens_left` tokens, of at most `scores_left` that are scored."""
    for row in sorted(prompts, key=place_in_line):
        begin, scored = row.kv_len, row.prompt_logprobs is not None
        room, prefill = len(row.blocks) * block_size - begin, len(row.ids) - begin
        budget = min(tokens_left, scores_left) if scored else tokens_left
        count = min(room, prefill, budget)
        row.num_passed += room > 0 and count <= 0
        if count > 0:
            samples = count == prefill
            num_scored = count - samples if scored else 0
            yield RowSlice(row, begin, count, samples, num_scored=num_scored)
            tokens_left -= count
            scores_left -= count if scored else 0
