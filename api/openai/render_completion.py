"""Response objects of /v1/completions."""

from collections.abc import Sequence
from typing import Any

from api.logprobs.render import LogprobLists, completion_logprobs, join_logprobs
from api.openai.choice import Choice, TextPiece
from api.openai.echo import prompt_offsets
from api.openai.render import ChoicesRenderer, join_text
from api.streams.stream import Stream
from common.messages.answer import HttpAnswer


class CompletionRenderer(ChoicesRenderer):
    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, answer: HttpAnswer, streams: Sequence[Stream]) -> None:
        super().__init__(answer, streams)
        self.echoed: dict[int, LogprobLists] = {}

    def render_choice(self, choice: Choice, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        tokens = range(choice.text.num_tokens)
        own = self.logprobs(choice, tokens)
        logprobs = own and join_logprobs(self.echoed_logprobs(choice), own)
        added = self.token_ids(choice.stream, tokens) | self.prompt_ids(choice) | self.prompt_logprobs(choice)
        return {"text": join_text(choice, pieces), "logprobs": logprobs, **added}

    def render_first_delta(self, choice: Choice) -> dict[str, Any]:
        ids = self.prompt_ids(choice)
        if not (choice.prefix or ids):
            return {}
        none_yet = self.token_ids(choice.stream, range(0))
        return {"text": choice.prefix, "logprobs": self.echoed_logprobs(choice), **ids, **none_yet}

    def render_deltas(self, choice: Choice, piece: TextPiece) -> list[dict[str, Any]]:
        ids = self.token_ids(choice.stream, piece.tokens)
        return [{"text": piece.text, "logprobs": self.logprobs(choice, piece.tokens), **ids}]

    def logprobs(self, choice: Choice, tokens: Sequence[int]) -> LogprobLists | None:
        shows, stream = self.answer.rendering, choice.stream
        if not shows.logprobs:
            return None
        tops = [stream.tops[i] if stream.tops else [] for i in tokens]
        described = [(stream.ids[i], stream.logprobs[i], top) for i, top in zip(tokens, tops, strict=True)]
        return completion_logprobs(stream, described, [choice.offsets[i] for i in tokens], shows.names_by_id)

    def echoed_logprobs(self, choice: Choice) -> LogprobLists | None:
        shows, stream = self.answer.rendering, choice.stream
        is_wanted = shows.logprobs and choice.prefix and stream.prompt.records is not None
        if is_wanted and choice.index not in self.echoed:
            num_tops = stream.request.top_n_tokens
            tokens = [(one, logprob, top[:num_tops]) for one, logprob, top in stream.prompt.tokens()]
            self.echoed[choice.index] = completion_logprobs(
                stream, tokens, prompt_offsets(stream, choice.prefix), shows.names_by_id
            )
        return self.echoed.get(choice.index)
