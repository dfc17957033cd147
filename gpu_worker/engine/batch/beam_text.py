"""Beam text: the text of one beam, in which the stop strings of its request are looked for."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from common.detokenize import Detokenizer, StopMatcher
from common.messages.request import StoppingParams
from common.model_files import read_tokenizer


@dataclass(slots=True, eq=False)
class BeamText:
    """The text of a beam.

    Attributes:
        num_free: next tokens whose text is no part of a stop string, by `min_new_tokens`.
    """

    detokenizer: Detokenizer
    matcher: StopMatcher
    num_free: int

    @property
    def matched(self) -> bool:
        """Whether a stop string has appeared."""
        return self.matcher.matched

    def after(self, token: int) -> "BeamText":
        """A copy that has taken one more token."""
        other = BeamText(self.detokenizer.copy(), copy(self.matcher), max(0, self.num_free - 1))
        text = other.detokenizer.step(token)
        if not self.num_free:
            other.matcher.step(text)
        return other


BeamTextFactory = Callable[[list[int], StoppingParams], BeamText]
"""(prompt, stopping params with stop strings) → the text of a beam without tokens."""


def text_factory(directory: Path) -> BeamTextFactory:
    """Make texts with the tokenizer in a model's directory, which is read when the first text is made."""

    @cache
    def tokenizer() -> Tokenizer:
        return read_tokenizer(directory)

    def make(prompt: list[int], stopping: StoppingParams) -> BeamText:
        detokenizer = Detokenizer(tokenizer(), prompt)
        return BeamText(detokenizer, StopMatcher(stopping.stop), stopping.min_new_tokens)

    return make


def no_texts(prompt: list[int], stopping: StoppingParams) -> BeamText:
    """Raises ValueError: beams of this engine have no stop strings."""
    raise ValueError("beams with stop strings need a tokenizer")
