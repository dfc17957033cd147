"""Speculation: how tokens are proposed, read from SPECULATE (TGI's) and SPECULATIVE_CONFIG (vLLM's)."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from common.settings.fields import SettingError
from common.settings.ranges import read_object

CONFIG = "speculative_config"
MAX_SPECULATED = 15
"""Most tokens proposed at a time: with a row's next token 16, which one tile of attention holds."""
NO_METHOD, NGRAM, SUFFIX = "", "ngram", "suffix"
DRAFT_MODEL, MEDUSA, MLP_SPECULATOR, EAGLE3 = "draft_model", "medusa", "mlp_speculator", "eagle3"
GRAMMAR = "grammar"
"""The method of tokens that a grammar forces, in metrics."""
WITHOUT_MODEL = (NGRAM, SUFFIX)
WITH_MODEL = (DRAFT_MODEL, MEDUSA, MLP_SPECULATOR, EAGLE3)


class Speculation(BaseModel):
    """How tokens are proposed, by vLLM's names.

    Attributes:
        method: one of those above; empty with a `model` whose files say what it is.
        num_tokens: most tokens proposed at a time; 0 is as many as the model's files say.
        model: the model that proposes, as MODEL_ID; empty for none.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    method: str = NO_METHOD
    model: str = ""
    revision: str | None = None
    num_tokens: int = Field(default=0, ge=1, le=MAX_SPECULATED, alias="num_speculative_tokens")
    prompt_lookup_min: int = Field(default=2, ge=1, le=32)
    prompt_lookup_max: int = Field(default=8, ge=1, le=32)
    suffix_decoding_max_tree_depth: int = Field(default=24, ge=2, le=64)
    suffix_decoding_max_cached_requests: int = Field(default=10_000, ge=0, le=100_000)
    suffix_decoding_max_spec_factor: float = Field(default=1.0, ge=0.1, le=16)
    suffix_decoding_min_token_prob: float = Field(default=0.1, ge=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def spelled_anew(cls, given: Any) -> Any:
        """What is not null, without vLLM's older spelling of a method as the model."""
        if not isinstance(given, dict):
            return given
        found = {name: value for name, value in given.items() if value is not None}
        if (method := str(found.get("model")).strip("[]")) in WITHOUT_MODEL:
            found |= {"method": method, "model": ""}
        return found

    @model_validator(mode="after")
    def check(self) -> "Speculation":
        """Raises SettingError for a method that is unknown, or lacks its model, or has one too many."""
        method, model = self.method, self.model
        if method and method not in (*WITHOUT_MODEL, *WITH_MODEL):
            known = ", ".join((*WITHOUT_MODEL, *WITH_MODEL))
            raise SettingError(CONFIG, f"method {method} is not served; these are: {known}")
        if method in WITHOUT_MODEL and model:
            raise SettingError(CONFIG, f"{method} has no model. Given: {model}")
        if not model and method not in WITHOUT_MODEL:
            raise SettingError(CONFIG, f"{method or 'an object without a method'} needs a model")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise SettingError(CONFIG, "prompt_lookup_min is more than prompt_lookup_max")
        return self

    def __bool__(self) -> bool:
        return bool(self.method or self.model)

    @property
    def num_found(self) -> int:
        """Most tokens proposed at a time by what needs no model; 0 for other methods."""
        return self.num_tokens if self.method in WITHOUT_MODEL else 0


def read_speculation(speculate: int, config: str | None) -> Speculation:
    """What the two settings say. SPECULATE alone finds tokens in the row itself, unless the model's
    config.json names a speculator. Raises SettingError.
    """
    if not config:
        return Speculation.model_construct(method=NGRAM if speculate else NO_METHOD, num_tokens=speculate)
    found = read_object(CONFIG, config, Speculation)
    given = found.num_tokens
    if speculate and given not in (0, speculate):
        raise SettingError(CONFIG, f"num_speculative_tokens is {given}, and SPECULATE is {speculate}")
    number = given or speculate or (MAX_SPECULATED if found.method == SUFFIX else 0)
    if found.method in (NGRAM, DRAFT_MODEL) and not number:
        raise SettingError(CONFIG, f"{found.method} needs num_speculative_tokens, 1 to {MAX_SPECULATED}")
    return found.model_copy(update={"num_tokens": number})
