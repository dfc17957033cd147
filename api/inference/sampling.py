"""Sampling parameters of a validated request: whether tokens are drawn at all, and what then counts."""

import secrets
from dataclasses import replace
from pathlib import Path

from api.inference.params import GenerationParams
from api.tokenizer import ModelTokenizer
from common.messages.request import SamplingParams
from common.model_config import read_json
from common.settings.sampling_defaults import DEFAULTED, checked_defaults
from common.settings.settings import SettingError, Settings

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


def load_sampling_defaults(path: Path, settings: Settings) -> dict[str, float]:
    """The sampling values of /v1 for the model in the directory `path`, as GENERATION_CONFIG and
    OVERRIDE_GENERATION_CONFIG say. Raises SettingError.
    """
    given = settings.generation_config
    directory = path if given == "auto" else Path(given).expanduser()
    file = directory / "generation_config.json"
    if given not in ("auto", "vllm") and not file.is_file():
        raise SettingError("generation_config", f"{file} does not exist")
    found = {} if given == "vllm" else read_json(file)
    defaults = checked_defaults({name: found.get(name) for name in DEFAULTED}, "generation_config", str(file))
    return defaults | settings.sampling_overrides
