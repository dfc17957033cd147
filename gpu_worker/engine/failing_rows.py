"""Failing rows: finds the rows for which a forward raises, so that the others of a step go on."""

import logging
from collections.abc import Iterator, Sequence

import torch

from common.plural import plural
from gpu_worker.engine.batch.row_slice import RowSlice
from gpu_worker.engine.split_step import Forward, is_out_of_memory, release_tensors

log = logging.getLogger(__name__)


def forward_without_failing(
    forward: Forward, slices: Sequence[RowSlice], trial: Sequence[RowSlice], error: Exception
) -> tuple[list[RowSlice], torch.Tensor]:
    """Compute a step for which `forward` raised `error`, without the rows that it raises for → the slices
    that were computed, and their logits float [num_logits, vocabulary].

    What the first try wrote into the cache is written again. Raises `error` where rows may not be to blame:
    `trial`, a step without a request, fails, too; or memory does not suffice.
    """
    parts = list(forward_in_halves(forward, slices, error))
    computed = [row_slice for half, _ in parts for row_slice in half]
    if num_failed := len(slices) - len(computed):
        log.error("the forward failed for %d of %s", num_failed, plural(len(slices), "row"), exc_info=error)
        run_trial(forward, trial, error)
    return computed, torch.cat([logits for _, logits in parts] or [torch.empty(0)])


def forward_in_halves(
    forward: Forward, slices: Sequence[RowSlice], error: Exception
) -> Iterator[tuple[Sequence[RowSlice], torch.Tensor]]:
    """Yield what can be computed of a step that failed, in its order: slices, and their logits float
    [num_logits, vocabulary].
    """
    if is_out_of_memory(error):
        raise error
    release_tensors(error)
    middle = len(slices) // 2
    for half in (slices[:middle], slices[middle:]) if middle else ():
        try:
            logits = forward(half).clone()  # graphs write all logits into one buffer
        except Exception as cause:
            yield from forward_in_halves(forward, half, cause)
        else:
            yield half, logits


def run_trial(forward: Forward, trial: Sequence[RowSlice], error: Exception) -> None:
    """Raises `error` where model or device are broken for every row."""
    try:
        if forward(trial).is_cuda:
            torch.cuda.synchronize()
    except Exception as cause:
        raise error from cause
