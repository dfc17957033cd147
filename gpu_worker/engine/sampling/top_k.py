"""The order of a row's tokens: the likeliest first, the lower id first where two are equally likely. None of
it sorts a vocabulary.
"""

import torch

DIGITS = ((20, 11), (10, 10), (0, 10))
"""Of a key's 31 bits: how far up a digit begins, and its bits."""


def sort_keys(scores: torch.Tensor) -> torch.Tensor:
    """scores float32, none above 0 → int32 that rise from 0 as the scores fall: their bits but for the sign."""
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
    int32 [rows, 1]: the least key of each row up to which, itself included, its tokens weigh more than the
    target; if all together do not, one above all.

    By radix: what the tokens of each digit weigh says in which of them the border lies, and then only they
    count.
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
