"""Changes of single scores before truncation: logit bias and watermark, banned ids, penalties, masks."""

from collections.abc import Sequence

import numpy as np
import torch

from gpu_worker.engine.batch.inputs import to_device
from gpu_worker.engine.batch.sampling_state import Float32, Int64, SamplingState
from gpu_worker.engine.sampling.grammar import mask_of

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
    """Change scores float32 [rows, vocabulary] in place. `token_indices`: the index of each row's next token.
    Ids outside the model's vocabulary are ignored.

    The repetition penalty is that of CTRL (arXiv:1909.05858); the frequency and presence penalties are
    subtracted after it. Tokens beyond the end of a mask stay as they are.
    """
    size, device = scores.shape[1], scores.device
    for row, state, index in zip(scores, states, token_indices, strict=True):
        ids, values = biases(state, size)
        known = ids < size
        row.index_add_(0, to_device(ids[known], device), to_device(values[known], device))
        banned = [token for token in state.banned_ids_at(index) if token < size]
        row[to_device(banned, device, torch.int64)] = float("-inf")
        if counts := state.token_counts:
            known, factor = counts.ids < size, state.sampling.repetition_penalty
            where = to_device(counts.ids[known], device)
            found = torch.where(row[where] < 0, row[where] * factor, row[where] / factor)
            row[where] = found - to_device(state.penalty()[known], device)
        if (mask := mask_of(state, size)) is not None:
            masked = np.unpackbits(mask.view(np.uint8), bitorder="little")[:size] == 0
            row[: len(masked)].masked_fill_(to_device(masked, device), float("-inf"))
