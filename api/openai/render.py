"""Response objects of OpenAI's routes: what chats and completions have in common."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

from api.inference.stream import Stream
from api.json import to_json
from api.openai.choice import Choice, TextPiece
from api.openai.request_schemas import OpenAIRequest
from api.openai.token_bytes import token_bytes

FINGERPRINT = f"tokenfleet-{version('tokenfleet')}"
LEAST_LOGPROB = -9999.0
"""OpenAI's value for an impossible token, because JSON has no minus infinity."""


class ResponseRenderer(ABC):
    """Renders the choices of one request, as a whole or in chunks.

    Attributes:
        num_prompt_tokens: tokens of all prompts, each counted once.
    """

    prefix: str
    whole_kind: str
    chunk_kind: str

    def __init__(self, body: OpenAIRequest, request_id: str, model: str, choices: Sequence[Choice]) -> None:
        options = body.stream_options
        self.shows_usage = bool(options and options.include_usage)
        self.shows_usage_always = bool(self.shows_usage and options and options.continuous_usage_stats)
        self.choices = choices
        self.num_prompt_tokens = sum(len(choice.stream.prompt_ids) for choice in choices[:: body.n or 1])
        self.id = f"{self.prefix}-{request_id}"
        self.created = int(time.time())
        self.model = model

    def render_whole(self) -> bytes:
        """The whole response, once all choices have finished."""
        choices = []
        for choice in self.choices:
            text = choice.prefix + "".join(piece.text for piece in choice.take_pieces())
            choices.append(
                {"index": choice.index, **self.render_choice(choice, text), **choice.render_ending}
            )
        return self.render_object(self.whole_kind, choices, {"usage": self.usage()})

    def render_chunks(self, choice: Choice) -> Iterator[bytes]:
        """Yields a chunk for each new piece of a choice."""
        begun = choice.started
        for piece in choice.take_pieces():
            if not begun and (first := self.render_first_delta(choice)):
                yield self.render_chunk([{"index": choice.index, **first, "finish_reason": None}])
            begun = True
            yield self.render_chunk(
                [{"index": choice.index, **self.render_delta(choice, piece), **choice.render_ending}]
            )

    def render_chunk(self, choices: list[dict[str, Any]]) -> bytes:
        usage = {"usage": self.usage() if self.shows_usage_always else None} if self.shows_usage else {}
        return self.render_object(self.chunk_kind, choices, usage)

    def render_usage_chunk(self) -> bytes:
        return self.render_object(self.chunk_kind, [], {"usage": self.usage()})

    def render_object(self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any]) -> bytes:
        about = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }
        return to_json({**about, "choices": choices, **usage})

    def usage(self) -> dict[str, int]:
        """Token counts; of the generated tokens, those that were sent."""
        completion = sum(choice.text.num_tokens for choice in self.choices)
        prompt = self.num_prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def prompt_logprobs(self, choice: Choice) -> dict[str, list[Any]] | None:
        """Log-probabilities of the prompt, if requested. The first call for a choice may take long."""
        return None

    @abstractmethod
    def render_choice(self, choice: Choice, text: str) -> dict[str, Any]:
        """The fields of a whole choice."""

    @abstractmethod
    def render_first_delta(self, choice: Choice) -> dict[str, Any]:
        """The fields of a chunk before the first token; empty for none."""

    @abstractmethod
    def render_delta(self, choice: Choice, piece: TextPiece) -> dict[str, Any]:
        """The fields of a chunk."""


# --- tokens -------------------------------------------------------------------------------------------------


def render_bytes(stream: Stream, token_id: int) -> bytes:
    """The bytes of a token."""
    return token_bytes(stream.tokenizer.backend, token_id)


def render_text(token: bytes) -> str:
    return token.decode(errors="replace")


def render_logprob(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
