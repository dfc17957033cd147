"""Fixed grammar: a grammar with the same mask and bias for every token."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FixedGrammar:
    """Accepts every token, and never ends a row."""

    mask_words: Any = None
    biases: Any = None

    def is_ready(self) -> bool:
        return True

    def must_end(self) -> bool:
        return False

    def accept(self, token: int) -> bool:
        return True

    def mask(self) -> Any:
        return self.mask_words

    def bias(self) -> Any:
        return self.biases
