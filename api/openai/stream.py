"""The chunks of a stream on OpenAI's routes."""

from functools import partial

from api.errors import failed, openai
from api.event_loop.feed import MAX_ITEMS, Change, Feed, MappedFeed
from api.event_loop.offload import offload
from api.json import to_json
from api.openai.render import ChoicesRenderer

NO_CHOICE = -1
"""Index of chunks that belong to no choice: usage and errors."""


def stream_bodies(renderer: ChoicesRenderer) -> Feed[bytes]:
    """The bodies of the frames; the last is `[DONE]`."""
    return MappedFeed(ChunkFeed(renderer), lambda chunk: chunk[1], [b"[DONE]"])


class ChunkFeed(Feed[tuple[int, bytes]]):
    """Chunks, each with the index of its choice, until all choices have ended or one has failed.

    Choices take turns, a piece each, until they end: the order of all chunks follows from the tokens alone.
    """

    def __init__(self, renderer: ChoicesRenderer) -> None:
        super().__init__(Change())
        self.renderer = renderer
        self.turns = list(renderer.choices)
        for choice in renderer.choices:
            choice.stream.changed = self.changed

    @property
    def is_prepared(self) -> bool:
        """Whether no prompt's log-probabilities are still to be rendered."""
        return all(choice.begun or choice.stream.request.prompt_logprobs is None for choice in self.turns)

    async def prepare(self) -> None:
        for choice in self.turns:
            if choice.stream.num_tokens and not choice.begun:
                num_records = choice.stream.prompt.num_records
                await offload(num_records, partial(self.renderer.echoed_logprobs, choice))

    def take(self) -> list[tuple[int, bytes]]:
        new: list[tuple[int, bytes]] = []
        while self.has_piece:
            choice = self.turns.pop(0)
            new += [(choice.index, chunk) for chunk in self.renderer.render_next_chunks(choice)]
            if not choice.ended:
                self.turns.append(choice)
            if len(new) >= MAX_ITEMS:
                return new
        return [*new, *self.take_end()]

    @property
    def has_piece(self) -> bool:
        return bool(self.turns) and self.turns[0].has_piece

    def take_end(self) -> list[tuple[int, bytes]]:
        """What comes behind the last piece, if that was taken."""
        if not self.turns:
            self.ended = True
            shows_usage = self.renderer.answer.rendering.usage
            return [(NO_CHOICE, self.renderer.render_usage_chunk())] if shows_usage else []
        failure = self.turns[0].stream.terminal if self.turns[0].failed else None
        if failure is None:
            return []
        self.ended = True
        return [(NO_CHOICE, to_json(openai(failed(failure))[1]))]
