"""Pictures of Idefics3 and SmolVLM: tiles in rows and columns, then the whole picture once more."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.pictures.layout import PictureText, Size

MAX_EDGE = 4096
"""No resized picture has a longer edge."""
MAX_TILE_EDGE = 364
"""Of configs that do not say."""


@dataclass(frozen=True, slots=True)
class TiledLayout:
    """Idefics3's layout.

    Attributes:
        tokens_per_tile: placeholders of a tile.
        longest_edge: of a picture after its first resize; None leaves it as it is.
        tile_edge: height and width of a tile.
        splits: whether pictures are cut into tiles.
    """

    placeholder: str
    placeholder_id: int
    around: str
    whole: str
    tokens_per_tile: int
    longest_edge: int | None
    tile_edge: int
    splits: bool

    @property
    def marker(self) -> str:
        return self.placeholder

    @property
    def inline(self) -> str:
        return self.placeholder

    def picture_text(self, size: Size, num_pictures: int) -> PictureText:
        rows, columns = self.tiles(size)
        tile = self.placeholder * self.tokens_per_tile
        lines = [
            "".join(f"{self.around}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        text = "".join(lines) + "\n" * bool(lines) + f"{self.around}{self.whole}{tile}{self.around}"
        return PictureText(text, (rows * columns + 1) * self.tokens_per_tile)

    def tiles(self, size: Size) -> Size:
        """Rows and columns; none of a picture that is not cut."""
        if not self.splits:
            return 0, 0
        height, width = size if self.longest_edge is None else resized(size, self.longest_edge)
        height, width = to_whole_tiles((height, width), self.tile_edge)
        if max(height, width) <= self.tile_edge:
            return 0, 0
        return height // self.tile_edge, width // self.tile_edge


def resized(size: Size, longest_edge: int) -> Size:
    """A size whose longer edge is `longest_edge`, but at most MAX_EDGE; the other one is even first."""
    height, width = size
    ratio = width / height
    if width >= height:
        height = int(longest_edge / ratio)
        height, width = height + height % 2, longest_edge
    else:
        width = int(longest_edge * ratio)
        height, width = longest_edge, width + width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > MAX_EDGE:
        height, width = int(MAX_EDGE / ratio), MAX_EDGE
    elif height > width and height > MAX_EDGE:
        height, width = MAX_EDGE, int(MAX_EDGE * ratio)
    return max(height, 1), max(width, 1)


def to_whole_tiles(size: Size, edge: int) -> Size:
    """The size that is cut: both edges are multiples of a tile's."""
    height, width = size
    ratio = width / height
    if width >= height:
        width = math.ceil(width / edge) * edge
        height = math.ceil(int(width / ratio) / edge) * edge
    else:
        height = math.ceil(height / edge) * edge
        width = math.ceil(int(height * ratio) / edge) * edge
    return height, width


def tiled_layout(
    placeholder: tuple[str, int],
    images: Mapping[str, Any],
    processor: Mapping[str, Any],
    names: Mapping[str, str],
) -> TiledLayout:
    text, token_id = placeholder
    does_resize = images.get("do_resize", True)
    size = images.get("size") or {"longest_edge": 4 * MAX_TILE_EDGE}
    return TiledLayout(
        placeholder=text,
        placeholder_id=token_id,
        around=names.get("fake_image_token", "<fake_token_around_image>"),
        whole=names.get("global_image_token", "<global-img>"),
        tokens_per_tile=processor.get("image_seq_len", 169),
        longest_edge=size["longest_edge"] if does_resize else None,
        tile_edge=(images.get("max_image_size") or {"longest_edge": MAX_TILE_EDGE})["longest_edge"],
        splits=images.get("do_image_splitting", True),
    )
