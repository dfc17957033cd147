"""The chunks of a stream on OpenAI's routes."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial

from api.errors import failed, openai
from api.http.sse import MAX_FRAMES
from api.json import to_json
from api.offload import offload
from api.openai.choice import Choice
from api.openai.render import ResponseRenderer

NO_CHOICE = -1
"""Index of chunks that belong to no choice: usage and errors."""


async def stream_bodies(renderer: ResponseRenderer) -> AsyncIterator[list[bytes]]:
    """Yields the bodies of the frames as they come; the last is `[DONE]`."""
    async for chunks, ended in chunk_updates(renderer):
        yield [chunk for _, chunk in chunks] + [b"[DONE]"] * ended


async def chunk_updates(renderer: ResponseRenderer) -> AsyncIterator[tuple[list[tuple[int, bytes]], bool]]:
    """Yields (new chunks, each with the index of its choice; whether they are the last), until all choices
    have ended or one has failed. There are about MAX_FRAMES at a time: other streams go on in between.

    Choices take turns, a piece each, until they end: the order of all chunks follows from the tokens alone.
    """
    changed = asyncio.Event()
    changed.set()
    for choice in renderer.choices:
        choice.stream.changed = changed
    turns = list(renderer.choices)
    while True:
        await changed.wait()
        changed.clear()
        for choice in turns:
            if choice.stream.num_tokens and not choice.begun:
                await offload(choice.stream.prompt.num_records, partial(renderer.echoed_logprobs, choice))
        new: list[tuple[int, bytes]] = []
        while turns and turns[0].has_piece and len(new) < MAX_FRAMES:
            new += take_turn(renderer, turns)
        if turns and turns[0].has_piece:
            changed.set()
            yield new, False
            await asyncio.sleep(0)
            continue
        failure = turns[0].stream.terminal if turns and turns[0].failed else None
        if failure:
            new.append((NO_CHOICE, to_json(openai(failed(failure))[1])))
        elif not turns and renderer.answer.rendering.usage:
            new.append((NO_CHOICE, renderer.render_usage_chunk()))
        ended = bool(failure or not turns)
        if new or ended:
            yield new, ended
        if ended:
            return


def take_turn(renderer: ResponseRenderer, turns: list[Choice]) -> list[tuple[int, bytes]]:
    """The next chunks of the choice whose turn it is; unless it has ended, the choice goes to the end."""
    choice = turns.pop(0)
    chunks = renderer.render_next_chunks(choice)
    if not choice.ended:
        turns.append(choice)
    return [(choice.index, chunk) for chunk in chunks]
