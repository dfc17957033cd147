"""What a step brought of log-probabilities, on the host."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]


class TopLogprobs(NamedTuple):
    """The likeliest tokens in place of a sampled one, likeliest first; -inf for those that truncation
    excludes.
    """

    ids: list[int]
    logprobs: list[float]


NO_TOP_LOGPROBS: Mapping[int, TopLogprobs] = {}


class PromptLogprobs(NamedTuple):
    """Log-probabilities of a slice of a prompt: packed float32, and the likeliest tokens as packed int32 ids
    and packed float32 log-probabilities.
    """

    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes


NO_PROMPT_LOGPROBS: Sequence[PromptLogprobs] = ()
