"""What is changed in the scores of single tokens before anything is compared: bias, bans, penalties, and what
a guide says.

Few tokens of a row are concerned, so places are gathered and scattered; nothing here goes through the
vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.engine.batch.sampling_state import Int64, SamplingState
from gpu_worker.engine.batch.to_device import to_device
from gpu_worker.engine.sampling.grammar import apply_grammar

NO_IDS = np.zeros(0, np.int64)


def adjust_scores(scores: torch.Tensor, states: Sequence[SamplingState], indices: Sequence[int]) -> None:
    """In place. scores [rows, vocabulary]; `indices` are of the tokens to be sampled."""
    apply_bias(scores, states)
    apply_bans(
        scores,
        [
            np.array(state.banned_ids_at(index), np.int64)
            for state, index in zip(states, indices, strict=True)
        ],
    )
    apply_penalties(scores, states)
    apply_grammar(scores, [state.grammar for state in states])


def apply_bias(scores: torch.Tensor, states: Sequence[SamplingState]) -> None:
    rows, ids = flatten([state.bias_ids for state in states])
    if len(ids):
        values, known = np.concatenate([state.bias for state in states]), ids < scores.shape[1]
        scores.index_put_(at(scores, rows[known], ids[known]), on(scores, values[known]), accumulate=True)


def apply_bans(scores: torch.Tensor, banned: Sequence[Int64]) -> None:
    rows, ids = flatten(banned)
    known = ids < scores.shape[1]  # an id outside the model's vocabulary is never sampled
    if len(ids):
        scores[at(scores, rows[known], ids[known])] = float("-inf")


def apply_penalties(scores: torch.Tensor, states: Sequence[SamplingState]) -> None:
    """Repetition as in CTRL (arXiv:1909.05858), then what is subtracted."""
    counts = [state.token_counts for state in states]
    rows, ids = flatten([counts.ids if counts else NO_IDS for counts in counts])
    if not len(ids):
        return
    repetition = np.array([state.sampling.repetition_penalty for state in states], np.float32)[rows]
    penalty = np.concatenate([state.penalty() for state in states if state.token_counts])
    known = ids < scores.shape[1]
    where, factor = at(scores, rows[known], ids[known]), on(scores, repetition[known])
    found = scores[where]
    scores[where] = torch.where(found < 0, found * factor, found / factor) - on(scores, penalty[known])


def flatten(ids: Sequence[Int64]) -> tuple[Int64, Int64]:
    """Ids of each row → parallel rows and ids."""
    return np.repeat(np.arange(len(ids)), [len(some) for some in ids]), np.concatenate(ids)


def at(scores: torch.Tensor, rows: Int64, ids: Int64) -> tuple[torch.Tensor, torch.Tensor]:
    return on(scores, rows), on(scores, ids)


def on(scores: torch.Tensor, values: npt.NDArray[np.generic]) -> torch.Tensor:
    return to_device(values, scores.device)
