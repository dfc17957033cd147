"""Server-sent events as clients read them."""

import re

FRAME = re.compile(r"(?:id: (\d+)\n)?data: ([^\n]*)")
COMMENTS = re.compile(r"^:[^\n]*\n\n?", re.MULTILINE)
"""Lines before a frame, with or without an empty line after them."""


def frames_of(content: bytes) -> list[tuple[int | None, str]]:
    """(id, data) of each whole frame of a stream, without comments."""
    frames = COMMENTS.sub("", content.decode()).split("\n\n")[:-1]
    matches = [FRAME.fullmatch(frame) for frame in frames]
    assert all(matches), frames
    return [(int(match[1]) if match[1] else None, match[2]) for match in matches if match]


def numbered(content: bytes) -> list[tuple[int, str]]:
    """As `frames_of`, of a stream in which every frame must have an id."""
    frames = frames_of(content)
    assert all(ordinal for ordinal, _ in frames), frames
    return frames  # type: ignore[return-value]


def data_of(content: bytes) -> list[str]:
    """The data of all frames of a whole stream, which must have no ids, or ids that count from 1."""
    assert content.endswith(b"\n\n"), content
    ordinals, data = zip(*frames_of(content), strict=True)
    assert ordinals in ((None,) * len(data), (*range(1, len(data) + 1),))
    return list(data)
