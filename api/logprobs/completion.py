"""Log-probabilities as /v1/completions has them: four parallel lists."""

from collections.abc import Sequence
from typing import Any

from api.logprobs.tokens import finite, token_name
from api.streams.stream import Stream
from common.messages.records import TopTokens

LogprobLists = dict[str, list[Any]]


def completion_logprobs(
    stream: Stream,
    tokens: Sequence[tuple[int, float | None, TopTokens]],
    offsets: list[int],
    by_id: bool = False,
) -> LogprobLists:
    """The four lists for tokens, each with its id, log-probability and most likely alternatives. The token
    itself is always among the latter; the first token of a prompt has neither. `by_id` as in `token_name`.
    """
    return {
        "tokens": [token_name(stream, token_id, by_id) for token_id, _, _ in tokens],
        "token_logprobs": [None if logprob is None else finite(logprob) for _, logprob, _ in tokens],
        "top_logprobs": [
            None
            if logprob is None
            else {
                token_name(stream, other, by_id): finite(value)
                for other, value in (*top, (token_id, logprob))
            }
            for token_id, logprob, top in tokens
        ],
        "text_offset": offsets,
    }


def join_logprobs(first: LogprobLists | None, second: LogprobLists) -> LogprobLists:
    return second if first is None else {name: first[name] + second[name] for name in second}
