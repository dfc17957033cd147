"""Draft sampler: samples drafts as their rows sample tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gpu_worker.engine.batch.sampling_state import SampleRequest
from gpu_worker.engine.sampling.grammar import Matchers
from gpu_worker.engine.sampling.sampler import sample


@dataclass(frozen=True, slots=True)
class DraftSampler:
    """Samples with the grammars of the rows, too."""

    matchers: Matchers
    vocab_size: int

    def sample(self, logits: torch.Tensor, requests: Sequence[SampleRequest | None]) -> list[int]:
        """logits float [rows, vocabulary of the draft] → an id for each row."""
        self.matchers.finish_masks(requests)
        ids: list[int] = sample(fit(logits, self.vocab_size), requests).ids.tolist()
        return ids


def fit(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """logits float [rows, any] → [rows, vocab_size]: tokens that a draft lacks are never likely."""
    missing = vocab_size - logits.shape[1]
    if missing > 0:
        return torch.nn.functional.pad(logits, (0, missing), value=torch.finfo(logits.dtype).min)
    return logits[:, :vocab_size].contiguous() if missing else logits
