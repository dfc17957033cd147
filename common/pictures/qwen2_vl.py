"""Pictures of Qwen2-VL, 2.5-VL and 3-VL: of any size, with one placeholder for each square of patches."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.pictures.layout import PictureError, PictureText, Size

MAX_RATIO = 200
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280
"""Of configs that do not say."""


@dataclass(frozen=True, slots=True)
class PatchLayout:
    """Qwen2-VL's layout.

    Attributes:
        edge: height and width in pixels of the square of patches that a placeholder stands for.
        min_pixels, max_pixels: of a resized picture.
    """

    placeholder: str
    placeholder_id: int
    begin: str
    end: str
    edge: int
    min_pixels: int
    max_pixels: int

    @property
    def marker(self) -> str:
        return self.placeholder

    @property
    def inline(self) -> str:
        return f"{self.begin}{self.placeholder}{self.end}"

    def picture_text(self, size: Size, num_pictures: int) -> PictureText:
        height, width = self.resized(size)
        num_placeholders = (height // self.edge) * (width // self.edge)
        return PictureText(self.placeholder * num_placeholders, num_placeholders)

    def resized(self, size: Size) -> Size:
        """The size, in whole squares and within the bounds, that is closest in its ratio."""
        height, width = size
        if max(size) / min(size) > MAX_RATIO:
            raise PictureError(f"has {width} x {height} pixels: no edge may be {MAX_RATIO} times the other")
        edge = self.edge
        new = round(height / edge) * edge, round(width / edge) * edge
        if math.prod(new) > self.max_pixels:
            ratio = math.sqrt((height * width) / self.max_pixels)
            new = (
                max(edge, math.floor(height / ratio / edge) * edge),
                max(edge, math.floor(width / ratio / edge) * edge),
            )
        elif math.prod(new) < self.min_pixels:
            ratio = math.sqrt(self.min_pixels / (height * width))
            new = math.ceil(height * ratio / edge) * edge, math.ceil(width * ratio / edge) * edge
        return new


def patch_layout(
    placeholder: tuple[str, int],
    images: Mapping[str, Any],
    processor: Mapping[str, Any],
    names: Mapping[str, str],
) -> PatchLayout:
    text, token_id = placeholder
    size = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS} | (images.get("size") or {})
    return PatchLayout(
        placeholder=text,
        placeholder_id=token_id,
        begin=names.get("vision_start_token", "<|vision_start|>"),
        end=names.get("vision_end_token", "<|vision_end|>"),
        edge=images.get("patch_size", 14) * images.get("merge_size", 2),
        min_pixels=images.get("min_pixels") or size["shortest_edge"],
        max_pixels=images.get("max_pixels") or size["longest_edge"],
    )
