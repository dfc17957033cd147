"""What a client asks for, in words that belong to no API: each family's routes translate their bodies into
this.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """One prompt and how to go on from it; nothing is checked yet. Defaults change nothing, and None means
    "not given".

    Attributes:
        text, prompt_ids: the prompt; one of the two is given.
        add_special_tokens: whether `text` gets what the model wants around a prompt; a chat template writes
            that itself.
        do_sample: whether a token is drawn; so it is as well where a temperature, a top_k, … is given. None
            is False.
        temperature: 0 is greedy.
        top_k: 0 and -1 are off.
        frequency_penalty, presence_penalty: OpenAI's.
        relative_frequency_penalty: TGI's.
        logit_bias: id → what is added to its logit.
        prompt_logprobs: those of the prompt's tokens are told as well, the model's own, with so many of the
            likeliest at each place.
        raw_logprobs: log-probabilities are of the model's own distribution (OpenAI's way), not of the
            processed one (TGI's).
        n: answers to this prompt.
        names: a field's name here → as this family's clients write it, where that is another one.
    """

    text: str | None = None
    prompt_ids: list[int] | None = None
    add_special_tokens: bool = True
    truncate: int | None = None

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    stop_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    top_p_decay: float | None = None
    top_p_min: float | None = None
    top_p_reset_ids: list[int] = field(default_factory=list)
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    relative_frequency_penalty: float | None = None
    seed: int | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: list[str] = field(default_factory=list)

    top_n_tokens: int = 0
    prompt_logprobs: int | None = None
    raw_logprobs: bool = False
    n: int = 1
    names: Mapping[str, str] = field(default_factory=dict)

    def name(self, field: str) -> str:
        """The field as the client wrote it."""
        return self.names.get(field, field)
