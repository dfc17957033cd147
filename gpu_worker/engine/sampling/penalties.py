"""Changes of single scores before truncation: logit bias and watermark, banned ids, penalties, masks.

All but masks concern few tokens of a row. These are gathered and scattered: the whole vocabulary is not read.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from gpu_worker.engine.batch.inputs import to_device
from gpu_worker.engine.batch.sampling_state import Float32, Int64, SamplingState
from gpu_worker.engine.sampling.grammar import apply_masks

HASH_KEY = 15485863
"""TGI's: a prime that spreads token ids over the seeds."""
NO_IDS = np.zeros(0, np.int64)
NO_VALUES = np.zeros(0, np.float32)


def green_ids(previous: int, gamma: float, vocab_size: int) -> Int64:
    """The ids int64 [vocab_size * gamma] that are green after the token `previous`. Torch's generator on the
    CPU draws them, whatever the device, so that every worker finds the same ones.
    """
    generator = torch.Generator().manual_seed(HASH_KEY * previous)
    order = torch.randperm(vocab_size, generator=generator)
    return order[: int(vocab_size * gamma)].numpy()


def watermark(state: SamplingState, vocab_size: int) -> tuple[Int64, Float32]:
    """What a row's watermark adds to its logits, as ids int64 [n] and values float32 [n].

    Watermark of arXiv:2301.10226, as TGI has it: part of the vocabulary is green, and favoured. The token
    before decides which part, so that a text shows by itself how many of its tokens are green.
    """
    sampling = state.sampling
    if not sampling.watermark_delta:
        return NO_IDS, NO_VALUES
    green = green_ids(state.tail[-1], sampling.watermark_gamma, vocab_size)
    return green, np.full(len(green), sampling.watermark_delta, np.float32)


def biases(state: SamplingState, vocab_size: int) -> tuple[Int64, Float32]:
    """The logit bias and the watermark of a row, as ids int64 [n] and values float32 [n] to add to its
    logits.
    """
    if not state.sampling.watermark_delta:
        return state.bias_ids, state.bias
    green, delta = watermark(state, vocab_size)
    return np.concatenate([state.bias_ids, green]), np.concatenate([state.bias, delta])


def adjust_scores(
    scores: torch.Tensor, states: Sequence[SamplingState], token_indices: Sequence[int]
) -> None:
    """Change scores float32 [rows, vocabulary] in place. `token_indices`: the index of each row's next
    token.
    """
    apply_bias(scores, states)
    banned = [state.banned_ids_at(index) for state, index in zip(states, token_indices, strict=True)]
    apply_bans(scores, [np.array(ids, np.int64) for ids in banned])
    apply_penalties(scores, states)
    apply_masks(scores, states)


def apply_bias(scores: torch.Tensor, states: Sequence[SamplingState]) -> None:
    """Add logit biases and watermarks to scores float32 [rows, vocabulary], in place."""
    found = [biases(state, scores.shape[1]) for state in states]
    rows, ids = flatten([some for some, _ in found])
    if len(ids):
        values, known = np.concatenate([some for _, some in found]), ids < scores.shape[1]
        scores.index_put_(
            indices(scores, rows[known], ids[known]), on_device(scores, values[known]), accumulate=True
        )


def apply_bans(scores: torch.Tensor, banned: Sequence[Int64]) -> None:
    """Set the banned ids of each row to -inf in scores float32 [rows, vocabulary], in place."""
    rows, ids = flatten(banned)
    known = ids < scores.shape[1]  # ids outside the model's vocabulary are never sampled
    if len(ids):
        scores[indices(scores, rows[known], ids[known])] = float("-inf")


def apply_penalties(scores: torch.Tensor, states: Sequence[SamplingState]) -> None:
    """Apply the repetition penalty as in CTRL (arXiv:1909.05858), then subtract the frequency and presence
    penalties, in scores float32 [rows, vocabulary], in place.
    """
    counts = [state.token_counts for state in states]
    rows, ids = flatten([count.ids if count else NO_IDS for count in counts])
    if not len(ids):
        return
    repetition = np.array([state.sampling.repetition_penalty for state in states], np.float32)[rows]
    penalty = np.concatenate([state.penalty() for state in states if state.token_counts])
    known = ids < scores.shape[1]
    where, factor = indices(scores, rows[known], ids[known]), on_device(scores, repetition[known])
    found = scores[where]
    found = torch.where(found < 0, found * factor, found / factor)
    scores[where] = found - on_device(scores, penalty[known])


def flatten(ids: Sequence[Int64]) -> tuple[Int64, Int64]:
    """Ids of each row → parallel arrays of rows and ids."""
    return np.repeat(np.arange(len(ids)), [len(some) for some in ids]), np.concatenate(ids)


def indices(scores: torch.Tensor, rows: Int64, ids: Int64) -> tuple[torch.Tensor, torch.Tensor]:
    """rows and ids int64 [n] → the index of these places in scores float32 [rows, vocabulary]"""
    return on_device(scores, rows), on_device(scores, ids)


def on_device(scores: torch.Tensor, values: npt.NDArray[np.generic]) -> torch.Tensor:
    """values [n] of any dtype → a tensor [n] of that dtype where scores float32 [rows, vocabulary] are."""
    return to_device(values, scores.device)
