"""Rows that choose among a part of the vocabulary: top-k, top-p, min-p, typical-p."""

from typing import NamedTuple

import torch

from gpu_worker.engine.sampling.multinomial import (
    ONE,
    SamplerOutput,
    log_of_weights,
    multinomial_sample,
    target_weight,
    to_weights,
)
from gpu_worker.engine.sampling.top_k import kth_key, sort_keys, top_k

EXCLUDED = float("-inf")
ABOVE_ALL_KEYS = 2**31 - 1
"""Above every key."""


class SamplingTensors(NamedTuple):
    """Tensors [rows, 1]: how much each row keeps, and its random number. top_k 0, top_p 1, min_p 0 and
    typical_p 1 keep all; None where all rows' do.
    """

    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    min_p: torch.Tensor
    typical_p: torch.Tensor
    uniforms: torch.Tensor


class WeightedTokens(NamedTuple):
    """What a row's tokens are ordered by, int32 [rows, vocabulary], and what they weigh, int64 [rows,
    vocabulary].
    """

    keys: torch.Tensor
    weights: torch.Tensor

    def before(self, key: torch.Tensor) -> torch.Tensor:
        """What the tokens before one weigh; all [rows, 1]."""
        return self.weights.masked_fill(self.keys >= key, 0).sum(-1, keepdim=True)

    def each(self, key: torch.Tensor) -> torch.Tensor:
        """What one with this key weighs: as much as the others."""
        return self.weights.masked_fill(self.keys != key, 0).amax(-1, keepdim=True)

    def reach(self, mass: torch.Tensor) -> "TokenPrefix":
        """The fewest first tokens that weigh so much, or one."""
        mass = mass.clamp(min=1)
        key = kth_key(self.keys, self.weights, mass - 1)
        each = self.each(key).clamp_(min=1)
        return TokenPrefix(key, (mass - self.before(key) + each - 1) // each)


class TokenPrefix(NamedTuple):
    """The first tokens of each row: those before `key`, int32 [rows, 1], and of those with that key the first
    `ties`, int64 [rows, 1].
    """

    key: torch.Tensor
    ties: torch.Tensor

    def mask(self, keys: torch.Tensor) -> torch.Tensor:
        """bool [rows, vocabulary]"""
        tied = keys == self.key
        return (keys < self.key) | (tied & (tied.cumsum(-1) <= self.ties))


def truncated_sample(scores: torch.Tensor, limits: SamplingTensors, num_tops: int) -> SamplerOutput:
    """Without typical-p: the likeliest, in their order."""
    tokens = WeightedTokens(sort_keys(scores), to_weights(scores))
    kept = kept_prefix(tokens, limits).mask(tokens.keys)
    mass = tokens.weights.masked_fill(~kept, 0).sum(-1, keepdim=True)
    drawn, total = tokens.reach(target_weight(limits.uniforms, mass) + 1), log_of_weights(mass)
    tied = tokens.keys == drawn.key
    ids = (tied & (tied.cumsum(-1) == drawn.ties)).byte().argmax(-1, keepdim=True)
    tops, top_ids = top_k(scores, num_tops)
    tops = tops.masked_fill(~kept.gather(1, top_ids), EXCLUDED)
    return SamplerOutput(ids[:, 0], (scores.gather(1, ids) - total)[:, 0], top_ids, tops - total)


def kept_prefix(tokens: WeightedTokens, limits: SamplingTensors) -> TokenPrefix:
    """What each row keeps.

    Top-k keeps what is as likely as the last of k; top-p (arXiv:1904.09751) the fewest that have this share
    of what top-k left; min-p (arXiv:2407.01082) what has this share of the likeliest's probability.
    """
    last = sort_keys(limits.min_p.log().float())
    left = tokens.weights.sum(-1, keepdim=True)
    if limits.top_k is not None:
        kth = kth_key(
            tokens.keys, torch.ones_like(tokens.weights), limits.top_k.clamp(1, tokens.keys.shape[1]) - 1
        )
        kth.masked_fill_(limits.top_k == 0, ABOVE_ALL_KEYS - 1)
        last, left = torch.minimum(last, kth), tokens.before(kth + 1)
    whole = TokenPrefix(last, torch.full_like(left, ABOVE_ALL_KEYS))
    if limits.top_p is None:
        return whole
    by_p = tokens.reach((limits.top_p * left).ceil().long())
    inside = (limits.top_p < 1) & (by_p.key <= last)
    return TokenPrefix(*(torch.where(inside, fewer, more) for fewer, more in zip(by_p, whole, strict=True)))


def typical_sample(scores: torch.Tensor, limits: SamplingTensors, num_tops: int) -> SamplerOutput:
    """Typical-p, after the others."""
    tokens = WeightedTokens(sort_keys(scores), to_weights(scores))
    scores = scores.masked_fill(~kept_prefix(tokens, limits).mask(tokens.keys), EXCLUDED)
    return multinomial_sample(
        scores.masked_fill_(atypical_mask(scores, limits.typical_p), EXCLUDED), limits.uniforms, num_tops
    )


def atypical_mask(scores: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """What locally typical sampling (arXiv:2202.00666) leaves out, bool [rows, vocabulary].

    It keeps the fewest tokens with that share whose information is nearest to the entropy, and what is as
    near as the last of them. The likeliest of a row is at 0: information and entropy both lack the logarithm
    of the total.
    """
    weights = to_weights(scores)
    total = weights.sum(-1, keepdim=True)
    entropy = (scores.exp() * -scores * ONE).nan_to_num_(0).long().sum(-1, keepdim=True) / total
    farness = sort_keys((scores + entropy).float())
    return farness > WeightedTokens(farness, weights).reach((share * total).ceil().long()).key
