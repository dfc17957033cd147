"""The frames of a stream on OpenAI's routes."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

from api.errors import failed, openai
from api.http.sse import frame
from api.json import to_json
from api.offload import offload
from api.openai.render import ResponseRenderer

DONE = frame(b"[DONE]")
NO_CHOICE = -1
"""Index of chunks that belong to no choice: usage and errors."""


async def stream_frames(renderer: ResponseRenderer) -> AsyncIterator[bytes]:
    """Yields the frames of all chunks as they come; then `[DONE]`."""
    async for chunks, ended in chunk_updates(renderer):
        yield b"".join([frame(chunk) for _, chunk in chunks] + [DONE] * ended)


async def chunk_updates(renderer: ResponseRenderer) -> AsyncIterator[tuple[list[tuple[int, bytes]], bool]]:
    """Yields (new chunks, each with the index of its choice; whether they are the last), until all choices
    have ended or one has failed.
    """
    changed = asyncio.Event()
    changed.set()
    for choice in renderer.choices:
        choice.stream.changed = changed
    while True:
        await changed.wait()
        changed.clear()
        for choice in renderer.choices:
            if choice.stream.num_tokens and not choice.started:
                await offload(choice.stream.num_prompt_records, partial(renderer.prompt_logprobs, choice))
        new = [
            (choice.index, chunk) for choice in renderer.choices for chunk in renderer.render_chunks(choice)
        ]
        ended = all(choice.ended for choice in renderer.choices)
        failure = next((choice.stream.terminal for choice in renderer.choices if choice.failed), None)
        if failure:
            new.append((NO_CHOICE, to_json(openai(failed(failure))[1])))
        elif ended and renderer.shows_usage:
            new.append((NO_CHOICE, renderer.render_usage_chunk()))
        if new or ended or failure:
            yield new, bool(ended or failure)
        if ended or failure:
            return
