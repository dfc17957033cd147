"""Sampling parameters of a validated request: whether tokens are drawn at all, and what then counts."""

import secrets
from dataclasses import replace

from api.inference.params import GenerationParams
from api.inference.tokenizer import ModelTokenizer
from common.messages.request import SamplingParams

GREEDY_BELOW = 1e-5
"""A temperature this low is greedy: logits divided by it would leave float32."""
GREEDY = SamplingParams()
NEUTRAL = SamplingParams(temperature=1.0)
SWITCHES = ("temperature", "top_k", "top_p", "top_p_decay", "min_p", "typical_p")
"""Parameters that ask for sampling on their own, where they are not neutral."""
SWITCH_NAMES = ", ".join(f"`{name}`" for name in SWITCHES)
DRAW_ONLY = (*SWITCHES, "top_p_min", "top_p_reset_ids", "seed")
"""Parameters without meaning where no token is drawn."""


def draws(params: GenerationParams) -> bool:
    """Whether tokens are drawn: where `do_sample` says so, or a parameter makes no sense otherwise."""
    sampling = params.sampling
    if sampling.temperature < GREEDY_BELOW:
        return False
    sampling = replace(sampling, top_k=max(sampling.top_k, 0))
    return params.do_sample or any(getattr(sampling, name) != getattr(NEUTRAL, name) for name in SWITCHES)


def sampling_params(params: GenerationParams, tokenizer: ModelTokenizer) -> SamplingParams | None:
    """Complete sampling parameters; None for plain greedy. A seed is chosen where none is given."""
    sampling = replace(
        params.sampling,
        top_k=min(max(params.sampling.top_k, 0), tokenizer.size),
        logit_bias=[(token_id, value) for token_id, value in params.sampling.logit_bias if value],
        bad_words=[ids for word in params.bad_words for ids in tokenizer.spellings(word)],
        seed=secrets.randbits(63) if params.seed is None else params.seed,
    )
    if draws(params):
        return sampling
    greedy = replace(sampling, **{name: getattr(GREEDY, name) for name in DRAW_ONLY})
    return None if replace(greedy, raw_logprobs=False) == GREEDY else greedy
