"""Server-sent events as clients read them."""

import re

FRAME = re.compile(r"id: (\d+)\ndata: ([^\n]*)")
COMMENTS = re.compile(r"^:[^\n]*\n", re.MULTILINE)
"""Lines in front of a frame, which has no empty line before it."""


def numbered(content: bytes) -> list[tuple[int, str]]:
    """(id, data) of each whole frame of a stream, without comments."""
    frames = COMMENTS.sub("", content.decode()).split("\n\n")[:-1]
    matches = [FRAME.fullmatch(frame) for frame in frames]
    assert all(matches), frames
    return [(int(match[1]), match[2]) for match in matches if match]


def data_of(content: bytes) -> list[str]:
    """The data of all frames of a whole stream, whose ids must count from 1."""
    assert content.endswith(b"\n\n"), content
    frames = numbered(content)
    assert [ordinal for ordinal, _ in frames] == [*range(1, len(frames) + 1)]
    return [data for _, data in frames]
