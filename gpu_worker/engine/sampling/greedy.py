"""Greedy sampling without penalties: the likeliest token of each row, without a copy of the logits."""

import torch

from gpu_worker.engine.sampling.multinomial import SamplerOutput


def greedy_output(logits: torch.Tensor) -> SamplerOutput:
    """logits float [rows, vocabulary] → the likeliest tokens: ids int64 [rows], logprobs float32 [rows]."""
    ids, logprobs = greedy(logits)
    return SamplerOutput(ids, logprobs, ids[:, None][:, :0], logprobs[:, None][:, :0])


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """logits float [rows, vocabulary] → ids int64 [rows] of the likeliest tokens, natural logarithms of their
    probabilities float32 [rows].
    """
    if logits.is_cuda:
        from gpu_worker.engine.cuda.kernels.greedy import greedy_rows  # Triton: in CUDA builds only

        return greedy_rows(logits)
    best, ids = logits.max(-1)
    # in place: a second buffer of this size costs page faults
    below = logits.to(torch.float32, copy=True).sub_(best.float()[:, None])
    return ids, below.exp_().sum(-1).log_().neg_()
