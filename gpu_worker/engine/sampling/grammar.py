"""Masks of grammars and of allowed ids, applied to the scores on the device."""

from collections.abc import Collection, Sequence

import numpy as np
import torch

from gpu_worker.engine.batch.grammar import Bits
from gpu_worker.engine.batch.sampling_state import SamplingState
from gpu_worker.engine.batch.to_device import to_device

WORD_BITS = 32


def mask_of(state: SamplingState, vocab_size: int) -> Bits | None:
    """The tokens that may come next, as `GrammarMask.mask` has them; None for all."""
    if state.grammar:
        return state.grammar.mask()
    if state.allowed is not None and state.allowed_mask is None:
        state.allowed_mask = pack_ids(state.allowed, vocab_size)
    return state.allowed_mask


def pack_ids(ids: Collection[int], vocab_size: int) -> Bits:
    """A mask that has these ids; those outside the vocabulary are no tokens."""
    flags = np.zeros(num_words(vocab_size) * WORD_BITS, bool)
    flags[[token for token in ids if token < vocab_size]] = True
    return np.packbits(flags, bitorder="little").view("<i4")


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // WORD_BITS)


def as_long_as(mask: Bits, vocab_size: int) -> Bits:
    """A mask of the whole vocabulary: tokens beyond its end are allowed."""
    words = mask[: num_words(vocab_size)]
    return np.pad(words, (0, num_words(vocab_size) - len(words)), constant_values=-1)


def apply_masks(scores: torch.Tensor, states: Sequence[SamplingState]) -> None:
    """Set masked tokens of scores float32 [rows, vocabulary] to -inf, in place. Tokens beyond the end of a
    mask stay as they are.
    """
    size = scores.shape[1]
    masks = {row: mask for row, state in enumerate(states) if (mask := mask_of(state, size)) is not None}
    if masks:
        rows = to_device(list(masks), scores.device)
        bits = to_device(np.stack([as_long_as(mask, size) for mask in masks.values()]), scores.device)
        masked = ~unpack_mask(bits)[:, :size]
        scores.index_copy_(0, rows, scores.index_select(0, rows).masked_fill_(masked, float("-inf")))


def unpack_mask(bits: torch.Tensor) -> torch.Tensor:
    """bits int32 [rows, words] → bool [rows, 32 * words]: the lowest bit of a word first."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits[..., None] >> shifts) & 1).bool().flatten(1)
