"""The objects of /v1/completions."""

from collections.abc import Sequence
from typing import Any

from api.inference.stream import Stream
from api.openai.choice import Choice, Piece
from api.openai.echo import offsets
from api.openai.render import Answer, readable, spelled, told_logprob
from api.openai.request_schemas import CompletionRequest
from common.broker.committed import Top

Lists = dict[str, list[Any]]
"""Log-probabilities of the older kind: four parallel lists."""


class CompletionAnswer(Answer):
    prefix, whole_kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, body: CompletionRequest, request_id: str, model: str, choices: Sequence[Choice]
    ) -> None:
        super().__init__(body, request_id, model, choices)
        self.shows_logprobs = body.logprobs is not None
        self.prompts: dict[int, Lists] = {}

    def told(self, choice: Choice, text: str) -> dict[str, Any]:
        own = self.logprobs(choice, range(choice.text.num_tokens))
        return {"text": text, "logprobs": own and joined(self.of_prompt(choice), own)}

    def first(self, choice: Choice) -> dict[str, Any]:
        told = self.of_prompt(choice)
        return {"text": choice.prefix, "logprobs": told} if choice.prefix or told else {}

    def added(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        return {"text": piece.text, "logprobs": self.logprobs(choice, piece.tokens)}

    def logprobs(self, choice: Choice, tokens: Sequence[int]) -> Lists | None:
        if not self.shows_logprobs:
            return None
        stream = choice.stream
        tops = [stream.tops[i] if stream.tops else [] for i in tokens]
        told = [(stream.ids[i], stream.logprobs[i], top) for i, top in zip(tokens, tops, strict=True)]
        return lists(stream, told, [choice.offsets[i] for i in tokens])

    def of_prompt(self, choice: Choice) -> Lists | None:
        stream = choice.stream
        if stream.prompt is not None and choice.index not in self.prompts:
            self.prompts[choice.index] = lists(stream, stream.prompt_tokens(), offsets(stream, choice.prefix))
        return self.prompts.get(choice.index)


def lists(stream: Stream, told: Sequence[tuple[int, float | None, Top]], offsets: list[int]) -> Lists:
    """Of tokens: id, log-probability, likeliest ones. The token itself is always among these; of a prompt's
    first one nothing is known.
    """
    return {
        "tokens": [word(stream, token_id) for token_id, _, _ in told],
        "token_logprobs": [None if logprob is None else told_logprob(logprob) for _, logprob, _ in told],
        "top_logprobs": [
            None if logprob is None else likeliest(stream, token_id, logprob, top)
            for token_id, logprob, top in told
        ],
        "text_offset": offsets,
    }


def joined(first: Lists | None, second: Lists) -> Lists:
    return second if first is None else {name: first[name] + second[name] for name in second}


def likeliest(stream: Stream, token_id: int, logprob: float, top: Top) -> dict[str, float]:
    return {word(stream, other): told_logprob(value) for other, value in top} | {
        word(stream, token_id): told_logprob(logprob)
    }


def word(stream: Stream, token_id: int) -> str:
    return readable(spelled(stream, token_id))
