"""Sources: pictures in texts, as TGI has them."""

import pytest

from api.pictures.source import split_text

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
