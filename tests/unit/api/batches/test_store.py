"""Lines of stored files."""

from collections.abc import AsyncIterator

import pytest

from api.batches.store import lines_of


async def parts(*texts: bytes) -> AsyncIterator[bytes]:
    for text in texts:
        yield text


@pytest.mark.parametrize(
    ("given", "lines"),
    [
        ((b"a\nb", b"c\n", b"d"), [b"a", b"bc", b"d"]),
        ((b"1234", b"5678", b"9\nb\n"), [b"12345", b"b"]),
        ((b"123456789",), [b"12345"]),
        ((b"\n\n",), [b"", b""]),
    ],
)
async def test_a_line_beyond_the_limit_is_cut_and_never_held_whole(
    given: tuple[bytes, ...], lines: list[bytes]
) -> None:
    assert [line async for line in lines_of(parts(*given), 4)] == lines
