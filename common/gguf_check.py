"""GGUF check: refuses a damaged GGUF file by name before anybody believes it: what its header says must be
possible for the file, and its keys must agree with its tensors.
"""

import mmap
import re
from pathlib import Path
from typing import Any, TypeGuard

from common.gguf_header import STRING, ArrayOf, Damaged, Header, is_count, read_header
from common.settings.settings import SettingError

MAX_SIZE = 2**27
"""Of a model's sizes; the longest contexts have a tenth of it."""
BLOCK = re.compile(r"(?:^|\.)blk\.(\d{1,9})\.")
SIZES = (
    "embedding_length",
    "context_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "rope.dimension_count",
)
TOKENIZER, TOKENS, MERGES = (f"tokenizer.ggml.{name}" for name in ("model", "tokens", "merges"))
EMBEDDING = "token_embd.weight"
PER_TOKEN = ("tokenizer.ggml.scores", "tokenizer.ggml.token_type")
TOKEN_ID = re.compile(r"tokenizer\.ggml\.\w+_token_id")


def check_gguf(path: Path) -> None:
    """Raises SettingError unless the header of a GGUF file is one that the file can have."""
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise Damaged("it is empty")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                check_values(read_header(data))
    except Damaged as damage:
        raise SettingError("model_id", f"{path} is damaged, or no GGUF file: {damage}") from damage


def check_values(header: Header) -> None:
    """Check the keys that say how large the model is against its tensors. Raises Damaged."""
    family = header.values.get("general.architecture")
    if not isinstance(family, str):
        raise Damaged("it has no `general.architecture`")
    if is_count(parts := header.values.get("split.count"), MAX_SIZE) and parts > 1:
        raise Damaged(f"it is one of {parts} parts, which `llama-gguf-split --merge` joins")
    blocks = {int(found[1]) for name in header.tensors if (found := BLOCK.search(name))}
    count = header.values.get(key := f"{family}.block_count")
    if not is_count(count, len(blocks)) or blocks != {*range(count)}:
        raise Damaged(f"`{key}` is {count!r}, but it has tensors of {len(blocks)} blocks")
    for name in SIZES:
        check_size(f"{family}.{name}", header)
    check_vocabulary(family, header)


def check_size(key: str, header: Header) -> None:
    """Check a key that is a size of the model, if it is there, or has one for each block. Raises Damaged."""
    size = header.values.get(key)
    is_zero = size == 0 and not any("attn" in name or "ffn" in name for name in header.tensors)
    if size is not None and not isinstance(size, ArrayOf) and not is_zero and not is_count(size, MAX_SIZE):
        raise Damaged(f"`{key}` is {size!r}; a whole number from 1 to {MAX_SIZE} is possible")


def check_vocabulary(family: str, header: Header) -> None:
    """Check that keys and tensors agree on the number of tokens. Raises Damaged."""
    tokens, embedding = header.values.get(TOKENS), header.tensors.get(EMBEDDING)
    if not is_texts(tokens) or not isinstance(header.values.get(TOKENIZER), str) or embedding is None:
        raise Damaged(f"it has no `{TOKENIZER}`, no `{TOKENS}`, or no tensor `{EMBEDDING}`")
    if not is_texts(header.values.get(MERGES, tokens)):
        raise Damaged(f"`{MERGES}` is no array of texts")
    expected = (header.values.get(f"{family}.embedding_length"), tokens.length)
    if embedding.shape != expected:
        width = f"`{family}.embedding_length` is {expected[0]!r}, and `{TOKENS}` has {tokens.length} elements"
        raise Damaged(f"{width}, but `{EMBEDDING}` has the shape {list(embedding.shape)}")
    if (size := header.values.get(f"{family}.vocab_size", tokens.length)) != tokens.length:
        raise Damaged(f"`{family}.vocab_size` is {size!r}, but `{TOKENS}` has {tokens.length} elements")
    for key, value in header.values.items():
        if key in PER_TOKEN and (not isinstance(value, ArrayOf) or value.length != tokens.length):
            raise Damaged(f"`{key}` is not an array of {tokens.length} elements, as `{TOKENS}` is")
        if TOKEN_ID.fullmatch(key) and not (value == 0 or is_count(value, tokens.length - 1)):
            raise Damaged(f"`{key}` is {value!r}; it has the tokens 0 to {tokens.length - 1}")


def is_texts(value: Any) -> TypeGuard[ArrayOf]:
    return isinstance(value, ArrayOf) and value.kind == STRING
