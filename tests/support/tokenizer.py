"""The tokenizer of the bundled model, and the ids of texts."""

from functools import cache

from api.prompts.tokenizer import ModelTokenizer
from common import model_files


@cache
def model_tokenizer() -> ModelTokenizer:
    return ModelTokenizer.load(model_files.resolve("smollm2"))


TOKENIZER = model_tokenizer().backend
IM_END: int = TOKENIZER.token_to_id("<|im_end|>")  # type: ignore[assignment]


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text).ids
    return found
