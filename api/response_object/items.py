"""Output items of a response: built from pieces of text, with the events that tell of them."""

from abc import ABC, abstractmethod
from typing import Any

Event = dict[str, Any]
"""An event of a stream, without its sequence number."""
Item = dict[str, Any]
Logprobs = list[dict[str, Any]]


class OutputItem(ABC):
    """An item while it is made.

    Attributes:
        index: its place in the output.
        text: of the message, of the reasoning, or the arguments of the call, so far.
        status: `in_progress`, `completed` or `incomplete`.
    """

    prefix: str

    def __init__(self, request_id: str, index: int) -> None:
        self.index = index
        self.id = item_id(self.prefix, request_id, index)
        self.text = ""
        self.status = "in_progress"

    def begin(self) -> list[Event]:
        return [self.whole_event("response.output_item.added")]

    def end(self, status: str) -> list[Event]:
        """End the item; further text is of another one."""
        self.status = status
        return [*self.done_events(), self.whole_event("response.output_item.done")]

    def whole_event(self, kind: str) -> Event:
        return {"type": kind, "output_index": self.index, "item": self.render()}

    def event(self, kind: str, **more: Any) -> Event:
        return {"type": kind, "item_id": self.id, "output_index": self.index, **more}

    @abstractmethod
    def done_events(self) -> list[Event]:
        """The events between the last delta and the end of the item."""

    @abstractmethod
    def render(self) -> Item:
        """The item as it is now."""


class MessageItem(OutputItem):
    """The answer's text."""

    prefix = "msg"

    def __init__(self, request_id: str, index: int) -> None:
        super().__init__(request_id, index)
        self.begun = False
        self.logprobs: Logprobs = []

    def begin(self) -> list[Event]:
        added = super().begin()
        self.begun = True
        return [*added, self.event("response.content_part.added", content_index=0, part=self.part())]

    def add(self, text: str, logprobs: Logprobs) -> list[Event]:
        self.text += text
        self.logprobs += logprobs
        return [
            self.event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs),
        ]

    def done_events(self) -> list[Event]:
        return [
            self.event("response.output_text.done", content_index=0, text=self.text, logprobs=self.logprobs),
            self.event("response.content_part.done", content_index=0, part=self.part()),
        ]

    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "annotations": [], "logprobs": [*self.logprobs], "text": self.text}

    def render(self) -> Item:
        return {
            "id": self.id,
            "type": "message",
            "status": self.status,
            "content": [self.part()] if self.begun else [],
            "role": "assistant",
        }


def item_id(prefix: str, request_id: str, place: int | str) -> str:
    """Id of an item of a response: of its output, or with another kind of place of its input."""
    return f"{prefix}_{request_id}_{place}"
