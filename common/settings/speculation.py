"""Speculation: how tokens are proposed, read from SPECULATE (TGI's) and SPECULATIVE_CONFIG (vLLM's)."""

from collections.abc import Mapping
from dataclasses import dataclass

from common.settings.ranges import Range, check_number, read_object
from common.settings.types import SettingError

CONFIG = "speculative_config"
MAX_SPECULATED = 15
"""Most tokens proposed at a time: with a row's next token 16, which one tile of attention holds."""
NO_METHOD, NGRAM, SUFFIX = "", "ngram", "suffix"
DRAFT_MODEL, MEDUSA, MLP_SPECULATOR, EAGLE3 = "draft_model", "medusa", "mlp_speculator", "eagle3"
GRAMMAR = "grammar"
"""The method of tokens that a grammar forces, in metrics."""
WITHOUT_MODEL = (NGRAM, SUFFIX)
WITH_MODEL = (DRAFT_MODEL, MEDUSA, MLP_SPECULATOR, EAGLE3)


FIELDS: Mapping[str, tuple[Range, float]] = {
    "num_speculative_tokens": (Range(1, MAX_SPECULATED, is_whole=True), 0),
    "prompt_lookup_min": (Range(1, 32, is_whole=True), 2),
    "prompt_lookup_max": (Range(1, 32, is_whole=True), 8),
    "suffix_decoding_max_tree_depth": (Range(2, 64, is_whole=True), 24),
    "suffix_decoding_max_cached_requests": (Range(0, 100_000, is_whole=True), 10_000),
    "suffix_decoding_max_spec_factor": (Range(0.1, 16), 1.0),
    "suffix_decoding_min_token_prob": (Range(0, 1), 0.1),
}
"""Numbers of SPECULATIVE_CONFIG by vLLM's names: their ranges and defaults."""
TEXTS = ("method", "model", "revision")


@dataclass(frozen=True, slots=True)
class Speculation:
    """How tokens are proposed.

    Attributes:
        method: one of those above; empty with a `model` whose files say what it is.
        num_tokens: most tokens proposed at a time; 0 is as many as the model's files say.
        model: the model that proposes, as MODEL_ID; empty for none.
        values: the numbers of FIELDS.
    """

    method: str
    num_tokens: int
    model: str
    revision: str | None
    values: Mapping[str, float]

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
    given = read_object(CONFIG, config, (*TEXTS, *FIELDS)) if config else {}
    numbers = {name: float(default) for name, (_, default) in FIELDS.items()}
    for name, value in given.items():
        if name in FIELDS:
            check_number(CONFIG, name, value, FIELDS[name][0])
            numbers[name] = float(value)
        elif not isinstance(value, str):
            raise SettingError(CONFIG, f"{name} must be a text. Given: {value!r}")
    method, model = given.get("method") or NO_METHOD, given.get("model") or ""
    if model.strip("[]") in WITHOUT_MODEL:  # vLLM's older spelling
        method, model = model.strip("[]"), ""
    num_tokens = int(numbers["num_speculative_tokens"])
    if config and speculate and num_tokens not in (0, speculate):
        raise SettingError(CONFIG, f"num_speculative_tokens is {num_tokens}, and SPECULATE is {speculate}")
    check_method(method, model, bool(config))
    if numbers["prompt_lookup_min"] > numbers["prompt_lookup_max"]:
        raise SettingError(CONFIG, "prompt_lookup_min is more than prompt_lookup_max")
    if not config:
        method = NGRAM if speculate else NO_METHOD
    num_tokens = num_tokens or speculate or (MAX_SPECULATED if method == SUFFIX else 0)
    if method in (NGRAM, DRAFT_MODEL) and not num_tokens:
        raise SettingError(CONFIG, f"{method} needs num_speculative_tokens, 1 to {MAX_SPECULATED}")
    return Speculation(method, num_tokens, model, given.get("revision"), numbers)


def check_method(method: str, model: str, is_given: bool) -> None:
    """Raises SettingError for a method that is unknown, or lacks its model, or has one too many."""
    if method and method not in (*WITHOUT_MODEL, *WITH_MODEL):
        known = ", ".join((*WITHOUT_MODEL, *WITH_MODEL))
        raise SettingError(CONFIG, f"method {method} is not served; these are: {known}")
    if method in WITHOUT_MODEL and model:
        raise SettingError(CONFIG, f"{method} has no model. Given: {model}")
    if method in WITH_MODEL and not model:
        raise SettingError(CONFIG, f"{method} needs a model")
    if is_given and not (method or model):
        raise SettingError(CONFIG, "an object without a method needs a model")
