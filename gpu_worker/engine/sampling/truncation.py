"""Truncation: top-k, top-p, min-p and typical-p, and sampling from what they keep."""

from typing import NamedTuple

import torch

from gpu_worker.engine.sampling.multinomial import (
    EXCLUDED,
    LIKELIEST_WEIGHT,
    SamplerOutput,
    kth_key,
    log_of_weights,
    multinomial_sample,
    sort_keys,
    target_weight,
    to_weights,
    top_k,
)

ABOVE_ALL_KEYS = 2**31 - 1
"""Larger than every key."""


class SamplingTensors(NamedTuple):
    """Parameters of rows, each [rows, 1]: top_k int64, the others float64; uniforms are random numbers in [0,
    1). top_k 0, top_p 1, min_p 0 and typical_p 1 keep all tokens; None where no row truncates by it.
    """

    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    min_p: torch.Tensor
    typical_p: torch.Tensor
    uniforms: torch.Tensor


class WeightedTokens(NamedTuple):
    """The tokens of rows: their keys int32 [rows, vocabulary], which order them, and their weights int64
    [rows, vocabulary]. Methods take and return one number for each row, [rows, 1]: keys int32, weights int64.
    """

    keys: torch.Tensor
    weights: torch.Tensor

    def weight_before(self, key: torch.Tensor) -> torch.Tensor:
        """Sum the weights of the tokens with a smaller key."""
        return self.weights.masked_fill(self.keys >= key, 0).sum(-1, keepdim=True)

    def tie_weight(self, key: torch.Tensor) -> torch.Tensor:
        """Return the weight of one token with this key; tokens with the same key weigh the same."""
        return self.weights.masked_fill(self.keys != key, 0).amax(-1, keepdim=True)

    def shortest_prefix(self, weight: torch.Tensor) -> "TokenPrefix":
        """Return the fewest first tokens that weigh at least `weight`; at least one."""
        weight = weight.clamp(min=1)
        key = kth_key(self.keys, self.weights, weight - 1)
        tie_weight = self.tie_weight(key).clamp_(min=1)
        ties = (weight - self.weight_before(key) + tie_weight - 1) // tie_weight
        return TokenPrefix(key, ties)


class TokenPrefix(NamedTuple):
    """The first tokens of each row: those with a smaller key than `key` int32 [rows, 1], and of those with
    that key the first `ties` int64 [rows, 1].
    """

    key: torch.Tensor
    ties: torch.Tensor

    def mask(self, keys: torch.Tensor) -> torch.Tensor:
        """keys int32 [rows, vocabulary] → bool [rows, vocabulary]: the tokens of the prefix."""
        tied = keys == self.key
        return (keys < self.key) | (tied & (tied.cumsum(-1) <= self.ties))


def truncated_sample(scores: torch.Tensor, tensors: SamplingTensors, num_tops: int) -> SamplerOutput:
    """Sample with top-k, top-p and min-p: scores float32 [rows, vocabulary]."""
    tokens = WeightedTokens(sort_keys(scores), to_weights(scores))
    kept = kept_prefix(tokens, tensors).mask(tokens.keys)
    total_weight = tokens.weights.masked_fill(~kept, 0).sum(-1, keepdim=True)
    sampled = tokens.shortest_prefix(target_weight(tensors.uniforms, total_weight) + 1)
    total = log_of_weights(total_weight)
    tied = tokens.keys == sampled.key
    ids = (tied & (tied.cumsum(-1) == sampled.ties)).byte().argmax(-1, keepdim=True)
    tops, top_ids = top_k(scores, num_tops)
    tops = tops.masked_fill(~kept.gather(1, top_ids), EXCLUDED)
    return SamplerOutput(ids[:, 0], (scores.gather(1, ids) - total)[:, 0], top_ids, tops - total)


def kept_prefix(tokens: WeightedTokens, tensors: SamplingTensors) -> TokenPrefix:
    """Return the tokens that top-k, top-p and min-p keep: key int32 [rows, 1], ties int64 [rows, 1].

    Top-k keeps the tokens that are as likely as the k-th one. Top-p (arXiv:1904.09751) keeps the fewest that
    have this share of what top-k kept. Min-p (arXiv:2407.01082) keeps the tokens that have this share of the
    likeliest one's probability.
    """
    last = sort_keys(tensors.min_p.log().float())
    left = tokens.weights.sum(-1, keepdim=True)
    if tensors.top_k is not None:
        kth = kth_key(
            tokens.keys, torch.ones_like(tokens.weights), tensors.top_k.clamp(1, tokens.keys.shape[1]) - 1
        )
        kth.masked_fill_(tensors.top_k == 0, ABOVE_ALL_KEYS - 1)
        last, left = torch.minimum(last, kth), tokens.weight_before(kth + 1)
    whole = TokenPrefix(last, torch.full_like(left, ABOVE_ALL_KEYS))
    if tensors.top_p is None:
        return whole
    by_p = tokens.shortest_prefix((tensors.top_p * left).ceil().long())
    inside = (tensors.top_p < 1) & (by_p.key <= last)
    return TokenPrefix(*(torch.where(inside, fewer, more) for fewer, more in zip(by_p, whole, strict=True)))


def typical_sample(scores: torch.Tensor, tensors: SamplingTensors, num_tops: int) -> SamplerOutput:
    """Sample with typical-p, applied after top-k, top-p and min-p: scores float32 [rows, vocabulary]."""
    tokens = WeightedTokens(sort_keys(scores), to_weights(scores))
    scores = scores.masked_fill(~kept_prefix(tokens, tensors).mask(tokens.keys), EXCLUDED)
    return multinomial_sample(
        scores.masked_fill_(atypical_mask(scores, tensors.typical_p), EXCLUDED), tensors.uniforms, num_tops
    )


def atypical_mask(scores: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """scores float32 [rows, vocabulary], share float64 [rows, 1] → bool [rows, vocabulary]: the tokens that
    locally typical sampling (arXiv:2202.00666) leaves out.

    It keeps the fewest tokens with that share whose information is nearest to the entropy, and those as near
    as the last of them. A row's likeliest score is 0: information and entropy both lack the logarithm of the
    total.
    """
    weights = to_weights(scores)
    total = weights.sum(-1, keepdim=True)
    entropy = (scores.exp() * -scores * LIKELIEST_WEIGHT).nan_to_num_(0).long().sum(-1, keepdim=True) / total
    distance = sort_keys((scores + entropy).float())
    return distance > WeightedTokens(distance, weights).shortest_prefix((share * total).ceil().long()).key
