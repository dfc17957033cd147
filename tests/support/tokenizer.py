"""The tokenizer of the bundled model, and the ids of texts."""

import copy
from functools import cache
from typing import Any

from api.prompts.tokenizer import ModelTokenizer
from common.settings.settings import Settings


@cache
def model_tokenizer() -> ModelTokenizer:
    return ModelTokenizer(Settings())


def tokenizer_with(**changed: Any) -> ModelTokenizer:
    """That of the bundled model, with other values of these attributes."""
    tokenizer = copy.copy(model_tokenizer())
    for name, value in changed.items():
        setattr(tokenizer, name, value)
    return tokenizer


TOKENIZER = model_tokenizer().backend
IM_END: int = TOKENIZER.token_to_id("<|im_end|>")  # type: ignore[assignment]


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text).ids
    return found
