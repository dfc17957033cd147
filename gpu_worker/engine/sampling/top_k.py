"""Top-k selection by radix, without sorting a vocabulary. Tokens are ordered by score; of two equally likely
the lower id comes first.
"""

import torch

DIGITS = ((20, 11), (10, 10), (0, 10))
"""The digits of a key's 31 bits: shift and number of bits."""


def sort_keys(scores: torch.Tensor) -> torch.Tensor:
    """scores float32 [rows, vocabulary], none above 0 → keys int32 [rows, vocabulary] that rise from 0 as the
    scores fall: the bits of the score without its sign.
    """
    return scores.view(torch.int32) & 0x7FFFFFFF


def top_k(scores: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """scores float32 [rows, vocabulary], none above 0 → scores and ids int64 of the `width` likeliest, [rows,
    width].
    """
    if not width:
        return scores[:, :0], scores[:, :0].long()
    places = sort_keys(scores).long() << 32 | torch.arange(scores.shape[1], device=scores.device)
    ids = places.topk(width, largest=False).values & 0xFFFFFFFF
    return scores.gather(1, ids), ids


def kth_key(keys: torch.Tensor, weights: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """keys int32 [rows, n], none negative; weights int64 [rows, n], none negative; targets int64 [rows, 1] →
    int32 [rows, 1]: the least key of each row up to which, itself included, the tokens weigh more than the
    target; a key above all if no key does. With weights of 1 and target k - 1 it is the k-th key.

    By radix: the weights of the tokens by digit tell which digit the key has, and only tokens with that digit
    remain for the next one.
    """
    found, left = torch.zeros_like(targets), targets
    for shift, bits in DIGITS:
        digits = (keys >> shift & (1 << bits) - 1).long()
        masses = weights.new_zeros(len(keys), 1 << bits).scatter_add_(1, digits, weights)
        ends = masses.cumsum(-1)
        digit = torch.searchsorted(ends, left, right=True).clamp_(max=(1 << bits) - 1)
        left = left - (ends - masses).gather(1, digit)
        weights = weights.masked_fill(digits != digit, 0)
        found |= digit << shift
    return found.int()
