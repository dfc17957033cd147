"""Generation parameters, independent of an API: the routes of each API convert their bodies into them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from api.errors import ApiError, invalid
from api.prompt_text.control_texts import Guarded
from api.structured_output.grammar import CompiledGrammar, Grammar
from common.messages.request import SamplingParams, StoppingParams


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
            (api/inference/sampling.py).
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
