"""Log-probabilities of a prompt as vLLM has them (`prompt_logprobs`): objects by token id."""

from typing import Any

from api.logprobs.tokens import finite, token_name
from api.streams.stream import Stream

PromptLogprobs = list[dict[str, dict[str, Any]] | None]


def prompt_logprobs(stream: Stream, num_tops: int) -> PromptLogprobs:
    """For each token of the prompt: itself, and the `num_tops` likeliest tokens in its place; null for the
    first one. A token's rank is known where it is among these.
    """
    found: PromptLogprobs = []
    for token_id, logprob, top in stream.prompt.tokens():
        if logprob is None:
            found.append(None)
            continue
        ranked = [(other, value, rank) for rank, (other, value) in enumerate(top[:num_tops], 1)]
        rank = next((rank for other, _, rank in ranked if other == token_id), None)
        found.append(
            {
                str(other): {
                    "logprob": finite(value),
                    "rank": place,
                    "decoded_token": token_name(stream, other),
                }
                for other, value, place in [(token_id, logprob, rank), *ranked]
            }
        )
    return found
