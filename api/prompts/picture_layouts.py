"""Picture layouts: the text that stands in a model's prompt for a picture, from the picture's size alone.

A prompt has one marker for each picture. `expanded` puts the text of a layout in place of each marker, as
transformers' processor does; tokenized, that text has the picture's placeholders. The engine embeds the
picture at them. Each family of models has a layout; `read_layout` reads that of a model from its JSON files.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from common.messages.request import Picture
from common.model_files import added_tokens, read_json, token_texts
from common.pictures import PictureError, Size
from common.settings.settings import SettingError


class PictureFiles(NamedTuple):
    """What a model's JSON files say of its pictures.

    Attributes:
        placeholder: its text and its id.
        images, processor: the configs of image processor and processor.
        names: the tokenizer's tokens that have names.
    """

    placeholder: tuple[str, int]
    images: Mapping[str, Any]
    processor: Mapping[str, Any]
    names: Mapping[str, str]


class PictureLayout:
    """How the pictures of one model stand in its prompts.

    Attributes:
        placeholder: text of the placeholder's token.
        placeholder_id: its id.
        marker: the text that stands for a picture until it is expanded; chat templates write it.
        inline: the text that stands for a picture in a prompt without a chat template; it has one marker.
    """

    def __init__(self, files: PictureFiles) -> None:
        self.placeholder, self.placeholder_id = files.placeholder
        self.marker = self.inline = self.placeholder

    def picture_text(self, size: Size, num_pictures: int) -> str:
        """What stands for a picture in a prompt that has `num_pictures`. Raises PictureError."""
        raise NotImplementedError


def expanded(text: str, marker: str, pictures: Sequence[str]) -> str:
    """A prompt's text with a picture's text in place of each marker. Raises PictureError."""
    parts = text.split(marker)
    if (num_markers := len(parts) - 1) != len(pictures):
        raise PictureError(f"the prompt has {num_markers} times {marker!r} for {len(pictures)} pictures")
    return "".join(piece for pair in zip(parts, [*pictures, ""], strict=True) for piece in pair)


def placed(
    ids: Sequence[int], layout: PictureLayout, digests: Sequence[str], pictures: Sequence[str]
) -> list[Picture]:
    """Where the pictures' placeholders are in a prompt's ids, from the text of each. Raises PictureError if
    there are others.
    """
    places = [place for place, token_id in enumerate(ids) if token_id == layout.placeholder_id]
    numbers = [text.count(layout.placeholder) for text in pictures]
    if len(places) != sum(numbers):
        raise PictureError(f"the prompt has {len(places)} placeholders, and its pictures need {sum(numbers)}")
    return [
        Picture(digest, places[end - number], places[end - 1] - places[end - number] + 1)
        for digest, number, end in zip(digests, numbers, accumulate(numbers), strict=True)
    ]


MAX_EDGE = 4096
"""No resized picture has a longer edge."""
MAX_TILE_EDGE = 364
"""Of configs that do not say."""


class TiledLayout(PictureLayout):
    """Idefics3's layout.

    Attributes:
        tokens_per_tile: placeholders of a tile.
        longest_edge: of a picture after its first resize; None leaves it as it is.
        tile_edge: height and width of a tile.
        splits: whether pictures are cut into tiles.
    """

    def __init__(self, files: PictureFiles) -> None:
        super().__init__(files)
        self.around = files.names.get("fake_image_token", "<fake_token_around_image>")
        self.whole = files.names.get("global_image_token", "<global-img>")
        self.tokens_per_tile: int = files.processor.get("image_seq_len", 169)
        size = files.images.get("size") or {"longest_edge": 4 * MAX_TILE_EDGE}
        self.longest_edge: int | None = size["longest_edge"] if files.images.get("do_resize", True) else None
        tile = files.images.get("max_image_size") or {"longest_edge": MAX_TILE_EDGE}
        self.tile_edge: int = tile["longest_edge"]
        self.splits: bool = files.images.get("do_image_splitting", True)

    def picture_text(self, size: Size, num_pictures: int) -> str:
        rows, columns = self.tiles(size)
        tile = self.placeholder * self.tokens_per_tile
        lines = [
            "".join(f"{self.around}<row_{row}_col_{column}>{tile}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        ]
        return "".join(lines) + "\n" * bool(lines) + f"{self.around}{self.whole}{tile}{self.around}"

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


Grid = tuple[int, int]
"""Columns and rows of tiles."""


class CanvasLayout(PictureLayout):
    """InternVL's layout.

    Attributes:
        tile: height and width of a tile in pixels.
        min_tiles, max_tiles: of a picture, without the one that shows it whole.
    """

    def __init__(self, files: PictureFiles) -> None:
        super().__init__(files)
        self.inline = f"{self.placeholder}\n"
        self.begin = files.names.get("start_image_token", "<img>")
        self.end = files.names.get("end_image_token", "</img>")
        self.tokens_per_tile: int = files.processor.get("image_seq_length", 256)
        size = files.images.get("size") or {"height": 384, "width": 384}
        self.tile: Size = (size["height"], size["width"])
        self.min_tiles: int = files.images.get("min_patches", 1)
        self.max_tiles: int = files.images.get("max_patches", 12)

    def picture_text(self, size: Size, num_pictures: int) -> str:
        return f"{self.begin}{self.placeholder * (self.num_tiles(size) * self.tokens_per_tile)}{self.end}"

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


DEFAULT_EDGES = range(384, 2305, 384)


class GridLayout(PictureLayout):
    """LLaVA-OneVision's layout ("anyres").

    Attributes:
        tokens_per_tile: placeholders of a tile, a square number.
        tile: height and width of a tile in pixels.
        resolutions: those that a picture may be fit into, (height, width) each.
        max_tiles: a picture of more tiles is made smaller.
        num_dropped: of the tile's first placeholders; 1 where the vision tower's class token is one.
    """

    def __init__(self, files: PictureFiles) -> None:
        super().__init__(files)
        size = files.images.get("size") or {"height": 384, "width": 384}
        edge = size.get("shortest_edge")
        self.tokens_per_tile: int = files.processor["num_image_tokens"]
        self.tile: Size = (edge, edge) if edge else (size["height"], size["width"])
        default = [(y, x) for y in DEFAULT_EDGES for x in DEFAULT_EDGES]
        pinpoints = files.images.get("image_grid_pinpoints") or default
        self.resolutions: Sequence[Size] = [(height, width) for height, width in pinpoints]
        aspect = files.processor.get("vision_aspect_ratio") or "anyres_max_9"
        self.max_tiles = int(aspect.removeprefix("anyres_max_"))
        self.num_dropped = int(files.processor.get("vision_feature_select_strategy") == "default")

    def picture_text(self, size: Size, num_pictures: int) -> str:
        end_of_picture = 1  # the learned token that ends a row ends a picture that is seen whole only
        number = self.tokens_per_tile + (end_of_picture if num_pictures > 1 else self.num_in_grid(size))
        return self.placeholder * (number - self.num_dropped)

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


MAX_RATIO = 200
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280
"""Of configs that do not say."""


class PatchLayout(PictureLayout):
    """Qwen2-VL's layout.

    Attributes:
        edge: height and width in pixels of the square of patches that a placeholder stands for.
        min_pixels, max_pixels: of a resized picture.
    """

    def __init__(self, files: PictureFiles) -> None:
        super().__init__(files)
        begin = files.names.get("vision_start_token", "<|vision_start|>")
        end = files.names.get("vision_end_token", "<|vision_end|>")
        self.inline = f"{begin}{self.placeholder}{end}"
        self.edge: int = files.images.get("patch_size", 14) * files.images.get("merge_size", 2)
        size = {"shortest_edge": MIN_PIXELS, "longest_edge": MAX_PIXELS} | (files.images.get("size") or {})
        self.min_pixels: int = files.images.get("min_pixels") or size["shortest_edge"]
        self.max_pixels: int = files.images.get("max_pixels") or size["longest_edge"]

    def picture_text(self, size: Size, num_pictures: int) -> str:
        height, width = self.resized(size)
        return self.placeholder * ((height // self.edge) * (width // self.edge))

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


class FixedLayout(PictureLayout):
    """Gemma 3's layout: every picture has the same text, which begins with the marker."""

    def __init__(self, files: PictureFiles) -> None:
        super().__init__(files)
        self.marker = self.inline = files.names.get("boi_token", "<start_of_image>")
        end = files.names.get("eoi_token", "<end_of_image>")
        placeholders = self.placeholder * files.processor.get("image_seq_length", 256)
        self.text = f"\n\n{self.marker}{placeholders}{end}\n\n"

    def picture_text(self, size: Size, num_pictures: int) -> str:
        return self.text


FAMILIES: dict[str, tuple[type[PictureLayout], str]] = {
    "idefics3": (TiledLayout, "<image>"),
    "smolvlm": (TiledLayout, "<image>"),
    "qwen2_vl": (PatchLayout, "<|image_pad|>"),
    "qwen2_5_vl": (PatchLayout, "<|image_pad|>"),
    "qwen3_vl": (PatchLayout, "<|image_pad|>"),
    "qwen3_vl_moe": (PatchLayout, "<|image_pad|>"),
    "llava_onevision": (GridLayout, "<image>"),
    "internvl": (CanvasLayout, "<IMG_CONTEXT>"),
    "gemma3": (FixedLayout, "<image_soft_token>"),
}
"""Model type → its layout, and the text of its placeholder where no file says its id."""


def read_layout(path: Path, tokenizer_path: Path | None = None) -> PictureLayout | None:
    """The layout of the model in the directory `path`; None if it sees no pictures, or is of no family above.
    Raises SettingError for files that do not fit each other.
    """
    config = read_json(path / "config.json")
    layout, text = FAMILIES.get(config.get("model_type", ""), (None, ""))
    if layout is None:
        return None
    processor = read_json(path / "processor_config.json")
    images = processor.get("image_processor") or read_json(path / "preprocessor_config.json")
    if not images:
        return None  # a checkpoint of the text part alone
    own_path = tokenizer_path or path
    named = read_json(own_path / "tokenizer_config.json")
    extra = named.get("extra_special_tokens")
    names = token_texts({**named, **(extra if isinstance(extra, dict) else {})})
    placeholder = find_placeholder(config, names.get("image_token", text), own_path)
    try:
        return layout(PictureFiles(placeholder, images, processor, names))
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
