"""TGI's `best_of`: several texts are sampled, and the most likely one is returned."""

import secrets
from collections.abc import Sequence
from dataclasses import replace

from api.errors import invalid, quoted
from api.inference.limits import Limits
from api.inference.params import GenerationParams
from api.inference.sampling import SWITCH_NAMES, draws
from api.streams.stream import Stream
from common.messages.request import Generate


def check(params: GenerationParams, limits: Limits, streamed: bool) -> None:
    """Raises ApiError (422) if several texts are not possible, or would all be the same."""
    if params.n > limits.settings.max_best_of:
        raise invalid(
            f"`best_of` must be at most {limits.settings.max_best_of}. Given: {quoted(params.n)}", "best_of"
        )
    if params.n > 1 and streamed:
        raise invalid(f"`best_of` must be 1 when tokens are streamed. Given: {quoted(params.n)}", "best_of")
    if params.n > 1 and not draws(params):
        raise invalid(f"`best_of` above 1 needs sampling: set one of `do_sample`, {SWITCH_NAMES}", "best_of")
    if params.n > 1 and params.seed is not None:
        raise invalid("`seed` must not be set when `best_of` is above 1", "seed")


def with_own_seeds(requests: Sequence[Generate], seed: int | None = None) -> list[Generate]:
    """Give each request a seed of its own: a random one, or one that follows from `seed`.

    The response has the best text's seed; it samples that text again without `best_of`.
    """
    seeds = [secrets.randbits(63) if seed is None else seed ^ i for i in range(len(requests))]
    return [
        replace(request, sampling=replace(request.sampling, seed=own, choice=0))
        for request, own in zip(requests, seeds, strict=True)
        if request.sampling
    ]


def rank_by_logprob(streams: Sequence[Stream]) -> list[Stream]:
    """The streams by mean log-probability, the highest first."""
    return sorted(streams, key=mean_logprob, reverse=True)


def mean_logprob(stream: Stream) -> float:
    return sum(stream.logprobs) / max(1, stream.num_tokens)
