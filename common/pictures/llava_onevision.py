"""Pictures of LLaVA-OneVision: one alone is seen whole and cut to fit a grid of resolutions, several are seen
whole only.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common.pictures.layout import PictureText, Size

DEFAULT_EDGES = range(384, 2305, 384)


@dataclass(frozen=True, slots=True)
class GridLayout:
    """LLaVA-OneVision's layout ("anyres").

    Attributes:
        tokens_per_tile: placeholders of a tile, a square number.
        tile: height and width of a tile in pixels.
        resolutions: those that a picture may be fit into, (height, width) each.
        max_tiles: a picture of more tiles is made smaller.
        num_dropped: of the tile's first placeholders; 1 where the vision tower's class token is one.
    """

    placeholder: str
    placeholder_id: int
    tokens_per_tile: int
    tile: Size
    resolutions: Sequence[Size]
    max_tiles: int
    num_dropped: int

    @property
    def marker(self) -> str:
        return self.placeholder

    @property
    def inline(self) -> str:
        return self.placeholder

    def picture_text(self, size: Size, num_pictures: int) -> PictureText:
        end_of_picture = 1  # the learned token that ends a row ends a picture that is seen whole only
        number = self.tokens_per_tile + (end_of_picture if num_pictures > 1 else self.num_in_grid(size))
        number -= self.num_dropped
        return PictureText(self.placeholder * number, number)

    def num_in_grid(self, size: Size) -> int:
        """Placeholders of a picture's parts: one for each point within it, and one at the end of each row."""
        height, width = size
        best = best_resolution(size, self.resolutions)
        side = math.isqrt(self.tokens_per_tile)
        rows, columns = side * (best[0] // self.tile[0]), side * (best[1] // self.tile[1])
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        ratio = math.sqrt(rows * columns / (self.max_tiles * side**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return rows * columns + rows


def best_resolution(size: Size, resolutions: Sequence[Size]) -> Size:
    """The resolution that keeps the most of a picture, and of those the smallest."""

    def worth(resolution: Size) -> tuple[int, int]:
        height, width = resolution
        scale = min(width / size[1], height / size[0])
        kept = min(int(size[1] * scale) * int(size[0] * scale), math.prod(size))
        return kept, -height * width

    return max(resolutions, key=worth)


def grid_layout(
    placeholder: tuple[str, int],
    images: Mapping[str, Any],
    processor: Mapping[str, Any],
    names: Mapping[str, str],
) -> GridLayout:
    text, token_id = placeholder
    size = images.get("size") or {"height": 384, "width": 384}
    edge = size.get("shortest_edge")
    pinpoints = images.get("image_grid_pinpoints") or [(y, x) for y in DEFAULT_EDGES for x in DEFAULT_EDGES]
    aspect = processor.get("vision_aspect_ratio") or "anyres_max_9"
    return GridLayout(
        placeholder=text,
        placeholder_id=token_id,
        tokens_per_tile=processor["num_image_tokens"],
        tile=(edge, edge) if edge else (size["height"], size["width"]),
        resolutions=[(height, width) for height, width in pinpoints],
        max_tiles=int(aspect.removeprefix("anyres_max_")),
        num_dropped=int(processor.get("vision_feature_select_strategy") == "default"),
    )
