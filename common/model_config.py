"""Model config: the facts that gateways and agents read from a model's JSON files. No torch."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from common.settings.settings import SettingError

WITHOUT_POSITIONS = {"mamba", "mamba2", "falcon_mamba"}
LONGEST_SEQUENCE = 131_072
"""Tokens of a sequence of a model without positions, which has no limit of its own. MAX_TOTAL_TOKENS lowers
it.
"""
UNBOUND_CONTEXT = 4096
"""Of models whose relative positions have no end (T5's): as in TGI's launcher."""
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")


def read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise SettingError("model_id", f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise SettingError("model_id", f"{path} is no JSON object")
    return content


def context_length(path: Path) -> int:
    """Return the longest sequence that the model supports, in tokens."""
    config = read_json(path / "config.json")
    values = (part.get(name) for part in (config, config.get("text_config", {})) for name in CONTEXT_NAMES)
    length = next((value for value in values if isinstance(value, int)), None)
    if length is None and "relative_attention_num_buckets" in config:
        return UNBOUND_CONTEXT
    if length is None and config.get("model_type") in WITHOUT_POSITIONS:
        return LONGEST_SEQUENCE
    if length is None:
        raise SettingError("model_id", f"{path / 'config.json'} has no {CONTEXT_NAMES[0]}")
    return length


def eos_ids(path: Path, tokenizer: Path | None = None) -> list[int]:
    """Return the ids that end a sequence: from the generation, model or tokenizer config, in this order, and
    the one of the tokenizer in another directory.
    """
    known = configured_eos_ids(path)
    tokenizer = tokenizer or path
    if known and tokenizer == path:
        return known
    return [*known, *(token_id for token_id in tokenizer_eos_ids(tokenizer) if token_id not in known)]


def configured_eos_ids(path: Path) -> list[int]:
    for name in ("generation_config.json", "config.json"):
        value = read_json(path / name).get("eos_token_id")
        if value is not None:
            return list(value) if isinstance(value, list) else [int(value)]
    return []


def tokenizer_eos_ids(path: Path) -> list[int]:
    token = read_json(path / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    return [item["id"] for item in added_tokens(path) if item["content"] == text]


def starting_ids(path: Path) -> list[int]:
    """Return the ids that start the decoder of an encoder-decoder model, behind its prompt: the one of the
    decoder's start, and the first token where the model always has the same; none of other models.
    """
    config = read_json(path / "config.json")
    if not config.get("is_encoder_decoder"):
        return []
    values = config | read_json(path / "generation_config.json")
    start = values.get("decoder_start_token_id", values.get("bos_token_id"))
    if not isinstance(start, int):
        raise SettingError("model_id", f"{path / 'config.json'} has no decoder_start_token_id")
    first = values.get("forced_bos_token_id")
    return [start, first] if isinstance(first, int) else [start]


def special_ids(path: Path) -> frozenset[int]:
    """Return the ids of control tokens, which are no text."""
    return frozenset(item["id"] for item in added_tokens(path) if item.get("special"))


def added_tokens(path: Path) -> list[dict[str, Any]]:
    tokens: list[dict[str, Any]] = read_json(path / "tokenizer.json").get("added_tokens", [])
    return tokens


def read_tokenizer(path: Path, setting: str = "model_id") -> Tokenizer:
    """The tokenizer in the directory that a setting names. Raises SettingError."""
    file = path / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises no other
        raise SettingError(setting, f"{file} is no tokenizer, or damaged: {error!s:.200}") from error


def read_other_tokenizer(tokenizer_path: Path, path: Path) -> Tokenizer:
    """The tokenizer that TOKENIZER_NAME names, for the model in the directory `path`: that must have an
    embedding for each of its ids. Raises SettingError.
    """
    tokenizer = read_tokenizer(tokenizer_path, "tokenizer_name")
    config = read_json(path / "config.json")
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if not isinstance(size, int):
        raise SettingError("tokenizer_name", f"is not served: {path / 'config.json'} has no vocab_size")
    num_ids = 1 + max(tokenizer.get_vocab().values(), default=-1)
    if num_ids > size:
        cause = f"its tokenizer has ids up to {num_ids - 1}, and the model's embedding only {size} ids"
        raise SettingError("tokenizer_name", f"is not served: {cause}")
    return tokenizer
