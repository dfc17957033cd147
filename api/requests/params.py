"""Generation parameters, independent of an API: the routes of each API convert their bodies into them."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from api.grammar.compile import CompiledGrammar, Grammar
from api.prompts.control_texts import Guarded
from api.prompts.pictures import PictureSource
from api.prompts.tokenizer import ModelTokenizer
from common.messages.request import BeamParams, SamplingParams, StoppingParams
from common.model_files import read_json
from common.settings.ranges import DEFAULTED, checked_defaults
from common.settings.settings import SettingError, Settings

MAX_BEAM_WIDTH = 8

GREEDY_BELOW = 1e-5
"""A temperature this low is greedy: logits divided by it would leave float32."""
GREEDY = SamplingParams()
NEUTRAL = SamplingParams(temperature=1.0)
SWITCHES = ("temperature", "top_k", "top_p", "top_p_decay", "min_p", "typical_p")
"""Parameters that ask for sampling on their own, where they are not neutral."""
SWITCH_NAMES = ", ".join(f"`{name}`" for name in SWITCHES)
DRAW_ONLY = (*SWITCHES, "top_p_min", "top_p_reset_ids", "seed")
"""Parameters that mean nothing where no token is drawn."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of each request.

    Attributes:
        max_total_tokens: of prompt and new tokens together.
        vocab_size, dtype: of the logits that workers return; 0 if they return none.
        pictures: whether a worker computes pictures.
        model_kind: what people call a model that pools; empty for one that generates.
        num_blocks, block_size: of the smallest KV cache of a worker; 0 if that is not known.
    """

    max_input_tokens: int
    max_total_tokens: int
    settings: Settings
    vocab_size: int = 0
    dtype: str = "float32"
    num_blocks: int = 0
    block_size: int = 0
    pictures: bool = False
    model_kind: str = ""

    @property
    def max_client_batch_size(self) -> int:
        """Prompts of one request."""
        return self.settings.max_client_batch_size or self.settings.max_concurrent_requests

    @property
    def max_beam_width(self) -> int:
        """Sequences that a beam search extends at once: each is a row."""
        return min(MAX_BEAM_WIDTH, self.settings.max_batch_size)


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
        pictures: those for which `text` has markers, in their order.
        has_inline_pictures: whether `![](URL)` in `text` is a picture.
        add_special_tokens: whether `text` gets the special tokens that the model expects around a prompt; a
            chat template adds them itself.
        truncate: only the last tokens of the prompt are used, this many.
        truncates_to_fit: only as many as fit are used.
        cuts_to_room: a `max_new_tokens` beyond the model's context means all that is left of it.
        do_sample: whether tokens are sampled; each of SWITCHES also turns sampling on.
        stopping: without `max_new_tokens`.
        sampling: without `seed`, `choice`, `bad_words`, `grammar` and watermark; its temperature is 1 by
            default.
        top_n_tokens: number of likeliest tokens that are reported with each token.
        prompt_logprobs: number of likeliest tokens that are reported at each place of the prompt, beside the
            prompt's own tokens, with the model's own log-probabilities; None reports nothing of the prompt.
        context_logits, generation_logits: whether the logits of the prompt, and of the generated tokens, are
            returned.
        logits_dtype: "float32", the default, or "model".
        n: answers to this prompt, each by a request of its own.
        beams: how a beam search is done; None samples.
        cache_salt: only requests with the same salt share KV blocks.
        names: a parameter's name here → its name in this API, where that is another one.
    """

    text: str | None = None
    guarded: Guarded | None = None
    pictures: Sequence[PictureSource] = ()
    has_inline_pictures: bool = False
    prompt_ids: list[int] | None = None
    add_special_tokens: bool = True
    truncate: int | None = None
    truncates_to_fit: bool = False
    cuts_to_room: bool = False
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
    context_logits: bool = False
    generation_logits: bool = False
    logits_dtype: str | None = None
    n: int = 1
    beams: BeamParams | None = None
    cache_salt: str = ""
    names: Mapping[str, str] = field(default_factory=dict)

    def value(self, name: str) -> Any:
        """A parameter's value, here or in `stopping` or `sampling`; None where it is not given."""
        part = next(part for part in (self, self.stopping, self.sampling) if hasattr(part, name))
        return getattr(part, name)

    def name(self, field: str) -> str:
        """A parameter as the client wrote it."""
        return self.names.get(field, field)


# --- sampling -----------------------------------------------------------------------------------------------


def draws(params: GenerationParams) -> bool:
    """Whether tokens are drawn: `do_sample` says so, or a parameter makes no sense otherwise."""
    sampling = params.sampling
    if sampling.temperature < GREEDY_BELOW or params.beams is not None:
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


def load_sampling_defaults(path: Path, settings: Settings) -> dict[str, Any]:
    """The sampling values of /v1 for the model in the directory `path`, as GENERATION_CONFIG,
    OVERRIDE_GENERATION_CONFIG and LOGPROBS_MODE say. Raises SettingError.
    """
    given = settings.generation_config
    directory = path if given == "auto" else Path(given).expanduser()
    file = directory / "generation_config.json"
    if given not in ("auto", "vllm") and not file.is_file():
        raise SettingError("generation_config", f"{file} does not exist")
    found = {} if given == "vllm" else read_json(file)
    defaults = checked_defaults({name: found.get(name) for name in DEFAULTED}, "generation_config", str(file))
    return defaults | settings.sampling_overrides | {"logprobs_mode": settings.logprobs_mode}
