"""Splits a step whose forward raises: into halves that fit into memory, or to find the rows that fail.

A forward that is run again writes again what the first try wrote into the cache.
"""

import logging
import traceback
from collections.abc import Callable

import torch

from common.process.logs import plural
from gpu_worker.engine.batch.row import RowSlice, StepSlices

log = logging.getLogger(__name__)

CPU_MESSAGES = ("can't allocate memory", "not enough memory")

Forward = Callable[[StepSlices], torch.Tensor]
"""Arranged slices → logits float [num_logits, vocabulary]."""


def is_out_of_memory(error: Exception) -> bool:
    """Tell whether torch ran out of memory; its CPU allocator has no exception of its own."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in CPU_MESSAGES)
    )


def release_tensors(error: Exception) -> None:
    """Release the local variables of the functions that an error ended: the error would keep them in
    memory.
    """
    traceback.clear_frames(error.__traceback__)


def forward_in_halves(
    forward: Forward, slices: StepSlices, trial: StepSlices, error: Exception
) -> tuple[list[RowSlice], torch.Tensor]:
    """Compute in halves a step for which `forward` raised `error`, without the rows for which it raises again
    → the slices computed, and their logits float [num_logits, vocabulary].

    Raises `error` if the rows may not be its cause: memory does not suffice for one of them, or `trial`, a
    step that belongs to no request, fails, too.
    """
    parts = computable_halves(forward, slices, error)
    computed = [row_slice for half, _ in parts for row_slice in half]
    if num_failed := len(slices) - len(computed):
        log.error("the forward failed for %d of %s", num_failed, plural(len(slices), "row"), exc_info=error)
        run_trial(forward, trial, error)
    return computed, torch.cat([logits for _, logits in parts] or [torch.empty(0)])


def computable_halves(
    forward: Forward, slices: StepSlices, error: Exception
) -> list[tuple[StepSlices, torch.Tensor]]:
    """Return what can be computed of a failed step, in order: slices, and their logits float [num_logits,
    vocabulary]. A row whose tokens do not fit into memory together is computed in pieces.
    """
    is_scarce = is_out_of_memory(error)
    if is_scarce:
        log.warning("out of memory in a step of %d tokens: halves", sum(one.count for one in slices))
    release_tensors(error)
    torch.cuda.empty_cache()
    middle = len(slices) // 2
    halves = [StepSlices(half) for half in (slices[:middle], slices[middle:])] if middle else []
    if is_scarce and not (halves := halves or split_slice(slices[0])):
        raise error
    found: list[tuple[StepSlices, torch.Tensor]] = []
    for half in halves:
        try:
            found.append((half, forward(half).clone()))  # graphs write all logits into one buffer
        except Exception as cause:
            found += computable_halves(forward, half, cause)
    if middle or len(found) < len(halves):
        return found if middle else []
    return [(slices, torch.cat([logits for _, logits in found]))] if found else []


def split_slice(row_slice: RowSlice) -> list[StepSlices]:
    """Return two halves of a slice; none of a single token, of a row that decodes, or of one that is computed
    as a whole.
    """
    if row_slice.decodes or row_slice.count == 1 or row_slice.row.output.is_whole:
        return []
    first = row_slice.count // 2
    if pictures := row_slice.row.pictures:
        first = (
            pictures.chunk_end(row_slice.begin, row_slice.begin + first, row_slice.kv_len) - row_slice.begin
        )
        if first in (0, row_slice.count):
            return []
    unscored = row_slice.count - row_slice.samples - row_slice.num_scored
    scores = min(max(0, first - unscored), row_slice.num_scored)
    row, begin, rest = row_slice.row, row_slice.begin, row_slice.num_scored - scores
    before = RowSlice(row, begin, first, False, num_scored=scores)
    after = RowSlice(row, begin + first, row_slice.count - first, row_slice.samples, num_scored=rest)
    return [StepSlices([before]), StepSlices([after])]


def run_trial(forward: Forward, trial: StepSlices, error: Exception) -> None:
    """Raises `error` if model or device are broken for every row."""
    try:
        if forward(trial).is_cuda:
            torch.cuda.synchronize()
    except Exception as cause:
        raise error from cause
