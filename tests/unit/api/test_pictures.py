"""Pictures in texts, and the prompt of a picture of any size: the one that transformers makes."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from api.prompts.picture_layouts import PictureLayout, expanded, placed, read_layout
from api.prompts.pictures import split_text
from common.pictures import PictureError, Size
from common.settings.settings import SettingError
from tests.support.pictures import CLASSES, make_processor, processed_ids

# --- layouts ------------------------------------------------------------------------------------------------

NUM_SIZES = 30
Made = tuple[Any, PictureLayout]
EDGES = (1, 7, 13, 27, 28, 29, 55, 56, 57, 84, 112, 113, 640)
"""Around the borders of tiles and resolutions."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "idefics3": {"size": {"longest_edge": 1456}, "max_image_size": {"longest_edge": 364}},
    "qwen2_vl": {"patch_size": 14, "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}},
}
"""Options of hub models."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    known: dict[tuple[str, str], Made] = {}

    def make(family: str, options: str = "{}") -> Made:
        if (family, options) in known:
            return known[family, options]
        folder = tmp_path_factory.mktemp(family)
        processor = make_processor(family, folder, **json.loads(options))
        layout = read_layout(folder)
        assert layout is not None
        known[family, options] = processor, layout
        return processor, layout

    return make


def sizes_of(seed: int, most: int = 640) -> list[Size]:
    chosen = random.Random(seed)
    edges = [chosen.choice([*EDGES, chosen.randint(1, most)]) for _ in range(2 * NUM_SIZES)]
    sizes = zip(edges[::2], edges[1::2], strict=True)
    return [(height, width) for height, width in sizes if max(height, width) <= 200 * min(height, width)]


def our_ids(processor: Any, layout: PictureLayout, text: str, sizes: list[Size]) -> list[int]:
    pictures = [layout.picture_text(size, len(sizes)) for size in sizes]
    found: list[int] = processor.tokenizer(expanded(text, layout.marker, pictures))["input_ids"]
    spans = placed(found, layout, ["digest"] * len(sizes), pictures)
    assert [found[one.start] for one in spans] == [layout.placeholder_id] * len(sizes)
    assert sum(one.num_tokens for one in spans) >= found.count(layout.placeholder_id)
    return found


@pytest.mark.parametrize("family", CLASSES)
def test_one_picture_of_any_size(made: Callable[..., Made], family: str) -> None:
    processor, layout = made(family)
    text = f"What is\n{layout.inline}this?\n\n"
    for size in sizes_of(1):
        assert our_ids(processor, layout, text, [size]) == processed_ids(processor, text, [size]), size


@pytest.mark.parametrize("family", CLASSES)
def test_several_pictures_in_one_prompt(made: Callable[..., Made], family: str) -> None:
    processor, layout = made(family)
    text = f"{layout.inline}{layout.inline} and {layout.inline}"
    sizes = sizes_of(2)
    for trio in zip(sizes[::3], sizes[1::3], sizes[2::3], strict=False):
        assert our_ids(processor, layout, text, [*trio]) == processed_ids(processor, text, trio), trio


@pytest.mark.parametrize("family", DEFAULTS)
def test_options_of_hub_models(made: Callable[..., Made], family: str) -> None:
    processor, layout = made(family, json.dumps(DEFAULTS[family]))
    for size in [(48, 64), (364, 365), (900, 1600), (1, 100)]:
        assert our_ids(processor, layout, layout.inline, [size]) == processed_ids(
            processor, layout.inline, [size]
        ), size


def test_a_picture_that_is_too_narrow_is_refused(made: Callable[..., Made]) -> None:
    _, layout = made("qwen2_vl")
    with pytest.raises(PictureError, match="has 10 x 2010 pixels: no edge may be 200 times the other"):
        layout.picture_text((2010, 10), 1)


def test_a_prompt_has_a_marker_for_each_picture_and_no_other_placeholder(made: Callable[..., Made]) -> None:
    processor, layout = made("qwen2_vl")
    picture = layout.picture_text((28, 28), 1)
    with pytest.raises(PictureError, match=r"the prompt has 2 times .* for 1 pictures"):
        expanded(layout.inline * 2, layout.marker, [picture])
    ids = processor.tokenizer(layout.inline + picture)["input_ids"]
    with pytest.raises(PictureError, match="the prompt has 5 placeholders, and its pictures need 4"):
        placed(ids, layout, ["digest"], [picture])


def test_the_placeholder_is_the_one_of_the_config_or_has_the_usual_text(tmp_path: Path) -> None:
    make_processor("qwen2_vl", tmp_path)
    known = read_layout(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl"}')
    assert read_layout(tmp_path) == known
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl", "image_token_id": 99999}')
    with pytest.raises(SettingError, match="has no token for pictures: none has the id 99999"):
        read_layout(tmp_path)


# --- source -------------------------------------------------------------------------------------------------

DATA = "data:image/png;base64,AAAA"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a", [("a", "")]),
        (f"![]({DATA})", [("", DATA), ("", "")]),
        (f"a ![]({DATA})![](https://x/y) b", [("a ", DATA), ("", "https://x/y"), (" b", "")]),
        ("![a](https://x/y) ![](x/y) ![]", [("![a](https://x/y) ![](x/y) ![]", "")]),
        (f"![](x ![]({DATA}) ![](http://x", [("![](x ", DATA), (" ![](http://x", "")]),
    ],
)
def test_pictures_of_a_text(text: str, parts: list[tuple[str, str]]) -> None:
    assert [*split_text(text)] == parts


def test_a_text_of_beginnings_takes_no_longer_than_another() -> None:
    """Looking for each one's end to the end of the text would take minutes."""
    text = "![](data:" * 500_000
    assert [*split_text(text)] == [(text, "")]
