"""Response objects of OpenAI's routes: what chats and completions have in common."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from api.json import to_json
from api.logprobs.render import prompt_logprobs
from api.openai.choice import Choice, TextPiece, new_choices
from api.streams.stream import Stream
from common.messages.answer import HttpAnswer

NO_FIELDS: Mapping[str, Any] = {}
NO_ENDING = {"finish_reason": None, "stop_reason": None}


class ChoicesRenderer(ABC):
    """Renders the choices of one answer, as a whole or in chunks: each chunk once, in order."""

    prefix: str
    whole_kind: str
    chunk_kind: str

    def __init__(self, answer: HttpAnswer, streams: Sequence[Stream]) -> None:
        self.answer = answer
        self.choices = new_choices(answer, streams)
        self.chunk_head = self.render_head(self.chunk_kind)

    def render_whole(self) -> bytes:
        """The whole response, once all choices have finished."""
        choices = []
        for choice in self.choices:
            pieces = []
            while choice.has_piece:
                pieces.append(choice.take_piece())
            fields = self.render_choice(choice, pieces)
            choices.append({"index": choice.index, **fields, **self.render_ending(choice)})
        fields = {"usage": self.final_usage(), **self.whole_fields()}
        return render_object(self.render_head(self.whole_kind), choices, fields)

    def render_next_chunks(self, choice: Choice) -> list[bytes]:
        """The next chunks of a choice that has a piece: of it, or the one before the first piece. None
        where the piece says nothing yet.
        """
        if not choice.begun and (first := self.render_first_delta(choice)):
            choice.begun = True
            fields = {"index": choice.index, **first, "finish_reason": None}
            return [self.render_chunk([fields], self.first_fields(choice))]
        deltas = self.render_deltas(choice, choice.take_piece())
        ending = self.render_ending(choice) if choice.ended else NO_ENDING
        last = len(deltas) - 1
        return [
            self.render_chunk([{"index": choice.index, **delta, **(ending if i == last else NO_ENDING)}])
            for i, delta in enumerate(deltas)
        ]

    def render_ending(self, choice: Choice) -> dict[str, Any]:
        """The fields `finish_reason` and `stop_reason`; null until the choice ends."""
        return {"finish_reason": choice.finish_reason, "stop_reason": choice.text.stop_reason}

    def render_chunk(self, choices: list[dict[str, Any]], fields: Mapping[str, Any] = NO_FIELDS) -> bytes:
        shows = self.answer.rendering
        if shows.usage:
            fields = {"usage": self.usage() if shows.running_usage else None, **fields}
        return render_object(self.chunk_head, choices, fields)

    def render_usage_chunk(self) -> bytes:
        return render_object(self.chunk_head, [], {"usage": self.final_usage()})

    def render_head(self, kind: str) -> bytes:
        """What the chunks of an answer begin with, up to their choices: it is encoded once."""
        about = {
            "id": f"{self.prefix}-{self.answer.request_id}",
            "object": kind,
            "created": self.answer.created_s,
            "model": self.answer.model,
            "system_fingerprint": self.answer.fingerprint,
        }
        return to_json(about)[:-1] + b',"choices":'

    def usage(self) -> dict[str, Any]:
        """Token counts; of the generated tokens, those that were sent."""
        completion = sum(choice.text.num_tokens for choice in self.choices)
        prompt = self.answer.num_prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def final_usage(self) -> dict[str, Any]:
        """Token counts, once all choices have ended. A prompt is computed for its first choice."""
        num_cached = sum(choice.stream.prompt.num_cached for choice in self.choices[:: self.answer.n])
        return {**self.usage(), "prompt_tokens_details": {"cached_tokens": num_cached}}

    def echoed_logprobs(self, choice: Choice) -> dict[str, list[Any]] | None:
        """Log-probabilities of the echoed prompt, if requested. The first call for a choice may take long."""
        return None

    def whole_fields(self) -> dict[str, Any]:
        """Fields of a whole answer beside its choices."""
        return {}

    def first_fields(self, choice: Choice) -> dict[str, Any]:
        """Fields of the chunk before a choice's first token, beside the choice."""
        return {}

    # --- additions of vLLM ----------------------------------------------------------------------------------

    def prompt_ids(self, choice: Choice) -> dict[str, Any]:
        """The field of the prompt's token ids, if requested."""
        return {"prompt_token_ids": choice.stream.prompt_ids} if self.answer.rendering.token_ids else {}

    def token_ids(self, stream: Stream, tokens: range) -> dict[str, Any]:
        """The field of the ids of generated tokens, if requested."""
        return (
            {"token_ids": stream.ids[tokens.start : tokens.stop]} if self.answer.rendering.token_ids else {}
        )

    def prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        """The field of the prompt's log-probabilities, if requested."""
        num_tops = self.answer.rendering.prompt_tops
        return {} if num_tops is None else {"prompt_logprobs": prompt_logprobs(choice.stream, num_tops)}

    # --- of each API ----------------------------------------------------------------------------------------

    @abstractmethod
    def render_choice(self, choice: Choice, pieces: Sequence[TextPiece]) -> dict[str, Any]:
        """The fields of a whole choice."""

    @abstractmethod
    def render_first_delta(self, choice: Choice) -> dict[str, Any]:
        """The fields of a chunk before the first token; empty for none."""

    @abstractmethod
    def render_deltas(self, choice: Choice, piece: TextPiece) -> list[dict[str, Any]]:
        """The fields of each chunk of a piece."""


def render_object(head: bytes, choices: list[dict[str, Any]], fields: Mapping[str, Any]) -> bytes:
    """The JSON object of a head, choices, and the fields behind these."""
    return b"%b%b%b" % (head, to_json(choices), b"," + to_json(fields)[1:] if fields else b"}")


def join_text(choice: Choice, pieces: Sequence[TextPiece]) -> str:
    return choice.prefix + "".join(piece.text for piece in pieces)
