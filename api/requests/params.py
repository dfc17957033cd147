"""Generation parameters, independent of an API: the routes of each API convert their bodies into them.

Limits: what the fleet's settings, and its workers, say of each request.

Sampling parameters of a validated request: whether tokens are drawn at all, and what then counts.

Lengths: the prompt's token ids, and how many tokens are generated; refuses what does not fit.
"""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from api.errors import ApiError, invalid, quoted, too_long
from api.grammar.grammar import CompiledGrammar, Grammar
from api.prompts.control_texts import Guarded, Rendered
from api.prompts.tokenizer import ModelTokenizer
from common.messages.request import SamplingParams, StoppingParams
from common.model_config import read_json
from common.settings.ranges import DEFAULTED, checked_defaults
from common.settings.settings import SettingError, Settings


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of each request. `max_total_tokens` counts prompt and new tokens together."""

    max_input_tokens: int
    max_total_tokens: int
    settings: Settings

    @property
    def max_client_batch_size(self) -> int:
        """Prompts of one request."""
        return self.settings.max_client_batch_size or self.settings.max_concurrent_requests


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """One prompt and how to continue it, not yet validated. Defaults change nothing.

    Five parameters stand here because only validation can complete them and move them into `stopping` and
    `sampling`: `max_new_tokens` (by default what the context leaves), `seed` (by default random),
    `bad_words` (words that become token ids), `grammar` (which is compiled) and `watermark` (whose strength
    is the fleet's).

    Attributes:
        text, prompt_ids: the prompt; one of the two is given.
        guarded: `text` with guards, where a client wrote control tokens' texts into messages.
        add_special_tokens: whether `text` gets the special tokens that the model expects around a prompt; a
            chat template adds them itself.
        truncate: only the last so many tokens of the prompt are used.
        truncates_to_fit: only as many as fit are used.
        do_sample: whether tokens are sampled; some sampling parameters also turn sampling on
            (api/requests/params.py).
        stopping: without `max_new_tokens`.
        sampling: without `seed`, `choice`, `bad_words`, `grammar` and watermark; its temperature is 1 by
            default.
        top_n_tokens: number of likeliest tokens that are reported with each token.
        prompt_logprobs: the model's own log-probabilities of the prompt's tokens are reported, and so many of
            the likeliest tokens at each place; None reports nothing of the prompt.
        n: answers to this prompt.
        cache_salt: only requests with the same salt share KV blocks.
        names: a parameter's name here → its name in this API, where that is another one.
    """

    text: str | None = None
    guarded: Guarded | None = None
    prompt_ids: list[int] | None = None
    add_special_tokens: bool = True
    truncate: int | None = None
    truncates_to_fit: bool = False
    max_new_tokens: int | None = None
    stopping: StoppingParams
    do_sample: bool = False
    sampling: SamplingParams
    seed: int | None = None
    bad_words: list[str] = field(default_factory=list)
    grammar: Grammar | CompiledGrammar | None = None
    watermark: bool = False
    top_n_tokens: int = 0
    prompt_logprobs: int | None = None
    n: int = 1
    cache_salt: str = ""
    names: Mapping[str, str] = field(default_factory=dict)

    def value(self, name: str) -> Any:
        """A parameter's value, here or in `stopping` or `sampling`; None where it is not given."""
        part = next(part for part in (self, self.stopping, self.sampling) if hasattr(part, name))
        return getattr(part, name)

    def name(self, field: str) -> str:
        """A parameter as the client wrote it."""
        return self.names.get(field, field)


def invalid_field(params: GenerationParams, field: str, words: str) -> ApiError:
    """`words` continue a sentence that begins with the field's name."""
    return invalid(f"`{params.name(field)}` {words}", params.name(field))


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


def with_truncate(params: GenerationParams, limits: Limits) -> GenerationParams:
    """The parameters with a number for `truncates_to_fit`: what `max_new_tokens` leaves of the context."""
    if not params.truncates_to_fit:
        return params
    room = limits.max_total_tokens - (params.max_new_tokens or 1)
    return replace(params, truncate=max(1, min(limits.max_input_tokens, room)), truncates_to_fit=False)


async def encode_prompt(params: GenerationParams, limits: Limits, tokenizer: ModelTokenizer) -> list[int]:
    """The prompt's token ids; the last `truncate` ones where that is given. Raises ApiError."""
    field = "text" if params.prompt_ids is None else "prompt_ids"
    if params.truncate is not None and params.truncate > limits.max_input_tokens:
        raise invalid_field(
            params, "truncate", f"must be at most {limits.max_input_tokens}. Given: {quoted(params.truncate)}"
        )
    if params.prompt_ids is not None:
        ids = params.prompt_ids
    elif params.text:
        check_text(params, limits, tokenizer)
        ids = await tokenizer.encode_prompt(Rendered(params.text, params.guarded), params.add_special_tokens)
    else:
        raise invalid_field(params, field, "cannot be empty")
    ids = ids[-(params.truncate or 0) :]
    if not ids:
        raise invalid_field(params, field, "has no tokens")
    if len(ids) > limits.max_input_tokens:
        raise too_many_tokens(params, field, str(len(ids)), limits)
    if params.prompt_ids is not None:
        check_ids(params, field, ids, tokenizer)
    return ids


def check_text(params: GenerationParams, limits: Limits, tokenizer: ModelTokenizer) -> None:
    """Refuse a text that cannot fit, before it is tokenized."""
    if params.truncate is None and tokenizer.bound is not None:
        num_tokens = tokenizer.bound.least_tokens(params.text or "")
        if num_tokens > limits.max_input_tokens:
            raise too_many_tokens(params, "text", f"at least {num_tokens}", limits)


def too_many_tokens(params: GenerationParams, field: str, given: str, limits: Limits) -> ApiError:
    name, most = params.name(field), limits.max_input_tokens
    return too_long(
        f"`{name}` must have at most {most} tokens. Given: {given}", name, limits.max_total_tokens
    )


def max_new_tokens(params: GenerationParams, num_prompt_tokens: int, limits: Limits) -> int:
    """How many tokens are generated at most: as many as are asked for; by default, as many as fit behind the
    prompt.
    """
    room = limits.max_total_tokens - num_prompt_tokens
    least, most = params.stopping.min_new_tokens, params.max_new_tokens
    if most is not None and most > room:
        name = params.name("max_new_tokens")
        prompt_name = params.name("text" if params.prompt_ids is None else "prompt_ids")
        raise too_long(
            f"`{prompt_name}` tokens + `{name}` must be at most {limits.max_total_tokens}. "
            f"Given: {num_prompt_tokens} `{prompt_name}` tokens and {quoted(most)} `{name}`",
            name,
            limits.max_total_tokens,
        )
    most = room if most is None else most
    if least > most:
        raise invalid_field(params, "min_new_tokens", f"must be at most {most}. Given: {quoted(least)}")
    return most


def check_ids(params: GenerationParams, field: str, ids: Sequence[int], tokenizer: ModelTokenizer) -> None:
    for token_id in ids:
        if not 0 <= token_id < tokenizer.size:
            raise invalid_field(
                params,
                field,
                f"must have token ids of at least 0 and below {tokenizer.size}. Given: {quoted(token_id)}",
            )
