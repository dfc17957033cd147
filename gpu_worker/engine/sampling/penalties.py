"""What is changed in the scores of single tokens before anything is compared: bias, bans, penalties, and what
a guide says.

Few tokens of a row are concerned, so places are gathered and scattered; nothing here goes through the
vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.engine.batch.grammar import steer
from gpu_worker.engine.batch.sampling_state import Int64, Manner
from gpu_worker.engine.batch.to_device import upload

NOTHING = np.zeros(0, np.int64)


def adjust(scores: torch.Tensor, manners: Sequence[Manner], indices: Sequence[int]) -> None:
    """In place. scores [rows, vocabulary]; `indices` are of the tokens to be sampled."""
    bias(scores, manners)
    ban(
        scores,
        [np.array(manner.banned(index), np.int64) for manner, index in zip(manners, indices, strict=True)],
    )
    penalise(scores, manners)
    steer(scores, [manner.guide for manner in manners])


def bias(scores: torch.Tensor, manners: Sequence[Manner]) -> None:
    rows, ids = places([manner.bias_ids for manner in manners])
    if len(ids):
        values, known = np.concatenate([manner.bias for manner in manners]), ids < scores.shape[1]
        scores.index_put_(at(scores, rows[known], ids[known]), on(scores, values[known]), accumulate=True)


def ban(scores: torch.Tensor, banned: Sequence[Int64]) -> None:
    rows, ids = places(banned)
    known = ids < scores.shape[1]  # an id outside the model's vocabulary is never sampled
    if len(ids):
        scores[at(scores, rows[known], ids[known])] = float("-inf")


def penalise(scores: torch.Tensor, manners: Sequence[Manner]) -> None:
    """Repetition as in CTRL (arXiv:1909.05858), then what is subtracted."""
    histories = [manner.history for manner in manners]
    rows, ids = places([history.ids if history else NOTHING for history in histories])
    if not len(ids):
        return
    repetition = np.array([manner.sampling.repetition_penalty for manner in manners], np.float32)[rows]
    penalty = np.concatenate([manner.penalty() for manner in manners if manner.history])
    known = ids < scores.shape[1]
    where, factor = at(scores, rows[known], ids[known]), on(scores, repetition[known])
    found = scores[where]
    scores[where] = torch.where(found < 0, found * factor, found / factor) - on(scores, penalty[known])


def places(ids: Sequence[Int64]) -> tuple[Int64, Int64]:
    """Ids of each row → parallel rows and ids."""
    return np.repeat(np.arange(len(ids)), [len(some) for some in ids]), np.concatenate(ids)


def at(scores: torch.Tensor, rows: Int64, ids: Int64) -> tuple[torch.Tensor, torch.Tensor]:
    return on(scores, rows), on(scores, ids)


def on(scores: torch.Tensor, values: npt.NDArray[np.generic]) -> torch.Tensor:
    return upload(values, scores.device)
