"""What a step brought, on the host."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]


class TopLogprobs(NamedTuple):
    """The likeliest tokens in place of a sampled one, likeliest first; -inf for those that truncation
    excludes.
    """

    ids: list[int]
    logprobs: list[float]


class PromptLogprobs(NamedTuple):
    """Log-probabilities of a slice of a prompt: packed float32, and the likeliest tokens as packed int32 ids
    and packed float32 log-probabilities.
    """

    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes


class Candidate(NamedTuple):
    """A beam and a token that may continue it.

    Attributes:
        parent: place of the beam.
        logprob: of the token, after penalties.
        total: the sum of all log-probabilities up to the token.
    """

    parent: int
    token: int
    logprob: float
    total: float


@dataclass(frozen=True, slots=True)
class StepSamples:
    """What a step sampled, on the host.

    Attributes:
        top_logprobs: by the place of the sample in `ids`.
        prompt_logprobs: of the slices that ask for them, in order.
        candidates: continuations of beams, by the number of their search.
        logits: pieces of those that rows return: (row, first position, little-endian values).
    """

    ids: list[int]
    logprobs: list[float]
    top_logprobs: dict[int, TopLogprobs] = field(default_factory=dict)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    candidates: dict[int, list[Candidate]] = field(default_factory=dict)
    logits: list[tuple[int, int, bytes]] = field(default_factory=list)
