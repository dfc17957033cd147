"""Output items: the items of a response, built from pieces of text, with their events."""

from abc import ABC, abstractmethod
from typing import Any

from api.answers.chat_answer import is_json_text

Event = dict[str, Any]
"""An event of a stream, without its sequence number."""
Item = dict[str, Any]
Logprobs = list[dict[str, Any]]


class OutputItem(ABC):
    """An item while it is made.

    Attributes:
        index: its position in the output.
        text: so far: of the message or the reasoning, or the arguments of the call.
        status: `in_progress`, `completed` or `incomplete`.
    """

    id_prefix: str

    def __init__(self, request_id: str, index: int) -> None:
        self.index = index
        self.id = item_id(self.id_prefix, request_id, index)
        self.text = ""
        self.status = "in_progress"

    def begin(self) -> list[Event]:
        return [self.whole_event("response.output_item.added")]

    def finish(self, status: str) -> list[Event]:
        """End the item. Returns its last events."""
        self.status = status
        return [*self.done_events(), self.whole_event("response.output_item.done")]

    def whole_event(self, kind: str) -> Event:
        return {"type": kind, "output_index": self.index, "item": self.render()}

    def event(self, kind: str, **more: Any) -> Event:
        return {"type": kind, "item_id": self.id, "output_index": self.index, **more}

    @abstractmethod
    def add(self, text: str, logprobs: Logprobs | None = None) -> list[Event]:
        """Add text; only a message has log-probabilities."""

    @abstractmethod
    def done_events(self) -> list[Event]:
        """The events between the last delta and the end of the item."""

    @abstractmethod
    def render(self) -> Item:
        """The item as it is now."""


class MessageItem(OutputItem):
    """The answer's text."""

    id_prefix = "msg"

    def __init__(self, request_id: str, index: int) -> None:
        super().__init__(request_id, index)
        self.begun = False
        self.logprobs: Logprobs = []

    def begin(self) -> list[Event]:
        added = super().begin()
        self.begun = True
        return [*added, self.event("response.content_part.added", content_index=0, part=self.part())]

    def add(self, text: str, logprobs: Logprobs | None = None) -> list[Event]:
        self.text += text
        logprobs = logprobs or []
        self.logprobs += logprobs
        return [self.event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)]

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


class ReasoningItem(OutputItem):
    """The model's reasoning.

    Attributes:
        is_summary: it is shown as its own summary, because the client asked for one.
    """

    id_prefix = "rs"

    def __init__(self, request_id: str, index: int, is_summary: bool) -> None:
        super().__init__(request_id, index)
        self.is_summary = is_summary
        self.kind = "reasoning_summary_text" if is_summary else "reasoning_text"
        self.part_kind = "reasoning_summary_part" if is_summary else "content_part"
        self.place = {"summary_index": 0} if is_summary else {"content_index": 0}
        self.begun = False

    def begin(self) -> list[Event]:
        added = super().begin()
        self.begun = True
        return [*added, self.event(f"response.{self.part_kind}.added", **self.place, part=self.part())]

    def add(self, text: str, logprobs: Logprobs | None = None) -> list[Event]:
        self.text += text
        return [self.event(f"response.{self.kind}.delta", **self.place, delta=text)]

    def done_events(self) -> list[Event]:
        return [
            self.event(f"response.{self.kind}.done", **self.place, text=self.text),
            self.event(f"response.{self.part_kind}.done", **self.place, part=self.part()),
        ]

    def part(self) -> dict[str, Any]:
        return {"type": "summary_text" if self.is_summary else "reasoning_text", "text": self.text}

    def render(self) -> Item:
        parts = [self.part()] if self.begun else []
        summary, content = (parts, []) if self.is_summary else ([], parts)
        return {
            "id": self.id,
            "type": "reasoning",
            "status": self.status,
            "summary": summary,
            "content": content,
            "encrypted_content": None,
        }


class CallItem(OutputItem):
    """A call of a function; its text is the arguments, in JSON."""

    id_prefix = "fc"

    def __init__(self, request_id: str, index: int, call_id: str, name: str) -> None:
        super().__init__(request_id, index)
        self.call_id = call_id
        self.name = name

    def add(self, text: str, logprobs: Logprobs | None = None) -> list[Event]:
        self.text += text
        return [self.event("response.function_call_arguments.delta", delta=text)]

    def finish(self, status: str) -> list[Event]:
        return super().finish(status if is_json_text(self.text) else "incomplete")

    def done_events(self) -> list[Event]:
        """The arguments of an incomplete call are never done: clients would run the call."""
        if self.status != "completed":
            return []
        return [self.event("response.function_call_arguments.done", name=self.name, arguments=self.text)]

    def render(self) -> Item:
        return {
            "id": self.id,
            "type": "function_call",
            "status": self.status,
            "arguments": self.text,
            "call_id": self.call_id,
            "name": self.name,
        }


def item_id(prefix: str, request_id: str, position: int | str) -> str:
    """Id of an item; its position is a number in the output, or `i` and a number in the input."""
    return f"{prefix}_{request_id}_{position}"
