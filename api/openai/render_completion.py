"""Response objects of /v1/completions."""

from collections.abc import Sequence
from typing import Any

from api.inference.stream import Stream
from api.openai.choice import Choice, TextPiece
from api.openai.echo import prompt_offsets
from api.openai.render import ResponseRenderer, join_text, render_bytes, render_logprob, render_text
from common.messages.answer import HttpAnswer
from common.messages.records import TopTokens

LogprobLists = dict[str, list[Any]]
"""Log-probabilities in the older format: four parallel lists."""


class CompletionRenderer(ResponseRenderer):
    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, answer: HttpAnswer, streams: Sequence[Stream]) -> None:
        super().__init__(answer, streams)
        self.prompts: dict[int, LogprobLists] = {}

    def render_choice(self, choice: Choice, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        own = self.logprobs(choice, range(choice.text.num_tokens))
        logprobs = own and join_logprobs(self.prompt_logprobs(choice), own)
        return {"text": join_text(choice, pieces), "logprobs": logprobs}

    def render_first_delta(self, choice: Choice) -> dict[str, Any]:
        logprobs = self.prompt_logprobs(choice)
        return {"text": choice.prefix, "logprobs": logprobs} if choice.prefix or logprobs else {}

    def render_deltas(self, choice: Choice, piece: TextPiece) -> list[dict[str, Any]]:
        return [{"text": piece.text, "logprobs": self.logprobs(choice, piece.tokens)}]

    def logprobs(self, choice: Choice, tokens: Sequence[int]) -> LogprobLists | None:
        if not self.answer.rendering.logprobs:
            return None
        stream = choice.stream
        tops = [stream.tops[i] if stream.tops else [] for i in tokens]
        described = [(stream.ids[i], stream.logprobs[i], top) for i, top in zip(tokens, tops, strict=True)]
        return render_logprobs(stream, described, [choice.offsets[i] for i in tokens])

    def prompt_logprobs(self, choice: Choice) -> LogprobLists | None:
        stream = choice.stream
        if stream.prompt.records is not None and choice.index not in self.prompts:
            self.prompts[choice.index] = render_logprobs(
                stream, stream.prompt.tokens(), prompt_offsets(stream, choice.prefix)
            )
        return self.prompts.get(choice.index)


def render_logprobs(
    stream: Stream, tokens: Sequence[tuple[int, float | None, TopTokens]], offsets: list[int]
) -> LogprobLists:
    """The four lists for tokens, each with its id, log-probability and most likely alternatives. The token
    itself is always among the latter; the first token of a prompt has neither.
    """
    return {
        "tokens": [render_token_text(stream, token_id) for token_id, _, _ in tokens],
        "token_logprobs": [None if logprob is None else render_logprob(logprob) for _, logprob, _ in tokens],
        "top_logprobs": [
            None if logprob is None else render_top_logprobs(stream, token_id, logprob, top)
            for token_id, logprob, top in tokens
        ],
        "text_offset": offsets,
    }


def join_logprobs(first: LogprobLists | None, second: LogprobLists) -> LogprobLists:
    return second if first is None else {name: first[name] + second[name] for name in second}


def render_top_logprobs(stream: Stream, token_id: int, logprob: float, top: TopTokens) -> dict[str, float]:
    return {render_token_text(stream, other): render_logprob(value) for other, value in top} | {
        render_token_text(stream, token_id): render_logprob(logprob)
    }


def render_token_text(stream: Stream, token_id: int) -> str:
    return render_text(render_bytes(stream, token_id))
