"""How likely the model finds the tokens of a prompt: as sampling would, but the tokens are given."""

from collections.abc import Sequence

import numpy as np
import torch

from gpu_worker.engine.batch.inputs import ends_of
from gpu_worker.engine.batch.rows import Part
from gpu_worker.engine.batch.to_device import upload
from gpu_worker.engine.cpu import sampler
from gpu_worker.engine.sampling.multinomial import Drawn, fixed, log
from gpu_worker.engine.sampling.top_k import likeliest

MAX_LOGITS = 2**25
"""Logits of prompts in one step: they and their float32 copies are some hundred MB, for which a device always
has room.
"""
TOGETHER = 2**24
"""Of these torch copies so many at a time."""


def of_samples(logits: torch.Tensor, parts: Sequence[Part]) -> torch.Tensor:
    """logits [wanted, vocabulary] of a step → [samples, vocabulary]."""
    if not any(part.scores for part in parts):
        return logits
    last = np.cumsum([part.wanted for part in parts]) - 1
    return logits.index_select(0, upload(last[[part.samples for part in parts]], logits.device))


def of_prompts(logits: torch.Tensor, parts: Sequence[Part]) -> list[Drawn]:
    """logits [wanted, vocabulary] of a step → what is told of each part's prompt, of those that tell of one."""
    if not any(part.scores for part in parts):
        return []
    begins = ends_of(part.wanted for part in parts).tolist()
    told = [(begin, part) for begin, part in zip(begins, parts, strict=False) if part.scores]
    return [of_prompt(logits[begin : begin + part.scores], part) for begin, part in told]


def of_prompt(logits: torch.Tensor, part: Part) -> Drawn:
    ids = part.row.ids[part.begin + 1 : part.begin + 1 + part.scores].astype(np.int64)
    return prompt_scores(logits, upload(ids, logits.device), part.row.prompt_logprobs or 0)


@torch.inference_mode()
def prompt_scores(logits: torch.Tensor, ids: torch.Tensor, num_tops: int) -> Drawn:
    """logits [tokens, vocabulary], each what the model expects in place of the token in ids int64 [tokens] →
    log-probabilities of these tokens, and of the `num_tops` likeliest in place of each.
    """
    if library := sampler.kernels(logits):
        return sampler.tell(library, logits, ids, num_tops)
    size = max(1, TOGETHER // logits.shape[1])
    lots = [
        scored(logits[first : first + size], ids[first : first + size], num_tops)
        for first in range(0, len(ids), size)
    ]
    return Drawn(*map(torch.cat, zip(*lots, strict=True)))


def scored(logits: torch.Tensor, ids: torch.Tensor, num_tops: int) -> Drawn:
    scores = logits.to(torch.float32, copy=True)
    scores.sub_(scores.amax(-1, keepdim=True))
    own = scores.gather(1, ids[:, None])[:, 0]
    top_scores, top_ids = likeliest(scores, num_tops)
    total = log(fixed(scores).sum(-1))
    return Drawn(ids, own - total, top_ids, top_scores - total[:, None])
