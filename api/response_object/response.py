"""Response: the object of the Responses API, and its events, as a function of the answer and its tokens."""

from collections.abc import Iterable
from typing import Any

import orjson

from api.errors import failed
from api.inference.stream import Stream
from api.openai.choice import new_choices
from api.openai.render_chat import render_token_logprob
from api.response_object.items import Event, Item, Logprobs, MessageItem
from common.messages.answer import HttpAnswer

ENDS = {"completed": "response.completed", "incomplete": "response.incomplete"}
"""Last events by status; any other end is a failure."""
SUPERSEDED = "superseded"


def response_id(request_id: str) -> str:
    return f"resp_{request_id}"


class ResponsesRenderer:
    """One response: what its stream has is taken piece by piece.

    Attributes:
        output: its items, the last of which may be open.
        untold: log-probabilities of tokens that have not shown any text yet.
        ended: whether everything was taken.
    """

    def __init__(self, answer: HttpAnswer, stream: Stream) -> None:
        assert answer.response is not None
        self.answer = answer
        self.stream = stream
        self.fields: dict[str, Any] = orjson.loads(answer.response.fields)
        [self.choice] = new_choices(answer, [stream])
        self.output: list[MessageItem] = []
        self.untold: Logprobs = []
        self.ended = False

    # --- events ---------------------------------------------------------------------------------------------

    def begin(self) -> list[Event]:
        """The events before the first token."""
        status = "queued" if self.fields["background"] else "in_progress"
        kinds = ["created", "queued"] if self.fields["background"] else ["created"]
        first = [{"type": f"response.{kind}", "response": self.render(status)} for kind in kinds]
        return [*first, {"type": "response.in_progress", "response": self.render("in_progress")}]

    @property
    def has_more(self) -> bool:
        """Whether there is a piece, or an end, to take."""
        return not self.ended and (self.choice.has_piece or self.choice.failed)

    def take(self) -> list[Event]:
        """Take the next piece, or the end. Returns its events, which may be none."""
        if not self.choice.has_piece:
            self.ended = True
            return [self.failure_event()]
        piece = self.choice.take_piece()
        events = self.add_text(piece.text, self.logprobs(piece.tokens))
        if self.choice.ended:
            self.ended = True
            events += self.end_items()
            events.append({"type": ENDS[self.status], "response": self.render(self.status)})
        return events

    def add_text(self, text: str, logprobs: Logprobs) -> list[Event]:
        """Text of a message. A token that shows no text of its own has no event."""
        self.untold += logprobs
        if not text:
            return []
        logprobs, self.untold = self.untold, []
        return [*self.open_message(), *self.output[-1].add(text, logprobs)]

    def open_message(self) -> list[Event]:
        if self.output:
            return []
        self.output.append(MessageItem(self.answer.request_id, len(self.output)))
        return self.output[-1].begin()

    def end_items(self) -> list[Event]:
        """End the last item; an answer without any text has an empty message."""
        opened = self.open_message()
        return opened + self.output[-1].end("completed" if self.status == "completed" else "incomplete")

    def failure_event(self) -> Event:
        assert self.stream.terminal is not None
        if self.stream.terminal.error_type == SUPERSEDED:
            return {"type": "error", "code": SUPERSEDED, "message": self.stream.terminal.error, "param": None}
        return {"type": "response.failed", "response": self.render(self.status)}

    # --- the object -----------------------------------------------------------------------------------------

    def render_so_far(self) -> dict[str, Any]:
        """The response with what its stream has."""
        while self.has_more:
            self.take()
        return self.render(self.status)

    @property
    def status(self) -> str:
        terminal = self.stream.terminal
        if terminal is None:
            return "in_progress" if self.stream.ids or self.stream.worker else "queued"
        if self.stream.finished:
            return "incomplete" if terminal.reason == "length" else "completed"
        return "cancelled" if terminal.reason == "cancelled" else "failed"

    def render(self, status: str) -> dict[str, Any]:
        """The response as it is now."""
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": response_id(self.answer.request_id),
            "object": "response",
            "created_at": self.answer.created_s,
            "status": status,
            "error": self.error() if status == "failed" else None,
            "incomplete_details": incomplete,
            "model": self.answer.model,
            "output": self.items(),
            **self.fields,
            "usage": self.usage() if status in ENDS else None,
        }

    def items(self) -> list[Item]:
        return [item.render() for item in self.output]

    def error(self) -> dict[str, Any]:
        assert self.stream.terminal is not None
        return {"code": "server_error", "message": failed(self.stream.terminal).text}

    def usage(self) -> dict[str, Any]:
        """Token counts; of the generated tokens, those that were taken."""
        num_input, num_output = self.answer.num_prompt_tokens, self.choice.text.num_tokens
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_input + num_output,
        }

    def logprobs(self, tokens: Iterable[int]) -> Logprobs:
        if not self.answer.rendering.logprobs:
            return []
        stream = self.stream
        return [
            render_token_logprob(stream, stream.ids[i], stream.logprobs[i])
            | {
                "top_logprobs": [
                    render_token_logprob(stream, token_id, logprob)
                    for token_id, logprob in (stream.tops[i] if stream.tops else [])
                ]
            }
            for i in tokens
        ]
