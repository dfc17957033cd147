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
"""In place of a choice: a chunk that is of no single one."""


async def stream_frames(answer: ResponseRenderer) -> AsyncIterator[bytes]:
    """All chunks, as they come; then `[DONE]`."""
    async for chunks, ended in news(answer):
        yield b"".join([frame(chunk) for _, chunk in chunks] + [DONE] * ended)


async def news(answer: ResponseRenderer) -> AsyncIterator[tuple[list[tuple[int, bytes]], bool]]:
    """(new chunks, each with the index of its choice; whether these are the last), up to the end of the last
    choice or the error of the first that fails.
    """
    changed = asyncio.Event()
    changed.set()
    for choice in answer.choices:
        choice.stream.changed = changed
    while True:
        await changed.wait()
        changed.clear()
        for choice in answer.choices:
            if choice.stream.num_tokens and not choice.started:
                await offload(choice.stream.num_prompt_records, partial(answer.prompt_logprobs, choice))
        new = [(choice.index, chunk) for choice in answer.choices for chunk in answer.render_chunks(choice)]
        ended = all(choice.ended for choice in answer.choices)
        failure = next((choice.stream.terminal for choice in answer.choices if choice.failed), None)
        if failure:
            new.append((NO_CHOICE, to_json(openai(failed(failure))[1])))
        elif ended and answer.shows_usage:
            new.append((NO_CHOICE, answer.render_usage_chunk()))
        if new or ended or failure:
            yield new, bool(ended or failure)
        if ended or failure:
            return
