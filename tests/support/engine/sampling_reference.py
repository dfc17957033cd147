"""What `Sampling` means, in float64 and one token at a time: from the papers, OpenAI's reference and TGI's
definitions.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from common.messages.request import SamplingParams

Array = Any
OUT = -np.inf


def fits(observed: Array, expected: Array) -> bool:
    """Whether counts may be drawn by chance where so many are expected: the p-value of Pearson's chi-squared
    test is above a thousandth.
    """
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor(len(observed) - 1.0, dtype=torch.float64)
    return bool(torch.special.gammaincc(freedom / 2, torch.as_tensor(statistic / 2)) > 1e-3)


def processed(
    logits: Array,
    sampling: SamplingParams,
    prompt: Sequence[int],
    generated: Sequence[int],
    barred: Sequence[int] = (),
) -> Array:
    """Log-probabilities [vocabulary] of what the token is chosen from; `barred` ids may not come yet."""
    scores = penalised(np.asarray(logits, np.float64).copy(), sampling, [*prompt], [*generated], barred)
    return log_softmax(
        truncated(scores / sampling.temperature, sampling, generated) if sampling.temperature else scores  # type: ignore[arg-type]
    )


def log_softmax(scores: Array) -> Array:
    below = scores - scores.max()
    return below - np.log(np.exp(below).sum())


def penalised(
    scores: Array, sampling: SamplingParams, prompt: list[int], generated: list[int], barred: Sequence[int]
) -> Array:
    for token, bias in sampling.logit_bias:
        scores[token] += bias
    ids = prompt + generated
    if sampling.watermark_delta:
        scores[green(ids[-1], sampling.watermark_gamma, len(scores))] += sampling.watermark_delta
    for *rest, last in sampling.bad_words:
        if not rest or ids[-len(rest) :] == rest:
            scores[last] = OUT
    scores[list(barred)] = OUT
    for token in set(ids):
        scores[token] *= sampling.repetition_penalty if scores[token] < 0 else 1 / sampling.repetition_penalty
    for token, count in Counter(generated).items():
        scores[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    for token, count in Counter(ids).items():
        scores[token] -= sampling.relative_frequency_penalty * count / len(ids)
    if sampling.allowed_token_ids:
        scores[~np.isin(np.arange(len(scores)), sampling.allowed_token_ids)] = OUT
    return scores


def green(previous: int, gamma: float, vocab_size: int) -> list[int]:
    """The green list of arXiv:2301.10226, seeded as text-generation-inference seeds it."""
    generator = torch.Generator().manual_seed(15485863 * previous)
    return torch.randperm(vocab_size, generator=generator).tolist()[: int(vocab_size * gamma)]


def decayed(sampling: SamplingParams, generated: list[int]) -> float:
    """top_p after these tokens (arXiv:2206.04624, section 3.2)."""
    resets = [place for place, token in enumerate(generated) if token in sampling.top_p_reset_ids]
    since = len(generated) - 1 - resets[-1] if resets else len(generated)
    return (
        sampling.top_p
        if sampling.top_p_decay == 1
        else max(sampling.top_p * sampling.top_p_decay**since, min(sampling.top_p, sampling.top_p_min))
    )


def truncated(scores: Array, sampling: SamplingParams, generated: list[int]) -> Array:
    if sampling.top_k:
        scores[scores < np.sort(scores)[::-1][: sampling.top_k][-1]] = OUT
    if (top_p := decayed(sampling, generated)) < 1:
        scores = nucleus(scores, top_p)
    likelihoods = np.exp(log_softmax(scores))
    scores[likelihoods < sampling.min_p * likelihoods.max()] = OUT
    return typical(scores, sampling.typical_p) if sampling.typical_p < 1 else scores


def nucleus(scores: Array, share: float) -> Array:
    """The smallest set, built from the likeliest token on, the lower id first, until its mass reaches
    `share`.
    """
    likelihoods, mass, kept = np.exp(log_softmax(scores)), 0.0, []
    for token in sorted(range(len(scores)), key=lambda token: (-scores[token], token)):
        kept.append(token)
        mass += likelihoods[token]
        if mass >= share:
            break
    return np.where(np.isin(np.arange(len(scores)), kept), scores, OUT)


def typical(scores: Array, share: float) -> Array:
    logprobs = log_softmax(scores)
    likelihoods = np.exp(logprobs)
    entropy = -np.sum(likelihoods[likelihoods > 0] * logprobs[likelihoods > 0])
    distance = np.abs(-logprobs - entropy)
    order = np.argsort(distance, kind="stable")
    last = min(int((np.cumsum(likelihoods[order]) < share).sum()), len(scores) - 1)
    return np.where(distance <= distance[order[last]] + 1e-9, scores, OUT)
