"""Response objects of OpenAI's routes: what chats and completions have in common."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from api.inference.stream import Stream
from api.json import to_json
from api.openai.choice import Choice, TextPiece, new_choices
from api.openai.token_bytes import token_bytes
from common.messages.answer import HttpAnswer

LEAST_LOGPROB = -9999.0
"""OpenAI's value for an impossible token, because JSON has no minus infinity."""


class ResponseRenderer(ABC):
    """Renders the choices of one answer, as a whole or in chunks: each chunk once, in order."""

    prefix: str
    whole_kind: str
    chunk_kind: str

    def __init__(self, answer: HttpAnswer, streams: Sequence[Stream]) -> None:
        self.answer = answer
        self.choices = new_choices(answer, streams)

    def render_whole(self) -> bytes:
        """The whole response, once all choices have finished."""
        choices = []
        for choice in self.choices:
            text = choice.prefix
            while choice.has_piece:
                text += choice.take_piece().text
            choices.append(
                {"index": choice.index, **self.render_choice(choice, text), **choice.render_ending}
            )
        return self.render_object(self.whole_kind, choices, {"usage": self.usage()})

    def render_next_chunk(self, choice: Choice) -> bytes:
        """The next chunk of a choice that has a piece: of that piece, or the one before the first piece."""
        if not choice.begun and (first := self.render_first_delta(choice)):
            choice.begun = True
            return self.render_chunk([{"index": choice.index, **first, "finish_reason": None}])
        piece = choice.take_piece()
        return self.render_chunk(
            [{"index": choice.index, **self.render_delta(choice, piece), **choice.render_ending}]
        )

    def render_chunk(self, choices: list[dict[str, Any]]) -> bytes:
        shows = self.answer.rendering
        usage = {"usage": self.usage() if shows.running_usage else None} if shows.usage else {}
        return self.render_object(self.chunk_kind, choices, usage)

    def render_usage_chunk(self) -> bytes:
        return self.render_object(self.chunk_kind, [], {"usage": self.usage()})

    def render_object(self, kind: str, choices: list[dict[str, Any]], usage: dict[str, Any]) -> bytes:
        about = {
            "id": f"{self.prefix}-{self.answer.request_id}",
            "object": kind,
            "created": self.answer.created_s,
            "model": self.answer.model,
            "system_fingerprint": self.answer.fingerprint,
        }
        return to_json({**about, "choices": choices, **usage})

    def usage(self) -> dict[str, int]:
        """Token counts; of the generated tokens, those that were sent."""
        completion = sum(choice.text.num_tokens for choice in self.choices)
        prompt = self.answer.num_prompt_tokens
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
