"""Fixed grammar: a grammar with the same mask for every token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpu_worker.engine.batch.sampling_state import GrammarMask


@dataclass
class FixedGrammar(GrammarMask):
    """Accepts every token, and never ends a row; `bits` is its mask."""

    compiled: Any = None
    vocab_size: int = 0

    @property
    def is_ready(self) -> bool:
        return True

    def must_end(self) -> bool:
        return False

    def accept(self, token: int) -> str:
        return ""

    def copy(self) -> "FixedGrammar":
        return self

    def after(self, token: int) -> "FixedGrammar":
        return self

    def forced(self, most: int) -> list[int]:
        return []

    def num_allowed(self, tokens: Sequence[int]) -> int:
        return len(tokens)
