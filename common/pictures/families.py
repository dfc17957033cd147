"""Families of models that see pictures: a model's layout from its JSON files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from common.model_config import added_tokens, read_json
from common.pictures.gemma3 import fixed_layout
from common.pictures.idefics3 import tiled_layout
from common.pictures.internvl import canvas_layout
from common.pictures.layout import PictureLayout
from common.pictures.llava_onevision import grid_layout
from common.pictures.qwen2_vl import patch_layout
from common.settings.settings import SettingError

MakeLayout = Callable[
    [tuple[str, int], Mapping[str, Any], Mapping[str, Any], Mapping[str, str]], PictureLayout
]
"""Of the placeholder, the configs of image processor and processor, and the tokens that have names."""
FAMILIES: dict[str, tuple[MakeLayout, str]] = {
    "idefics3": (tiled_layout, "<image>"),
    "smolvlm": (tiled_layout, "<image>"),
    "qwen2_vl": (patch_layout, "<|image_pad|>"),
    "qwen2_5_vl": (patch_layout, "<|image_pad|>"),
    "qwen3_vl": (patch_layout, "<|image_pad|>"),
    "qwen3_vl_moe": (patch_layout, "<|image_pad|>"),
    "llava_onevision": (grid_layout, "<image>"),
    "internvl": (canvas_layout, "<IMG_CONTEXT>"),
    "gemma3": (fixed_layout, "<image_soft_token>"),
}
"""Model type → what makes its layout, and the text of its placeholder where no file says its id."""


def read_layout(path: Path, tokenizer_path: Path | None = None) -> PictureLayout | None:
    """The layout of the model in the directory `path`; None if it sees no pictures, or is of no family above.
    Raises SettingError for files that do not fit each other.
    """
    config = read_json(path / "config.json")
    make_layout, text = FAMILIES.get(config.get("model_type", ""), (None, ""))
    if make_layout is None:
        return None
    processor = read_json(path / "processor_config.json")
    images = processor.get("image_processor") or read_json(path / "preprocessor_config.json")
    if not images:
        return None  # a checkpoint of the text part alone
    own_path = tokenizer_path or path
    names = token_names(read_json(own_path / "tokenizer_config.json"))
    placeholder = find_placeholder(config, names.get("image_token", text), own_path)
    try:
        return make_layout(placeholder, images, processor, names)
    except (KeyError, TypeError, ValueError) as error:
        raise SettingError("model_id", f"{path} has no usable config of pictures: {error!r:.200}") from error


def find_placeholder(config: Mapping[str, Any], text: str, tokenizer_path: Path) -> tuple[str, int]:
    """Text and id of the placeholder: the id is the config's, or that of the usual text."""
    texts = {item["id"]: item["content"] for item in added_tokens(tokenizer_path)}
    token_id = config.get("image_token_id", config.get("image_token_index"))
    for known_id, known_text in texts.items():
        if token_id == known_id or (token_id is None and known_text == text):
            return known_text, known_id
    wanted = repr(text) if token_id is None else f"the id {token_id}"
    raise SettingError("model_id", f"{tokenizer_path} has no token for pictures: none has {wanted}")


def token_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Tokens that a tokenizer's config gives a name, as `image_token`: name → text."""
    extra = config.get("extra_special_tokens")
    found = {**config, **(extra if isinstance(extra, dict) else {})}
    texts = {name: one.get("content") if isinstance(one, dict) else one for name, one in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str) and name.endswith("_token")}
