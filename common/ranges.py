"""Ranges of numeric parameters, for parameters whose range depends on nothing else."""

from dataclasses import dataclass
from typing import Any

MAX_CHOICES = 128
MAX_STOP_CHARS = 1000


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `least` (with `above`: greater than `least`) to `most`, or without an upper bound."""

    least: int
    most: int | None = None
    above: bool = False

    def holds(self, value: float) -> bool:
        """Whether a value lies in the range; NaN lies in none."""
        enough = value > self.least if self.above else value >= self.least
        return enough and (self.most is None or value <= self.most)

    def __str__(self) -> str:
        low = f"{'above' if self.above else 'at least'} {self.least}"
        return low if self.most is None else f"{low} and at most {self.most}"

    @property
    def schema(self) -> dict[str, Any]:
        """The range as JSON Schema; its bounds do not concern null."""
        low = {"exclusiveMinimum" if self.above else "minimum": self.least}
        return low if self.most is None else low | {"maximum": self.most}


RANGES = {
    "max_new_tokens": Range(1),
    "min_new_tokens": Range(0),
    "truncate": Range(1),
    "top_n_tokens": Range(0),
    "prompt_logprobs": Range(0),
    "temperature": Range(0, 100),
    "top_k": Range(-1),
    "top_p": Range(0, 1),
    "top_p_decay": Range(0, 1, above=True),
    "top_p_min": Range(0, 1),
    "min_p": Range(0, 1),
    "typical_p": Range(0, 1, above=True),
    "repetition_penalty": Range(0, 100, above=True),
    "frequency_penalty": Range(-2, 2),
    "presence_penalty": Range(-2, 2),
    "relative_frequency_penalty": Range(-2, 2),
    "seed": Range(-(2**63), 2**64 - 1),
    "n": Range(1, MAX_CHOICES),
}
BIASES = Range(-100, 100)
