"""Grammar masks and watermark biases, applied to the scores on the device."""

from collections.abc import Sequence

import numpy as np
import torch

from gpu_worker.engine.batch.grammar import GrammarMask
from gpu_worker.engine.batch.to_device import to_device


def apply_grammar(scores: torch.Tensor, grammars: Sequence[GrammarMask | None]) -> None:
    """Adds biases to scores float32 [rows, vocabulary] and sets masked tokens to -inf, in place. Tokens
    beyond the end of a bias or mask stay as they are.
    """
    biases = {
        row: bias for row, grammar in enumerate(grammars) if grammar and (bias := grammar.bias()) is not None
    }
    masks = {
        row: mask for row, grammar in enumerate(grammars) if grammar and (mask := grammar.mask()) is not None
    }
    if biases:
        values = to_device(np.stack(list(biases.values())), scores.device)[:, : scores.shape[1]]
        scores[:, : values.shape[1]].index_add_(0, to_device(list(biases), scores.device), values)
    if masks:
        rows = to_device(list(masks), scores.device)
        bits = to_device(np.stack(list(masks.values())), scores.device)
        masked = ~unpack_mask(bits)[:, : scores.shape[1]]
        heads = scores[:, : masked.shape[1]]
        heads.index_copy_(0, rows, heads.index_select(0, rows).masked_fill_(masked, float("-inf")))


def unpack_mask(bits: torch.Tensor) -> torch.Tensor:
    """bits int32 [rows, words] → bool [rows, 32 * words]: the lowest bit of a word first."""
    shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
    return ((bits[..., None] >> shifts) & 1).bool().flatten(1)
