"""From a prompt's text to token ids."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from common import model_files

LONG_CHARS = 4000
"""A text from this length on (half a millisecond) is tokenised in a thread, so that no stream waits for it."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A model's tokenizer, and which of its ids are special.

    Attributes:
        special_ids: control, not text.
        ending_ids: may end a generation: those that do, and all special ones.
    """

    tokenizer: Tokenizer
    special_ids: frozenset[int]
    ending_ids: frozenset[int]

    @classmethod
    def load(cls, path: Path) -> "Vocabulary":
        """Of the model in the directory `path`."""
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        special_ids = model_files.special_ids(path)
        return cls(tokenizer, special_ids, special_ids.union(model_files.eos_ids(path)))

    async def ids(self, text: str) -> list[int]:
        """Token ids of a prompt, with what the model wants around it."""
        if len(text) < LONG_CHARS:
            return self.encode(text)
        return await asyncio.to_thread(self.encode, text)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode_batch_fast([text])[0].ids  # unlike `encode`, this lets other threads run
        return ids
