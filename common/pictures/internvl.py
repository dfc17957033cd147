"""Pictures of InternVL: tiles of one size in the grid whose ratio is closest, then the whole picture."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.pictures.layout import PictureText, Size

Grid = tuple[int, int]
"""Columns and rows of tiles."""


@dataclass(frozen=True, slots=True)
class CanvasLayout:
    """InternVL's layout.

    Attributes:
        tile: height and width of a tile in pixels.
        min_tiles, max_tiles: of a picture, without the one that shows it whole.
    """

    placeholder: str
    placeholder_id: int
    begin: str
    end: str
    tokens_per_tile: int
    tile: Size
    min_tiles: int
    max_tiles: int

    @property
    def marker(self) -> str:
        return self.placeholder

    @property
    def inline(self) -> str:
        return f"{self.placeholder}\n"

    def picture_text(self, size: Size, num_pictures: int) -> PictureText:
        number = self.num_tiles(size) * self.tokens_per_tile
        return PictureText(f"{self.begin}{self.placeholder * number}{self.end}", number)

    def num_tiles(self, size: Size) -> int:
        if self.max_tiles <= 1:
            return 1
        columns, rows = best_grid(size, self.tile, grids(self.min_tiles, self.max_tiles))
        return columns * rows + 1 if columns * rows > 1 else 1


def grids(min_tiles: int, max_tiles: int) -> list[Grid]:
    """All grids of a number of tiles, those of fewest tiles first."""
    numbers = range(1, max_tiles + 1)
    found = [(columns, rows) for columns in numbers for rows in numbers]
    return sorted(
        (grid for grid in found if min_tiles <= grid[0] * grid[1] <= max_tiles),
        key=lambda grid: grid[0] * grid[1],
    )


def best_grid(size: Size, tile: Size, candidates: list[Grid]) -> Grid:
    """The grid of the closest ratio; of equal ones the largest that the picture fills by more than half."""
    height, width = size
    best, least = (1, 1), float("inf")
    for columns, rows in candidates:
        difference = abs(width / height - columns / rows)
        fills = height * width > 0.5 * tile[0] * tile[1] * columns * rows
        if difference < least or (difference == least and fills):
            best, least = (columns, rows), difference
    return best


def canvas_layout(
    placeholder: tuple[str, int],
    images: Mapping[str, Any],
    processor: Mapping[str, Any],
    names: Mapping[str, str],
) -> CanvasLayout:
    text, token_id = placeholder
    size = images.get("size") or {"height": 384, "width": 384}
    return CanvasLayout(
        placeholder=text,
        placeholder_id=token_id,
        begin=names.get("start_image_token", "<img>"),
        end=names.get("end_image_token", "</img>"),
        tokens_per_tile=processor.get("image_seq_length", 256),
        tile=(size["height"], size["width"]),
        min_tiles=images.get("min_patches", 1),
        max_tiles=images.get("max_patches", 12),
    )
