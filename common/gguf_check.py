"""GGUF check: refuses a damaged file before a worker takes memory for its weights. The package `gguf` reads
what the header says; here its keys are compared with its tensors.
"""

import re
from pathlib import Path
from typing import Any

from common.settings.settings import SettingError

BLOCK = re.compile(r"(?:^|\.)blk\.(\d{1,9})\.")
TOKENIZER, TOKENS, MERGES = (f"tokenizer.ggml.{name}" for name in ("model", "tokens", "merges"))
EMBEDDING = "token_embd.weight"
TEXTS = ["ARRAY", "STRING"]
MAX_SHOWN = 100


class Damaged(ValueError):
    """What a GGUF file says cannot be true."""


def check_gguf(path: Path) -> None:
    """Check that a GGUF file is what its header says. Raises SettingError."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        shapes = {tensor.name: tensor.shape.tolist() for tensor in reader.tensors}
        check_header({name: value_of(field) for name, field in reader.fields.items()}, shapes)
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        cause = str(error) if isinstance(error, Damaged) else f"it cannot be read ({error!s:.{MAX_SHOWN}})"
        raise SettingError("model_id", f"{path} is damaged, or no GGUF file: {cause}") from error


def value_of(field: Any) -> Any:
    """The value of a key; of a list its length, or None if it is no list of texts."""
    kinds = [kind.name for kind in field.types]
    return field.contents() if len(kinds) == 1 else range(len(field.data)) if kinds == TEXTS else None


def check_header(keys: dict[str, Any], shapes: dict[str, list[int]]) -> None:
    """Check the keys that say how large the model is against its tensors. Raises Damaged."""
    family, tokens, merges = keys.get("general.architecture"), keys.get(TOKENS), keys.get(MERGES, range(0))
    if not isinstance(family, str):
        raise Damaged("it has no `general.architecture`")
    if (parts := keys.get("split.count", 1)) > 1:
        raise Damaged(f"it is one of {parts} parts, which `llama-gguf-split --merge` joins")
    blocks = {int(found[1]) for name in shapes if (found := BLOCK.search(name))}
    count = keys.get(key := f"{family}.block_count")
    if count != len(blocks) or blocks != {*range(count)}:
        raise Damaged(f"`{key}` is {count!r}, but it has tensors of {len(blocks)} blocks")
    if not (isinstance(tokens, range) and isinstance(merges, range) and isinstance(keys.get(TOKENIZER), str)):
        raise Damaged(f"it has no `{TOKENIZER}`, or no list of texts as `{TOKENS}` or `{MERGES}`")
    size, width = keys.get(f"{family}.vocab_size", len(tokens)), keys.get(f"{family}.embedding_length")
    if shapes.get(EMBEDDING) != [width, len(tokens)] or size != len(tokens):
        said = f"`{family}.embedding_length` is {width!r} and `{family}.vocab_size` {size!r}"
        raise Damaged(f"{said}, with {len(tokens)} `{TOKENS}`: `{EMBEDDING}` is {shapes.get(EMBEDDING)}")
