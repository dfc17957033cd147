"""Answers: what a client has of a request so far, and how that differs from the undisturbed answer."""

import time
from collections import defaultdict
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any

LONG_GAP_S = 0.25
"""Shorter gaps are not pauses."""


class RequestFailed(Exception):
    """The answer is an error."""


@dataclass(slots=True)
class Choice:
    """One of the answers to a request.

    Attributes:
        tokens: all that is told of each token but its probability.
        reason: why it ended; empty while it has not.
        whole: the text that the end repeats, where it does.
        times_s: when each token arrived (monotonic clock).
    """

    tokens: list[Any] = field(default_factory=list)
    text: str = ""
    reason: str = ""
    whole: str = ""
    times_s: list[float] = field(default_factory=list)

    def add(self, tokens: list[Any], text: str, reason: str | None, whole: str | None = None) -> None:
        self.tokens += tokens
        self.times_s += [time.monotonic()] * len(tokens)
        self.text += text
        self.reason = reason or self.reason
        self.whole = whole or self.whole

    @property
    def content(self) -> tuple[list[Any], str, str, str]:
        return self.tokens, self.text, self.reason, self.whole

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Return the begin and end of each pause."""
        return [pair for pair in pairwise(self.times_s) if pair[1] - pair[0] > LONG_GAP_S]


@dataclass(slots=True)
class Answer:
    """The choices of one request, by index.

    Attributes:
        job_id: where it is a job.
        num_cuts: how often its stream broke off, and the client came back or tried to.
    """

    job_id: str = ""
    num_cuts: int = 0
    choices: defaultdict[int, Choice] = field(default_factory=lambda: defaultdict(Choice))

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices.values())

    def ended(self, num_choices: int) -> bool:
        return sum(bool(choice.reason) for choice in self.choices.values()) == num_choices

    def add_frame(self, frame: dict[str, Any]) -> None:
        """Add a frame of any route. Raises RequestFailed for an error."""
        if "error" in frame:
            raise RequestFailed(str(frame))
        if "token" in frame:
            self.add_tgi(frame)
        for choice in frame.get("choices", []):
            self.add_openai(choice)

    def add_tgi(self, frame: dict[str, Any]) -> None:
        token, details = frame["token"], frame["details"]
        told = (frame["index"], token["id"], token["text"])
        reason = details and details["finish_reason"]
        self.choices[0].add([told], token["text"], reason, frame["generated_text"])

    def add_openai(self, choice: dict[str, Any]) -> None:
        text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        logprobs = choice.get("logprobs") or {}
        tokens = logprobs.get("tokens") or [token["bytes"] for token in logprobs.get("content") or []]
        self.choices[choice["index"]].add(tokens, text, choice["finish_reason"])

    def add_whole(self, answer: dict[str, Any]) -> None:
        """Add an answer that is not streamed. Raises RequestFailed for an error."""
        if "error" in answer:
            raise RequestFailed(str(answer))
        told = [(i, token["id"], token["text"]) for i, token in enumerate(answer["details"]["tokens"], 1)]
        text = answer["generated_text"]
        self.choices[0].add(told, text, answer["details"]["finish_reason"], text)


@dataclass(frozen=True, slots=True)
class Difference:
    """How an answer differs from the undisturbed one."""

    num_lost: int
    num_added: int
    text: str


def compare(answer: Answer, expected: Answer, is_cut: bool) -> Difference | None:
    """Return the first choice that is wrong. A choice of a cut answer must be the beginning of the expected
    one.
    """
    for index, right in expected.choices.items():
        found = answer.choices[index]
        count = len(found.tokens)
        if is_cut and not found.reason:
            if found.tokens != right.tokens[:count] or not right.text.startswith(found.text):
                return differ(index, found, right.tokens[:count])
        elif found.content != right.content:
            return differ(index, found, right.tokens)
    return None


def differ(index: int, found: Choice, tokens: list[Any]) -> Difference:
    matcher = SequenceMatcher(None, list(map(str, tokens)), list(map(str, found.tokens)), autojunk=False)
    changes = [change for change in matcher.get_opcodes() if change[0] != "equal"]
    num_lost = sum(last - first for _, first, last, _, _ in changes)
    num_added = sum(last - first for _, _, _, first, last in changes)
    where = f" from token {changes[0][1]} on" if changes else ""
    return Difference(
        num_lost,
        num_added,
        f"choice {index} has {len(found.tokens)} tokens ({found.reason or 'not ended'}) of {len(tokens)}; "
        f"{num_lost} lost, {num_added} that are not its own{where}",
    )
