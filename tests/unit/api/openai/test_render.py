"""Chunks of OpenAI's routes: those that differ in their text alone are rendered from one frame."""

from typing import Any

import pytest

from api.answers.answer import HttpAnswer, Rendering
from api.protocols.openai import PLACE_OF_TEXT, ChatCompletionRenderer, CompletionRenderer
from common.messages.events import Terminal
from tests.support.events import new_stream

TEXTS = ["", ' "a"\\', "\x00\u2028é🙂", PLACE_OF_TEXT, "no", "t", "end"]
RENDERERS = [ChatCompletionRenderer, CompletionRenderer]


def chunks(
    kind: type, rendering: Rendering, plain: bool, n: int = 2, stopping: dict[str, Any] | None = None
) -> list[bytes]:
    """All chunks of answers with TEXTS, a token at a time in turns."""
    streams = [new_stream(f"r{i}", stopping=stopping) for i in range(n)]
    requests = [stream.request for stream in streams]
    answer = HttpAnswer("r", "/x", True, 5, PLACE_OF_TEXT, "f", n, [b""], requests, [""], rendering)
    renderer = kind(answer, streams)
    renderer.is_plain = renderer.is_plain and plain
    feed = renderer.chunks()
    shown: list[tuple[int, bytes]] = []
    for text in TEXTS:
        for stream in streams:
            stream.append([28], [-1.0], [text], [])
            shown += feed.take()
    for stream in streams:
        stream.end(Terminal(stream.request.request_id, "length", len(TEXTS)))
    return [chunk for _, chunk in [*shown, *feed.take()]]


@pytest.mark.parametrize("kind", RENDERERS)
@pytest.mark.parametrize("rendering", [Rendering(), Rendering(usage=True)], ids=["", "usage"])
def test_plain_chunks_have_the_same_bytes(kind: type, rendering: Rendering) -> None:
    assert chunks(kind, rendering, plain=True) == chunks(kind, rendering, plain=False)
    held = {"stop": ["note"]}
    assert chunks(kind, rendering, True, stopping=held) == chunks(kind, rendering, False, stopping=held)
