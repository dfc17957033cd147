"""Prefill: the chunks of prompts that a step computes, and in which order."""

from collections.abc import Iterable, Iterator, Sequence

from gpu_worker.engine.batch.row import Row
from gpu_worker.engine.batch.row_slice import RowSlice

PATIENCE = 16
"""One of so many steps begins with the prompt that has waited longest, if all since the last such one began
with others.
"""


def line_up(prompts: Iterable[Row], step: int) -> list[Row]:
    """Return prompts in the order in which a step computes them: the more urgent first, of one class the one
    of which less is left, of these the one that started first. So many short ones do not starve a long one,
    and those that have waited take one step of PATIENCE, however many they are.
    """
    line = sorted(prompts, key=lambda row: (row.class_index, len(row.ids) - row.kv_len))
    last = max(line, key=lambda row: row.num_passed, default=None)
    if last and step % PATIENCE == 0 and last.num_passed >= PATIENCE - 1:
        line.remove(last)
        line.insert(0, last)
    for place, row in enumerate(line):
        row.num_passed = row.num_passed + 1 if place else 0
    return line


def chunks(line: Sequence[Row], block_size: int, tokens_left: int, scores_left: int) -> Iterator[RowSlice]:
    """Yield chunks of at most `tokens_left` tokens, of at most `scores_left` that are scored."""
    for row in line:
        begin, scored = row.kv_len, row.prompt_logprobs is not None
        room, prefill = len(row.blocks) * block_size - begin, len(row.ids) - begin
        budget = min(tokens_left, scores_left) if scored else tokens_left
        count = min(room, prefill, budget)
        if count > 0:
            samples = count == prefill
            num_scored = count - samples if scored else 0
            yield RowSlice(row, begin, count, samples, num_scored=num_scored)
            tokens_left -= count
            scores_left -= count if scored else 0
