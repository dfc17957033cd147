"""Watermark of arXiv:2301.10226, as text-generation-inference has it: part of the vocabulary is green, and
favoured.

Which tokens are green follows from the token before, so that a text shows by itself how many of its tokens
are.
"""

import numpy as np
import torch

from gpu_worker.engine.batch.sampling_state import Float32, Int64, SamplingState

HASH_KEY = 15485863
"""TGI's: a prime that spreads token ids over the seeds."""


def green_ids(previous: int, gamma: float, vocab_size: int) -> Int64:
    """The ids int64 [vocab_size * gamma] that are green behind the token `previous`: drawn by torch's
    generator on the CPU, whatever the device, so that every worker finds the same ones.
    """
    generator = torch.Generator().manual_seed(HASH_KEY * previous)
    order = torch.randperm(vocab_size, generator=generator)
    return order[: int(vocab_size * gamma)].numpy()


def watermark(state: SamplingState, vocab_size: int) -> tuple[Int64, Float32]:
    """What a row's watermark adds to its logits, as ids int64 [n] and values float32 [n]."""
    sampling = state.sampling
    if not sampling.watermark_delta:
        return np.zeros(0, np.int64), np.zeros(0, np.float32)
    green = green_ids(state.tail[-1], sampling.watermark_gamma, vocab_size)
    return green, np.full(len(green), sampling.watermark_delta, np.float32)


def biases(state: SamplingState, vocab_size: int) -> tuple[Int64, Float32]:
    """What is added to a row's logits before all else, as ids int64 [n] and values float32 [n]: its logit
    bias, and its watermark.
    """
    if not state.sampling.watermark_delta:
        return state.bias_ids, state.bias
    green, delta = watermark(state, vocab_size)
    return np.concatenate([state.bias_ids, green]), np.concatenate([state.bias, delta])
